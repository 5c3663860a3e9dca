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

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat.types import Array, Mesh
from drjax._errors import DrjaxValueError
from drjax._planner.arguments import flat_inputs
from drjax._planner.cost import cost_of_stage, costs
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import Layout
from drjax.backends.xla import step_size
from drjax.backends.xla.idle_chunks import (
    decision_of_round,
    indices_of_round,
    takes_index,
)
from drjax.backends.xla.inner_programs import layouts_inside
from drjax.backends.xla.kept_run import KeptRun
from drjax.backends.xla.mesh_interpreter import MeshInterpreter, layout_of
from drjax.engines.slices.kept import Keep
from drjax.plan import Plan, Value

_logger = logging.getLogger("drjax")


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
        results to arguments. `{1: 0}` means that element 1 of what the function returns
        is positional argument 0 of the next call, both counted from 0. The function
        returns a `Kept` for each. It is compiled already, and donates these arguments,
        also arrays that the first call gets for them: the results take their buffers.

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
    step = step_size.checked(
        "drjax.backends.xla.compile", groups_per_step, memory_budget
    )
    if kept := Keep(plan, keep):
        return KeptRun(kept, lambda inputs: run_flat(plan, inputs, step, mesh), mesh)

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = flat_inputs(plan, args, kwargs)
        return plan.out_tree.unflatten(run_flat(plan, leaves, step, mesh))

    return run


def run_flat(
    plan: Plan,
    inputs: list[Array],
    step: step_size.GroupsPerStep = None,
    mesh: Mesh | None = None,
) -> list[Array]:
    """Run a plan on flat inputs, or trace it under a JAX transformation.

    Partitioned inputs and outputs are `[..., n, ...]`. `step` is how many of a device's
    groups work at once; None: all; a `step_size.Fit`, a budget of memory: as many as
    fit, for which the plan is compiled several times. `mesh` None: the one in context.
    """
    if plan.group_mesh:
        step = 1  # as its code is in a plan file
    if isinstance(step, step_size.Fit):
        step = fitted({"recompute": plan}, step.budget, mesh).step
    return MeshInterpreter(plan, layout_of(plan, mesh), step, mesh)(inputs)


@dataclass(frozen=True)
class Choice:
    """A plan, and how many groups of a device run at once.

    Attributes:
      plan: The plan.
      residuals: The option of `drjax.jit` that it is made for, `"store"` or
        `"recompute"`.
      step: The number of groups; None: all.
      memory: The memory that it takes, as text, if that decided; else "".
    """

    plan: Plan
    residuals: str
    step: int | None
    memory: str = ""

    def __str__(self) -> str:
        count = groups_of_device(self.plan)
        step = count if self.step is None else min(count, self.step)
        options = f"groups_per_step={step} of {count}, residuals={self.residuals!r}"
        return f"{options}: {self.memory}" if self.memory else options


def fitted(
    plans: Mapping[str, Plan],
    budget: int | None,
    user_mesh: Mesh | None = None,
    temp_bytes: Callable[[str, int], int] | None = None,
) -> Choice:
    """Choose the plan, and the groups at once, that fit in memory; and log it.

    `plans` has a plan for each value of the option `residuals` of `drjax.jit` that may
    be chosen. They are compiled a few times (see `step_size.best`). `budget` is in
    bytes for each device; None: what is free. The number of groups is at most the most
    that a device has in any level. `temp_bytes(residuals, step)` compiles a program
    that runs one of the plans; None: the plan itself is compiled.
    """
    first, *others = plans
    layout = layout_of(plans[first], user_mesh)
    if layout is None:
        return Choice(plans[first], first, None)
    count = _most_groups(plans[first], layout, user_mesh)
    budget = _free_bytes(layout) if budget is None else budget
    ways = dict[str, step_size.Way]()
    for residuals, plan in plans.items():
        server, group = costs(plan)
        work = group.operations - _idle_work(plan, layout.per_device)
        compiled = functools.partial(_temp_bytes, plan, user_mesh)
        if temp_bytes is not None:
            compiled = functools.partial(temp_bytes, residuals)
        saved = server.saved + group.saved * layout.per_device
        ways[residuals] = step_size.Way(functools.cache(compiled), saved, work)
    # Plans that save as much and do as much are the same.
    others = [x for x in others if ways[x].cost != ways[first].cost]
    second = ways[others[0]] if others else None
    chosen, step = step_size.best(count, ways[first], second, budget)
    residuals = next(name for name, way in ways.items() if way is chosen)
    memory = step_size.memory_text(chosen.temp_bytes(step), budget)
    result = Choice(
        plans[residuals], residuals, None if step == count else step, memory
    )
    _logger.info("%s", result)
    return result


def _concrete(layout: Layout) -> Mesh | None:
    """Return the mesh of a layout, with devices; None: it runs without one."""
    if not isinstance(layout.mesh, AbstractMesh):
        return layout.mesh
    # The devices are needed, to ask for their memory.
    mesh = _compat.concrete_mesh()
    if mesh.empty:
        raise DrjaxValueError(
            'groups_per_step="auto" compiles for the devices in context and asks '
            "how much memory they have. Under an AbstractMesh no device can be "
            "asked: give a number."
        )
    return mesh


def _free_bytes(layout: Layout) -> int:
    """Return the bytes of memory that are free on each device of a layout."""
    mesh = _concrete(layout)
    # Without a mesh the program runs on one device.
    devices: Any = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    return step_size.free_bytes(devices)


def _temp_bytes(plan: Plan, user_mesh: Mesh | None, step: int) -> int:
    """Compile a plan, and return its temporary memory on a device, in bytes."""
    layout = layout_of(plan, user_mesh)
    assert layout is not None
    mesh = _concrete(layout)

    def abstract_input(value: Value) -> jax.ShapeDtypeStruct:
        shape, spec = value.whole_shape(plan.size), [None] * value.axis
        # JAX refuses an argument whose sharding does not divide its axis, and a scalar
        # whose spec has an entry.
        axes = layout.axes if value.partitioned and not layout.uneven else None
        sharding = None if mesh is None else NamedSharding(mesh, P(*spec, axes))
        return jax.ShapeDtypeStruct(
            shape, value.dtype, sharding=sharding if shape else None
        )

    run = MeshInterpreter(plan, layout, step, user_mesh)
    # The whole program, as the memory of one round depends on what others keep.
    compiled: Any = (
        jax.jit(lambda *xs: run(xs)).lower(*map(abstract_input, plan.inputs)).compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes


def on_mesh(plan: Plan, inputs: list[Array]) -> list[Array]:
    """Constrain the inputs of a plan to its mesh, so that a surrounding jit sees it.

    Only a concrete mesh that is not in JAX's context needs that, as that of a
    `with mesh:` block: then each input gets a sharding constraint that has the mesh,
    but leaves the sharding to the compiler. Without such a mesh, and under
    `jax.set_mesh`, the inputs are returned unchanged.
    """
    layout = layout_of(plan)
    for each in [] if layout is None else _layouts(plan, layout):
        if isinstance(each.mesh, jax.sharding.Mesh):
            return [as_operand(x, each, False) for x in inputs]
    return inputs


def average_work(plan: Plan) -> float:
    """Estimate what one of a device's groups computes, in operations, on average."""
    return costs(plan)[1].operations - _idle_work(plan, groups_of_device(plan))


def _idle_work(plan: Plan, count: int) -> float:
    """Estimate what a group does not compute as an index chooses another of `count`.

    It is an average, and that of rounds outside of loops.
    """
    work, kept = 0.0, plan.kept()
    for a_round in plan.rounds:
        chosen = indices_of_round(a_round, kept)
        if chosen is not None and chosen.count == 1:
            work += cost_of_stage(a_round.local).operations * (1 - 1 / count)
    return work


def may_choose_a_group(plan: Plan) -> bool:
    """Whether there are a round in which not all groups work, and a group's index."""
    kept = plan.kept()
    return any(decision_of_round(x, kept) is not None for x in plan.rounds) and any(
        takes_index(x.local) for x in plan.rounds
    )


def groups_of_device(plan: Plan) -> int:
    """Return how many groups of a plan a device of the mesh in context has at most.

    Every device has the same number of slots, places for one group each, of which some
    may be empty. The result is this number; of a plan with several levels, that of the
    level with the most slots; without a partition 1.
    """
    layout = layout_of(plan)
    return 1 if layout is None else _most_groups(plan, layout)


def _most_groups(plan: Plan, layout: Layout, mesh: Mesh | None = None) -> int:
    """Return the largest number of groups that a device has in any level of a plan.

    To run more groups at once than that changes nothing. So the number bounds the
    search for one that fits in memory. `layout` is that of the outermost level.
    """
    return max(x.per_device for x in _layouts(plan, layout, mesh))


def _layouts(plan: Plan, layout: Layout, mesh: Mesh | None = None) -> list[Layout]:
    """Return the layouts of `plan.levels`, of which the first is `layout`."""
    return [layout, *layouts_inside(layout.partition, plan.levels[1:], mesh)]
