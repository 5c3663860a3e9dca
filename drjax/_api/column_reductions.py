"""The building block `reduce_columns`: any function of one coordinate of all groups.

Input: a function of an array `[n]`, and a tree of partitioned leaves `[n, *s]`. Output:
for each leaf the tree of the function's results, global leaves `[*s, *t]`.

Invariants: the function is traced once for each leaf, for one coordinate. What it
closes over are whole operands, so that their cotangents are sums over the coordinates.
Sharp edges: a partitioned value is an array like any other. If the function closes over
one, that is an error if its type shows the partition's axes, else when a plan is made.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax

from drjax import _compat
from drjax._api.levels import Over, over_levels
from drjax._api.pure_functions import PureFunctionErrors, without_other_axes
from drjax._api.reductions import check_numeric, promote_sum
from drjax._api.resolve import BlockParams, MeshLike, PartitionLike, bind_partitioned
from drjax._api.validate import (
    as_array,
    call_checked,
    check_flag,
    check_plain_function,
    function_name,
)
from drjax._compat.types import Array, ClosedJaxpr, PartitionedArray, PyTree
from drjax._errors import DrjaxTypeError
from drjax._primitives.map_columns import (
    COORDINATES,
    GROUPS,
    WHOLE,
    map_columns_p,
    trace_column,
)
from drjax._sharding.execute import as_operand
from drjax._sharding.layout import Layout, make_layout


@over_levels("x")
def reduce_columns(
    fn: Callable[[jax.Array], PyTree],
    x: PyTree,
    *,
    sum: bool = False,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> PyTree:
    """Apply `fn` to the n numbers of each coordinate: a median, a trimmed mean, a vote.

    On a mesh of m devices, one all-to-all gives each device the numbers of all groups
    for its share of the coordinates, and one all-gather collects the results: for d
    coordinates a device receives about n d / m numbers, where `drjax.gather` gives it
    n d. A plan has a gather: `drjax.jit` divides its slices by coordinates on Auto mesh
    axes only, and of the engines the workers of Ray and Beam share the coordinates.

    Args:
      fn: From an array `[n]`, one coordinate of all groups in their order, to a number,
        or a tree of numbers and arrays `[*t]`. It may close over global arrays, which
        get gradients; not over partitioned ones. Building blocks, effects such as
        `jax.debug.print`, and collectives over the partition are errors in it.
      x: Tree of partitioned arrays `[n, *s]`, any dtype with arithmetic.
      sum: Whether the results are added over all coordinates of a leaf, instead of
        collected: `[*t]`, in one all-reduce, in the dtype that `jnp.sum` has. With it,
        `jnp.outer(c, c)` gives the Gram matrix of the groups.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      For each leaf of `x` the tree that `fn` returns, global leaves `[*s, *t]`; with
      `sum`, `[*t]`.

    Raises:
      ScopeError, DrjaxValueError, DrjaxTypeError: As for `drjax.reduce_sum`; and `fn`
        returns no array, or does what is not allowed in it.
      MeshError: `fn` uses a collective over the partition's mesh axes, or closes over a
        value that is sharded over them.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> median = drjax.program(partition_size=3)(
      ...     lambda x: drjax.reduce_columns(jnp.median, x)
      ... )
      >>> print(median(jnp.array([[5.0, 1.0], [6.0, 9.0], [70.0, 2.0]])))
      [6. 2.]

    Source: the coordinate-wise median and trimmed mean of
    [Yin et al. 2018](https://arxiv.org/abs/1803.01498).
    """
    if not callable(fn):
        raise DrjaxTypeError(
            "drjax.reduce_columns needs a function and then its argument, "
            f"drjax.reduce_columns(fn, x), got {type(fn).__name__} as the function."
        )
    check_plain_function("drjax.reduce_columns", fn)
    check_flag("reduce_columns", "sum", sum)

    def bind(leaf: PartitionedArray, **params: Unpack[BlockParams]) -> PyTree:
        check_numeric("reduce_columns", leaf)
        return _reduce_leaf(fn, leaf, sum, **params)

    return bind_partitioned("reduce_columns", x, mesh, partition, bind)


def _reduce_leaf(
    fn: Callable[[Array], PyTree],
    x: PartitionedArray,
    add: bool,
    **params: Unpack[BlockParams],
) -> PyTree:
    """Apply `reduce_columns` to one leaf: trace the function, and bind `map_columns`.

    The result is the tree that `fn` returns, of global arrays `[*s, *t]`; with `add`,
    of their sums over the coordinates, `[*t]`.
    """
    layout, name = make_layout(**params), function_name(fn)
    x = without_other_axes(x, layout)
    coordinates = x.shape[1:]
    out_tree: Any = None

    def flat_fn(column: Array) -> list[Array]:
        nonlocal out_tree
        takes = "It takes one array [n], the numbers of all groups at one coordinate."
        out = call_checked("drjax.reduce_columns", fn, (column,), takes)
        outs, out_tree = jax.tree_util.tree_flatten_with_path(out)
        what, fix = f"the result of {name}", "Return arrays or numbers."
        outs = [as_array("reduce_columns", what, *leaf, fix) for leaf in outs]
        return [promote_sum("reduce_columns", y) for y in outs] if add else outs

    jaxpr, consts = _trace(flat_fn, x, coordinates, layout, name)
    outs = map_columns_p.bind(
        *(as_operand(c, layout, False) for c in consts),
        x,
        jaxpr=jaxpr,
        kinds_in=(*[WHOLE] * len(consts), GROUPS),
        kinds_out=(WHOLE if add else COORDINATES,) * len(jaxpr.out_avals),
        coordinates=coordinates,
        name=name,
        **params,
    )
    return out_tree.unflatten(outs)


def _trace(
    flat_fn: Callable[[Array], list[Array]],
    x: PartitionedArray,
    coordinates: tuple[int, ...],
    layout: Layout,
    name: str,
) -> tuple[ClosedJaxpr, list[Array]]:
    """Trace a function of one coordinate, and check what it does.

    `coordinates` is the shape of one group's slice. The jaxpr takes the arrays and
    tracers that the function closes over, which are also returned, and then the array
    `[n]`.
    """
    errors = PureFunctionErrors(
        f"The function {name} given to drjax.reduce_columns",
        layout,
        f"it sees the {layout.partition} numbers of one coordinate, as an ordinary "
        "array. Use jax.numpy on this array, and call the block outside.",
        "it has the numbers of all groups. Use jax.numpy on its array.",
        "once for each coordinate. Print or check the result outside.",
    )
    trace = lambda: trace_column(
        flat_fn, [_compat.typeof(x)], [GROUPS], coordinates, layout, name
    )
    jaxpr, consts = errors.checked(trace)
    if not jaxpr.out_avals:
        raise DrjaxTypeError(
            f"{errors.what} returns no array. Return a number for the column."
        )
    return jaxpr, consts
