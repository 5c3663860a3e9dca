"""How the result of a reduction is communicated: `wire=`, `result=` and `secure=`.

Input: the arguments `wire=`, `result=`, `secure=` and `min_groups=` of a reduction.
Output: parameters of its primitive; and sums of the leaves of a tree, of which encoded
ones are one equation.

Invariants: options change how devices communicate, not what a program computes, but for
the rounding of an encoding. Sharp edge: leaves of one equation are copied, in each
group, into one array; on a mesh with other axes than the partition's, over which leaves
may be sharded, and for sharded results, each leaf has an equation of its own.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from drjax._api.participation import Participation
from drjax._api.resolve import BlockParams, map_leaves
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, GlobalArray, PartitionedArray
from drjax._context import current_scope, current_traits
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._partition import integer_of
from drjax._plan.wire import Wire
from drjax._sharding.layout import make_layout, other_axes

WireLike = str | tuple[str, int] | Wire | None


def collective_options(
    block: str, wire: WireLike, result: str | None
) -> dict[str, Any]:
    """Check `wire=` and `result=`, and return the parameters of the primitive.

    They are `{"wire": Wire, "sharded": True}`, without the keys of options that are
    None.
    """
    options: dict[str, Any] = {}
    if result is not None:
        if result != "sharded":
            raise DrjaxValueError(
                f'drjax.{block} needs result= as "sharded" or None, got {result!r}.'
            )
        options["sharded"] = True
        current_traits().shards = True
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


def secure_options(
    secure: bool,
    min_groups: int | None,
    part: Participation | None,
    n: int,
    wire: WireLike = None,
    bound: float | None = None,
) -> dict[str, Any]:
    """Check `secure=` and its options, and return the parameters of the primitive.

    They are `{"secure": the least number of groups}`, with `bound` if it is set; {} if
    the sum is not secure. A secure sum may not have a `wire`, nor a `where=` or `by=`,
    of which `part` comes.
    """
    if secure is not True and secure is not False:
        raise DrjaxTypeError(
            f"drjax.reduce_sum needs secure= as True or False, got {secure!r}."
        )
    if not secure:
        if min_groups is not None:
            raise DrjaxValueError(
                "drjax.reduce_sum takes min_groups= with secure=True only. To drop "
                "groups that fail, give on_error and min_groups to the engine."
            )
        if bound is not None:
            raise DrjaxValueError(
                "drjax.reduce_sum takes bound= with secure=True only: it is the range "
                "of the integers that are masked. Leave it out."
            )
        return {}
    if current_scope().mapped:
        raise DrjaxValueError(
            "drjax.reduce_sum takes no secure=True inside a mapped function or over "
            "inner levels: all of that sum is the work of one outer group, whose "
            "process sees its inner groups. Sum over the outermost level."
        )
    if wire is not None:
        raise DrjaxValueError(
            "drjax.reduce_sum takes no wire= with secure=True: a secure sum adds "
            "masked integers of 64 bits, which cannot be encoded. Leave out wire=."
        )
    if part is not None:
        # The groups that are left out send zeros: a sum of one is that group's slice.
        raise DrjaxValueError(
            "drjax.reduce_sum takes no where= or by= with secure=True: a sum over some "
            "of the groups may be of fewer than min_groups, which no engine can check. "
            "Sum over all groups, with zeros in those to leave out."
        )
    least = 2 if min_groups is None else integer_of(min_groups)
    if least is None:
        raise DrjaxTypeError(
            "drjax.reduce_sum needs min_groups= as an integer, got "
            f"{type(min_groups).__name__}: {min_groups!r}."
        )
    if not 2 <= least <= n:
        raise DrjaxValueError(
            f"drjax.reduce_sum needs min_groups= from 2 to {n}, the number of groups, "
            f"got {least}. The sum of one group is its slice."
        )
    if bound is None:
        return {"secure": least}
    if not isinstance(bound, int | float) or isinstance(bound, bool):
        raise DrjaxTypeError(
            "drjax.reduce_sum needs bound= as a Python number, got "
            f"{type(bound).__name__}: {bound!r}."
        )
    if not 0 < bound < math.inf:
        raise DrjaxValueError(
            f"drjax.reduce_sum needs bound= as a positive number, got {bound}: the "
            "largest magnitude of a number of one group."
        )
    return {"secure": least, "bound": float(bound)}


def check_encodable(block: str, leaf: Array, options: dict[str, Any]) -> None:
    """Raise `DrjaxTypeError` if `wire=` is set and an array has no real floats.

    The array is in the dtype in which it is reduced.
    """
    if "wire" in options and not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise DrjaxTypeError(
            f"drjax.{block} with wire= needs leaves of real floats, got {leaf.dtype}."
        )


def bind_sums(
    primitive: Primitive,
    leaves: Sequence[PartitionedArray],
    options: dict[str, Any],
    params: BlockParams,
) -> list[GlobalArray]:
    """Bind a sum or mean of several leaves: one equation for each, or one for all.

    It is one equation for all leaves if there are several, `options` has `wire` but not
    `sharded`, and the mesh has no Auto axis of more than one device but the partition's
    (leaves may be sharded over such an axis). Then each group's slices are flattened,
    cast to float32, padded with zeros to multiples of `wire.block` numbers, and
    concatenated; the result is split again, to the dtypes of the leaves.
    """
    separate = "sharded" in options or bool(other_axes(make_layout(**params)))
    if "wire" not in options or len(leaves) < 2 or separate:
        return [primitive.bind(leaf, **options, **params) for leaf in leaves]
    block = options["wire"].block

    def concatenated(*slices: Array) -> Array:
        # Whole blocks: numbers of different leaves may differ in magnitude.
        flat = [jnp.ravel(x).astype(jnp.float32) for x in slices]
        return jnp.concatenate([jnp.pad(x, (0, -x.size % block)) for x in flat])

    total = primitive.bind(
        map_leaves("wire", concatenated, *leaves, **params), **options, **params
    )
    results, start = [], 0
    for leaf in leaves:
        shape = leaf.shape[1:]
        size = math.prod(shape)
        part = total[start : start + size].reshape(shape).astype(leaf.dtype)
        results.append(part)
        start += size + -size % block
    return results
