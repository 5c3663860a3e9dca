"""Checks of users' functions and pytrees, with errors that name the leaf.

Input: a tree or a function, and the name of the building block that takes it. Output:
arrays as leaves, or an error. Invariants: an error names the path of the leaf, what was
needed, what was passed, and the fix. Sharp edge: Python numbers and NumPy arrays become
JAX arrays, with JAX's default dtypes.
"""

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from drjax._compat.types import Array, PartitionedArray, PyTree, PyTreeDef
from drjax._error_texts import brief, listed, unstacked, where_it_goes
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._partition import Partition

P = ParamSpec("P")
R = TypeVar("R")


def flatten(block: str, tree: PyTree, name: str = "x") -> tuple[list[Array], PyTreeDef]:
    """Flatten an argument of a building block, and convert its leaves to JAX arrays."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [as_array(block, name, path, leaf) for path, leaf in leaves], treedef


def flatten_partitioned(
    block: str, tree: PyTree, partition: Partition, size: int, name: str = "x"
) -> tuple[list[PartitionedArray], PyTreeDef]:
    """Flatten a partitioned argument of a building block, and check its leading axes.

    Each has to be `size`: n, or inside a user's `shard_map` the number of groups of a
    device.
    """
    leaves, treedef = flatten(block, tree, name)
    if any(jnp.ndim(x) == 0 or jnp.shape(x)[0] != size for x in leaves):
        _raise_not_partitioned(block, tree, partition, size, name)
    return leaves, treedef


_CLOSE_OVER = (
    "Close over values that are not arrays instead of passing them; "
    "eqx.partition(module, eqx.is_array) separates those of an Equinox module."
)


def as_array(
    block: str,
    name: str,
    path: jax.tree_util.KeyPath,
    leaf: object,
    fix: str = _CLOSE_OVER,
) -> Array:
    """Convert a leaf of an argument to a JAX array; errors name the path of the leaf.

    Arrays, NumPy arrays and numbers can be converted. `fix` is the sentence at the end
    of the error about anything else.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        try:
            return jnp.asarray(leaf)
        except OverflowError:
            raise DrjaxValueError(
                f"drjax.{block} got {name}{jax.tree_util.keystr(path)} = {_short(leaf)}"
                ", which does not fit JAX's default integer, int32. Pass an array of "
                "a float dtype, or enable jax_enable_x64."
            ) from None
        except TypeError:
            pass
    kind = type(leaf).__name__
    if isinstance(leaf, np.ndarray):
        kind += f" of dtype {leaf.dtype}"
    raise DrjaxTypeError(
        f"drjax.{block} needs arrays as leaves, but "
        f"{name}{jax.tree_util.keystr(path)} is {kind}: {_short(leaf)}. "
        f"{where_it_goes(leaf) or fix.rstrip('.')}."
    )


def _short(leaf: object) -> str:
    """Return the `repr` of a value, cut to 60 characters, for an error."""
    text = repr(leaf)
    return text if len(text) <= 60 else text[:57] + "..."


def _raise_not_partitioned(
    block: str, tree: PyTree, partition: Partition, size: int, name: str
) -> NoReturn:
    """Raise a `DrjaxValueError` that lists the leaves with a wrong leading axis."""
    wrong = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape = jnp.shape(leaf)
        if not shape or shape[0] != size:
            what = f"shape {shape}" if shape else "a scalar, shape ()"
            wrong.append(f"  {name}{jax.tree_util.keystr(path)}: {what}")
    got = f"but got:\n{listed(wrong)}\n"
    # Exact for the most common slips; else what could be meant.
    if (fix := unstacked(tree, partition.size, name)) is not None:
        got += f"{fix}. "
    if block in ("scatter", "shard"):
        raise DrjaxValueError(
            f"drjax.{block} needs arrays [{size}, ...], one slice for each group of "
            f"{partition}, {got}Give each group exactly one slice, or declare a "
            "partition of another size."
        )
    expected = f"[{size}, ...]"
    if size != partition.size:
        expected += f" (the {size} of {partition.size} groups that one device holds)"
    raise DrjaxValueError(
        f"drjax.{block} needs partitioned values over {partition}, with leading axis "
        f"{expected}, {got}Use drjax.broadcast to give each group a copy of a global "
        f"value, drjax.scatter to hand out the {partition.size} slices of a global "
        "array, or drjax.take to choose slices of one with more."
    )


def check_weights(
    weights: PyTree,
    value_tree: PyTreeDef,
    value_leaves: Sequence[PartitionedArray],
    partition: Partition,
) -> list[Array]:
    """Check the weights of a weighted mean; return one for each leaf of its value.

    The weights are one array `[n]`, which is repeated, or a tree with the structure of
    the value, in which the shape of a weight is a leading part of that of its leaf.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(weights)
    leaves = [as_array("reduce_weighted_mean", "w", p, w) for p, w in paths]
    value = value_tree.unflatten(value_leaves)
    values = jax.tree_util.tree_flatten_with_path(value)[0]
    keys = [f"w{jax.tree_util.keystr(path)}" for path, _ in paths]
    if treedef == jax.tree_util.tree_structure(0):
        leaves, keys = leaves * len(values), keys * len(values)
    elif treedef != value_tree:
        raise DrjaxValueError(
            "drjax.reduce_weighted_mean needs as weights one array [n], or a tree with "
            "the structure of the value, but got:\n"
            f"  value:   {brief(value_tree)}\n  weights: {brief(treedef)}\n"
            "Pass one jax.Array if all leaves have the same weights."
        )
    for key, w, (path, x) in zip(keys, leaves, values, strict=True):
        _check_weight(key, w, f"x{jax.tree_util.keystr(path)}", x.shape, partition)
    return leaves


def _check_weight(
    key: str, w: Array, x_key: str, full: tuple[int, ...], partition: Partition
) -> None:
    """Check that a weight is real, and that its shape is a leading part of its leaf's.

    The keys are names with their paths, such as `w['a']`; `full` is the shape of the
    leaf.
    """
    shape = w.shape
    if not shape or shape != full[: len(shape)]:
        raise DrjaxValueError(
            "drjax.reduce_weighted_mean needs weights whose shape is the leading part "
            f"of the value's, ({full[0]},) for one weight a group of {partition}, but "
            f"{key} has shape {shape} where {x_key} has {full}."
        )
    kind = w.dtype
    real = (jnp.bool_, jnp.integer, jnp.floating)
    if not any(jnp.issubdtype(kind, allowed) for allowed in real):
        raise DrjaxTypeError(
            f"drjax.reduce_weighted_mean needs real weights, but {key} has dtype "
            f"{kind}. Pass its real part or its magnitude."
        )


_KINDS = (
    ("an async function", inspect.iscoroutinefunction),
    ("an async generator function", inspect.isasyncgenfunction),
    ("a generator function", inspect.isgeneratorfunction),
)


_RUNS_LATER = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR


def function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable without a name."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def check_plain_function(caller: str, fn: Callable[..., Any]) -> None:
    """Raise `DrjaxTypeError` if `fn` is async or a generator function.

    The body of such a function runs after the call has returned, when the partition is
    no longer in scope. `caller` is the public name of what takes it, for the error.
    """
    if isinstance(fn, types.FunctionType) and not fn.__dict__:  # neither wrapped
        if not fn.__code__.co_flags & _RUNS_LATER:  # nor marked as a coroutine
            return
    for candidate in (inspect.unwrap(fn), type(fn).__call__):
        for kind, is_kind in _KINDS:
            if is_kind(candidate):
                raise DrjaxTypeError(
                    f"{caller} needs a plain function, but {function_name(fn)} is "
                    f"{kind}: its body would run after the partition has gone out of "
                    "scope. Return the results instead."
                )


def check_keywords(
    block: str, parameters: Mapping[str, Any], keywords: Mapping[str, Any]
) -> None:
    """Raise `DrjaxTypeError` if a building block has no parameter for a keyword."""
    if unknown := [key for key in keywords if key not in parameters]:
        got = unknown[0]
        close = difflib.get_close_matches(got, parameters, n=1)
        meant = f"Did you mean {close[0]!r}?" if close else ""
        fix = _INSTEAD.get((block, got)) or _INSTEAD.get(got) or meant
        raise DrjaxTypeError(
            f"drjax.{block} takes {', '.join(parameters)}, got the keyword "
            f"{got!r}. {fix}".rstrip()
        )


# What to write in place of keywords that other functions have.
_INSTEAD: dict[str | tuple[str, str], str] = {
    ("reduce_columns", "where"): (
        "fn sees all groups, so gather the mask and close over it: "
        "taken = drjax.gather(where), and then drjax.reduce_columns(lambda column: "
        "jnp.nanmedian(jnp.where(taken, column, jnp.nan)), x)."
    ),
    "where": "To choose groups, give where= to the reduction of the result.",
    "axis": "It acts on the axis of the groups, the first; for others, use jax.numpy.",
    "weights": "For weights, use drjax.reduce_weighted_mean(x, w).",
    "weight": "For weights, use drjax.reduce_weighted_mean(x, w).",
    "w": "For weights, use drjax.reduce_weighted_mean(x, w).",
}


def checks_keywords(block: Callable[P, R]) -> Callable[P, R]:
    """Decorate a building block without `over_levels`, to check its keywords."""
    parameters = inspect.signature(block).parameters

    @functools.wraps(block)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            check_keywords(block.__name__, parameters, kwargs)
        return block(*args, **kwargs)

    return call


def check_flag(block: str, name: str, value: object) -> None:
    """Raise `DrjaxTypeError` if an option is neither True nor False."""
    if not isinstance(value, bool | np.bool_):
        raise DrjaxTypeError(
            f"drjax.{block} needs {name}= as True or False, got "
            f"{type(value).__name__}: {_short(value)}."
        )


def call_checked(caller: str, fn: Callable[..., R], args: Sequence[Any], fix: str) -> R:
    """Call a user's function; of a wrong number of arguments, say what is due."""
    try:
        return fn(*args)
    except TypeError:  # only then, as signatures take time
        check_accepts(caller, fn, args, fix)
        raise


def check_accepts(
    caller: str, fn: Callable[..., Any], args: Sequence[Any], fix: str
) -> None:
    """Raise `DrjaxTypeError` if a user's function cannot be called as `fn(*args)`.

    Only the signature is checked; nothing is called. Nothing is raised if Python knows
    no signature of `fn`. Only the number of arguments matters. `caller` is the public
    name of what calls it, and `fix` the end of the error.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = function_name(fn)
        raise DrjaxTypeError(
            f"{caller} calls {name} with {len(args)} positional argument(s), but its "
            f"signature is {name}{signature}: {error}. {fix}"
        ) from None
