"""Which groups take part in a reduction, and in which segment of its result.

Input: the arguments `where=`, `by=`, `num=` and `default=` of a reduction. Output: one
mask for all leaves, partitioned bool `[n]`, or `[n, num]` with segments; and leaves in
which the identity of the reduction replaces the slices that the mask leaves out.

A reduction by segment reduces, of each group, an array `[num, *s]` that holds the slice
at the position of the group's segment, and the identity elsewhere. So it is one
all-reduce, whose transpose looks up the cotangent of the group's segment.

Invariants: infinities and NaNs of groups that are left out reach neither values nor
derivatives; the transpose of `map_fn` sees to the latter.
Sharp edge: the work of a group grows with `num`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from drjax import _compat
from drjax._api.resolve import group_axis_size, map_leaves
from drjax._api.validate import as_array
from drjax._context import current_scope
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._primitives.select_slice import as_int32

Mask = ArrayLike | Sequence[bool] | None
Segments = ArrayLike | Sequence[int] | None


def participation_mask(block: str, where, by, num, params: dict[str, Any]):
    """Check `where=`, `by=` and `num=`, and compute the mask of a reduction.

    Args:
      block: The name of the reduction, for errors.
      where: The groups that take part, bool `[n]`, or None: all.
      by: The segment of each group, integers `[n]`, as for `jax.ops.segment_sum`; or
        None: no segments. Groups whose segment is not in 0 to num - 1 do not take part.
      num: The number of segments, or None.
      params: `{"partition": partition, "mesh": mesh}`; mesh None: it runs locally.

    Returns:
      None if all groups take part, without segments. Else a partitioned bool array:
      `[n]`, True for groups that take part; or with segments `[n, num]`, True for the
      segment of each group that takes part, so at most once for each group.

    Raises:
      DrjaxTypeError: `where` is no array of bools, `by` no array of integers, `num` no
        Python integer, or only one of `by` and `num` is passed.
      DrjaxValueError: `where` or `by` is not `[n]`, or `num` is not positive.
    """
    mask = None if where is None else check_where(block, where, params)
    if by is None and num is None:
        return mask
    _leave_groups_out()
    num = _check_num(block, by, num)
    by = _check_segments(block, by, params)

    def segment_of(by, *taken):
        hit = jnp.arange(num, dtype=jnp.int32) == as_int32(by, -1, num)
        return hit & taken[0] if taken else hit

    taken = () if mask is None else (mask,)
    return map_leaves(segment_of, by, *taken, **params)


def check_where(block: str, where, params: dict[str, Any]) -> jax.Array:
    """Check the argument `where=` of a reduction, the mask of groups that take part.

    Args:
      block: The name of the reduction, for errors.
      where: The argument: an array, or what `jnp.asarray` accepts.
      params: `{"partition": partition, "mesh": mesh}`; mesh None: it runs locally.

    Returns:
      The mask as a JAX array, bool `[n]`.

    Raises:
      DrjaxTypeError: It is not an array of bools.
      DrjaxValueError: Its shape is not `[n]`.
    """
    _leave_groups_out()
    need = f"drjax.{block} needs where= as bool [{group_axis_size(params)}]"
    fix = "Write for instance where=counts > 0."
    return _for_each_group(where, jnp.bool_, need, fix, "one for", params)


def _leave_groups_out() -> None:
    """Note that the current program leaves groups out, for transposes of their work."""
    left_out = current_scope().left_out
    if left_out is not None:
        left_out.some = True


def _check_num(block: str, by, num) -> int:
    """Check the argument `num=`, the number of segments, and return it as an `int`.

    It is called if `by=` or `num=` is passed; both have to be.

    Args:
      block: The name of the reduction, for errors.
      by: The argument `by=`, or None.
      num: The argument `num=`, or None.

    Raises:
      DrjaxTypeError: One of the two is missing, or `num` is not an integer.
      DrjaxValueError: `num` is not positive, or does not fit int32.
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


def _check_segments(block: str, by, params: dict[str, Any]) -> jax.Array:
    """Check the argument `by=` of a reduction, and return it as a JAX array.

    Args:
      block: The name of the reduction, for errors.
      by: The argument: an array, or what `jnp.asarray` accepts.
      params: `{"partition": partition, "mesh": mesh}`; mesh None: it runs locally.

    Raises:
      DrjaxTypeError: It is not an array of integers.
      DrjaxValueError: Its shape is not `[n]`.
    """
    need = f"drjax.{block} needs by= as [{group_axis_size(params)}] integers"
    fix = (
        "Write for instance by=ages.astype(int) // 10. To leave groups out, use where=."
    )
    return _for_each_group(by, jnp.integer, need, fix, "the segment of", params)


def _for_each_group(argument, kind, need: str, fix: str, each: str, params):
    """Convert an argument with one value for each group to a JAX array, and check it.

    Args:
      argument: An array, or what `jnp.asarray` may accept.
      kind: The dtype of its values, or the supertype of their dtypes.
      need: The beginning of each error: what is needed.
      fix: The end of the error about another dtype.
      each: The text before "each group of ..." in the error about the shape, such as
        "one for" or "the segment of".
      params: `{"partition": partition, "mesh": mesh}`; mesh None: it runs locally.

    Returns:
      The array, `[n]`.

    Raises:
      DrjaxTypeError: It is not an array of such a dtype.
      DrjaxValueError: Its shape is not `[n]`.
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


def keep_slices(mask, leaf, fill, **params):
    """Replace slices that take no part in a reduction by a number without effect on it.

    With segments, each group gets an array with one position for each segment: its
    slice is at the position of its segment, and the number everywhere else.

    Args:
      mask: The partitioned mask that `participation_mask` returns: bool `[n]`, or with
        segments `[n, num]`, True where a slice takes part; None: `leaf` is returned.
      leaf: A partitioned array, `[n, *s]`.
      fill: The number, a scalar: the identity of the reduction, as 0 of a sum.
      **params: The keywords `partition` and `mesh`; mesh None: it runs locally.

    Returns:
      A partitioned array in the dtype of `leaf`: `[n, *s]`, or with segments
      `[n, num, *s]`.
    """
    if mask is None:
        return leaf

    def keep_or_fill(mask, slice_):
        return place(mask, slice_, fill)

    return map_leaves(keep_or_fill, mask, leaf, **params)


def place(mask, slice_, fill):
    """Keep one group's slice where its mask is True, and fill in a number elsewhere.

    Args:
      mask: The group's mask, a bool `[]`, or with segments `[num]`.
      slice_: The group's slice, `[*s]`.
      fill: The number, a scalar.

    Returns:
      The slice, or an array filled with the number: `[*s]`; with segments `[num, *s]`,
      one of the two for each segment. In the dtype of `slice_`.
    """
    choose = lambda taken: jnp.where(taken, slice_, jnp.asarray(fill, slice_.dtype))
    return jax.vmap(choose)(mask) if mask.ndim else choose(mask)


# ---------------------------------------------------------------------------------
# The result if no group takes part


# Each can be cast to those after it.
_KINDS_OF_NUMBERS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def check_default(block: str, default) -> jax.Array | None:
    """Check the argument `default=` of a reduction, its result over no group.

    Args:
      block: The name of the reduction, for errors.
      default: The argument: a number, a scalar array, or None.

    Returns:
      A JAX array `[]`; None for None.

    Raises:
      DrjaxTypeError: It is not a number.
      DrjaxValueError: It is an array with dimensions.
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


def or_default(block: str, value, empty, default):
    """Replace a reduction over no group by the default.

    Args:
      block: The name of the reduction, for errors.
      value: The result of the reduction, `[*s]`, or with segments `[num, *s]`. It must
        have finite derivatives where `empty` is True.
      empty: True where no group takes part, a bool array; its shape is a leading part
        of that of `value`. None: nothing is replaced, as there is no such element.
      default: The default, a JAX array `[]`, as `check_default` returns it. None:
        nothing is replaced, as the caller has passed no default.

    Returns:
      An array of the shape and dtype of `value`, with `default` where `empty` is True;
      `value` itself if nothing is replaced.

    Raises:
      DrjaxTypeError: The default cannot be cast to the dtype of `value`: it is a float
        and the result an integer, for instance.
      DrjaxValueError: The default is beyond the limits of an integer dtype.
    """
    if default is None:
        return value
    _check_fits(block, default, value.dtype)
    if empty is None:
        return value
    empty = lax.expand_dims(empty, range(empty.ndim, value.ndim))
    return jnp.where(empty, default.astype(value.dtype), value)


def _check_fits(block: str, default, dtype) -> None:
    """Raise an error if a default cannot be cast to the dtype of a result.

    Args:
      block: The name of the reduction, for errors.
      default: The default, a JAX array `[]`.
      dtype: The dtype of the result.

    Raises:
      DrjaxTypeError: The default is a float and the result an integer, for instance.
      DrjaxValueError: The default is known, and beyond the limits of an integer dtype.
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


def _rank(dtype) -> int:
    """The position of a dtype's kind in bool < integer < float < complex, from 0.

    A default may be cast to the dtype of the result only if its rank is not higher.
    """
    return [jnp.issubdtype(dtype, kind) for kind in _KINDS_OF_NUMBERS].index(True)
