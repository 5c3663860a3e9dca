"""Arrays and results of blocks as bytes, for workers that share only files.

Input: arrays and a header of JSON data, or a `BlockResult`. Output: bytes, and the same
from bytes:

    header: length as 8 bytes, JSON {"about", "arrays": [[dtype, shape], ...]} | arrays

Invariants: arrays and a JSON header, nothing that is executed when it is read. Any
dtype passes, also those that numpy does not know, by its name.

Sharp edges: `from_bytes` trusts its input and is for files of this run. The arrays that
it returns are read-only views of the bytes. Keys of the header are a format that other
releases of drjax read.
"""

import io
import json
from typing import Any

import numpy as np

from drjax.engines.core.messages import Block, BlockResult


def to_bytes(header: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    """Serialize a header of JSON data and arrays of any dtype, without pickle.

    The format is in the header of this module: the length is little-endian, the arrays
    are in C order.
    """
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
    """Deserialize header and arrays from bytes of `to_bytes`, which are trusted.

    The arrays are read-only views of `data`.
    """
    offset = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:offset])
    arrays = []
    for name, shape in header["arrays"]:
        # numpy has the name bfloat16 only because JAX imports ml_dtypes.
        dtype, count = np.dtype(name), int(np.prod(shape))
        arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape))
        offset += count * dtype.itemsize
    return header["about"], arrays


def result_to_bytes(block: Block, result: BlockResult) -> bytes:
    """Serialize the group indices and the mask of a block, and its result.

    Of the result its partial reductions are left out, and `piece`, the engine's
    reference to slices that stay with the workers.
    """
    failed = {str(group): why for group, why in result.failed.items()}
    header = {"failed": failed, "pid": result.pid, "seconds": result.seconds}
    return to_bytes(header, [block.groups, block.valid, *result.slices])


def result_from_bytes(data: bytes) -> tuple[Block, BlockResult]:
    """Deserialize a block and its result from trusted bytes of `result_to_bytes`.

    The block has no slices of its inputs, and arrays are read-only views of `data`.
    """
    header, (groups, valid, *slices) = from_bytes(data)
    failed = {int(group): why for group, why in header["failed"].items()}
    result = BlockResult([], slices, failed, header["pid"], header["seconds"])
    return Block(groups, valid, []), result
