"""What lowering rules know of the equations that were lowered before, to merge them.

Input: for each equation of `broadcast` and of `map_fn`, what its lowering rule records
here. Output: for the MLIR value of a later equation's operand, the equation of which it
is a result. The lowering rules merge four pairs of equations, as hand-written code
does:

* A map whose operand is the result of a `broadcast` reads the source of the broadcast,
  so that no copy exists for each group. Derivatives profit, too, as their maps take the
  same broadcast values as residuals. (The rules are in `collectives.py`, `map_fn.py`.)
* A sum of a map's result is computed within the map, where `contract_groups.py`
  supports it: with D_d the groups of device d,

      sum_i y_i = sum_d (sum_{i in D_d} y_i)

  The inner sums are a partitioned value of one group a device, and `reduce_sum` over
  that partition is the outer one. (The rules are in `map_fn.py`, `collectives.py`.)
* A reduction of slices in segments, which a map has placed there, reduces the slices
  by segment: see `segments.py`.
* A reduction of a map's result that is itself the same reduction over an inner level is
  one collective over the mesh axes of both: see `partial_reduction.py`.

The separate broadcast or map is lowered as well. The compiler's dead-code elimination
removes it if it has no other use. What is computed equals what the execution functions
of the primitives compute, up to the order of additions.

Invariants: equations merge only if their partition and mesh agree. What is known of the
equations of a module is deleted with the module.
Sharp edges: a value defined in one MLIR block (a branch, a loop's body) may not be used
in another one, so the sums of a map are lowered once for each block with a use. Without
these rules, programs compute the same and need more memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from jax.interpreters.mlir import LoweringRuleContext

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._sharding.layout import Placement

MlirValue: TypeAlias = Any  # the types of MLIR are not public
Operand = tuple[Any, Any]  # an MLIR value and its type


@dataclass(frozen=True)
class InnerReduction:
    """One result of a map over the outer level that reduces over an inner level.

    The map has an additional result, with what each device of the inner level has
    before the collective: its part of the reduction. From these parts, the reduction
    over the outer level is one collective over both levels' axes.

    Attributes:
      primitive: The reduction over the inner level.
      axes: The mesh axes of the inner level, over m devices.
      position: The position of the parts, `[m, *s]` in each group, among the results of
        the jaxpr that `with_partial_reductions` returns.
    """

    primitive: Primitive
    axes: tuple[str, ...]
    position: int


@dataclass(frozen=True)
class PlacedResult:
    """One result of a map that is each group's slice in its segment, `[n, num, *s]`.

    Attributes:
      segments: The operand of the groups' segments, int32 `[n]`.
      slices: That of their slices, `[n, *s]`.
      num: The number of segments.
      fill: The number around each slice.
    """

    segments: Operand
    slices: Operand
    num: int
    fill: Any

    @property
    def operands(self) -> list[Operand]:
        """What a reduction of them takes."""
        return [self.segments, self.slices]


class LoweredMap(Protocol):
    """A lowered `map_fn` equation, which can lower sums of its results, too.

    Attributes:
      partial: From the position of each result that the mapped function reduces over an
        inner level of groups, to how it does, and the additional result of the map,
        `[n, m, *s]`: the part of the reduction on each of the inner level's m devices.
      placed: The results that are slices in segments, by their positions. They are left
        out where a device has one group, or may not scatter.
      placement: The parameters `partition` and `mesh` of the equation.
      device_placement: As `placement`; its partition has one group for each device.
    """

    partial: dict[int, tuple[InnerReduction, Operand]]
    placed: dict[int, PlacedResult]
    placement: Placement
    device_placement: Placement

    def sums(self, ctx: LoweringRuleContext) -> dict[int, Operand]:
        """Return the devices' sums of those results that can be summed within the map.

        Such a result is float32, and linear equations compute it from a `dot_general`
        or a `reduce_sum`, into which the sum over the groups merges; and the jaxpr of
        one group is straight-line code without effects (`GroupSums`). The dict has the
        sums `[m, *s]`, for each of m devices the sum over its groups, by the position
        of the result. {} if there is no such result; if each device has one group only,
        or some slot is padding; or if the map is lowered by a `vmap` over all devices'
        groups.

        `ctx` is that of the equation that uses the sums. The first call in an MLIR
        block lowers the sums of all such results into that block; later calls in the
        block return the same values.
        """
        ...


@dataclass(frozen=True)
class _LoweredEquations:
    """The equations of an MLIR module that were lowered so far, by values of results.

    Attributes:
      broadcasts: From the value of a broadcast's result to the broadcast's placement
        and operand.
      maps: From the value of a map's result to the map, and the position of the result
        among the map's results.
    """

    broadcasts: dict[Any, tuple[Placement, Operand]] = field(default_factory=dict)
    maps: dict[Any, tuple[LoweredMap, int]] = field(default_factory=dict)


_by_module: WeakKeyDictionary[Any, _LoweredEquations] = WeakKeyDictionary()


def lowered_equations(ctx: LoweringRuleContext) -> _LoweredEquations:
    """Return the record of the equations lowered so far in the current MLIR module.

    The first call for a module makes an empty record; later calls return the same
    object, to which the lowering rules add. It is deleted with the module.
    """
    return _by_module.setdefault(_compat.module_token(ctx), _LoweredEquations())


def map_of(
    ctx: LoweringRuleContext, value: MlirValue, placement: Mapping[str, object]
) -> tuple[LoweredMap | None, int]:
    """Return the map of which an MLIR value is a result, and the result's position.

    (None, 0) if it is no result of a map over this partition and mesh.
    """
    a_map, index = lowered_equations(ctx).maps.get(value, (None, 0))
    if a_map is None or a_map.placement != placement:
        return None, 0
    return a_map, index
