"""Whether a function of two states is associative, on states that it is given.

Input: the function, and the states of three groups. Output: None, or what differs.

Two orders of evaluation round differently. How much a result may differ is measured:
by how far it moves if the states move by one rounding each; and it is at least a
thousandth, or some roundings of a coarse dtype. Numbers that are not finite are not
compared.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drjax._compat.types import Array

State = Sequence[Any]
Combine = Callable[[State, State], State]


def difference_of_orders(
    name: str, combine: Combine, states: Sequence[State], commutative: bool
) -> str | None:
    """Compare two orders of evaluation of the first three states; return a text.

    The text is a whole error; None if the orders agree.
    """
    left = lambda a, b, c: combine(combine(a, b), c)
    right = lambda a, b, c: combine(a, combine(b, c))
    a, b, c = states
    what = _difference(left, right, (a, b, c))
    if what is not None:
        return (
            f"The function {name} given to drjax.reduce needs to be associative, but "
            f"of the states a, b, c of groups 0, 1, 2, {name}({name}(a, b), c) has "
            f"{what[0]}, and {name}(a, {name}(b, c)) has {what[1]}. Groups are "
            "combined in an order that depends on devices, chunks and engines, so "
            "results would differ. Keep in the state what makes it associative, as a "
            "sum and a count in place of a mean; or gather the states by drjax.gather, "
            "and fold them by jax.lax.scan."
        )
    if not commutative:
        return None
    what = _difference(combine, lambda a, b: combine(b, a), (a, b))
    if what is None:
        return None
    return (
        f"The function {name} given to drjax.reduce needs to be commutative with "
        f"commutative=True, but of the states a, b of groups 0, 1, {name}(a, b) has "
        f"{what[0]}, and {name}(b, a) has {what[1]}. Leave commutative=True out."
    )


def _difference(
    one: Callable[..., State], other: Callable[..., State], states: tuple[State, ...]
) -> tuple[str, ...] | None:
    """Return the first leaf in which two functions of states differ: both as text."""
    first, second = one(*states), other(*states)
    moved = []
    for i, state in enumerate(states):
        near = (*states[:i], [_nudged(x) for x in state], *states[i + 1 :])
        moved += [(first, one(*near)), (second, other(*near))]
    for i, pair in enumerate(zip(first, second, strict=True)):
        x, y = map(_numbers, pair)
        if x.dtype.kind not in "fc":
            if not np.array_equal(x, y):
                return tuple(f"leaf {i} = {_short(v)}" for v in (x, y))
            continue
        with np.errstate(all="ignore"):
            noise = np.max(
                [np.abs(_numbers(u[i]) - _numbers(v[i])) for u, v in moved], 0
            )
        size = max(
            (np.abs(v[np.isfinite(v)]).max(initial=0.0) for v in (x, y)), default=0.0
        )
        precision = float(jnp.finfo(pair[0].dtype).eps)
        with np.errstate(all="ignore"):
            bad = np.abs(x - y) > 8 * noise + max(16 * precision, 1e-3) * size
        if (bad & np.isfinite(x) & np.isfinite(y) & np.isfinite(noise)).any():
            return tuple(f"leaf {i} = {_short(v)}" for v in (x, y))
    return None


def _nudged(x: Array) -> Array:
    """Move each number by about one rounding."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return (x * (1 + 2 * jnp.finfo(x.dtype).eps)).astype(x.dtype)


def _numbers(x: Array | np.ndarray) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    # Small floats are computed with in double precision, as NumPy knows only some.
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x.astype(np.complex128)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _short(x: np.ndarray) -> str:
    return np.array2string(x.reshape(-1)[:4], threshold=4, precision=6)
