"""Arrays, requests and results of one group in Flower's records, at both ends.

Input: arrays of any dtype, the request to a client, the result of its group. Output:
Flower's `ArrayRecord`s, and a `ConfigRecord` of text and numbers; and the same from
these, at a client. What a client sends, `untrusted_replies` reads.

Invariants: an `Array` has the dtype and the shape of the array, and its data is a file
of numpy's, without pickle. Of a dtype that numpy's files have no name for, such as
bfloat16, the file has the bits, as unsigned integers of the same size.

Sharp edges: names of records and fields are a format that other releases of drjax read.
"""

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from drjax._extras import needed
from drjax.engines.core.encoded_partials import EncodedPartial
from drjax.engines.core.messages import BlockResult

# Of Flower, which users may lack.
ArrayRecord: TypeAlias = Any
Records: TypeAlias = dict[str, Any]  # of a message, by name

FIELDS, ARRAYS, SHARED = "drjax", "drjax.arrays", "drjax.shared"
_REQUEST = "request"
FORMAT = "numpy.ndarray"  # Flower's name for `.npy` files


def bits_of(dtype: np.dtype) -> np.dtype:
    """Return the dtype that a file has for `dtype`: the same one if numpy has it."""
    registered = dtype.isbuiltin == 2  # by another package, as ml_dtypes
    return np.dtype(f"u{dtype.itemsize}") if registered else dtype


def npy_header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return how a `.npy` file of an array in C order begins."""
    out, descr = io.BytesIO(), np.lib.format.dtype_to_descr(bits_of(dtype))
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue()


def fields_of(x: np.ndarray) -> tuple[str, tuple[int, ...], str, bytes]:
    """Return the arguments of Flower's `Array`: dtype, shape, format and data."""
    x = np.asarray(x, order="C")
    data = npy_header(x.dtype, x.shape) + x.tobytes()
    return str(x.dtype), x.shape, FORMAT, data


def to_record(arrays: Iterable[np.ndarray]) -> ArrayRecord:
    """Write arrays to an `ArrayRecord`, under their positions."""
    flwr = needed("flwr.app", "flower", "Flower")
    pairs = enumerate(map(fields_of, arrays))
    return flwr.ArrayRecord({str(i): flwr.Array(*fields) for i, fields in pairs})


def from_record(record: ArrayRecord) -> list[np.ndarray]:
    """Read the arrays of an `ArrayRecord` of `to_record`, which is trusted."""
    return [x.numpy().view(np.dtype(x.dtype)) for x in record.values()]


@dataclass(frozen=True)
class Request:
    """What a client is to run: a stage, for its group.

    Attributes:
      about: JSON data; see `client_data.Requests`.
      shared: The global inputs of the stage, in order.
      slices: Those slices of the group that the server has, `[1, ...]`.
    """

    about: Mapping[str, Any]
    shared: list[np.ndarray]
    slices: list[np.ndarray]

    @classmethod
    def received(cls, content: Mapping[str, Any]) -> "Request":
        """Read the request in the content of a message, at a client."""
        arrays = (from_record(content[name]) for name in (SHARED, ARRAYS))
        return cls(json.loads(content[FIELDS][_REQUEST]), *arrays)


def is_request(content: Mapping[str, Any]) -> bool:
    """Return whether a message to a client is to run a stage, or has a part of it."""
    return _REQUEST in content[FIELDS]


def of_request(
    about: Mapping[str, Any], shared: ArrayRecord, slices: Iterable[np.ndarray]
) -> tuple[dict[str, Any], Records]:
    """Return what has a `Request`: a field of a message, and its further records."""
    arrays = {SHARED: shared, ARRAYS: to_record(slices)}
    return {_REQUEST: json.dumps(about)}, arrays


def of_result(result: BlockResult) -> tuple[dict[str, Any], Records]:
    """Return fields and further records of a reply: the result of one group.

    Of an encoded partial reduction the codes are written, uint8 `[k]`: how they are
    encoded is known from the plan. A group that failed has no arrays.
    """
    fields: dict[str, Any] = {"pid": result.pid, "seconds": float(result.seconds)}
    if result.failed:
        (fields["failed"],) = result.failed.values()
        return fields, {}
    partials = [
        x.codes if isinstance(x, EncodedPartial) else x for x in result.partials
    ]
    return fields, {ARRAYS: to_record(partials)}
