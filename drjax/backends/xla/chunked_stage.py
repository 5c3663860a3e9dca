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

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from drjax import _compat
from drjax._jaxprs.eval_jaxpr import as_arrays
from drjax._jaxprs.prng_keys import from_raw
from drjax._plan_file.exported_stage import run_batched
from drjax._primitives.contract_groups import group_sums
from drjax._primitives.device_sums import add_devices, scattered_axis
from drjax._primitives.reduce_ops import REDUCE_OPS, Running, is_compensated
from drjax._sharding.eval_on_mesh import evaluate_on_mesh
from drjax._sharding.execute import full_of_type, sharded_spec
from drjax._sharding.layout import Layout
from drjax._sharding.padding import (
    copy_index_to_padding,
    copy_slice_to_padding,
    for_real_groups,
    tree_zeros_like,
    unless_empty,
)
from drjax.backends.xla.fold_states import (
    ChunkState,
    FoldWork,
    RunningFold,
    split_states,
)
from drjax.backends.xla.inner_programs import Stacked, read_in_chunks
from drjax.plan import Reduce, Stage, Value


class ChunkedStage:
    """The local stage and the reductions of a round for the groups of one device.

    The device has k slots; a slot is a place for one group, and slots without a group
    are padding. The stage runs for a chunk of c slots at once, in a loop over chunks.

    Args:
      layout: How the n groups are laid out on the mesh.
      stage: The local stage.
      reduces: The reductions of the round but gathers.
      folds: The folds of the round, with the arrays of their global operands.
      kept: The outputs of the stage to return as slices, because they are read later.
      shared: The arrays of the global inputs of the stage, in order.
      inner: If the stage's work uses an inner level, `inner(*args)` runs that level's
        plan for one group: from the arguments of the stage's jaxpr to the list of its
        outputs. None: the jaxpr of the stage runs as it is.
      merged: The names of the outputs of the stage that are partial reductions over its
        inner level, `[m, *s]`, one for each of the m devices of that level.
    """

    def __init__(
        self,
        layout: Layout,
        stage: Stage,
        reduces: list[Reduce],
        folds: list[FoldWork],
        kept: list[Value],
        shared: list,
        inner: Callable | None = None,
        merged: Collection[str] = (),
    ):
        self.layout, self.stage, self.kept = layout, stage, kept
        self.reduces, self.folds, self.shared = reduces, folds, shared
        self._inner, self._merged = inner, merged
        names = [v.name for v in stage.outputs]
        self._states = [[names.index(v.name) for v in f.fold.sources] for f in folds]
        self._sources = [names.index(r.source.name) for r in reduces]
        self._kept = [names.index(v.name) for v in kept]
        inner_plan = None if inner is None else stage.inner
        chunks = () if inner_plan is None else read_in_chunks(inner_plan)
        # The first argument is the group index.
        inputs = enumerate(stage.inputs, 1)
        self._lazy = [i in chunks for i, v in inputs if v.partitioned]
        # For each input of one group's function whether it has a slice for each group.
        self._partitioned = [True, *(v.partitioned for v in stage.inputs)]
        self._effects = _compat.effects_of(stage.jaxpr)

    def run(self, first, slices: list, step: int | None) -> tuple[list, list]:
        """Run the stage for the device's groups, and reduce over them.

        The device has k slots, places for one group each; empty ones are padding.

        Args:
          first: The group index of the device's first slot, int32 `[]`; n or more if
            the device has no group.
          slices: For each partitioned input of the stage, in order, the slices of the
            device's k slots: an array `[k, *s]`; or, in an inner level, a `Stacked`,
            which stands for a part of an array of more groups.
          step: c, how many groups run at once; None: all.

        Returns:
          `(partials, slices)`, two lists of arrays. `partials` has for each reduction
          its partial reduction over the device's groups, `[*s]`, in the accumulator
          dtype, and then for each fold the leaves of its state, `[*s]`. If the device
          has no group, these are the identity of the reduction, and zeros for a fold.
          `slices` has for each output in `self.kept`, which are read after the stage,
          the slices of the device's slots, `[k, *s]`; those of padding mean nothing.
        """
        layout = self.layout

        def work():
            totals, kept = self._run(first, slices, step)
            return jax.tree.leaves(totals), kept

        def nothing():
            # A device with padding only: it must not run the work, but give its types.
            totals, kept = jax.eval_shape(work)
            # The identity, as `finish` combines it with the totals of other devices.
            fills = [REDUCE_OPS[r.op].identity(r.source.dtype) for r in self.reduces]
            sums = [*map(full_of_type, totals, fills)]  # states follow the sums
            # The folds of all groups leave this device out.
            states = tree_zeros_like(totals[len(sums) :])
            return [*sums, *states], tree_zeros_like(kept)

        # `for_real_groups` handles effects, group by group.
        return work() if self._effects else unless_empty(layout, first, work, nothing)

    def _run(self, first, slices: list, step: int | None) -> tuple[list, list]:
        """Run the stage on a device that has groups, and reduce, chunk by chunk.

        If the stage has effects, the device may have no group; then no slot runs it.

        Args:
          first: The group index of the device's first slot, int32 `[]`.
          slices: For each partitioned input of the stage, in order, the slices of the
            device's k slots: an array `[k, *s]`, or a `Stacked`.
          step: c, how many groups run at once; None: all.

        Returns:
          `(partials, slices)`. `partials` has for each reduction its partial reduction
          over the device's groups, `[*s]`, in the accumulator dtype, and then for each
          fold a list of the leaves of its state, `[*s]`. `slices` has for each output
          in `self.kept` the slices of the slots, `[k, *s]`; those of padding, which are
          slots without a group, mean nothing.
        """
        count, layout = self.layout.per_device, self.layout
        # More than all groups of the device is all of them.
        step = count if step is None else max(1, min(step, count))
        steps, rest = divmod(count, step)
        # No loop for one chunk: XLA fuses the reduction into the work.
        if steps == 1 and not rest:
            indices = first + lax.iota(jnp.int32, count)
            slices = [x.whole() if isinstance(x, Stacked) else x for x in slices]
            own = [copy_slice_to_padding(layout, indices, x, x[:1]) for x in slices]
            totals, kept = self._chunk(
                first, indices, own, layout.partial_count, alone=True
            )
            count = len(self.reduces)
            return [*totals[:count], *(x.value for x in totals[count:])], kept

        def chunk(start, size: int) -> tuple:
            # The slices are closed over and cut in the body: as `xs` of the scan
            # some versions of the compiler copy them first. Indices are counted, as an
            # array of all would be of size n.
            indices = first + start + lax.iota(jnp.int32, size)
            own = [
                self._slots(x, start, indices, lazy)
                for x, lazy in zip(slices, self._lazy, strict=True)
            ]
            # Groups fill a device's slots from the first. On the partly filled device,
            # a full chunk has `step`, `real % step` or no groups, and the shorter one
            # `last` or none: the counts for which `for_real_groups` has branches.
            real = layout.partial_count
            real = real % step if size == step else max(0, real - steps * step)
            return self._chunk(first, indices, own, real)

        def advance(totals, start, size: int = step):
            new, kept = chunk(start, size)
            pairs = zip(totals, new, strict=True)
            return [total.add(x) for total, x in pairs], kept

        def body(carry, _):
            i, totals = carry
            totals, kept = advance(totals, i * step)
            return (i + 1, totals), kept

        empty = _empty_accumulators(
            self.reduces,
            self.folds,
            steps,
            lambda: chunk(jnp.int32(0), step),
            bool(self._merged),
        )
        # The counter is a carry and not an input: see `chunk` above.
        (_, totals), kept = lax.scan(body, (jnp.int32(0), empty), length=steps)
        kept = [y.reshape(steps * step, *y.shape[2:]) for y in kept]
        # The last, shorter chunk is compiled on its own, so that no slot is wasted.
        if rest:
            totals, last = advance(totals, jnp.int32(steps * step), rest)
            kept = [jnp.concatenate(pair) for pair in zip(kept, last, strict=True)]
        return [total.value for total in totals], kept

    def _chunk(
        self, first, indices, slices: list, partial_count: int, alone: bool = False
    ) -> tuple[list, list]:
        """Run the stage for one chunk of c slots at once, and reduce over their groups.

        A slot is a place for one group; slots without a group are padding.

        Args:
          first: The group index of the device's first slot, int32 `[]`. Padding slots
            run with this index.
          indices: The group indices of the chunk's slots, int32 `[c]`; of padding, n or
            more.
          slices: For each partitioned input of the stage, in order, the slices of these
            slots: an array `[c, *s]`, or a `Stacked` with their positions, int32 `[c]`.
            Padding has the slices of the device's first group.
          partial_count: How many slots of this chunk have groups on the one device that
            has both groups and padding.
          alone: Whether this chunk has all slots of the device. If not, no output is
            summed by `_summed_in_map`.

        Returns:
          `(partials, slices)`: for each reduction its partial reduction over the
          chunk's groups, `[*s]`, in the accumulator dtype, and then for each fold a
          `ChunkState`, the fold of the chunk's states; for each output in `self.kept`
          the slices of the slots, `[c, *s]`.
        """
        args: list = [copy_index_to_padding(self.layout, indices, first)]
        slices_, shared = iter(slices), iter(self.shared)
        for value in self.stage.inputs:
            args.append(next(slices_) if value.partitioned else next(shared))
        # The batched function of a file takes the mask as an operand.
        if self.stage.exported is not None and self._inner is None:
            mask = jnp.ones(indices.shape, bool)
            if self.layout.uneven:
                mask = self.layout.mask_padding(mask, indices, False)
            outs, slices = run_batched(self.stage, self.kept, mask, args[0], args[1:])
            return [
                *outs[: len(self.reduces)],
                *self._batched_states(outs, mask),
            ], slices
        count = indices.shape[0]
        # Of arrays that the inner level reads in chunks, groups have positions.
        stacks = {i: x.array for i, x in enumerate(args) if isinstance(x, Stacked)}
        args = [x.index if isinstance(x, Stacked) else x for x in args]

        def one(*xs):
            if self._inner is None:
                return call(self.stage, xs)
            pairs = enumerate(xs)
            return self._inner(
                *(Stacked(stacks[i], x) if i in stacks else x for i, x in pairs)
            )

        # JAX has no batching rule for exported functions.
        over_groups = _over_groups if self.stage.exported is None else _in_a_loop
        if self.layout.uneven and self._effects:
            run = lambda count: over_groups(one, count, self._partitioned)
            # Padding must not print, call back or raise.
            outs = for_real_groups(
                self.layout, indices, partial_count, run, args, self._partitioned
            )
        else:
            outs = over_groups(one, count, self._partitioned)(*args)
        summed = {}
        # In a loop the summands of one chunk take little memory: there it is slower.
        # Nor with padding: a contraction of the group axis cannot mask copied slices.
        if alone and not self.layout.uneven and self._inner is None:
            summed = _summed_in_map(self.stage, self._partitioned, args)
        totals = [
            summed[i]
            # An output may have several reductions, of which not all are sums.
            if i in summed and REDUCE_OPS[reduce.op].additive
            else self._reduce(reduce, outs[i], indices)
            for reduce, i in zip(self.reduces, self._sources, strict=True)
        ]
        for work, chosen in zip(self.folds, self._states, strict=True):
            states = [outs[i] for i in chosen]
            totals.append(work.of_chunk(states, self.layout, indices))
        return totals, [outs[i] for i in self._kept]

    def _slots(self, x, start, indices, lazy: bool) -> Any:
        """Return the slices of a chunk's slots, out of those of the device's slots.

        A slot is a place for one group. Slots without a group, which are padding, get
        the slice of the device's first slot.

        Args:
          x: The slices of the device's k slots: an array `[k, *s]`; or a `Stacked`, a
            part `[k, *s]` of a larger array, only if there is no padding.
          start: The position of the chunk's first slot among the k slots, int32 `[]`.
          indices: The group indices of the chunk's slots, int32 `[c]`; of padding, n or
            more.
          lazy: Whether an array `x` is not cut, as the inner level reads it in chunks.

        Returns:
          A `Stacked` of `x` and the slots' positions in it, int32 `[c]`, if `x` is an
          array and `lazy` is true. Otherwise the slices, an array `[c, *s]`.
        """
        size = indices.shape[0]
        if lazy and not isinstance(x, Stacked):
            positions = start + lax.iota(jnp.int32, size)
            if self.layout.uneven:
                real = indices < self.layout.partition.size
                positions = jnp.where(real, positions, 0)
            return Stacked(x, positions)
        if isinstance(x, Stacked):
            return x.take(start, size)
        own = lax.dynamic_slice_in_dim(x, start, size)
        return copy_slice_to_padding(self.layout, indices, own, x[:1])

    def _batched_states(self, outs: list, mask) -> list[ChunkState]:
        """Return the states of a chunk's folds, from the results of a loaded stage.

        The batched function of a stage from a plan file has folded the groups of the
        chunk already: its results are only split.

        Args:
          outs: Its results, a list: for each reduction but gathers a partial reduction,
            and then the leaves of the state of each fold, `[*s]`, with random keys as
            key data.
          mask: Which slots of the chunk have groups, bool `[c]`.

        Returns:
          A list with a `ChunkState` for each fold: the leaves of the chunk's state, and
          whether the chunk has a group, which is `mask[0]`.
        """
        flat = outs[len(self.reduces) :]
        values = [v for work in self.folds for v in work.fold.results]
        pairs = zip(flat, values, strict=True)
        states = split_states(self.folds, [from_raw(x, v.dtype) for x, v in pairs])
        return [ChunkState(x, mask[0] if self.layout.uneven else None) for x in states]

    def _reduce(self, reduce: Reduce, x, indices):
        """Return the partial reduction over a chunk's groups, without its padding.

        Args:
          reduce: The reduction.
          x: The slices of the chunk's c slots, `[c, *s]`.
          indices: The group indices of the slots, int32 `[c]`; n or more for no group.

        Returns:
          The reduction over axis 0, `[*s]`, in the accumulator dtype of the reduction.
          A mean is not divided yet.
        """
        op = REDUCE_OPS[reduce.op]
        if self.layout.uneven:
            x = self.layout.mask_padding(x, indices, op.identity(x.dtype))
        with jax.named_scope(f"drjax.reduce_{reduce.op}"):
            return op.local(x)


def _summed_in_map(stage: Stage, partitioned: list[bool], args: list) -> dict[int, Any]:
    """Sum outputs of a stage over the groups without materializing the summands.

    Such a sum is a matrix product that contracts the group axis, as in the gradient of
    weights that all groups share. Only outputs that end in a matrix product or a sum
    have one.

    Args:
      stage: The local stage.
      partitioned: For each argument of the stage's jaxpr, the group index included,
        whether it has a slice for each group.
      args: The arguments of the stage's jaxpr for c groups: first the group indices,
        int32 `[c]`; then the inputs, `[c, *s]` if partitioned, else `[*s]`.

    Returns:
      A dict from the position of an output in `stage.outputs` to its sum over the c
      groups, `[*s]`. Outputs without such a sum are left out; with one group the dict
      is empty.
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
    return dict(zip(sums.indices, totals, strict=True))


def _empty_accumulators(
    reduces: list[Reduce],
    folds: list[FoldWork],
    steps: int,
    chunk: Callable[[], tuple],
    other_shapes: bool = False,
) -> list[Running | RunningFold]:
    """Return the accumulators with which a scan over chunks starts.

    An accumulator of a reduction has the identity of the reduction, such as 0 for a
    sum, in the type of its partial reductions. That of a fold is marked as empty.

    Args:
      reduces: The reductions of the round but gathers.
      folds: The folds of the round.
      steps: The number of chunks. `is_compensated` decides by it which sums have a
        second accumulator, for their rounding errors.
      chunk: A function without arguments that runs one chunk, and returns
        `(partial reductions, slices)`. It is only traced, for the types of results.
      other_shapes: Whether a partial reduction may have another shape than a slice of
        its source, so that `chunk` is traced for it: over two levels it is `[m, *s]`,
        for the m devices of the inner level.

    Returns:
      A list: a `Running` for each reduction, then a `RunningFold` for each fold.
    """
    shapes = [(reduce.source.shape, sum_dtype(reduce)) for reduce in reduces]
    types = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    # The carry of a scan needs the sharding of its results on Explicit axes, and their
    # varying axes inside a user's shard_map(check_vma=True).
    kinds = jax.sharding.get_abstract_mesh().axis_types
    states: list = []
    if AxisType.Explicit in kinds or _compat.check_vma() or folds or other_shapes:
        types = jax.eval_shape(chunk)[0]
        types, states = types[: len(reduces)], types[len(reduces) :]
    accumulators: list[Running | RunningFold] = []
    for reduce, like in zip(reduces, types, strict=True):
        start = full_of_type(like, REDUCE_OPS[reduce.op].identity(reduce.source.dtype))
        zero = full_of_type(like, 0) if is_compensated(reduce, steps) else None
        accumulators.append(Running(reduce.op, start, zero))
    for fold, state in zip(folds, states, strict=True):
        zeros = tree_zeros_like(state.leaves)
        accumulators.append(RunningFold(fold, zeros, jnp.bool_(True)))
    return accumulators


def sum_dtype(reduce: Reduce):
    """Return the dtype in which a device accumulates the reduction `reduce`.

    It is float32 for sums and means of 16-bit floats, else the dtype of the values.
    """
    return REDUCE_OPS[reduce.op].accumulator(reduce.source.dtype)


def finish(layout: Layout, reduces: list[Reduce], totals: list) -> list:
    """Combine the devices' partial reductions, in a scope that profilers show."""
    names = dict.fromkeys(f"reduce_{reduce.op}" for reduce in reduces)
    with jax.named_scope(f"drjax.{'+'.join(names)}"):
        return _finish(layout, reduces, totals)


def _finish(layout: Layout, reduces: list[Reduce], totals: list) -> list:
    """Combine the devices' partial reductions by collectives, and finish reductions.

    It is called for one device: inside the `shard_map`, if there is one. All sums and
    means that are not `sharded` share one psum, or if they are encoded (`wire`) one
    exchange of codes. A mean is divided by n.

    Args:
      layout: How the partition of n groups is laid out on the mesh.
      reduces: The reductions of the round but gathers.
      totals: For each of them the partial reduction `[*s]` of this device, in the
        accumulator dtype.

    Returns:
      A list with the global value of each reduction, `[*s]`, the same on all devices;
      or, if the reduction is sharded, the device's part of it. They have the dtype of
      the slices that are reduced.
    """
    n, results = layout.partition.size, list(totals)
    ops = [REDUCE_OPS[reduce.op] for reduce in reduces]
    # A 16-bit sum may overflow: what has a wider accumulator is finished in it.
    early = [
        op.additive and (total.dtype != reduce.source.dtype or reduce.wire is not None)
        for op, total, reduce in zip(ops, totals, reduces, strict=True)
    ]
    for i, (op, reduce) in enumerate(zip(ops, reduces, strict=True)):
        # Sound, as `finish` of an additive reduction is linear: (a + b)/n = a/n + b/n.
        if early[i]:
            results[i] = op.finish(results[i], n)
        # Before the psum, so that it sends the dtype of the program.
        if reduce.wire is None:
            results[i] = results[i].astype(reduce.source.dtype)
    if layout.axes:
        for i, op in enumerate(ops):
            if not op.additive:
                results[i] = op.across_devices(layout, results[i])
        additive = [i for i, op in enumerate(ops) if op.additive]
        summed = add_devices(
            layout,
            [results[i] for i in additive],
            [reduces[i].wire for i in additive],
            [divided_axis(layout, reduces[i]) for i in additive],
        )
        for i, x in zip(additive, summed, strict=True):
            results[i] = x
    for i, (op, reduce) in enumerate(zip(ops, reduces, strict=True)):
        if not early[i]:
            results[i] = op.finish(results[i], n)
        results[i] = results[i].astype(reduce.source.dtype)
    return results


def divided_axis(layout: Layout, reduce: Reduce) -> int | None:
    """Return the axis along which the devices have parts of the result of a reduction.

    Args:
      layout: How the partition is laid out on the mesh.
      reduce: The reduction.

    Returns:
      The first axis of the result whose size the number of devices divides. None if
      there is none, or if `reduce.sharded` is false: then each device has the whole
      result. None, too, if the mesh has Explicit axes that are not the partition's.
    """
    # An Explicit axis besides may divide the result, which only its type tells.
    if not reduce.sharded or layout.other_explicit_axes:
        return None
    return scattered_axis(layout, reduce.result.shape)


def result_specs(layout: Layout, reduces: list[Reduce]) -> list:
    """Return for each reduction whether the devices have its whole result, or parts.

    Args:
      layout: How the partition is laid out on the mesh.
      reduces: The reductions.

    Returns:
      A list for the output specs of `shard_map_over_devices`: a `PartitionSpec` for a
      result that is divided, and False for one that is whole on each device.
    """
    return [sharded_spec(layout, divided_axis(layout, r)) for r in reduces]


def _over_groups(fn: Callable, count: int, partitioned: list[bool]) -> Callable:
    """Make a function of several groups from a function of one, by `jax.vmap`.

    With a single group there is no batch: `fn` runs on its slices.

    Args:
      fn: The function of one group; it takes arrays, and returns a list of arrays.
      count: The number of groups.
      partitioned: For each argument whether it has a slice for each group, along axis
        0; else all groups share it.

    Returns:
      A function of the arguments for all groups, `[count, *s]` or if shared `[*s]`. It
      returns the list of the results of all groups, `[count, *t]`.
    """
    if count > 1:
        return jax.vmap(fn, [0 if p else None for p in partitioned], axis_size=count)

    def only(*args):
        # vmap would turn a `cond` on the group's slice into a `select` of all branches.
        own = [x[0] if p else x for x, p in zip(args, partitioned, strict=True)]
        return [y[None] for y in fn(*own)]

    return only


def _in_a_loop(fn: Callable, count: int, partitioned: list[bool]) -> Callable:
    """Make a function of several groups from a function of one, by `lax.map`.

    The groups run one after another, for functions that `jax.vmap` cannot batch; else
    `_over_groups` is used, which has the same arguments and result.

    Args:
      fn: The function of one group; it takes arrays, and returns a list of arrays.
      count: The number of groups; not used, as the arguments tell it.
      partitioned: For each argument whether it has a slice for each group, along axis
        0; else all groups share it.

    Returns:
      A function of the arguments for all groups, `[count, *s]` or if shared `[*s]`. It
      returns the list of the results of all groups, `[count, *t]`.
    """

    def run(*args):
        def one(slices):
            slices = iter(slices)
            pairs = zip(args, partitioned, strict=True)
            return fn(*(next(slices) if p else x for x, p in pairs))

        return lax.map(one, [x for x, p in zip(args, partitioned, strict=True) if p])

    return run


def call(stage: Stage, args: Sequence) -> list:
    """Run a stage: evaluate its jaxpr, or trace it under a JAX transformation.

    Args:
      stage: The stage.
      args: The arguments of its jaxpr: one array for each input, in order; for a local
        stage the group index, int32 `[]`, comes before them.

    Returns:
      The list of its outputs as JAX arrays, in the dtypes of `stage.outputs`.
    """
    outs = evaluate_on_mesh(stage.jaxpr, args)
    return as_arrays(outs, [value.dtype for value in stage.outputs])
