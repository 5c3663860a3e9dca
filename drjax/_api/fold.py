"""The building block `reduce`: an associative fold in the order of the groups.

Input: a function of two states, a tree of partitioned leaves `[n, *s]`, one state for
each group, and the neutral state. Output: a state, a tree of global leaves `[*s]`.

Invariants: the function is traced once, for the state of one group, whose structure,
shapes and dtypes its result must have. What it closes over are global operands.
Sharp edges: the function is not checked to be associative, nor the state to be neutral.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from drjax import _compat
from drjax._api.levels import Over, over_levels
from drjax._api.participation import check_where
from drjax._api.pure_functions import PureFunctionErrors, without_other_axes
from drjax._api.reductions import Mask
from drjax._api.resolve import (
    MeshLike,
    PartitionLike,
    group_axis_size,
    map_leaves,
    resolve,
)
from drjax._api.validate import (
    as_array,
    call_checked,
    check_plain_function,
    flatten,
    flatten_partitioned,
    function_name,
)
from drjax._compat.types import (
    Array,
    ClosedJaxpr,
    GlobalArray,
    PartitionedArray,
    PyTree,
    PyTreeDef,
    Tree,
)
from drjax._error_texts import brief
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._primitives.fold_groups import reduce_fold_p
from drjax._primitives.map_fn import trace_group
from drjax._sharding.execute import as_operand, vary
from drjax._sharding.layout import Layout, make_layout


@over_levels("x", "where")
def reduce(
    combine: Callable[[Tree, Tree], Tree],
    x: Tree,
    init: PyTree,
    *,
    where: Mask = None,
    commutative: bool = False,
    over: Over = None,
    mesh: MeshLike = None,
    partition: PartitionLike = None,
) -> Tree:
    """Fold the groups' states by an associative function, in the order of the groups.

    The result is that of `functools.reduce(combine, states, init)`: a logsumexp, a
    variance, a product of matrices, the best group with its payload. On a mesh of m
    devices, each folds the states of its groups. These m states are exchanged by
    columns where `combine` acts on each element alone, by log2 m swaps otherwise; by
    one all-gather where they are small, or other mesh axes may shard them. Gradients
    need no more than that, and by columns one all-to-all back. In a plan a fold is a
    reduction: `drjax.jit` folds as many groups at a time as its option says, and
    engines fold blocks of groups.

    A derivative is that of one order of evaluation: of a balanced tree over the groups
    of each device, and one over the devices. Where `combine` has no derivative, as
    `jnp.maximum` of equal numbers, it is that order's, in forward and reverse mode.

    Args:
      combine: From two states to a state. A state is a tree with the structure, shapes
        and dtypes of one group's slice of `x`. It must be associative, as the states of
        neighbors are combined first; rounding differs with the number of devices.
        `drjax.check` and the reference backend try it on the first three groups. It
        need not be commutative. It may close over global arrays, which get gradients;
        not over partitioned ones. Building blocks, effects and collectives over the
        partition are errors in it.
      x: Tree of partitioned arrays `[n, *s]`, any dtype, typed keys included.
      init: The first state, before that of group 0: usually the neutral one, for which
        `combine` returns `a` for `(init, a)`. A tree with the structure of `x`, of
        arrays `[*s]`, or of Python numbers, which fill their leaf.
      where: Optional bool `[n]`: the groups that take part. The state of any other is
        `init`, which has to be neutral then; `combine` may get two neutral states.
      commutative: Whether `combine(a, b)` is `combine(b, a)`, so that the order of the
        groups does not matter to engines. It is checked where associativity is.
      over: As for `drjax.broadcast`.
      mesh: As for `drjax.broadcast`.
      partition: As for `drjax.broadcast`.

    Returns:
      The tree of `x` with global leaves `[*s]`.

    Raises:
      ScopeError: No partition in force, or `combine` calls a building block.
      DrjaxValueError: A leaf of `x` has another leading axis than n, or the structures
        or shapes of `init` or of a result of `combine` are not those of a state.
      DrjaxTypeError: A leaf is not an array, `combine` cannot be called or has effects,
        `where` is no array of bools, `commutative` is no bool, or a dtype of `init` or
        of a result of `combine` is not that of the state.
      MeshError: `combine` uses a collective over the partition's mesh axes, or closes
        over a value that is sharded over them.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> best = drjax.program(partition_size=3)(lambda x: drjax.reduce(
      ...     lambda a, b: jnp.where(a[0] >= b[0], a, b), x, jnp.array([-jnp.inf, 0.0])
      ... ))
      >>> print(best(jnp.array([[0.5, 7.0], [0.9, 8.0], [0.1, 9.0]])))
      [0.9 8. ]

    Source: prefix sums of associative functions in
    [Blelloch 1990](https://www.cs.cmu.edu/~guyb/papers/Ble93.pdf).
    """
    params = resolve("reduce", mesh, partition)
    if not callable(combine):
        raise DrjaxTypeError(
            "drjax.reduce needs a function of two states as its first argument, got "
            f"{type(combine).__name__}: drjax.reduce(combine, x, init)."
        )
    check_plain_function("drjax.reduce", combine)
    if not isinstance(commutative, bool):
        raise DrjaxTypeError(
            "drjax.reduce needs commutative=True if any order of the groups will do, "
            f"else False, got {commutative!r}."
        )
    size = group_axis_size(params)
    leaves, tree = flatten_partitioned("reduce", x, params["partition"], size)
    if not leaves:
        return x
    layout = make_layout(**params)
    _check_dtypes(tree.unflatten(leaves))
    neutral = _neutral_state(init, tree, leaves)
    if where is not None:
        mask = check_where("reduce", where, params)
        leaves = [
            map_leaves("reduce", _neutral_unless(e), mask, y, **params)
            for y, e in zip(leaves, neutral, strict=True)
        ]
    leaves = [without_other_axes(as_operand(y, layout, True), layout) for y in leaves]
    leaves = [y if _is_key(y) else y.astype(y.dtype) for y in leaves]  # no weak types
    leaves, jaxpr, consts = _trace(combine, tree, leaves, layout)
    neutral = [
        without_other_axes(as_operand(y, layout, False), layout, False) for y in neutral
    ]
    outs = reduce_fold_p.bind(
        *(as_operand(c, layout, False) for c in consts),
        *neutral,
        *leaves,
        jaxpr=jaxpr,
        n_states=len(leaves),
        name=function_name(combine),
        # Only where it is asked for, as other programs trace to the same jaxprs.
        **({"commutative": True} if commutative else {}),
        **params,
    )
    return tree.unflatten(outs)


def _neutral_unless(neutral: GlobalArray) -> Callable[[Array, Array], Array]:
    """Make the function that replaces the state of a group that takes no part."""

    def own_or_neutral(takes_part: Array, state: Array) -> Array:
        return jnp.where(takes_part, state, neutral)

    return own_or_neutral


def _is_key(x: Array) -> bool:
    """Whether an array has a dtype without arithmetic, such as typed random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _check_dtypes(x: PyTree) -> None:
    """Raise `DrjaxTypeError` if a leaf has dtype float0, the tangent of an integer.

    Such an array has no values to fold.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(x)[0]:
        if leaf.dtype == jax.dtypes.float0:
            raise DrjaxTypeError(
                f"drjax.reduce got x{jax.tree_util.keystr(path)} of dtype float0, "
                "JAX's tangent of an integer. Leave integers out of what is "
                "differentiated."
            )


# ---------------------------------------------------------------------------------
# The neutral state


def _neutral_state(
    init: PyTree, tree: PyTreeDef, leaves: Sequence[PartitionedArray]
) -> list[GlobalArray]:
    """Check the neutral state against one group's slice of `x`, and cast its leaves.

    A Python number becomes an array that it fills.
    """
    values, init_tree = flatten("reduce", init, "init")
    if init_tree != tree:
        raise DrjaxValueError(
            "drjax.reduce needs init with the structure of x, a state of one group, "
            f"but got:\n  x:    {brief(tree)}\n  init: {brief(init_tree)}\n"
            "Pass one array or number for each leaf of x."
        )
    paths = jax.tree_util.tree_flatten_with_path(init)[0]
    return [
        _neutral_leaf(f"init{jax.tree_util.keystr(path)}", value, leaf)
        for (path, _), value, leaf in zip(paths, values, leaves, strict=True)
    ]


def _neutral_leaf(name: str, value: Array, leaf: PartitionedArray) -> GlobalArray:
    """Check a leaf of the neutral state, and cast it to the dtype of the leaf of `x`.

    A Python number is a scalar array, which JAX types weakly: if that dtype holds it,
    it is repeated in all elements of `[*s]`. So is a scalar bool. `name` has the path
    of the leaf, such as `init['a']`.
    """
    shape, dtype, weak = leaf.shape[1:], leaf.dtype, _compat.typeof(value).weak_type
    # JAX's bools are never weakly typed.
    number = not value.ndim and (weak or value.dtype == jnp.bool_)
    if value.shape != shape and not number:
        raise DrjaxValueError(
            f"drjax.reduce needs {name} of the shape of one group's slice, {shape}, "
            f"got {value.shape}. Pass an array of that shape, or a Python number to "
            "fill it."
        )
    fits = value.dtype == dtype
    if weak and not fits and not _is_key(leaf):
        fits = jnp.result_type(value, dtype) == dtype
        if jnp.issubdtype(dtype, jnp.integer) and _compat.is_concrete(value):
            limits = jnp.iinfo(dtype)
            fits = fits and bool(limits.min <= int(value.min()) <= limits.max)
    if not fits:
        raise DrjaxTypeError(
            f"drjax.reduce needs {name} of the dtype of x there, {dtype}, got "
            f"{value.dtype}. Cast one of them."
        )
    if _is_key(leaf):
        return value
    value = value.astype(dtype)
    return value if value.shape == shape else jnp.full(shape, value)


# ---------------------------------------------------------------------------------
# The function


def _trace(
    combine: Callable[[PyTree, PyTree], PyTree],
    tree: PyTreeDef,
    leaves: list[PartitionedArray],
    layout: Layout,
) -> tuple[list[PartitionedArray], ClosedJaxpr, list[Array]]:
    """Trace the function of two states, and check what it does and returns.

    The leaves of `x` are returned. A result of `combine` is a state again, so both must
    have one type: inside a `shard_map`, leaves are cast to vary over all Manual mesh
    axes over which a leaf or a result varies.

    The jaxpr takes the arrays and tracers that `combine` closes over, which are
    returned last, the leaves of the first state, and those of the second.
    """
    name, n_states = function_name(combine), len(leaves)
    errors = PureFunctionErrors(
        f"The function {name} given to drjax.reduce",
        layout,
        "it sees the states of two groups, as ordinary arrays. Use jax.numpy on them, "
        "and call the block outside.",
        "it sees two states only. Use jax.numpy on them.",
        "as often as states are combined. Print or check the result outside.",
    )

    def flat_fn(*values: Array) -> list[Array]:
        states = tree.unflatten(values[:n_states]), tree.unflatten(values[n_states:])
        fix = "It takes the states of two groups, and returns one."
        out = call_checked("drjax.reduce", combine, states, fix)
        _check_structure(name, out, tree)
        paths = jax.tree_util.tree_flatten_with_path(out)[0]
        pairs = zip(paths, leaves, strict=True)
        return [_result_leaf(name, *leaf, x) for leaf, x in pairs]

    while True:
        avals = [_compat.typeof(x) for x in leaves]
        trace = lambda avals=avals: trace_group(flat_fn, [*avals, *avals], layout, name)
        jaxpr, consts = errors.checked(trace)
        varying = frozenset[str]().union(
            *(_compat.varying(aval) for aval in (*avals, *jaxpr.out_avals))
        )
        # A result is a state again, so its type must be the type of one.
        if all(varying <= _compat.varying(aval) for aval in avals):
            return leaves, jaxpr, consts
        leaves = [vary(x, varying) for x in leaves]


def _check_structure(name: str, out: PyTree, tree: PyTreeDef) -> None:
    """Raise `DrjaxValueError` if a result does not have the structure of a state."""
    out_tree = jax.tree_util.tree_structure(out)
    if out_tree != tree:
        raise DrjaxValueError(
            f"The function {name} given to drjax.reduce needs to return a state, a "
            f"tree with the structure of x, but:\n  x:      {brief(tree)}\n  result: "
            f"{brief(out_tree)}\nReturn a tree like each of its two arguments."
        )


def _result_leaf(
    name: str, path: jax.tree_util.KeyPath, value: object, leaf: PartitionedArray
) -> Array:
    """Check a leaf of a result of `combine`, and convert it to an array of a state.

    `leaf` is the leaf of `x` at the same path.
    """
    what, fix = f"the result of {name}", "Return arrays or numbers."
    value = as_array("reduce", what, path, value, fix)
    shape, dtype = leaf.shape[1:], leaf.dtype
    where = f"The function {name} given to drjax.reduce returns a state whose leaf "
    where += f"result{jax.tree_util.keystr(path)} has "
    if value.shape != shape:
        raise DrjaxValueError(
            f"{where}shape {value.shape}, but one group's slice of x has {shape}. A "
            "result must be a state again: return an array of that shape."
        )
    weak = _compat.typeof(value).weak_type and not _is_key(leaf)
    if value.dtype != dtype and not (weak and jnp.result_type(value, dtype) == dtype):
        raise DrjaxTypeError(
            f"{where}dtype {value.dtype}, but x has {dtype}. A result must be a state "
            f"again: cast it by .astype, or pass x in {value.dtype}."
        )
    return value if _is_key(leaf) else value.astype(dtype)
