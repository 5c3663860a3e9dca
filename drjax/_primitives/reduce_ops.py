"""The table of reductions, for the planner and all backends.

Input: the name of a reduction, or its primitive. Output: its `ReduceOp`, or None: the
identity, how partial reductions combine, and what comes last. So a mean is a sum with
the `finish` total / count, and 0 / 0 = NaN if no group takes part.

A backend reduces in up to four steps, with blocks B of groups (of a device, a worker or
a step of a loop):

    local            p_B = op over i in B of x_i        a partial reduction
    combine          p_{A + B} = combine(p_A, p_B)      of two disjoint blocks
    across_devices   the same, of all devices           one collective
    finish           y = finish(p_all, n)               a mean: division by n

Invariants:

* `combine` is associative and commutative, but for rounding, and `identity` is neutral
  for it. So a cut of the groups into any blocks gives the same result, and padding may
  be filled with the identity.
* If the reduction is `additive`, `finish` commutes with `combine`: (a + b) / n =
  a / n + b / n. So it may precede the communication between devices.

To add a reduction: define its primitive, a block, with all rules, call `register`,
document it in `drjax/primitives.py`, and write the public function. With
`partial_reduction.register_merging`, one over two levels is one collective. Backends
and engines do not ask which reduction it is; exports to other systems refuse one that
these lack.

Sharp edges: partial reductions have a wider dtype than the values (`accumulator` on
devices, `wide` on the host), but not if the reduction `selects` a value.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from drjax import _compat
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, DeviceArray
from drjax._primitives.collectives import (
    reduce_mean_p,
    reduce_sum_p,
)
from drjax._primitives.device_sums import accumulator, psum
from drjax._primitives.extrema import (
    across_devices,
    highest,
    lowest,
    reduce_max_p,
    reduce_min_p,
)
from drjax._primitives.segments import (
    InSegments,
    buckets_of_groups,
    combine_segments,
    reduce_segments,
)

if TYPE_CHECKING:
    from drjax._plan.exchanges import Reduce

# A running sum has a second accumulator, for the rounding errors, if that is cheap (at
# most FEW_NUMBERS elements) or needed (more than MANY_STEPS steps). In float32, s steps
# lose at most s 2^-24 of the sum of magnitudes, and with equal summands often a sixth
# of that. `jnp.sum` loses less, as it adds pairwise.
FEW_NUMBERS = 1024
MANY_STEPS = 4096


@functools.lru_cache(maxsize=64)
def wide(dtype: DTypeLike) -> DTypeLike:
    """Return the dtype in which the host combines workers' partial reductions.

    It has the kind of `dtype` and 64 bits (128 for complex numbers); a dtype that is no
    number, as bool, is returned as it is.
    """
    for kind, widest in (
        (jnp.floating, np.float64),
        (np.complexfloating, np.complex128),
        (np.signedinteger, np.int64),
        (np.unsignedinteger, np.uint64),
    ):
        if jnp.issubdtype(dtype, kind):
            return widest
    return dtype


def as_dtype(x: Array, dtype: DTypeLike) -> Array:
    """Return an array in a dtype: itself, if it has it."""
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


@functools.lru_cache(maxsize=64)
def _is_inexact(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _divide(total: Array, count: int) -> Array:
    """Divide a sum by a number, as `/` of `jax.numpy` does; of NumPy's in its dtype."""
    # Without x64, JAX would cast a total of the host to 32 bits before it divides.
    if isinstance(total, np.ndarray | np.generic):
        return total / count
    if isinstance(count, int) and _is_inexact(total.dtype):
        return _compat.staged_by_type(_quotient, total, count)
    return total / count


def _quotient(total: Array, count: int) -> Array:
    return lax.div(total, total.dtype.type(count))


def _sum_of_slices(slices: DeviceArray, dtype: DTypeLike) -> Array:
    return lax.reduce_sum(as_dtype(slices, dtype), (0,))


@dataclass(frozen=True)
class ReduceOp:
    """A reduction over the groups, `[n, *s]` -> `[*s]`, for planner and backends.

    Attributes:
      name: Its name in plans and plan files, as "sum".
      primitive: Its JAX primitive, as `reduce_sum_p`.
      phrase: Its description in a printed plan, as "sum over groups".
      ufunc: The binary function that combines two partial reductions, as a NumPy ufunc;
        `jax.numpy` has the function of the same name.
      identity: From a dtype to the number that is neutral for `ufunc`.
      across_devices: Combines the devices' partial reductions, inside a `shard_map`.
        `across_devices(layout, x)` takes the `Layout` and the device's partial
        reduction, `[*s]`, in the dtype of the values, and returns that of all devices,
        `[*s]`. If the reduction is `additive`, it is `across_devices(layout, *xs)`: it
        takes any number of partial reductions, of any shapes, for one collective, and
        returns a sequence.
      finish: `finish(total, count)`, from the reduction of all groups, `[*s]`, and
        their number to the result, `[*s]`: for a mean, the division.
      selects: Whether the result is bitwise the value of some group, as a maximum is.
        No accumulator is wider, and no other stage may rematerialize that value.
      additive: Whether partial reductions are sums.
      if_no_group: The result, as a float, if an engine has dropped every group; with
        `where=`, reductions over no group are defined in `_api/reductions.py`.
      lax_primitives: The reductions of `jax.lax` that are this one over the group axis:
        `lax.reduce_sum_p` is, as `jnp.sum(x, axis=0)` of a partitioned value binds it.
        Of bools the disjunction is the maximum, and the conjunction the minimum.
    """

    name: str
    primitive: Any
    phrase: str
    ufunc: np.ufunc
    identity: Callable[[Any], Any]
    across_devices: Callable[..., Any]
    finish: Callable[[Any, int], Any] = lambda total, count: total
    selects: bool = False
    additive: bool = False
    if_no_group: float = 0.0
    lax_primitives: tuple[Any, ...] = ()

    def local(self, slices: DeviceArray | InSegments) -> Array:
        """Reduce slices of k groups over axis 0, to their partial reduction.

        Its dtype is `self.accumulator(slices.dtype)`.
        """
        if isinstance(slices, InSegments):
            wide, identity = self.accumulator(slices.dtype), self.identity(slices.dtype)
            return reduce_segments(self.ufunc, slices, identity, wide)
        reduce = getattr(jnp, _OVER_AN_AXIS[self.ufunc])
        # No wider dtype: the result is bitwise one of the values.
        if self.selects:
            return reduce(slices, axis=0)
        dtype = self.accumulator(slices.dtype)
        if self.ufunc is np.add and _is_inexact(dtype):
            # What `jnp.sum` binds; it takes many times as long to trace.
            return _compat.staged_by_type(_sum_of_slices, slices, dtype)
        return reduce(slices, axis=0, dtype=dtype)

    def accumulator(self, dtype: DTypeLike) -> DTypeLike:
        """Return the dtype of partial reductions on a device, for values of `dtype`.

        It is float32 for 16-bit floats, unless the reduction `selects` a value of some
        group, as a maximum does; else it is `dtype` itself.
        """
        return dtype if self.selects else accumulator(dtype)

    def wide(self, dtype: DTypeLike) -> DTypeLike:
        """Return the dtype of partial reductions on the host: `wide(dtype)`, as a rule.

        It is `dtype` itself if the reduction `selects` a value of some group, as a
        maximum does.
        """
        return dtype if self.selects else wide(dtype)

    def combine(self, x: Array, y: Array) -> Array:
        """Combine the partial reductions of two disjoint sets of groups, on a device.

        `x` and `y` are arrays `[*s]` of one dtype, and so is the result.
        """
        return getattr(jnp, self.ufunc.__name__)(x, y)


# By ufunc, not by reduction: a new reduction with one of these needs no entry.
_OVER_AN_AXIS = {
    np.add: "sum",
    np.maximum: "max",
    np.minimum: "min",
    np.multiply: "prod",
}
REDUCE_OPS: dict[str, ReduceOp] = {}
_of_primitive: dict[Any, ReduceOp] = {}
_of_lax_primitive: dict[Any, ReduceOp] = {}


def register(op: ReduceOp) -> ReduceOp:
    """Register a reduction, so that the planner, plan files and backends know it.

    They look it up by its name (`REDUCE_OPS`), by its primitive (`of_primitive`), or by
    an equivalent primitive of `jax.lax` (`of_lax_primitive`). One with the same name or
    primitive is replaced.
    """
    REDUCE_OPS[op.name] = _of_primitive[op.primitive] = op
    _of_lax_primitive.update(dict.fromkeys(op.lax_primitives, op))
    return op


def of_primitive(primitive: Primitive) -> ReduceOp | None:
    """Look up the registered reduction with a primitive; None if there is none."""
    return _of_primitive.get(primitive)


def of_lax_primitive(primitive: Primitive) -> ReduceOp | None:
    """Look up the drjax reduction that a `jax.lax` reduction over the group axis is.

    It is the registered one with the primitive in `lax_primitives`; None if there is
    none.
    """
    return _of_lax_primitive.get(primitive)


_SUM = ReduceOp(
    "sum",
    reduce_sum_p,
    "sum over groups",
    np.add,
    lambda dtype: 0,
    psum,
    additive=True,
    lax_primitives=(lax.reduce_sum_p,),
)
_MEAN = replace(
    _SUM,
    name="mean",
    primitive=reduce_mean_p,
    phrase="mean over groups",
    finish=_divide,
    if_no_group=np.nan,
    lax_primitives=(),
)
register(_SUM)
register(_MEAN)
register(
    ReduceOp(
        "max",
        reduce_max_p,
        "maximum over groups",
        np.maximum,
        lowest,
        lambda layout, x: across_devices(x, layout.axes, True),
        selects=True,
        lax_primitives=(lax.reduce_max_p, lax.reduce_or_p),
    )
)
register(
    ReduceOp(
        "min",
        reduce_min_p,
        "minimum over groups",
        np.minimum,
        highest,
        lambda layout, x: across_devices(x, layout.axes, False),
        selects=True,
        lax_primitives=(lax.reduce_min_p, lax.reduce_and_p),
    )
)


def is_compensated(reduce: "Reduce", steps: int) -> bool:
    """Decide whether a running sum has a second accumulator, for its rounding errors.

    It has one if it adds up 16-bit or 32-bit floats, or complex64, and either one
    group's slice has at most `FEW_NUMBERS` elements, or the loop that accumulates it
    has more than `MANY_STEPS` steps. A symbolic number of elements counts as large. A
    reduction that is not additive, such as a maximum, has none. `reduce` is no gather.
    """
    source = reduce.source
    if not REDUCE_OPS[reduce.op].additive:
        return False
    # Integers have no rounding errors, and 64-bit floats lose too little.
    if accumulator(source.dtype) not in (jnp.float32, jnp.complex64):
        return False
    size = math.prod(source.shape)  # unknown with symbolic dimensions
    return steps > MANY_STEPS or (isinstance(size, int) and size <= FEW_NUMBERS)


def _compensated(value: Array, excess: Array, x: Array) -> tuple[Array, Array]:
    """Add `x` to a sum with its excess by Kahan's method: see `Running`."""
    x = x - excess
    total = value + x
    excess = (total - value) - x
    # An infinite sum has the excess inf - inf = NaN, which must not spread.
    return total, jnp.where(jnp.isfinite(excess), excess, 0)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Running:
    """A running reduction, of the slices that a loop over groups has seen so far.

    A running sum may have a second accumulator for its rounding error, by Kahan's
    method. With the value v and the excess e = v - sum, one more summand x gives

        v' = fl(v + (x - e))      e' = (v' - v) - (x - e)

    so that v' - e' = v - e + x, but for errors of second order.

    Attributes:
      op: The name of the reduction in `REDUCE_OPS`, such as "sum".
      value: The reduction of these slices, an array `[*s]`.
      excess: The rounding error, `value` minus the exact sum, an array `[*s]`, at most
        about half the last digit of `value` (Kahan 1965, "Further remarks on reducing
        truncation errors"). It costs three more additions, and as much memory as
        `value`. None: the rounding error is not computed, as for a maximum.
    """

    # The name, not the ReduceOp: pytree metadata must be comparable and hashable.
    op: str
    value: Any
    excess: Any = None

    def add(self, x: Array | InSegments) -> "Running":
        """Combine the running reduction with a partial reduction of further groups.

        `x` is `[*s]` in the dtype of `value`, or the slices of groups in segments. The
        `excess` of the new running reduction, the rounding error of its `value`, is
        None if that of this one is; else `x` is added with the rounding error taken
        into account.
        """
        op = REDUCE_OPS[self.op]
        if isinstance(x, InSegments) and not x.num:
            return Running(self.op, x.only_in(self.value), self.excess)
        if isinstance(x, InSegments):
            if self.excess is None and buckets_of_groups(op.ufunc, x) == 1:
                value = combine_segments(op.ufunc, self.value, x)
                return Running(self.op, value)
            if self.excess is not None and len(x.slices) < x.num:
                return self._add_to_segments(x)
            x = op.local(x)
        if self.excess is None:
            return Running(self.op, op.combine(self.value, x))
        return Running(self.op, *_compensated(self.value, self.excess, x))

    def _add_to_segments(self, x: InSegments) -> "Running":
        """Add the slices of a few groups, one after another, each to its segment."""
        value, excess = self.value, self.excess
        for segment, slice_ in zip(x.segments, x.slices, strict=True):
            own = jnp.minimum(segment, x.num - 1)
            of_segment = [
                lax.dynamic_index_in_dim(y, own, 0, False) for y in (value, excess)
            ]
            new = _compensated(*of_segment, slice_.astype(value.dtype))
            value, excess = (
                lax.dynamic_update_index_in_dim(
                    y, jnp.where(segment < x.num, after, before), own, 0
                )
                for y, before, after in zip(
                    (value, excess), of_segment, new, strict=True
                )
            )
        return Running(self.op, value, excess)

    def tree_flatten(self) -> tuple[tuple[Any, Any], str]:
        return (self.value, self.excess), self.op

    @classmethod
    def tree_unflatten(cls, op: str, children: tuple[Any, Any]) -> "Running":
        return cls(op, *children)
