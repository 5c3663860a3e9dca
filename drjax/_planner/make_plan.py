"""From a function to its plan: trace, inline, infer, rematerialize, build stages.

Input: a function and its arguments. Output: a `drjax.plan.Plan`.

    function -> jaxpr -> InlinedJaxpr -> Environment (kinds) -> LocalWork -> Plan

Invariants: the function is traced without a mesh, once; or for the mesh of one group,
twice if it closes over that. Sharp edges: a rewrite
(explicit communication, rematerialization) adds equations, so partitioning is inferred
again after each one.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from drjax import _compat
from drjax._compat.types import Atom, ClosedJaxpr, Eqn, PyTree, PyTreeDef
from drjax._context import group_mesh, planned
from drjax._error_texts import called_in_two_steps, misplaced
from drjax._errors import DrjaxError, DrjaxTypeError, PlanError
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._jaxprs.provenance import source_line
from drjax._partition import Partition
from drjax._planner.build_stages import PlanSignature, build_plan
from drjax._planner.checkpoint_loops import checkpoint_rounds
from drjax._planner.cost import Cost, costs
from drjax._planner.explicit_communication import make_communication_explicit
from drjax._planner.inline import (
    CONTROL,
    InlinedJaxpr,
    inline_calls,
    uses_blocks,
)
from drjax._planner.inner_plans import with_inner_plans
from drjax._planner.naming import argument_names, function_name, result_names
from drjax._planner.open_groups import opened
from drjax._planner.partitioning.consistency import check_partitioning
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.infer import infer_partitioning
from drjax._planner.partitioning.kind import GLOBAL, PARTITIONED, Kind
from drjax._planner.ravels import without_ravels
from drjax._planner.rematerialize_loops import rematerialize_residuals
from drjax._planner.secure_cotangents import demand_of_cotangents
from drjax._planner.side_by_side import separate
from drjax._primitives.moves import partitions_of
from drjax._primitives.registration import BLOCKS
from drjax._sharding import group_mesh as group_meshes
from drjax._sharding.planning_context import outside_meshes, trace_without_mesh
from drjax.plan import Plan


def make_plan(
    fn: Callable,
    partitioned: PyTree = None,
    open_groups: bool = False,
    group_mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., Plan]:
    """Turn a program into its normal form: server, broadcast, groups, reduce.

    Args:
      fn: A program, or any function that calls programs over one partition;
        derivatives (`jax.grad(program)`) and vmapped programs too.
      partitioned: Which arguments have one slice for each group: a tree of bools that
        is a prefix of the arguments. Default: inferred from their uses; an array that
        is used slice by slice is partitioned unless another use needs it whole.
      open_groups: Whether the plan must run with any number of groups, so that an
        engine can give it arguments for more or fewer groups than it was planned for.
        To check that nothing in the plan depends on n, `fn` is planned a second time,
        for n + 1 groups, and traced once more with a symbol for n: code that computes
        with it, or decides by it, is refused. A number in the code of `fn`, such as `/
        100`, is no symbol: write `drjax.partition_size()`. Default: the plan is for n
        groups only.
      group_mesh: The mesh of one group, an `AbstractMesh` or a `Mesh`, if a group needs
        several devices: mapped functions name its axes in `with_sharding_constraint`,
        `reshard` or `jax.shard_map`. All of its axes are Auto, or all Explicit. No
        device is needed here; a worker needs as many as the mesh has. Default: the mesh
        that mapped functions close over; if they name none, one device.

    Returns:
      A function that takes the arguments of `fn` (or `jax.ShapeDtypeStruct`s with
      their shapes) and returns a `drjax.plan.Plan`.

    Raises:
      PlanError: The function has no plan: it mixes the groups' slices other than by a
        drjax reduction, or is bound to a mesh outside of the groups' work, or to
        several meshes. With `open_groups`, something in it depends on n, as a gather
        does, or the derivative of a mean; or its code computes with n. The message
        names the equation and its source line.

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
    check_planned("drjax.make_plan", fn, partitioned)
    mesh = None if group_mesh is None else group_meshes.checked(group_mesh)

    @functools.wraps(fn)
    def planner(*args: PyTree, **kwargs: PyTree) -> Plan:
        with group_meshes.planning_for(mesh):
            traced = trace(fn, partitioned, args, kwargs)
            own = None if mesh else group_meshes.mesh_in(traced.closed, True)
            if own is not None:
                return make_plan(fn, partitioned, open_groups, own)(*args, **kwargs)
            plan = plan_of_trace(traced, args, kwargs)
            if mesh is not None:
                _check_group_mesh(plan, mesh)
            if not open_groups:
                return plan
            # As often as needed: each trace has a number of groups of its own.
            jaxpr_of = lambda args, kwargs: trace(fn, partitioned, args, kwargs).closed
            return opened(plan, plan_once, jaxpr_of, args, kwargs)

    def plan_once(*args: PyTree, **kwargs: PyTree) -> Plan:
        return plan_of_trace(trace(fn, partitioned, args, kwargs), args, kwargs)

    def plan_of_trace(
        traced: Traced, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> Plan:
        # Backends compare the structure of later arguments with this one.
        in_tree = jax.tree_util.tree_structure((args, kwargs))
        name = function_name(getattr(fn, "__name__", "program"))
        return plan_of_jaxpr(
            traced.closed,
            name,
            traced.names,
            traced.declared,
            in_tree,
            traced.out_tree,
            secure=True,
        )

    return planner


def _check_group_mesh(plan: Plan, mesh: AbstractMesh) -> None:
    """Raise `PlanError` if the mesh of a group is that of the groups, or not used."""
    axes = group_meshes.as_text(group_meshes.axes_of(mesh))
    own = () if plan.partition is None else plan.partition.mesh_axes
    if shared := sorted(set(own) & set(mesh.axis_names)):
        raise PlanError(
            f"The mesh of one group, {axes}, has {shared}, the mesh axis of the groups "
            f"of {plan.partition}: a plan is free of the devices that they are on. "
            "Pass a mesh of the other axes to drjax.make_plan(..., group_mesh=), and "
            "name its axes alone in the functions, as in P('model')."
        )
    if not plan.group_mesh:
        raise PlanError(
            f"group_mesh= has the axes {axes}, but no function of a group names one: "
            "all of its devices would compute the same. Shard values in them, as by "
            f"jax.lax.with_sharding_constraint(w, P({mesh.axis_names[0]!r}))."
        )


def check_planned(caller: str, fn: object, partitioned: PyTree) -> None:
    """Raise `DrjaxTypeError` if `fn` is no function, or `partitioned` has arrays.

    Whether `partitioned` fits the arguments is checked when these are known.
    """
    if not callable(fn):
        raise DrjaxTypeError(called_in_two_steps(caller, "a function", fn))
    for leaf in jax.tree.leaves(partitioned):
        if hasattr(leaf, "dtype") and not isinstance(leaf, np.bool_):
            needs = "partitioned= as a tree of bools"
            raise DrjaxTypeError(called_in_two_steps(caller, needs, leaf))


@dataclass(frozen=True)
class Traced:
    """A function as a closed jaxpr, with the names and declared kinds of its arguments.

    `declared` has for each argument of the jaxpr the kind that `partitioned=` declares,
    global or partitioned along axis 0; None: its kind is inferred. `out_tree` is a
    `PyTreeDef`.
    """

    closed: Any
    out_tree: Any
    names: list[str]
    declared: list[Kind | None]


def trace(
    fn: Callable[..., PyTree],
    partitioned: PyTree,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Traced:
    """Trace a function without any mesh, as a plan is free of devices.

    Leaves of the arguments may be `jax.ShapeDtypeStruct`s. Raises `PlanError` if the
    function needs the mesh in context, or `partitioned`, as for `make_plan`, does not
    fit the arguments; `DrjaxTypeError` if one is a `Groups`, or a table of another
    library.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if text := misplaced(jax.tree.leaves((args, kwargs))):
        raise DrjaxTypeError(f"A function is planned for arrays. {text}.")
    try:
        make = jax.make_jaxpr(fn, return_shape=True)
        if group_mesh.value is None:
            closed, out = trace_without_mesh(lambda: make(*args, **kwargs))
        else:
            closed, out = make(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        # Others are the program's own, or say how to fix it themselves.
        own = isinstance(error, DrjaxError) or not _compat.is_about_a_mesh(error)
        if own or (mesh.empty and group_mesh.value is None):
            raise
        needs = "the mesh in context"
        if group_mesh.value is not None:
            needs = "another mesh than group_mesh="
        raise PlanError(
            f"The function needs {needs}, perhaps for a sharding constraint "
            "or a shard_map in the work of a group. A plan is free of devices: pass "
            "the mesh of one group to drjax.make_plan(..., group_mesh=). "
            f"drjax.jit plans the function with its mesh. ({error})"
        ) from error
    return Traced(
        closed,
        jax.tree_util.tree_structure(out),
        argument_names(fn, args, kwargs),
        _declared_kinds(partitioned, args, kwargs),
    )


def inline_and_infer(
    closed: ClosedJaxpr, names: Sequence[str], declared: Sequence[Kind | None]
) -> Environment:
    """Inline a jaxpr, infer and check its kinds, and make its communication explicit.

    `Environment.program` is the inlined jaxpr. If it has building blocks over several
    partitions, the plan is over the partition of the first one. The building blocks
    over other partitions move into the bodies of `program` equations, each of which
    gets a plan over its own partition.

    Raises `PlanError` if an argument is declared partitioned, but the program has no
    partition or the argument no leading axis of its size; or the program mixes the
    slices of different groups, or has an equation that cannot be planned.
    """
    with outside_meshes():
        # Inlining traces equations, and a mesh in context would be part of their types.
        program = inline_calls(closed)
    partitions = find_partitions(program)
    partition = partitions[0] if partitions else None
    if partition is not None and partitions[1:]:
        program = separate(program, partition, partitions[1:])
    program.names = dict(zip(program.invars, names, strict=True))
    for var, kind, argument in zip(program.invars, declared, names, strict=True):
        # What is declared global or left open fits any shape.
        if kind != PARTITIONED:
            continue
        if partition is None:
            raise PlanError(
                f"partitioned= declares that {argument} is partitioned, but the "
                "function calls no drjax building block, so it has no partition."
            )
        if var.aval.shape[:1] != (partition.size,):
            raise PlanError(
                f"partitioned= declares that {argument} is partitioned over "
                f"{partition}, which needs a leading axis of {partition.size}, but its "
                f"shape is {var.aval.shape}."
            )
    try:
        return _infer_and_make_explicit(program, partition, declared)
    except PlanError:
        rewritten = None if partition is None else without_ravels(program)
        if rewritten is None:
            raise
    return _infer_and_make_explicit(rewritten, partition, declared)


def _infer_and_make_explicit(
    program: InlinedJaxpr, partition: Partition | None, declared: Sequence[Kind | None]
) -> Environment:
    """Infer and check the kinds until every communication is a building block.

    Where kinds imply communication, as in a `lax.reduce_sum` over the group axis,
    building blocks replace the equation. Partitioning is inferred again after each such
    pass, as the new equations have kinds too and may imply more communication.
    """
    kinds = check_partitioning(infer_partitioning(program, partition, declared))
    while (explicit := _make_explicit(kinds)) is not None:
        kinds = check_partitioning(infer_partitioning(explicit, partition, declared))
    return kinds


def _make_explicit(kinds: Environment) -> InlinedJaxpr | None:
    """Replace equations that imply communication by building blocks, without a mesh.

    None if there is no equation to replace.
    """
    # The rewrite traces building blocks, which would bind a mesh in context.
    with outside_meshes():
        return make_communication_explicit(kinds)


def plan_of_jaxpr(
    closed: ClosedJaxpr,
    name: str,
    names: Sequence[str],
    declared: Sequence[Kind | None],
    in_tree: PyTreeDef | None = None,
    out_tree: PyTreeDef | None = None,
    rematerialize: bool = True,
    results: Sequence[str] = (),
    secure: bool = False,
    checkpoints: bool = False,
    skips: bool = False,
) -> Plan:
    """Make the plan of a closed jaxpr, traced without a mesh: run all passes.

    Without `in_tree` and `out_tree`, arguments and results are flat, and `results` has
    the names of these; (): they are named by their equations. `rematerialize` says
    whether groups rematerialize what a later round or a backward loop needs of their
    work, instead of saving it. `secure` says whether sums of cotangents of a secure sum
    are secure in the plan; what runs in one process needs no such plan. `checkpoints`:
    whether loops over rounds save the state of some rounds only. `skips`: whether what
    runs the plan skips the work of groups that only add zeros. If mapped
    functions of a local stage run programs themselves, its `Stage.inner` is the plan of
    the stage over the partition of these programs.
    """
    # The planner evaluates small constants (indices, masks), which is no transfer of
    # users' data.
    with jax.transfer_guard("allow"):
        kinds = inline_and_infer(closed, names, declared)
        if rematerialize:
            kinds = _rewritten(rematerialize_residuals, kinds, declared)
        if checkpoints:
            program = checkpoint_rounds(kinds)
            if program is not None:
                kinds = _infer_and_make_explicit(program, kinds.partition, declared)
        # Last, as the passes above write equations without a demand.
        if secure and (secured := demand_of_cotangents(kinds)) is not None:
            kinds = _infer_and_make_explicit(secured, kinds.partition, declared)
        result_kinds = [kinds[v] for v in kinds.program.outvars]
        results = results if out_tree is None else result_names(out_tree)
        signature = PlanSignature(name, names, result_kinds, results, in_tree, out_tree)
        with outside_meshes():
            plan = build_plan(kinds, signature, rematerialize, skips)
        options = {"rematerialize": rematerialize, "checkpoints": checkpoints}
        make = functools.partial(plan_of_jaxpr, **options)
        return with_inner_plans(plan, make)


def costs_of_residuals(
    kinds: Environment, names: Sequence[str], declared: Sequence[Kind | None]
) -> dict[str, tuple[Cost, Cost]]:
    """What the server and one group save and compute, by the option `residuals`.

    `kinds` is that of `inline_and_infer` of a program, with the same names and kinds.
    """
    result = {}
    for residuals in ("store", "recompute"):
        again = residuals == "recompute"
        with jax.transfer_guard("allow"), outside_meshes():
            rewrite = rematerialize_residuals if again else lambda _: None
            used = _rewritten(rewrite, kinds, declared)
            results = [used[v] for v in used.program.outvars]
            signature = PlanSignature(residuals, names, results)
            result[residuals] = costs(build_plan(used, signature, again))
    return result


def _rewritten(
    rewrite: Callable[[Environment], InlinedJaxpr | None],
    kinds: Environment,
    declared: Sequence[Kind | None],
) -> Environment:
    """Rewrite loops one by one until nothing is left to rewrite."""
    while (program := rewrite(kinds)) is not None:
        # New bodies have new variables, so their kinds are inferred again. Some values
        # may be partitioned only now, and imply further communication.
        kinds = _infer_and_make_explicit(program, kinds.partition, declared)
    return kinds


def _equations(program: InlinedJaxpr) -> Iterator[Eqn]:
    """Yield the equations of an inlined jaxpr, and of its loops' bodies at any depth.

    Each body comes after its equation. Jaxprs of mapped functions are not entered.
    """
    for eqn in program.eqns:
        yield eqn
        if eqn.primitive.name in CONTROL:
            for body in program.bodies(eqn):
                yield from _equations(body)


def find_partitions(program: InlinedJaxpr) -> list[Partition]:
    """List the partitions of a program's building blocks, by their first use.

    A move of slices between a population and a cohort of it is over two partitions. If
    no other building block is over either of them, the cohort, the smaller one, is
    listed, after the others.

    Raises `PlanError` if the program has a mutable array; an equation bound to a mesh,
    unless `drjax.jit` plans it; or a building block inside an equation that is no
    `scan`, `while`, `cond` or building block.
    """
    partitions: dict[Partition, Any] = {}
    resizing: dict[tuple[Partition, Partition], Any] = {}
    for eqn in _equations(program):
        # Building blocks, the only equations that name a partition.
        if eqn.primitive in BLOCKS:
            operand, result = partitions_of(eqn)
            if operand is result or operand == result:
                partitions.setdefault(operand, eqn)
            else:
                resizing.setdefault((operand, result), eqn)
        # Most equations: these have arrays, no mesh, and no jaxprs.
        if eqn.primitive.name in ELEMENTWISE:
            continue
        # A mutable array is shared by reference; stages run in different processes.
        if _has_mutable(eqn.invars) or _has_mutable(eqn.outvars):
            raise PlanError(
                f"{eqn.primitive.name} at {source_line(eqn)} works on a "
                "mutable array (jax.new_ref), which cannot pass from stage to stage of "
                "a plan. Use it inside a function given to drjax.map_fn, or update "
                "values with x.at[...] instead."
            )
        # Under drjax.jit the mesh is known, and `planned` is set.
        bound = eqn.params.get("mesh") is not None or eqn.primitive.name in _MESH_BOUND
        if bound and (group_mesh.value is not None or not planned.value):
            raise PlanError(
                f"{eqn.primitive.name} at {source_line(eqn)} is bound to a "
                "mesh. A plan is free of devices: leave out mesh= of the program and "
                "of its blocks, and shard_map and sharding constraints outside of "
                "mapped functions; drjax.jit plans the function with its mesh."
            )
        # Calls are inlined and loops have plans; other equations hide their jaxprs.
        hidden = any(map(uses_blocks, _compat.jaxprs_in(eqn.params)))
        if hidden and eqn.primitive not in BLOCKS and eqn.primitive.name not in CONTROL:
            raise PlanError(
                f"{eqn.primitive.name} at {source_line(eqn)} calls drjax "
                "building blocks, and what it does with them has no plan. Call them "
                "outside of it, or run the program with jax.jit."
            )
    # A population is a global value, of which the cohort has slices; if nothing else
    # tells which of the two the groups are, they are the cohort.
    for pair, eqn in resizing.items():
        if not partitions.keys() & {*pair}:
            partitions.setdefault(min(pair, key=lambda p: p.size), eqn)
    return [*partitions]


def _has_mutable(atoms: Sequence[Atom]) -> bool:
    """Whether one of some variables is a mutable array."""
    for atom in atoms:
        if hasattr(atom.aval, "inner_aval"):
            return True
    return False


# Primitives that name devices, or a layout on them.
_MESH_BOUND = ("shard_map", "sharding_constraint", "reshard", "device_put")


# Stands for None, which is no leaf of a tree.
_INFERRED = object()


def _declared_kinds(
    partitioned: PyTree, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> list[Kind | None]:
    """Return the kind that `partitioned=` declares of each leaf of the arguments.

    `partitioned` is a tree of bools that is a prefix of `args`, or `PlanError` is
    raised: true for arguments partitioned along axis 0, false for global ones. A None
    in it stands for arguments whose kinds are inferred, as those of `kwargs` are. With
    None as the tree, all kinds are inferred.
    """
    leaves = jax.tree_util.tree_leaves((args, kwargs))
    if partitioned is None:
        return [None] * len(leaves)
    # Users write a list where the arguments are a tuple.
    if isinstance(partitioned, list):
        partitioned = tuple(partitioned)
    kinds = {True: PARTITIONED, False: GLOBAL, None: _INFERRED}

    def kind(leaf: bool | None) -> object:
        if leaf is None or isinstance(leaf, bool | np.bool_):
            return kinds[leaf]
        raise ValueError(f"{leaf!r} is no bool.")

    try:
        # Only in `partitioned` is None a leaf: in the arguments, JAX takes it for a
        # tree without leaves, which has no kind.
        declared = jax.tree.map(kind, partitioned, is_leaf=lambda x: x is None)
        flat = jax.tree.leaves(jax.tree.broadcast(declared, args))
    except ValueError as error:
        raise PlanError(
            "partitioned= needs a tree of bools that is a prefix of the arguments, "
            f"such as (False, True), got {partitioned!r} for {len(args)} arguments: "
            f"{error}"
        ) from None
    flat = [None if k is _INFERRED else k for k in flat]
    # Arguments given by name have no place in the tree and are inferred.
    return flat + [None] * (len(leaves) - len(flat))
