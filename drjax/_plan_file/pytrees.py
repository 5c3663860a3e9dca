"""The structure of pytrees as data, without the classes that made them.

A node is `"leaf"`, `"none"`, or an object with one key:

    {"tuple": [node, ...]}   {"list": [node, ...]}   {"dict": [[key, node], ...]}
    {"record": [name, [[field, node], ...]]}

A record is a namedtuple, or a class registered with JAX whose children have attribute
names. A registered class whose children have keys is a dict. A file holds no code, so
what comes back of a record is a namedtuple of the same name and fields.
"""

import collections
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from drjax._errors import PlanFileError

Node = Any
_KEYS = (str, int, float, bool)


@dataclass(frozen=True, eq=False)
class Tree:
    """The structure of a pytree, in place of a `jax.tree_util.PyTreeDef`.

    Attributes:
      node: The description of its root, JSON data as above.
    """

    node: Node

    @property
    def num_leaves(self) -> int:
        """The number of leaves, as `PyTreeDef.num_leaves`."""
        return _leaves(self.node)

    def unflatten(self, leaves) -> Any:
        """The pytree with these leaves; a record becomes a namedtuple."""
        return _unflatten(self.node, iter(leaves))

    def paths(self) -> Iterator[str]:
        """The path of each leaf, as `jax.tree_util.keystr` writes it."""
        return _paths(self.node, "")

    def __eq__(self, other) -> bool:
        """Whether a `Tree` or a `PyTreeDef` has the same description.

        False for what cannot be described without its class.
        """
        try:
            return self.node == describe(other)
        except PlanFileError:
            return False

    def __str__(self) -> str:
        return str(self.unflatten(["*"] * self.num_leaves)).replace("'*'", "*")


def describe(tree: Any) -> Node:
    """The description, as JSON data, of a `Tree` or a `PyTreeDef`.

    Raises:
      PlanFileError: A node cannot be described without its class.
    """
    if isinstance(tree, Tree):
        return tree.node
    return _describe(tree.unflatten(range(tree.num_leaves)))


def _describe(x: Any) -> Node:
    """The description, as JSON data, of a pytree, whose leaves may be any objects.

    Raises:
      PlanFileError: A node cannot be described without its class.
    """
    if x is None:
        return "none"
    below = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    if len(below) == 1 and not below[0][0]:
        return "leaf"
    keys = [path[0] for path, _ in below]
    nodes = [_describe(child) for _, child in below]
    if isinstance(x, dict) or (keys and all(isinstance(k, DictKey) for k in keys)):
        return {"dict": [[_key(k.key), n] for k, n in zip(keys, nodes, strict=True)]}
    if isinstance(x, list):
        return {"list": nodes}
    if all(isinstance(k, GetAttrKey) for k in keys) and type(x) is not tuple:
        name, fields = type(x).__name__, [k.name for k in keys]
        try:
            _record(name, tuple(fields))
        except ValueError as error:
            raise PlanFileError(
                f"A plan file holds {name} as a namedtuple, which cannot have the "
                f"fields {', '.join(fields)}: {error}. Rename them."
            ) from None
        return {"record": [name, [*map(list, zip(fields, nodes, strict=True))]]}
    if all(isinstance(k, SequenceKey) for k in keys):
        return {"tuple": nodes}
    raise PlanFileError(
        "A plan file describes pytrees by the names of their parts, but JAX knows none "
        f"for those of {type(x).__name__}. Register the class with "
        "jax.tree_util.register_dataclass or register_pytree_with_keys, or pass its "
        "leaves in a dict."
    )


def _key(key: Any) -> Any:
    """Return the key of a dict if JSON can hold it; raise `PlanFileError` if not."""
    if type(key) in _KEYS:
        return key
    raise PlanFileError(
        "A plan file holds dicts whose keys are strings or numbers, got the key "
        f"{key!r}. Rename it before the program is planned."
    )


@functools.lru_cache(maxsize=1024)
def _record(name: str, fields: tuple[str, ...]) -> type:
    """The namedtuple class that stands for a record of this name with these fields.

    Cached: JAX compares the nodes of pytrees by class, so equal records need one class.

    Raises:
      ValueError: A namedtuple cannot have that name or these fields.
    """
    return collections.namedtuple(name, fields)


def _children(node: Node) -> list[tuple[str, Node]]:
    """`(key, description)` of each child of a node.

    Keys are as in paths: `.field` or `[0]`. The node is a container: neither `"leaf"`
    nor `"none"`.
    """
    [(kind, parts)] = node.items()
    if kind == "record":
        return [(f".{field}", child) for field, child in parts[1]]
    if kind == "dict":
        return [(f"[{key!r}]", child) for key, child in parts]
    return [(f"[{i}]", child) for i, child in enumerate(parts)]


def _leaves(node: Node) -> int:
    """The number of leaves of a description."""
    if isinstance(node, str):
        return node == "leaf"
    return sum(_leaves(child) for _, child in _children(node))


def _paths(node: Node, path: str) -> Iterator[str]:
    """The paths of the leaves of a description; `path` is that of its root."""
    if node == "leaf":
        yield path
    elif node != "none":
        for key, child in _children(node):
            yield from _paths(child, path + key)


def _unflatten(node: Node, leaves: Iterator) -> Any:
    """The pytree of a description; its leaves are taken from the iterator, in order."""
    if node == "leaf":
        return next(leaves)
    if node == "none":
        return None
    parts = [_unflatten(child, leaves) for _, child in _children(node)]
    [(kind, content)] = node.items()
    if kind == "dict":
        return dict(zip((key for key, _ in content), parts, strict=True))
    if kind == "record":
        return _record(content[0], tuple(name for name, _ in content[1]))(*parts)
    return parts if kind == "list" else tuple(parts)


def validate(node: Any, depth: int = 0) -> Node:
    """Check a description that was read from a file, and return it.

    Args:
      node: The description, JSON data.
      depth: How deep the node lies in the whole description; more than 200 is refused.

    Raises:
      ValueError: It describes no pytree. (Malformed children may raise `TypeError`.)
    """
    if node in ("leaf", "none"):
        return node
    if depth > 200 or not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"a pytree cannot have the node {str(node)[:60]}")
    [(kind, parts)] = node.items()
    if kind == "record":
        name, parts = parts
        _record(name, tuple(field for field, _ in parts))
    elif kind == "dict":
        if len({key for key, _ in parts if type(key) in _KEYS}) != len(parts):
            raise ValueError("a dict of a pytree has a key twice, or one of no use")
    elif kind in ("list", "tuple"):
        parts = [(None, child) for child in parts]
    else:
        raise ValueError(f"a pytree cannot have a {kind}")
    for _, child in parts:
        validate(child, depth + 1)
    return node
