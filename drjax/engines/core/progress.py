"""The report on a call: stages, blocks, lost workers and dropped groups; and its bar.

Input: the events of a call, of which both are observers. Output: a `Report`, which
prints itself as a table; a bar of the groups done.

Invariants: `dropped` has each group that was dropped in this call, or before it was
resumed, once.

Sharp edges: `lost` counts attempts, not blocks: a block that was lost twice is counted
twice.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from drjax._extras import needed
from drjax.engines.core.events import (
    BlockDone,
    CallEnded,
    CallStarted,
    Event,
    Retried,
    StageEnded,
    StageStarted,
)


@dataclass
class StageReport:
    """The report on one run of a round's local stage.

    Attributes:
      round: The location of the round, text: `2` is the plan's second round, and
        `2.scan.0.1` the first round in body 0 of the loop `scan` of round 2.
      stage: The name of the stage, text.
      groups: How many groups took part to the end, int.
      blocks: How many blocks workers have done, int.
      seconds: How long the stage took, float.
    """

    round: str
    stage: str
    groups: int = 0
    blocks: int = 0
    seconds: float = 0.0


@dataclass
class Report:
    """What ran in a call. Print it to read it.

    Attributes:
      stages: A `StageReport` for each run of a local stage, a list in order.
      workers: How many blocks each process has done, a `Counter` by process id.
      lost: Why blocks were lost and tried again, a list of text in order.
      dropped: Why groups were dropped, a dict from group index to reason.
      resumed: How many stages and steps of loops came from a checkpoint, int.
      seconds: How long the call took, float.
      busy: The seconds that workers took for blocks whose results count, float.
      possible: The seconds that the stages took, times the number of workers, those
        that are away included, float. `busy / possible` is the goodput.
    """

    stages: list[StageReport] = field(default_factory=list)
    workers: Counter[int] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    resumed: int = 0
    seconds: float = 0.0
    busy: float = 0.0
    possible: float = 0.0
    _workers: int = field(default=0, repr=False)

    def observe(self, event: Event) -> None:
        """Add an event of the call."""
        match event:
            case CallStarted():
                self.resumed, self._workers = event.resumed, event.workers
            case StageStarted():
                self.stages.append(StageReport(event.round, event.stage))
            case BlockDone():
                self.stages[-1].groups += event.groups
                self.busy += event.seconds
                if event.process:
                    self.stages[-1].blocks += 1
                    self.workers[event.process] += 1
            case Retried():
                self.lost.append(event.why)
            case StageEnded():
                self.stages[-1].seconds = event.seconds
                self.possible += self._workers * event.seconds
            case CallEnded():
                self.seconds = event.seconds

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [
            ("round", "stage", "groups", "blocks", "seconds")
        ]
        for stage in self.stages:
            # The last field is rounded; the others are printed as they are.
            *fields, seconds = dataclasses.astuple(stage)
            lines.append((*map(str, fields), f"{seconds:.3f}"))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        blocks = ", ".join(f"{pid}: {n}" for pid, n in sorted(self.workers.items()))
        text.append(
            f"{self.seconds:.3f} s; blocks by process: {blocks or 'none'}; "
            f"{len(self.lost)} lost and tried again"
        )
        if self.possible:
            text.append(f"goodput {self.busy / self.possible:.2f}")
        if self.resumed:
            text.append(f"{self.resumed} stages and steps from a checkpoint")
        text += [f"dropped group {g}: {why}" for g, why in sorted(self.dropped.items())]
        return "\n".join(text)


class Bar:
    """A bar, by tqdm, of the groups done in each stage."""

    def __init__(self) -> None:
        self._tqdm = needed("tqdm", "examples", "progress=True").tqdm
        self._bar: Any = None

    def __call__(self, event: Event) -> None:
        match event:
            case StageStarted():
                text, unit = f"round {event.round}", "group"
                self._bar = self._tqdm(
                    total=event.groups, desc=text, unit=unit, leave=False
                )
            case BlockDone():
                self._bar.update(event.groups)
            case StageEnded() | CallEnded():
                if self._bar is not None:
                    self._bar.close()
                self._bar = None
