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
of the planner alone, never in those of stages. In a transpose the sum must be of the
parts alone, as that of `jnp.roll` is, which is a call of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core import Literal, Primitive

# The first index in the array, and the number of indices; None: so many zeros.
Segment = tuple[int | None, int]


class Rearrange(Primitive):
    """The primitive that puts parts of an array in another order along a dimension."""

    def bind(self, *args, dimension: int, segments: tuple, **_) -> Any:
        """Rearrange an array by equations of `lax`, as stages have no such primitive.

        Args:
          *args: The array.
          dimension: The dimension along which it is divided.
          segments: For each part, in the new order, its first index in the array and
            its size.

        Returns:
          The rearranged array.
        """
        (x,) = args
        parts = [lax.slice_in_dim(x, i, i + k, axis=dimension) for i, k in segments]
        return lax.concatenate(parts, dimension)


rearrange_p = Rearrange("rearrange")


@dataclass(frozen=True)
class _Pieces:
    """A variable as consecutive parts of another array along a dimension, and zeros.

    Attributes:
      source: The variable of the other array.
      dimension: The dimension.
      segments: For each part its first index in `source`, and its size. None in place
        of an index: the part is zeros.
    """

    source: Any
    dimension: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(k for _, k in self.segments)

    def cut(self, start: int, stop: int) -> "_Pieces":
        """The pieces of the slice from index `start` to `stop` along the dimension."""
        cut, position = [], 0
        for first, k in self.segments:
            low, high = max(start - position, 0), min(stop - position, k)
            if low < high:
                cut.append((None if first is None else first + low, high - low))
            position += k
        return _Pieces(self.source, self.dimension, _merged(cut))


def recognize_rotations(eqns: Sequence[Any]) -> list:
    """Replace the last equation of each roll, or of its transpose, by a `rearrange`.

    Args:
      eqns: The equations, definitions before uses.

    Returns:
      The list of equations. The others of a roll stay, and are dead without another
      use.
    """
    known: dict[Any, _Pieces] = {}
    kept = []
    for eqn in eqns:
        rule = _RULES.get(eqn.primitive.name)
        results = None if rule is None else rule(eqn, known)
        if results is not None and len(results) == 1 and _is_rotation(results[0]):
            (pieces,) = results
            params = {"dimension": pieces.dimension, "segments": pieces.segments}
            eqn = eqn.replace(
                primitive=rearrange_p, invars=[pieces.source], params=params
            )
        elif results is not None:
            known.update(zip(eqn.outvars, results, strict=True))
        kept.append(eqn)
    return kept


def sources_of(segments: Sequence[Segment]) -> tuple[int, ...]:
    """The index in the array of each index of the rearranged dimension.

    Args:
      segments: For each part its first index in the array, and its size.
    """
    return tuple(
        i for first, k in segments for i in range(first or 0, (first or 0) + k)
    )


def _is_rotation(pieces: _Pieces) -> bool:
    """Whether pieces are all parts of their array, each once, in another order."""
    segments = [s for s in pieces.segments if s[0] is not None]
    if len(segments) < max(2, len(pieces.segments)):
        return False
    whole = (0, pieces.source.aval.shape[pieces.dimension])
    return _merged(sorted(segments, key=lambda s: s[0] or 0)) == (whole,)


def _merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Merge segments that follow each other in the array, or are both zeros, to one.

    Args:
      segments: Pairs of a first index, None for zeros, and a size.
    """
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


def _pieces_of(var, dimension: int, known: dict) -> _Pieces | None:
    """A variable as pieces along a dimension, for the operand of a slice or split.

    Args:
      var: The variable or literal.
      dimension: The dimension.
      known: For each variable that is known to consist of pieces these.

    Returns:
      Its pieces: the whole variable as one piece, if none are known. None if its known
        pieces lie along another dimension, or if it is a literal.
    """
    if isinstance(var, Literal):
        return None
    pieces = known.get(var)
    if pieces is None:
        return _Pieces(var, dimension, ((0, var.aval.shape[dimension]),))
    return pieces if pieces.dimension == dimension else None


def _pieces_of_all(atoms: Sequence[Any], known: dict) -> list[_Pieces]:
    """The operands of a concatenation or a sum as pieces of one array.

    Args:
      atoms: The operands, variables or literals.
      known: For each variable that is known to consist of pieces these.

    Returns:
      For each operand its pieces; [] unless all have pieces of the same array along the
      same dimension.
    """
    parts = []
    for atom in atoms:
        part = None if isinstance(atom, Literal) else known.get(atom)
        if part is None:
            return []
        parts.append(part)
    array = {(id(part.source), part.dimension) for part in parts}
    return parts if len(array) == 1 else []


def _only_true(flags: Sequence[bool]) -> int | None:
    """The position of the only true flag; None if none or several are true."""
    chosen = [i for i, flag in enumerate(flags) if flag]
    return chosen[0] if len(chosen) == 1 else None


def _slice(eqn, known):
    """The piece that a `slice` with step 1 takes, if it cuts one dimension only."""
    x, p = eqn.invars[0], eqn.params
    bounds = [*zip(p["start_indices"], p["limit_indices"], strict=True)]
    whole = [(0, size) for size in x.aval.shape]
    dimension = _only_true([a != b for a, b in zip(bounds, whole, strict=True)])
    if dimension is None or any(s != 1 for s in p["strides"] or ()):
        return None
    pieces = _pieces_of(x, dimension, known)
    return None if pieces is None else [pieces.cut(*bounds[dimension])]


def _split(eqn, known):
    """The pieces that a `split` divides its operand into, one for each result."""
    pieces = _pieces_of(eqn.invars[0], eqn.params["axis"], known)
    if pieces is None:
        return None
    cuts, start = [], 0
    for size in eqn.params["sizes"]:
        cuts.append(pieces.cut(start, start + size))
        start += size
    return cuts


def _concatenate(eqn, known):
    """The pieces of a `concatenate` of pieces of one array along their dimension."""
    dimension = eqn.params["dimension"]
    parts = _pieces_of_all(eqn.invars, known)
    if not parts or parts[0].dimension != dimension:
        return None
    segments = [s for part in parts for s in part.segments]
    return [_Pieces(parts[0].source, dimension, _merged(segments))]


def _pad(eqn, known):
    """The pieces of a `pad` with zeros at the ends of the dimension of its operand."""
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
    if pieces.dimension != dimension:
        return None
    zeros = [[(None, k)] if k else [] for k in (low, high)]
    segments = [*zeros[0], *pieces.segments, *zeros[1]]
    return [_Pieces(pieces.source, dimension, _merged(segments))]


def _add(eqn, known):
    """The pieces of a sum, if of two pieces at one position one is always zeros."""
    parts = _pieces_of_all(eqn.invars, known)
    if not parts or parts[0].size != parts[1].size:
        return None
    left = parts[0]
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
    return [_Pieces(left.source, left.dimension, _merged(segments))]


_RULES = {
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "pad": _pad,
    "add_any": _add,
    "add": _add,
}
