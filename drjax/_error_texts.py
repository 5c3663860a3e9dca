"""Parts of error texts: lists that end, and what goes where.

Input: lines, or an object in a place where it does not fit. Output: text.

Invariants: a text about a pytree of any size is short. Sharp edge: types of other
libraries are recognized by their names, as they are not imported.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_MOST = 10  # leaves in one text
_LONGEST = 300  # characters of a structure


def called_in_two_steps(caller: str, needs: str, got: object) -> str:
    """Return the error for a wrong argument of `caller` in `caller(fn)(*args)`."""
    return (
        f"{caller} needs {needs}, got {type(got).__name__}. The arguments of the "
        f"function go to what it returns: {caller}(fn)(*args)."
    )


def listed(items: Sequence[str], separator: str = "\n", what: str = "leaves") -> str:
    """Join the first ten items, and say how many more there are."""
    more = len(items) - _MOST
    if more <= 1:
        return separator.join(items)
    return separator.join([*items[:_MOST], f"and {more:,} more {what}"])


def brief(structure: object) -> str:
    """Return the text of a pytree's structure, cut if it is long."""
    text = str(structure)
    if len(text) <= _LONGEST + 100:
        return text
    return f"{text[:_LONGEST]}... ({getattr(structure, 'num_leaves', 'many')} leaves)"


_GROUPS = (
    "Groups and Parquet are arguments of what drjax.jit and an engine's compile "
    "return, as drjax.backends.in_process.compile(plan). Programs, jax.jit, make_plan "
    "and the xla and reference backends take arrays [n, ...], one slice for each "
    "group: stack the groups' arrays, or plan for jax.ShapeDtypeStruct(s)"
)
_FRAME = (
    "A DataFrame is no array: pass arrays of its columns, such as "
    "df['x'].to_numpy(), with one row for each group; or, for several rows a group, "
    "give an engine Groups([...]) with one pytree of arrays for each group"
)
_GROUPBY = (
    "A groupby is no array: give an engine Groups([rows['x'].to_numpy() for _, rows "
    "in groupby]), with one pytree of arrays for each group; or pad these to one shape "
    "and stack them"
)
_HDF5 = (
    "An h5py object is no array: read it, x[...] gives an array; or give an engine "
    "Groups(x), which reads a data set of n rows group by group, or "
    "Groups([*file.values()])"
)
_DATASET = (
    "A dataset of Ray Data is an argument of what drjax.backends.ray.compile returns. "
    "Elsewhere pass Groups(dataset.iter_rows), which reads it here, or arrays"
)
_MAPPING = (
    "The keys of a dict are not the groups: pass Groups([*clients.values()]), with "
    "one pytree of arrays for each group, in their order"
)


def where_it_goes(x: object) -> str | None:
    """Say where an object goes that is no array, or None: it is of no known type."""
    names = {f"{t.__module__.split('.')[0]}.{t.__name__}" for t in type(x).__mro__}
    if "drjax.Groups" in names:
        return _GROUPS
    if {"DataFrameGroupBy", "SeriesGroupBy", "GroupBy"} & {
        name.split(".")[-1] for name in names
    }:
        return _GROUPBY
    if names & {"pandas.DataFrame", "polars.DataFrame", "pyarrow.Table"}:
        return _FRAME
    if "ray.Dataset" in names:
        return _DATASET
    if any(name.startswith("h5py.") for name in names):
        return _HDF5
    return None


def no_groups(x: object) -> str | None:
    """Say what to give `Groups` in place of `x`; None if it may be the groups' data."""
    text = where_it_goes(x)
    if isinstance(x, Mapping) and text in (None, _GROUPS, _HDF5):
        return _MAPPING
    return None if text == _HDF5 else text  # an HDF5 data set is read by index


def misplaced(leaves: Sequence[Any]) -> str | None:
    """Say where the first of these leaves goes that is no array; None: all may be."""
    return next((text for text in map(where_it_goes, leaves) if text), None)


def unstacked(tree: object, size: int, name: str) -> str | None:
    """Say how to fix a list of the groups' pytrees, or lists of numbers, in a tree.

    Return None if the tree `name` has neither, `size` being the number of groups.
    """
    lists = [(name, tree)]
    while lists:
        path, x = lists.pop(0)
        if isinstance(x, Mapping):
            lists += [(f"{path}[{key!r}]", value) for key, value in x.items()]
        elif isinstance(x, list | tuple) and not hasattr(x, "_fields"):
            if isinstance(x, list) and x and _are_numbers(x):
                return (
                    f"{path} is a list of numbers: make it an array, with "
                    "jax.numpy.asarray"
                )
            if isinstance(x, list) and len(x) == size > 1:
                stack = "jax.tree.map(lambda *slices: jax.numpy.stack(slices), "
                return (
                    f"{path} is a list of {size} items, one for each group: stack "
                    f"them, {stack}*{path})"
                )
            lists += [(f"{path}[{i}]", value) for i, value in enumerate(x[:_MOST])]
    return None


def _are_numbers(x: list) -> bool:
    """Whether a list, or its first items at any depth, are Python numbers."""
    while isinstance(x, list) and x:
        x = x[0]
    return isinstance(x, bool | int | float | complex)
