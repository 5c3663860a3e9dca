"""Row rules of indexing: slices and updates at computed places, gather and scatter."""

from collections.abc import Callable

from drjax._planner.unbatching.core import Axes, Rows, drop, without


def dynamic_slice(eqn, axes: Axes) -> Rows | None:
    axis, sizes = axes[0], eqn.params["slice_sizes"]
    if axis is None or sizes[axis] != eqn.invars[0].aval.shape[axis]:
        return None  # a slice of full size starts at 0, whatever the index says
    ins = (axis, *(None for _ in axes[1:]))
    params = {**eqn.params, "slice_sizes": drop(axis, sizes)}
    return Rows(ins, (axis,), params, (1 + axis,))


def dynamic_update_slice(eqn, axes: Axes) -> Rows | None:
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


def gather(eqn, axes: Axes) -> Rows | None:
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
    sizes = sizes if a is None else drop(a, sizes)
    params = {**eqn.params, "dimension_numbers": dims, "slice_sizes": sizes}
    return Rows((a, b), (out,), params)


def scatter(eqn, axes: Axes) -> Rows | None:
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
    return lambda dims: without(axis, [d for d in dims if d != axis])
