"""Lowering rules of broadcast, map_fn and reduce_sum that merge equations.

Input: the execution function of the primitive, from the file that registers the rule.
Output: a lowering rule, which turns the MLIR values of an equation's operands into
those of its results. They equal the results of the execution function, up to the order
of additions. The rules merge two pairs of equations, as hand-written code does:

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

Invariants: equations merge only if their partition and mesh agree. A rule knows the
equations that were lowered before it in the same module, by the values of their
results; what it knows is deleted with the module.
Sharp edges: a value defined in one MLIR block (a branch, a loop's body) may not be used
in another one, so the sums of a map are lowered once for each block with a use. Without
these rules, programs compute the same and need more memory.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from drjax import _compat
from drjax._partition import Partition
from drjax._primitives.contract_groups import group_sums
from drjax._primitives.map_lowering import (
    lowers_by_vmap,
    prepare_for_shard_map,
    vmap_over_groups,
)
from drjax._sharding.avals import partitioned_aval
from drjax._sharding.execute import shard_map_over_devices, vary
from drjax._sharding.layout import make_layout

Operand = tuple[Any, Any]  # an MLIR value and its type
Placement = dict[str, Any]  # the parameters `partition` and `mesh` of an equation


@dataclass(frozen=True)
class _LoweredEquations:
    """The equations of a module that were lowered so far, by the values of results.

    Attributes:
      broadcasts: From the MLIR value of a broadcast's result to the placement and the
        operand of the broadcast.
      maps: From the MLIR value of a map's result to the map, and the position of the
        result.
    """

    broadcasts: dict[Any, tuple[Placement, Operand]] = field(default_factory=dict)
    maps: dict[Any, tuple["_LoweredMap", int]] = field(default_factory=dict)


_by_module: WeakKeyDictionary[Any, _LoweredEquations] = WeakKeyDictionary()


def _lowered_equations(ctx) -> _LoweredEquations:
    """The equations that were lowered so far in the module that is being lowered.

    `ctx` is the context that JAX gave to a lowering rule.
    """
    return _by_module.setdefault(_compat.module_token(ctx), _LoweredEquations())


def broadcast_rule(execute: Callable) -> Callable:
    """Make the lowering rule of `broadcast`, which also records its operand.

    A map that is lowered later, and takes the copies, finds the record and reads the
    global value instead of n copies of it. `execute(x, partition=, mesh=)` is the
    execution function of the primitive.
    """

    def rule(ctx, x, **placement):
        source = x, ctx.avals_in[0]
        outs = _compat.lower_function(ctx, execute, [source], False, **placement)
        _lowered_equations(ctx).broadcasts[outs[0]] = placement, source
        return outs

    return rule


def map_rule(execute: Callable) -> Callable:
    """Make the lowering rule of `map_fn`, which reads the sources of broadcasts.

    `execute(*args, shared=, **params)` is the execution function of the primitive.
    Operands marked in `shared`, a tuple of bools, are the sources of broadcasts, `[*s]`
    instead of `[n, *s]`.
    """

    def rule(ctx, *args, **params):
        placement = {"partition": params["partition"], "mesh": params["mesh"]}
        lowered = _lowered_equations(ctx)
        operands, shared = list(zip(args, ctx.avals_in, strict=True)), []
        for i, arg in enumerate(args):
            # A broadcast over another partition or mesh has other copies: no match.
            of_broadcast, source = lowered.broadcasts.get(arg, (None, None))
            shared.append(of_broadcast == placement)
            if source is not None and shared[i]:
                operands[i] = source
        run = functools.partial(execute, shared=tuple(shared))
        outs = _compat.lower_function(ctx, run, operands, True, **params)
        a_map = _LoweredMap(placement, operands, tuple(shared), params["jaxpr"])
        lowered.maps.update({out: (a_map, i) for i, out in enumerate(outs)})
        return outs

    return rule


def reduce_sum_rule(execute: Callable) -> Callable:
    """Make the lowering rule of `reduce_sum`, which sums a map's result in the map.

    `execute(x, partition=, mesh=)` is the execution function of the primitive. It gets
    the partial sums of the devices if the map can compute them, else the whole result.
    """

    def rule(ctx, x, **placement):
        operand = x, ctx.avals_in[0]
        a_map, index = _lowered_equations(ctx).maps.get(x, (None, 0))
        if a_map is not None and a_map.placement == placement:
            sums = a_map.sums(ctx)
            if index in sums:
                operand, placement = sums[index], a_map.device_placement
        return _compat.lower_function(ctx, execute, [operand], False, **placement)

    return rule


class _LoweredMap:
    """The operands and the jaxpr of a lowered map, and the sums of its results.

    Args:
      placement: The partition and the mesh of the map.
      operands: The operands, of which some are sources of broadcasts, `[*s]`.
      shared: For each operand whether it is such a source, a tuple of bools.
      jaxpr: The per-group jaxpr.

    Attributes:
      placement: The partition and the mesh of the map.
      device_placement: The partition with one group a device, and the mesh.
    """

    def __init__(
        self, placement: Placement, operands: Sequence[Operand], shared, jaxpr
    ):
        self.placement, self._operands = placement, operands
        self._shared, self._jaxpr = shared, jaxpr
        p, self._layout = placement["partition"], make_layout(**placement)
        devices = Partition(p.name, self._layout.devices, p.mesh_axes)
        self.device_placement = {**placement, "partition": devices}
        self._sums: list[tuple[Any, dict[int, Operand]]] = []  # by block of code

    def sums(self, ctx) -> dict[int, Operand]:
        """For each result that is summed within the map, the devices' partial sums.

        From the position of a result to its sums, `[m, *s]` for m devices; {} if no
        result qualifies. They are lowered once for each MLIR block that uses them.
        `ctx` is the context of the lowering rule of the sum.
        """
        # A use in another block needs sums of its own: see the sharp edge above.
        block = _compat.current_block()
        for known, sums in self._sums:
            if known == block:
                return sums
        sums = self._lower_sums(ctx)
        self._sums.append((block, sums))
        return sums

    def _lower_sums(self, ctx) -> dict[int, Operand]:
        """Lower the sums that the map can compute into the current MLIR block.

        Returns:
          From the position of a result to the partial sums of the m devices, `[m, *s]`;
          {} if no result qualifies.
        """
        layout = self._layout
        # Padding would have to be masked in the operands of each contraction; a single
        # group has no sum; and by vmap, no code is of one device.
        if (
            layout.uneven
            or layout.per_device == 1
            or lowers_by_vmap(layout, self._jaxpr)
        ):
            return {}
        sums = group_sums(prepare_for_shard_map(layout, self._jaxpr))
        if not sums.indices:
            return {}
        # Only live operands: an unused broadcast would stay alive otherwise.
        used = [i for i, u in enumerate(sums.used) if u]
        partitioned_in = [not self._shared[i] for i in used]

        def run(*args):
            def body(*operands):
                run = lambda fn: vmap_over_groups(layout, fn, partitioned_in)
                totals = sums(layout.per_device, run, operands)
                return [vary(y, layout.axes)[None] for y in totals]

            # None: one slice a device, `[m, *s]`, to be reduced over the devices.
            each_device = [None] * len(sums.indices)
            vma = _compat.check_vma()
            return shard_map_over_devices(
                layout, body, args, partitioned_in, each_device, vma
            )

        operands = [self._operands[i] for i in used]
        outs = _compat.lower_function(ctx, run, operands, True)
        avals = [
            partitioned_aval(
                self._jaxpr.out_avals[i], make_layout(**self.device_placement)
            )
            for i in sums.indices
        ]
        operands = zip(outs, avals, strict=True)
        return dict(zip(sums.indices, operands, strict=True))
