"""A dataset of Ray Data as an argument: one row for each group.

Input: a `ray.data.Dataset`. Output: `Groups`, which workers read from Ray's object
store; the driver has references and the numbers of rows.

Invariants: Ray Data runs a dataset once, in the order of its rows, so that a group is
the same row in each round and in each retry.

Sharp edges: what workers of several machines read of a part is copied whole to each.
Ray Data needs CPUs of its own, unless the dataset is materialized.
"""

import bisect
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from drjax._compat.types import PyTree
from drjax._extras import needed
from drjax.engines.slices.groups import Groups

# Of Ray, which users may lack.
Dataset: TypeAlias = Any
ObjectRef: TypeAlias = Any
Columns: TypeAlias = dict[str, np.ndarray]


class DatasetRows(Groups):
    """The rows of a dataset; workers read them by parts, objects in Ray's store.

    `parts` are references to the columns of consecutive rows, and `counts` how many
    rows each has.
    """

    def __init__(self, parts: Sequence[ObjectRef], counts: Sequence[int]):
        pairs = [pair for pair in zip(parts, counts, strict=True) if pair[1]]
        self._parts = [part for part, _ in pairs]
        self._bounds = [0, *itertools.accumulate(count for _, count in pairs)]

    def bounds(self) -> list[int]:
        return self._bounds

    def starting(self, group: int) -> Iterator[PyTree]:
        cursor, end = _Cursor(self, group), self._bounds[-1]
        for _ in range(group, end):
            columns = cursor.columns(1)
            yield _item({name: x[0] for name, x in columns.items()})

    def cursor(self, group: int) -> "_Cursor":
        return _Cursor(self, group)

    def part_of(self, group: int) -> tuple[Columns, int]:
        """Read the columns that have a group, and its position in them."""
        i = bisect.bisect_right(self._bounds, group) - 1
        ray = needed("ray", "ray", "drjax.backends.ray")
        return ray.get(self._parts[i]), group - self._bounds[i]


class _Cursor:
    """Reads groups in their order; those of one part without a copy."""

    def __init__(self, rows: DatasetRows, group: int):
        self._rows, self._next = rows, group
        self._part: tuple[Columns, int] = {}, 0  # and how many of its rows were read

    def take(self, count: int, /) -> PyTree:
        return _item(self.columns(count))

    def columns(self, count: int) -> Columns:
        """Read the columns of the next groups."""
        taken: list[Columns] = []
        while count:
            part, first = self._part
            if first >= len(next(iter(part.values()), ())):
                part, first = self._rows.part_of(self._next)
            taken.append({k: x[first : first + count] for k, x in part.items()})
            read = len(next(iter(taken[-1].values())))
            self._part = part, first + read
            self._next, count = self._next + read, count - read
        if len(taken) == 1:
            return taken[0]
        return {k: np.concatenate([part[k] for part in taken]) for k in taken[0]}


def _item(columns: dict[str, Any]) -> PyTree:
    """Return columns, or values, as the pytree of a group: of one column its value."""
    return columns if len(columns) > 1 else next(iter(columns.values()))


def rows_of(dataset: Dataset, free_cpus: float) -> DatasetRows:
    """Run a dataset by Ray Data, and return its rows.

    Its parts stay in Ray's object store for as long as the result is referred to.
    `free_cpus` are those that are left for Ray Data, which waits for one.
    """
    ray = needed("ray", "ray", "drjax.backends.ray")
    module = needed("ray.data.dataset", "ray", "Datasets of Ray")
    if free_cpus < 1 and not isinstance(dataset, module.MaterializedDataset):
        # No error: the cluster may grow.
        warnings.warn(
            "Ray Data waits for a CPU to read the dataset with, as the workers of "
            "drjax have all of them. Materialize it before the first call, "
            "dataset.materialize(), or let workers take fewer CPUs, "
            'ray_options={"num_cpus": ...}.',
            RuntimeWarning,
            stacklevel=2,
        )
    options = dataset.context.execution_options
    # Else a group would be another row whenever tasks end in another order.
    before, options.preserve_order = options.preserve_order, True
    try:
        tables = dataset.materialize().to_arrow_refs()
    finally:
        options.preserve_order = before
    read = ray.remote(num_cpus=0, num_returns=2)(_columns_of)
    pairs = [read.remote(table) for table in tables]
    return DatasetRows([x for _, x in pairs], ray.get([count for count, _ in pairs]))


def _columns_of(table: Any) -> tuple[int, Columns]:
    """Convert a block of Ray Data to columns; and its number of rows."""
    accessor = needed("ray.data.block", "ray", "Datasets of Ray").BlockAccessor
    block = accessor.for_block(table)
    columns = {name: _dense(x) for name, x in block.to_numpy().items()}
    return block.num_rows(), columns


def _dense(x: np.ndarray) -> np.ndarray:
    """Stack the arrays of a column of lists, unless they differ in shape."""
    if x.dtype != object or not len(x):
        return x
    cells = [np.asarray(cell) for cell in x]
    kinds = {(cell.shape, cell.dtype) for cell in cells}
    return np.stack(cells) if len(kinds) == 1 else x
