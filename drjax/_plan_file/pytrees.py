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
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from drjax._compat.types import PyTree
from drjax._error_texts import brief, listed
from drjax._errors import PlanFileError
from drjax._plan_file.json_values import Json

Structure: TypeAlias = Any  # a `PyTreeDef`, or a `Tree`
Node = Any
_KEYS = (str, int, float, bool)


@dataclass(frozen=True, eq=False)
class Tree:
    """The structure of a pytree, in place of a `PyTreeDef`, for plans from files.

    `node` describes it, such as `{"list": ["leaf", {"dict": [["w", "leaf"]]}]}`.
    """

    node: Node

    @property
    def num_leaves(self) -> int:
        """The number of leaves."""
        return _leaves(self.node)

    def unflatten(self, leaves: Iterable[Any]) -> PyTree:
        """Build the pytree from its leaves, in order.

        Instances of classes become namedtuples with the same name and fields.
        """
        return _unflatten(self.node, iter(leaves))

    def paths(self) -> Iterator[str]:
        """Iterate over the paths of all leaves, as text of `jax.tree_util.keystr`."""
        return _paths(self.node, "")

    def __eq__(self, other: object) -> bool:
        """Return whether `other`, a `Tree` or a `PyTreeDef`, has the same description.

        False if `other` cannot be described without its class.
        """
        try:
            return self.node == describe(other)
        except PlanFileError:
            return False

    def __str__(self) -> str:
        return str(self.unflatten(["*"] * self.num_leaves)).replace("'*'", "*")


def describe(tree: Structure) -> Node:
    """Describe the structure of a pytree as nested JSON data, without its classes.

    `PlanFileError`: a node cannot be described without its class.
    """
    if isinstance(tree, Tree):
        return tree.node
    # A PyTreeDef has no names of children; the paths in a rebuilt pytree have them.
    return _describe(tree.unflatten(range(tree.num_leaves)))


def mismatch(tree: Structure, node: Node) -> str | None:
    """Compare the structure of a group's data with that of the plan, `node`.

    None: they are equal. Else the text has both, and the keys that differ if both are
    dicts.
    """
    planned = Tree(node)
    if planned == tree:
        return None
    try:
        actual = Tree(describe(tree))
    except PlanFileError:
        actual = tree
    text = f"its data has the structure {brief(actual)}, but the plan is for "
    text += brief(planned)
    if isinstance(actual, Tree):
        fixes = [*_fixes(actual.node, node, "")]
        text += f": {listed(fixes, ' and ', 'differences')}" * bool(fixes)
    return text


def _fixes(actual: Node, planned: Node, path: str) -> Iterator[str]:
    """Yield what makes the structure of a group's data that of the plan."""
    if actual == planned:
        return
    if planned == "leaf" and isinstance(actual, dict) and "list" in actual:
        # As json.load gives what was an array.
        yield (
            f"{path or 'it'} is a list of {len(actual['list'])}, where the plan has an "
            "array: numpy.asarray makes one"
        )
    if not (isinstance(actual, dict) and isinstance(planned, dict)):
        return
    if "dict" in actual and "dict" in planned:
        of, expected = dict(actual["dict"]), dict(planned["dict"])
        extra = [repr(k) for k in of if k not in expected]
        missing = [repr(k) for k in expected if k not in of]
        where = f" in {path}" * bool(path)
        if extra:
            yield f"leave out {listed(extra, ', ', 'keys')}{where}"
        if missing:
            yield f"add {listed(missing, ', ', 'keys')}{where}"
        for key in expected:
            if key in of:
                yield from _fixes(of[key], expected[key], f"{path}[{key!r}]")
    for kind in ("tuple", "list"):
        if kind in actual and kind in planned:
            pairs = zip(actual[kind], planned[kind], strict=False)
            for i, (a, b) in enumerate(pairs):
                yield from _fixes(a, b, f"{path}[{i}]")


def _describe(x: PyTree) -> Node:
    """Describe the structure of a pytree, whose leaves may be any objects.

    `PlanFileError`: a node cannot be described without its class.
    """
    if x is None:
        return "none"
    # One level only, as each child counts as a leaf.
    below = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]
    # An empty path: `x` has no children, and is a leaf itself.
    if len(below) == 1 and not below[0][0]:
        return "leaf"
    keys = [path[0] for path, _ in below]
    nodes = [_describe(child) for _, child in below]
    # Some registered classes have keys, as `nnx.State`. `all` of no keys is true, so
    # that only a real dict may be empty.
    if isinstance(x, dict) or (keys and all(isinstance(k, DictKey) for k in keys)):
        # Pairs, as JSON objects have only strings as keys.
        return {"dict": [[_key(k.key), n] for k, n in zip(keys, nodes, strict=True)]}
    if isinstance(x, list):
        return {"list": nodes}
    # `()` has no keys either, and is no record.
    if all(isinstance(k, GetAttrKey) for k in keys) and type(x) is not tuple:
        # An impossible namedtuple is an error now, and not when the file is loaded.
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


def _key(key: Any) -> str | int | float | bool:
    """Return a dict's key if it comes back from JSON equal and of the same type.

    Others are refused: None, one of a subclass, such as `np.float64` or an enum, or one
    of any other type than `_KEYS`.
    """
    if _is_key(key):
        return key
    raise PlanFileError(
        "A plan file holds dicts whose keys are strings or finite numbers, got the key "
        f"{key!r}. Rename it before the program is planned."
    )


def _is_key(key: object) -> bool:
    """Return whether JSON can hold `key`, a key of a dict, and give it back unchanged.

    Such keys are exactly of type `str`, `int`, `float` (finite) or `bool`.
    """
    # By type: JSON would load a subclass, such as np.float64, as its base class. It has
    # no infinities and no NaN.
    return type(key) in _KEYS and (type(key) is not float or math.isfinite(key))


@functools.lru_cache(maxsize=1024)
def _record(name: str, fields: tuple[str, ...]) -> type:
    """Make the namedtuple class that stands for a class of the saved pytree; cached.

    Equal arguments give the same class, as JAX compares the nodes of pytrees by class.
    `ValueError`: a namedtuple cannot have that name or these fields.
    """
    return collections.namedtuple(name, fields)


def _children(node: Node) -> list[tuple[str, Node]]:
    """List the children of a container, neither a leaf nor none, with their keys.

    Keys are text, as in the paths of leaves: `.field`, `['key']` or `[0]`.
    """
    [(kind, parts)] = node.items()
    if kind == "record":
        return [(f".{field}", child) for field, child in parts[1]]
    if kind == "dict":
        return [(f"[{key!r}]", child) for key, child in parts]
    return [(f"[{i}]", child) for i, child in enumerate(parts)]


def _leaves(node: Node) -> int:
    """Count the leaves of the pytree that `node` describes."""
    if isinstance(node, str):
        return node == "leaf"
    return sum(_leaves(child) for _, child in _children(node))


def _paths(node: Node, path: str) -> Iterator[str]:
    """Yield the path of each leaf of `node` as text, after `path`, that of its root."""
    if node == "leaf":
        yield path
    elif node != "none":
        for key, child in _children(node):
            yield from _paths(child, path + key)


def _unflatten(node: Node, leaves: Iterator[Any]) -> PyTree:
    """Build the pytree that `node` describes, from its leaves in order."""
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


def validate(node: Json, depth: int = 0) -> Node:
    """Check the description of a pytree that was read from a file, and return it.

    It is not trusted: it may be any JSON value. `depth` is the number of nodes around
    it; a description may be nested 200 deep. Callers must catch `ValueError` and
    `TypeError`: a child of a wrong JSON type, such as a number in place of a list, may
    raise either.
    """
    if node in ("leaf", "none"):
        return node
    # Functions of descriptions recurse: this limit is far below Python's own.
    if depth > 200 or not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"a pytree cannot have the node {str(node)[:60]}")
    [(kind, parts)] = node.items()
    if kind == "record":
        # namedtuple compiles these names; it checks first that they are identifiers.
        name, parts = parts
        _record(name, tuple(field for field, _ in parts))
    elif kind == "dict":
        # Equal keys of different types, as 1 and true, would be one key of the dict.
        if len({key for key, _ in parts if _is_key(key)}) != len(parts):
            raise ValueError("a dict of a pytree has a key twice, or one of no use")
    elif kind in ("list", "tuple"):
        parts = [(None, child) for child in parts]
    else:
        raise ValueError(f"a pytree cannot have a {kind}")
    for _, child in parts:
        validate(child, depth + 1)
    return node
