"""Functions of one coordinate in a plan: a gather, and work that workers may share.

Input: a `map_columns` equation, behind `reduce_columns`. Output: the jaxpr of a gather,
a `columns` equation on global values, and a scatter; and of a `columns` equation the
`Loop` of a plan, whose body is a plan over the coordinates:

    slices -> gather -> [n, *s] -> columns: each coordinate computes f(column) -> [*s]

Invariants: a `columns` equation takes and gives global values, so that all other passes
see work of the server. Its coordinates do not depend on each other: backends compute
all of them at once, or chunks of them in workers.

Sharp edges: a `columns` equation is a `Loop` only if its operands are there when a
round ends (see `rounds`); otherwise it is a part of the server's stage.
"""

import functools
import math
from collections.abc import Sequence

import jax

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Aval, ClosedJaxpr, Eqn
from drjax._partition import Partition
from drjax._primitives.collectives import gather_p, scatter_p
from drjax._primitives.map_columns import (
    COORDINATES,
    GROUPS,
    WHOLE,
    by_gather_and_scatter,
    evaluate_columns,
    types_of_columns,
)
from drjax._sharding.layout import Placement
from drjax.plan import Broadcast, Columns, Plan, Reduce, Stage, Value

# Not one of `drjax.primitives`: only the planner's own jaxprs have it.
columns_p = Primitive("columns")
columns_p.multiple_results = True
columns_p.def_abstract_eval(types_of_columns)


def columns_by_gather(eqn: Eqn) -> ClosedJaxpr:
    """Make the jaxpr that computes a `map_columns` equation from all groups' slices.

    Plans use it, as they have no all-to-all between groups. The jaxpr gathers the
    operands that have a slice for each group, applies the function of one coordinate to
    all coordinates by a `columns` equation, and scatters the results that have a slice
    for each group. On a mesh with Auto axes, the gather gives each device a part of the
    coordinates, and the compiler divides the work on them among the devices.
    """
    p = {**eqn.params, "mesh": None}
    kinds = p["kinds_in"], p["kinds_out"]
    run = functools.partial(columns_p.bind, **p)
    # A plan over no coordinates has no groups; and without columns there is no gather.
    if not math.prod(p["coordinates"]) or GROUPS not in kinds[0]:
        run = functools.partial(evaluate_columns, **p)
    params: Placement = {"partition": p["partition"], "mesh": eqn.params["mesh"]}
    gather = functools.partial(gather_p.bind, sharded="auto")
    whole = lambda *xs: by_gather_and_scatter(
        run, xs, kinds, gather, scatter_p.bind, params
    )
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(whole)(*avals)


def columns_loop(
    eqn: Eqn,
    name: str,
    function: str,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
) -> Columns:
    """Make the step of a `columns` equation, whose body is a plan over coordinates.

    The body has one round. Its local stage is `function`, that of one coordinate, and
    its groups are the coordinates, in their flat order. Those inputs of its body that
    have a column or an element for each coordinate are partitioned over the
    coordinates, along the axis that the coordinates have in the operand; and so are
    outputs. Results that are sums over the coordinates are reduced.
    """
    p, fn = eqn.params, _compat.jaxpr_as_fun(eqn.params["jaxpr"])
    partition = Partition("coordinates", math.prod(p["coordinates"]))
    jaxpr = _compat.without_dead_code(
        jax.make_jaxpr(lambda _, *xs: fn(*xs))(
            jax.ShapeDtypeStruct((), "int32"),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in p["jaxpr"].in_avals),
        )
    )
    of_coordinate = lambda *x: _of_coordinate(partition, *x)
    ins = tuple(map(of_coordinate, inputs, p["jaxpr"].in_avals, p["kinds_in"]))
    # What is summed has a value for each coordinate, too.
    kinds = [COORDINATES if kind == WHOLE else kind for kind in p["kinds_out"]]
    outs = tuple(map(of_coordinate, outputs, jaxpr.out_avals, kinds))
    pairs = zip(outs, outputs, p["kinds_out"], strict=True)
    sums = [Reduce("sum", out, total) for out, total, k in pairs if k == WHOLE]
    results = {r.source.name: r.result for r in sums}
    local = Stage(function, ins, outs, jaxpr, over=(partition,))
    nothing = Stage("server", (), (), jax.make_jaxpr(lambda: [])())
    copies = map(Broadcast, dict.fromkeys(v for v in ins if not v.partitioned))
    body = Plan(
        f"{name} body 0",
        partition,
        (nothing, *copies, local, *sums, nothing),
        ins,
        tuple(results.get(v.name, v) for v in outs),
        None,
        None,
    )
    return Columns(name, tuple(inputs), tuple(outputs), (body,))


def _of_coordinate(partition: Partition, value: Value, aval: Aval, kind: str) -> Value:
    """Return the `Value` of an operand or result of one coordinate, in a loop's body.

    `value` is the global one in the plan: `[n, *s, *t]`, `[*s, *t]` or `[*t]`, for
    coordinates of the shape `s` and `kind` "groups", "coordinates" or "whole"; `aval`
    is the type for one coordinate, a column `[n, *t]`, or `[*t]`. Of the kind "whole"
    it is `value` itself. Else it is partitioned over the coordinates, along axis 1 of
    the kind "groups", as axis 0 is that of all groups.
    """
    if kind == WHOLE:
        return value
    nbytes = math.prod(aval.shape) * aval.dtype.itemsize
    name = f"{value.name}[{'column' if kind == GROUPS else 'coordinate'}]"
    axis = int(kind == GROUPS)
    return Value(name, tuple(aval.shape), aval.dtype, (partition,), nbytes, axis)
