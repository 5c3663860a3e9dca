"""Which groups take part in a reduction, and in which segment of its result.

Input: the arguments `where=`, `by=`, `num=` and `default=` of a reduction. Output: the
`Participation` of the groups, for all leaves; and leaves in which the identity of the
reduction replaces the slices of groups that take no part.

A reduction by segment reduces, of each group, an array `[num, *s]` that holds the slice
at the position of the group's segment, and the identity elsewhere. So it is one
all-reduce, whose transpose looks up the cotangent of the group's segment. What runs it
on a device does the work of the slices alone (`_primitives/segments.py`).

Invariants: infinities and NaNs of groups that are left out reach neither values nor
derivatives; the transpose of `map_fn` sees to the latter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from drjax import _compat
from drjax._api.resolve import BlockParams, group_axis_size, map_leaves
from drjax._api.validate import as_array
from drjax._compat.types import Array, GlobalArray, PartitionedArray
from drjax._context import current_traits
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._primitives.segments import place_in_segment
from drjax._primitives.select_slice import as_int32

Mask = ArrayLike | Sequence[bool] | None
Segments = ArrayLike | Sequence[int] | None


@dataclass(frozen=True)
class Participation:
    """Which groups take part in a reduction, or in which of its segments.

    Attributes:
      of_groups: bool `[n]`, True for groups that take part. With segments int32 `[n]`,
        the segment of each group, and `num` for one that takes no part.
      num: The number of segments; None: without segments.
    """

    of_groups: PartitionedArray
    num: int | None = None

    def takes(self, own: Array) -> Array:
        """Whether a group takes part, of its element of `of_groups`: bool `[]`."""
        return own if self.num is None else own < self.num

    def place(self, own: Array, slice_: Array, fill: ArrayLike) -> Array:
        """Keep one group's slice if it takes part, and fill in a number elsewhere.

        `own` is its element of `of_groups`. The result is `[*s]`; or with segments
        `[num, *s]`.
        """
        if self.num is None:
            return jnp.where(own, slice_, jnp.asarray(fill, slice_.dtype))
        return place_in_segment(own, slice_, self.num, fill)


def participation(
    block: str, where: Mask, by: Segments, num: int | None, params: BlockParams
) -> Participation | None:
    """Check `where=`, `by=` and `num=` of a reduction; None if all groups take part.

    Groups whose segment is not in 0 to num - 1 do not take part.
    """
    mask = None if where is None else check_where(block, where, params)
    if by is None and num is None:
        return None if mask is None else Participation(mask)
    _leave_groups_out()
    segments = _check_num(block, by, num)
    by = _check_segments(block, by, params)

    def segment_of(by: Array, *taken: Array) -> Array:
        own = as_int32(by, -1, segments)
        inside = (own >= 0) & (own < segments)
        inside = inside & taken[0] if taken else inside
        return jnp.where(inside, own, jnp.int32(segments))

    taken = () if mask is None else (mask,)
    return Participation(map_leaves("by", segment_of, by, *taken, **params), segments)


def check_where(block: str, where: Mask, params: BlockParams) -> PartitionedArray:
    """Check the argument `where=` of a reduction; return it as an array, bool `[n]`."""
    _leave_groups_out()
    need = f"drjax.{block} needs where= as bool [{group_axis_size(params)}]"
    fix = "Write for instance where=counts > 0."
    return _for_each_group(where, jnp.bool_, need, fix, "one for", params)


def _leave_groups_out() -> None:
    """Note that the current program leaves groups out, for transposes of their work."""
    current_traits().leaves_out = True


def _check_num(block: str, by: Segments, num: int | None) -> int:
    """Check the argument `num=`, the number of segments, and return it as an `int`.

    It is called if `by=` or `num=` is passed; both have to be.
    """
    if by is None:
        raise DrjaxTypeError(
            f"drjax.{block} got num={num!r} without by=. Pass the segment of each "
            "group as by=, integers [n]."
        )
    if not isinstance(num, int | np.integer) or isinstance(num, bool):
        got = "none" if num is None else f"{type(num).__name__}: {num!r}"
        raise DrjaxTypeError(
            f"drjax.{block} with by= needs the number of segments as num=, a Python "
            f"integer, got {got}. The shape of the result depends on it."
        )
    if not 0 < num < 2**31:
        raise DrjaxValueError(
            f"drjax.{block} needs a positive number of segments, got num={num}."
        )
    return int(num)


def _check_segments(block: str, by: Segments, params: BlockParams) -> PartitionedArray:
    """Check the argument `by=` of a reduction, and return it as a JAX array."""
    need = f"drjax.{block} needs by= as [{group_axis_size(params)}] integers"
    fix = (
        "Write for instance by=ages.astype(int) // 10. To leave groups out, use where=."
    )
    return _for_each_group(by, jnp.integer, need, fix, "the segment of", params)


def _for_each_group(
    argument: object,
    kind: DTypeLike,
    need: str,
    fix: str,
    each: str,
    params: BlockParams,
) -> PartitionedArray:
    """Convert an argument with a value for each group to an array `[n]`, and check it.

    `kind` is the dtype of its values, or the supertype of their dtypes. `need` begins
    each error, `fix` ends that about another dtype, and `each` is the text before "each
    group of ..." in that about the shape, such as "one for" or "the segment of".
    """
    try:
        values = jnp.asarray(argument)
    except (TypeError, ValueError, OverflowError):
        raise DrjaxTypeError(
            f"{need}, got {type(argument).__name__}: {argument!r}."
        ) from None
    if not jnp.issubdtype(values.dtype, kind):
        raise DrjaxTypeError(f"{need}, got dtype {values.dtype}. {fix}")
    if values.shape != (group_axis_size(params),):
        raise DrjaxValueError(
            f"{need}, {each} each group of {params['partition']}, got shape "
            f"{values.shape}."
        )
    return values


def keep_slices(
    block: str,
    part: Participation | None,
    leaf: PartitionedArray,
    fill: ArrayLike,
    **params: Unpack[BlockParams],
) -> PartitionedArray:
    """Replace slices that take no part in a reduction by a number without effect on it.

    The number is the identity of the reduction, as 0 of a sum. With segments, each
    group gets an array with one position for each segment, `[num, *s]`: its slice is at
    the position of its segment, and the number everywhere else.
    """
    if part is None:
        return leaf
    keep = lambda own, slice_: part.place(own, slice_, fill)
    return map_leaves(block, keep, part.of_groups, leaf, **params)


# ---------------------------------------------------------------------------------
# The result if no group takes part


# Each can be cast to those after it.
_KINDS_OF_NUMBERS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def check_default(block: str, default: ArrayLike | None) -> GlobalArray | None:
    """Check the argument `default=` of a reduction, its result over no group.

    It is a number or a scalar array, and is returned as an array `[]`.
    """
    if default is None:
        return None
    need = f"drjax.{block} needs default= as one number for all leaves"
    if isinstance(default, list | tuple | dict | str):
        raise DrjaxTypeError(f"{need}, got {type(default).__name__}: {default!r}.")
    default = as_array(block, "default", (), default, f"{need}.")
    if not any(jnp.issubdtype(default.dtype, kind) for kind in _KINDS_OF_NUMBERS):
        raise DrjaxTypeError(f"{need}, got dtype {default.dtype}.")
    if default.ndim:
        raise DrjaxValueError(f"{need}, got shape {default.shape}.")
    return default


def or_default(
    block: str, value: Array, empty: Array | None, default: Array | None
) -> Array:
    """Replace a reduction over no group by the default that `check_default` returned.

    `value` is `[*s]`, or with segments `[num, *s]`. `empty` says where no group takes
    part; its shape is a leading part of that of `value`; None: there is no such
    element. There, `value` must have finite derivatives.
    """
    if default is None:
        return value
    _check_fits(block, default, value.dtype)
    if empty is None:
        return value
    empty = lax.expand_dims(empty, range(empty.ndim, value.ndim))
    return jnp.where(empty, default.astype(value.dtype), value)


def _check_fits(block: str, default: Array, dtype: np.dtype) -> None:
    """Raise an error if a default cannot be cast to the dtype of a result.

    A float does not fit an integer dtype, for instance, nor does an integer beyond its
    limits, if the default is known: under a trace its value is not checked.
    """
    fix = "Pass a default that all leaves can hold, or cast the leaf."
    if _rank(default.dtype) > _rank(dtype):
        raise DrjaxTypeError(
            f"drjax.{block} got default= of dtype {default.dtype}, but a leaf whose "
            f"result has dtype {dtype}. {fix}"
        )
    if jnp.issubdtype(dtype, jnp.integer) and _compat.is_concrete(default):
        limits = jnp.iinfo(dtype)
        if not limits.min <= int(default) <= limits.max:
            raise DrjaxValueError(
                f"drjax.{block} got default={int(default)}, but a leaf whose result "
                f"has dtype {dtype}. {fix}"
            )


def _rank(dtype: np.dtype) -> int:
    """Return the place of a dtype's kind in bool < integer < float < complex, from 0.

    A default may be cast to the dtype of the result only if its rank is not higher.
    """
    return [jnp.issubdtype(dtype, kind) for kind in _KINDS_OF_NUMBERS].index(True)
