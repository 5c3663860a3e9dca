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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._errors import DrjaxValueError, PlanError
from drjax._planner.arguments import flat_inputs
from drjax._primitives.map_lowering import (
    lowers_by_vmap,
    prepare_group_jaxpr,
    vmap_over_devices,
)
from drjax._sharding.execute import as_operand, shard_map_over_devices
from drjax._sharding.layout import Layout, find_mesh, make_layout
from drjax.backends.xla import step_size
from drjax.backends.xla.chunked_stage import ChunkedStage, call, finish
from drjax.backends.xla.reuse_accumulators import find_reuse, finish_stacked
from drjax.plan import Loop, Plan, Value
from drjax.primitives import gather_p


def compile(
    plan: Plan,
    *,
    groups_per_step: int | str | None = None,
    memory_budget: int | None = None,
    mesh: Any = None,
) -> Callable:
    """A JAX function that runs the plan; `jax.jit` it.

    Args:
      plan: The plan.
      groups_per_step: How many of a device's groups work at once, or `"auto"`; as for
        `drjax.jit`. Default: all.
      memory_budget: As for `drjax.jit`.
      mesh: The mesh. Default: the one in context.

    Returns:
      A function with the signature of the planned one.

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
    """The results of a plan, flat.

    Args:
      plan: The plan.
      inputs: Its inputs.
      step: How many of a device's groups work at once.
      mesh: The mesh. Default: the one in context.
    """
    layout = _layout_of(plan, mesh)
    if isinstance(step, step_size.Fit):
        fit = step.budget
        step = None if layout is None else _largest_step(plan, layout, fit)
    return _Run(plan, layout, step)(inputs)


def _largest_step(plan: Plan, layout: Layout, budget: int | None) -> int:
    """The largest number of groups at once that fits in memory."""
    mesh = layout.mesh
    if isinstance(mesh, AbstractMesh):
        # The devices are needed here, to ask for their memory.
        mesh = _compat.concrete_mesh()
        if mesh.empty or layout.manual:
            raise DrjaxValueError(
                'groups_per_step="auto" compiles for the devices in context and asks '
                "how much memory they have. Under an AbstractMesh or inside "
                "jax.shard_map no device can be asked: give a number."
            )
    # Without a mesh the program runs on one device.
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    if budget is None:
        budget = step_size.free_bytes(devices)

    def abstract_input(value: Value):
        shape, spec = value.shape, [None] * value.axis
        if value.partitioned:
            shape = (*shape[: value.axis], plan.size, *shape[value.axis :])
        axes = layout.axes if value.partitioned and not layout.uneven else None
        sharding = None if mesh is None else NamedSharding(mesh, P(*spec, axes))
        return jax.ShapeDtypeStruct(
            shape, value.dtype, sharding=sharding if shape else None
        )

    def temp_bytes(step: int) -> int:
        run = lambda *xs: _Run(plan, layout, step)([*xs])
        # The whole program, as the memory of one round depends on what others keep.
        compiled: Any = jax.jit(run).lower(*map(abstract_input, plan.inputs)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    return step_size.largest(layout.per_device, temp_bytes, budget)


def on_mesh(plan: Plan, inputs: list) -> list:
    """The inputs of a plan such that a surrounding jit sees a concrete mesh."""
    layout = _layout_of(plan)
    if layout is None or not isinstance(layout.mesh, jax.sharding.Mesh):
        return inputs
    return [as_operand(x, layout, False) for x in inputs]


def _layout_of(plan: Plan, mesh: Any = None) -> Layout | None:
    if plan.partition is None:
        return None
    return make_layout(plan.partition, find_mesh(plan.partition, mesh))


class _Run:
    """Runs one plan; partitioned values are whole arrays, rows along `Value.axis`."""

    def __init__(self, plan: Plan, layout: Layout | None, step: int | None):
        self.plan, self.layout, self.step = plan, layout, step
        self.kept = plan.kept()

    def __call__(self, inputs: list) -> list:
        plan, values, server_done = self.plan, {}, False
        _store(values, plan.inputs, map(jnp.asarray, inputs))
        for index, a_round in enumerate(plan.rounds):
            if not server_done:
                self._server(a_round.server, values)
            for whole, rows in a_round.scatter:
                # A scatter is a matter of layout: the shard_map below takes each
                # device's part.
                values[rows.name] = values[whole.name]
            server_done = self._groups(index, values)
            for loop in a_round.loops:
                outs = self._loop(loop, [self._typed(v, values) for v in loop.inputs])
                _store(values, loop.outputs, outs)
        if not server_done:
            self._server(plan.server, values)
        return [values[v.name] for v in plan.outputs]

    def _server(self, stage, values: dict[str, Any]) -> None:
        inputs = [values[v.name] for v in stage.inputs]
        _store(values, stage.outputs, call(stage, inputs))

    # -----------------------------------------------------------------------------
    # The groups' work

    def _groups(self, index: int, values: dict[str, Any]) -> bool:
        """The groups' work, and reductions; whether the server's next stage is done."""
        a_round, layout = self.plan.rounds[index], self.layout
        stage = a_round.local
        # A round may only broadcast or gather; but effects must run.
        if stage.empty and not stage.jaxpr.effects:
            return False
        assert layout is not None
        streams = self.step is not None and self.step < layout.per_device
        if streams and layout.sharded:
            _check_known_shapes(stage)
        # Without a scan over chunks there are no running sums to alias.
        reuse = find_reuse(self.plan, index, layout) if streams else None
        sums = a_round.partials
        kept = [v for v in stage.outputs if v.name in self.kept]
        shared = [values[v.name] for v in stage.inputs if not v.partitioned]
        rows = [
            jnp.moveaxis(values[v.name], v.axis, 0)
            for v in stage.inputs
            if v.partitioned
        ]

        # Some work cannot be in a shard_map; see `map_lowering`.
        by_vmap = lowers_by_vmap(layout, stage.jaxpr)
        stage = replace(stage, jaxpr=prepare_group_jaxpr(layout, stage.jaxpr, by_vmap))

        def work(*args):
            *args, first = args
            local = ChunkedStage(layout, stage, sums, kept, args[: len(shared)])
            return local.run(first, args[len(shared) :], self.step)

        def body(*args):
            *args, first = args
            totals, stacks = work(*args, first[0])
            if reuse is None:
                return [*finish(layout, sums, totals), *stacks]
            # Still one sum for each device: the loop in `AccumulatorReuse` combines
            # them.
            return [*(total[None] for total in totals), *stacks]

        args, by_rows = [*shared, *rows], [False] * len(shared) + [True] * len(rows)
        if by_vmap:
            totals, stacks = vmap_over_devices(layout, work, args, by_rows)
            if reuse is None:
                totals = finish_stacked(layout, sums, totals)
            outs = [*totals, *stacks]
        else:
            outs = shard_map_over_devices(
                layout,
                body,
                args,
                by_rows,
                [False if reuse is None else None] * len(sums) + [True] * len(kept),
                _compat.check_vma(),
                with_first_index=True,
            )
        if reuse is None:
            for reduce, out in zip(sums, outs, strict=False):
                values[reduce.result.name] = out
        for value, out in zip(kept, outs[len(sums) :], strict=True):
            values[value.name] = jnp.moveaxis(out, 0, value.axis)
        for reduce in a_round.reduces:
            if reduce.op == "gather":
                params = {"partition": layout.partition, "mesh": layout.mesh}
                source = values[reduce.source.name]
                values[reduce.result.name] = gather_p.bind(source, **params)
        if reuse is not None:

            def server(results: dict[str, Any]) -> dict[str, Any]:
                # A copy: tracers of the loop's step must not leave it.
                known = values | results
                self._server(reuse.server, known)
                return {v.name: known[v.name] for v in reuse.server.outputs}

            values |= reuse.run(layout, outs[: len(sums)], server)
        return reuse is not None

    # -----------------------------------------------------------------------------
    # Loops

    def _typed(self, value: Value, values: dict[str, Any]) -> Any:
        """A value as a loop takes it: with the type that the groups' work returns.

        On Explicit axes, a carried value must not change its sharding between steps.
        """
        x, layout = values[value.name], self.layout
        if not value.partitioned or layout is None or layout.spec_entry is None:
            return x
        x = as_operand(jnp.moveaxis(x, value.axis, 0), layout, True)
        return jnp.moveaxis(x, 0, value.axis)

    def _loop(self, loop: Loop, inputs: list) -> list:
        runs = [_Run(body, self.layout, self.step) for body in loop.bodies]
        if loop.op == "cond":
            return lax.switch(
                inputs[0], [lambda *x, r=r: r([*x]) for r in runs], *inputs[1:]
            )
        if loop.op == "while":
            first, second = loop.consts[0], sum(loop.consts)
            cond, body = inputs[:first], inputs[first:second]
            return lax.while_loop(
                # The condition's plan returns one value, a bool.
                lambda carry: runs[0]([*cond, *carry])[0],
                lambda carry: runs[1]([*body, *carry]),
                inputs[second:],
            )
        first = sum(loop.consts)
        consts, init = inputs[:first], inputs[first : first + loop.carry]

        def step(carry, xs):
            outs = runs[0]([*consts, *carry, *xs])
            return outs[: loop.carry], outs[loop.carry :]

        xs = inputs[first + loop.carry :]
        carry, ys = lax.scan(step, init, xs, loop.length, loop.reverse)
        return [*carry, *ys]


def _check_known_shapes(stage) -> None:
    """Refuse symbolic dimensions in a loop in a `shard_map`, where XLA crashes."""
    for value in (*stage.inputs, *stage.outputs):
        if not all(isinstance(size, int) for size in value.shape):
            raise PlanError(
                f"{value} has symbolic dimensions, and with groups_per_step= on a mesh "
                "the work of the groups is a loop in a shard_map, where XLA cannot "
                "compile them. Export it without groups_per_step=, or without a mesh, "
                "or for known shapes."
            )


def _store(values: dict[str, Any], names: tuple[Value, ...], found) -> None:
    values.update(zip([v.name for v in names], found, strict=True))
