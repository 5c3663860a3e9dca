"""The stage that workers run, with everything but the groups.

Input: a plan file, the index of a stage in it, its global inputs, and what to do when a
group fails. Output: of `Job.run` the result of a block, in a process that shares no
memory with the driver; of `Job.task` a `Task` for a pool, whose workers get file and
global inputs apart from it.

Invariants: a job can be pickled, and written as bytes without pickle.

Sharp edges: keys of the header that `to_bytes` writes are a format that other releases
of drjax read: "where" is the location.
"""

from dataclasses import dataclass

import numpy as np

from drjax.backends.engine import wire_format, worker
from drjax.backends.engine.messages import Block, BlockResult, File, Task


@dataclass(frozen=True)
class Job:
    """One run of a round's local stage, without the groups: the same for all blocks.

    Attributes:
      file: The plan file, a `File`.
      stage: The index of the stage's round in `rounds_of(plan)`, int; it counts the
        rounds in loops, too.
      location: The round and the name of the stage, text for errors.
      ops: `"sum"`, `"mean"`, `"max"` or `"min"` for each of the round's reductions but
        gathers, in order, and `"fold"` for what blocks return for its folds.
      size: The block size, int: blocks with fewer groups are padded to it.
      check_nans: Whether a group that yields a NaN has failed, bool.
      drop: Whether to go on without groups that fail, bool; if not, a block in which a
        group fails has no results.
      shared: The global inputs of the stage, in order, a list of arrays.
      stay: For each output of the stage that is read later whether its slices stay with
        the workers, a tuple of bools; () if none do. It is no part of `to_bytes`.
    """

    file: File
    stage: int
    location: str
    ops: tuple[str, ...]
    size: int
    check_nans: bool
    drop: bool
    shared: list[np.ndarray]
    stay: tuple[bool, ...] = ()

    def task(self, block: Block, search: bool = False, encode: bool = True) -> Task:
        """Make a `Task` for a worker of a pool: to run the stage on a block.

        Each task gets a new number.

        Args:
          block: The groups.
          search: Whether the task is to run the groups one by one and without results,
            to find a group that takes too long.
          encode: Whether partial reductions with `wire=` are returned encoded.
        """
        settings = self.size, self.check_nans, self.drop
        options = {"search": search, "stay": self.stay, "encode": encode}
        return Task(self.stage, block, *settings, **options)

    def run(
        self, block: Block, failed: dict[int, str], encode: bool = True
    ) -> BlockResult:
        """Run the stage on a block in this process.

        Args:
          block: The groups. If none of them takes part, nothing runs.
          failed: A dict from group index to reason, for groups of the block whose data
            could not be read.
          encode: Whether partial reductions with `wire=` are returned encoded.

        Returns:
          The `BlockResult`: partial reductions, slices, and why groups failed, which
          includes `failed`.

        Raises:
          RuntimeError: The stage failed, and no single group did.
        """
        result = BlockResult([], [], {}, 0, 0.0)
        if block.valid.any():
            try:
                task = self.task(block, encode=encode)
                result = worker.run(self.file, task, self.shared)
            except Exception as error:
                raise RuntimeError(
                    f"The groups' work failed in {self.location}, in a block from "
                    f"group {block.groups[0]} on: {type(error).__name__}: {error}"
                ) from error
        # Groups that could not be read failed before the stage began.
        result.failed.update(failed)
        return result

    def to_bytes(self) -> bytes:
        """Serialize the job, plan file and global inputs included, without pickle.

        Which outputs stay with the workers, `stay`, is not included.
        """
        header = {
            "stage": self.stage,
            "where": self.location,
            "ops": self.ops,
            "size": self.size,
            "check_nans": self.check_nans,
            "drop": self.drop,
            "key": self.file.key,
            "x64": self.file.x64,
            "custom_calls": self.file.custom_calls,
        }
        # The plan file is one more array, of bytes.
        data = np.frombuffer(self.file.data, np.uint8)
        return wire_format.to_bytes(header, [data, *self.shared])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Job":
        """Make a job from `data`, bytes that `to_bytes` returned; its `stay` is ()."""
        header, (plan, *shared) = wire_format.from_bytes(data)
        file = File(
            plan.tobytes(),
            header.pop("key"),
            header.pop("x64"),
            tuple(header.pop("custom_calls")),
        )
        ops, location = tuple(header.pop("ops")), header.pop("where")
        return cls(file, ops=ops, location=location, shared=shared, **header)
