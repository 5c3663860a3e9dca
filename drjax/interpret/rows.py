"""The rule table: equations that work row by row, and their form for one row.

An equation works row by row if row i of every result is a function of row i of its
partitioned operands and of other operands taken whole. Where the rows lie is the
*group axis* of a value: 0 in users' programs, another one after a vmap or in what a
scan stacks. A rule takes the equation and, for each operand, its group axis or None
(not known to be partitioned), and returns a `Rows`, or None if it mixes rows. It is
the inverse of a batching rule.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Axes = Sequence[int | None]

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


@dataclass(frozen=True)
class Rows:
    """How an equation works row by row.

    Attributes:
      ins: For each operand its group axis; None: every group takes all of it.
      outs: For each result its group axis.
      params: The parameters of the equation for one group.
      without: Operands that the equation for one group does not take.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int, ...]
    params: dict[str, Any]
    without: tuple[int, ...] = ()


def by_rows(eqn, axes: Axes) -> Rows | None:
    """The row-by-row form of an equation with operands partitioned so, or None."""
    rule = ROW_RULES.get(eqn.primitive.name)
    if rule is None or all(axis is None for axis in axes):
        return None
    return rule(eqn, axes)


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


def _without(axis: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Dimension numbers after a dimension that is not among them has been removed."""
    return tuple(d - (d > axis) for d in dims)


def _drop(axis: int, values: Sequence[Any]) -> tuple[Any, ...]:
    return (*values[:axis], *values[axis + 1 :])


def _elementwise(eqn, axes: Axes) -> Rows | None:
    known = {axis for axis in axes if axis is not None}
    if len(known) != 1:
        return None
    (axis,) = known
    ins = tuple(axis if var.aval.shape else None for var in eqn.invars)
    params = dict(eqn.params)
    if "sharding" in params:
        params["sharding"] = None
    return Rows(ins, (axis,) * len(eqn.outvars), params)


def _unary(form: Callable) -> Callable:
    """A rule for one operand: `form(eqn, axis)` gives `(out axis, params)` or None."""

    def rule(eqn, axes: Axes) -> Rows | None:
        axis = axes[0]
        if axis is None or len(axes) != 1:
            return None
        found = form(eqn, axis)
        if found is None:
            return None
        out, params = found
        return Rows((axis,), (out,) * len(eqn.outvars), {**eqn.params, **params})

    return rule


def _broadcast_in_dim(eqn, axis):
    dims, shape = eqn.params["broadcast_dimensions"], eqn.params["shape"]
    out = dims[axis]
    if shape[out] != eqn.invars[0].aval.shape[axis]:
        return None
    dims = _without(out, _drop(axis, dims))
    return out, {
        "shape": _drop(out, shape), "broadcast_dimensions": dims, "sharding": None,
    }  # fmt: skip


def _reshape(eqn, axis):
    old, new = eqn.invars[0].aval.shape, tuple(eqn.params["new_sizes"])
    if eqn.params.get("dimensions") is not None:
        return None
    before = math.prod(old[:axis])
    for out, size in enumerate(new):
        if size == old[axis] and math.prod(new[:out]) == before:
            return out, {"new_sizes": _drop(out, new), "sharding": None}
    return None


def _over(param: str, removed: bool = True) -> Callable:
    """Work over other dimensions, which the result has no more or still has."""

    def form(eqn, axis):
        dims = eqn.params[param]
        if axis in dims:
            return None
        out = axis - sum(d < axis for d in dims) if removed else axis
        return out, {param: _without(axis, dims)}

    return form


def _along(param: str) -> Callable:
    """Work along one other dimension, which the result still has."""

    def form(eqn, axis):
        if eqn.params[param] == axis:
            return None
        return axis, {param: _without(axis, (eqn.params[param],))[0]}

    return form


def _transpose(eqn, axis):
    order = eqn.params["permutation"]
    out = order.index(axis)
    return out, {"permutation": _without(axis, _drop(out, order))}


def _slice(eqn, axis):
    p, n = eqn.params, eqn.invars[0].aval.shape[axis]
    strides = p["strides"]
    whole = p["start_indices"][axis] == 0 and p["limit_indices"][axis] == n
    if not whole or (strides is not None and strides[axis] != 1):
        return None
    return axis, {
        "start_indices": _drop(axis, p["start_indices"]),
        "limit_indices": _drop(axis, p["limit_indices"]),
        "strides": None if strides is None else _drop(axis, strides),
    }


def _tile(eqn, axis):
    reps = eqn.params["reps"]
    if reps[axis] != 1:
        return None
    return axis, {"reps": _drop(axis, reps)}


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
    params = {**eqn.params, "padding_config": _drop(axis, config)}
    return Rows((axis, None), (axis,), params)


def _along_dimension(eqn, axes: Axes) -> Rows | None:
    rows = _elementwise(eqn, axes)
    if rows is None or rows.outs[0] == eqn.params["dimension"]:
        return None
    dimension = _without(rows.outs[0], (eqn.params["dimension"],))[0]
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
        (_without(left, lc), _without(right, rc)),
        (_without(left, _drop(position, lb)), _without(right, _drop(position, rb))),
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
        dims = ((_without(left, lc), rc), (_without(left, lb), rb))
    else:
        assert right is not None
        other = [d for d in range(eqn.invars[1].aval.ndim) if d not in (*rc, *rb)]
        out = len(lb) + len(free) + other.index(right)
        dims = ((lc, _without(right, rc)), (lb, _without(right, rb)))
    return Rows((left, right), (out,), {**eqn.params, "dimension_numbers": dims})


def _top_k(eqn, axis):
    last = eqn.invars[0].aval.ndim - 1
    along = eqn.params.get("axis", last) % (last + 1)
    if along == axis:
        return None
    params = {"axis": _without(axis, (along,))[0]} if "axis" in eqn.params else {}
    return (axis, params) if params or axis < last else None


def _stack(eqn, axes: Axes) -> Rows | None:
    rows = _elementwise(eqn, axes)
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


def _dynamic_slice(eqn, axes: Axes) -> Rows | None:
    axis, sizes = axes[0], eqn.params["slice_sizes"]
    if axis is None or sizes[axis] != eqn.invars[0].aval.shape[axis]:
        return None  # a slice of full size starts at 0, whatever the index says
    ins = (axis, *(None for _ in axes[1:]))
    params = {**eqn.params, "slice_sizes": _drop(axis, sizes)}
    return Rows(ins, (axis,), params, (1 + axis,))


def _dynamic_update_slice(eqn, axes: Axes) -> Rows | None:
    known = {axis for axis in axes if axis is not None}
    operand, update = (var.aval.shape for var in eqn.invars[:2])
    if len(known) != 1:
        return None
    (axis,) = known
    if operand[axis] != update[axis]:
        return None
    ins = (axis, axis, *(None for _ in axes[2:]))
    return Rows(ins, (axis,), dict(eqn.params), (2 + axis,))


def _agree(axes: Axes, wanted: Axes) -> bool:
    """Whether no operand is partitioned along another axis than the wanted one."""
    return all(a is None or a == w for a, w in zip(axes, wanted, strict=True))


def _gather(eqn, axes: Axes) -> Rows | None:
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = (var.aval for var in eqn.invars)
    offsets = dims.offset_dims
    free = [d for d in range(eqn.outvars[0].aval.ndim) if d not in offsets]
    a, b = axes
    if a in dims.operand_batching_dims and a is not None:
        b = dims.start_indices_batching_dims[dims.operand_batching_dims.index(a)]
    elif b in dims.start_indices_batching_dims and b is not None:
        a = dims.operand_batching_dims[dims.start_indices_batching_dims.index(b)]
    if not _agree(axes, (a, b)):
        return None
    if b is not None:  # rows of indices, into one table or into rows of tables
        batched = b in dims.start_indices_batching_dims
        if b == indices.ndim - 1 or batched != (a is not None):
            return None
        out = free[b]
    else:  # rows of which other dimensions are indexed
        assert a is not None
        indexed = (*dims.start_index_map, *dims.collapsed_slice_dims)
        if a in indexed or sizes[a] != operand.shape[a]:
            return None
        gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
        out = offsets[[d for d in range(operand.ndim) if d not in gone].index(a)]
    in_operand, in_indices = _lower(a), _lower(b)
    dims = dims._replace(
        offset_dims=_lower(out)(offsets),
        collapsed_slice_dims=in_operand(dims.collapsed_slice_dims),
        start_index_map=in_operand(dims.start_index_map),
        operand_batching_dims=in_operand(dims.operand_batching_dims),
        start_indices_batching_dims=in_indices(dims.start_indices_batching_dims),
    )
    sizes = sizes if a is None else _drop(a, sizes)
    params = {**eqn.params, "dimension_numbers": dims, "slice_sizes": sizes}
    return Rows((a, b), (out,), params)


def _scatter(eqn, axes: Axes) -> Rows | None:
    dims = eqn.params["dimension_numbers"]
    operand, _, updates = (var.aval for var in eqn.invars)
    windows = dims.update_window_dims
    free = [d for d in range(updates.ndim) if d not in windows]
    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    kept = [d for d in range(operand.ndim) if d not in gone]
    forms = [  # the axes of operand, indices and updates along which rows may lie
        *((d, None, windows[i]) for i, d in enumerate(kept)),
        *(
            (d, i, free[i])
            for d, i in zip(
                dims.operand_batching_dims,
                dims.scatter_indices_batching_dims,
                strict=True,
            )
        ),
    ]
    for a, b, c in forms:
        if not _agree(axes, (a, b, c)):
            continue
        indexed = a in dims.scatter_dims_to_operand_dims
        if indexed or operand.shape[a] != updates.shape[c]:
            return None
        in_operand, in_indices = _lower(a), _lower(b)
        dims = dims._replace(
            update_window_dims=_lower(c)(windows),
            inserted_window_dims=in_operand(dims.inserted_window_dims),
            scatter_dims_to_operand_dims=in_operand(dims.scatter_dims_to_operand_dims),
            operand_batching_dims=in_operand(dims.operand_batching_dims),
            scatter_indices_batching_dims=in_indices(
                dims.scatter_indices_batching_dims
            ),
        )
        return Rows((a, b, c), (a,), {**eqn.params, "dimension_numbers": dims})
    return None


def _lower(axis: int | None) -> Callable:
    """Renumbers dimensions after one has been removed, also from among them."""
    if axis is None:
        return tuple
    return lambda dims: _without(axis, [d for d in dims if d != axis])


ROW_RULES: dict[str, Callable] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "broadcast_in_dim": _unary(_broadcast_in_dim),
    "reshape": _unary(_reshape),
    "squeeze": _unary(_over("dimensions")),
    "transpose": _unary(_transpose),
    "rev": _unary(_over("dimensions", removed=False)),
    "slice": _unary(_slice),
    "random_wrap": _unary(_random_wrap),
    "random_unwrap": _unary(lambda eqn, axis: (axis, {})),
    "tile": _unary(_tile),
    "bitcast_convert_type": _unary(_bitcast),
    "split": _unary(_along("axis")),
    "top_k": _unary(_top_k),
    "unstack": _unary(_unstack),
    "stack": _stack,
    "sort": _along_dimension,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(
        """scatter scatter-add scatter-sub scatter-mul scatter-min
        scatter-max""".split(),
        _scatter,
    ),
    "pad": _pad,
    "concatenate": _along_dimension,
    "dot_general": _dot_general,
    **dict.fromkeys("cholesky eigh lu svd triangular_solve".split(), _batch_of(2)),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(), _unary(_along("axis"))
    ),
    **dict.fromkeys(
        """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod
        reduce_sum reduce_xor""".split(),
        _unary(_over("axes")),
    ),
}
