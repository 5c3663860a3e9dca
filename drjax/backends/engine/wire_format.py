"""Stages, blocks and their results as files, for workers that only share files.

They hold arrays and a header, nothing executable.
"""

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from drjax.backends.engine import worker
from drjax.backends.engine.messages import Block, Done, File, Work
from drjax.backends.engine.protocols import Call


def packed(about: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    """A file of arrays, of any dtype, and what JSON can say."""
    kinds = [[str(x.dtype), [*x.shape]] for x in arrays]
    header = json.dumps({"about": about, "arrays": kinds}).encode()
    out = io.BytesIO()
    out.write(len(header).to_bytes(8, "little") + header)
    for x in arrays:
        out.write(np.ascontiguousarray(x).tobytes())
    return out.getvalue()


def unpacked(data: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What is in such a file."""
    at = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:at])
    arrays = []
    for name, shape in header["arrays"]:
        dtype, count = np.dtype(name), int(np.prod(shape))
        arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    return header["about"], arrays


def packed_done(block: Block, done: Done) -> bytes:
    """What became of a block."""
    failed = {str(group): why for group, why in done.failed.items()}
    partials = [x for x in done.partials if x is not None]
    about = {"failed": failed, "pid": done.pid, "seconds": done.seconds}
    about["partials"] = len(partials)
    return packed(about, [block.groups, block.valid, *partials, *done.rows])


def unpacked_done(data: bytes) -> tuple[Block, Done]:
    about, (groups, valid, *arrays) = unpacked(data)
    failed = {int(group): why for group, why in about["failed"].items()}
    partials, rows = arrays[: about["partials"]], arrays[about["partials"] :]
    done = Done(partials, rows, failed, about["pid"], about["seconds"])
    return Block(groups, valid, []), done


@dataclass(frozen=True)
class Job:
    """A stage for workers.

    Attributes:
      file: The plan file.
      stage: The stage, by its place in `rounds_of`.
      where: What it is called in errors.
      ops: The operations of its partial reductions.
      size: How many groups work at once.
      check_nans: Whether a group that yields a NaN has failed.
      drop: Whether to go on without groups that fail.
      shared: Its global inputs.
    """

    file: File
    stage: int
    where: str
    ops: tuple[str, ...]
    size: int
    check_nans: bool
    drop: bool
    shared: list[np.ndarray]

    @classmethod
    def of(cls, call: Call) -> "Job":
        options = call.options
        return cls(
            call.file, call.stage, call.where, call.ops, call.size, options.check_nans,
            options.on_error == "drop", call.shared,
        )  # fmt: skip

    def run(self, block: Block, failed: dict[int, str]) -> Done:
        """A block through the stage; `failed`: why groups could not take part."""
        done = Done([], [], {}, 0, 0.0)
        if block.valid.any():
            task = Work(self.stage, block, self.size, self.check_nans, self.drop)
            try:
                done = worker.run(self.file, task, self.shared)
            except Exception as error:
                raise RuntimeError(
                    f"The groups' work failed in {self.where}, in a block from group "
                    f"{block.groups[0]} on: {type(error).__name__}: {error}"
                ) from error
        done.failed.update(failed)
        return done

    def packed(self) -> bytes:
        """The job as a file."""
        about = {
            k: v for k, v in self.__dict__.items() if k not in ("file", "shared")
        } | {
            "key": self.file.key, "x64": self.file.x64,
            "custom_calls": self.file.custom_calls,
        }  # fmt: skip
        data = np.frombuffer(self.file.data, np.uint8)
        return packed(about, [data, *self.shared])

    @classmethod
    def unpacked(cls, data: bytes) -> "Job":
        about, (plan, *shared) = unpacked(data)
        file = File(
            plan.tobytes(), about.pop("key"), about.pop("x64"),
            tuple(about.pop("custom_calls")),
        )  # fmt: skip
        about["ops"] = tuple(about["ops"])
        return cls(file, shared=shared, **about)
