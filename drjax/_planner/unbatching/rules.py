"""The rule table: equations that work row by row, and their form for one row.

An equation works row by row if row i of every result is a function of row i of its
partitioned operands and of other operands taken whole. Where the rows lie is the
*group axis* of a value: 0 in users' programs, another one after a vmap or in what a
scan stacks. A rule takes the equation and, for each operand, its group axis or None
(not known to be partitioned), and returns a `Rows`, or None if it mixes rows. It is
the inverse of a batching rule.
"""

import math
from collections.abc import Callable

import numpy as np

from drjax._planner.unbatching import indexing
from drjax._planner.unbatching.core import Axes, Rows, drop, elementwise, unary, without

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma
    div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to
    max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow random_bits random_clone random_fold_in random_gamma
    random_seed random_split real reduce_precision regularized_incomplete_beta rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square stop_gradient sub tan tanh xor zeta""".split()
)


def by_rows(eqn, axes: Axes) -> Rows | None:
    """The row-by-row form of an equation with operands partitioned so, or None."""
    rule = ROW_RULES.get(eqn.primitive.name)
    if rule is None or all(axis is None for axis in axes):
        return None
    return rule(eqn, axes)


def of_one_group(eqn, axes: Axes) -> Rows | None:
    """Any work is row by row where there is one group and one row.

    The group axis of a result may be any of its axes of size one, as they lie alike.
    """
    shapes = [var.aval.shape for var in eqn.outvars]
    calls_back = "callback" in eqn.primitive.name or bool(eqn.effects)
    if calls_back or not all(1 in shape for shape in shapes):
        return None
    outs = tuple(shape.index(1) for shape in shapes)
    return Rows(tuple(axes), outs, dict(eqn.params), size_one=True)


def candidates(eqn, n: int) -> list[Rows]:
    """All row-by-row forms of an equation, if one operand were partitioned."""
    if eqn.primitive.name not in ROW_RULES:
        return []
    found = []
    for i, var in enumerate(eqn.invars):
        for axis, size in enumerate(var.aval.shape):
            if size == n:
                axes: list[int | None] = [None] * len(eqn.invars)
                axes[i] = axis
                rows = by_rows(eqn, axes)
                if rows is not None:
                    found.append(rows)
    return found


def _broadcast_in_dim(eqn, axis):
    dims, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    out = dims[axis]
    if shape[out] != eqn.invars[0].aval.shape[axis]:
        return None
    dims = without(out, drop(axis, dims))
    return out, {
        "shape": drop(out, shape), "broadcast_dimensions": dims, "sharding": None,
    }  # fmt: skip


def _reshape(eqn, axis):
    old, new = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    if eqn.params.get("dimensions") is not None:
        return None
    before = math.prod(old[:axis])
    for out, size in enumerate(new):
        if size == old[axis] and math.prod(new[:out]) == before:
            return out, {"new_sizes": drop(out, new), "sharding": None}
    return None


def _over(param: str, removed: bool = True) -> Callable:
    """Work over other dimensions, which the result has no more or still has."""

    def form(eqn, axis):
        dims = eqn.params[param]
        if axis in dims:
            return None
        out = axis - sum(d < axis for d in dims) if removed else axis
        return out, {param: without(axis, dims)}

    return form


def _along(param: str) -> Callable:
    """Work along one other dimension, which the result still has."""

    def form(eqn, axis):
        if eqn.params[param] == axis:
            return None
        return axis, {param: without(axis, (eqn.params[param],))[0]}

    return form


def _transpose(eqn, axis):
    order = eqn.params["permutation"]
    out = order.index(axis)
    return out, {"permutation": without(axis, drop(out, order))}


def _slice(eqn, axis):
    p, n = eqn.params, eqn.invars[0].aval.shape[axis]
    strides = p["strides"]
    whole = p["start_indices"][axis] == 0 and p["limit_indices"][axis] == n
    if not whole or (strides is not None and strides[axis] != 1):
        return None
    return axis, {
        "start_indices": drop(axis, p["start_indices"]),
        "limit_indices": drop(axis, p["limit_indices"]),
        "strides": None if strides is None else drop(axis, strides),
    }


def _tile(eqn, axis):
    reps = eqn.params["reps"]
    if reps[axis] != 1:
        return None
    return axis, {"reps": drop(axis, reps)}


def _bitcast(eqn, axis):
    """A dimension may appear or vanish at the end."""
    return (axis, {}) if axis < eqn.outvars[0].aval.ndim else None


def _batch_of(dims: int) -> Callable:
    """Work on the last dimensions of all operands, for each index of the others."""

    def rule(eqn, axes: Axes) -> Rows | None:
        known = {axis for axis in axes if axis is not None}
        if len(known) != 1:
            return None
        (axis,) = known
        if axis >= min(var.aval.ndim for var in eqn.invars) - dims:
            return None
        return Rows((axis,) * len(axes), (axis,) * len(eqn.outvars), dict(eqn.params))

    return rule


def _random_wrap(eqn, axis):
    return None if axis == eqn.invars[0].aval.ndim - 1 else (axis, {})


def _pad(eqn, axes: Axes) -> Rows | None:
    axis, config = axes[0], eqn.params["padding_config"]
    if axis is None or axes[1] is not None or tuple(config[axis]) != (0, 0, 0):
        return None
    params = {**eqn.params, "padding_config": drop(axis, config)}
    return Rows((axis, None), (axis,), params)


def _along_dimension(eqn, axes: Axes) -> Rows | None:
    rows = elementwise(eqn, axes)
    if rows is None or rows.outs[0] == eqn.params["dimension"]:
        return None
    dimension = without(rows.outs[0], (eqn.params["dimension"],))[0]
    return Rows(rows.ins, rows.outs, {**eqn.params, "dimension": dimension})


def _dot_general(eqn, axes: Axes) -> Rows | None:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    left, right = axes
    if left is not None and left in lb:
        position = lb.index(left)
    elif right is not None and right in rb:
        position = rb.index(right)
    else:
        return _dot_free(eqn, left, right)
    if left not in (None, lb[position]) or right not in (None, rb[position]):
        return None
    left, right = lb[position], rb[position]
    dims = (
        (without(left, lc), without(right, rc)),
        (without(left, drop(position, lb)), without(right, drop(position, rb))),
    )
    params = {**eqn.params, "dimension_numbers": dims}
    return Rows((left, right), (position,), params)


def _dot_free(eqn, left: int | None, right: int | None) -> Rows | None:
    """One operand is partitioned along a dimension that only it has."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    if (left is None) == (right is None) or left in lc or right in rc:
        return None
    free = [d for d in range(eqn.invars[0].aval.ndim) if d not in (*lc, *lb)]
    if left is not None:
        out = len(lb) + free.index(left)
        dims = ((without(left, lc), rc), (without(left, lb), rb))
    else:
        assert right is not None
        other = [d for d in range(eqn.invars[1].aval.ndim) if d not in (*rc, *rb)]
        out = len(lb) + len(free) + other.index(right)
        dims = ((lc, without(right, rc)), (lb, without(right, rb)))
    return Rows((left, right), (out,), {**eqn.params, "dimension_numbers": dims})


def _top_k(eqn, axis):
    last = eqn.invars[0].aval.ndim - 1
    along = eqn.params.get("axis", last) % (last + 1)
    if along == axis:
        return None
    params = {"axis": without(axis, (along,))[0]} if "axis" in eqn.params else {}
    return (axis, params) if params or axis < last else None


def _stack(eqn, axes: Axes) -> Rows | None:
    rows = elementwise(eqn, axes)
    if rows is None:
        return None
    new = eqn.params["axis"]
    out = rows.outs[0] + (new <= rows.outs[0])
    return Rows(rows.ins, (out,), {**eqn.params, "axis": new - (out < new)})


def _unstack(eqn, axis):
    gone = eqn.params["axis"]
    if gone == axis:
        return None
    return axis - (gone < axis), {"axis": gone - (axis < gone)}


def _fft(eqn, axes: Axes) -> Rows | None:
    return _batch_of(len(eqn.params["fft_lengths"]))(eqn, axes)


def _convolution(eqn, axes: Axes) -> Rows | None:
    """The groups are the batch of images, or the features that the kernels make."""
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    batch, (left, right) = params["batch_group_count"] == 1, axes
    if right is None and left == dims.lhs_spec[0] and batch:
        return Rows((left, None), (dims.out_spec[0],), dict(params), size_one=True)
    if left is None and right == dims.rhs_spec[0] and batch:
        if params["feature_group_count"] == 1:
            return Rows((None, right), (dims.out_spec[1],), dict(params), size_one=True)
    return None


_WINDOWS = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0),
            "base_dilation": 1, "window_dilation": 1}  # fmt: skip


def _windows(eqn, axes: Axes) -> Rows | None:
    """Work on windows that have one group each."""
    known = {axis for axis in axes if axis is not None}
    if len(known) != 1:
        return None
    (axis,) = known
    for name, alone in _WINDOWS.items():
        if name in eqn.params and np.any(np.not_equal(eqn.params[name][axis], alone)):
            return None
    outs = (axis,) * len(eqn.outvars)
    return Rows((axis,) * len(axes), outs, dict(eqn.params), size_one=True)


ROW_RULES: dict[str, Callable] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    "broadcast_in_dim": unary(_broadcast_in_dim),
    "reshape": unary(_reshape),
    "squeeze": unary(_over("dimensions")),
    "transpose": unary(_transpose),
    "rev": unary(_over("dimensions", removed=False)),
    "slice": unary(_slice),
    "random_wrap": unary(_random_wrap),
    "random_unwrap": unary(lambda eqn, axis: (axis, {})),
    "tile": unary(_tile),
    "bitcast_convert_type": unary(_bitcast),
    "split": unary(_along("axis")),
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
    "fft": _fft,
    **dict.fromkeys(
        """reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
        select_and_scatter_add""".split(),
        _windows,
    ),
    **dict.fromkeys("cholesky eigh lu svd triangular_solve".split(), _batch_of(2)),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(), unary(_along("axis"))
    ),
    **dict.fromkeys(
        """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod
        reduce_sum reduce_xor""".split(),
        unary(_over("axes")),
    ),
}
