"""From a function to its plan: trace, flatten, kinds, cut.

function -> jaxpr -> Flat -> Kinds -> Levels -> Plan
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from drjax import _compat
from drjax._context import planned
from drjax._errors import PlanError
from drjax._jaxprs.provenance import source_line
from drjax._partition import Partition
from drjax._planner.build_stages import Cutter
from drjax._planner.implicit_communication import explicit
from drjax._planner.inline import BLOCKS, CONTROL, Flat, flatten, uses_blocks
from drjax._planner.naming import argument_names, function_name, result_names
from drjax._planner.partitioning.infer import Kinds
from drjax._planner.partitioning.kind import GLOBAL, PARTITIONED, Kind
from drjax._planner.rematerialize import recompute as recompute_residuals
from drjax._sharding.planning_context import outside_meshes, trace_without_mesh
from drjax.plan import Plan


def make_plan(fn: Callable, partitioned: Any = None) -> Callable[..., Plan]:
    """Turn a program into its normal form: server, broadcast, groups, reduce.

    Args:
      fn: A program, or any function that calls programs over one partition;
        derivatives (`jax.grad(program)`) and vmapped programs too.
      partitioned: Which arguments have one row a group: a tree of bools that is a
        prefix of the arguments. Default: found out from how they are used; an array
        used row by row is partitioned unless another use needs it whole.

    Returns:
      A function that takes the arguments of `fn` (or `jax.ShapeDtypeStruct`s with
      their shapes) and returns a `drjax.plan.Plan`.

    Raises:
      PlanError: The function has no plan: it mixes the groups' rows other than by a
        drjax reduction, uses two partitions at one level, or is bound to a mesh. The
        message names the equation and its source line.

    Example:
      >>> import drjax, jax, jax.numpy as jnp
      >>> @drjax.program(clients=4)
      ... def mean_square(x):
      ...     return drjax.reduce_mean(drjax.map_fn(jnp.square, x))
      >>> plan = drjax.make_plan(jax.grad(mean_square))(jnp.ones(4))
      >>> len(plan.rounds)
      1

    Source: Rush et al. 2024, section 5.
    """

    @functools.wraps(fn)
    def planner(*args, **kwargs) -> Plan:
        traced = prepare(fn, partitioned, args, kwargs)
        in_tree = jax.tree_util.tree_structure((args, kwargs))
        name = function_name(getattr(fn, "__name__", "program"))
        return plan_of_jaxpr(
            traced.closed, name, traced.names, traced.given, in_tree, traced.out_tree
        )

    return planner


@dataclass(frozen=True)
class Traced:
    """A function as a jaxpr.

    Attributes:
      closed: The closed jaxpr.
      out_tree: The structure of its results.
      names: A name for each argument.
      given: The kind of each argument, if the user said it.
    """

    closed: Any
    out_tree: Any
    names: list[str]
    given: list[Kind | None]


def prepare(fn: Callable, partitioned: Any, args: tuple, kwargs: dict) -> Traced:
    """Trace a function without any mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    try:
        make = jax.make_jaxpr(fn, return_shape=True)
        closed, out = trace_without_mesh(lambda: make(*args, **kwargs))
    except (RuntimeError, ValueError) as error:
        if mesh.empty or "mesh" not in str(error):
            raise
        raise PlanError(
            "The function needs the mesh in context, perhaps for a sharding constraint "
            "or a shard_map in the work of a group. A plan is free of devices; "
            f"drjax.jit plans the function with its mesh. ({error})"
        ) from error
    return Traced(
        closed,
        jax.tree_util.tree_structure(out),
        argument_names(fn, args, kwargs),
        _given_kinds(partitioned, args, kwargs),
    )


def infer(closed, names, given) -> tuple[Flat, Kinds]:
    """The flat program of a closed jaxpr and its checked kinds."""
    with outside_meshes():
        program = flatten(closed)
    program.names = dict(zip(program.invars, names, strict=True))
    partition = find_partition(program)
    for var, kind, argument in zip(program.invars, given, names, strict=True):
        if kind != PARTITIONED:
            continue
        if partition is None:
            raise PlanError(
                f"partitioned= says that {argument} is partitioned, but the function "
                "calls no drjax building block, so it has no partition."
            )
        if var.aval.shape[:1] != (partition.size,):
            raise PlanError(
                f"partitioned= says that {argument} is partitioned over {partition}, "
                f"which needs a leading axis of {partition.size}, but its shape is "
                f"{var.aval.shape}."
            )
    return _checked(program, partition, given)


def _checked(program: Flat, partition: Partition | None, given) -> tuple[Flat, Kinds]:
    """The program with every reduction written as a building block, and its kinds."""
    kinds = Kinds(program, partition, given).check()
    while partition and (written := _explicit(program, kinds)) is not None:
        program, kinds = written, Kinds(written, partition, given).check()
    return program, kinds


def _explicit(program: Flat, kinds: Kinds) -> Flat | None:
    with outside_meshes():
        return explicit(program, kinds)


def plan_of_jaxpr(
    closed, name, names, given, in_tree=None, out_tree=None, recompute=True
) -> Plan:
    """The plan of a closed jaxpr; see `make_plan` and `Cutter`."""
    program, kinds = infer(closed, names, given)
    while recompute and (rewritten := recompute_residuals(program, kinds)) is not None:
        program, kinds = _checked(rewritten, kinds.partition, given)
    results = [kinds[v] for v in program.outvars]
    called = [] if out_tree is None else result_names(out_tree)
    cutter = Cutter(program, kinds, results, names, recompute, called)
    with outside_meshes():
        return cutter.plan(name, in_tree, out_tree)


def _equations(program: Flat) -> Iterator[Any]:
    """All equations of a program that are not the work of one group."""
    for eqn in program.eqns:
        yield eqn
        if eqn.primitive.name in CONTROL:
            for body in program.bodies(eqn):
                yield from _equations(body)


def find_partition(program: Flat) -> Partition | None:
    """The partition of a program's blocks, None if it has none; two are refused."""
    found: dict[Partition, Any] = {}
    for eqn in _equations(program):
        if eqn.primitive in BLOCKS:
            found.setdefault(eqn.params["partition"], eqn)
        if any(hasattr(v.aval, "inner_aval") for v in (*eqn.invars, *eqn.outvars)):
            raise PlanError(
                f"{eqn.primitive.name} at {source_line(eqn)} works on a "
                "mutable array (jax.new_ref), which cannot pass from stage to stage of "
                "a plan. Use it inside a function given to drjax.map_fn, or update "
                "values with x.at[...] instead."
            )
        bound = eqn.params.get("mesh") is not None or eqn.primitive.name in _MESH_BOUND
        if bound and not planned.value:
            raise PlanError(
                f"{eqn.primitive.name} at {source_line(eqn)} is bound to a "
                "mesh. A plan is free of devices: leave out mesh= of the program and "
                "of its blocks, and plan it without shard_map and sharding "
                "constraints; drjax.jit plans the function with its mesh."
            )
        hidden = any(map(uses_blocks, _compat.jaxprs_in(eqn.params)))
        if hidden and eqn.primitive not in BLOCKS and eqn.primitive.name not in CONTROL:
            raise PlanError(
                f"{eqn.primitive.name} at {source_line(eqn)} calls drjax "
                "building blocks, and what it does with them has no plan. Call them "
                "outside of it, or run the program with jax.jit."
            )
    if not found:
        return None
    if len(found) > 1:
        (first, _), (second, eqn) = list(found.items())[:2]
        names = [str(first), str(second)]
        if names[0] == names[1]:
            names = [f"{p} with mesh_axes={p.mesh_axes}" for p in (first, second)]
        raise PlanError(
            f"The function uses two partitions side by side, {' and '.join(names)} "
            f"({eqn.primitive.name} at {source_line(eqn)}). A plan has one: "
            "call the second program inside a function given to drjax.map_fn, or plan "
            "them one at a time."
        )
    return next(iter(found))


_MESH_BOUND = ("shard_map", "sharding_constraint", "reshard", "device_put")


def _given_kinds(partitioned: Any, args: tuple, kwargs: dict) -> list[Kind | None]:
    """What `partitioned=` says of each leaf of the arguments."""
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    if partitioned is None:
        return [None] * len(leaves)
    if isinstance(partitioned, list):
        partitioned = tuple(partitioned)
    try:
        said = jax.tree.broadcast(
            partitioned, args, is_leaf=lambda x: x is None or isinstance(x, bool)
        )
    except ValueError as error:
        raise PlanError(
            "partitioned= needs a tree of bools that is a prefix of the arguments, "
            f"such as (False, True), got {partitioned!r} for {len(args)} arguments: "
            f"{error}"
        ) from None
    kinds = {True: PARTITIONED, False: GLOBAL, None: None}
    flat = jax.tree_util.tree_leaves(said, is_leaf=lambda x: x is None)
    found = [kinds[s] for s in flat]
    return found + [None] * (len(leaves) - len(found))
