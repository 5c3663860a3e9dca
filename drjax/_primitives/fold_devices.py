"""Folds of one state of each device, in as few bytes as the function allows.

Input: inside a `shard_map` over m devices, the state r_d of each device, a list of
leaves `[1, *s]` of B bytes together. Output: the same on all devices, the fold of the
states in the order of the devices, by the balanced tree of `fold_by_tree`:

    columns     2 B (m - 1) / m bytes a device, B of memory: a function that acts on
                each element alone. An all-to-all gives each device the elements of its
                part of all states; it folds these, and an all-gather collects the
                parts. Scalars, as a score by which a group is chosen, are gathered.
    butterfly   B log2 m bytes, 2 B of memory, for m = 2^p: in round b device d swaps
                its state with device d XOR 2^b, and both combine the two in their order
    gathered    B (m - 1) bytes, m B of memory: any function, and any m

All are the same tree of the same operations, so that results have the same bits.

Invariants: the first `used` devices have groups; others' states are left out.
Sharp edges: small states are gathered, as that is one message; so are all where types
vary (VMA), and where other mesh axes may shard the leaves. Of derivatives each device
needs all states: they are gathered.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._jaxprs.eval_jaxpr import as_arrays, evaluate
from drjax._jaxprs.walk import CALLS
from drjax._sharding.layout import Layout, other_axes

States = list[jax.Array]
Combine = Callable[[States, States], States]

_SMALL = 128  # bytes of a state that is gathered in one message

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
    if name in _RESHAPES:
        source, result = eqn.invars[0].aval, eqn.outvars[0].aval
        same = not source.shape or source.size == result.size
        return len(eqn.invars) == 1 and same and bool(result.shape or not source.shape)
    shapes = {aval.shape for aval in avals if aval.shape}
    return name in ELEMENTWISE and len(shapes) <= 1


def _of_parts(jaxpr: ClosedJaxpr, m: int) -> Callable[..., list[Array]]:
    """Make the function of a part of the elements of a pointwise jaxpr's operands.

    For an array of d elements it takes and returns `[ceil(d / m)]`, scalars as they
    are.
    """

    def of_part(eqn: Eqn, operands: list[Any]) -> Sequence[Array] | None:
        name = eqn.primitive.name
        if name in CALLS:
            return evaluate(eqn.params[CALLS[name]], operands, of_part)
        if name not in _RESHAPES:
            return None
        shape = eqn.outvars[0].aval.shape
        width = (-(-math.prod(shape) // m),) if shape else ()
        return [jnp.broadcast_to(operands[0], width)]

    avals: list[Aval] = jaxpr.out_avals
    dtypes = [aval.dtype for aval in avals]
    return lambda *args: as_arrays(evaluate(jaxpr, args, of_part), dtypes)


def may_exchange(layout: Layout, own: States) -> bool:
    """Whether states may be exchanged otherwise than by all-gathers of them."""
    if not layout.axes or _compat.check_vma():
        return False
    if other_axes(layout) or layout.other_explicit_axes:
        return False
    keys = any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in own)
    return not keys and sum(x.size * x.dtype.itemsize for x in own) > _SMALL


def by_columns(
    layout: Layout,
    jaxpr: ClosedJaxpr,
    consts: Sequence[Array],
    own: States,
    used: int,
    fold: Callable[[Combine, States], States],
) -> States | None:
    """Fold the devices' states, `[1, *s]`, by columns; None if the function can't.

    `jaxpr` takes scalars that the function closes over, and the leaves of two states.
    `fold(combine, states)` is `fold_by_tree`.
    """
    shapes, m = [x.shape[1:] for x in own], layout.devices
    if any(x.shape for x in consts) or not is_pointwise(jaxpr):
        return None
    if not all(x.size for x in own):
        return None

    def part(x: Array) -> Array:
        """The part of this device of the states of all devices."""
        if x.ndim == 1:
            return lax.all_gather(x, layout.axes, tiled=True)[:used]
        padding = (0, -x.size % m)
        flat = jnp.pad(x.reshape(x.size), padding, mode="edge").reshape(m, -1)
        return lax.all_to_all(flat, layout.axes, 0, 0, tiled=True)[:used]

    def whole(x: Array, shape: tuple[int, ...]) -> Array:
        if not shape:
            return x
        flat = lax.all_gather(x[0], layout.axes, tiled=True)
        return flat[: math.prod(shape)].reshape(1, *shape)

    axes = [None] * len(consts) + [0] * (2 * len(own))
    pairs = jax.vmap(_of_parts(jaxpr, m), axes)
    total = fold(lambda a, b: list(pairs(*consts, *a, *b)), [*map(part, own)])
    return [whole(x, shape) for x, shape in zip(total, shapes, strict=True)]


def by_butterfly(
    layout: Layout, combine: Combine, own: States, used: int
) -> States | None:
    """Fold the devices' states, `[1, *s]`, by swaps; None if one has no pair."""
    m = layout.devices
    if used < m or m & (m - 1):
        return None
    device, state, bit = lax.axis_index(layout.axes), own, 1
    while bit < m:
        swap = [(d, d ^ bit) for d in range(m)]
        other = [lax.ppermute(x, layout.axes, swap) for x in state]
        pairs, is_first = [*zip(state, other, strict=True)], device & bit == 0
        first = [jnp.where(is_first, x, y) for x, y in pairs]
        second = [jnp.where(is_first, y, x) for x, y in pairs]
        state = combine(first, second)
        bit *= 2
    return state


def fold_devices(
    layout: Layout,
    jaxpr: ClosedJaxpr | None,
    consts: Sequence[Array],
    combine: Combine,
    own: States,
    used: int,
    fold: Callable[[Combine, States], States],
) -> States | None:
    """Fold the devices' states, `[1, *s]`, without a gather; None if that needs one.

    `combine` combines pairs of states; it is that of `jaxpr`, None if there is none.
    """
    if not may_exchange(layout, own):
        return None
    total = None
    if jaxpr is not None:
        total = by_columns(layout, jaxpr, consts, own, used, fold)
    return total or by_butterfly(layout, combine, own, used)
