"""The XLA backend: a plan as one JAX function, in streaming form.

Each round is one `shard_map` over the partition's axes. In it, a scan goes over chunks
of a device's groups with running accumulators for all reductions of the round, and one
`psum` adds up the devices. So the memory that a round needs does not grow with the
number of groups; a broadcast value is never copied for each group; and rows that a
later round needs are stacked, the only thing of size n.

The `shard_map`s are not differentiated: derivatives are taken of programs, before
they are planned (see `_jit/jit_primitive.py`).
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
from drjax._primitives.map_lowering import by_device, lowers_by_vmap, on_each
from drjax._sharding.execute import as_operand, on_devices
from drjax._sharding.layout import Layout, find_mesh, layout
from drjax.backends.xla import step_size
from drjax.backends.xla.chunked_stage import LocalWork, call, finish
from drjax.backends.xla.reuse_accumulators import ending, finish_stacked
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
    where = _place(plan, mesh)
    if isinstance(step, step_size.Fit):
        fit = step.budget
        step = None if where is None else _largest_step(plan, where, fit)
    return _Run(plan, where, step)(inputs)


def _largest_step(plan: Plan, where: Layout, budget: int | None) -> int:
    """The largest number of groups at once that fits in memory."""
    mesh = where.mesh
    if isinstance(mesh, AbstractMesh):
        mesh = _compat.concrete_mesh()
        if mesh.empty or where.manual:
            raise DrjaxValueError(
                'groups_per_step="auto" compiles for the devices in context and asks '
                "how much memory they have. Under an AbstractMesh or inside "
                "jax.shard_map there is nobody to ask: give a number."
            )
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    if budget is None:
        budget = step_size.free_bytes(devices)

    def given(value: Value):
        shape, spec = value.shape, [None] * value.axis
        if value.partitioned:
            shape = (*shape[: value.axis], plan.size, *shape[value.axis :])
        axes = where.axes if value.partitioned and not where.uneven else None
        sharding = None if mesh is None else NamedSharding(mesh, P(*spec, axes))
        return jax.ShapeDtypeStruct(
            shape, value.dtype, sharding=sharding if shape else None
        )

    def temp_bytes(step: int) -> int:
        run = lambda *xs: _Run(plan, where, step)([*xs])
        compiled: Any = jax.jit(run).lower(*map(given, plan.inputs)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    return step_size.largest(where.per_device, temp_bytes, budget)


def on_mesh(plan: Plan, inputs: list) -> list:
    """The inputs of a plan such that a surrounding jit sees a concrete mesh."""
    where = _place(plan)
    if where is None or not isinstance(where.mesh, jax.sharding.Mesh):
        return inputs
    return [as_operand(x, where, False) for x in inputs]


def _place(plan: Plan, mesh: Any = None) -> Layout | None:
    if plan.partition is None:
        return None
    return layout(plan.partition, find_mesh(plan.partition, mesh))


class _Run:
    """Runs one plan; partitioned values are whole arrays, rows along `Value.axis`."""

    def __init__(self, plan: Plan, where: Layout | None, step: int | None):
        self.plan, self.where, self.step = plan, where, step
        self.kept = plan.kept()

    def __call__(self, inputs: list) -> list:
        plan, values, ended = self.plan, {}, False
        _store(values, plan.inputs, map(jnp.asarray, inputs))
        for number, a_round in enumerate(plan.rounds):
            if not ended:
                self._server(a_round.server, values)
            for whole, rows in a_round.scatter:
                values[rows.name] = values[whole.name]
            ended = self._groups(number, values)
            for loop in a_round.loops:
                outs = self._loop(loop, [values[v.name] for v in loop.inputs])
                _store(values, loop.outputs, outs)
        if not ended:
            self._server(plan.server, values)
        return [values[v.name] for v in plan.outputs]

    def _server(self, stage, values: dict[str, Any]) -> None:
        inputs = [values[v.name] for v in stage.inputs]
        _store(values, stage.outputs, call(stage, inputs))

    # -----------------------------------------------------------------------------
    # The groups' work

    def _groups(self, number: int, values: dict[str, Any]) -> bool:
        """The groups' work, and reductions; whether the server's next stage is done."""
        a_round, where = self.plan.rounds[number], self.where
        stage = a_round.local
        if stage.empty and not stage.jaxpr.effects:
            return False
        assert where is not None
        streams = self.step is not None and self.step < where.per_device
        if streams and where.sharded:
            _check_known_shapes(stage)
        end = ending(self.plan, number, where) if streams else None
        sums = a_round.partials
        kept = [v for v in stage.outputs if v.name in self.kept]
        shared = [values[v.name] for v in stage.inputs if not v.partitioned]
        rows = [
            jnp.moveaxis(values[v.name], v.axis, 0)
            for v in stage.inputs
            if v.partitioned
        ]

        by_vmap = lowers_by_vmap(where, stage.jaxpr)
        stage = replace(stage, jaxpr=on_each(where, stage.jaxpr, by_vmap))

        def work(*args):
            *args, first = args
            local = LocalWork(where, stage, sums, kept, args[: len(shared)])
            return local.run(first, args[len(shared) :], self.step)

        def body(*args):
            *args, first = args
            totals, stacks = work(*args, first[0])
            if end is None:
                return [*finish(where, sums, totals), *stacks]
            return [*(total[None] for total in totals), *stacks]

        args, by_rows = [*shared, *rows], [False] * len(shared) + [True] * len(rows)
        if by_vmap:
            totals, stacks = by_device(where, work, args, by_rows)
            if end is None:
                totals = finish_stacked(where, sums, totals)
            outs = [*totals, *stacks]
        else:
            outs = on_devices(
                where, body, args, by_rows,
                [False if end is None else None] * len(sums) + [True] * len(kept),
                _compat.check_vma(), first=True,
            )  # fmt: skip
        if end is None:
            for reduce, out in zip(sums, outs, strict=False):
                values[reduce.result.name] = out
        for value, out in zip(kept, outs[len(sums) :], strict=True):
            values[value.name] = jnp.moveaxis(out, 0, value.axis)
        for reduce in a_round.reduces:
            if reduce.op == "gather":
                params = {"partition": where.partition, "mesh": where.mesh}
                source = values[reduce.source.name]
                values[reduce.result.name] = gather_p.bind(source, **params)
        if end is not None:

            def server(results: dict[str, Any]) -> dict[str, Any]:
                known = values | results
                self._server(end.server, known)
                return {v.name: known[v.name] for v in end.server.outputs}

            values |= end.run(where, outs[: len(sums)], server)
        return end is not None

    # -----------------------------------------------------------------------------
    # Loops

    def _loop(self, loop: Loop, inputs: list) -> list:
        runs = [_Run(body, self.where, self.step) for body in loop.bodies]
        if loop.op == "cond":
            return lax.switch(inputs[0], [lambda *x, r=r: r([*x]) for r in runs],
                              *inputs[1:])  # fmt: skip
        if loop.op == "while":
            first, second = loop.consts[0], sum(loop.consts)
            cond, body = inputs[:first], inputs[first:second]
            return lax.while_loop(
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
