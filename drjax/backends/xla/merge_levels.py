"""Reductions over two levels: one collective over the mesh axes of both.

Input: a round whose local stage has the plan of an inner level. Output: which of its
reductions are reductions over both levels, and their results. With D_d and E_e the
outer and inner groups of a device,

    sum_i sum_j x_ij = sum_{d,e} (sum_{i in D_d} sum_{j in E_e} x_ij)

The inner level returns the sums over E_e, one for each device e; the loop over the
outer groups adds them up over D_d; and one collective combines all devices. The same
holds for means, and for maxima and minima.

Invariants: values are those of the two reductions, up to the order of the operations.
Sharp edges: such a round has no reuse of accumulators; reductions that are encoded,
sharded or secure, and results that are read besides, are combined level by level.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat.types import Array, Mesh
from drjax._primitives.map_fn import lowers_by_vmap
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax._sharding.execute import shard_map
from drjax._sharding.layout import Layout
from drjax.backends.xla.chunked_stage import finish
from drjax.backends.xla.inner_programs import layouts_inside
from drjax.plan import Reduce, Round, Stage, Value


@dataclass(frozen=True)
class InnerLevels:
    """How the reductions of a round are combined with those of other levels.

    One collective can reduce over two levels, if the reductions of an inner level are
    only reduced further by the outer level. A round may have levels inside with which
    its reductions merge, and may itself be inside a level that merges with its
    reductions.

    Attributes:
      mesh: The mesh that the user passed; None: the one in context.
      merged: For outputs of the local stage that one collective reduces over both
        levels, a dict from the name of the output to that of the inner level's result.
      partial: The names of those results of the round that are not combined over the m
        devices: they stay partial reductions, `[m, *s]`, for an outer level.
    """

    mesh: Any
    merged: dict[str, str]
    partial: frozenset[str]

    @classmethod
    def of_round(
        cls,
        layout: Layout,
        a_round: Round,
        kept: list[Value],
        mesh: Mesh | None,
        partial: frozenset[str],
    ) -> "InnerLevels":
        """Decide which reductions of a round merge with those of its inner level.

        `reductions_to_merge` chooses them. None merge if the round has no inner level,
        or has folds; if its local stage has effects, or runs in a `vmap` over all
        groups (`lowers_by_vmap`); or if the mesh axes of its partition are Explicit.
        `kept` are the outputs of the local stage that are returned as slices.
        """
        stage, merged = a_round.local, {}
        by_vmap = lowers_by_vmap(layout, stage.jaxpr)
        effects = bool(_compat.effects_of(stage.jaxpr))
        known = layout.spec_entry is None and not a_round.folds
        if stage.inner is not None and known and not (by_vmap or effects):
            inner, *_ = layouts_inside(layout.partition, stage.inner.levels, mesh)
            merged = reductions_to_merge(stage, a_round.partials, kept, inner)
        return cls(mesh, merged, partial)

    def finish(
        self,
        layout: Layout,
        stage: Stage,
        reduces: Sequence[Reduce],
        totals: list[Array],
    ) -> list[Array]:
        """Combine and finish the partial reductions of a device.

        It is called inside the `shard_map` of the round. A reduction whose source is in
        `self.merged` is combined by one collective over this level and the inner one.
        One whose result is in `self.partial` is not combined: an outer level does that.
        All others are combined over the devices of this level alone.

        `totals` has for each of `reduces`, those of the round but gathers, its partial
        reduction on this device, `[*s]`; or if it is merged, those of the m devices of
        the inner level, `[m, *s]`. The results are global values, `[*s]`; or, if left
        partial, this device's part, `[1, *s]`.
        """
        results: list[Any] = [None] * len(totals)
        plain: list[int] = []
        merged: list[int] = []
        for i, reduce in enumerate(reduces):
            if reduce.source.name in self.merged:
                merged.append(i)
            elif reduce.result.name in self.partial:
                results[i] = _finish_locally(layout, reduce, totals[i])
            else:
                plain.append(i)
        parts = lambda xs, chosen: [xs[i] for i in chosen]
        done = finish(layout, parts(reduces, plain), parts(totals, plain))
        if merged:
            assert stage.inner is not None
            levels = stage.inner.levels
            inner, *_ = layouts_inside(layout.partition, levels, self.mesh)
            done += _finish_merged(
                layout, inner, parts(reduces, merged), parts(totals, merged)
            )
        for i, x in zip([*plain, *merged], done, strict=True):
            results[i] = x
        return results


def reductions_to_merge(
    stage: Stage, reduces: Sequence[Reduce], kept: Sequence[Value], layout: Layout
) -> dict[str, str]:
    """Return the outputs of a stage that one collective can reduce over both levels.

    Such an output is the result of a reduction over the inner level, and only
    reductions over the outer level, among `reduces`, read it. All of these reductions
    have the same operation, or are sums and means; none is a gather, or encoded,
    sharded or secure. If the inner level is not sharded over mesh axes, or one of these
    is Explicit, there are no such outputs.

    `kept` are the outputs of the stage that are returned as slices, and `layout` is
    that of the inner groups. The result is a dict from the name of an output of the
    stage to the name of the value in the plan of the inner level that is this output.
    """
    inner = stage.inner
    if inner is None or not layout.sharded or layout.spec_entry is not None:
        return {}
    plain = lambda r: not (r.wire or r.sharded or r.secure)
    inside = {r.result.name: r for x in inner.rounds for r in x.partials if plain(r)}
    read = {v.name for step in inner.steps for v in step.inputs}
    read |= {v.name for v in kept}
    merged = {}
    names = [v.name for v in inner.outputs]
    for output, name in zip(stage.outputs, names, strict=True):
        outer = [r for r in reduces if r.source.name == output.name]
        if name not in inside or name in read or output.name in read or not outer:
            continue
        ops = {REDUCE_OPS[r.op] for r in (inside[name], *outer)}
        same = len(ops) == 1 or all(op.additive for op in ops)
        if same and all(map(plain, outer)) and names.count(name) == 1:
            merged[output.name] = name
    return merged


def _finish_locally(layout: Layout, reduce: Reduce, total: Array) -> Array:
    """Finish a partial reduction of this device, `[*s]`, to `[1, *s]`.

    An outer level combines the devices later. `layout` is that of the inner groups,
    over which it reduces. A mean is divided by the number of inner groups of all
    devices, so that the parts of the devices add up to the mean.
    """
    return REDUCE_OPS[reduce.op].finish(total, layout.partition.size)[None]


def _finish_merged(
    layout: Layout, inner: Layout, reduces: Sequence[Reduce], totals: list[Array]
) -> list[Array]:
    """Combine the partial reductions of the devices of two levels, by one collective.

    It is called inside the `shard_map` of the outer level, if there is one. `reduces`
    are those over the outer groups, and `totals` the partial reductions, `[m, *s]`, of
    the m devices of `inner`, over the outer groups of this device. A mean over the
    outer groups is divided by their number; `_finish_locally` has divided means over
    the inner groups.
    """
    axes, devices = (*layout.axes, *inner.axes), layout.devices * inner.devices
    both = replace(layout, axes=axes, devices=devices)

    def body(*totals: Array) -> tuple[Array, ...]:
        return tuple(finish(both, reduces, [x[0] for x in totals]))

    specs = tuple(P(inner.axes) for _ in totals)
    whole = tuple(P() for _ in totals)
    return list(shard_map(inner, body, specs, whole, _compat.check_vma())(*totals))
