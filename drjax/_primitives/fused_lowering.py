"""Lowerings that see where their operands come from.

By itself, each primitive lowers as its execution function says. Two things are better
done together, as hand-written code does them:

* A map whose operand is the result of a `broadcast` reads the source of the broadcast,
  so that no copy is made for each group. That serves derivatives too, whose maps take
  the same broadcast values as residuals.
* A sum of the result of a map is made within the map, where `contract_groups.py` finds
  that worthwhile: first over each device's rows, which is a partitioned value of one
  group a device, then over the devices.

The compiler drops what nobody uses any more. Sharp edge: a value lowered in one block
of code (a branch, a loop's body) may not be used in another.
"""

import functools
from collections.abc import Sequence
from typing import Any

from drjax import _compat
from drjax._partition import Partition
from drjax._primitives.collectives import (
    broadcast_p,
    execute_broadcast,
    execute_reduce_sum,
    reduce_sum_p,
)
from drjax._primitives.contract_groups import row_sums
from drjax._primitives.map_fn import execute_map, map_fn_p
from drjax._primitives.map_lowering import inside, lowers_by_vmap, over_rows
from drjax._sharding.avals import partitioned_aval
from drjax._sharding.execute import on_devices, vary
from drjax._sharding.layout import layout

Operand = tuple[Any, Any]  # a lowered value and its type


def _lower_broadcast(ctx, x, **where):
    source = x, ctx.avals_in[0]
    outs = _compat.lower_function(ctx, execute_broadcast, [source], False, **where)
    _compat.lowered_values(ctx)[broadcast_p, outs[0]] = where, source
    return outs


def _lower_map(ctx, *args, **params):
    where = {"partition": params["partition"], "mesh": params["mesh"]}
    known = _compat.lowered_values(ctx)
    operands, shared = list(zip(args, ctx.avals_in, strict=True)), []
    for i, arg in enumerate(args):
        there, source = known.get((broadcast_p, arg), (None, None))
        shared.append(there == where)
        if there == where:
            operands[i] = source
    run = functools.partial(execute_map, shared=tuple(shared))
    outs = _compat.lower_function(ctx, run, operands, True, **params)
    made = _LoweredMap(where, operands, tuple(shared), params["jaxpr"])
    known.update({(map_fn_p, out): (made, i) for i, out in enumerate(outs)})
    return outs


def _lower_reduce_sum(ctx, x, **where):
    operand = x, ctx.avals_in[0]
    made, index = _compat.lowered_values(ctx).get((map_fn_p, x), (None, 0))
    if made is not None and made.where == where:
        sums = made.sums(ctx)
        if index in sums:
            operand, where = sums[index], made.devices
    return _compat.lower_function(ctx, execute_reduce_sum, [operand], False, **where)


class _LoweredMap:
    """What a lowered map was made of, and the sums of its results.

    Attributes:
      where: Its partition and mesh.
      devices: The partition of one group a device, and the mesh.
    """

    def __init__(self, where, operands: Sequence[Operand], shared, jaxpr):
        self.where, self._operands = where, operands
        self._shared, self._jaxpr = shared, jaxpr
        p, self._layout = where["partition"], layout(**where)
        groups = Partition(p.name, self._layout.devices, p.mesh_axes)
        self.devices = {**where, "partition": groups}
        self._sums: list[tuple[Any, dict[int, Operand]]] = []  # by block of code

    def sums(self, ctx) -> dict[int, Operand]:
        """For each result that is summed within the map, the sums of each device."""
        block = _compat.current_block()
        for known, sums in self._sums:
            if known == block:
                return sums
        sums = self._lower_sums(ctx)
        self._sums.append((block, sums))
        return sums

    def _lower_sums(self, ctx) -> dict[int, Operand]:
        where = self._layout
        if where.uneven or where.per_device == 1 or lowers_by_vmap(where, self._jaxpr):
            return {}
        sums = row_sums(inside(where, self._jaxpr))
        if not sums.indices:
            return {}
        used = [i for i, u in enumerate(sums.used) if u]
        by_rows = [not self._shared[i] for i in used]

        def run(*args):
            def body(*operands):
                run = lambda fn: over_rows(where, fn, by_rows)
                totals = sums(where.per_device, run, operands)
                return [vary(y, where.axes)[None] for y in totals]

            each_device = [None] * len(sums.indices)
            vma = _compat.check_vma()
            return on_devices(where, body, args, by_rows, each_device, vma)

        operands = [self._operands[i] for i in used]
        outs = _compat.lower_function(ctx, run, operands, True)
        avals = [
            partitioned_aval(self._jaxpr.out_avals[i], layout(**self.devices))
            for i in sums.indices
        ]
        operands = zip(outs, avals, strict=True)
        return dict(zip(sums.indices, operands, strict=True))


_compat.register_lowering_rule(broadcast_p, _lower_broadcast)
_compat.register_lowering_rule(map_fn_p, _lower_map)
_compat.register_lowering_rule(reduce_sum_p, _lower_reduce_sum)
