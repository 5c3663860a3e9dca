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

from drjax.engines.core import wire_format, worker
from drjax.engines.core.messages import Block, BlockResult, File, Task


@dataclass(frozen=True)
class Job:
    """One run of a round's local stage, without the groups: the same for all blocks.

    Attributes:
      stage: The index of the stage's round in `rounds_of(plan)`; rounds in loops count.
      location: The round and the name of the stage, for errors.
      ops: The operations of what a block returns, from `combine.ops_of`.
      size: How many groups of a block run at once: fewer are padded to it.
      check_nans: Whether a group that yields a NaN has failed.
      drop: Whether to go on without groups that fail; if not, a block in which a group
        fails has no results.
      shared: The global inputs of the stage, in order.
      stay: For each output of the stage that is read later whether its slices stay with
        the workers; () if none do. It is no part of `to_bytes`, nor is `save`.
      save: A folder, by its path or URL, for files with the slices that stay; "": none.
      apart, full: As of a `Task`. They are no part of `to_bytes`.
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
    save: str = ""
    apart: bool = False
    full: int = 0

    def task(self, block: Block, search: bool = False, encode: bool = True) -> Task:
        """Make a `Task` with a new number, to run the stage on a block in a pool.

        The task runs the groups one by one if `search` is true, and returns partial
        reductions with `wire=` encoded if `encode` is.
        """
        return Task(
            stage=self.stage,
            block=block,
            size=self.size,
            check_nans=self.check_nans,
            drop=self.drop,
            search=search,
            stay=self.stay,
            encode=encode,
            save=self.save,
            apart=self.apart,
            full=self.full,
        )

    def run(
        self, block: Block, failed: dict[int, str], encode: bool = True
    ) -> BlockResult:
        """Run the stage on a block in this process.

        Nothing runs if no group of the block takes part. `failed` has the reasons for
        groups of the block whose data could not be read: they are added to those that
        fail here. If the stage fails, and no single group does, a `RuntimeError` is
        raised.
        """
        result = BlockResult([], [], {})
        if not block.empty:
            try:
                task = self.task(block, encode=encode)
                result = worker.run(self.file, task, self.shared)
            except Exception as error:
                raise RuntimeError(
                    f"The groups' work failed in {self.location}, in a block from "
                    f"group {block.group(0)} on: {type(error).__name__}: {error}"
                ) from error
        # Groups that could not be read failed before the stage began.
        result.failed.update(failed)
        return result

    def to_bytes(self) -> bytes:
        """Serialize the job, plan file and global inputs included, without pickle."""
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
        """Make a job from bytes that `to_bytes` returned; its `stay` is ()."""
        header, (plan, *shared) = wire_format.from_bytes(data)
        file = File(
            plan.tobytes(),
            header.pop("key"),
            header.pop("x64"),
            tuple(header.pop("custom_calls")),
        )
        ops, location = tuple(header.pop("ops")), header.pop("where")
        return cls(file, ops=ops, location=location, shared=shared, **header)
