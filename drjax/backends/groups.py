"""The groups' data as an argument: in arrays, in an iterable, or in Parquet files.

Input: arguments of a planned function, of which some may be `Groups`. Output: the
plan's inputs as numpy arrays with slices along axis 0, or as `Lazy` values, whose
slices are read block by block.

Invariants: the slices of a group are validated against the plan when they are read, and
are never cast; a group whose data does not fit has failed alone. A `Source` is read in
order, and again in each round that needs it.

Sharp edges: an iterator that raises is over, so that the call fails; a sequence fails
one group. A whole array is cast as JAX would, a group's is not.
"""

import bisect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from drjax import _storage
from drjax._errors import DrjaxError, DrjaxTypeError, DrjaxValueError, EngineError
from drjax._jaxprs.prng_keys import is_key, raw_type, to_raw
from drjax._plan_file import pytrees
from drjax._plan_file.stage_features import WIDE
from drjax._planner.arguments import flat_inputs
from drjax.backends.engine.extras import needed
from drjax.plan import Plan, Value


class Indexed(Protocol):  # items that are read one by one
    """Items that are read one by one, by index from 0, as those of a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Groups:
    """An argument of a planned program, group by group: give it in place of the arrays.

    Args:
      items: One pytree for each group, in order: the group's slice of the argument. An
        iterable that can be gone through again, once for each round that needs the
        data; or a function that makes one. A sequence, which has `__len__` and
        `__getitem__`, is read by index: where an item raises, its group alone has
        failed. An iterator that raises has no more items, so that the call fails.

    Example:
      >>> import drjax, jax.numpy as jnp, numpy as np
      >>> from drjax.backends import Groups, in_process
      >>> plan = drjax.make_plan(drjax.program(clients=3)(drjax.reduce_sum))(
      ...     jnp.zeros(3))
      >>> print(in_process.compile(plan)(Groups([np.float32(i) for i in range(3)])))
      3.0
    """

    def __init__(self, items: Iterable[Any] | Indexed | Callable[[], Any]):
        # It would be used up after the first round that reads it.
        if isinstance(items, Iterator):
            raise DrjaxTypeError(
                "Groups needs what it can go through once for each round, got an "
                f"iterator, {type(items).__name__}. Give a list, or a function that "
                "makes the iterator."
            )
        self.items = items

    def starting(self, group: int) -> Iterator[Any]:
        """The items from that of this group on."""
        items: Any = self.items() if callable(self.items) else self.items
        indexed = hasattr(items, "__getitem__") and hasattr(items, "__len__")
        # A dict has both methods, but its keys are not indices.
        if indexed and not isinstance(items, Mapping):
            return _Indexed(items, group)
        return itertools.islice(items, group, None)

    def bounds(self) -> list[int] | None:
        """Group indices at which parts begin that workers can read, 0 first.

        None if only the driver can read the groups.
        """

    def identity(self) -> str:
        """Text that identifies the data, for fingerprints; empty if that is unknown."""
        return ""


class _Indexed(Iterator):
    """The items of a sequence from `start` on; it goes on after an item that raises."""

    def __init__(self, items: Any, start: int):
        self._items, self._next = items, start

    def __next__(self) -> Any:
        if self._next >= len(self._items):
            raise StopIteration
        # Before the item is read: if it raises, the next call goes on behind it.
        self._next += 1
        return self._items[self._next - 1]


class Remote(Groups):
    """Stands for data of groups that stays with the workers; it has no items."""

    def __init__(self):
        super().__init__([])


class Parquet(Groups):
    """Groups from Parquet files: one row of a table for each group.

    Files are read in the order of their names and by batches of rows, so that memory
    does not grow with the number of groups. Where workers read them (on Beam), a
    *row group* of a file is what one of them reads. A group whose row cannot be read
    fails as one whose data does not fit. Needs pyarrow.

    Args:
      pattern: A pattern of file names, as for `glob.glob`; or of URLs, such as
        `gs://bucket/groups-*.parquet`, of any file system that fsspec knows.
      columns: Makes the group's pytree of a dict of its columns: numpy arrays, or
        scalars. Columns of lists, nested to any depth, are arrays. Default: the dict,
        or its only column.

    Raises:
      EngineError: pyarrow is not installed.
      DrjaxValueError: There is no such file, or one is no Parquet file.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        columns: Callable[[dict], Any] | None = None,
    ):
        self._reader = _parquet()
        self.columns = columns
        try:
            paths = _storage.match(_storage.locate(pattern))
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
                system, name = _storage.split(path)
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
        i = bisect.bisect_right(self._bounds, group) - 1
        for (path, part, first), end in zip(
            self._parts[i:], self._bounds[i + 1 :], strict=True
        ):
            rows = self._rows(path, part, end - first)
            yield from itertools.islice(rows, max(0, group - first), None)

    def _rows(self, path: str, part: int, count: int) -> Iterator[Any]:
        """The items of a row group; in place of those that cannot be read, an error.

        Args:
          path: The file.
          part: The index of the row group in it.
          count: The number of rows of the row group, by the file's footer.
        """
        count_read = 0
        try:
            system, name = _storage.split(path)
            with self._reader.ParquetFile(name, filesystem=system) as file:
                for batch in file.iter_batches(1024, row_groups=[part]):
                    names = batch.schema.names
                    for row in zip(*map(_cells, batch.columns), strict=True):
                        yield self._group(dict(zip(names, row, strict=True)))
                        count_read += 1
        except Exception as error:
            text = f"it cannot be read from {path}, row group {part}: {error}"
            # The file's footer says how many rows are lost, so that later ones keep
            # their group index.
            yield from itertools.repeat(DrjaxValueError(text), count - count_read)

    def _group(self, row: dict[str, Any]) -> Any:
        """The group's item, a pytree, from a row of the table.

        `row` has the values of the columns by name. If `columns` raises, the item is a
        `DrjaxValueError`, with which that group fails.
        """
        if self.columns is None:
            return row if len(row) > 1 else next(iter(row.values()))
        try:
            return self.columns(row)
        except Exception as error:
            text = f"its columns give {type(error).__name__}: {error}"
            return DrjaxValueError(text)


def _parquet() -> Any:
    """The module `pyarrow.parquet`; raise `EngineError` if pyarrow is not installed."""
    return needed("pyarrow.parquet", "ray", "Reading Parquet files")


def _cells(column: Any) -> Any:
    """The values of a column of an Arrow table, one for each row of the table.

    An array `[rows, ...]`; or a list of arrays, if lists differ in length or have
    nulls.
    """
    part = column
    while hasattr(part.type, "value_type"):
        lengths = part.value_lengths()
        # Ragged lists have no shape: each is an array of its own.
        if part.null_count or len(lengths.unique()) > 1:
            return _one_by_one(column)
        part = part.flatten()
    return _one_by_one(column) if part.null_count else _array(column)


def _one_by_one(column: Any) -> list[np.ndarray]:
    """The values of a column of an Arrow table as a list, one array for each row.

    Values with nulls are arrays of objects, which fit no plan.
    """
    kind = column.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    # Slow, but only where lists differ in length or have nulls.
    values = map(np.asarray, column.to_pylist())
    return [
        x if x.dtype == object else x.astype(kind.to_pandas_dtype()) for x in values
    ]


def _array(column: Any) -> np.ndarray:
    """A column of an Arrow table as an array `[rows, ...]`.

    It has no nulls, and its lists have one length, so no Python object is made for each
    number.
    """
    shape, count = [], len(column)
    while hasattr(column.type, "value_type"):  # lists, of one length
        column = column.flatten()
        shape.append(len(column) // max(1, count))
        count = len(column)
    flat = column.to_numpy(zero_copy_only=False)
    total = int(np.prod(shape)) or 1
    return flat.reshape(len(flat) // total, *shape)


class Lazy:
    """A partitioned value that is read group by group: one leaf of a `Groups`.

    Args:
      source: What reads the `Groups`.
      leaf: The index of the leaf in a group's item.
      value: The value in the plan.
      n: The number of groups.
      steps: Of a stack that loops consume, the index of the step in each loop: indices
        into the leading axes of a group's leaf.

    Attributes:
      shape: The shape of the whole array.
      dtype: Its dtype.
    """

    def __init__(self, source: "Source", leaf: int, value: Value, n: int, steps=()):
        self.source, self.leaf, self.value, self.n = source, leaf, value, n
        self.steps, self.dtype = steps, value.dtype
        self.shape = (*value.shape[: value.axis], n, *value.shape[value.axis :])

    def __getitem__(self, index: tuple[slice, int]) -> "Lazy":
        """All groups' slices for one step of a loop: `x[:, t]`, still unread."""
        return Lazy(self.source, self.leaf, self.value, self.n, (*self.steps, index[1]))

    def slice_of(self, leaves: list[np.ndarray]) -> np.ndarray:
        """A group's slice of this value, from the leaves of the group's item.

        Empty if the data is with the workers.
        """
        if isinstance(self.source.groups, Remote):
            return np.zeros(0)
        return leaves[self.leaf][self.steps] if self.steps else leaves[self.leaf]

    def whole(self) -> np.ndarray:
        """Read all groups' slices: one array, with the slices along axis 0.

        Groups that cannot be read have NaN or zero there.

        Raises:
          DrjaxTypeError: The data stays with the workers.
        """
        if isinstance(self.source.groups, Remote):
            raise DrjaxTypeError(
                f"{self.value.name} stays with the groups, but the plan returns it, or "
                "needs the slices of all groups in one place."
            )
        # Groups that cannot be read stay NaN or zero here; they fail in their block.
        stack = empty_slices(self.value, self.n)
        for group, leaves in self.source.between(0, self.n):
            if not isinstance(leaves, Exception):
                stack[group] = self.slice_of(leaves)
        return stack


class Source:
    """Reads a `Groups`, and checks each group's leaves against the plan.

    Args:
      groups: The groups.
      tree: The planned structure of a group's item, a `PyTreeDef` or a `Tree`.
      values: The plan's values of its leaves.
      n: The number of groups.

    Raises:
      DrjaxValueError: Files have another number of groups.
    """

    def __init__(self, groups: Groups, tree: Any, values: list[Value], n: int):
        self.groups, self.values, self.n = groups, values, n
        self.wide = any(value.dtype in WIDE for value in values)
        if (bounds := groups.bounds()) is not None and bounds[-1] != n:
            raise DrjaxValueError(f"The plan is for {n} groups, got {bounds[-1]}.")
        self.node, self._tree = pytrees.describe(tree), tree

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tree": None}  # of classes that others may lack

    def between(self, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        """Pairs `(group, leaves)` of the groups from `start` to before `stop`.

        Leaves are a list of raw arrays; or an error, if the group's data cannot be read
        or does not fit the plan. For data that stays with the workers the list is
        empty.

        Raises:
          DrjaxValueError: There are too few items, or more than n.
          EngineError: An iterator raised, so that no later group can be read.
        """
        if isinstance(self.groups, Remote):
            yield from ((group, []) for group in range(start, stop))
            return
        group, text = start, f"The plan is for {self.n} groups, got"
        items = iter(self.groups.starting(start))
        while True:
            try:
                item = next(items)
            except StopIteration:
                break
            except Exception as error:
                item = self._unread(items, group, error)
            # One item further than asked: that there are too many can be seen only so.
            if group == stop:
                if stop == self.n:
                    raise DrjaxValueError(f"{text} more.")
                return
            try:
                yield group, self.leaves(item)
            except DrjaxError as error:
                yield group, error
            group += 1
        if group < stop:
            raise DrjaxValueError(f"{text} {group}.")

    def _unread(self, items: Iterator, group: int, error: Exception) -> DrjaxError:
        """The error for a group whose item raised when it was read.

        Args:
          items: The iterator.
          group: The group index.
          error: What it raised.

        Raises:
          EngineError: No later item can be read either.
        """
        why = f"loading group {group} raised {type(error).__name__}: {error}"
        # A sequence can go on behind an item that raises.
        if isinstance(items, _Indexed):
            return DrjaxValueError(why)
        if group < self.n - 1:
            why += (
                f"; groups {group + 1} to {self.n - 1} cannot be read either, as an "
                "iterator ends where it raises: give Groups a sequence, read by index"
            )
        raise EngineError(why, group=group) from error

    def leaves(self, item: Any) -> list[np.ndarray]:
        """Check the item of a group against the plan; returns its leaves as raw arrays.

        Raises:
          DrjaxError: They do not have the planned structure, shapes and dtypes; or the
            item is such an error, as its data could not be read.
        """
        # Workers may have another setting than the driver; the plan decides.
        with jax.enable_x64(self.wide or bool(jax.config.read("jax_enable_x64"))):
            return self._leaves(item)

    def _leaves(self, item: Any) -> list[np.ndarray]:
        """The leaves of a group's item as raw arrays, in the plan's precision.

        Raises:
          DrjaxError: They do not have the planned structure, shapes and dtypes.
        """
        if isinstance(item, DrjaxError):
            raise item
        leaves, tree = jax.tree_util.tree_flatten(item)
        if self._tree is None or tree != self._tree:
            # A loaded plan has no classes of the user: compared by names of fields.
            if pytrees.describe(tree) != self.node:
                raise DrjaxTypeError(
                    f"its data has the structure {tree}, not {pytrees.Tree(self.node)}"
                )
            self._tree = tree  # of the user's classes
        arrays = []
        for value, leaf in zip(self.values, leaves, strict=True):
            array = _uncast(value, leaf)
            if array.shape != value.shape or array.dtype != value.dtype:
                fix = f": convert it to {value.dtype}" * (array.shape == value.shape)
                raise DrjaxValueError(
                    f"its {value.name} is {array.dtype}{[*array.shape]}, but the plan "
                    f"is for {value.dtype}{[*value.shape]}{fix}"
                )
            arrays.append(np.asarray(to_raw(array)))
        return arrays


def _uncast(value: Value, leaf: Any) -> Any:
    """A leaf of a group's item as an array; numpy's arrays keep their dtype.

    `value` is its value in the plan, for errors.

    Raises:
      DrjaxTypeError: The leaf is no array.
    """
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(leaf)
    try:
        return as_array(leaf)
    except (TypeError, ValueError, OverflowError) as error:
        text = f"its {value.name} is {leaf!r:.60}, which is no array: {error}"
        raise DrjaxTypeError(text) from error


def as_array(x: Any) -> Any:
    """An argument's leaf as an array in a dtype that JAX has; `Lazy` passes unchanged.

    numpy's arrays stay numpy's; whatever else becomes an array of JAX.
    """
    if isinstance(x, Lazy):
        return x
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x).astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
    return jax.numpy.asarray(x)


def flat_slices(plan: Plan, args: tuple, kwargs: dict) -> list[Any]:
    """The inputs of a plan from the arguments of a call, for an engine's driver.

    Args:
      plan: The plan.
      args: Arguments given by position; some may be `Groups`.
      kwargs: Arguments given by name; likewise.

    Returns:
      For each input a raw numpy array, with slices along axis 0, or a `Lazy`.

    Raises:
      DrjaxTypeError, DrjaxValueError: They do not fit the plan.
    """
    positions = plan.in_tree.unflatten(range(len(plan.inputs)))
    args = tuple(
        _lazy(plan, a, positions[0][i] if i < len(positions[0]) else None)
        for i, a in enumerate(args)
    )
    kwargs = {k: _lazy(plan, a, positions[1].get(k)) for k, a in kwargs.items()}
    arrays = []
    for value, x in zip(
        plan.inputs, flat_inputs(plan, args, kwargs, as_array), strict=True
    ):
        if not isinstance(x, Lazy):
            x = np.asarray(to_raw(x) if is_key(x.dtype) else x)
            x = np.moveaxis(x, value.axis, 0) if value.partitioned else x
        arrays.append(x)
    return arrays


def _lazy(plan: Plan, x: Any, positions: Any) -> Any:
    """Replace a `Groups` by a pytree of `Lazy`; any other argument stays as it is.

    Args:
      plan: The plan.
      x: The argument.
      positions: The index of the plan's input for each leaf of the argument; None if
        the plan has no such argument.

    Raises:
      DrjaxTypeError: A leaf is a global value in the plan.
      DrjaxValueError: Files have another number of groups.
    """
    if not isinstance(x, Groups) or positions is None:
        return x
    indices, tree = jax.tree_util.tree_flatten(positions)
    values = [plan.inputs[i] for i in indices]
    for value in values:
        if not value.partitioned:
            raise DrjaxTypeError(
                f"{plan.name} takes {value.name} as a global value, got Groups for it."
            )
    source = Source(x, tree, values, plan.size)
    # One `Lazy` for each leaf, all of one source, so that items are read once.
    leaves = [Lazy(source, i, v, plan.size) for i, v in enumerate(values)]
    return tree.unflatten(leaves)


def empty_slices(value: Value, n: int) -> np.ndarray:
    """Slices `[n, ...]` of a value for groups without results: NaN if float, else zero.

    Random keys are raw, so zero.
    """
    raw = raw_type(value)
    inexact = jax.numpy.issubdtype(raw.dtype, np.inexact)
    return np.full((n, *raw.shape), np.nan if inexact else 0, raw.dtype)


def survivors(value: Value, slices: Any, alive: np.ndarray) -> np.ndarray:
    """All groups' slices of a value `[n, ...]`, with empty slices for dropped groups.

    Args:
      value: The partitioned value.
      slices: All groups' slices along axis 0, or `Lazy`.
      alive: Which groups take part, bool `[n]`; the others were dropped.
    """
    slices = slices.whole() if isinstance(slices, Lazy) else slices
    if alive.all():
        return slices
    # A copy: the caller's array, or a later round's input, must not change.
    slices = np.array(slices)
    slices[~alive] = empty_slices(value, 1)[0]
    return slices
