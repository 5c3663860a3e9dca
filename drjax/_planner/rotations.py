"""Recognize `jnp.roll` and its transpose, each as one equation instead of several.

Input: the equations of an inlined jaxpr. Output: the same equations, in which one
`rearrange` gives each result that has all parts of an array along one dimension, in
another order. JAX writes

    roll          as slice, slice, concatenate
    its transpose as split, pad with zeros, pad with zeros, add

Seen one by one, these read parts of the groups, which has no plan. As one equation
along the group axis, `moves_between_groups.py` makes a permute of them. Along another
axis a `rearrange` is work of each group; of a global value it becomes slices and a
concatenation again.

Invariants: the result is bit by bit the same, but for -0.0 + 0 = 0. Sharp edges: the
primitive has a `bind` that writes equations of `lax`, and no rules: it stands in jaxprs
of the planner alone, never in those of stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from drjax import _compat
from drjax._compat.jax_types import Literal, Primitive
from drjax._compat.types import Array, Atom, Eqn, Var

# The first index in the array, and the number of indices; None: so many zeros.
Segment = tuple[int | None, int]


class Rearrange(Primitive):
    """The primitive that puts parts of an array in another order along a dimension."""

    def bind(
        self, *args: Array, dimension: int, segments: tuple[Segment, ...], **_: Any
    ) -> Array:
        """Rearrange an array by slices and a concatenation of `lax`.

        The primitive is in jaxprs of the planner only. A stage that is traced from such
        a jaxpr has these equations instead, which all backends can run.
        """
        (x,) = args

        def part(first: int | None, size: int) -> Array:
            if first is not None:
                return lax.slice_in_dim(x, first, first + size, axis=dimension)
            shape = (*x.shape[:dimension], size, *x.shape[dimension + 1 :])
            return lax.full(shape, 0, x.dtype)

        return lax.concatenate([part(*segment) for segment in segments], dimension)


rearrange_p = Rearrange("rearrange")


@dataclass(frozen=True)
class _Pieces:
    """A variable as consecutive parts of another array along a dimension, and zeros.

    Attributes:
      source: The variable of the other array.
      dimension: The dimension.
      segments: For each part its first index in `source`, and its size. None in place
        of an index: the part is zeros.
      order: The dimensions of `source`, in the order in which the variable has them.
    """

    source: Any
    dimension: int
    segments: tuple[Segment, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(k for _, k in self.segments)

    def cut(self, start: int, stop: int) -> "_Pieces":
        """Return the pieces of a slice of the variable, from `start` up to `stop`."""
        cut, position = [], 0
        for first, k in self.segments:
            low, high = max(start - position, 0), min(stop - position, k)
            if low < high:
                cut.append((None if first is None else first + low, high - low))
            position += k
        return replace(self, segments=_merged(cut))

    @property
    def position(self) -> int:
        """The dimension of the variable along which its parts lie."""
        return self.order.index(self.dimension)


# Without one of these no parts are put together.
JOINS = ("concatenate", "pad")


def recognize_rotations(eqns: Sequence[Eqn]) -> list[Eqn]:
    """Replace equations that put all parts of an array in another order by `rearrange`.

    The other equations of a roll stay; they are dead unless something else uses them.
    In a sum of parts and other arrays, parts that are apart are added first: at each
    position all but one are zeros, so that only the order of the others can round.
    """
    known: dict[Any, _Pieces] = {}
    sums: dict[Any, tuple[_Pieces, Any]] = {}  # of pieces and any other variable
    kept = []
    for eqn in eqns:
        rule = _RULES.get(eqn.primitive.name)
        results = None if rule is None else rule(eqn, known)
        if results is None and eqn.primitive.name in ("add_any", "add"):
            kept += _add_to_sum(eqn, known, sums)
        elif results is None:
            kept.append(eqn)
        elif len(results) == 1 and _is_rotation(results[0]):
            kept += _written(eqn, results[0])
        else:
            known.update(zip(eqn.outvars, results, strict=True))
            kept.append(eqn)
    return kept


def _written(eqn: Eqn, pieces: _Pieces) -> list[Eqn]:
    """Write the result of an equation, which has these pieces, as a `rearrange`."""
    params = {"dimension": pieces.dimension, "segments": pieces.segments}
    if pieces.order == (*sorted(pieces.order),):
        return [
            eqn.replace(primitive=rearrange_p, invars=[pieces.source], params=params)
        ]
    out = eqn.outvars[0].aval
    shape = [out.shape[pieces.order.index(d)] for d in range(out.ndim)]
    moved = _compat.new_var(out.update(shape=tuple(shape)))
    return [
        eqn.replace(
            primitive=rearrange_p,
            invars=[pieces.source],
            outvars=[moved],
            params=params,
        ),
        eqn.replace(
            primitive=lax.transpose_p,
            invars=[moved],
            params={"permutation": pieces.order},
        ),
    ]


def _add_to_sum(
    eqn: Eqn, known: dict[Var, _Pieces], sums: dict[Var, tuple[_Pieces, Atom]]
) -> list[Eqn]:
    """Record a sum of pieces and another array; add up pieces that complete a rotation.

    A derivative adds the cotangents of all uses of a value in turn, and those of the
    parts of a roll need not be next to each other.
    """
    left, right = eqn.invars
    if isinstance(left, Literal) or isinstance(right, Literal):
        return [eqn]
    for total, other in ((left, right), (right, left)):
        if total in sums and other in known:
            pieces, rest = sums[total]
            both = _sum(pieces, known[other])
            if both is None:
                continue
            if not _is_rotation(both):
                sums[eqn.outvars[0]] = both, rest
                return [eqn]
            moved = _compat.new_var(eqn.outvars[0].aval)
            first = eqn.replace(outvars=[moved])
            return [*_written(first, both), eqn.replace(invars=[moved, rest])]
    for total, other in ((left, right), (right, left)):
        if total in sums and other not in known:
            pieces, rest = sums[total]
            var = _compat.new_var(eqn.outvars[0].aval)
            sums[eqn.outvars[0]] = pieces, var
            return [eqn.replace(invars=[rest, other], outvars=[var]), eqn]
    for part, other in ((left, right), (right, left)):
        if part in known and other not in known and other not in sums:
            sums[eqn.outvars[0]] = known[part], other
    return [eqn]


def sources_of(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Return, for each index of a rearranged dimension, its index in the array."""
    return tuple(
        i for first, k in segments for i in range(first or 0, (first or 0) + k)
    )


def _is_rotation(pieces: _Pieces) -> bool:
    """Whether pieces are all parts of their array, each once, in another order.

    There must be at least two parts, and no zeros among them.
    """
    segments = [s for s in pieces.segments if s[0] is not None]
    if len(segments) < max(2, len(pieces.segments)):
        return False
    whole = (0, pieces.source.aval.shape[pieces.dimension])
    return _merged(sorted(segments, key=lambda s: s[0] or 0)) == (whole,)


def _merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Merge adjacent segments that continue each other, or are both zeros."""
    joined: list[Segment] = []
    for first, k in segments:
        if joined:
            before, size = joined[-1]
            zeros = before is None and first is None
            if zeros or (before is not None and first == before + size):
                joined[-1] = (before, size + k)
                continue
        joined.append((first, k))
    return tuple(joined)


# ---------------------------------------------------------------------------------
# Rules, one for each primitive: `rule(eqn, known)` returns the `_Pieces` of each result
# of an equation; None if a result does not consist of pieces. `known` has the pieces of
# the variables defined so far.


def _pieces_of(var: Atom, dimension: int, known: dict[Var, _Pieces]) -> _Pieces | None:
    """Return the operand of a slice or split as pieces along a dimension.

    If no pieces of it are known, it is one piece of itself. None if its known pieces
    lie along another dimension, or if it is a literal.
    """
    if isinstance(var, Literal):
        return None
    pieces = known.get(var)
    if pieces is None:
        whole = ((0, var.aval.shape[dimension]),)
        return _Pieces(var, dimension, whole, (*range(var.aval.ndim),))
    return pieces if pieces.position == dimension else None


def _pieces_of_all(atoms: Sequence[Atom], known: dict[Var, _Pieces]) -> list[_Pieces]:
    """Return the operands of a concatenation or a sum as pieces of one array.

    The list has the pieces of each operand; [] unless all have pieces of the same array
    along the same dimension.
    """
    parts = []
    for atom in atoms:
        part = None if isinstance(atom, Literal) else known.get(atom)
        if part is None:
            return []
        parts.append(part)
    array = {(id(part.source), part.dimension, part.order) for part in parts}
    return parts if len(array) == 1 else []


def _only_true(flags: Sequence[bool]) -> int | None:
    """Return the position of the only true flag; None if none or several are true."""
    chosen = [i for i, flag in enumerate(flags) if flag]
    return chosen[0] if len(chosen) == 1 else None


def _slice(eqn: Eqn, known: dict[Var, _Pieces]) -> list[_Pieces] | None:
    """Describe the result of a `slice` along one dimension as a piece."""
    x, p = eqn.invars[0], eqn.params
    bounds = [*zip(p["start_indices"], p["limit_indices"], strict=True)]
    whole = [(0, size) for size in x.aval.shape]
    dimension = _only_true([a != b for a, b in zip(bounds, whole, strict=True)])
    if dimension is None or any(s != 1 for s in p["strides"] or ()):
        return None
    pieces = _pieces_of(x, dimension, known)
    return None if pieces is None else [pieces.cut(*bounds[dimension])]


def _split(eqn: Eqn, known: dict[Var, _Pieces]) -> list[_Pieces] | None:
    """Describe each result of a `split` as a piece."""
    pieces = _pieces_of(eqn.invars[0], eqn.params["axis"], known)
    if pieces is None:
        return None
    cuts, start = [], 0
    for size in eqn.params["sizes"]:
        cuts.append(pieces.cut(start, start + size))
        start += size
    return cuts


def _concatenate(eqn: Eqn, known: dict[Var, _Pieces]) -> list[_Pieces] | None:
    """Describe the result of a `concatenate` as pieces, the parts of another variable.

    None unless all operands are pieces of one array along the dimension in which they
    are joined.
    """
    dimension = eqn.params["dimension"]
    parts = _pieces_of_all(eqn.invars, known)
    if not parts or parts[0].position != dimension:
        return None
    segments = [s for part in parts for s in part.segments]
    return [replace(parts[0], segments=_merged(segments))]


def _pad(eqn: Eqn, known: dict[Var, _Pieces]) -> list[_Pieces] | None:
    """Describe the result of a `pad` with zeros as pieces: the operand's, and zeros.

    None unless zeros are added at the ends of the dimension of the pieces alone.
    """
    x, value = eqn.invars
    config = eqn.params["padding_config"]
    dimension = _only_true([any(c) for c in config])
    # A literal zero, as the transpose of a slice pads with.
    if dimension is None or not isinstance(value, Literal) or value.val != 0:
        return None
    low, high, interior = map(int, config[dimension])
    pieces = None if isinstance(x, Literal) else known.get(x)
    if min(low, high) < 0 or interior or pieces is None:
        return None
    if pieces.position != dimension:
        return None
    zeros = [[(None, k)] if k else [] for k in (low, high)]
    segments = [*zeros[0], *pieces.segments, *zeros[1]]
    return [replace(pieces, segments=_merged(segments))]


def _transpose(eqn: Eqn, known: dict[Var, _Pieces]) -> list[_Pieces] | None:
    """Describe a transpose of pieces as pieces: batching a concatenation writes it."""
    pieces = (
        known.get(eqn.invars[0]) if not isinstance(eqn.invars[0], Literal) else None
    )
    if pieces is None:
        return None
    order = tuple(pieces.order[d] for d in eqn.params["permutation"])
    return [replace(pieces, order=order)]


def _add(eqn: Eqn, known: dict[Var, _Pieces]) -> list[_Pieces] | None:
    """Describe a sum as pieces, if at each position one of its operands is zeros."""
    parts = _pieces_of_all(eqn.invars, known)
    both = _sum(*parts) if parts else None
    return None if both is None else [both]


def _sum(left: _Pieces, right: _Pieces) -> _Pieces | None:
    """Return the sum of pieces of one array; None if they are not apart, or not alike.

    At each position one of them must be zeros.
    """
    parts = left, right
    alike = [(id(p.source), p.dimension, p.order, p.size) for p in parts]
    if alike[0] != alike[1]:
        return None
    ends, position = set(), 0
    for part in parts:
        position = 0
        for _, k in part.segments:
            position += k
            ends.add(position)
    segments, start = [], 0
    for end in sorted(ends):
        ((a, k),), ((b, _),) = (part.cut(start, end).segments for part in parts)
        if a is not None and b is not None:
            return None
        segments.append((b if a is None else a, k))
        start = end
    return replace(left, segments=_merged(segments))


_RULES = {
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "pad": _pad,
    "transpose": _transpose,
    "add_any": _add,
    "add": _add,
}
