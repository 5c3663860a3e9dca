"""Replies of workers that are not trusted, validated against the plan.

Input: the reply of a worker for one group, of any content. Output: a `BlockResult` of
exactly the planned partial reductions, or one in which this group alone has failed.

Invariants: nothing in a reply decides how much memory is taken here, which group it is
for, or the result of another group: all of that is known from the plan and from the
node that was asked. Every check comes before what it protects.

Sharp edges: Flower puts a reply together before it is checked here. The numbers
themselves are not judged: a client can send any value of the planned dtype; with
`check_nans` NaN and infinities are refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from drjax._compat.types import Aval
from drjax._plan.normal_form import rounds_of
from drjax._plan_file.exported_stage import batched_of
from drjax._plan_file.load import plan_from_bytes
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.engines.core.combine import FOLD
from drjax.engines.core.encoded_partials import EncodedPartial, decoded, wire_of
from drjax.engines.core.messages import BlockResult, File
from drjax.engines.flower.records import (
    ARRAYS,
    FIELDS,
    FORMAT,
    bits_of,
    npy_header,
)
from drjax.plan import Reduce, Wire

# Of Flower, which users may lack: a message, and the state that a node keeps.
Message: TypeAlias = Any
Context: TypeAlias = Any

_TEXT = 2000  # characters of the longest text


class BadReply(Exception):
    """A reply of a worker does not fit the plan; the text says why."""


@dataclass(frozen=True)
class Partial:
    """An array that the reply for one group must hold, mostly a partial reduction.

    Attributes:
      op: The reduction, or `FOLD`.
      name: What errors call the array: of a partial reduction the name of the
        partitioned value that is reduced.
      secure: Of a secure sum the least number of groups to sum; 0 if it is none.
      encoded: What the reply's array decodes to, `(wire, shape)`, if it is the codes of
        an encoded partial reduction; else None.
      bound: Of a secure sum the largest magnitude of a number of one group; None: the
        engine's.
    """

    op: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    secure: int = 0
    encoded: tuple[Wire, tuple[int, ...]] | None = None
    bound: float | None = None

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def called(self) -> str:
        """What errors call the array, with its reduction."""
        return f"the {self.op} of {self.name}" if self.op else self.name

    def __str__(self) -> str:
        return f"{self.dtype}{[*self.shape]}"


_PLACE = Partial(FOLD, "its place in a fold", (1,), np.dtype(np.int32))


def partials_of(file: File) -> list[list[Partial]]:
    """Read from a plan file which partial reductions each local stage returns.

    For each round, loops included, in the order of `rounds_of`, there is one for each
    of its reductions but gathers. If it has folds, one for the group index follows, and
    then one for each leaf of the states, `[1, *s]`.
    """
    with jax.enable_x64(file.x64):
        # Without `file.custom_calls`, as clients allow none of them: the server refuses
        # such a plan before it sends a stage.
        plan = plan_from_bytes(Path(f"{file.key[:12]}.drjax"), file.data)
        planned = []
        for _, a_round in rounds_of(plan):
            named = [(op, value.name) for op, value in a_round.sources]
            avals: Sequence[Any] = ()  # of the partial results, then of slices
            if named:
                # From the code, not the values: 16-bit floats are added up in float32.
                avals = batched_of(a_round.local).function.out_avals[: len(named)]
            reduces = [
                *a_round.partials,
                *[None] * (len(named) - len(a_round.partials)),
            ]
            partials = [
                _planned(op, name, aval, reduce)
                for (op, name), aval, reduce in zip(named, avals, reduces, strict=True)
            ]
            if a_round.folds:
                partials.insert(len(a_round.partials), _PLACE)
            planned.append(partials)
    return planned


def _planned(op: str, name: str, aval: Aval, reduce: Reduce | None) -> Partial:
    """Return the array that a reply for one group must hold for one output of a stage.

    It has shape and dtype of `aval`, the output's, except for a leaf of a fold's state
    (`reduce` is None), which gets a leading axis of size 1, and for a reduction with
    `wire=` that is no secure sum: that is the codes, uint8 `[k]`.
    """
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    if reduce is None:
        return Partial(op, name, (1, *shape), dtype)
    if (wire := wire_of(reduce)) is not None:
        codes = (wire.nbytes(math.prod(shape)),)
        return Partial(op, name, codes, np.dtype(np.uint8), encoded=(wire, shape))
    return Partial(op, name, shape, dtype, reduce.secure, bound=reduce.bound)


def failure(group: int, why: str) -> BlockResult:
    """Make a `BlockResult` for a block of one group, which has failed.

    The reason may be text of an untrusted worker: it is shortened, and its unprintable
    characters are escaped.
    """
    return BlockResult([], [], {group: readable(why)})


def validate_reply(
    reply: Message, group: int, partials: Sequence[Partial], check_nans: bool
) -> BlockResult:
    """Check the reply of an untrusted worker for one group, and parse it.

    `reply` has any content; that of an honest worker is of `records.of_result`. `group`
    is the one that the worker was asked for; no reply says which. If `check_nans` is
    true, a reply with a NaN is refused, or one with an infinity that is not the
    identity of its reduction.

    The result has the group's partial reductions, as planned, and no slices; or only
    the reason, if the worker reports that the group has failed. A `BadReply` is raised
    if the reply does not fit the plan.
    """
    why, pid, seconds = _parse_fields(_record(reply, FIELDS))
    if why is not None:
        if ARRAYS in reply.content:
            raise BadReply("it has values of a group that failed")
        return BlockResult([], [], {group: readable(why)}, pid, seconds)
    arrays = _arrays(_record(reply, ARRAYS), partials)
    if _PLACE in partials and arrays[partials.index(_PLACE)] != group:
        raise BadReply("it has the place of another group in a fold")
    results = [
        decoded(EncodedPartial(x, *partial.encoded)) if partial.encoded else x
        for partial, x in zip(partials, arrays, strict=True)
    ]
    if check_nans:
        _check_finite(partials, results)
    return BlockResult(results, [], {}, pid, seconds)


def _record(reply: Message, name: str) -> dict[Any, Any]:
    """Return a record of a client's reply as a dict; `BadReply` if it has none."""
    try:
        # The client chooses what a reply has: any access to its content may raise.
        return dict(reply.content[name])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise BadReply(f"it has no record {name!r}: {text}") from None


def _parse_fields(fields: dict[Any, Any]) -> tuple[str | None, int, float]:
    """Check the fields of a reply; return `(why, pid, seconds)` of them.

    The id of the worker's process and how long it took are expected, and `failed`, the
    reason, if the group has failed; else `why` is None. A `BadReply` is raised for
    anything else.
    """
    # Unknown names are refused, so that a reply has one meaning.
    if not {"pid", "seconds"} <= {*fields} <= {"pid", "seconds", "failed"}:
        names = ", ".join(map(repr, fields))
        raise BadReply(f"it must have pid and seconds, or failed, but has {names}")
    pid, seconds, why = fields["pid"], fields["seconds"], fields.get("failed")
    if "failed" in fields and type(why) is not str:
        raise BadReply(f"its failure is {why!r}, which is no text")
    if type(pid) is not int or not 0 <= pid < 2**32:
        raise BadReply(f"its process is {pid!r}, which is no process number")
    if type(seconds) not in (int, float) or not 0 <= seconds < 2**32:
        raise BadReply(f"it took {seconds!r} seconds, which is no time")
    return why, pid, float(seconds)


def _arrays(record: dict[Any, Any], partials: Sequence[Partial]) -> list[np.ndarray]:
    """Check and read the arrays of a reply, which are the planned ones, in order.

    The names of the record are their positions. A `BadReply` is raised for others.
    """
    if len(record) != len(partials):
        raise BadReply(
            f"it has {len(record)} arrays, but the plan is for {len(partials)}"
        )
    arrays = []
    for (name, x), (i, partial) in zip(
        record.items(), enumerate(partials), strict=True
    ):
        if name != str(i):
            raise BadReply(f"array {i} has the name {name!r}")
        try:
            kind, shape, stype, data = x.dtype, x.shape, x.stype, x.data
        except AttributeError:
            raise BadReply(f"{partial.called} is no array") from None
        # Compared as text, never parsed: `np.dtype` also accepts types of objects.
        if (kind, shape) != (str(partial.dtype), partial.shape):
            text = f"{kind}{[*shape] if isinstance(shape, list | tuple) else shape}"
            raise BadReply(f"{partial.called} is {text}, but the plan is for {partial}")
        # Compared as bytes, never parsed, too: the plan decides what memory is taken.
        header = npy_header(partial.dtype, partial.shape)
        if stype != FORMAT or type(data) is not bytes or not data.startswith(header):
            raise BadReply(f"{partial.called} is not written as {partial} is")
        if (size := len(data) - len(header)) != partial.nbytes:
            raise BadReply(
                f"{partial.called} has {size} bytes, but the plan is for "
                f"{partial.nbytes}"
            )
        array = np.frombuffer(data, bits_of(partial.dtype), offset=len(header))
        arrays.append(array.view(partial.dtype).reshape(partial.shape))
        # numpy defines True and False as the bytes 1 and 0 alone.
        if partial.dtype == bool and (array.view(np.uint8) > 1).any():
            raise BadReply(f"{partial.name} has bytes that are neither true nor false")
    return arrays


def _check_finite(partials: Sequence[Partial], arrays: Sequence[np.ndarray]) -> None:
    """Raise a `BadReply` unless arrays are finite, or the identity of the reduction.

    The identity of a maximum is -inf: the partial reduction of a group without entries.
    Integers pass; a state of a fold may have infinities, but no NaN.
    """
    for partial, x in zip(partials, arrays, strict=True):
        if not jax.numpy.issubdtype(x.dtype, np.inexact):
            continue
        # The identity of a reduction is what a group without entries gives to it.
        # A state may have any infinity.
        fold = partial.op == FOLD
        neutral = 0 if fold else REDUCE_OPS[partial.op].identity(x.dtype)
        allowed = np.isfinite(x) | (x == neutral) | (np.isinf(x) & fold)
        if not allowed.all():
            kind = "NaN" if np.isnan(x).any() else "an infinity"
            raise BadReply(f"it yields {kind} as {partial.name}")


def content_of(reply: Message, record: str, name: str) -> Any:
    """Return a field of a client's reply, a Flower `Message`, as the client sent it.

    It is not validated. A `BadReply` is raised if the reply has no such field in that
    record.
    """
    fields = _record(reply, record)
    if name not in fields:
        raise BadReply(f"it has no {name!r}")
    return fields[name]


def readable(text: object) -> str:
    """Return text of an untrusted worker as one printable line, for logs and errors.

    At most 2000 characters of `str(text)` are used, with a remark if there were more;
    characters that cannot be printed are escaped.
    """
    text = str(text)
    if len(text) > _TEXT:
        text = f"{text[:_TEXT]}... ({len(text)} characters)"
    # A terminal obeys escape sequences, and a line break could forge a line of a log.
    # `unicode_escape` also escapes lone surrogates, which UTF-8 cannot encode.
    return "".join(
        c
        if c.isprintable()
        else " "
        if c.isspace()
        else c.encode("unicode_escape").decode()
        for c in text
    )
