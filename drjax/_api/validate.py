"""Checks of users' functions and pytrees, with errors that name the leaf.

Input: a tree or a function, and the name of the building block that takes it. Output:
arrays as leaves, or an error. Invariants: an error names the path of the leaf, what was
needed, what was passed, and the fix. Sharp edge: Python numbers and NumPy arrays become
JAX arrays, with JAX's default dtypes.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._partition import Partition


def flatten(block: str, tree: Any, name: str = "x"):
    """Flatten the argument of a block, with numbers and NumPy arrays as JAX arrays.

    Args:
      block: The name of the building block, for errors.
      tree: The argument, a tree.
      name: The name of the argument, for errors.

    Returns:
      `(leaves, tree structure)`.

    Raises:
      DrjaxTypeError: A leaf is no array or number.
      DrjaxValueError: A Python integer does not fit JAX's default dtype.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [as_array(block, name, path, leaf) for path, leaf in leaves], treedef


def flatten_partitioned(
    block: str, tree: Any, partition: Partition, size: int, name: str = "x"
):
    """Flatten the partitioned argument of a block, and check its leaves.

    Args:
      block: The name of the building block, for errors.
      tree: The argument, a tree.
      partition: The partition, for errors.
      size: The leading axis that leaves need: n, or in a user's `shard_map` the number
        of groups of a device.
      name: The name of the argument, for errors.

    Returns:
      `(leaves as JAX arrays [size, *s], tree structure)`.

    Raises:
      DrjaxTypeError: A leaf is no array or number.
      DrjaxValueError: A leaf has another leading axis.
    """
    leaves, treedef = flatten(block, tree, name)
    if any(jnp.ndim(x) == 0 or jnp.shape(x)[0] != size for x in leaves):
        _raise_not_partitioned(block, tree, partition, size, name)
    return leaves, treedef


_CLOSE_OVER = "Close over values that are not arrays instead of passing them."


def as_array(block: str, name: str, path, leaf: Any, fix: str = _CLOSE_OVER):
    """A leaf of the argument `name` as a JAX array, or an error that names its path.

    Args:
      block: The name of the building block, for errors.
      name: The name of the argument, for errors.
      path: The path of the leaf in it, as in `jax.tree_util`.
      leaf: The leaf: an array or a number.
      fix: What to do if it is neither, for the error.

    Raises:
      DrjaxTypeError: JAX has no array for the leaf.
      DrjaxValueError: It is a Python integer that does not fit JAX's default dtype.
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
        f"{name}{jax.tree_util.keystr(path)} is {kind}: {_short(leaf)}. {fix}"
    )


def _short(leaf: Any) -> str:
    """The `repr` of a value, cut to 60 characters, for an error."""
    text = repr(leaf)
    return text if len(text) <= 60 else text[:57] + "..."


def _raise_not_partitioned(block, tree, partition, size, name):
    """Raise `DrjaxValueError`, with all leaves whose leading axis is not `size`.

    Args:
      block: The name of the building block.
      tree: Its argument, a tree.
      partition: The partition.
      size: The leading axis that leaves need.
      name: The name of the argument.
    """
    wrong = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape = jnp.shape(leaf)
        if not shape or shape[0] != size:
            what = f"shape {shape}" if shape else "a scalar, shape ()"
            wrong.append(f"  {name}{jax.tree_util.keystr(path)}: {what}")
    got = "but got:\n" + "\n".join(wrong) + "\n"
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
        f"value, or drjax.scatter to hand out the {partition.size} slices of a "
        "global array."
    )


def check_weights(weights: Any, value_tree, value_leaves, partition: Partition):
    """Check the weights of a weighted mean, and return one for each leaf of the value.

    Args:
      weights: The argument: one array, or a tree with the structure of the value.
      value_tree: The structure of the value.
      value_leaves: Its leaves, `[n, *s]`.
      partition: The partition, for errors.

    Returns:
      The list of weights; a single array for all leaves is repeated.

    Raises:
      DrjaxTypeError: A weight is no array of real numbers or bools.
      DrjaxValueError: The structures differ, or the shape of a weight is not the
        leading part of that of its leaf.
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
            f"  value:   {value_tree}\n  weights: {treedef}\n"
            "Pass one jax.Array if all leaves have the same weights."
        )
    for key, w, (path, x) in zip(keys, leaves, values, strict=True):
        _check_weight(key, w, f"x{jax.tree_util.keystr(path)}", x.shape, partition)
    return leaves


def _check_weight(key: str, w, x_key: str, full, partition: Partition) -> None:
    """Check that a weight is real, and that its shape is the leading part of `full`.

    Args:
      key: The path of the weight, for errors.
      w: The weight, an array.
      x_key: The path of the leaf of the value that it weighs, for errors.
      full: The shape of this leaf, a tuple.
      partition: The partition, for errors.

    Raises:
      DrjaxTypeError: The weight is not real.
      DrjaxValueError: Its shape does not fit.
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


def function_name(fn: Any) -> str:
    """The name of a function, or of the class of a callable object."""
    return getattr(fn, "__name__", None) or type(fn).__name__


def check_plain_function(caller: str, fn: Any) -> None:
    """Raise `DrjaxTypeError` for a function whose body runs only after it has returned.

    That is: async functions and generators, as the partition is out of scope then.

    Args:
      caller: The public name of what takes the function, for errors.
      fn: The function, or a callable object.
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


def check_accepts(fn: Callable, args: tuple) -> None:
    """Raise a `DrjaxTypeError` if the signature of `fn` does not fit `fn(*args)`.

    Nothing is raised if Python knows no signature of `fn`.
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
            f"drjax.map_fn calls {name} with {len(args)} positional argument(s), but "
            f"its signature is {name}{signature}: {error}. A plain tuple is unpacked "
            "into the arguments of the function; wrap it as ((a, b),), or use a list, "
            "to pass it as one argument."
        ) from None
