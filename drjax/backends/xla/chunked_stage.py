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
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, Aval, DeviceArray, GlobalArray, PyTree
from drjax._jaxprs.eval_jaxpr import as_arrays
from drjax._jaxprs.prng_keys import from_raw
from drjax._plan_file.batches import combines_itself, over_groups, run_batch
from drjax._primitives.contract_groups import group_sums
from drjax._primitives.device_sums import add_devices, scattered_axis
from drjax._primitives.reduce_ops import (
    REDUCE_OPS,
    Running,
    as_dtype,
    is_compensated,
)
from drjax._primitives.segments import (
    InSegments,
    PlacedOutput,
    is_neutral,
    placements,
    scatters,
    with_segments,
)
from drjax._sharding.eval_on_mesh import evaluate_on_mesh
from drjax._sharding.execute import full_of_type, sharded_spec, types_of
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
from drjax.backends.xla.idle_chunks import (
    Decision,
    Indices,
    decision_of,
    indices_of,
)
from drjax.backends.xla.inner_programs import (
    OfOneGroup,
    Slices,
    Stacked,
    read_in_chunks,
)
from drjax.plan import Reduce, Stage, Value

Accumulator: TypeAlias = Running | RunningFold


class ChunkedStage:
    """The local stage and the reductions of a round for the groups of one device.

    The device has k slots; a slot is a place for one group, and slots without a group
    are padding. The stage runs for a chunk of c slots at once, in a loop over chunks.

    `reduces` are the reductions of the round but gathers, and `kept` the outputs of the
    stage to return as slices, because they are read later. `shared` has the arrays of
    the global inputs of the stage, in order. If the stage's work uses an inner level,
    `inner` runs that level's plan for one group; None: the jaxpr of the stage runs as
    it is. `merged` has the names of the outputs of the stage that are partial
    reductions over its inner level, `[m, *s]`, one for each of the m devices of that
    level. `replaced` has for outputs in `kept`, by name, the partitioned input whose
    memory a loop over chunks gives to the output: nothing reads the input later.
    """

    def __init__(
        self,
        layout: Layout,
        stage: Stage,
        reduces: Sequence[Reduce],
        folds: list[FoldWork],
        kept: list[Value],
        shared: list[GlobalArray],
        inner: OfOneGroup | None = None,
        merged: Collection[str] = (),
        replaced: Mapping[str, str] = MappingProxyType({}),
    ):
        self.layout, self.stage, self.kept = layout, stage, kept
        self.reduces, self.folds, self.shared = reduces, folds, shared
        self._inner, self._merged = inner, merged
        position = {v.name: i for i, v in enumerate(stage.outputs)}
        self._states = [[position[v.name] for v in f.fold.sources] for f in folds]
        self._sources = [position[r.source.name] for r in reduces]
        self._kept = [position[v.name] for v in kept]
        # The outputs that are slices in segments, with the positions of their parts
        # among the results of `self._jaxpr`.
        self._jaxpr, self._dtypes = stage.jaxpr, [v.dtype for v in stage.outputs]
        self._placed = {} if inner is not None else self._find_placed()
        inner_plan = None if inner is None else stage.inner
        chunks = () if inner_plan is None else read_in_chunks(inner_plan)
        # The first argument is the group index.
        inputs = enumerate(stage.inputs, 1)
        self._lazy = [i in chunks for i, v in inputs if v.partitioned]
        # From positions in `kept` to positions among the partitioned inputs.
        slices = (v.name for v in stage.inputs if v.partitioned)
        order = {name: i for i, name in enumerate(slices)}
        self._replaced = {
            j: order[replaced[v.name]] for j, v in enumerate(kept) if v.name in replaced
        }
        # For each input of one group's function whether it has a slice for each group.
        self._partitioned = [True, *(v.partitioned for v in stage.inputs)]
        self._axes = [0 if p else None for p in self._partitioned]
        self._effects = _compat.effects_of(stage.jaxpr)
        # Of several levels, the jaxpr of the stage is not all that runs.
        self._decision = None
        if self._inner is None and not self.folds:
            self._decision = decision_of(stage, self.reduces, self.kept)
        self._chosen = self._decision and indices_of(self._decision, self._partitioned)

    def _find_placed(self) -> dict[int, tuple[int, PlacedOutput]]:
        """Find the outputs to reduce by segment; let the jaxpr return their parts."""
        if self.stage.exported is not None or not scatters(self.layout):
            return {}
        placed = placements(self._jaxpr)
        if not placed:
            return {}
        first = len(self._jaxpr.out_avals)
        self._jaxpr = with_segments(self._jaxpr)
        avals: list[Any] = self._jaxpr.out_avals[first:]
        self._dtypes += [aval.dtype for aval in avals]
        return {i: (first + 2 * j, x) for j, (i, x) in enumerate(placed.items())}

    def run(
        self, first: Array, slices: Sequence[Slices], step: int | None
    ) -> tuple[list[Array], list[DeviceArray]]:
        """Run the stage for the device's groups, and reduce over them.

        `first` is the group index of the device's first slot, int32 `[]`; n or more if
        the device has no group. `slices` has for each partitioned input of the stage,
        in order, the slices of the device's k slots, of which a `Stacked` is a part of
        an array of more groups. `step`, c, is how many groups run at once; None: all.

        The result is `(partials, slices)`. `partials` has for each reduction its
        partial reduction over the device's groups, `[*s]`, in the accumulator dtype,
        and then for each fold the leaves of its state, `[*s]`. If the device has no
        group, these are the identity of the reduction, and zeros for a fold. `slices`
        has for each output in `self.kept`, which are read after the stage, the slices
        of the device's slots, `[k, *s]`; those of padding mean nothing.
        """
        layout = self.layout

        def work() -> tuple[list[Array], list[DeviceArray]]:
            totals, kept = self._run(first, slices, step)
            return jax.tree.leaves(totals), kept

        def nothing() -> tuple[list[Array], list[DeviceArray]]:
            # A device with padding only: it must not run the work, but give its types.
            totals, kept = types_of(work)
            # The identity, as `finish` combines it with the totals of other devices.
            fills = [REDUCE_OPS[r.op].identity(r.source.dtype) for r in self.reduces]
            sums = [*map(full_of_type, totals, fills)]  # states follow the sums
            # The folds of all groups leave this device out.
            states = tree_zeros_like(totals[len(sums) :])
            return [*sums, *states], tree_zeros_like(kept)

        # `for_real_groups` handles effects, group by group.
        return work() if self._effects else unless_empty(layout, first, work, nothing)

    def _run(
        self, first: Array, slices: Sequence[Slices], step: int | None
    ) -> tuple[list[PyTree], list[DeviceArray]]:
        """As `run`, on a device that has groups, chunk by chunk.

        If the stage has effects, the device may have no group; then no slot runs it. In
        `partials`, the state of a fold is one element, the list of its leaves.
        """
        count, layout = self.layout.per_device, self.layout
        # More than all groups of the device is all of them.
        step = count if step is None else max(1, min(step, count))
        steps, rest = divmod(count, step)
        chosen = self._chosen
        if chosen is not None and count > 1 and chosen.count < max(2, steps):
            return self._of_chosen(chosen, first, slices), []
        # No loop for one chunk: XLA fuses the reduction into the work.
        if steps == 1 and not rest:
            indices = first + lax.iota(jnp.int32, count)
            slices = [x.whole() if isinstance(x, Stacked) else x for x in slices]
            own = slices
            if layout.uneven:
                own = [copy_slice_to_padding(layout, indices, x, x[:1]) for x in own]
            totals, kept = self._chunk(
                first, indices, own, layout.partial_count, alone=True
            )
            count = len(self.reduces)
            return [*totals[:count], *(x.value for x in totals[count:])], kept

        # Before the loop: later it may be replaced.
        padding = [
            x[:1] if layout.uneven and not isinstance(x, Stacked) else None
            for x in slices
        ]

        def slots_from(start: Array, size: int) -> Array:
            # Indices are counted, as an array of all would be of size n.
            return first + start + lax.iota(jnp.int32, size)

        def cut(arrays: Sequence[Slices], start: Array, size: int) -> list[Any]:
            # The slices are closed over, or carried, and cut in the body: as `xs` of
            # the scan some versions of the compiler copy them first.
            slots = slots_from(start, size)
            own = zip(arrays, self._lazy, padding, strict=True)
            cuts = [
                functools.partial(self._slots, x, start, slots, lazy, y)
                for x, lazy, y in own
            ]
            # A chunk without work reads no data: then they are cut in a branch.
            return cuts if self._decision is not None else [x() for x in cuts]

        def chunk(
            own: Sequence[Slices], start: Array, size: int
        ) -> tuple[list[Any], list[Array]]:
            # Groups fill a device's slots from the first. On the partly filled device,
            # a full chunk has `step`, `real % step` or no groups, and the shorter one
            # `last` or none: the counts for which `for_real_groups` has branches.
            real = layout.partial_count
            real = real % step if size == step else max(0, real - steps * step)
            return self._chunk(first, slots_from(start, size), own, real)

        start = jnp.int32(0)
        one_chunk = lambda: chunk(cut(slices, start, step), start, step)
        updated = self._updated(slices, lambda: one_chunk()[1])

        def advance(
            totals: list[Accumulator],
            old: Sequence[Array],
            start: Array,
            size: int = step,
        ) -> tuple[list[Accumulator], list[Array], list[Array]]:
            arrays = [*slices]
            for i, x in zip(updated.values(), old, strict=True):
                arrays[i] = x
            own = cut(arrays, start, size)
            if updated:
                # All reads are before the first write. If an old slice were read after
                # a new one is written, the compiler would copy the array in each step.
                read = [own[i] for i in updated.values()]
                read, old = lax.optimization_barrier((read, old))
                for i, x in zip(updated.values(), read, strict=True):
                    own[i] = x
            new, kept = chunk(own, start, size)
            pairs = zip(totals, new, strict=True)
            written = [
                lax.dynamic_update_slice_in_dim(x, kept[j], start, 0)
                for j, x in zip(updated, old, strict=True)
            ]
            others = [x for j, x in enumerate(kept) if j not in updated]
            return [total.add(x) for total, x in pairs], written, others

        def body(carry: Any, _: None) -> tuple[Any, list[Array]]:
            i, totals, written = carry
            totals, written, others = advance(totals, written, i * step)
            return (i + 1, totals, written), others

        empty = _empty_accumulators(
            self.reduces, self.folds, steps, one_chunk, bool(self._merged)
        )
        old: list[Any] = [slices[i] for i in updated.values()]
        # The counter is a carry and not an input: see `slots_from` above.
        (_, totals, written), others = lax.scan(
            body, (jnp.int32(0), empty, old), length=steps
        )
        others = [y.reshape(steps * step, *y.shape[2:]) for y in others]
        # The last, shorter chunk is compiled on its own, so that no slot is wasted.
        if rest:
            start = jnp.int32(steps * step)
            totals, written, last = advance(totals, written, start, rest)
            others = [jnp.concatenate(pair) for pair in zip(others, last, strict=True)]
        from_loop = {True: iter(written), False: iter(others)}
        kept = [next(from_loop[j in updated]) for j in range(len(self.kept))]
        return [total.value for total in totals], kept

    def _of_chosen(
        self, chosen: Indices, first: Array, slices: Sequence[Slices]
    ) -> list[PyTree]:
        """As `_run`, where only groups of some indices have work: one after another.

        A single one has no branch, so that the compiler merges its work with that of
        other rounds; a device without this group leaves out what it has computed.
        """
        inputs, layout = self._inputs(slices), self.layout
        indices, new = chosen.ordered([first, *inputs])
        # Of groups: padding has none, and a device without a group does not come here.
        last = jnp.minimum(layout.per_device, layout.partition.size - first) - 1

        def slice_at(slot: Array, x: Slices) -> Array:
            own: Any = self._slots(x, slot, slot[None], False, None)
            return lax.squeeze(own, (0,))

        def work(slot: Array) -> list[Array]:
            own = [
                slice_at(slot, x) if v.partitioned else x
                for x, v in zip(inputs, self.stage.inputs, strict=True)
            ]
            return [y[None] for y in self._of_group(first + slot, *own)]

        def sums(outs: list[Array], slot: Array, alone: bool) -> list[Any]:
            pairs = zip(self.reduces, self._sources, strict=True)
            index = (first + slot)[None]
            return [self._reduce(r, outs, i, index, alone) for r, i in pairs]

        def slot_of(index: Array, new: Array) -> tuple[Array, Array]:
            slot = jnp.clip(index.astype(jnp.int32) - first, 0, last)
            return slot, new & ((first + slot).astype(index.dtype) == index)

        if chosen.count == 1:
            slot, is_own = slot_of(indices[0], new[0])
            totals = sums(work(slot), slot, True)
            return [jnp.where(is_own, x, jnp.zeros_like(x)) for x in totals]

        def body(totals: list[Accumulator], xs: Any) -> tuple[list[Accumulator], None]:
            slot, is_own = slot_of(*xs)
            idle = functools.partial(self._idle, work)
            summands = sums(lax.cond(is_own, work, idle, slot), slot, False)
            return [a.add(x) for a, x in zip(totals, summands, strict=True)], None

        zero = jnp.zeros_like(first)
        one = lambda: (sums(work(zero), zero, False), [])
        empty = _empty_accumulators(self.reduces, [], chosen.count, one)
        totals, _ = lax.scan(body, empty, (indices, new))
        return [total.value for total in totals]

    def _updated(
        self, slices: Sequence[Slices], kept_of_chunk: Callable[[], list[Array]]
    ) -> dict[int, int]:
        """Choose the outputs in `kept` that a loop writes into the arrays of inputs.

        By position in `kept`, the result has that in `slices`. `kept_of_chunk` is only
        traced, for the types of slices, which may say where they are on the mesh.
        """
        if not _compat.UPDATES_BEHIND_BARRIERS:
            return {}
        chosen = {
            j: i
            for j, i in self._replaced.items()
            if not self._lazy[i] and not isinstance(slices[i], Stacked)
        }
        # An array from outside of a `shard_map(check_vma=False)` still has them.
        varies = any(
            _compat.varying(_compat.typeof(slices[i])) for i in chosen.values()
        )
        if not chosen or not (varies or _has_types_on_mesh()):
            return chosen
        kept = types_of(kept_of_chunk)
        return {j: i for j, i in chosen.items() if _are_alike(kept[j], slices[i])}

    def _chunk(
        self,
        first: Array,
        indices: Array,
        slices: Sequence[Slices],
        partial_count: int,
        alone: bool = False,
    ) -> tuple[list[Any], list[Array]]:
        """Run the stage for one chunk of c slots at once, and reduce over their groups.

        `indices` are the group indices of the chunk's slots, int32 `[c]`; of padding, n
        or more. Padding runs with the index `first`, and has the slices of the device's
        first group. `slices` are those of the chunk's slots, `[c, *s]`, or a `Stacked`
        with their positions, int32 `[c]`. `partial_count` is how many slots of this
        chunk have groups on the one device that has both groups and padding. `alone`:
        this chunk has all slots of the device; if not, no output is summed by
        `_summed_in_map`.

        The result is as that of `run`, for the c slots, but in `partials` each fold has
        a `ChunkState`, the fold of the chunk's states.
        """
        index = copy_index_to_padding(self.layout, indices, first)
        args: list = [index, *self._inputs(slices)]
        # The batched function of a file takes the mask as an operand.
        if self._inner is None and combines_itself(self.stage):
            mask = jnp.ones(indices.shape, bool)
            if self.layout.uneven:
                mask = self.layout.mask_padding(mask, indices, False)
            outs, slices = run_batch(
                self.stage, self.reduces, self.kept, mask, args[0], args[1:]
            )
            return [
                *outs[: len(self.reduces)],
                *self._batched_states(outs, mask),
            ], slices
        count = indices.shape[0]
        # Of arrays that the inner level reads in chunks, groups have positions.
        stacks = {i: x.array for i, x in enumerate(args) if isinstance(x, Stacked)}
        args = [x.index if isinstance(x, Stacked) else x for x in args]

        def one(*xs: Array) -> list[Array]:
            if self._inner is None:
                return self._of_group(*xs)
            pairs = enumerate(xs)
            return self._inner(
                *(Stacked(stacks[i], x) if i in stacks else x for i, x in pairs)
            )

        batch = lambda count: over_groups(self.stage, one, count, self._axes)
        passed = None if self._inner else _passed_through(self.stage, self._axes)
        if passed is not None:
            # Nothing to batch: a vmap of thousands of arrays takes long to trace.
            outs = [args[i] for i in passed]
        elif self.layout.uneven and self._effects:
            # Padding must not print, call back or raise.
            outs = for_real_groups(
                self.layout,
                indices,
                partial_count,
                batch,
                args,
                self._partitioned,
            )
        elif self._decision is not None and not alone:
            outs = self._unless_idle(self._decision, batch(count), args)
        else:
            outs = batch(count)(*args)
        summed = {}
        # In a loop the summands of one chunk take little memory: there it is slower.
        # Nor with padding: a contraction of the group axis cannot mask copied slices.
        if alone and not self.layout.uneven and self._inner is None:
            summed = _summed_in_map(self.stage, self._axes, args)
        totals = [
            summed[i]
            # An output may have several reductions, of which not all are sums.
            if i in summed and REDUCE_OPS[reduce.op].additive
            else self._reduce(reduce, outs, i, indices, alone)
            for reduce, i in zip(self.reduces, self._sources, strict=True)
        ]
        for work, chosen in zip(self.folds, self._states, strict=True):
            states = [outs[i] for i in chosen]
            totals.append(work.of_chunk(states, self.layout, indices))
        return totals, [outs[i] for i in self._kept]

    def _inputs(self, slices: Sequence[Slices]) -> list[Any]:
        """Put slices, and what all groups share, in the order of the stage's inputs."""
        own, shared = iter(slices), iter(self.shared)
        return [next(own if v.partitioned else shared) for v in self.stage.inputs]

    def _of_group(self, *args: Array) -> list[Array]:
        """Run the stage for one group; `args` are those of its jaxpr."""
        if self._placed:
            return as_arrays(evaluate_on_mesh(self._jaxpr, args), self._dtypes)
        return call(self.stage, args)

    def _idle(self, work: Callable[..., list[Array]], *args: Any) -> list[Array]:
        """Return what `work` returns for groups that only add zeros."""
        # A slice that is in no segment is not read.
        nowhere = {first: max(x.num, 1) for first, x in self._placed.values()}
        outs = types_of(work, *args)
        return [full_of_type(y, nowhere.get(i, 0)) for i, y in enumerate(outs)]

    def _unless_idle(
        self, decision: Decision, work: Callable[..., list[Array]], args: list
    ) -> list[Array]:
        """Run the work of a chunk if one of its groups has any; else return zeros.

        `args` are those of `work`, for the groups of the chunk, or functions that cut
        them.
        """
        resolved = lambda x: x() if callable(x) else x
        used = [x for x, u in zip(args, decision.used, strict=True) if u]
        axes = [x for x, u in zip(self._axes, decision.used, strict=True) if u]
        batch = functools.partial(over_groups, self.stage, count=len(args[0]))
        has_work = batch(lambda *xs: decision.has_work(xs), axes=axes)
        some, *always = has_work(*(resolved(x) for x in used))
        run = lambda: work(*map(resolved, args))
        outs = lax.cond(jnp.any(some), run, lambda: self._idle(run))
        for i, x in zip(decision.always, always, strict=True):
            outs[i] = x.astype(outs[i].dtype)
        return outs

    def _slots(
        self, x: Slices, start: Array, indices: Array, lazy: bool, first: Array | None
    ) -> Slices:
        """Return the slices of a chunk's slots, out of those of the device, `x`.

        `start` is the position of the chunk's first slot on the device, int32 `[]`.
        Padding gets `first`, `[1, *s]`, that of the first slot, None without padding;
        where there is some, `x` is no `Stacked`. An array `x` is not cut if `lazy`, as
        the inner level reads it in chunks: the result is a `Stacked` with the slots'
        positions in it, int32 `[c]`. Otherwise it is `[c, *s]`.
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
        if first is None:
            return own
        return copy_slice_to_padding(self.layout, indices, own, first)

    def _batched_states(self, outs: list[Array], mask: Array) -> list[ChunkState]:
        """Return the states of a chunk's folds, from the results of a loaded stage.

        The batched function of a stage from a plan file has folded the groups of the
        chunk already: its results are only split. `outs` has for each reduction but
        gathers a partial reduction, and then the leaves of the state of each fold,
        `[*s]`, with random keys as key data. `mask`, bool `[c]`, tells which slots have
        groups: the chunk has one if the first slot has.
        """
        flat = outs[len(self.reduces) :]
        values = [v for work in self.folds for v in work.fold.results]
        pairs = zip(flat, values, strict=True)
        states = split_states(self.folds, [from_raw(x, v.dtype) for x, v in pairs])
        return [ChunkState(x, mask[0] if self.layout.uneven else None) for x in states]

    def _reduce(
        self,
        reduce: Reduce,
        outs: list[Array],
        position: int,
        indices: Array,
        alone: bool,
    ) -> Array | InSegments:
        """Return the partial reduction `[*s]` over a chunk's groups, without padding.

        It has the accumulator dtype of the reduction. A mean is not divided yet. Of
        slices in segments it is these, unless the chunk is `alone`.
        """
        op, x = REDUCE_OPS[reduce.op], outs[position]
        with jax.named_scope(f"drjax.reduce_{reduce.op}"):
            if position in self._placed and len(indices) + (not alone) > 1:
                first, placed = self._placed[position]
                if is_neutral(op.ufunc, placed.fill, op.identity(x.dtype)):
                    own = InSegments(outs[first], outs[first + 1], placed.num)
                    padded = indices if self.layout.uneven else None
                    own = own.without_padding(self.layout, padded)
                    return op.local(own) if alone else own
            if self.layout.uneven:
                x = self.layout.mask_padding(x, indices, op.identity(x.dtype))
            return op.local(x)


def _passed_through(stage: Stage, axes: list[int | None]) -> list[int] | None:
    """The argument that each output is, if a stage only passes slices on."""
    jaxpr = _compat.open_jaxpr(stage.jaxpr)
    if stage.exported is not None or jaxpr.eqns:
        return None
    position = {v: i for i, v in enumerate(jaxpr.invars) if axes[i] == 0}
    outs = jaxpr.outvars
    if not all(type(v) is not Literal and v in position for v in outs):
        return None
    return [position[v] for v in outs]


def _summed_in_map(
    stage: Stage, axes: list[int | None], args: list[Array]
) -> dict[int, Any]:
    """Sum outputs of a stage over the groups without materializing the summands.

    Such a sum is a matrix product that contracts the group axis, as in the gradient of
    weights that all groups share. Only outputs that end in a matrix product or a sum
    have one; others, and with one group all, are left out of the result, a dict by the
    position in `stage.outputs`. `args` are those of the stage's jaxpr for c groups:
    first the group indices, int32 `[c]`; then the inputs, `[c, *s]` where `axes` has a
    0, else `[*s]`.
    """
    count = args[0].shape[0]
    if count == 1:
        return {}
    sums = group_sums(stage.jaxpr)
    if not sums.indices:
        return {}
    used = [i for i, u in enumerate(sums.used) if u]
    batch = lambda fn: over_groups(stage, fn, count, [axes[i] for i in used])
    totals = sums(count, batch, [args[i] for i in used])
    return dict(zip(sums.indices, totals, strict=True))


def _empty_accumulators(
    reduces: Sequence[Reduce],
    folds: list[FoldWork],
    steps: int,
    chunk: Callable[[], tuple[list[Any], list[Array]]],
    other_shapes: bool = False,
) -> list[Accumulator]:
    """Return the accumulators with which a scan over chunks starts.

    They are first those of the reductions, with the identity, such as 0 for a sum, in
    the type of the partial reductions; then those of the folds, marked as empty.

    `steps`, the number of chunks, decides which sums have a second accumulator, for
    their rounding errors. `chunk` runs one chunk, and returns
    `(partial reductions, slices)`; it is only traced, for the types of results.
    `other_shapes`: a partial reduction may have another shape than a slice of its
    source, so that `chunk` is traced for it. Over two levels it is `[m, *s]`, for the m
    devices of the inner level.
    """
    shapes = [(reduce.source.shape, sum_dtype(reduce)) for reduce in reduces]
    types = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    states: list = []
    if _has_types_on_mesh() or folds or other_shapes:

        def partials() -> list[Any]:
            totals, _ = chunk()
            ops = [REDUCE_OPS[reduce.op] for reduce in reduces]
            of_segments = [
                op.local(x) if isinstance(x, InSegments) else x
                for op, x in zip(ops, totals, strict=False)
            ]
            return [*of_segments, *totals[len(ops) :]]

        types = types_of(partials)
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


def _has_types_on_mesh() -> bool:
    """Whether types say where arrays are, which the carry of a scan must not change.

    These are shardings on Explicit axes, and the varying axes inside a user's
    `shard_map(check_vma=True)`.
    """
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return AxisType.Explicit in kinds or _compat.check_vma()


def _are_alike(x: Aval, slices: Any) -> bool:
    """Whether slices of a type are where those of an array are on the mesh."""
    y = _compat.typeof(slices)
    specs = [a.sharding.spec[1:] for a in (x, y)]
    return specs[0] == specs[1] and _compat.varying(x) == _compat.varying(y)


def sum_dtype(reduce: Reduce) -> DTypeLike:
    """Return the dtype in which a device accumulates a reduction.

    It is float32 for sums and means of 16-bit floats, else the dtype of the values.
    """
    return REDUCE_OPS[reduce.op].accumulator(reduce.source.dtype)


def finish(
    layout: Layout, reduces: Sequence[Reduce], totals: list[Array]
) -> list[Array]:
    """Combine the devices' partial reductions, in a scope that profilers show."""
    names = dict.fromkeys(f"reduce_{reduce.op}" for reduce in reduces)
    with jax.named_scope(f"drjax.{'+'.join(names)}"):
        return _finish(layout, reduces, totals)


def _finish(
    layout: Layout, reduces: Sequence[Reduce], totals: list[Array]
) -> list[Array]:
    """Combine the devices' partial reductions by collectives, and finish reductions.

    It is called for one device: inside the `shard_map`, if there is one. `totals` are
    the partial reductions `[*s]` of this device, in the accumulator dtype, of all
    reductions but gathers. The results are the global values, the same on all devices;
    or, if a reduction is sharded, the device's part. They have the dtype of the slices
    that are reduced. All sums and means that are not `sharded` share one psum, or if
    they are encoded (`wire`) one exchange of codes. A mean is divided by n.
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
            results[i] = as_dtype(results[i], reduce.source.dtype)
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
        results[i] = as_dtype(results[i], reduce.source.dtype)
    return results


def divided_axis(layout: Layout, reduce: Reduce) -> int | None:
    """Return the axis along which the devices have parts of the result of a reduction.

    It is the first axis whose size the number of devices divides. None, each device has
    the whole result: there is no such axis, `reduce.sharded` is false, or the mesh has
    Explicit axes that are not the partition's.
    """
    # An Explicit axis besides may divide the result, which only its type tells.
    if not reduce.sharded or layout.other_explicit_axes:
        return None
    return scattered_axis(layout, reduce.result.shape)


def result_specs(
    layout: Layout, reduces: Sequence[Reduce]
) -> list[PartitionSpec | bool]:
    """Return for each reduction whether the devices have its whole result, or parts.

    These are output specs of `shard_map_over_devices`: a `PartitionSpec` for a result
    that is divided, and False for one that is whole on each device.
    """
    return [sharded_spec(layout, divided_axis(layout, r)) for r in reduces]


def call(stage: Stage, args: Sequence[Array]) -> list[Array]:
    """Run a stage: evaluate its jaxpr, or trace it under a JAX transformation.

    The results have the dtypes of `stage.outputs`.
    """
    outs = evaluate_on_mesh(stage.jaxpr, args)
    return as_arrays(outs, [value.dtype for value in stage.outputs])
