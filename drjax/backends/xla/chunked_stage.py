"""The groups' stage on one device, for the XLA backend: chunk by chunk.

Input: a stage, the global inputs, the slices of the device's groups, and how many
groups run at once. Output: the device's partial reductions, and the slices to keep;
`finish` combines the devices.

Invariants: padding slots hold another group's slices, are masked out of every
reduction, and run no effects. Running sums are kept in the accumulator dtype, 16-bit
floats in float32, compensated where many steps add up.

Sharp edges: a stage from a plan file has its mask as an input and its own reductions;
one that was planned in this process is batched by `jax.vmap` here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from drjax import _compat
from drjax._plan_file.exported_stage import run_batched
from drjax._primitives.contract_groups import group_sums
from drjax._primitives.reduce_ops import REDUCE_OPS, ReduceOp, Running, is_compensated
from drjax._sharding.eval_on_mesh import evaluate_on_mesh
from drjax._sharding.execute import vary
from drjax._sharding.layout import Layout
from drjax._sharding.padding import (
    copy_index_to_padding,
    copy_slice_to_padding,
    for_real_groups,
    tree_zeros_like,
    unless_empty,
)
from drjax.plan import Reduce, Stage, Value


class ChunkedStage:
    """The work of a round's groups on one device, chunk by chunk.

    A device has k slots for groups; a chunk is the c slots that run at once.

    Args:
      layout: How the partition is laid out on the mesh.
      stage: The groups' stage.
      reduces: The round's reductions but gathers.
      kept: The outputs of the stage that are kept as slices.
      shared: The global inputs of the stage, in order.
    """

    def __init__(
        self,
        layout: Layout,
        stage: Stage,
        reduces: list[Reduce],
        kept: list[Value],
        shared: list,
    ):
        self.layout, self.stage, self.kept = layout, stage, kept
        self.reduces, self.shared = reduces, shared
        names = [v.name for v in stage.outputs]
        self._sources = [names.index(r.source.name) for r in reduces]
        self._kept = [names.index(v.name) for v in kept]
        # For each input of one group's function whether it has a slice for each group.
        self._partitioned = [True, *(v.partitioned for v in stage.inputs)]
        # A stage from a file has no effects: they cannot be exported.
        self._effects = stage.exported is None and _compat.effects_of(stage.jaxpr)

    def run(self, first, slices: list, step: int | None) -> tuple[list, list]:
        """Run the device's groups: `(partial reductions, slices to keep)`.

        Args:
          first: The group index of the device's first slot, int32 `[]`.
          slices: The device's part of each partitioned input, `[k, ...]`.
          step: How many groups run at once; None: all.

        Returns:
          For each reduction the device's partial reduction, and for each output in
          `kept` its slices, `[k, ...]`.
        """
        layout = self.layout
        work = lambda: self._run(first, slices, step)

        def nothing():
            # A device with padding only: it must not run the work, but give its types.
            totals, kept = jax.eval_shape(work)
            fills = [REDUCE_OPS[r.op].identity(r.source.dtype) for r in self.reduces]
            pairs = zip(totals, fills, strict=True)
            totals = [jnp.full(x.shape, fill, x.dtype) for x, fill in pairs]
            vary_all = lambda x: vary(x, layout.axes)
            return jax.tree.map(vary_all, (totals, tree_zeros_like(kept)))

        # `for_real_groups` handles effects, group by group.
        return work() if self._effects else unless_empty(layout, first, work, nothing)

    def _run(self, first, slices: list, step: int | None) -> tuple[list, list]:
        """Run the groups of a device that has at least one group: the work of `run`.

        Args and results are those of `run`.
        """
        count, layout = self.layout.per_device, self.layout
        # More than all groups of the device is all of them.
        step = count if step is None else max(1, min(step, count))
        steps, rest = divmod(count, step)
        # No loop for one chunk: XLA fuses the reduction into the work.
        if steps == 1 and not rest:
            indices = first + lax.iota(jnp.int32, count)
            own = [copy_slice_to_padding(layout, indices, x, x[:1]) for x in slices]
            return self._chunk(first, indices, own, layout.few, alone=True)

        def chunk(start, size: int) -> tuple:
            # The slices are closed over and cut in the body: as `xs` of the scan
            # some versions of the compiler copy them first. Indices are counted, as an
            # array of all would be of size n.
            take = functools.partial(lax.dynamic_slice_in_dim, slice_size=size)
            indices = first + start + lax.iota(jnp.int32, size)
            own = [
                copy_slice_to_padding(layout, indices, take(x, start), x[:1])
                for x in slices
            ]
            few = layout.few
            few = few % step if size == step else max(0, few - steps * step)
            return self._chunk(first, indices, own, few)

        def advance(totals, start, size: int = step):
            new, kept = chunk(start, size)
            pairs = zip(totals, new, strict=True)
            return [total.add(x) for total, x in pairs], kept

        def body(carry, _):
            i, totals = carry
            totals, kept = advance(totals, i * step)
            return (i + 1, totals), kept

        empty = _empty_accumulators(
            layout, self.reduces, steps, lambda: chunk(jnp.int32(0), step)
        )
        # The counter is a carry and not an input: see `take` above.
        (_, totals), kept = lax.scan(body, (jnp.int32(0), empty), length=steps)
        kept = [y.reshape(steps * step, *y.shape[2:]) for y in kept]
        # The last, shorter chunk is compiled on its own, so that no slot is wasted.
        if rest:
            totals, last = advance(totals, jnp.int32(steps * step), rest)
            kept = [jnp.concatenate(pair) for pair in zip(kept, last, strict=True)]
        return [total.value for total in totals], kept

    def _chunk(
        self, first, indices, slices: list, few: int, alone: bool = False
    ) -> tuple[list, list]:
        """Run one chunk: partial reductions over its groups, and their slices to keep.

        Args:
          first: The group index of the device's first slot, int32 `[]`.
          indices: The group indices of the chunk's slots, int32 `[c]`.
          slices: The slots' part of each partitioned input, `[c, ...]`.
          few: How many slots of the chunk are groups, on the device that has both
            groups and padding.
          alone: Whether this is the only chunk.
        """
        args: list = [copy_index_to_padding(self.layout, indices, first)]
        slices_, shared = iter(slices), iter(self.shared)
        for value in self.stage.inputs:
            args.append(next(slices_) if value.partitioned else next(shared))
        if self.stage.exported is not None:
            mask = jnp.ones(indices.shape, bool)
            if self.layout.uneven:
                mask = self.layout.mask_padding(mask, indices, False)
            return run_batched(self.stage, self.kept, mask, args[0], args[1:])
        count = indices.shape[0]
        one = lambda *xs: call(self.stage, xs)
        if self.layout.uneven and self._effects:
            run = lambda count: _over_groups(one, count, self._partitioned)
            # Padding must not print, call back or raise.
            outs = for_real_groups(
                self.layout, indices, few, run, args, self._partitioned
            )
        else:
            outs = _over_groups(one, count, self._partitioned)(*args)
        summed = {}
        # In a loop the summands of one chunk take little memory: there it is slower.
        if alone and not self.layout.uneven:
            ops = [REDUCE_OPS[reduce.op] for reduce in self.reduces]
            by_output = dict(zip(self._sources, ops, strict=True))
            summed = _summed_in_map(self.stage, by_output, self._partitioned, args)
        totals = [
            summed[i] if i in summed else self._reduce(reduce, outs[i], indices)
            for reduce, i in zip(self.reduces, self._sources, strict=True)
        ]
        return totals, [outs[i] for i in self._kept]

    def _reduce(self, reduce: Reduce, x, indices):
        """The partial reduction of a chunk's slices, without those of padding.

        Args:
          reduce: The reduction.
          x: The slices, `[c, *s]`.
          indices: The group indices of the chunk's slots, int32 `[c]`.
        """
        op = REDUCE_OPS[reduce.op]
        if self.layout.uneven:
            x = self.layout.mask_padding(x, indices, op.identity(x.dtype))
        return op.local(x)


def _summed_in_map(
    stage: Stage, ops: dict[int, ReduceOp], partitioned: list[bool], args: list
) -> dict[int, Any]:
    """Sums over the groups that need no summands, by the index of the stage's output.

    Such a sum is a matrix product that contracts over the groups, as in a gradient of
    shared weights, so that each group's summand need not be in memory. Outputs that are
    no such products, or whose reduction is not additive, are not in the result.

    Args:
      stage: The groups' stage.
      ops: The reductions, by the index of the output that each of them reduces.
      partitioned: For each argument whether it has a slice for each group.
      args: The arguments of the stage for c groups; first the group indices, int32
        `[c]`.
    """
    count = args[0].shape[0]
    if count == 1:
        return {}
    sums = group_sums(stage.jaxpr)
    if not sums.indices:
        return {}
    used = [i for i, u in enumerate(sums.used) if u]
    over_groups = lambda fn: _over_groups(fn, count, [partitioned[i] for i in used])
    totals = sums(count, over_groups, [args[i] for i in used])
    results = zip(sums.indices, totals, strict=True)
    return {i: total for i, total in results if i in ops and ops[i].additive}


def _empty_accumulators(
    layout: Layout, reduces: list[Reduce], steps: int, chunk: Callable[[], tuple]
) -> list[Running]:
    """Accumulators without any group yet, with which a scan over chunks starts.

    Args:
      layout: How the partition is laid out on the mesh.
      reduces: The reductions.
      steps: The number of chunks.
      chunk: Returns `(partial reductions, slices)` of a chunk; it is only traced.
    """
    shardings: list[Any] = [None] * len(reduces)
    # On Explicit axes the carry of a scan needs the sharding of its results.
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        shardings = [total.sharding for total in jax.eval_shape(chunk)[0]]
    accumulators = []
    for reduce, sharding in zip(reduces, shardings, strict=True):
        source, dtype = reduce.source, sum_dtype(reduce)

        def full(fill, source=source, dtype=dtype, sharding=sharding):
            x = lax.full(source.shape, fill, dtype, sharding=sharding)
            return vary(x, layout.axes)

        start = full(REDUCE_OPS[reduce.op].identity(source.dtype))
        compensated = is_compensated(reduce, steps)
        accumulators.append(Running(reduce.op, start, full(0) if compensated else None))
    return accumulators


def sum_dtype(reduce: Reduce):
    """The dtype of a device's running total of a reduction."""
    return REDUCE_OPS[reduce.op].accumulator(reduce.source.dtype)


def finish(layout: Layout, reduces: list[Reduce], totals: list) -> list:
    """Combine the devices' partial reductions, and finish each reduction.

    All additive reductions share one psum. Called for one device, inside the
    `shard_map` if there is one.

    Args:
      layout: How the partition is laid out on the mesh.
      reduces: The reductions.
      totals: For each of them the partial reduction `[*s]` of this device.

    Returns:
      The global value of each reduction, `[*s]`, in the dtype of the program.
    """
    n, results = layout.partition.size, list(totals)
    ops = [REDUCE_OPS[reduce.op] for reduce in reduces]
    # A 16-bit sum may overflow: what has a wider accumulator is finished in it.
    early = [
        op.additive and total.dtype != reduce.source.dtype
        for op, total, reduce in zip(ops, totals, reduces, strict=True)
    ]
    for i, (op, reduce) in enumerate(zip(ops, reduces, strict=True)):
        if early[i]:
            results[i] = op.finish(results[i], n)
        # Before the psum, so that it sends the dtype of the program.
        results[i] = results[i].astype(reduce.source.dtype)
    if layout.axes:
        for i, op in enumerate(ops):
            if not op.additive:
                results[i] = op.across_devices(layout, results[i])
        additive = [i for i, op in enumerate(ops) if op.additive]
        if additive:  # one psum for all
            summands = [results[i] for i in additive]
            summed = ops[additive[0]].across_devices(layout, *summands)
            for i, x in zip(additive, summed, strict=True):
                results[i] = x
    for i, op in enumerate(ops):
        if not early[i]:
            results[i] = op.finish(results[i], n)
    return results


def _over_groups(fn: Callable, count: int, partitioned: list[bool]) -> Callable:
    """Map `fn`, a function of one group, over `count` groups by `jax.vmap`.

    A single group is no batch: `fn` runs on its slices as it is.

    Args:
      fn: The function; it returns a list.
      count: The number of groups.
      partitioned: For each argument whether it has a slice for each group, along axis
        0.
    """
    if count > 1:
        return jax.vmap(fn, [0 if p else None for p in partitioned], axis_size=count)

    def only(*args):
        own = [x[0] if p else x for x, p in zip(args, partitioned, strict=True)]
        return [y[None] for y in fn(*own)]

    return only


def call(stage: Stage, args: Sequence) -> list:
    """Run a stage; returns its outputs as JAX arrays, also where its jaxpr has numbers.

    `args` are the arguments of its jaxpr.
    """
    outs = evaluate_on_mesh(stage.jaxpr, args)
    return [
        y if isinstance(y, jax.Array) else jnp.asarray(y, value.dtype)
        for y, value in zip(outs, stage.outputs, strict=True)
    ]
