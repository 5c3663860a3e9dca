"""Checks of users' pytrees at the edge of the API, with errors that name the leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._partition import Partition


def flatten(block: str, tree: Any, name: str = "x"):
    """Flatten a tree and check that each leaf is an array (or a number)."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [as_array(block, name, path, leaf) for path, leaf in leaves], treedef


def flatten_partitioned(
    block: str, tree: Any, partition: Partition, rows: int, name: str = "x"
):
    """As `flatten`, and check that each leaf has a leading axis of one row a group."""
    leaves, treedef = flatten(block, tree, name)
    if any(jnp.ndim(x) == 0 or jnp.shape(x)[0] != rows for x in leaves):
        _raise_not_partitioned(block, tree, partition, rows, name)
    return leaves, treedef


def as_array(block: str, name: str, path, leaf: Any):
    if isinstance(leaf, jax.Array):
        return leaf
    if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        try:
            return jnp.asarray(leaf)
        except TypeError:
            pass
    kind = type(leaf).__name__
    if isinstance(leaf, np.ndarray):
        kind += f" of dtype {leaf.dtype}"
    raise DrjaxTypeError(
        f"drjax.{block} needs arrays as leaves, but "
        f"{name}{jax.tree_util.keystr(path)} is {kind}: {_short(leaf)}. Close over "
        "values that are not arrays instead of passing them."
    )


def _short(leaf: Any) -> str:
    text = repr(leaf)
    return text if len(text) <= 60 else text[:57] + "..."


def _raise_not_partitioned(block, tree, partition, rows, name):
    wrong = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape = jnp.shape(leaf)
        if not shape or shape[0] != rows:
            what = f"shape {shape}" if shape else "a scalar, shape ()"
            wrong.append(f"  {name}{jax.tree_util.keystr(path)}: {what}")
    where = f"[{rows}, ...]"
    if rows != partition.size:
        where += f" (the {rows} of {partition.size} groups that one device holds)"
    raise DrjaxValueError(
        f"drjax.{block} needs partitioned values over {partition}, with leading axis "
        f"{where}, but got:\n" + "\n".join(wrong) + "\n"
        f"Use drjax.broadcast to give each group a copy of a global value, or "
        f"drjax.scatter to hand out the {partition.size} rows of a global array."
    )


def check_weights(weights: Any, value_tree, value_leaves, partition: Partition):
    """Weights as a list, one for each leaf, from one array or from a matching tree."""
    leaves, treedef = flatten("reduce_weighted_mean", weights, "w")
    if treedef == value_tree:
        matched = leaves
    elif treedef == jax.tree_util.tree_structure(0):
        matched = leaves * len(value_leaves)
    else:
        raise DrjaxValueError(
            "drjax.reduce_weighted_mean needs as weights one array [n], or a tree with "
            "the structure of the value.\n"
            f"  value:   {value_tree}\n  weights: {treedef}"
        )
    for w, x in zip(matched, value_leaves, strict=True):
        shape, full = jnp.shape(w), jnp.shape(x)
        if len(shape) > len(full) or shape != full[: len(shape)] or not shape:
            raise DrjaxValueError(
                "drjax.reduce_weighted_mean needs weights whose shape is the leading "
                f"part of the value's: [{full[0]}] for one weight a group, got weights "
                f"{shape} for a value {full}."
            )
        if not (
            jnp.issubdtype(jnp.result_type(w), jnp.floating)
            or jnp.issubdtype(jnp.result_type(w), jnp.integer)
            or jnp.result_type(w) == jnp.bool_
        ):
            raise DrjaxTypeError(
                "drjax.reduce_weighted_mean needs real weights, got dtype "
                f"{jnp.result_type(w)}."
            )
    return matched
