"""Stages, blocks and results as bytes, for workers that share only files or messages.

Input: records of `messages`, or a `StageCall`. Output: bytes, and the same from bytes:

    header: length as 8 bytes, JSON {"about", "arrays": [[dtype, shape], ...]} | arrays

Invariants: arrays and a JSON header, nothing that is executed when it is read. Any
dtype passes, also those that numpy does not know, by its name.

Sharp edges: `from_bytes` trusts its input and is for files of this run; replies of
clients go through `untrusted`. The arrays that it returns are read-only views of the
bytes. Keys of the header are a format that other releases of drjax read.
"""

import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from drjax.backends.engine import worker
from drjax.backends.engine.messages import Block, BlockResult, File, Task
from drjax.backends.engine.protocols import StageCall


def to_bytes(header: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    """Arrays of any dtype and a header of JSON data, as bytes."""
    # By name: bfloat16 and the like have no code in numpy's own format.
    kinds = [[str(x.dtype), [*x.shape]] for x in arrays]
    text = json.dumps({"about": header, "arrays": kinds}).encode()
    out = io.BytesIO()
    out.write(len(text).to_bytes(8, "little") + text)
    for x in arrays:
        # C order, whatever the array was.
        out.write(np.ascontiguousarray(x).tobytes())
    return out.getvalue()


def from_bytes(data: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header and the arrays of such bytes, as `to_bytes` takes them."""
    offset = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:offset])
    arrays = []
    for name, shape in header["arrays"]:
        dtype, count = np.dtype(name), int(np.prod(shape))
        arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
        offset += count * dtype.itemsize
    return header["about"], arrays


def result_to_bytes(block: Block, result: BlockResult) -> bytes:
    """The result of a block."""
    failed = {str(group): why for group, why in result.failed.items()}
    # All or none are None: a block either has a group that takes part or not.
    partials = [x for x in result.partials if x is not None]
    header = {"failed": failed, "pid": result.pid, "seconds": result.seconds}
    header["partials"] = len(partials)
    return to_bytes(header, [block.groups, block.valid, *partials, *result.rows])


def result_from_bytes(data: bytes) -> tuple[Block, BlockResult]:
    header, (groups, valid, *arrays) = from_bytes(data)
    failed = {int(group): why for group, why in header["failed"].items()}
    partials, rows = arrays[: header["partials"]], arrays[header["partials"] :]
    result = BlockResult(partials, rows, failed, header["pid"], header["seconds"])
    return Block(groups, valid, []), result


@dataclass(frozen=True)
class Job:
    """A stage for workers that share no memory: the part of a `StageCall` they need.

    Attributes:
      file: The plan file.
      stage: The index of the stage in `rounds_of`.
      location: Round and stage, for errors.
      ops: The operations of its partial reductions.
      size: How many groups work at once.
      check_nans: Whether a group that yields a NaN has failed.
      drop: Whether to go on without groups that fail.
      shared: Its global inputs.
    """

    file: File
    stage: int
    location: str
    ops: tuple[str, ...]
    size: int
    check_nans: bool
    drop: bool
    shared: list[np.ndarray]

    @classmethod
    def of(cls, call: StageCall) -> "Job":
        options = call.options
        return cls(
            file=call.file,
            stage=call.stage,
            location=call.location,
            ops=call.ops,
            size=call.size,
            check_nans=options.check_nans,
            drop=options.on_error == "drop",
            shared=call.shared,
        )

    def run(self, block: Block, failed: dict[int, str]) -> BlockResult:
        """A block through the stage; `failed`: why groups could not take part."""
        result = BlockResult([], [], {}, 0, 0.0)
        if block.valid.any():
            # Only now a `Task`: its number is unique in this process.
            task = Task(self.stage, block, self.size, self.check_nans, self.drop)
            try:
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
        """The job as a file."""
        # The keys are a wire format, which clients of other releases of drjax read:
        # "where" is the location.
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
        return to_bytes(header, [data, *self.shared])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Job":
        header, (plan, *shared) = from_bytes(data)
        file = File(
            plan.tobytes(),
            header.pop("key"),
            header.pop("x64"),
            tuple(header.pop("custom_calls")),
        )
        ops, location = tuple(header.pop("ops")), header.pop("where")
        return cls(file, ops=ops, location=location, shared=shared, **header)
