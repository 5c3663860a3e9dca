"""Random bits of a group that depend on its key, and on no other group.

Keys of `rbg` and `unsafe_rbg` are made for hardware that draws bits fast. But JAX gives
a batch of such keys what it draws with the first one, and so the bits of a group would
depend on how many groups are worked on together, on chunks and devices. In the jaxpr of
a group `in_turn` replaces each equation that draws from such a key by one that is
batched group by group, in a loop over this equation alone:

    in_turn[draw, options, avals] x_1 ... x_k

Sharp edge: what `vmap(spmd_axis_name=...)` maps over devices stays JAX's; a loop over
devices would do all the work on each of them.
"""

import jax
from jax import lax
from jax.interpreters import batching

from drjax import _compat
from drjax._primitives import registration

in_turn_p = registration.new_primitive("in_turn", multiple_results=True)

_DRAWS = {  # with threefry2x32, JAX draws with each key
    "key<rbg>": ("random_bits", "random_gamma"),
    "key<urbg>": (
        "random_bits", "random_gamma", "random_split", "random_fold_in",
    ),
}  # fmt: skip


@_compat.weakref_lru_cache
def in_turn(jaxpr):
    """A per-group jaxpr in which batches of groups draw bits in turn."""
    return _changed(jaxpr) if _draws(jaxpr) else jaxpr


@_compat.weakref_lru_cache
def _draws(jaxpr) -> bool:
    return any(
        _is_draw(eqn) or any(map(_draws, _compat.jaxprs_in(eqn.params)))
        for eqn in _compat.open_jaxpr(jaxpr).eqns
    )


def _is_draw(eqn) -> bool:
    name = eqn.primitive.name
    if name == "rng_bit_generator":
        return True
    if not name.startswith("random_") or not eqn.invars:
        return False
    return name in _DRAWS.get(str(eqn.invars[0].aval.dtype), ())


def _in_turn(eqn):
    if not _is_draw(eqn):
        return eqn
    avals = tuple(v.aval for v in eqn.outvars)
    options = tuple(sorted(eqn.params.items()))
    params = {"draw": eqn.primitive, "options": options, "avals": avals}
    return eqn.replace(primitive=in_turn_p, params=params)


def _changed(value):
    """A parameter or a jaxpr, with all jaxprs in it changed."""
    if type(value) in (tuple, list):
        return type(value)(map(_changed, value))
    if not isinstance(value, _compat.JAXPR_TYPES):
        return value
    eqns = []
    for eqn in _compat.open_jaxpr(value).eqns:
        params = {name: _changed(x) for name, x in eqn.params.items()}
        eqns.append(_in_turn(eqn.replace(params=params)))
    return _compat.with_equations(value, eqns)


def _draw(*args, draw, options, avals):
    outs = draw.bind(*args, **dict(options))
    return outs if draw.multiple_results else [outs]


def _batch(axis_data, args, dims, **params):
    if all(d is None for d in dims):
        return in_turn_p.bind(*args, **params), [None] * len(params["avals"])
    if axis_data.spmd_name is not None:
        run = lambda *args: _draw(*args, **params)
        return jax.vmap(run, dims)(*args), [0] * len(params["avals"])
    rows = [
        None if d is None else _compat.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]

    def one(rows):
        pairs = zip(args, rows, strict=True)
        return in_turn_p.bind(*(x if r is None else r for x, r in pairs), **params)

    if axis_data.size == 1:  # needs no loop
        outs = one([None if x is None else x[0] for x in rows])
        return [y[None] for y in outs], [0] * len(outs)
    outs = lax.map(one, rows)
    return outs, [0] * len(outs)


registration.register_execution(in_turn_p, _draw)
in_turn_p.def_abstract_eval(lambda *_, avals, **__: list(avals))
batching.fancy_primitive_batchers[in_turn_p] = _batch
