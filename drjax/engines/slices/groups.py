"""The groups' data as an argument: in arrays or in an iterable.

Input: arguments of a planned function, of which some may be `Groups`. Output: the
plan's inputs as numpy arrays with slices along axis 0, or as `Lazy` values, whose
slices are read block by block.

Invariants: the slices of a group are validated against the plan when they are read, and
are never cast; a group whose data does not fit has failed alone. A `Source` is read in
order, and again in each round that needs it.

Sharp edges: an iterator that raises is over, so that the call fails; a sequence fails
one group. A whole array is cast as JAX would, a group's is not.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np

from drjax._compat.types import Array, PyTree, PyTreeDef
from drjax._error_texts import no_groups, where_it_goes
from drjax._errors import DrjaxError, DrjaxTypeError, DrjaxValueError, EngineError
from drjax._jaxprs.prng_keys import is_key, to_raw
from drjax._plan_file import pytrees
from drjax._plan_file.stage_features import WIDE
from drjax._planner.arguments import flat_inputs
from drjax.engines.slices.constant import Constant
from drjax.engines.slices.slices import Slices, empty_slices
from drjax.plan import Plan, Value


class Indexed(Protocol):  # items that are read one by one
    """A sequence of the groups' data: `x[i]` is the pytree of group i, for i from 0.

    It needs these two methods only; a list is one.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Groups:
    """The data of all groups as an argument of a planned function: one pytree a group.

    Pass it to the function that `drjax.jit` or an engine's `compile` returns, in place
    of the argument with arrays `[n, ...]`.

    Args:
      items: The pytrees of the n groups, in the order of group indices. The pytree of
        group i has group i's slice of each leaf of the argument. An iterable that
        allows one iteration for each round that needs the data; or a function without
        arguments that returns an iterable or an iterator. A sequence, which has
        `__len__` and `__getitem__`, is read by index: if the data of one group raises,
        that group alone has failed. If an iterator raises, the data of later groups
        cannot be read, and the call fails.

    Raises:
      DrjaxTypeError: `items` is an iterator, which allows only one iteration, or a dict
        or table, whose items are not the groups'.

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
        if text := no_groups(items):
            raise DrjaxTypeError(
                f"Groups needs one pytree of arrays for each group, got a "
                f"{type(items).__name__}. {text}."
            )
        self.items = items

    @classmethod
    def from_batches(cls, read: Callable[[slice], Any], n: int) -> "Groups":
        """Make `Groups` whose data are read for many groups at once: for tiny groups.

        Args:
          read: A function from a `slice` of k group indices to the data of these
            groups: a pytree of arrays `[k, ...]`, as `dataset[index]`. Each round that
            needs the data calls it for all groups, in parts.
          n: The number of groups.

        Returns:
          `Groups`, for what `drjax.jit` and the `compile` of an engine return. Where
          `read` raises for several groups, it is called for each of them alone.

        Raises:
          DrjaxTypeError: `read` is no function.

        Example:
          >>> import drjax, numpy as np
          >>> data = np.arange(1000, dtype=np.float32)
          >>> groups = drjax.backends.Groups.from_batches(lambda i: data[i], 1000)
          >>> mean = drjax.program(clients=1000)(drjax.reduce_mean)
          >>> print(drjax.jit(mean)(groups))
          499.5
        """
        if not callable(read):
            raise DrjaxTypeError(
                "Groups.from_batches needs a function of a slice of group indices, "
                f"such as dataset.__getitem__, got {type(read).__name__}."
            )
        return cls(Batches(read, n))

    @classmethod
    def by_key(
        cls, table: Any, key: str, columns: Callable[[Any], Any] | None = None
    ) -> "Groups":
        """Make `Groups` of the examples of a table that have equal keys.

        Groups are in the order of their keys, and the examples of a group in the order
        of the table. Errors and reports name a group by its key. Needs pyarrow.

        Args:
          table: An Arrow table, as of `pyarrow.parquet.read_table(file,
            memory_map=True)`; a DataFrame, or a dict of columns. Only the examples of
            a group that is read are copied.
          key: The name of the column of keys.
          columns: A function from the dict of a group's columns, arrays
            `[examples, ...]`, to the group's pytree. Groups have different numbers of
            examples: it pads, or samples. Default: the dict.

        Returns:
          `Groups`, for what `drjax.jit` and the `compile` of an engine return.

        Raises:
          DrjaxTypeError: It is no table.
          DrjaxValueError: It has no such column, or examples without a key.

        Example:
          >>> import drjax, numpy as np
          >>> table = {"client": ["b", "a", "b", "a"], "x": np.float32([1, 2, 3, 4])}
          >>> mean = drjax.program(clients=2)(lambda d: drjax.reduce_max(d["x"]))
          >>> print(drjax.jit(mean)(drjax.backends.Groups.by_key(table, "client")))
          [2. 4.]
        """
        from drjax.engines.slices import rows_by_key as keyed

        return cls(keyed.RowsByKey(table, key, columns))

    def name_of(self, group: int) -> str:
        """Return what the data call a group, for errors and reports; empty: nothing."""
        items: Any = getattr(self, "items", None)
        return items.name_of(group) if hasattr(items, "name_of") else ""

    @property
    def dtype(self) -> Any:
        """Groups have none. JAX asks for it when they are in the place of an array."""
        # Not a TypeError, which JAX would replace by its own.
        raise DrjaxValueError(f"JAX needs an array, got Groups. {where_it_goes(self)}.")

    def starting(self, group: int) -> Iterator[Any]:
        """Iterate over the pytrees of the groups, from the one with index `group`.

        Returns:
          An iterator with one pytree for each group, in the order of group indices. If
          the items are a sequence and reading one raises, `next` raises that error, and
          the following `next` reads the next group. An element may be a `DrjaxError` in
          place of a pytree: the data of that group cannot be read.
        """
        items: Any = self.items() if callable(self.items) else self.items
        indexed = hasattr(items, "__getitem__") and hasattr(items, "__len__")
        # A dict has both methods, but its keys are not indices.
        if indexed and not isinstance(items, Mapping):
            return _Indexed(items, group)
        return itertools.islice(items, group, None)

    def cursor(self, group: int) -> "BatchCursor | None":
        """Return what reads many groups at once, from the one with index `group`.

        Returns:
          None: the groups can be read one by one only.
        """
        items = getattr(self, "items", None)
        return _CursorOfBatches(items, group) if isinstance(items, Batches) else None

    def bounds(self) -> list[int] | None:
        """Return the bounds of ranges of groups that workers read without the driver.

        Returns:
          Group indices: range i has the groups from `bounds[i]` to before
          `bounds[i + 1]`. The first bound is 0, the last is the number of groups. None
          if only the driver can read the groups.
        """

    def count(self) -> int | None:
        """Return the number of groups; None if only reading all of them tells it."""
        bounds = self.bounds()
        if bounds is not None:
            return bounds[-1]
        items: Any = self.items
        return len(items) if hasattr(items, "__len__") else None

    def identity(self) -> str:
        """Return text that identifies the data, for fingerprints; empty if unknown."""
        return ""


class BatchCursor(Protocol):
    """It reads groups in their order, many at once."""

    def take(self, count: int, /) -> PyTree:
        """Read the next groups: a pytree of arrays `[count, ...]`."""


class Batches:
    """A sequence of the groups' data, from a function that reads many at once."""

    def __init__(self, read: Callable[[slice], Any], n: int):
        self.read, self._n = read, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int, /) -> PyTree:
        return jax.tree.map(lambda x: x[0], self.read(slice(index, index + 1)))


class _CursorOfBatches:
    def __init__(self, batches: Batches, group: int):
        self._batches, self._next = batches, group

    def take(self, count: int, /) -> PyTree:
        self._next += count
        return self._batches.read(slice(self._next - count, self._next))


class _Indexed(Iterator):
    """An iterator over a sequence, which continues after an element that raises.

    If reading an element raises, `next` raises that error, and the following `next`
    reads the next element. `start` is the index of the first one.
    """

    def __init__(self, items: Indexed, start: int):
        self._items, self._next = items, start

    def __next__(self) -> PyTree:
        if self._next >= len(self._items):
            raise StopIteration
        # Before the item is read: if it raises, the next call goes on behind it.
        self._next += 1
        return self._items[self._next - 1]


class Remote(Groups):
    """An argument whose data only the workers have: a placeholder, without any data."""

    def __init__(self):
        # Never read: readers check for `Remote` first.
        super().__init__([])

    def count(self) -> int | None:
        return None


class Lazy(Slices):
    """A partitioned value that is read group by group: one leaf of a `Groups` argument.

    An engine's driver, the process of the call, has it in place of an array. Creating
    it reads nothing.

    Attributes:
      leaf: The position of the value among the leaves of a group's pytree.
      steps: In scans over the value the current step of each scan, from the outermost
        to the innermost: indices into the leading axes of a group's leaf; () outside of
        loops.
    """

    def __init__(
        self,
        source: "Source",
        leaf: int,
        value: Value,
        n: int,
        steps: tuple[int, ...] = (),
    ):
        self.source, self.leaf, self.value, self.n = source, leaf, value, n
        self.steps = steps

    def __getitem__(self, index: tuple[slice, int]) -> "Lazy":
        """Return the value in step t of a scan over it, `x[:, t]`, as another `Lazy`.

        The groups are axis 0, and the steps of the scan are the next axis.
        """
        # The index by which a scan takes one step of a stack: groups are its axis 0.
        return self.at_steps((*self.steps, index[1]))

    def in_steps(self) -> "Lazy":
        return self  # a step reads its own part of each slice

    def at_steps(self, steps: tuple[int, ...]) -> "Lazy":
        """Return a copy of this `Lazy` with other `steps`; nothing is read."""
        return Lazy(self.source, self.leaf, self.value, self.n, steps)

    def block(self, low: int, high: int, leaves: Sequence[Any] = ()) -> np.ndarray:
        return self.stacked(leaves)

    def stacked(self, leaves: Sequence[list[np.ndarray] | None]) -> np.ndarray:
        """Stack the slices of c groups from the leaves of their pytrees, `[c, ...]`.

        None: a group does not take part, and has a copy of another group's slice; if
        none takes part, the result is zeros `[c]`. If only the workers have the data
        (the argument is a `Remote`), it is an empty array `[c, 0]`.
        """
        slices = [None if part is None else self._slice_of(part) for part in leaves]
        # A masked slot needs some slice of the right shape; another group's is free of
        # surprises such as a division by zero.
        example = next((part for part in slices if part is not None), None)
        if example is None:
            return np.zeros(len(slices))  # no group takes part
        return np.stack([example if part is None else part for part in slices])

    def of_batch(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Return the slices of c groups, `[c, ...]`, of leaves that are stacked."""
        return leaves[self.leaf][(slice(None), *self.steps)]

    def _slice_of(self, leaves: list[np.ndarray]) -> np.ndarray:
        """Select a group's slice from the leaves of its pytree; in scans of a step."""
        if isinstance(self.source.groups, Remote):
            return np.zeros(0)
        return leaves[self.leaf][self.steps] if self.steps else leaves[self.leaf]

    def whole(self) -> np.ndarray:
        """Read the slices of all groups into one numpy array `[n, ...]`.

        In scans these are the slices of the current step, `self.steps`. Random keys are
        key data. The slice of a group that cannot be read is NaN, or zero if the dtype
        has no NaN.
        """
        if isinstance(self.source.groups, Remote):
            raise DrjaxTypeError(
                f"{self.value.name} stays with the groups, but the plan returns it, or "
                "needs the slices of all groups in one place."
            )
        # Groups that cannot be read stay NaN or zero here; they fail in their block.
        # Of one step: the leaf without the axes along which the scans take steps.
        one_step = replace(self.value, shape=self.value.shape[len(self.steps) :])
        stack = empty_slices(one_step, self.n)
        for group, leaves in self.source.between(0, self.n):
            if not isinstance(leaves, Exception):
                stack[group] = self._slice_of(leaves)
        return stack


class Source:
    """Reads the pytrees of a `Groups` argument, and validates them against the plan.

    Attributes:
      values: For each leaf of a group's pytree, in order, its value in the plan.
      n: The number of groups of the plan.
      wide: Whether a value has a 64-bit dtype.
      node: The structure of a group's pytree, that of `tree`, as JSON data, without
        classes (see `pytrees.describe`).

    `tree` is the structure of the argument in the plan, a `PyTreeDef` or a
    `pytrees.Tree`.
    """

    def __init__(
        self, groups: Groups, tree: pytrees.Structure, values: list[Value], n: int
    ):
        self.groups, self.values, self.n = groups, values, n
        self.wide = any(value.dtype in WIDE for value in values)
        # Known without data, so that a wrong number of groups fails early. What reads
        # many at once does not see that there are more.
        known = groups.bounds() is not None or groups.cursor(0) is not None
        if known and groups.count() != n:
            raise DrjaxValueError(f"The plan is for {n} groups, got {groups.count()}.")
        self.node, self._tree = pytrees.describe(tree), tree

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tree": None}  # of classes that others may lack

    def between(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, list[np.ndarray] | DrjaxError]]:
        """Read and validate the data of the groups from index `start` to before `stop`.

        It yields pairs `(group index, leaves)`, in order. `leaves` are the leaves of
        the group's pytree, random keys as key data; or a `DrjaxError`, not raised, if
        the data of that group cannot be read or does not fit the plan; or [] if only
        the workers have the data (the argument is a `Remote`). If an iterator raises,
        so that no later group can be read, an `EngineError` is raised.
        """
        if isinstance(self.groups, Remote):
            yield from ((group, []) for group in range(start, stop))
            return
        group, text = start, f"The plan is for {self.n} groups, got"
        items = iter(self.groups.starting(start))
        # No `for` loop: a sequence continues after a `next` that raises, a loop does
        # not.
        # Only at the end of all groups one item is read that has no group.
        while group < stop or stop == self.n:
            try:
                item = next(items)
            except StopIteration:
                break
            except Exception as error:
                item = self._unread(items, group, error)
            if group == stop:
                raise DrjaxValueError(f"{text} more.")
            try:
                yield group, self.leaves(item)
            except DrjaxError as error:
                yield group, error
            group += 1
        if group < stop:
            raise DrjaxValueError(f"{text} {group}.")

    def _unread(
        self, items: Iterator[PyTree], group: int, error: Exception
    ) -> DrjaxError:
        """Return the error of a group whose data could not be read, without raising it.

        An `EngineError` is raised instead if `items` is no iterator over a sequence, so
        that the data of all later groups is lost too, or if there is no such group
        (`group` is n).
        """
        reason = f"{type(error).__name__}: {error}"
        if group == self.n:
            text = f"The iterator over the groups raised after the last one: {reason}"
            raise EngineError(text) from error
        why = f"loading group {group} raised {reason}"
        # A sequence can go on behind an item that raises.
        if isinstance(items, _Indexed):
            return DrjaxValueError(why)
        if group < self.n - 1:
            why += (
                f"; groups {group + 1} to {self.n - 1} cannot be read either, as an "
                "iterator ends where it raises: give Groups a sequence, read by index"
            )
        raise EngineError(why, group=group) from error

    def leaves(self, item: PyTree, *stack: int) -> list[np.ndarray]:
        """Validate the pytree of one group against the plan, and flatten it.

        Random keys become key data. An item that is a `DrjaxError` (the data could not
        be read) is raised. With a number as `stack` it is that of so many groups, whose
        leaves have this leading axis.
        """
        # Workers may have another setting than the driver; the plan decides.
        with jax.enable_x64(self.wide or bool(jax.config.read("jax_enable_x64"))):
            return self._leaves(item, stack)

    def _leaves(self, item: PyTree, stack: tuple[int, ...]) -> list[np.ndarray]:
        """As `leaves`, under the x64 setting of the plan.

        If the pytree has the structure of the plan but other classes, as with a loaded
        plan, its structure is stored, so that later comparisons are fast.
        """
        if isinstance(item, DrjaxError):
            raise item
        leaves, tree = jax.tree_util.tree_flatten(item)
        if self._tree is None or tree != self._tree:
            # A loaded plan has no classes of the user: compared by names of fields.
            if text := pytrees.mismatch(tree, self.node):
                raise DrjaxTypeError(text)
            self._tree = tree  # of the user's classes
        arrays = []
        for value, leaf in zip(self.values, leaves, strict=True):
            array = _uncast(value, leaf)
            shape = (*stack, *value.shape)
            if array.shape != shape or array.dtype != value.dtype:
                fix = f": convert it to {value.dtype}" * (array.shape == shape)
                raise DrjaxValueError(
                    f"its {value.name} is {array.dtype}{[*array.shape]}, but the plan "
                    f"is for {value.dtype}{[*shape]}{fix}"
                )
            arrays.append(np.asarray(to_raw(array)))
        return arrays


class Cursor:
    """Reads the groups of a `Source` in their order, from index `start` on."""

    def __init__(self, source: Source, start: int):
        self._source, self._next = source, start
        self._batches = source.groups.cursor(start)
        self._items: Any = None

    def batch(self, count: int) -> list[np.ndarray] | None:
        """Read the next groups at once: the leaves of their data, `[count, *s]`.

        None: they can only be read one by one, and so can all later ones.
        """
        if self._batches is None:
            return None
        try:
            leaves = self._source.leaves(self._batches.take(count), count)
        except Exception:  # one by one, it is that of a group
            self._batches = None
            return None
        self._next += count
        return leaves

    def take(self, count: int) -> list[np.ndarray]:
        """Read the next groups: the leaves of their data, `[count, *s]`.

        A group that cannot be read is an error.
        """
        leaves = self.batch(count)
        if leaves is not None:
            return leaves
        source, n = self._source, self._source.n
        if self._items is None:
            self._items = source.between(self._next, n)
        stacks: list[np.ndarray] = []
        for i, (group, own) in enumerate(itertools.islice(self._items, count)):
            if isinstance(own, DrjaxError):
                name = source.groups.name_of(group)
                who = f"Group {group} ({name})" if name else f"Group {group}"
                raise type(own)(f"{who}: {own}") from own
            # One array for all, so that a group's own is not needed any more.
            if not stacks:
                stacks = [np.empty((count, *x.shape), x.dtype) for x in own]
            for stack, leaf in zip(stacks, own, strict=True):
                stack[i] = leaf
        self._next += count
        if self._next == n:
            next(self._items, None)  # it raises if there are more groups
        return stacks


def _uncast(value: Value, leaf: object) -> Any:
    """Convert a leaf of a group's pytree to an array; numpy's arrays keep their dtype.

    Others are converted by `jax.numpy.asarray`. `value` is for its name in errors.
    """
    # Not by jnp.asarray: without x64 it would cast 64-bit data without an error.
    if isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)
        if array.dtype == object:
            raise DrjaxTypeError(
                f"its {value.name} is an array of Python objects, not of numbers: it "
                "has nulls, or lists that differ in length. Fill or pad them, in "
                "Parquet files with `columns=`"
            )
        return array
    try:
        return as_array(leaf)
    except (TypeError, ValueError, OverflowError) as error:
        text = f"its {value.name} is {leaf!r:.60}, which is no array: {error}"
        raise DrjaxTypeError(text) from error


def as_array(x: Any) -> np.ndarray | Array | Slices:
    """Convert a leaf of an argument to an array of a dtype of JAX; keep a `Slices`.

    Arrays and scalars of numpy stay in numpy, cast to the dtype that JAX would use (32
    bits, unless x64 is enabled). Others are converted by `jax.numpy.asarray`.
    """
    if isinstance(x, Slices):
        return x
    if isinstance(x, np.ndarray | np.generic):
        # The cast of jnp.asarray, which would also copy the array to a device.
        array = x if isinstance(x, Constant) else np.asarray(x)
        return array.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
    # Those of 64 bits may be cast; others `asarray` returns, which takes it 0.1 ms.
    if isinstance(x, Array) and not is_key(x.dtype) and x.dtype.itemsize < 8:
        return x
    return jax.numpy.asarray(x)


def flat_slices(
    plan: Plan, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> list[np.ndarray | Slices]:
    """Flatten the arguments of a call to the inputs of a plan, for an engine's driver.

    For each input of the plan the list has a numpy array, random keys as key data; of a
    partitioned input `[n, ...]`, with the slices along axis 0. For each leaf of a
    `Groups` it has a `Lazy`, which reads its slices later; other `Slices` as they are.
    """
    if any(isinstance(x, Groups) for x in (*args, *kwargs.values())):
        # For each argument the indices of its leaves, as a `Groups` replaces all of
        # them. Arguments that the plan lacks have none, and `flat_inputs` refuses them.
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
        if not isinstance(x, Slices):
            if not isinstance(x, Constant):
                x = np.asarray(to_raw(x) if is_key(x.dtype) else x)
            if value.partitioned and value.axis:
                x = np.moveaxis(x, value.axis, 0)
        arrays.append(x)
    return arrays


def _lazy(plan: Plan, x: PyTree, positions: PyTree) -> PyTree:
    """Replace a `Groups` argument by a pytree of `Lazy`; return others unchanged.

    `positions` is a pytree of the structure of the argument in the plan: for each leaf
    its index in `plan.inputs`. None: the plan has no such argument, and `x` is returned
    unchanged.
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


def like_the_first(groups: Groups, name: str, n: int) -> tuple[Source, PyTreeDef]:
    """Make the source of a `Groups` whose types no plan gives: those of group 0.

    `name` is that of the argument. The other result is the structure of the data of a
    group. A `DrjaxError` if group 0 has no types of JAX.
    """
    item = next(groups.starting(0), None)
    paths, tree = jax.tree_util.tree_flatten_with_path(item)
    values = []
    for path, leaf in paths:
        value = Value(name + jax.tree_util.keystr(path), (), None, (), 0)
        x: Any = as_array(_uncast(value, leaf))
        values.append(replace(value, shape=x.shape, dtype=x.dtype, nbytes=x.nbytes))
    source = Source(groups, tree, values, n)
    source.leaves(item)  # it raises if the dtypes are not those of JAX
    return source, tree
