"""The table of reductions: all that the planner and the backends know of one.

A backend reduces in up to four steps: `local`, the partial reduction of the groups that
a device or a worker has at once; `combine`, of two partial reductions;
`across_devices`, of those of all devices; and `finish`, which makes the result of the
total. Invariants:

* `combine` is associative and commutative, but for rounding, and `identity` is neutral
  for it: groups may be cut into blocks in any way, and padding is filled with it.
* `finish` commutes with `combine` if the reduction is `additive` (a mean: division by
  the number of groups), so it may come before the devices are combined.

To add a reduction: define its primitive with all rules, call `register`, and write the
function that users call. Nothing else switches on the name of a reduction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drjax._primitives.collectives import (
    LOW_PRECISION,
    psum,
    reduce_mean_p,
    reduce_sum_p,
)
from drjax._primitives.extrema import (
    across_devices,
    highest,
    lowest,
    reduce_max_p,
    reduce_min_p,
)

# A running sum has a second accumulator for what rounding loses where that is cheap,
# for so few numbers, or needed: s steps lose at most s 2^-24 of a plain sum, and of
# equal numbers often a sixth of that. `jnp.sum` loses less, as it adds up in a tree.
FEW_NUMBERS = 1024
MANY_STEPS = 4096


def accumulator(dtype):
    """The dtype in which values are added up on a device: 16-bit floats in float32."""
    return jnp.float32 if dtype in LOW_PRECISION else dtype


def wide(dtype: Any) -> Any:
    """The dtype in which partial reductions of workers are combined on the host."""
    for kind, widest in (
        (jnp.floating, np.float64),
        (np.complexfloating, np.complex128),
        (np.signedinteger, np.int64),
        (np.unsignedinteger, np.uint64),
    ):
        if jnp.issubdtype(dtype, kind):
            return widest
    return dtype


@dataclass(frozen=True)
class ReduceOp:
    """A reduction over the groups, `[n, *s]` -> `[*s]`.

    Attributes:
      name: Its name in plans and plan files.
      primitive: Its primitive.
      phrase: What a printed plan says.
      ufunc: The binary function that combines two partial reductions, as a NumPy ufunc;
        `jax.numpy` has the function of the same name.
      identity: From a dtype to the number that is neutral for `ufunc`.
      across_devices: From a `Layout` and the partial reductions of a device, in the
        dtype of the values, to those of all devices. That of `additive` reductions
        takes any number of them, for one collective.
      finish: From the total and the number of groups to the result.
      selects: Whether the result is the very value of a group, as of a maximum: no
        accumulator is wider, and no other stage may compute that value again.
      additive: Whether partial reductions are sums.
      if_no_group: The result, as a float, if no group takes part.
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

    def local(self, slices: jax.Array) -> jax.Array:
        """The partial reduction of `[k, *s]` over axis 0, in `accumulator` of it."""
        reduce = getattr(jnp, _OVER_AN_AXIS[self.ufunc])
        if self.selects:
            return reduce(slices, axis=0)
        return reduce(slices, axis=0, dtype=self.accumulator(slices.dtype))

    def accumulator(self, dtype):
        """The dtype of partial reductions on a device."""
        return dtype if self.selects else accumulator(dtype)

    def wide(self, dtype):
        """The dtype of partial reductions on the host."""
        return dtype if self.selects else wide(dtype)

    def combine(self, x, y):
        """The reduction of two partial reductions, on a device."""
        return getattr(jnp, self.ufunc.__name__)(x, y)


_OVER_AN_AXIS = {
    np.add: "sum",
    np.maximum: "max",
    np.minimum: "min",
    np.multiply: "prod",
}
REDUCE_OPS: dict[str, ReduceOp] = {}
_of_primitive: dict[Any, ReduceOp] = {}


def register(op: ReduceOp) -> ReduceOp:
    """Make a reduction known to the planner, plan files and backends."""
    REDUCE_OPS[op.name] = _of_primitive[op.primitive] = op
    return op


def of_primitive(primitive: Any) -> ReduceOp | None:
    """The reduction of this primitive, if it is one."""
    return _of_primitive.get(primitive)


_SUM = ReduceOp(
    "sum",
    reduce_sum_p,
    "sum over groups",
    np.add,
    lambda dtype: 0,
    psum,
    additive=True,
)
_MEAN = replace(
    _SUM,
    name="mean",
    primitive=reduce_mean_p,
    phrase="mean over groups",
    finish=lambda total, count: total / count,
    if_no_group=np.nan,
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
    )
)


def is_compensated(reduce, steps: int) -> bool:
    """Whether a running sum of so many steps needs its second accumulator."""
    source = reduce.source
    if not REDUCE_OPS[reduce.op].additive:
        return False
    if accumulator(source.dtype) not in (jnp.float32, jnp.complex64):
        return False
    size = math.prod(source.shape)  # unknown with symbolic dimensions
    return steps > MANY_STEPS or (isinstance(size, int) and size <= FEW_NUMBERS)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Running:
    """A running reduction.

    Attributes:
      op: Its name.
      value: What it is so far.
      excess: What `value` has more than the sum, at most about half its last digit;
        or None (Kahan 1965, "Further remarks on reducing truncation errors"). That
        takes three more additions, and as much memory again.
    """

    op: str
    value: Any
    excess: Any = None

    def add(self, x) -> "Running":
        """With one more value."""
        if self.excess is None:
            return Running(self.op, REDUCE_OPS[self.op].combine(self.value, x))
        x = x - self.excess
        value = self.value + x
        excess = (value - self.value) - x
        excess = jnp.where(jnp.isfinite(excess), excess, 0)  # of infinite sums: NaN
        return Running(self.op, value, excess)

    def tree_flatten(self):
        return (self.value, self.excess), self.op

    @classmethod
    def tree_unflatten(cls, op, children):
        return cls(op, *children)
