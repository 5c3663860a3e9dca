"""Paths in pytrees, as users write them: `1`, `"model"` or `(0, "inner")`.

Input: a pytree, and an index, key or field name, or a tuple of these. Output: the
subtree, or a copy of the pytree with another one in its place.

Invariants: types of keys are compared, so that True is not the index 1.
"""

from typing import Any, TypeAlias

import jax

from drjax._compat.types import PyTree
from drjax._errors import DrjaxValueError

KeyPath: TypeAlias = tuple[Any, ...]


def as_path(path: KeyPath | int | str) -> KeyPath:
    """Return a path in a pytree, as users write it, as a tuple: `(1,)` for `1`."""
    return path if isinstance(path, tuple) else (path,)


def path_text(path: KeyPath) -> str:
    """Return a path as text: `1` for `(1,)`, `0['inner']` for `(0, 'inner')`."""
    return "".join(str(k) if i == 0 else f"[{k!r}]" for i, k in enumerate(path)) or "()"


def _children(tree: PyTree) -> tuple[list[tuple[Any, PyTree]], Any]:
    """Return the children of a pytree's root with their keys, and its structure.

    A key is as in the key paths of `jax.tree_util` (`SequenceKey`, `DictKey`, ...). The
    structure's `unflatten` takes the children in this order. A leaf has no children.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is not tree
    )
    # Of a leaf, the path to itself is empty.
    return [(path[0], x) for path, x in pairs if path], structure


def _is_key(key: object, name: object) -> bool:
    """Return whether a key of `jax.tree_util` equals an element of a user's path.

    Compared is the index, key or field name that the first holds. Types must be equal
    too, so that True is not the index 1.
    """
    fields = ("idx", "key", "name")
    return any(
        type(value) is type(name) and value == name
        for value in (getattr(key, field, None) for field in fields)
    )


def subtree(tree: PyTree, path: KeyPath, what: str) -> PyTree:
    """Return the subtree of a pytree at a path; () is the whole pytree.

    `what` is what is looked for, for the error of a path that is not there: `keep= has
    result 0 of step`.
    """
    for name in path:
        children, _ = _children(tree)
        if not (same := [x for key, x in children if _is_key(key, name)]):
            names = [jax.tree_util.keystr((key,)) for key, _ in children]
            raise DrjaxValueError(
                f"{what}, but in its place there is no {name!r}, only "
                f"{', '.join(names) or 'a single array'}."
            )
        (tree,) = same
    return tree


def replaced(tree: PyTree, path: KeyPath, new: PyTree) -> PyTree:
    """Return a copy of a pytree in which the subtree at a path is replaced by another.

    The path must exist; for () the result is `new`.
    """
    if not path:
        return new
    children, structure = _children(tree)
    return structure.unflatten(
        replaced(x, path[1:], new) if _is_key(key, path[0]) else x
        for key, x in children
    )
