"""Slices of one array that are put together in another order, as one equation.

Input: the equations of an inlined jaxpr. Output: the same equations, in which a
`rearrange` gives each result that has all parts of an array along one dimension, in
another order. `jnp.roll` is written like that:

    roll          slice, slice, concatenate
    its transpose split, pad with zeros, pad with zeros, add

Along the group axis, `moves_between_groups` makes a permute of it; along another axis
it is work of each group; of a global value it is slices and a concatenation again.

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
    """The primitive of an array whose parts along a dimension are in another order."""

    def bind(self, *args, dimension: int, segments: tuple, **_) -> Any:
        """Write the equations of `lax` for it.

        Args:
          *args: The array.
          dimension: The dimension.
          segments: For each part its first index and its size, a tuple of pairs.
        """
        (x,) = args
        parts = [lax.slice_in_dim(x, i, i + k, axis=dimension) for i, k in segments]
        return lax.concatenate(parts, dimension)


rearrange_p = Rearrange("rearrange")


@dataclass(frozen=True)
class _Pieces:
    """What an array is made of: parts of another one along a dimension, and zeros."""

    source: Any
    dimension: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(k for _, k in self.segments)

    def cut(self, start: int, stop: int) -> "_Pieces":
        """The pieces of the slice from `start` to `stop`."""
        cut, position = [], 0
        for first, k in self.segments:
            low, high = max(start - position, 0), min(stop - position, k)
            if low < high:
                cut.append((None if first is None else first + low, high - low))
            position += k
        return _Pieces(self.source, self.dimension, _joined(cut))


def recognize_rotations(eqns: Sequence[Any]) -> list:
    """Write results that have all parts of an array in another order as one equation.

    Args:
      eqns: The equations, definitions before uses.

    Returns:
      The list of equations. Those that gave the parts stay, and may be dead.
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
    """For each index of a rearranged dimension the index in the array."""
    return tuple(
        i for first, k in segments for i in range(first or 0, (first or 0) + k)
    )


def _is_rotation(pieces: _Pieces) -> bool:
    """Whether pieces are all parts of their array, and in another order."""
    segments = [s for s in pieces.segments if s[0] is not None]
    if len(segments) < max(2, len(pieces.segments)):
        return False
    whole = (0, pieces.source.aval.shape[pieces.dimension])
    return _joined(sorted(segments, key=lambda s: s[0] or 0)) == (whole,)


def _joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Segments, of which those that follow each other in the array are one."""
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
# Rules: from an equation and the pieces that are known of variables to those of its
# results; None if it does something else.


def _whole(var, dimension: int, known: dict) -> _Pieces | None:
    """The pieces of a variable along a dimension; None if it has others."""
    if isinstance(var, Literal):
        return None
    pieces = known.get(var)
    if pieces is None:
        return _Pieces(var, dimension, ((0, var.aval.shape[dimension]),))
    return pieces if pieces.dimension == dimension else None


def _known_of(atoms: Sequence[Any], known: dict) -> list[_Pieces]:
    """The pieces of atoms, of one array along one dimension; [] if they are others."""
    parts = []
    for atom in atoms:
        part = None if isinstance(atom, Literal) else known.get(atom)
        if part is None:
            return []
        parts.append(part)
    array = {(id(part.source), part.dimension) for part in parts}
    return parts if len(array) == 1 else []


def _only(flags: Sequence[bool]) -> int | None:
    """The position of the only true flag; None if there is not one."""
    chosen = [i for i, flag in enumerate(flags) if flag]
    return chosen[0] if len(chosen) == 1 else None


def _slice(eqn, known):
    x, p = eqn.invars[0], eqn.params
    bounds = [*zip(p["start_indices"], p["limit_indices"], strict=True)]
    whole = [(0, size) for size in x.aval.shape]
    dimension = _only([a != b for a, b in zip(bounds, whole, strict=True)])
    if dimension is None or any(s != 1 for s in p["strides"] or ()):
        return None
    pieces = _whole(x, dimension, known)
    return None if pieces is None else [pieces.cut(*bounds[dimension])]


def _split(eqn, known):
    pieces = _whole(eqn.invars[0], eqn.params["axis"], known)
    if pieces is None:
        return None
    cuts, start = [], 0
    for size in eqn.params["sizes"]:
        cuts.append(pieces.cut(start, start + size))
        start += size
    return cuts


def _concatenate(eqn, known):
    dimension = eqn.params["dimension"]
    parts = _known_of(eqn.invars, known)
    if not parts or parts[0].dimension != dimension:
        return None
    segments = [s for part in parts for s in part.segments]
    return [_Pieces(parts[0].source, dimension, _joined(segments))]


def _pad(eqn, known):
    x, value = eqn.invars
    config = eqn.params["padding_config"]
    dimension = _only([any(c) for c in config])
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
    return [_Pieces(pieces.source, dimension, _joined(segments))]


def _add(eqn, known):
    parts = _known_of(eqn.invars, known)
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
    return [_Pieces(left.source, left.dimension, _joined(segments))]


_RULES = {
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "pad": _pad,
    "add_any": _add,
    "add": _add,
}
