"""What the blocks of one stage have returned so far, combined on the driver.

Input: blocks with their `BlockResult`s, in any order. Output: the reduced values of the
round, and the slices that later rounds read.

Invariants: a group counts once, and not at all once it was dropped. Slices of groups
without a result are NaN, or zero if they are no floats.

Sharp edges: `finish` may be called once, when all blocks are in.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drjax._errors import EngineError
from drjax.engines.core.combine import Totals, add, finish, ops_of
from drjax.engines.core.messages import Block, BlockResult
from drjax.engines.slices.slices import empty_slices
from drjax.engines.slices.worker_slices import Pieces, WorkerSlices
from drjax.plan import Fold, Plan, Round, Stage, Value

# Blocks whose partial reductions are combined at once: those of a few blocks are read
# once, and none of their totals is written.
_MOST = 4


class StageResults:
    """Combines the results of a stage's blocks as they arrive, on the driver.

    `kept` are the outputs of the stage that are read later, and `stay` says for each of
    them whether its slices stay with the workers; () if none do. If some do, `engine`
    is a `Keeping`. `fold(fold, states)` folds states, each a list of leaves `[*s]`, in
    their order, and returns the leaves of the result; it is called in `finish`.

    Attributes:
      groups: How many groups took part to the end.
      blocks: How many blocks workers have done.
      full_blocks: The results of full blocks, those of `block_size` groups, for their
        times: without partial reductions and slices.
    """

    def __init__(
        self,
        a_round: Round,
        kept: Sequence[Value],
        n: int,
        block_size: int,
        fold: Callable[[Fold, list[list[np.ndarray]]], list[np.ndarray]],
        stay: Sequence[bool] = (),
        engine: Any = None,
    ):
        self._round, self._fold = a_round, fold
        self._ops = ops_of(a_round)
        self._totals: Totals = [None] * len(self._ops)
        # Partial reductions of blocks that are not in the totals yet.
        self._waiting: list[Sequence[Any]] = []
        self._kept, self._stay = kept, stay or [False] * len(kept)
        self._slices = [
            empty_slices(value, n)
            for value, stays in zip(kept, self._stay, strict=True)
            if not stays
        ]
        self._engine, self._pieces = engine, []  # of what stays
        if any(self._stay):
            self._piece, self._position = np.full(n, -1), np.zeros(n, int)
        self._block_size = block_size
        self.groups = self.blocks = 0
        self.full_blocks: list[BlockResult] = []

    def add(self, block: Block, block_result: BlockResult, alive: np.ndarray) -> None:
        """Add the result of a block: combine partial reductions, and store slices.

        `alive`, bool `[n]`, is without the groups that failed in this block; groups
        that the block masks do not count either.
        """
        # A group that failed in this block itself is not alive any more.
        good = alive[block.place] if block.full else block.valid & alive[block.place]
        # A block whose groups have all failed has no slices.
        if count := int(np.count_nonzero(good)):
            self.groups += count
            for stack, slices in zip(self._slices, block_result.slices, strict=True):
                stack[block.groups[good]] = slices[good]
            if any(self._stay):
                self._piece[block.groups[good]] = len(self._pieces)
                self._position[block.groups[good]] = np.flatnonzero(good)
                self._pieces.append(block_result.piece)
        # No failed group is in them: the worker ran the block again without these.
        if block_result.partials:
            self._waiting.append(block_result.partials)
        if len(self._waiting) == _MOST:
            self._totals = add(self._ops, self._totals, *self._waiting)
            self._waiting = []
        # Totals of an engine and groups that could not be read come without a process.
        if not block_result.pid:
            return
        self.blocks += 1
        # A shorter last block says nothing of the time of the others.
        if len(block) == self._block_size:
            # Without values, which would stay in memory until the end of the stage.
            pid, seconds = block_result.pid, block_result.seconds
            time_only = BlockResult([], [], {}, pid, seconds)
            self.full_blocks.append(time_only)

    def finish(self) -> list[Any]:
        """Finish the reductions; to be called once, after all blocks were added.

        The result is the reduced value of each of the round's reductions but gathers,
        the leaves of the results of its folds, then all groups' slices `[n, ...]` of
        each output in `kept`; a `WorkerSlices` where they stay with the workers. Slices
        of groups without a result are NaN, or zero if they are no floats.
        """
        count = self.groups
        results = finish(self._round, self._totals, count, self._fold, self._waiting)
        arrays, leaf, kept = iter(self._slices), itertools.count(), []
        for value, stays in zip(self._kept, self._stay, strict=True):
            if stays:
                i = next(leaf)
                pieces = [(piece, i) for piece in self._pieces]
                table = Pieces(pieces, self._piece, self._position)
                kept.append(WorkerSlices(value, table, self._engine))
            else:
                kept.append(next(arrays))
        return [*results, *kept]


def stage_error(
    plan: Plan, location: str, stage: Stage, why: str, group: int | None = None
) -> EngineError:
    """Make, but not raise, the `EngineError` of a stage that failed.

    `location` is that of the round: `2` is the plan's second round, and `2.scan.0.1`
    the first round in body 0 of the loop `scan` of round 2. `group` is the one that
    failed; None: no single group did.
    """
    who = "The groups' work" if group is None else f"Group {group}"
    return EngineError(
        f"{who} failed in round {location} of {plan.name}, in "
        f"{stage.name}: {why.rstrip('.')}.",
        location,
        stage.name,
        group,
    )


def check_survivors(
    plan: Plan, location: str, stage: Stage, groups: int, min_groups: int
) -> None:
    """Raise an `EngineError` if fewer than `min_groups` groups survive a stage."""
    if groups < min_groups:
        why = f"{groups} of {plan.size} groups survive, but min_groups={min_groups}"
        raise stage_error(plan, location, stage, why)
