"""The XLA backend: a plan as one JAX function, in streaming form.

Input: a plan. Output: a JAX function with the signature of the planned one, to be
compiled by `jax.jit`.

Each round is one `shard_map` over the mesh axes to which the partition is mapped. In
it, a scan goes over chunks of a device's groups with running accumulators for all
reductions of the round, and one `psum` adds up the devices.

Invariants: the memory that a round needs does not grow with the number of groups; a
broadcast value is never copied for each group; and slices that a later round needs are
stacked, the only arrays of size n.

Sharp edges: the `shard_map`s are not differentiated: derivatives are taken of programs,
before they are planned (see `_jit/jit_primitive.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._errors import DrjaxValueError, MeshError, PlanError
from drjax._planner.arguments import flat_inputs
from drjax._primitives.map_lowering import (
    lowers_by_vmap,
    prepare_group_jaxpr,
    vmap_over_devices,
)
from drjax._primitives.routes import MOVES
from drjax._sharding.execute import (
    as_operand,
    shard_map_over_devices,
    undivided_if_uneven,
)
from drjax._sharding.layout import Layout, find_mesh, make_layout
from drjax.backends._interpret_plan import (
    Environment,
    PlanInterpreter,
    split_scan,
    split_while,
)
from drjax.backends.kept import Keep
from drjax.backends.xla import step_size
from drjax.backends.xla.chunked_stage import (
    ChunkedStage,
    call,
    result_specs,
)
from drjax.backends.xla.fold_states import (
    finish_folds,
    finish_stacked_folds,
    operands_of,
    with_arrays,
)
from drjax.backends.xla.folds_around import (
    folded_slices,
    has_folds,
    only_for_folds,
    run_with_folds,
)
from drjax.backends.xla.inner_programs import (
    Stacked,
    layout_inside,
    map_jaxprs,
    run_inner_levels,
)
from drjax.backends.xla.kept_run import KeptRun
from drjax.backends.xla.merge_levels import InnerLevels
from drjax.backends.xla.reuse_accumulators import (
    AccumulatorReuse,
    find_reuse,
    finish_stacked,
)
from drjax.plan import Loop, Move, Plan, Round, Stage, Value
from drjax.primitives import gather_p, permute_p


def compile(
    plan: Plan,
    *,
    groups_per_step: int | str | None = None,
    memory_budget: int | None = None,
    mesh: Any = None,
    keep: dict[Any, Any] | None = None,
) -> Callable:
    """A JAX function that runs the plan; `jax.jit` it, unless something is kept.

    Args:
      plan: The plan.
      groups_per_step: How many of a device's groups work at once: a positive int; or
        `"auto"`: as many as fit in memory. Default: all.
      memory_budget: With `"auto"`, bytes of temporary memory for each device. Default:
        what the devices have left.
      mesh: A `jax.sharding.Mesh` or `AbstractMesh`. Default: the one in context.
      keep: Which partitioned results are arguments of the next call: a dict from
        results to arguments, as `{1: 0}`. The function returns a `Kept` for each. It is
        compiled already, and donates these arguments, also arrays that the first call
        gets for them: the results take their buffers.

    Returns:
      A function with the signature of the planned one; with `keep`, it has a method
      `lower`, as a function of `jax.jit`.

    Raises:
      DrjaxTypeError, DrjaxValueError: A wrong option; (from the returned function)
        arguments do not fit the plan, with `"auto"` one group does not fit in memory,
        or a handle is of another function, or was used up.
      MeshError: (from the returned function) the plan's partition does not fit the
        mesh, or its axes are Manual: a plan does not run inside a `jax.shard_map` over
        them.

    Example:
      >>> import drjax, jax, jax.numpy as jnp
      >>> @drjax.program(clients=4)
      ... def f(x):
      ...     return drjax.reduce_sum(drjax.map_fn(jnp.square, x))
      >>> run = drjax.backends.xla.compile(
      ...     drjax.make_plan(f)(jnp.arange(4.0)), groups_per_step=2)
      >>> print(jax.jit(run)(jnp.arange(4.0)))
      14.0
    """
    step = step_size.checked(groups_per_step, memory_budget)
    if kept := Keep(plan, keep):
        return KeptRun(kept, lambda inputs: run_flat(plan, inputs, step, mesh), mesh)

    def run(*args, **kwargs):
        leaves = flat_inputs(plan, args, kwargs)
        return plan.out_tree.unflatten(run_flat(plan, leaves, step, mesh))

    return run


def run_flat(
    plan: Plan,
    inputs: list,
    step: step_size.GroupsPerStep = None,
    mesh: Any = None,
) -> list:
    """Run a plan on flat inputs, or trace it under a JAX transformation.

    Args:
      plan: The plan.
      inputs: The arrays of `plan.inputs`, in order; partitioned ones `[..., n, ...]`.
      step: How many of a device's groups work at once; None: all; a `Fit`: as many as
        fit in memory.
      mesh: A `jax.sharding.Mesh` or `AbstractMesh`. Default: the one in context.

    Returns:
      The list of the arrays of `plan.outputs`.

    Raises:
      DrjaxValueError: With a `Fit`, not even one group fits in memory.
      MeshError: The partition does not fit the mesh; or its mesh axes are Manual.
    """
    layout = _layout_of(plan, mesh)
    if isinstance(step, step_size.Fit):
        fit = step.budget
        step = None if layout is None else _largest_step(plan, layout, fit, mesh)
    return _MeshInterpreter(plan, layout, step, mesh)(inputs)


def _largest_step(
    plan: Plan, layout: Layout, budget: int | None, user_mesh: Any = None
) -> int:
    """Find the largest number of a device's groups at once that fits in memory.

    It compiles the program up to eight times.

    Args:
      plan: The plan.
      layout: How its partition is laid out on the mesh.
      budget: Bytes of temporary memory for each device; None: what is free.
      user_mesh: The mesh that the user passed; None: the one in context.

    Raises:
      DrjaxValueError: One group does not fit, or no device can be asked for its memory.
    """
    mesh = layout.mesh
    if isinstance(mesh, AbstractMesh):
        # The devices are needed, to ask for their memory.
        mesh = _compat.concrete_mesh()
        if mesh.empty:
            raise DrjaxValueError(
                'groups_per_step="auto" compiles for the devices in context and asks '
                "how much memory they have. Under an AbstractMesh no device can be "
                "asked: give a number."
            )
    # Without a mesh the program runs on one device.
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    if budget is None:
        budget = step_size.free_bytes(devices)

    def abstract_input(value: Value):
        shape, spec = value.shape, [None] * value.axis
        if value.partitioned:
            shape = (*shape[: value.axis], plan.size, *shape[value.axis :])
        # JAX refuses an argument whose sharding does not divide its axis, and a scalar
        # whose spec has an entry.
        axes = layout.axes if value.partitioned and not layout.uneven else None
        sharding = None if mesh is None else NamedSharding(mesh, P(*spec, axes))
        return jax.ShapeDtypeStruct(
            shape, value.dtype, sharding=sharding if shape else None
        )

    def temp_bytes(step: int) -> int:
        run = _MeshInterpreter(plan, layout, step, user_mesh)
        # The whole program, as the memory of one round depends on what others keep.
        compiled: Any = (
            jax.jit(lambda *xs: run(xs))
            .lower(*map(abstract_input, plan.inputs))
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    return step_size.largest(_most_groups(plan, layout, user_mesh), temp_bytes, budget)


def on_mesh(plan: Plan, inputs: list) -> list:
    """Constrain the inputs of a plan to its mesh, so that a surrounding jit sees it.

    Only a concrete mesh that is not in JAX's context needs that, as that of a
    `with mesh:` block. Without such a mesh, and under `jax.set_mesh`, the inputs are
    returned unchanged.

    Args:
      plan: The plan.
      inputs: The arrays of `plan.inputs`, in order.

    Returns:
      The arrays, in the same order.
    """
    layout = _layout_of(plan)
    inner = [layout_inside(partition, None) for partition in plan.levels[1:]]
    for each in [] if layout is None else [layout, *inner]:
        if isinstance(each.mesh, jax.sharding.Mesh):
            return [as_operand(x, each, False) for x in inputs]
    return inputs


def _layout_of(plan: Plan, mesh: Any = None) -> Layout | None:
    """How the partition of a plan is laid out on the mesh; None without a partition.

    Args:
      plan: The plan.
      mesh: A `jax.sharding.Mesh` or `AbstractMesh`. Default: the one in context.

    Raises:
      MeshError: The partition does not fit the mesh; or its mesh axes are Manual.
    """
    if plan.partition is None:
        return None
    layout = make_layout(plan.partition, find_mesh(plan.partition, mesh))
    # Inputs and rounds of a plan have all n groups, those of a device there n / m.
    if layout.manual:
        raise MeshError(
            f"The plan of {plan.name!r} needs all groups of {plan.partition}, but "
            f"inside jax.shard_map over {layout.axes} a device holds only its own. Use "
            "jax.jit of the program in that jax.shard_map, or call drjax.jit or the "
            "compiled plan outside of it."
        )
    return layout


def groups_of_device(plan: Plan) -> int:
    """The number of slots for groups of a device of the mesh in context, at least 1.

    Raises:
      MeshError: The partition does not fit the mesh; or its mesh axes are Manual.
    """
    layout = _layout_of(plan)
    return 1 if layout is None else _most_groups(plan, layout)


def _most_groups(plan: Plan, layout: Layout, mesh: Any = None) -> int:
    """The largest number of slots of a device for groups, of all levels of a plan.

    Args:
      plan: The plan.
      layout: How the groups of its outermost level are laid out.
      mesh: The mesh that the user passed; None: the one in context.
    """
    inner = [layout_inside(partition, mesh) for partition in plan.levels[1:]]
    return max(x.per_device for x in (layout, *inner))


class _MeshInterpreter(PlanInterpreter):
    """Traces a plan on a mesh, as JAX operations: `interpreter(inputs)`.

    It takes and returns lists of arrays, in the order of `plan.inputs` and
    `plan.outputs`. Partitioned values are whole arrays `[..., n, ...]`, with the group
    axis `Value.axis`.

    Args:
      plan: The plan.
      layout: How its partition is laid out on the mesh; None without a partition.
      step: How many of a device's groups run at once; None: all.
      mesh: The mesh that the user passed, for inner levels; None: the one in context.
      partial: The names of reductions of which the devices' partial reductions are
        results, `[m, *s]`.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout | None,
        step: int | None,
        mesh: Any = None,
        partial: frozenset[str] = frozenset(),
    ):
        self.plan, self.layout, self.step, self.mesh = plan, layout, step, mesh
        self._partial = partial
        self._kept, self._folded = plan.kept(), folded_slices(plan)

    def __call__(self, inputs: Iterable) -> list:
        return super().__call__(
            x if isinstance(x, Stacked) else jnp.asarray(x) for x in inputs
        )

    def run_server(self, stage: Stage, env: Environment) -> None:
        # It may have run together with the round before it: `_reuse_accumulators`.
        if not any(value in env for value in stage.outputs):
            args = env.read(stage.inputs)
            if self.layout is not None and has_folds(stage):
                outs = run_with_folds(stage, args, self.layout)
            else:
                outs = call(stage, args)
            env.write(stage.outputs, outs)

    def scatter(self, slices: Value, whole: Any) -> Any:
        # A scatter is a matter of layout: the shard_map of the groups takes each
        # device's part.
        if self.layout is None or slices.name in self._folded:
            return whole
        return undivided_if_uneven(whole, self.layout, slices.axis)

    # -----------------------------------------------------------------------------
    # The groups' work

    def run_groups(self, index: int, env: Environment) -> None:
        a_round, layout = self.plan.rounds[index], self.layout
        stage, reduces = a_round.local, a_round.partials
        # A round may only broadcast or gather; but effects must run.
        if stage.empty and not stage.jaxpr.effects:
            return
        assert layout is not None
        streams = self.step is not None and self.step < layout.per_device
        if streams and layout.sharded:
            _check_known_shapes(stage)
        kept = [v for v in stage.outputs if v.name in self._kept]
        levels = InnerLevels.of_round(layout, a_round, kept, self.mesh, self._partial)
        # Without a scan over chunks there are no running sums to alias.
        aliases = streams and not levels.merged and not levels.partial
        reuse = find_reuse(self.plan, index) if aliases else None
        combine = reuse is None  # else the reuse of accumulators combines the devices
        totals, stacks = _run_groups(
            layout, a_round, kept, env, self.step, combine, levels
        )
        if reuse is None:
            results = [v for fold in a_round.folds for v in fold.results]
            env.write([*(reduce.result for reduce in reduces), *results], totals)
        for value, x in zip(kept, stacks, strict=True):
            env[value] = jnp.moveaxis(x, 0, value.axis)
        for reduce in a_round.reduces:
            # Last, as it may gather slices of this round, which are in `env` only now.
            if reduce.op == "gather" and only_for_folds(self.plan, reduce.result):
                env[reduce.result] = env[reduce.source]
            elif reduce.op == "gather":
                params = {"partition": layout.partition, "mesh": layout.mesh}
                if reduce.sharded:
                    params["sharded"] = reduce.sharded
                env[reduce.result] = gather_p.bind(env[reduce.source], **params)
        if reuse is not None:
            self._reuse_accumulators(layout, reuse, totals, env)

    def _reuse_accumulators(
        self, layout: Layout, reuse: AccumulatorReuse, totals: list, env: Environment
    ) -> None:
        """Combine the devices' partial reductions, and run the next server stage.

        Results of the shape and dtype of a running sum take the sum's buffer.

        Args:
          layout: How the partition is laid out on the mesh.
          reuse: Which result takes the buffer of which running sum.
          totals: For each reduction of the round but gathers the partial reductions of
            the m devices, `[m, *s]`.
          env: The arrays so far; the results that are read later are added.
        """

        def server(results: dict[str, Any]) -> dict[str, Any]:
            # A copy: tracers of the loop's step must not leave it.
            inner = env.updated(results)
            self.run_server(reuse.server, inner)
            return {v.name: inner[v] for v in reuse.server.outputs}

        # With the stage's outputs in `env`, `run_server` skips it in the next round.
        env.arrays |= reuse.run(layout, totals, server)

    def move(self, move: Move, slices: Any, index: Any = None) -> Any:
        layout = self.layout
        assert layout is not None
        params = {"partition": layout.partition, "mesh": layout.mesh}
        if move.op == "permute":
            slices = as_operand(slices, layout, True)
            return permute_p.bind(slices, sources=move.sources, **params)
        # The partition is that of the operand of a take, of the result of a put_add.
        end = move.source if move.op == "take" else move.result
        if not end.partitioned:
            params["partition"] = replace(layout.partition, size=move.population)
        taken = layout
        if not move.source.partitioned:
            of_source = replace(layout.partition, size=move.population)
            taken = make_layout(of_source, layout.mesh)
        slices, index = (
            as_operand(slices, taken, True),
            as_operand(index, layout, False),
        )
        return MOVES[move.op].bind(slices, index, **params)

    # -----------------------------------------------------------------------------
    # Loops

    def run_loop(self, index: int, loop: Loop, inputs: list) -> list:
        layout = self.layout
        if loop.op == "program":  # over another partition, on the same mesh
            layout = _layout_of(loop.bodies[0], layout and layout.mesh)
        bodies = [
            _MeshInterpreter(body, layout, self.step, self.mesh) for body in loop.bodies
        ]
        if loop.op == "program":
            return bodies[0](inputs)
        inputs = [
            x if isinstance(x, Stacked) else self._typed(v, x)
            for v, x in zip(loop.inputs, inputs, strict=True)
        ]
        if loop.op == "cond":
            branches = [lambda *x, body=body: body([*x]) for body in bodies]
            return lax.switch(inputs[0], branches, *inputs[1:])
        if loop.op == "while":
            condition_consts, body_consts, init = split_while(loop, inputs)
            condition, body = bodies
            return lax.while_loop(
                # The condition's plan returns one value, a bool.
                lambda carry: condition([*condition_consts, *carry])[0],
                lambda carry: body([*body_consts, *carry]),
                init,
            )
        (body,) = bodies
        consts, init, xs = split_scan(loop, inputs)

        def step(carry, xs):
            outs = body([*consts, *carry, *xs])
            return outs[: loop.carry], outs[loop.carry :]

        carry, ys = lax.scan(step, init, xs, loop.length, loop.reverse)
        return [*carry, *ys]

    def _typed(self, value: Value, x: Any) -> Any:
        """Reshard a loop's input to the sharding of a round's partitioned results.

        On Explicit axes, a carried value must not change its sharding between steps.
        Global values, and all values without Explicit axes, are returned unchanged.

        Args:
          value: The input of the loop, from `loop.inputs`.
          x: Its array; of a partitioned value `[..., n, ...]`.
        """
        layout = self.layout
        if not value.partitioned or layout is None or layout.spec_entry is None:
            return x
        x = as_operand(jnp.moveaxis(x, value.axis, 0), layout, True)
        return jnp.moveaxis(x, 0, value.axis)


def _run_groups(
    layout: Layout,
    a_round: Round,
    kept: list[Value],
    env: Environment,
    step: int | None,
    combine: bool,
    levels: InnerLevels,
) -> tuple[list, list]:
    """Run the local stage of a round for all groups, on all devices, and reduce.

    Args:
      layout: How the partition is laid out on the mesh: n groups on m devices.
      a_round: The round.
      kept: The outputs of its local stage to return as slices.
      env: The arrays so far, from which the inputs of the stage are read.
      step: How many of a device's groups run at once; None: all.
      combine: Whether to combine the devices' partial reductions.
      levels: How reductions are combined with those of inner and outer levels.

    Returns:
      `(totals, stacks)`: for each reduction but gathers its result `[*s]`, and then the
      leaves of those of the folds, or with `combine=False` the partial reductions
      `[m, *s]` of the m devices; and for each output in `kept` the slices of all
      groups, `[n, *s]`.
    """
    stage, reduces, folds = a_round.local, a_round.partials, a_round.folds
    shared = env.read(v for v in stage.inputs if not v.partitioned)
    count = len(shared)
    shared += env.read(operands_of(folds))
    slices = [
        env[v] if isinstance(env[v], Stacked) else jnp.moveaxis(env[v], v.axis, 0)
        for v in stage.inputs
        if v.partitioned
    ]
    # Some work cannot be in a shard_map; see `map_lowering`.
    by_vmap = any(
        lowers_by_vmap(layout, x.jaxpr) for x in (stage, *(f.combine for f in folds))
    )
    rewrite = lambda jaxpr: prepare_group_jaxpr(layout, jaxpr, by_vmap)
    prepare = lambda x: map_jaxprs(x, rewrite)
    prepared = [replace(fold, combine=prepare(fold.combine)) for fold in folds]
    stage = prepare(stage)
    inner = None
    if not (folds and stage.exported is not None):  # only its own batch folds states
        inner = run_inner_levels(
            stage, _MeshInterpreter, step, levels.mesh, by_vmap, levels.merged
        )

    # A `Stacked` array is passed as two operands: the array, and the position in it.
    stacked = [isinstance(x, Stacked) for x in slices]
    if by_vmap or layout.uneven or layout.spec_entry is not None:
        slices = [x.whole() if isinstance(x, Stacked) else x for x in slices]
        stacked = [False] * len(slices)
    positions = [x.index for x in slices if isinstance(x, Stacked)]
    slices = [x.array if isinstance(x, Stacked) else x for x in slices]

    def work(*args):
        *args, first = args
        args, indices = args[len(positions) :], iter(args[: len(positions)])
        works = with_arrays(prepared, args[count : len(shared)])
        chunked = ChunkedStage(
            layout, stage, reduces, works, kept, args[:count], inner, levels.merged
        )
        pairs = zip(args[len(shared) :], stacked, strict=True)
        own = [
            Stacked(x, next(indices)) if is_stacked else x for x, is_stacked in pairs
        ]
        return chunked.run(first, own, step)

    def body(*args):
        totals, stacks = work(*args[:-1], args[-1][0])
        # `[1, *s]`: the shard_map stacks the devices' values along this axis.
        if not combine:
            return [*(total[None] for total in totals), *stacks]
        args = args[len(positions) :]
        works = with_arrays(prepared, args[count : len(shared)])
        sums, states = totals[: len(reduces)], totals[len(reduces) :]
        folded = finish_folds(layout, works, states)
        return [*levels.finish(layout, stage, reduces, sums), *folded, *stacks]

    # On Explicit axes, a sharded result has another type than an operand.
    shared = [as_operand(x, layout, False) for x in shared]
    if by_vmap:
        args = [*shared, *slices]
        partitioned = [False] * len(shared) + [True] * len(slices)
        totals, stacks = vmap_over_devices(layout, work, args, partitioned)
        if not combine:
            return totals, stacks
        sums, states = totals[: len(reduces)], totals[len(reduces) :]
        works = with_arrays(folds, shared[count:])
        folded = finish_stacked_folds(layout, works, states)
        return [*finish_stacked(layout, reduces, sums), *folded], stacks
    # Of outputs: the same everywhere, one for each device, or divided by groups.
    results = len(reduces) + sum(len(fold.results) for fold in folds)
    each = [None] * results
    if combine:
        each = [*result_specs(layout, reduces), *[False] * (results - len(reduces))]
        for i, reduce in enumerate(reduces):
            each[i] = None if reduce.result.name in levels.partial else each[i]
    outputs = [*each, *[True] * len(kept)]
    # As in the surrounding code: users' loops inside were traced under it.
    operands, whole = [*positions, *shared, *slices], len(positions) + len(shared)
    divided = [P(None, layout.axes) if x else True for x in stacked]
    outs = shard_map_over_devices(
        layout, body, operands, [False] * whole + divided, outputs, _compat.check_vma(),
        with_first_index=True,
    )  # fmt: skip
    return outs[:results], outs[results:]


def _check_known_shapes(stage: Stage) -> None:
    """Check that no input or output of a local stage has symbolic dimensions.

    XLA crashes on these in a loop in a `shard_map`.

    Raises:
      PlanError: A value has symbolic dimensions.
    """
    for value in (*stage.inputs, *stage.outputs):
        if not all(isinstance(size, int) for size in value.shape):
            raise PlanError(
                f"{value} has symbolic dimensions, and with groups_per_step= on a mesh "
                "the work of the groups is a loop in a shard_map, where XLA cannot "
                "compile them. Export it without groups_per_step=, or without a mesh, "
                "or for known shapes."
            )
