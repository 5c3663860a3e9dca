"""Parquet files as the groups' data: one row of the files for each group.

Input: paths or URLs of files. Output: a `Parquet`, the `Groups` that read them.

Invariants: groups are the rows, in the order of the files' names; a row becomes numpy
arrays without a Python object for each number. On Beam each row group of
a file is read by one worker.

Sharp edges: values with nulls fit no plan, so that their group fails. Columns of ragged
lists are slow to read.
"""

import bisect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import jax
import numpy as np

from drjax import _storage
from drjax._compat.types import PyTree
from drjax._errors import DrjaxValueError
from drjax._extras import needed
from drjax.engines.slices.arrow_columns import cells, plain
from drjax.engines.slices.groups import Groups

RecordBatch: TypeAlias = Any  # of pyarrow, which users may lack


class Parquet(Groups):
    """Groups from Parquet files: one row of a table for each group.

    Files are read in the order of their names and by batches of rows, so that memory
    does not grow with the number of groups. If workers read the files (on Beam), each
    *row group* of a file is read by one worker. A group whose row cannot be read fails,
    like a group whose data does not fit the plan. Needs pyarrow.

    Args:
      pattern: A pattern of file names, as for `glob.glob`; or of URLs, such as
        `gs://bucket/groups-*.parquet`, of any file system that fsspec knows.
      columns: A function from a group's values by column name to the group's pytree.
        The values are numpy arrays or scalars; columns of lists, nested to any depth,
        have arrays, and so have those of tensors (Arrow's, and Hugging Face's);
        categories are decoded. What it does not read is not decoded. Default: the
        pytree is the dict of these values, or the value of the only column.

    Raises:
      EngineError: pyarrow is not installed.
      DrjaxValueError: No file matches, or a file is no Parquet file.

    Example:
      >>> import os, tempfile
      >>> import drjax, jax.numpy as jnp, numpy as np
      >>> import pyarrow as pa, pyarrow.parquet
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)({"x": jnp.zeros(4), "y": jnp.zeros((4, 2))})
      >>> columns = {"x": np.arange(4, dtype="float32"), "y": [[0.0, 1.0]] * 4}
      >>> schema = pa.schema({"x": pa.float32(), "y": pa.list_(pa.float32())})
      >>> run = drjax.backends.in_process.compile(plan)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = os.path.join(folder, "groups-0.parquet")
      ...     pyarrow.parquet.write_table(pa.table(columns, schema), path)
      ...     print(run(drjax.backends.Parquet(path))["y"])
      [0. 1.]
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        columns: Callable[[Any], Any] | None = None,
    ):
        self._reader = _parquet()
        self.columns = columns
        try:
            paths = _storage.list_files(_storage.locate(pattern))
        except (ImportError, OSError, TypeError, ValueError) as error:
            raise DrjaxValueError(
                f"The files {pattern} cannot be listed: {error}. Give a pattern of "
                "names that can be read here."
            ) from error
        if not paths:
            raise DrjaxValueError(
                f"There is no file {pattern}: give a pattern of names."
            )
        self._parts: list[tuple[str, int, int]] = []  # path, row group, first row
        self._bounds = [0]
        for path in paths:
            try:
                system, name = _storage.file_system_of(path)
                # Only the footer: bounds of row groups, without any data.
                metadata = self._reader.read_metadata(name, filesystem=system)
            except Exception as error:
                raise DrjaxValueError(f"{path} is no Parquet file: {error}") from error
            for part in range(metadata.num_row_groups):
                self._parts.append((path, part, self._bounds[-1]))
                rows = metadata.row_group(part).num_rows
                self._bounds.append(self._bounds[-1] + rows)

    def __getstate__(self) -> dict[str, Any]:
        # Modules cannot be pickled.
        return {k: v for k, v in self.__dict__.items() if k != "_reader"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reader=_parquet())

    def bounds(self) -> list[int]:
        return self._bounds

    def identity(self) -> str:
        paths = sorted({path for path, *_ in self._parts})
        return str([(path, _storage.file_size(path)) for path in paths])

    def starting(self, group: int) -> Iterator[Any]:
        # The row group that has this group; earlier files are not opened.
        # Bounds are equal if a row group is empty: `bisect_right` takes the last of
        # them.
        i = bisect.bisect_right(self._bounds, group) - 1
        for (path, part, first), end in zip(
            self._parts[i:], self._bounds[i + 1 :], strict=True
        ):
            rows = self._rows(path, part, end - first)
            yield from itertools.islice(rows, max(0, group - first), None)

    def cursor(self, group: int) -> "_RowCursor | None":
        return _RowCursor(self, group) if self.columns is None else None

    def batches(self, group: int, size: int) -> Iterator[dict[str, np.ndarray]]:
        """Iterate over columns of the rows from `group` on, of `size` rows or fewer.

        A column whose lists differ in length, or that has nulls, raises a `ValueError`.
        """
        i = bisect.bisect_right(self._bounds, group) - 1
        for path, part, first in self._parts[i:]:
            skip = max(0, group - first)
            system, name = _storage.file_system_of(path)
            with self._reader.ParquetFile(name, filesystem=system) as file:
                for batch in file.iter_batches(size, row_groups=[part]):
                    rows, skip = batch[skip:], max(0, skip - batch.num_rows)
                    columns = _Columns(rows)
                    arrays: dict[str, np.ndarray] = {}
                    for key in columns.names:
                        values = columns.cells(key)
                        if isinstance(values, list):
                            raise ValueError(f"the rows of {key} differ in shape")
                        arrays[key] = values
                    if rows.num_rows:
                        yield arrays

    def _rows(self, path: str, part: int, count: int) -> Iterator[PyTree]:
        """Read one row group of a Parquet file lazily; each row is a group's pytree.

        A row group is a range of rows that a Parquet file stores together: `part` is
        its index in the file, and `count` the number of its rows, by the file's footer.
        For each row that cannot be read, and each for which the option `columns`
        raised, there is a `DrjaxValueError` in its place, not raised.
        """
        count_read = 0
        try:
            system, name = _storage.file_system_of(path)
            with self._reader.ParquetFile(name, filesystem=system) as file:
                for batch in file.iter_batches(1024, row_groups=[part]):
                    columns = _Columns(batch)
                    for index in range(batch.num_rows):
                        yield self._group(_Row(columns, index))
                        count_read += 1
        except Exception as error:
            text = f"it cannot be read from {path}, row group {part}: {error}"
            # The file's footer says how many rows are lost, so that later ones keep
            # their group index.
            yield from itertools.repeat(DrjaxValueError(text), count - count_read)

    def _group(self, row: "_Row") -> PyTree:
        """Convert a row of the table to the pytree of its group.

        Without the option `columns` it is a dict, or the value of the only column. If
        `columns` raises, it is a `DrjaxValueError`, which is not raised, so that this
        group alone fails.
        """
        if self.columns is None:
            return dict(row) if len(row) > 1 else next(iter(row.values()))
        try:
            # JAX knows dicts as pytrees, but not the row.
            return jax.tree.map(_as_dict, self.columns(row))
        except Exception as error:
            text = f"its columns give {type(error).__name__}: {error}"
            return DrjaxValueError(text)


class _RowCursor:
    """Reads many rows at once: columns straight to arrays."""

    def __init__(self, groups: Parquet, group: int):
        self._groups, self._next = groups, group
        self._batches: Iterator[dict[str, np.ndarray]] | None = None
        self._rest: dict[str, np.ndarray] = {}

    def take(self, count: int, /) -> PyTree:
        if self._batches is None:
            self._batches = self._groups.batches(self._next, count)
        parts, missing = [], count
        while missing:
            batch = self._rest or next(self._batches)
            parts.append({name: x[:missing] for name, x in batch.items()})
            taken = min(missing, len(next(iter(batch.values()))))
            self._rest = {
                name: x[taken:] for name, x in batch.items() if len(x) > taken
            }
            missing -= taken
        columns = parts[0]
        if len(parts) > 1:
            columns = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        return columns if len(columns) > 1 else next(iter(columns.values()))


def _parquet() -> Any:
    """Import and return the module `pyarrow.parquet`."""
    return needed("pyarrow.parquet", "ray", "Reading Parquet files")


class _Columns:
    """A batch of rows of an Arrow table; a column is decoded when it is asked for."""

    def __init__(self, batch: RecordBatch):
        self.names, self._batch = batch.schema.names, batch
        self._decoded: dict[str, Any] = {}

    def cells(self, name: str) -> np.ndarray | list[np.ndarray]:
        """Return the values of a column as numpy, computed once."""
        if name not in self._decoded:
            # By position, as a table may have two columns of one name: the last counts.
            last = len(self.names) - 1 - self.names[::-1].index(name)
            self._decoded[name] = cells(plain(self._batch.columns[last]))
        return self._decoded[name]


class _Row(MutableMapping):
    """One row of a table, like a dict from names of columns to numpy arrays.

    A column that is never asked for is never decoded, whatever its type.
    """

    def __init__(self, columns: _Columns, index: int):
        self._columns, self._index = columns, index
        self._own: dict[str, Any] = dict.fromkeys(columns.names, _UNREAD)

    def __getitem__(self, name: str) -> Any:
        if self._own[name] is _UNREAD:
            self._own[name] = self._columns.cells(name)[self._index]
        return self._own[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def copy(self) -> dict[str, Any]:
        """Return a dict with all columns."""
        return dict(self)


_UNREAD = object()


def _as_dict(x: PyTree) -> PyTree:
    """Return a row as a dict, and anything else as it is."""
    return dict(x) if isinstance(x, _Row) else x
