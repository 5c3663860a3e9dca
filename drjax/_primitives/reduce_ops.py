"""What some of the groups give to a reduction, before all are combined."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from drjax._primitives.collectives import LOW_PRECISION
from drjax._primitives.extrema import highest, lowest

# A running sum has a second accumulator for what rounding loses where that is cheap,
# for so few numbers, or needed: s steps lose at most s 2^-24 of a plain sum, and of
# equal numbers often a sixth of that. `jnp.sum` loses less, as it adds up in a tree.
FEW_NUMBERS = 1024
MANY_STEPS = 4096


def accumulator(dtype):
    """The dtype in which values are added up: 16-bit floats in float32."""
    return jnp.float32 if dtype in LOW_PRECISION else dtype


def identity(op: str, dtype):
    """What changes nothing in a sum, a maximum or a minimum."""
    if op in ("sum", "mean"):
        return 0
    return lowest(dtype) if op == "max" else highest(dtype)


def partial(op: str, rows):
    """The rows' extremum, or their sum (of which a mean is made), over axis 0."""
    if op in ("max", "min"):
        return getattr(jnp, op)(rows, axis=0)
    return jnp.sum(rows, axis=0, dtype=accumulator(rows.dtype))


def is_compensated(reduce, steps: int) -> bool:
    """Whether a running sum of so many steps needs its second accumulator."""
    source = reduce.source
    if reduce.op not in ("sum", "mean"):
        return False
    if accumulator(source.dtype) not in (jnp.float32, jnp.complex64):
        return False
    size = math.prod(source.shape)  # unknown with symbolic dimensions
    return steps > MANY_STEPS or (isinstance(size, int) and size <= FEW_NUMBERS)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Running:
    """A running sum, maximum or minimum.

    Attributes:
      op: Which.
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
        if self.op in ("max", "min"):
            return Running(self.op, getattr(jnp, f"{self.op}imum")(self.value, x))
        if self.excess is None:
            return Running(self.op, self.value + x)
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
