"""A table with one row for each example, whose groups are those of equal keys.

Input: an Arrow table, or what becomes one, and the name of the column of keys. Output:
a sequence with the rows of each group, for `Groups`.

Invariants: groups are in the order of their keys, and rows of a group in the order of
the table. Nothing is copied but the rows of a group that is read. Sharp edges: keys are
read once, for all rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from drjax._compat.types import PyTree
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._extras import needed
from drjax.engines.slices.arrow_columns import to_numpy


class RowsByKey:
    """The rows of each group, as a pytree of arrays `[rows, ...]`.

    Attributes:
      keys: The key of each group, in their order.
    """

    def __init__(self, table: Any, key: str, columns: Callable[[Any], Any] | None):
        arrow = needed("pyarrow", "ray", "Groups.by_key")
        compute = needed("pyarrow.compute", "ray", "Groups.by_key")
        try:
            table = arrow.table(table)
        except (TypeError, ValueError, arrow.ArrowInvalid) as error:
            raise DrjaxTypeError(
                "Groups.by_key needs an Arrow table, a DataFrame or a dict of columns, "
                f"got {type(table).__name__}: {error}"
            ) from error
        if table.column_names.count(key) != 1:
            raise DrjaxValueError(
                f"Groups.by_key needs one column {key!r}; the table has "
                f"{', '.join(map(repr, table.column_names))}."
            )
        column = table.column(key)
        if column.null_count:
            raise DrjaxValueError(
                f"{column.null_count:,} rows have no {key!r}: leave them out, or give "
                "them a key."
            )
        unique = compute.unique(column)
        unique = unique.take(compute.sort_indices(unique))
        group = compute.index_in(column, unique).to_numpy()
        self._order = np.argsort(group, kind="stable")
        counts = np.bincount(group, minlength=len(unique))
        self._bounds = np.cumsum([0, *counts])
        self.keys, self._key = unique.to_pylist(), key
        self._table, self._columns = table.drop_columns([key]), columns

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int, /) -> PyTree:
        rows = self._order[self._bounds[index] : self._bounds[index + 1]]
        part = self._table.take(rows).combine_chunks()
        arrays = {name: to_numpy(part.column(name)) for name in part.column_names}
        return arrays if self._columns is None else self._columns(arrays)

    def name_of(self, group: int) -> str:
        """Return the key of a group as text, for errors and reports."""
        return f"{self._key} {self.keys[group]!r}"
