"""What some of the groups give to a reduction, before all are combined."""

import jax.numpy as jnp

from drjax._extrema import highest, lowest
from drjax._primitives import LOW_PRECISION


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
