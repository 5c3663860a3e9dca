"""Unbatching rules of slices and updates at computed positions, gather and scatter.

Input and output: those of `rules.py`. Let G be the group axis of the operand. Then

    dynamic_slice(x, starts)[i] = dynamic_slice(x[i], starts without G)
    gather(x, indices)[i]       = gather(x[i], indices)     G is a window dimension
                                = gather(x[i], indices[i])  G is a batch dimension
                                = gather(x, indices[i])     only indices have groups
    scatter                     likewise, for operand and updates, or for all three

JAX's batching of a dynamic slice writes an index for each dimension, also into a group
axis that the window covers. The slices of one group then keep a group axis of size one:
an index is in bounds only if it is 0, and is clipped to 0, for one group as for all.

Invariants: nothing is read that depends on the value of an index. Sharp edges: an index
into G itself addresses other groups; `read_and_update_groups.py` has the cases that
have a plan.
"""

from collections.abc import Callable, Sequence

from drjax._compat.types import Eqn
from drjax._planner.unbatching.core import Axes, UnbatchedEquation, drop, without


def dynamic_slice(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `dynamic_slice`: each group slices its other dimensions.

    The start index of the group axis is dropped. None if the slice leaves out groups.
    """
    axis, sizes = axes[0], eqn.params["slice_sizes"]
    if axis is None or sizes[axis] != eqn.invars[0].aval.shape[axis]:
        return None  # a slice of full size starts at 0, whatever the index says
    # Start indices are scalars, without a group axis. Each is clamped by itself, so
    # that one can be dropped.
    in_axes = (axis, *(None for _ in axes[1:]))
    params = {**eqn.params, "slice_sizes": drop(axis, sizes)}
    return UnbatchedEquation(in_axes, (axis,), params, (1 + axis,))


def dynamic_update_slice(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `dynamic_update_slice`: each group updates its slice.

    It takes slices of array and update, and no start index of the group axis. None if
    the update leaves out groups, or if array and update have different group axes.
    """
    known = {axis for axis in axes if axis is not None}
    operand, update = (var.aval.shape for var in eqn.invars[:2])
    if len(known) != 1:
        return None
    (axis,) = known
    # An update of some groups implies communication: `read_and_update_groups.py`.
    if operand[axis] != update[axis]:
        return None
    # An update of full size starts at 0, so the start index along it is dropped.
    in_axes = (axis, axis, *(None for _ in axes[2:]))
    return UnbatchedEquation(in_axes, (axis,), dict(eqn.params), (2 + axis,))


def _agree(axes: Axes, required: Axes) -> bool:
    """Whether each operand has the group axis that a rule requires, or none.

    None in `required`: the operand must not be partitioned.
    """
    return all(a is None or a == r for a, r in zip(axes, required, strict=True))


def gather(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `lax.gather`: each group gathers from its slice, or by its own indices.

    Either groups index their own slices of the operand, with shared or their own
    indices, or they index a shared operand with their own indices. None if an index may
    address the slice of another group, or if the two group axes do not fit together.
    """
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = (var.aval for var in eqn.invars)
    offsets = dims.offset_dims
    # In the result, these are the dimensions of the indices but the last, in order.
    free = [d for d in range(eqn.outvars[0].aval.ndim) if d not in offsets]
    a, b = axes  # group axes of the operand and of the indices
    # Batch dimensions are pairs, so that the group axis of one determines the other.
    if a in dims.operand_batching_dims and a is not None:
        b = dims.start_indices_batching_dims[dims.operand_batching_dims.index(a)]
    elif b in dims.start_indices_batching_dims and b is not None:
        a = dims.operand_batching_dims[dims.start_indices_batching_dims.index(b)]
    if not _agree(axes, (a, b)):
        return None
    if b is not None:  # each group has its indices, into one table or its own
        batched = b in dims.start_indices_batching_dims
        # The last dimension of the indices holds the coordinates of one position.
        # Groups along separate dimensions of both would meet as all pairs of groups.
        if b == indices.ndim - 1 or batched != (a is not None):
            return None
        out = free[b]
    else:  # each group has its table, of which other dimensions are indexed
        assert a is not None
        # A window of all groups has one position in bounds; another one selects groups.
        if a in dims.collapsed_slice_dims or sizes[a] != operand.shape[a]:
            return None
        gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
        out = offsets[[d for d in range(operand.ndim) if d not in gone].index(a)]
        # The indices into the group axis stay, unlike those of `dynamic_slice`: by the
        # mode, one out of bounds may fill the whole window.
        if a in dims.start_index_map:
            sizes = (*sizes[:a], 1, *sizes[a + 1 :])
            params = {**eqn.params, "slice_sizes": sizes}
            return UnbatchedEquation((a, b), (out,), params, keeps_unit_axis=True)
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
    return UnbatchedEquation((a, b), (out,), params)


def scatter(eqn: Eqn, axes: Axes) -> UnbatchedEquation | None:
    """Unbatch `lax.scatter`, `lax.scatter_add`, ...: each group updates its slice.

    It takes slices of operand and updates, and of indices if they share a batch
    dimension. None if an index may address the slice of another group, if the updates
    leave out groups, or if the group axes do not fit together.
    """
    dims = eqn.params["dimension_numbers"]
    operand, _, updates = (var.aval for var in eqn.invars)
    windows = dims.update_window_dims
    free = [d for d in range(updates.ndim) if d not in windows]
    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    kept = [d for d in range(operand.ndim) if d not in gone]
    # Unlike in `gather`, indices alone cannot have groups: all would update one array.
    candidates = [  # group axes of operand, indices and updates
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
    for a, b, c in candidates:
        if not _agree(axes, (a, b, c)):
            continue
        # A window may cover fewer groups than the operand has: then it moves groups.
        # No other candidate agrees, as no two share an axis.
        if operand.shape[a] != updates.shape[c]:
            return None
        # As in `gather`: by the mode, an index out of bounds drops the whole window.
        if a in dims.scatter_dims_to_operand_dims:
            params = dict(eqn.params)
            return UnbatchedEquation((a, b, c), (a,), params, keeps_unit_axis=True)
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
        return UnbatchedEquation(
            (a, b, c), (a,), {**eqn.params, "dimension_numbers": dims}
        )
    return None


def _lower(axis: int | None) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Build a function that renumbers dimensions of an array without dimension `axis`.

    It leaves out `axis` itself. None: no dimension is removed.
    """
    if axis is None:
        return tuple
    return lambda dims: without(axis, [d for d in dims if d != axis])
