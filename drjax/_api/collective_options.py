"""How the result of a reduction is communicated: the options `wire=` and `result=`.

Input: the arguments `wire=` and `result=` of a reduction. Output: parameters of its
primitive; and sums of the leaves of a tree, of which encoded ones share one message.

Invariants: options change how devices communicate, not what a program computes, but for
the rounding of an encoding. Sharp edge: leaves that share a message are copied, in each
group, into one array; on a mesh with other axes than the partition's, over which leaves
may be sharded, and for sharded results, each leaf has a message of its own.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from drjax._api.resolve import map_leaves
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._sharding.layout import make_layout, other_axes
from drjax.plan import Wire

WireLike = str | tuple[str, int] | Wire | None


def collective_options(block: str, wire: WireLike, result: str | None) -> dict:
    """Check `wire=` and `result=`, and return the parameters of the primitive.

    Args:
      block: The name of the reduction, for errors.
      wire: How sums are encoded between devices: a dtype, a pair of dtype and block
        size, or a `drjax.plan.Wire`; None: not.
      result: "sharded", or None.

    Returns:
      A dict with `wire`, a `Wire`, and `sharded`, True; without those that are not set.

    Raises:
      DrjaxTypeError, DrjaxValueError: An option does not fit.
    """
    options: dict[str, Any] = {}
    if result is not None:
        if result != "sharded":
            raise DrjaxValueError(
                f'drjax.{block} needs result= as "sharded" or None, got {result!r}.'
            )
        options["sharded"] = True
    if isinstance(wire, str):
        wire = Wire(wire)
    elif isinstance(wire, tuple) and len(wire) == 2 and isinstance(wire[0], str):
        wire = Wire(*wire)
    if not isinstance(wire, Wire | None):
        raise DrjaxTypeError(
            f'drjax.{block} needs wire= as a dtype such as "int8", or a pair of dtype '
            f"and block size, got {type(wire).__name__}: {wire!r}."
        )
    return options if wire is None else options | {"wire": wire}


def check_encodable(block: str, leaf, options: dict[str, Any]) -> None:
    """Raise `DrjaxTypeError` if `wire=` is set and an array has no real floats.

    Args:
      block: The name of the reduction, for the error.
      leaf: The array, in the dtype in which it is reduced.
      options: What `collective_options` returns.
    """
    if "wire" in options and not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise DrjaxTypeError(
            f"drjax.{block} with wire= needs leaves of real floats, got {leaf.dtype}."
        )


def bind_sums(
    primitive, leaves: Sequence[Any], options: dict[str, Any], params: dict[str, Any]
) -> list[jax.Array]:
    """Bind a sum or mean for several leaves; encoded ones share one message.

    Args:
      primitive: `reduce_sum_p` or `reduce_mean_p`.
      leaves: Partitioned arrays `[n, *s]`.
      options: What `collective_options` returns.
      params: The parameters `partition` and `mesh`, as `resolve` returns them.

    Returns:
      The reductions, global arrays `[*s]` in the dtypes of the leaves.
    """
    separate = "sharded" in options or bool(other_axes(make_layout(**params)))
    if "wire" not in options or len(leaves) < 2 or separate:
        return [primitive.bind(leaf, **options, **params) for leaf in leaves]
    block = options["wire"].block

    def concatenated(*slices):
        # Whole blocks: numbers of different leaves may differ in magnitude.
        flat = [jnp.ravel(x).astype(jnp.float32) for x in slices]
        return jnp.concatenate([jnp.pad(x, (0, -x.size % block)) for x in flat])

    total = primitive.bind(
        map_leaves(concatenated, *leaves, **params), **options, **params
    )
    results, start = [], 0
    for leaf in leaves:
        shape = leaf.shape[1:]
        size = math.prod(shape)
        part = total[start : start + size].reshape(shape).astype(leaf.dtype)
        results.append(part)
        start += size + -size % block
    return results
