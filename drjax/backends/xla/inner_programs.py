"""The levels inside the groups' stage, streamed as the plan itself.

Input: a local stage with the plan of its inner level, and how many groups run at once.
Output: a function of one group that runs that plan.

The rounds of the inner level are scans over chunks of inner groups, with running
accumulators. So the memory of a group's work does not grow with their number. On a mesh
with an axis for them, each round is a `shard_map` over that axis, inside the
`shard_map` of the outer groups, and has one all-reduce over that axis.

Invariants: values are those of the stage. Sharp edges: a stage with effects runs as it
is, with all inner groups at once; and so does one that is sharded where a `vmap` runs
the outer groups, as JAX takes no `shard_map` over some of the axes in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._compat.types import Array, ClosedJaxpr, DeviceArray, Mesh
from drjax._jaxprs.eval_jaxpr import as_arrays
from drjax._partition import Partition
from drjax._plan.map_stages import map_stages
from drjax._sharding.layout import Layout, find_mesh, make_layout
from drjax.plan import Plan, Scan, Stage, Step


def layouts_inside(
    outer: Partition, levels: Sequence[Partition], mesh: Mesh | None
) -> list[Layout]:
    """Return how the groups of inner levels are laid out, inside a group of `outer`.

    `levels` are in order, outermost first. A layout is local (one device has all groups
    of the level) if the mesh has no axes for the level, or if one of its mesh axes is
    Manual already or belongs to a level around it. `mesh` None: the one in context.
    """
    taken = {*jax.sharding.get_abstract_mesh().manual_axes, *outer.mesh_axes}
    layouts = []
    for partition in levels:
        local = taken & {*partition.mesh_axes}
        layouts.append(
            make_layout(partition, None if local else find_mesh(partition, mesh))
        )
        taken.update(partition.mesh_axes)
    return layouts


# ---------------------------------------------------------------------------------
# Slices of inner groups, without a copy of those of the outer one


@dataclass(frozen=True)
class Stacked:
    """The slices of one outer group's n inner groups, as part of a larger array.

    A loop over the inner groups reads its chunks from the array of all outer groups of
    the device. The slices of one outer group as an array of their own would be a copy.

    Attributes:
      array: The slices of the k outer groups of the device, `[k, n, *s]`.
      index: The position of the outer group in `array`, int32 `[]`. Before a `vmap`
        over c outer groups, it is the positions of all of them, int32 `[c]`.
    """

    array: Any
    index: Any

    def take(self, start: Array | int, size: int) -> Array:
        """Return the slices of `size` inner groups from `start` on, `[size, *s]`."""
        starts = (self.index, start, *[0] * (self.array.ndim - 2))
        sizes = (1, size, *self.array.shape[2:])
        # In 64-bit mode a literal would have another type than the index.
        starts = [jnp.asarray(x, jnp.int32) for x in starts]
        chunk = lax.dynamic_slice(self.array, starts, sizes)
        return lax.squeeze(chunk, (0,))

    def whole(self) -> Array:
        """Return a copy of the slices of all n inner groups of the outer group."""
        return self.take(0, self.array.shape[1])


Slices: TypeAlias = DeviceArray | Stacked
# From the arguments of the jaxpr of a local stage to its outputs, for one group.
OfOneGroup: TypeAlias = Callable[..., list[Array]]


def read_in_chunks(plan: Plan) -> frozenset[int]:
    """Return the positions of a plan's inputs whose slices only local stages read.

    A loop over chunks of groups reads the slices of such an input from a `Stacked`, a
    part of a larger array, so that they need not be copied. Other inputs are read as
    whole arrays: gathered, folded, moved, returned, or carried by a loop. The plan is
    of an inner level, or the body of a loop in it. Only partitioned inputs whose group
    axis is 0 are in the result.
    """
    whole = {v.name for v in plan.outputs}
    for step in plan.steps:
        if not isinstance(step, Stage):
            chunks = constants_in_chunks(step)
            whole |= {v.name for i, v in enumerate(step.inputs) if i not in chunks}
    return frozenset(
        i
        for i, v in enumerate(plan.inputs)
        if v.partitioned and v.axis == 0 and v.name not in whole
    )


def constants_in_chunks(loop: Step) -> frozenset[int]:
    """Return the constants of a scan whose slices only its body's local stages read.

    They are positions in `loop.inputs`, none of another step. Loops over chunks
    of groups in the body read these constants from a `Stacked`, a part of a larger
    array, so that they need not be copied.
    """
    if not isinstance(loop, Scan):
        return frozenset()
    constants = range(sum(loop.consts))
    return read_in_chunks(loop.bodies[0]).intersection(constants)


# ---------------------------------------------------------------------------------
# Inner levels


def run_inner_levels(
    stage: Stage,
    outer: Partition,
    interpreter: Callable[..., Callable[[Sequence[Array | Stacked]], list[Array]]],
    step: int | None,
    mesh: Mesh | None,
    by_vmap: bool,
    merged: dict[str, str],
) -> OfOneGroup | None:
    """Make the function that runs the plan of the inner level of a local stage.

    The function runs the work of one outer group: the rounds of the inner level stream
    over chunks of inner groups, or are sharded over mesh axes of their own. It takes
    the arguments of the stage's jaxpr, the group index first, and returns the list of
    its outputs. An argument may be a `Stacked` if its position is in
    `read_in_chunks(stage.inner)`.

    `interpreter(plan, layout, step, mesh, partial)` makes a function of a list of
    inputs that runs a plan. `partial` has the names of those results of reductions of
    which it returns the partial reductions of the m devices of the inner level,
    `[m, *s]`. `merged` is a dict from the outputs of the stage that one collective
    reduces over both levels to the results of the inner plan that they are, by name.
    `by_vmap`: a `vmap` over all outer groups runs the stage; else each device runs it
    for its groups.

    The result is None if the jaxpr of the stage is to run as it is:

    * The stage has no inner level, or has effects.
    * `by_vmap` is true, and an inner level is sharded over mesh axes.
    * `by_vmap` is false, `step` is None, and no inner level is sharded so.
    """
    inner = stage.inner
    if inner is None or _compat.effects_of(stage.jaxpr):
        return None
    sharded = any(x.sharded for x in layouts_inside(outer, inner.levels, mesh))
    if sharded if by_vmap else step is None and not sharded:
        return None

    def run(*args: Array | Stacked) -> list[Array]:
        # Here, as the axes of outer levels are Manual inside of their `shard_map`.
        layout, *_ = layouts_inside(outer, inner.levels, mesh)
        partial = frozenset(merged.values())
        outs = interpreter(inner, layout, step, mesh, partial)(args)
        pairs = zip(outs, stage.outputs, strict=True)
        # Partial reductions have the dtype of accumulators.
        return [
            x if v.name in merged else as_arrays([x], [v.dtype])[0] for x, v in pairs
        ]

    return run


def map_jaxprs(
    stage: Stage, rewrite: Callable[[ClosedJaxpr | None], ClosedJaxpr | None]
) -> Stage:
    """Rewrite the jaxpr of a stage, and all jaxprs in the plan of its inner level.

    `rewrite` keeps the arguments and results of a jaxpr.
    """
    inner = stage.inner
    if inner is not None:
        inner = map_stages(lambda x: map_jaxprs(x, rewrite), inner)
    return replace(stage, jaxpr=rewrite(stage.jaxpr), inner=inner)
