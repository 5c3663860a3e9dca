"""Unbatching rules: equations that keep groups apart, as equations of one group.

Input: an equation and, for each operand, its *group axis* or None (not known to be
partitioned). Output: an `UnbatchedEquation`, or None if the equation mixes groups. A
rule is the inverse of a batching rule: batching u over the group axis gives the
equation again.

The group axis is 0 in users' programs, and another one after a vmap or in what a scan
stacks. With `x[i]` the slice of group i along the group axis, the rules rest on

    pointwise       f(x, y)[i] = f(x[i], y[i])
    other axes      reduce(x, a)[i] = reduce(x[i], a'), where a lacks the group axis
                    and a' is a with it removed; so cumsum, sort, split, rev, fft, ...
    layout          transpose, reshape, broadcast_in_dim: the group axis only moves
    batch           dot_general(x, y)[i] = dot_general(x[i], y[i]) for a batch dimension
    free dimension  dot_general(x, y)[i] = dot_general(x[i], y) for a dimension that is
                    neither batched nor contracted
    windows         of size one along the group axis: each window has one group

Invariants: a rule is exact, not an approximation, and reads parameters and shapes only.
If all operands are None there is no rule to apply. Sharp edges: a primitive without a
rule is refused, so a missing rule costs a plan, while a wrong one costs a result. A
contraction of the group axis is communication: `implicit_communication.py`.

To add a rule, write `f(eqn, axes) -> UnbatchedEquation | None`, and add it to
`UNBATCHING_RULES` at the end. `rematerialize_loops.py` takes the primitive to be cheap,
unless its name is in `COSTLY` there.
"""

import math
from collections.abc import Callable

import numpy as np

from drjax._compat.types import Eqn, Params
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._planner.unbatching import indexing
from drjax._planner.unbatching.core import (
    Axes,
    AxisRule,
    UnbatchedEquation,
    UnbatchingRule,
    drop,
    elementwise,
    unary,
    without,
)


def unbatch(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Derive the equation of one group, by the group axis of each operand.

    None if the equation mixes groups, its primitive has no rule, or no operand is
    partitioned.
    """
    rule = UNBATCHING_RULES.get(eqn.primitive.name)
    if rule is None or all(axis is None for axis in axes):
        return None
    return rule(eqn, axes)


def unbatch_single_group(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch any equation of a partition of one group, where nothing can be mixed.

    The group axis of a result may be any of its axes of size one, as moving such an
    axis moves no element. None if a result has none, for callbacks, and for equations
    with effects.
    """
    shapes = [var.aval.shape for var in eqn.outvars]
    # Python would see the unit axis, and effects may not be repeated or moved.
    observable = "callback" in eqn.primitive.name or bool(eqn.effects)
    if observable or not all(1 in shape for shape in shapes):
        return None
    outs = tuple(shape.index(1) for shape in shapes)
    return UnbatchedEquation(tuple(axes), outs, dict(eqn.params), keeps_unit_axis=True)


def unbatching_candidates(eqn: Eqn, n: int) -> list[UnbatchedEquation]:
    """Unbatch an equation for each way in which one operand could be partitioned.

    That is, along an axis of size n, and as far as the primitive's rule applies if this
    operand alone is known to be partitioned; `in_axes` has the group axes that other
    operands then need. For inference: if there is such a way, an operand without a kind
    yet may become partitioned later, and must not be made global before.
    """
    if eqn.primitive.name not in UNBATCHING_RULES:
        return []
    candidates = []
    # One operand at a time: a rule infers the axes of the others from it.
    for i, var in enumerate(eqn.invars):
        for axis, size in enumerate(var.aval.shape):
            if size == n:
                axes: list[int | None] = [None] * len(eqn.invars)
                axes[i] = axis
                unbatched = unbatch(eqn, axes)
                if unbatched is not None:
                    candidates.append(unbatched)
    return candidates


# Rules with `axis` are an `AxisRule`, for `unary`. Rules with `axes` are an
# `UnbatchingRule`. None: the equation mixes groups, or their axes do not fit together.


def _broadcast_in_dim(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
    """Unbatch `broadcast_in_dim`: each group broadcasts its slice."""
    dims, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    out = dims[axis]
    if shape[out] != eqn.invars[0].aval.shape[axis]:
        return None  # one group, repeated to look like several
    dims = without(out, drop(axis, dims))
    params = {"shape": drop(out, shape), "broadcast_dimensions": dims}
    return out, {**params, "sharding": None}


def _reshape(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
    """Unbatch `reshape`: each group reshapes its slice."""
    old, new = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    if eqn.params.get("dimensions") is not None:
        return None
    # The group axis survives a reshape where as many elements precede it as before:
    # then row-major order puts the same elements into each slice.
    before = math.prod(old[:axis])
    for out, size in enumerate(new):
        if size == old[axis] and math.prod(new[:out]) == before:
            return out, {"new_sizes": drop(out, new), "sharding": None}
    return None


def _over(param: str, removed: bool = True) -> AxisRule:
    """Build the rule of a primitive with one operand that works on several dimensions.

    These are in the parameter `param`. `removed` says whether the result lacks them, as
    that of a reduction does.
    """

    def rule_of_axis(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
        dims = eqn.params[param]
        if axis in dims:
            return None
        out = axis - sum(d < axis for d in dims) if removed else axis
        return out, {param: without(axis, dims)}

    return rule_of_axis


def _along(param: str) -> AxisRule:
    """Build the rule of a primitive that works along the dimension in `param`."""

    def rule_of_axis(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
        if eqn.params[param] == axis:
            return None
        return axis, {param: without(axis, (eqn.params[param],))[0]}

    return rule_of_axis


def _transpose(eqn: Eqn, axis: int) -> tuple[int, Params]:
    """Unbatch `transpose`: each group permutes its other dimensions."""
    order = eqn.params["permutation"]
    out = order.index(axis)
    return out, {"permutation": without(axis, drop(out, order))}


def _slice(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
    """Unbatch `slice`: each group slices its other dimensions."""
    p, n = eqn.params, eqn.invars[0].aval.shape[axis]
    strides = p["strides"]
    # Leaving out, repeating or reordering groups is communication.
    whole = p["start_indices"][axis] == 0 and p["limit_indices"][axis] == n
    if not whole or (strides is not None and strides[axis] != 1):
        return None
    return axis, {
        "start_indices": drop(axis, p["start_indices"]),
        "limit_indices": drop(axis, p["limit_indices"]),
        "strides": None if strides is None else drop(axis, strides),
    }


def _tile(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
    """Unbatch `tile`: each group repeats its slice along other dimensions."""
    reps = eqn.params["reps"]
    # Copies of the groups would not be the groups.
    if reps[axis] != 1:
        return None
    return axis, {"reps": drop(axis, reps)}


def _bitcast(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
    """Unbatch `bitcast_convert_type`, whose result has the same group axis.

    It may add or remove a last dimension, the parts of an element.
    """
    return (axis, {}) if axis < eqn.outvars[0].aval.ndim else None


def _batch_of(dims: int) -> UnbatchingRule:
    """Build the rule of work on the last `dims` dimensions, such as of matrices.

    The other dimensions are a batch, along one of which the groups may lie, the same
    one for all operands.
    """

    def rule(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
        known = {axis for axis in axes if axis is not None}
        if len(known) != 1:
            return None
        (axis,) = known
        if axis >= min(var.aval.ndim for var in eqn.invars) - dims:
            return None
        return UnbatchedEquation(
            (axis,) * len(axes), (axis,) * len(eqn.outvars), dict(eqn.params)
        )

    return rule


def _random_wrap(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
    """Unbatch `random_wrap`: each group makes random keys of its raw data."""
    # The last dimension holds the words of one key.
    return None if axis == eqn.invars[0].aval.ndim - 1 else (axis, {})


def _pad(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `pad`: each group pads its slice along other dimensions."""
    axis, config = axes[0], eqn.params["padding_config"]
    # Padding along the group axis would add groups; the padding value is a scalar.
    if axis is None or axes[1] is not None or tuple(config[axis]) != (0, 0, 0):
        return None
    params = {**eqn.params, "padding_config": drop(axis, config)}
    return UnbatchedEquation((axis, None), (axis,), params)


def _along_dimension(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `sort` or `concatenate`: each group works along another dimension."""
    unbatched = elementwise(eqn, axes)
    if unbatched is None or unbatched.out_axes[0] == eqn.params["dimension"]:
        return None
    dimension = without(unbatched.out_axes[0], (eqn.params["dimension"],))[0]
    params = {**eqn.params, "dimension": dimension}
    return UnbatchedEquation(unbatched.in_axes, unbatched.out_axes, params)


def _dot_general(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `dot_general` along a batch dimension, or a free one of one operand."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    left, right = axes
    if left is not None and left in lb:
        position = lb.index(left)
    elif right is not None and right in rb:
        position = rb.index(right)
    else:
        return _dot_free(eqn, left, right)
    # Both operands lie along the same batch dimension, or one of them along another.
    if left not in (None, lb[position]) or right not in (None, rb[position]):
        return None
    left, right = lb[position], rb[position]  # a batch dimension has both operands
    dims = (
        (without(left, lc), without(right, rc)),
        (without(left, drop(position, lb)), without(right, drop(position, rb))),
    )
    params = {**eqn.params, "dimension_numbers": dims}
    return UnbatchedEquation((left, right), (position,), params)


def _dot_free(
    eqn: Eqn, left: int | None, right: int | None
) -> UnbatchedEquation | None:
    """Unbatch a `dot_general` of which one operand enters every group whole.

    `left` and `right` are the group axes of its operands; one of them must be None.
    """
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    # Both partitioned along free dimensions: a product of all pairs of groups.
    if (left is None) == (right is None) or left in lc or right in rc:
        return None
    # Dimensions of the result: batch, then free ones of the left, then of the right.
    free = [d for d in range(eqn.invars[0].aval.ndim) if d not in (*lc, *lb)]
    if left is not None:
        out = len(lb) + free.index(left)
        dims = ((without(left, lc), rc), (without(left, lb), rb))
    else:
        assert right is not None
        other = [d for d in range(eqn.invars[1].aval.ndim) if d not in (*rc, *rb)]
        out = len(lb) + len(free) + other.index(right)
        dims = ((lc, without(right, rc)), (lb, without(right, rb)))
    return UnbatchedEquation(
        (left, right), (out,), {**eqn.params, "dimension_numbers": dims}
    )


def _top_k(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
    """Unbatch `top_k`: each group has its own greatest elements."""
    last = eqn.invars[0].aval.ndim - 1
    # Old JAX has no axis: it is the last one.
    along = eqn.params.get("axis", last) % (last + 1)
    if along == axis:
        return None
    params = {"axis": without(axis, (along,))[0]} if "axis" in eqn.params else {}
    return (axis, params) if params or axis < last else None


def _stack(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `stack`: each group stacks its slices along the new dimension."""
    unbatched = elementwise(eqn, axes)
    if unbatched is None:
        return None
    # The new axis may come before the group axis, and then moves it.
    new = eqn.params["axis"]
    out = unbatched.out_axes[0] + (new <= unbatched.out_axes[0])
    params = {**eqn.params, "axis": new - (out < new)}
    return UnbatchedEquation(unbatched.in_axes, (out,), params)


def _unstack(eqn: Eqn, axis: int) -> tuple[int, Params] | None:
    """Unbatch `unstack`: each group takes its slice apart along another dimension."""
    gone = eqn.params["axis"]
    if gone == axis:
        return None
    return axis - (gone < axis), {"axis": gone - (axis < gone)}


def _convolution(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `conv_general_dilated` along the image batch or the output features.

    One of its operands, images and kernel, enters every group whole. None if
    `batch_group_count` is above one, or if the kernel is partitioned and
    `feature_group_count` is above one.
    """
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    batch, (left, right) = params["batch_group_count"] == 1, axes
    # A convolution needs both dimensions, so the slice keeps them with size one.
    if right is None and left == dims.lhs_spec[0] and batch:
        return UnbatchedEquation(
            (left, None), (dims.out_spec[0],), dict(params), keeps_unit_axis=True
        )
    if left is None and right == dims.rhs_spec[0] and batch:
        if params["feature_group_count"] == 1:
            return UnbatchedEquation(
                (None, right), (dims.out_spec[1],), dict(params), keeps_unit_axis=True
            )
    return None


# What each parameter of windows is along an axis where a window holds one element.
_UNIT_WINDOW = {
    "window_dimensions": 1,
    "window_strides": 1,
    "padding": (0, 0),
    "base_dilation": 1,
    "window_dilation": 1,
}


def _windows(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch work on windows, such as of `reduce_window_sum`.

    None if a window may hold several groups.
    """
    known = {axis for axis in axes if axis is not None}
    if len(known) != 1:
        return None
    (axis,) = known
    for name, unit in _UNIT_WINDOW.items():
        if name in eqn.params and np.any(np.not_equal(eqn.params[name][axis], unit)):
            return None
    outs = (axis,) * len(eqn.outvars)
    return UnbatchedEquation(
        (axis,) * len(axes), outs, dict(eqn.params), keeps_unit_axis=True
    )


# By primitive name, as some of these primitives have no public object.
UNBATCHING_RULES: dict[str, Callable] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "broadcast_in_dim": unary(_broadcast_in_dim),
    "reshape": unary(_reshape),
    "squeeze": unary(_over("dimensions")),
    "transpose": unary(_transpose),
    "rev": unary(_over("dimensions", removed=False)),
    "slice": unary(_slice),
    "random_wrap": unary(_random_wrap),
    "random_unwrap": unary(lambda eqn, axis: (axis, {})),
    # It splits each key among the elements that the key is for, by their number, so a
    # group axis that the keys lack is none: its groups would draw from equal keys.
    "random_gamma": _batch_of(0),
    "tile": unary(_tile),
    "fence": lambda eqn, axes: UnbatchedEquation((*axes,), (*axes,), dict(eqn.params)),
    "bitcast_convert_type": unary(_bitcast),
    "split": unary(_along("axis")),
    "rearrange": unary(_along("dimension")),
    "top_k": unary(_top_k),
    "unstack": unary(_unstack),
    "stack": _stack,
    "sort": _along_dimension,
    "dynamic_slice": indexing.dynamic_slice,
    "dynamic_update_slice": indexing.dynamic_update_slice,
    "gather": indexing.gather,
    **dict.fromkeys(
        """scatter scatter-add scatter-sub scatter-mul scatter-min
        scatter-max""".split(),
        indexing.scatter,
    ),
    "pad": _pad,
    "concatenate": _along_dimension,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "fft": lambda eqn, axes: _batch_of(len(eqn.params["fft_lengths"]))(eqn, axes),
    **dict.fromkeys(
        """reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
        select_and_scatter_add""".split(),
        _windows,
    ),
    **dict.fromkeys(
        """cholesky eig eigh hessenberg lu qr schur svd triangular_solve
        tridiagonal""".split(),
        _batch_of(2),
    ),
    # One operand is a matrix, and another one a vector of it.
    **dict.fromkeys(
        "householder_product lu_pivots_to_permutation tridiagonal_solve".split(),
        _batch_of(1),
    ),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(), unary(_along("axis"))
    ),
    **dict.fromkeys(
        """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod
        reduce_sum reduce_xor""".split(),
        unary(_over("axes")),
    ),
}
