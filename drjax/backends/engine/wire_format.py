"""Arrays and results of blocks as bytes, for workers that share only files or messages.

Input: arrays and a header of JSON data, or a `BlockResult`. Output: bytes, and the same
from bytes:

    header: length as 8 bytes, JSON {"about", "arrays": [[dtype, shape], ...]} | arrays

Invariants: arrays and a JSON header, nothing that is executed when it is read. Any
dtype passes, also those that numpy does not know, by its name.

Sharp edges: `from_bytes` trusts its input and is for files of this run; replies of
clients go through `untrusted_replies`. The arrays that it returns are read-only views
of the bytes. Keys of the header are a format that other releases of drjax read.
"""

import io
import json
from typing import Any

import numpy as np

from drjax.backends.engine.encoded_partials import EncodedPartial
from drjax.backends.engine.messages import Block, BlockResult


def to_bytes(header: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    """Serialize a header and arrays to bytes, without pickle.

    Args:
      header: A dict of JSON data.
      arrays: Arrays of any dtype, also of those that numpy does not have.

    Returns:
      Bytes that `from_bytes` reads: the length of the JSON header, 8 bytes in
      little-endian order; the header, with dtypes and shapes; then the arrays in C
      order.
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
    """Deserialize the bytes that `to_bytes` returned; the bytes are trusted.

    Args:
      data: The bytes.

    Returns:
      `(header, arrays)`: the dict of JSON data, and the list of arrays, in order, which
      are read-only views of `data`.
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
    """Serialize the result of a block, without pickle.

    Args:
      block: The block, of which the group indices and the mask are included.
      result: Its result: partial reductions, slices, `failed`, `pid` and `seconds` are
        included; `piece`, the engine's reference to slices that stay with the workers,
        is not. Partial reductions that are None are left out: if no group of a block
        takes part, all are. Of an encoded one the codes are included, uint8 `[k]`: how
        they are encoded is known from the plan.

    Returns:
      Bytes that `result_from_bytes` reads.
    """
    failed = {str(group): why for group, why in result.failed.items()}
    # All or none are None: a block either has a group that takes part or not.
    partials = [
        x.codes if isinstance(x, EncodedPartial) else x
        for x in result.partials
        if x is not None
    ]
    header = {"failed": failed, "pid": result.pid, "seconds": result.seconds}
    header["partials"] = len(partials)
    return to_bytes(header, [block.groups, block.valid, *partials, *result.slices])


def result_from_bytes(data: bytes) -> tuple[Block, BlockResult]:
    """Deserialize the result of a block from bytes that `result_to_bytes` returned.

    The bytes are trusted.

    Returns:
      `(block, result)`: a `Block` with group indices and mask, but without slices of
      its inputs; and the `BlockResult`, in which an encoded partial reduction is its
      codes. Its arrays are read-only views of `data`.
    """
    header, (groups, valid, *arrays) = from_bytes(data)
    failed = {int(group): why for group, why in header["failed"].items()}
    partials, slices = arrays[: header["partials"]], arrays[header["partials"] :]
    result = BlockResult(partials, slices, failed, header["pid"], header["seconds"])
    return Block(groups, valid, []), result
