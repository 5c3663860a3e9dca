"""Lowering rules of broadcast, map_fn and reduce_sum that see their operands' origin.

Input: a lowering context, and the MLIR values and types of an equation's operands.
Output: MLIR values of its results, equal to those of the primitive's own execution
function up to the order of additions. Hand-written code merges two pairs of equations:

* A map whose operand is the result of a `broadcast` reads the source of the broadcast,
  so that no copy exists for each group. Derivatives profit, too, as their maps take the
  same broadcast values as residuals.
* A sum of a map's result is computed within the map, where `contract_groups.py`
  supports it: with D_d the groups of device d,

      sum_i y_i = sum_d (sum_{i in D_d} y_i)

  The inner sums are a partitioned value of one group a device, and `reduce_sum` over
  that partition is the outer one.

The separate broadcast or map is lowered as well. The compiler's dead-code elimination
removes it if it has no other use.

Invariants: a table maps the values lowered so far to their equations, and lives as long
as the module; equations merge only if their partition and mesh agree.
Sharp edge: a value defined in one MLIR block (a branch, a loop's body) may not be used
in another one, so the sums of a map are lowered once for each block with a use.
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
        # A broadcast over another partition or mesh has other copies: no match.
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
    """The operands and the jaxpr of a lowered map, and the sums of its results.

    Attributes:
      where: The partition and the mesh of the map.
      devices: The partition with one group a device, and the mesh.
    """

    def __init__(self, where, operands: Sequence[Operand], shared, jaxpr):
        self.where, self._operands = where, operands
        self._shared, self._jaxpr = shared, jaxpr
        p, self._layout = where["partition"], layout(**where)
        groups = Partition(p.name, self._layout.devices, p.mesh_axes)
        self.devices = {**where, "partition": groups}
        self._sums: list[tuple[Any, dict[int, Operand]]] = []  # by block of code

    def sums(self, ctx) -> dict[int, Operand]:
        """For each result summed within the map, the partial sums of the devices."""
        # A use in another block needs sums of its own: see the sharp edge above.
        block = _compat.current_block()
        for known, sums in self._sums:
            if known == block:
                return sums
        sums = self._lower_sums(ctx)
        self._sums.append((block, sums))
        return sums

    def _lower_sums(self, ctx) -> dict[int, Operand]:
        where = self._layout
        # Padding would have to be masked in the operands of each contraction; a single
        # group has no sum; and by vmap, no code is of one device.
        if where.uneven or where.per_device == 1 or lowers_by_vmap(where, self._jaxpr):
            return {}
        sums = row_sums(inside(where, self._jaxpr))
        if not sums.indices:
            return {}
        # Only live operands: an unused broadcast would stay alive otherwise.
        used = [i for i, u in enumerate(sums.used) if u]
        by_rows = [not self._shared[i] for i in used]

        def run(*args):
            def body(*operands):
                run = lambda fn: over_rows(where, fn, by_rows)
                totals = sums(where.per_device, run, operands)
                return [vary(y, where.axes)[None] for y in totals]

            # None: one slice a device, `[m, *s]`, to be reduced over the devices.
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


# Without these rules, programs compute the same and need more memory.
_compat.register_lowering_rule(broadcast_p, _lower_broadcast)
_compat.register_lowering_rule(map_fn_p, _lower_map)
_compat.register_lowering_rule(reduce_sum_p, _lower_reduce_sum)
