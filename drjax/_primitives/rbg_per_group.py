"""Random bits of a group that depend on its key, and on no other group.

Input: the jaxpr of one group. Output: the same jaxpr, in which each equation that draws
from an `rbg` or `unsafe_rbg` key is replaced by

    draw_per_key[draw, options, avals] x_1 ... x_k

These generators draw fast on accelerators. But JAX gives a batch of such keys the bits
that it draws with the first key, so the bits of a group would depend on the groups that
are worked on together, on chunks and devices. The batching rule of `draw_per_key` is a
loop over the groups around this one equation:

    batched draw(key_1, ..., key_k) = [draw(key_1), ..., draw(key_k)]

Invariants: the bits of group i are a function of its key; everything but draws stays
batched. Keys of threefry2x32 need no change, as JAX draws with each key of a batch.
Sharp edges: a vmap with `spmd_axis_name` keeps JAX's behavior, as a loop over devices
would do all the work on each of them. There is no derivative rule: the jaxpr is
rewritten when it is lowered, after all derivatives.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import batching

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn
from drjax._jaxprs.walk import rewrite_equations
from drjax._primitives import registration
from drjax._primitives.registration import AxisData

draw_per_key_p = registration.new_primitive("draw_per_key", multiple_results=True)

_DRAWS = {  # with threefry2x32, JAX draws with each key
    "key<rbg>": ("random_bits", "random_gamma"),
    "key<urbg>": (
        "random_bits", "random_gamma", "random_split", "random_fold_in",
    ),
}  # fmt: skip


# Cached, so that lowering a jaxpr twice gives the same object, and later caches hit.
@_compat.weakref_lru_cache
def rewrite_draws(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Replace draws from keys of `rbg` or `unsafe_rbg` by `draw_per_key_p`; cached.

    Inner jaxprs are rewritten, too. A jaxpr without such draws is returned.
    """
    return rewrite_equations(jaxpr, _rewrite_draw)


def _is_draw(eqn: Eqn) -> bool:
    """Whether a jaxpr's equation is a draw that JAX batches with the first key only.

    Such draws are `rng_bit_generator`, and the `random_*` primitives in `_DRAWS` if the
    first operand is a typed key of `rbg` or `unsafe_rbg`.
    """
    name = eqn.primitive.name
    if name == "rng_bit_generator":
        return True
    if not name.startswith("random_") or not eqn.invars:
        return False
    return name in _DRAWS.get(str(eqn.invars[0].aval.dtype), ())


def _rewrite_draw(eqn: Eqn) -> list[Eqn] | None:
    """Replace an equation that is a draw by one of `draw_per_key`; None for others."""
    if not _is_draw(eqn):
        return None
    avals = tuple(v.aval for v in eqn.outvars)
    options = tuple(sorted(eqn.params.items()))
    params = {"draw": eqn.primitive, "options": options, "avals": avals}
    return [eqn.replace(primitive=draw_per_key_p, params=params)]


def _draw(
    *args: Array,
    draw: Primitive,
    options: tuple[tuple[str, Any], ...],
    avals: tuple[Aval, ...],
) -> list[Array]:
    """Bind the primitive for which `draw_per_key` stands, such as `random_bits_p`.

    Its parameters are `options`, and `avals` are the types of its results.
    """
    outs = draw.bind(*args, **dict(options))
    return outs if draw.multiple_results else [outs]


def _batch(
    axis_data: AxisData,
    args: Sequence[Array],
    dims: Sequence[int | None],
    **params: Any,
) -> tuple[Sequence[Array], Sequence[int | None]]:
    """Batching rule of `draw_per_key`: a loop over the batch, with one draw a step.

    So each element of the batch gets the bits of its own key. JAX's own rule for `rbg`
    keys draws all bits with the first key of a batch; it is used only under a vmap with
    `spmd_axis_name`, where a loop over the sharded axis would serialize the devices.
    """
    if all(d is None for d in dims):
        return draw_per_key_p.bind(*args, **params), [None] * len(params["avals"])
    # A loop over an axis that is sharded over devices would serialize the devices.
    if axis_data.spmd_name is not None:
        run = lambda *args: _draw(*args, **params)
        return jax.vmap(run, dims)(*args), [0] * len(params["avals"])
    batched = [
        None if d is None else _compat.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]

    def one(slices: Sequence[Array | None]) -> Sequence[Array]:
        pairs = zip(args, slices, strict=True)
        return draw_per_key_p.bind(*(x if s is None else s for x, s in pairs), **params)

    # `one` binds draw_per_key again: an outer vmap batches it by this same rule.
    outs = lax.map(one, batched)
    return outs, [0] * len(outs)


registration.register_execution(draw_per_key_p, _draw)
draw_per_key_p.def_abstract_eval(lambda *_, avals, **__: list(avals))
batching.fancy_primitive_batchers[draw_per_key_p] = _batch
