"""Replies of workers that are not trusted, validated against the plan.

Input: what a worker sent for one group, of any type and content. Output: a
`BlockResult` of exactly the planned partial reductions, or one in which this group
alone has failed.

Invariants: nothing in a reply decides how much memory is taken, which group it is for,
or the result of another group: all of that is known from the plan and the request.
Every check comes before what it protects.

Sharp edges: the numbers themselves are not judged. A client can send any value of the
planned dtype; with `check_nans` NaN and infinities are refused.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

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
from drjax.plan import Reduce, Wire

# Of Flower, which users may lack: a message, and the state that a node keeps.
Message: TypeAlias = Any
Context: TypeAlias = Any

_HEADER, _TEXT = 2**20, 2000  # the longest header in bytes, and text in characters


class BadReply(Exception):
    """A reply of a worker does not fit the plan; the text says why."""


@dataclass(frozen=True)
class Partial:
    """An array that the reply for one group must hold, mostly a partial reduction.

    Attributes:
      op: The reduction, or `FOLD`. Empty for the two arrays that are no partial
        reductions: the group index and the mask.
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

    def __str__(self) -> str:
        return f"{self.dtype}{[*self.shape]}"


_GROUP = Partial("", "its group", (1,), np.dtype(np.int32))
_VALID = Partial("", "its mask", (1,), np.dtype(bool))
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
    data: Any, group: int, partials: Sequence[Partial], check_nans: bool
) -> BlockResult:
    """Check the reply of an untrusted worker for one group, and parse it.

    `data` is of any type; an honest worker sends the bytes of
    `wire_format.result_to_bytes`. `group` is the one that the worker was asked for. If
    `check_nans` is true, a reply with a NaN is refused, or one with an infinity that is
    not the identity of its reduction.

    The result has the group's partial reductions, as planned, and no slices; or only
    the reason, if the worker reports that the group has failed. A `BadReply` is raised
    if the reply does not fit the plan or the request.
    """
    try:
        return _validated(data, group, partials, check_nans)
    # JSON that is nested deeply enough ends Python's parser, not this process.
    except RecursionError:
        raise BadReply("its header is nested too deeply") from None


def _validated(
    data: Any, group: int, partials: Sequence[Partial], check_nans: bool
) -> BlockResult:
    """Check and parse a reply as `validate_reply`, but let `RecursionError` through."""
    record, kinds, offset = _header(data)
    why, pid, seconds = _parse_record(record, group, len(partials))
    # A group that failed sends no values.
    expected = [_GROUP, _VALID, *(partials if why is None else ())]
    # Shapes of the plan, never those of the reply, decide what is allocated below.
    _check_kinds(kinds, expected, len(data) - offset)
    arrays = []
    for partial in expected:
        count = math.prod(partial.shape)
        array = np.frombuffer(data, partial.dtype, count, offset) if count else []
        arrays.append(np.asarray(array, partial.dtype).reshape(partial.shape))
        offset += partial.nbytes
        # numpy defines True and False as the bytes 1 and 0 alone.
        if partial.dtype == bool and (arrays[-1].view(np.uint8) > 1).any():
            raise BadReply(f"{partial.name} has bytes that are neither true nor false")
    (reply_group,), (valid,) = arrays[:2]
    if reply_group != group:
        raise BadReply(f"it is for group {reply_group}, but group {group} was asked")
    if why is not None:
        return BlockResult([], [], {group: readable(why)}, pid, seconds)
    if not valid:
        raise BadReply("it masks its group out without saying why")
    if _PLACE in expected and arrays[expected.index(_PLACE)] != group:
        raise BadReply("it has the place of another group in a fold")
    results = [
        decoded(EncodedPartial(x, *partial.encoded)) if partial.encoded else x
        for partial, x in zip(partials, arrays[2:], strict=True)
    ]
    if check_nans:
        _check_finite(partials, results)
    return BlockResult(results, [], {}, pid, seconds)


def _header(data: object) -> tuple[Any, Any, int]:
    """Parse the header of a reply into `(record, kinds, offset)`.

    The record says whether the group failed, and the kinds are the dtypes and shapes of
    the arrays; both are JSON data that is not checked yet. The offset is the position
    of the first array in `data`, in bytes. A `BadReply` is raised if the reply is not
    of type bytes, or has no such header; a `RecursionError` if it is nested too deeply.
    """
    # `type` and not isinstance: a subclass may override anything.
    if type(data) is not bytes:
        raise BadReply(f"it is of type {type(data).__name__}, not bytes")
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise BadReply(f"it ends within its header, after {len(data)} bytes")
    # Before it is parsed: JSON as Python objects takes many times its bytes.
    if size > _HEADER:
        raise BadReply(f"its header has {size} bytes, more than {_HEADER}")
    try:
        header = json.loads(
            data[8 : 8 + size].decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
        )
    except ValueError as error:
        raise BadReply(f"its header is no JSON: {error}") from None
    record, arrays = _fields(header, "its header", "about", "arrays")
    return record, arrays, 8 + size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object, or raise `ValueError` if a name occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is there twice")
    return fields


def _no_constant(text: str) -> NoReturn:
    """Raise a `ValueError` for `NaN` or an infinity, which JSON does not have."""
    raise ValueError(f"{text} is no number")


def _fields(x: object, what: str, *names: str) -> list[Any]:
    """Return the values of a JSON object with exactly these `names`, in their order.

    Else a `BadReply` is raised, in which `what` names the object.
    """
    # Unknown names are refused, so that a reply has one meaning.
    if type(x) is not dict or set(x) != {*names}:
        content = ", ".join(map(repr, x)) if type(x) is dict else type(x).__name__
        raise BadReply(f"{what} must have {', '.join(names)}, but has {content}")
    return [x[name] for name in names]


def _parse_record(
    record: object, group: int, partials: int
) -> tuple[str | None, int, float]:
    """Check the record in the header of a reply; return `(why, pid, seconds)` of it.

    An object with the names `failed`, `pid`, `seconds` and `partials` is expected: the
    reason by group, the id of the worker's process, how long it took, and the number of
    planned partial reductions, or 0 if the group has failed. No group but the one that
    the worker was asked for may be in `failed`; `why` is None if it is not. A
    `BadReply` is raised for anything else.
    """
    failures, pid, seconds, count = _fields(
        record, "its record", "failed", "pid", "seconds", "partials"
    )
    # A client must not drop another client's group.
    if type(failures) is not dict or set(failures) - {str(group)}:
        names = [*failures] if type(failures) is dict else failures
        raise BadReply(
            f"it reports failures of {names!r}, but only group {group} was asked"
        )
    why = failures.get(str(group))
    if failures and type(why) is not str:
        raise BadReply(f"its failure is {why!r}, which is no text")
    if type(pid) is not int or not 0 <= pid < 2**32:
        raise BadReply(f"its process is {pid!r}, which is no process number")
    if type(seconds) not in (int, float) or not 0 <= seconds < 2**32:
        raise BadReply(f"it took {seconds!r} seconds, which is no time")
    expected = partials if why is None else 0
    if type(count) is not int or count != expected:
        raise BadReply(
            f"it has {count!r} partial results, but the plan is for {expected}"
        )
    return why, pid, float(seconds)


def _check_kinds(kinds: object, expected: Sequence[Partial], nbytes: int) -> None:
    """Raise a `BadReply` if the arrays of a reply are others than the planned ones.

    A list of `[dtype, shape]` of each is expected, and as many bytes after the header,
    `nbytes`, as they need.
    """
    if type(kinds) is not list or len(kinds) != len(expected):
        count = len(kinds) if type(kinds) is list else repr(kinds)
        raise BadReply(f"it has {count} arrays, but the plan is for {len(expected)}")
    for kind, partial in zip(kinds, expected, strict=True):
        # Compared as text, never parsed: `np.dtype` also accepts types of objects.
        if kind != [str(partial.dtype), [*partial.shape]]:
            text = repr(kind)
            if type(kind) is list and len(kind) == 2:
                text = f"{kind[0]}{kind[1]}"
            name = f"the {partial.op} of {partial.name}" if partial.op else partial.name
            raise BadReply(f"{name} is {text}, but the plan is for {partial}")
    # Exactly: a reply holds the planned arrays and nothing else.
    if (total := sum(partial.nbytes for partial in expected)) != nbytes:
        raise BadReply(f"its arrays have {nbytes} bytes, but the plan is for {total}")


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
    try:
        # The client chooses what a reply has: any access to its content may raise.
        return reply.content[record][name]
    except Exception as error:
        raise BadReply(f"it has no {name!r}: {type(error).__name__}: {error}") from None


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
