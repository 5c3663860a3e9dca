"""`Groups` as arguments of `drjax.jit`: data that are read while the program runs.

Input: arguments of a call, of which some are `Groups` or `Parquet`. Output: the same
with an `Unread` in place of each, a pytree with one number; and, when the function is
traced, a jaxpr in which the groups read their data by `read_groups_p`.

So the data of a group are work of that group. The loop over chunks of groups that
`drjax.jit` makes anyway reads the data of a chunk, and rounds that rematerialize read
them again: forward, backward, on a mesh and in loops of rounds. Neither arguments nor
temporary memory grow with the number of groups.

Invariants: what is compiled depends on the types of a group's data, not on the object.
A call outside of transformations waits for its results, as no reader may be closed
before. Sharp edges: inside of transformations nobody knows when the last computation
that reads has ended. There a reader lives as long as its `Groups`, and then until the
next such call has waited for all arrays.
"""

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drjax import _compat
from drjax._api.blocks import map_fn, partition_index
from drjax._compat.types import Array, Aval, ClosedJaxpr, PyTree, PyTreeDef
from drjax._context import OF_LIBRARY
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._jaxprs.prng_keys import from_raw, raw_type
from drjax._jaxprs.walk import deep_equations
from drjax._jit import read_in_loops
from drjax._partition import Partition, attached_levels
from drjax._primitives.read_groups import READERS, read_groups_p
from drjax._sharding.layout import find_mesh, make_layout
from drjax.plan import Value

_BYTES = 16 << 20  # of the data of the groups that run at once, unless the user says it


@dataclass(frozen=True)
class Unread:
    """What stands for a `Groups` inside `jax.jit`: a pytree with one leaf, `number`.

    Attributes:
      number: That of the reader, int32 `[]`.
      tree: The structure of the data of a group.
      values: The types of its leaves.
      n: The number of groups.
    """

    number: Array
    tree: PyTreeDef
    values: tuple[Value, ...]
    n: int

    @property
    def nbytes(self) -> int:
        """The bytes of the data of one group."""
        return sum(value.nbytes for value in self.values)


jax.tree_util.register_pytree_node(
    Unread,
    lambda x: ((x.number,), (x.tree, x.values, x.n)),
    lambda rest, leaves: Unread(*leaves, *rest),
)


# ---------------------------------------------------------------------------------
# Calls

_numbers = itertools.count()
_sources: Any = weakref.WeakKeyDictionary()  # by `Groups`: its source, and a structure
_living: Any = weakref.WeakKeyDictionary()  # by `Groups`: the number of its reader
_dead: list[int] = []  # numbers of readers whose `Groups` are gone


def has_groups(*args: PyTree) -> bool:
    """Whether an argument is a `Groups`, or has one among its leaves."""
    from drjax.engines.slices.groups import Groups

    return any(isinstance(x, Groups) for x in jax.tree.leaves(args))


def closed(
    fn: Callable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Replace each `Groups` by an `Unread` that has its types, but no reader."""
    return _replaced(fn, args, kwargs, lambda *_: -1)


def run(
    fn: Callable,
    jitted: Callable,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    progress: bool = False,
) -> PyTree:
    """Call a jitted function with `Groups` among its arguments.

    Inside of transformations, where nobody knows when it ends, there is no progress.
    """
    traced = _compat.under_trace()
    shows = progress and not traced
    with _opened(fn, args, kwargs, traced, shows) as (args, kwargs, readers):
        out = jitted(*args, **kwargs)
        if not traced:
            jax.block_until_ready(out)
            for reader in readers:
                if reader.error is not None:
                    raise reader.error
        return out


@contextlib.contextmanager
def _opened(
    fn: Callable,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    stay: bool,
    progress: bool,
) -> Iterator[tuple[tuple[PyTree, ...], dict[str, PyTree], list[Any]]]:
    """Replace each `Groups` by an `Unread`, with an open reader unless it will stay."""
    from drjax.engines.slices.read_ahead import ReadAhead

    readers: dict[int, ReadAhead] = {}

    def number_of(groups: Any, source: Any) -> int:
        if stay and groups in _living:
            return _living[groups]
        number = next(_numbers)
        reader = ReadAhead(source, raises=stay, progress=progress)
        READERS[number] = readers[number] = reader
        if stay:
            _living[groups] = number
            weakref.finalize(groups, _dead.append, number)
        return number

    if stay:
        _close_dead()
    try:
        args, kwargs = _replaced(fn, args, kwargs, number_of)
        yield args, kwargs, [*readers.values()]
    finally:
        if not stay:
            _close(readers)


def _replaced(
    fn: Callable,
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    number_of: Callable[[Any, Any], int],
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Replace each `Groups` by an `Unread`; `number_of` takes it and its source."""
    from drjax.engines.slices.groups import Groups

    def replaced(x: Any) -> Any:
        if not isinstance(x, Groups):
            return x
        source, tree = _source(x, fn)
        number: Any = np.int32(number_of(x, source))
        return Unread(number, tree, tuple(source.values), source.n)

    return jax.tree.map(replaced, (args, kwargs))


def _source(groups: Any, fn: Callable) -> tuple[Any, PyTreeDef]:
    """Return the source of a `Groups`, with the types of group 0, and its structure."""
    from drjax.engines.slices.groups import like_the_first

    n = _number_of_groups(groups, fn)
    if groups not in _sources or _sources[groups][0].n != n:
        # A copy, as what is cached must not keep the key of the cache alive.
        _sources[groups] = like_the_first(copy.copy(groups), "data", n)
    return _sources[groups]


def _number_of_groups(groups: Any, fn: Any) -> int:
    """Return n: what the data say, or else the program, in whatever is around it."""
    n, declared = groups.count(), _declared(fn)
    if n is None and declared is not None:
        return declared.size
    if n is None:
        raise DrjaxValueError(
            "drjax.jit needs the number of groups before it reads their data. Give "
            "Groups a sequence, with a length and items by index, or jit the program "
            "itself, drjax.jit(program)."
        )
    return n


def _declared(fn: Any) -> Partition | None:
    """Return the partition of a program, or of one inside of wrappers; None: none."""
    while fn is not None:
        levels = attached_levels(fn)
        if levels:
            return levels[0] if len(levels) == 1 else None
        fn = getattr(fn, "__wrapped__", None)
    return None


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        reader: Any = READERS.pop(number)
        reader.close()


def _close_dead() -> None:
    """Close readers whose `Groups` are gone, when nothing that is running has them."""
    if _dead:
        numbers, _dead[:] = [*_dead], []
        arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
        # An error is raised where the array is used.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(arrays)
        _close(numbers)


# ---------------------------------------------------------------------------------
# Traces


@dataclass(frozen=True)
class Leaf:
    """One leaf of an `Unread`, in the place of an array `[n, *s]`."""

    of: Unread
    index: int

    @property
    def aval(self) -> Aval:
        value = self.of.values[self.index]
        return _compat.ShapedArray((self.of.n, *value.shape), value.dtype)


def leaves_of(tree: PyTree) -> PyTree:
    """Replace each `Unread` by a pytree of its leaves."""

    def replaced(x: Any) -> Any:
        if not isinstance(x, Unread):
            return x
        return x.tree.unflatten([Leaf(x, i) for i in range(len(x.values))])

    return jax.tree.map(replaced, tree, is_leaf=lambda x: isinstance(x, Unread))


@dataclass(frozen=True)
class Read:
    """A jaxpr whose operands that are leaves are read, in each group.

    Attributes:
      fn: It takes `operands`, and returns what the jaxpr does.
      operands: The numbers of the readers, and the operands that are arrays.
      names: Their names.
      nbytes: The bytes that a group reads.
      slots: The number of groups of a device.
    """

    fn: Callable[..., list[Array]]
    operands: list[Array]
    names: list[str]
    nbytes: int
    slots: int

    def groups_per_step(self) -> int:
        """Return how many groups to run at once, unless the user says it."""
        return min(self.slots, max(1, _BYTES // max(1, self.nbytes)))


def read_in(
    fn: Callable,
    jaxpr: ClosedJaxpr,
    operands: Sequence[Array | Leaf],
    names: Sequence[str],
) -> Read:
    """Replace operands that are leaves of data by work that reads these, in a group.

    The jaxpr is that of `fn`.
    """
    unread = {id(x.of): x.of for x in operands if isinstance(x, Leaf)}
    sizes = {x.n for x in unread.values()}
    partition = _partition_of(jaxpr, sizes, fn)
    slots = make_layout(partition, find_mesh(partition)).per_device
    numbers: list[Any] = [jnp.asarray(x.number) for x in unread.values()]
    arrays = [i for i, x in enumerate(operands) if not isinstance(x, Leaf)]
    rest: list[Any] = [operands[i] for i in arrays]

    def reading(*arrays: Array) -> list[Array]:
        of_readers = dict(zip(unread, arrays, strict=False))
        others = iter(arrays[len(unread) :])

        def reader() -> Callable[[Leaf], Array]:
            slices: dict[int, list[Array]] = {}

            def read(x: Leaf) -> Array:
                key = id(x.of)
                if key not in slices:
                    number = of_readers[key]
                    slices[key] = _read(number, x.of.values, partition, slots)
                return slices[key][x.index]

            return read

        args = [x if isinstance(x, Leaf) else next(others) for x in operands]
        return read_in_loops.run(jaxpr, args, lambda x: isinstance(x, Leaf), reader)

    return Read(
        reading,
        [*numbers, *rest],
        [*(f"reader.{i}" for i in range(len(unread))), *(names[i] for i in arrays)],
        sum(x.nbytes for x in unread.values()),
        slots,
    )


def _read(
    number: Array, values: Sequence[Value], partition: Partition, slots: int
) -> list[Array]:
    types = tuple(map(raw_type, values))

    def read(group: Array) -> list[Array]:
        outs = read_groups_p.bind(number, group, types=types, slots=slots)
        return [from_raw(x, v.dtype) for x, v in zip(outs, values, strict=True)]

    read.__name__ = OF_LIBRARY + "read_groups"
    return map_fn(read, partition_index(partition=partition), partition=partition)


def _partition_of(jaxpr: ClosedJaxpr, sizes: set[int], fn: Callable) -> Partition:
    """Find a partition of so many groups that a function, or its jaxpr, has."""
    partition = partition_of(jaxpr, sizes, fn)
    if partition is not None:
        return partition
    text = " and ".join(map(str, sorted(sizes)))
    raise DrjaxTypeError(
        f"drjax.jit got Groups with the data of {text} groups, and the function needs "
        "a partition of so many; it has none."
    )


def partition_of(jaxpr: ClosedJaxpr, sizes: set[int], fn: Callable) -> Partition | None:
    """Find a partition of so many groups that a function, or its jaxpr, has, if any."""
    declared = _declared(fn)
    if declared is not None and {declared.size} == sizes:
        return declared  # also of a program without blocks, which adds up an axis
    for eqn in deep_equations(jaxpr):
        partition = eqn.params.get("partition")
        if isinstance(partition, Partition) and {partition.size} == sizes:
            return partition
    return None
