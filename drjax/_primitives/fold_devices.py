"""Exchanges of one state of each device, in as few bytes as the function allows.

Input: inside a `shard_map` over m devices, the state r_d of each device, a list of
leaves `[1, *s]` of B bytes together. Output: what each device needs of the states to
fold them in the order of the devices, by the balanced tree of `fold_by_tree`, and to
differentiate the fold in its own state:

    way        bytes sent       each device receives
    columns    B (m - 1) / m    the elements of its part of all states, `[used, *t]`, by
                                an all-to-all: for a function that acts on each element
                                alone. Scalars, as a score by which a group is chosen,
                                are gathered.
    swaps      B log2 m         the states next to its path to the root, `[levels, *s]`:
                                in level b device d swaps the state of its node with
                                device d XOR 2^b, and both combine the two in their
                                order
    gathered   B (m - 1)        all states, `[used, *s]`: any function, and any m

All are the same tree of the same operations, so that results have the same bits. If m
is no power of two, a node with fewer devices than its neighbor sends its state several
times; where that costs more than a gather, states are gathered.

By columns an all-gather collects the parts of the result, B (m - 1) / m bytes, and in
the backward pass an all-to-all returns cotangents, as many. By swaps each device has
the result, and, backwards, the cotangents on its own path, from what it has received.

Invariants: the first `used` devices have groups; others' states are left out. Sharp
edges: small states are gathered, as that is one message; so are all where types vary
(VMA), and where other mesh axes may shard the leaves.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._jaxprs.eval_jaxpr import as_arrays, evaluate
from drjax._jaxprs.prng_keys import on_raw
from drjax._jaxprs.walk import CALLS
from drjax._primitives.device_sums import reduce_scatter
from drjax._primitives.fold_trees import (
    COLUMNS,
    GATHERED,
    SWAPS,
    Combine,
    States,
    first_of,
    fold_by_tree,
)
from drjax._primitives.map_fn import group_context
from drjax._sharding.execute import vary
from drjax._sharding.layout import Layout, other_axes

_SMALL = 128  # bytes of a state that is gathered in one message

# Equations that derivatives write on a mesh, where no axis shards a state.
_LAYOUTS = ("reshard", "sharding_constraint")

# Equations that keep the order of the elements, but not the shape.
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")


@_compat.weakref_lru_cache
def is_pointwise(jaxpr: ClosedJaxpr) -> bool:
    """Whether each element of the results depends on the elements of its place alone.

    Scalars may take part in all places, but no array in a scalar.
    """
    raw = _compat.open_jaxpr(jaxpr)
    closed = not raw.effects and not raw.constvars
    return closed and all(map(_acts_on_elements, raw.eqns))


def _acts_on_elements(eqn: Eqn) -> bool:
    """Whether an equation acts on each element alone, or on scalars in all places."""
    avals: list[Aval] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    literals: list[Aval] = [v.aval for v in eqn.invars if isinstance(v, Literal)]
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals):
        return False
    if any(aval.shape for aval in literals):
        return False
    name = eqn.primitive.name
    if name in CALLS:
        inner = eqn.params[CALLS[name]]
        return not _compat.jaxpr_consts(inner) and is_pointwise(inner)
    if name in _LAYOUTS:
        return True
    if name in _RESHAPES:
        source, result = eqn.invars[0].aval, eqn.outvars[0].aval
        same = not source.shape or source.size == result.size
        return len(eqn.invars) == 1 and same and bool(result.shape or not source.shape)
    shapes = {aval.shape for aval in avals if aval.shape}
    return name in ELEMENTWISE and len(shapes) <= 1


def _width(aval: Aval, m: int) -> tuple[int, ...]:
    """The shape of a device's part of an array; () of a scalar."""
    return (-(-math.prod(aval.shape) // m),) if aval.shape else ()


def _function_of_parts(jaxpr: ClosedJaxpr, m: int) -> Callable[..., list[Array]]:
    """Make the function of a part of the elements of a pointwise jaxpr's operands.

    For an array of d elements it takes and returns `[ceil(d / m)]`, scalars as they
    are.
    """

    def of_part(eqn: Eqn, operands: list[Any]) -> Sequence[Array] | None:
        name = eqn.primitive.name
        if name in CALLS:
            return evaluate(eqn.params[CALLS[name]], operands, of_part)
        if name in _LAYOUTS:
            return operands
        if name not in _RESHAPES:
            return None
        return [jnp.broadcast_to(operands[0], _width(eqn.outvars[0].aval, m))]

    avals: list[Aval] = jaxpr.out_avals
    dtypes = [aval.dtype for aval in avals]
    return lambda *args: as_arrays(evaluate(jaxpr, args, of_part), dtypes)


@_compat.weakref_lru_cache
def of_parts(jaxpr: ClosedJaxpr, layout: Layout) -> ClosedJaxpr:
    """Trace the function of a part of the elements of a pointwise jaxpr's operands."""
    m = layout.devices
    avals: list[Aval] = jaxpr.in_avals
    parts = [_compat.ShapedArray(_width(x, m), x.dtype) for x in avals]
    with group_context(layout):
        run = _function_of_parts(jaxpr, m)
        traced, consts = _compat.trace_to_jaxpr(run, parts, "part")
    assert not consts, "a pointwise jaxpr has no constants"
    return traced


def choose_way(
    layout: Layout,
    jaxprs: Sequence[ClosedJaxpr | None],
    consts: Iterable[Any],
    leaves: Sequence[Any],
) -> str:
    """Choose how devices exchange states: by `COLUMNS`, by `SWAPS`, or `GATHERED`.

    `jaxprs` are those of the function and, if the fold is differentiated, of its
    derivative; None if there is none. `consts` has what they close over, and `leaves`
    the leaves of one state, `[*s]`: arrays or types.
    """
    if not layout.axes or _compat.check_vma():
        return GATHERED
    if other_axes(layout) or layout.other_explicit_axes:
        return GATHERED
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves):
        return GATHERED
    if sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) <= _SMALL:
        return GATHERED
    scalars = not any(x.shape for x in consts)
    pointwise = all(x is not None and is_pointwise(x) for x in jaxprs)
    if scalars and pointwise and all(math.prod(x.shape) for x in leaves):
        return COLUMNS
    rounds = sum(len(swap.rounds) for swap in levels(layout.devices, layout.used))
    return SWAPS if rounds < max(layout.devices, 2) else GATHERED


# ---------------------------------------------------------------------------------
# Columns


@dataclass(frozen=True)
class Columns:
    """The exchange of elements; what a leaf has before `*s` are dimensions of a batch.

    Attributes:
      layout: The layout, whose mesh axes are Manual.
      shapes: For each leaf the shape `[*batch, *s]` of a state.
      parts: For each leaf that of a part, `[*batch, w]`; of a scalar `[*batch]`.
    """

    layout: Layout
    shapes: Sequence[tuple[int, ...]]
    parts: Sequence[tuple[int, ...]]

    def is_scalar(self, i: int) -> bool:
        """Whether leaf i is one number, which is in the place of all elements."""
        return self.shapes[i] == self.parts[i]

    def _split(self, i: int, x: Array, mode: str) -> Array:
        """Divide leaf i of a state, `[*batch, *s]`, into parts `[m, *batch, w]`."""
        *batch, width = self.parts[i]
        m, size = self.layout.devices, math.prod(self.shapes[i][len(batch) :])
        padding = [*[(0, 0)] * len(batch), (0, m * width - size)]
        flat = x.reshape(*batch, size)
        # Copies of a real element: loops there end, and nothing is divided by zero.
        flat = jnp.pad(flat, padding, **({"mode": "edge"} if mode == "edge" else {}))
        return jnp.moveaxis(flat.reshape(*batch, m, width), -2, 0)

    def _joined(self, i: int, parts: Array) -> Array:
        """Join the parts `[m, *batch, w]` of leaf i to `[*batch, *s]`."""
        *batch, _ = self.parts[i]
        size = math.prod(self.shapes[i][len(batch) :])
        flat = jnp.moveaxis(parts, 0, -2).reshape(*batch, -1)
        return flat[..., :size].reshape(self.shapes[i])

    def exchange(self, i: int, own: Array, padding: str = "edge") -> Array:
        """Exchange leaf i of the devices' states: `[1, *s]` to `[used, *t]`."""
        axes, used = self.layout.axes, self.layout.used
        if self.is_scalar(i):
            return lax.all_gather(own, axes, tiled=True)[:used]
        # Else the compiler recomputes the state for each device that gets a part of it.
        parts = self._split(i, lax.optimization_barrier(own[0]), padding)
        return lax.all_to_all(parts, axes, 0, 0, tiled=True)[:used]

    def back(self, i: int, parts: Array) -> Array:
        """Return cotangents of leaf i, `[used, *t]`, to their devices: `[1, *s]`.

        Those of a scalar are sums over the devices.
        """
        axes, m = self.layout.axes, self.layout.devices
        padding = [(0, m - parts.shape[0]), *[(0, 0)] * (parts.ndim - 1)]
        parts = jnp.pad(parts, padding)
        if self.is_scalar(i):
            return reduce_scatter(self.layout, parts)
        return self._joined(i, lax.all_to_all(parts, axes, 0, 0, tiled=True))[None]

    def own(self, i: int, x: Array, padding: str = "edge") -> Array:
        """Return this device's part, `[*t]`, of leaf i of a global state, `[*s]`."""
        if self.is_scalar(i):
            return x
        parts = self._split(i, x, padding)
        device = lax.axis_index(self.layout.axes)
        return lax.dynamic_index_in_dim(parts, device, 0, False)

    def whole(self, i: int, part: Array) -> Array:
        """Collect the devices' parts, `[*t]`, of leaf i: `[*s]`, the same on all."""
        if self.is_scalar(i):
            return part
        return self._joined(i, lax.all_gather(part, self.layout.axes))


# ---------------------------------------------------------------------------------
# Swaps


@dataclass(frozen=True)
class TreeLevel:
    """A level of the tree over the devices, whose nodes have `size` devices each.

    Attributes:
      size: The number of devices of a node; the last one may have fewer.
      rounds: Permutations, in each of which every device receives at most one state,
        that of the neighbor of its node.
      full: Whether every node has a neighbor and groups.
    """

    size: int
    rounds: tuple[tuple[tuple[int, int], ...], ...]
    full: bool


@functools.lru_cache(maxsize=64)
def levels(m: int, used: int) -> tuple[TreeLevel, ...]:
    """List the levels of the tree over m devices; the first `used` have groups.

    In round t, the right node of a pair sends its state to as many devices of the left
    node as it has itself, so that a node with fewer devices takes several rounds.
    """
    result, size = [], 1
    while size < m:
        rounds: dict[int, list[tuple[int, int]]] = {}
        for first in range(0, min(m - size, used), 2 * size):
            left, right = range(first, first + size), range(m)[first + size :][:size]
            rounds.setdefault(0, []).extend(zip(left, right, strict=False))
            if right[0] < used:
                for i, device in enumerate(left):
                    t, source = divmod(i, len(right))
                    rounds.setdefault(t, []).append((right[source], device))
        full = m % (2 * size) == 0 and used > m - size
        result.append(TreeLevel(size, tuple(map(tuple, rounds.values())), full))
        size *= 2
    return tuple(result)


@dataclass(frozen=True)
class Swaps:
    """The exchange of the states of nodes, from the devices up to the root.

    Attributes:
      layout: The layout, whose mesh axes are Manual.
      combine: The function of pairs of states, `[1, *s]`.
    """

    layout: Layout
    combine: Combine

    @property
    def levels(self) -> tuple[TreeLevel, ...]:
        return levels(self.layout.devices, self.layout.used)

    def place(self, swap: TreeLevel) -> "Place":
        """Say where this device is in a level."""
        device, size = lax.axis_index(self.layout.axes), swap.size
        node = device // size
        start, neighbor = node * size, (node ^ 1) * size
        return Place(
            is_left=node % 2 == 0,
            is_first=device % (2 * size) == 0,
            real=start < self.layout.used,
            meets=neighbor < self.layout.used,
            turn=(device - start) // jnp.clip(self.layout.devices - neighbor, 1, size),
        )

    def receive(self, swap: TreeLevel, state: States) -> States:
        """Receive the neighbor's state of a level; if there is none, copy the own."""
        axes, place, other = self.layout.axes, self.place(swap), state
        for t, pairs in enumerate(swap.rounds):
            new = [lax.ppermute(x, axes, pairs) for x in state]
            if swap.full:
                return new
            mine = place.meets & jnp.where(place.is_left, place.turn == t, t == 0)
            other = [jnp.where(mine, x, y) for x, y in zip(new, other, strict=True)]
        return other

    def step(self, swap: TreeLevel, state: States, other: States) -> States:
        """Combine the state of a node with the neighbor's, in their order."""
        place = self.place(swap)
        total = self.combine(*place.in_order(state, other))
        if swap.full:
            return total
        both = place.real & place.meets
        triples = zip(total, state, other, strict=True)
        return [
            jnp.where(both, new, jnp.where(place.real, x, y)) for new, x, y in triples
        ]

    def exchange(self, own: States) -> list[States]:
        """Collect the states next to this device's path, one for each level."""
        return self._climb(own)[0]

    def fold(self, own: States) -> States:
        """Fold the devices' states, leaves `[1, *s]`; the same on all devices."""
        return self._climb(own)[1]

    def _climb(self, state: States) -> tuple[list[States], States]:
        others = []
        for swap in self.levels:
            others.append(self.receive(swap, state))
            state = self.step(swap, state, others[-1])
        return others, state

    def path(self, own: States, others: list[States]) -> list[States]:
        """List the states on this device's path, from its own one to the root."""
        path = [own]
        for swap, other in zip(self.levels, others, strict=True):
            path.append(self.step(swap, path[-1], other))
        return path


@dataclass(frozen=True)
class Place:
    """Where a device is in a level of the tree; scalars, which differ by device.

    Attributes:
      is_left: Whether its node is the left one of a pair.
      is_first: Whether it is the first device of the pair.
      real: Whether its node has groups.
      meets: Whether the neighbor of its node has groups.
      turn: The round in which it receives the neighbor's state, if it is left.
    """

    is_left: Array
    is_first: Array
    real: Array
    meets: Array
    turn: Array

    def in_order(self, state: States, other: States) -> tuple[States, States]:
        """Return the states of the left node and of the right one."""
        pairs = [*zip(state, other, strict=True)]
        first = [jnp.where(self.is_left, x, y) for x, y in pairs]
        return first, [jnp.where(self.is_left, y, x) for x, y in pairs]


# ---------------------------------------------------------------------------------
# All states


def states_of_devices(layout: Layout, own: States, varying: frozenset[str]) -> States:
    """Collect one state of each device that has groups, by all-gathers.

    It is called in the code of one device. It runs one all-gather for each dtype; or
    one for each leaf, if the mesh has axes that are not the partition's and that may
    shard the leaves: Auto ones larger than one, or Explicit ones.

    `own` is this device's state, `[1, *s]`. The result has those of the devices that
    have groups, `[used, *s]`, in their order, the same on all of them; it is `own`
    itself if the program runs locally. Before the
    all-gather, the leaves are cast to vary over the partition's axes and over
    `varying`, the Manual mesh axes over which some operand of the fold varies.
    """
    if not layout.axes:
        return own
    used = layout.used
    # All devices have the same result. With VMA checking its type must say so.
    to = "invarying" if _compat.check_vma() else "varying"
    axes = varying | set(layout.axes)

    def gathered(x: Array) -> Array:
        if not x.size:
            return jnp.zeros((used, *x.shape[1:]), x.dtype)
        x = lax.all_gather(vary(x, axes), layout.axes, tiled=True, to=to)
        return lax.slice_in_dim(x, 0, used)

    def together(*leaves: Array) -> list[Array]:
        ends = np.cumsum([x.size for x in leaves])[:-1]
        flat = lax.concatenate([lax.reshape(x, (1, x.size)) for x in leaves], 1)
        parts = jnp.split(gathered(flat), ends, axis=1)
        pairs = zip(parts, leaves, strict=True)
        return [lax.reshape(y, (used, *x.shape[1:])) for y, x in pairs]

    # Where other axes of the mesh shard a leaf, a reshape could cost a collective.
    others = other_axes(layout) or layout.other_explicit_axes
    pack = len(own) > 1 and not others
    each = lambda *leaves: [gathered(x) for x in leaves]
    return _by_dtype(together if pack else each, own)


def _by_dtype(
    fn: Callable[..., Sequence[Array]], leaves: Sequence[jax.Array]
) -> States:
    """Apply a function of arrays of one dtype to the leaves of each dtype.

    `fn(*leaves)` returns as many arrays; the results are in the order of the leaves. It
    is called once for each dtype; for typed random keys, once for each leaf, with the
    raw data of the keys.
    """
    outs: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        chosen = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            one = lambda x: fn(x)[0]
            outs |= {i: on_raw(one, leaves[i]) for i in chosen}
        else:
            results = fn(*(leaves[i] for i in chosen))
            outs |= dict(zip(chosen, results, strict=True))
    return [outs[i] for i in range(len(leaves))]


# ---------------------------------------------------------------------------------
# Values


def fold_devices(
    layout: Layout,
    jaxpr: ClosedJaxpr | None,
    consts: Sequence[Array],
    combine: Combine,
    init: States,
    own: States,
    varying: frozenset[str] = frozenset(),
) -> States:
    """Fold the devices' states, `[1, *s]`, after a first one; the same on all devices.

    `combine` combines pairs of states; it is that of `jaxpr`, None if there is none.
    `init` is the first state, and the result, `[*s]`. `varying` is that of
    `states_of_devices`.
    """
    leaves = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in own]
    way = choose_way(layout, [jaxpr], consts, leaves)
    if way != COLUMNS or jaxpr is None:
        if way == SWAPS:
            total = Swaps(layout, combine).fold(own)
        else:
            total = fold_by_tree(combine, states_of_devices(layout, own, varying))
        with _compat.without_vma():
            return first_of(combine([y[None] for y in init], total))
    m = layout.devices
    shapes = [x.shape for x in leaves], [_width(x, m) for x in leaves]
    columns, axes = Columns(layout, *shapes), (None,) * len(consts) + (0, 0) * len(own)
    pairs = jax.vmap(_function_of_parts(jaxpr, m), axes)
    of_parts = lambda a, b: list(pairs(*consts, *a, *b))
    parts = [columns.exchange(i, x) for i, x in enumerate(own)]
    first = [columns.own(i, y)[None] for i, y in enumerate(init)]
    total = first_of(of_parts(first, fold_by_tree(of_parts, parts)))
    return [columns.whole(i, x) for i, x in enumerate(total)]
