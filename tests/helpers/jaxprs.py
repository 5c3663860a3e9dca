"""Looking at jaxprs: which drjax primitives they hold, and what mixes groups."""

from collections.abc import Iterator

import jax
from jax.extend import core

from drjax import primitives

BY_OBJECT = {
    getattr(primitives, name): name.removesuffix("_p")
    for name in dir(primitives)
    if name.endswith("_p")
}
COMMUNICATION = {"broadcast", "reduce_sum", "reduce_mean", "reduce_max", "reduce_min"}
COMMUNICATION |= {"gather", "scatter"}
TO_PARTITIONED = {"broadcast", "map_fn", "scatter", "partition_index"}

# Equations that keep slice i a function of slice i.
SLICE_BY_SLICE = set(
    """abs add add_any and convert_element_type copy copy_p cos cosh div eq erf exp exp2
    expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg
    not optimization_barrier or pow rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh reshard sharding_constraint""".split()
)


def equations(jaxpr) -> Iterator:
    """All equations outside mapped functions, inner jits and checkpoints included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        if eqn.primitive not in BY_OBJECT:
            for value in eqn.params.values():
                for inner in value if isinstance(value, tuple | list) else (value,):
                    if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                        yield from equations(inner)


def blocks(fn, *args) -> list[str]:
    """The drjax primitives of the program's live equations, in order."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [BY_OBJECT[e.primitive] for e in live(jaxpr) if e.primitive in BY_OBJECT]


def live(jaxpr) -> list:
    """The equations that an output depends on, in order."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    needed, kept = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(id(v) in needed for v in eqn.outvars):
            kept.append(eqn)
            needed |= set(map(id, eqn.invars))
    return kept[::-1]


def mixing_equations(jaxpr, partitioned_in) -> list:
    """Equations that are not ours, use a partitioned value, and may mix its slices."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    partitioned = {v for v, p in zip(jaxpr.invars, partitioned_in, strict=True) if p}
    mixing = []
    for eqn in jaxpr.eqns:
        inputs = [
            not isinstance(v, core.Literal) and v in partitioned for v in eqn.invars
        ]
        name = BY_OBJECT.get(eqn.primitive)
        if name is not None:
            if name in TO_PARTITIONED:
                partitioned |= set(eqn.outvars)
        elif any(inputs):
            if eqn.primitive.name == "jit":
                mixing += mixing_equations(eqn.params["jaxpr"], inputs)
            elif not _keeps_slices(eqn):
                mixing.append(eqn)
            partitioned |= set(eqn.outvars)
    return mixing


def _keeps_slices(eqn) -> bool:
    """Whether slice i of every result depends on slice i of the operands only."""
    name, params = eqn.primitive.name, eqn.params
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][:1] == (0,)
    if name.startswith("reduce_"):
        return 0 not in params["axes"]
    if name == "reshape":
        return eqn.outvars[0].aval.shape[:1] == eqn.invars[0].aval.shape[:1]
    return name in SLICE_BY_SLICE
