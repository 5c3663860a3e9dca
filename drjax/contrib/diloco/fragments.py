"""Fragments: which parameters are synchronized together.

Input: the parameters, and patterns of their paths. Output: `Fragments`, in which each
leaf of floats, or each row of it, is in one fragment.

Invariants: units, which are never divided, are dealt to fragments by size: the largest
first, each to the fragment that has the least so far. So layers of one size are dealt
in turn, which is the strided pattern of Streaming DiLoCo (Douillard et al. 2025, arXiv
2501.18512, section 3.1).
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from drjax._compat.types import Array, PyTree, PyTreeDef
from drjax._errors import DrjaxValueError
from drjax._partition import integer_of
from drjax.contrib.diloco.train_state import freeze, is_float

Rows = tuple[int, ...] | None  # of a leaf's leading axis; None: the whole leaf
Units = Mapping[str, Mapping[int, Rows]]  # by name: leaves by their index


class Fragment(NamedTuple):
    """Parameters that are sent together."""

    names: tuple[str, ...]  # of its units
    leaves: Mapping[int, Rows]
    bytes: int
    treedef: PyTreeDef  # of all parameters

    def take(self, leaves: Sequence[Array]) -> PyTree:
        """The tree of the parameters, with None for what is not in the fragment."""
        out: list[Any] = [None] * len(leaves)
        for i, rows in self.leaves.items():
            out[i] = leaves[i] if rows is None else leaves[i][_index(rows)]
        return self.treedef.unflatten(out)

    def put(self, leaves: Sequence[Array], values: PyTree) -> list[Array]:
        """The leaves with other values of the fragment, a tree as `take` makes it."""
        out, new = list(leaves), self.treedef.flatten_up_to(values)
        for i, rows in self.leaves.items():
            out[i] = new[i] if rows is None else out[i].at[_index(rows)].set(new[i])
        return out


class Fragments(NamedTuple):
    """Parameters in fragments: `diloco.fragments` makes them. Printed, a table.

    Attributes:
      parts: For each fragment the `names` of what is in it, and its `bytes`.
      types: Shape and dtype of each parameter.
    """

    parts: tuple[Fragment, ...]
    types: tuple[Any, ...]

    def check(self, theta: PyTree) -> None:
        """Raise unless these are fragments of parameters of this structure."""
        leaves, treedef = jax.tree.flatten(theta)
        if (treedef, _types(leaves)) != (self.parts[0].treedef, self.types):
            raise DrjaxValueError(
                "diloco needs fragments of the parameters that params= selects, got "
                "those of others. Make them of these: diloco.fragments(params, count)."
            )

    def __str__(self) -> str:
        total = sum(part.bytes for part in self.parts)
        lines = ["fragment           bytes   share  parameters"]
        for p, part in enumerate(self.parts):
            names = ", ".join(part.names[:4])
            more = f", and {len(part.names) - 4} more" if len(part.names) > 4 else ""
            share = part.bytes / total
            lines.append(f"{p:8}  {part.bytes:14,}  {share:6.1%}  {names}{more}")
        return "\n".join(lines)


def fragments(
    params: PyTree,
    count: int = 1,
    *,
    layers: str | None = None,
    scanned: str | None = None,
    apart: str | None = None,
) -> Fragments:
    """Divide parameters into fragments of about the same number of bytes.

    Without patterns a unit is a leaf. Patterns are regular expressions, searched in the
    path of a leaf, such as `blocks/0/attention/kernel`. Only floats are synchronized:
    other leaves, as counts and random keys, are in no fragment.

    Args:
      params: The parameters, a tree of arrays or of `jax.ShapeDtypeStruct`.
      count: Number of fragments (P), with that of `apart`.
      layers: Leaves in whose paths it finds the same text are one unit, as of a layer:
        `r"blocks/\\d+"`.
      scanned: The leaves of layers that are stacked on their leading axis, for
        `jax.lax.scan`: row i of all of them is one unit.
      apart: The leaves that make a fragment of their own, the last one, as embeddings.

    Returns:
      The fragments. `print` shows their bytes and names.

    Raises:
      DrjaxValueError: There are no floats, or fewer units than fragments; a pattern
        finds nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> from drjax.contrib import diloco
      >>> params = {"embed": jnp.ones((9, 2)), "blocks": {"w": jnp.ones((4, 2, 2))}}
      >>> print(diloco.fragments(params, 3, scanned="blocks", apart="embed"))
      fragment           bytes   share  parameters
             0              32   23.5%  blocks[0], blocks[2]
             1              32   23.5%  blocks[1], blocks[3]
             2              72   52.9%  embed

    Source: Douillard et al. 2025, "Streaming DiLoCo", section 3.1.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(freeze(params))
    leaves = [x for _, x in named]
    show = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    paths = {i: show(x[0]) for i, x in enumerate(named) if is_float(x[1]) and x[1].size}
    for name, pattern in dict(layers=layers, scanned=scanned, apart=apart).items():
        if pattern and not any(re.search(pattern, x) for x in paths.values()):
            raise DrjaxValueError(
                f"diloco.fragments({name}={pattern!r}) finds none of the parameters "
                f"{', '.join(paths.values())}."
            )
    units: dict[str, dict[int, Rows]] = {}
    alone: dict[str, dict[int, Rows]] = {}
    for i, path in paths.items():
        if apart and re.search(apart, path):
            alone[path] = {i: None}
        elif scanned and leaves[i].ndim and (found := re.search(scanned, path)):
            for row in range(leaves[i].shape[0]):
                units.setdefault(f"{found[0]}[{row}]", {})[i] = (row,)
        else:
            found = layers and re.search(layers, path)
            units.setdefault(found[0] if found else path, {})[i] = None
    parts = (integer_of(count) or 0) - bool(alone)
    if not min(1, len(units)) <= parts <= len(units) or not (units or alone):
        raise DrjaxValueError(
            "diloco.fragments needs a count of at least 1, and one more for apart=; at "
            f"most {len(units) + bool(alone)}, as many as the patterns make parts of "
            f"the floats; got {count!r}."
        )
    join = lambda units: _join(units, treedef, leaves)
    sizes = {name: join({name: unit}).bytes for name, unit in units.items()}
    part_of, totals = {}, [0] * parts
    for name in sorted(units, key=lambda name: -sizes[name]):
        part_of[name] = totals.index(min(totals))
        totals[part_of[name]] += sizes[name]
    dealt = [{x: units[x] for x in units if part_of[x] == p} for p in range(parts)]
    whole = [join(units) for units in (*dealt, alone) if units]
    return Fragments(tuple(whole), _types(leaves))


def _join(units: Units, treedef: PyTreeDef, leaves: list[Any]) -> Fragment:
    joined: dict[int, Rows] = {}
    for unit in units.values():
        for i, rows in unit.items():
            joined[i] = None if rows is None else (*(joined.get(i) or ()), *rows)
    size = 0
    for i, rows in joined.items():
        shape = leaves[i].shape if rows is None else (len(rows), *leaves[i].shape[1:])
        size += math.prod(shape) * leaves[i].dtype.itemsize
        if rows == tuple(range(leaves[i].shape[0] if rows else 0)):
            joined[i] = None  # all of them
    return Fragment(tuple(units), joined, size, treedef)


def _types(leaves: list[Any]) -> tuple[Any, ...]:
    return tuple((tuple(x.shape), x.dtype) for x in leaves)


def _index(rows: tuple[int, ...]) -> Any:
    """Rows as a slice if they are at one distance, which needs no gather."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    even = rows == tuple(range(rows[0], rows[-1] + 1, step))
    return slice(rows[0], rows[-1] + 1, step) if even else np.array(rows)
