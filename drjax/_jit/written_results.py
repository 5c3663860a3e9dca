"""`out=` of `drjax.jit`: results of the groups that are written while the program runs.

Input: the option, a dict from results to what they are written to; a jaxpr, of which
some results are these. Output: a function that returns a number in the place of each of
them, and in which the groups write them by `write_groups_p`.

So what a group returns is work of that group, as data that are read: the loop over
chunks of groups writes those of a chunk, and no array has the results of all groups.

Invariants: what is compiled depends on which results are written, not on what they are
written to. A call waits for its results. One chunk is written at a time. Sharp edges:
calls of one compiled function wait for each other, as it has one writer.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from drjax import _compat
from drjax._api.blocks import map_fn, partition_index
from drjax._api.max_and_min import reduce_max
from drjax._compat.types import Array, ClosedJaxpr, GlobalArray, PyTree, PyTreeDef
from drjax._context import OF_LIBRARY
from drjax._errors import DrjaxError, DrjaxTypeError, DrjaxValueError
from drjax._jaxprs.prng_keys import to_raw
from drjax._jit.lazy_arguments import partition_of
from drjax._partition import Partition
from drjax._primitives.write_groups import WRITERS, write_groups_p
from drjax._pytree_paths import (
    KeyPath,
    as_path,
    path_text,
    replaced,
    subtree,
)

_numbers = itertools.count()


@dataclass(frozen=True)
class Written:
    """Which results of a function are written, in its compiled code.

    Attributes:
      results: Their paths in what the function returns.
      number: That of the writer, which is there while a call runs.
      lock: Held by a call while it runs.
    """

    results: tuple[KeyPath, ...]
    number: int = field(default_factory=lambda: next(_numbers))
    lock: Any = field(default_factory=threading.Lock)

    def __reduce__(self) -> tuple[Any, ...]:
        return Written, (self.results,)

    def write(
        self,
        fn: Callable,
        jaxpr: ClosedJaxpr,
        tree: PyTreeDef,
        run: Callable[..., Sequence[Array]] | None,
    ) -> Callable[..., list[Array]]:
        """Let a function of arrays write some of its results, and return numbers.

        It is `run`, or that of `jaxpr`, which computes the leaves of what `fn` returns,
        of structure `tree`.
        """
        positions = self._positions(tree, fn)
        avals: list[Any] = [jaxpr.out_avals[i] for i in positions]
        sizes = {(*aval.shape, 0)[0] for aval in avals}
        partition = partition_of(jaxpr, sizes, fn)
        if partition is None:
            types = ", ".join(aval.str_short() for aval in avals)
            raise DrjaxTypeError(
                f"out= needs results of each group, [n, ...], of a partition that the "
                f"function has, got {types}."
            )
        run = run or _compat.jaxpr_as_checked_fun(jaxpr)

        def writing(*arrays: Array) -> list[Array]:
            outs = [*run(*arrays)]
            for leaf, i in enumerate(positions):
                outs[i] = self._write(leaf, to_raw(outs[i]), partition)
            return outs

        return writing

    def _positions(self, tree: PyTreeDef, fn: Callable) -> list[int]:
        """Return the leaves that are written, of a result with this structure."""
        leaves = tree.unflatten(range(tree.num_leaves))
        name = getattr(fn, "__name__", "the function")
        text = lambda path: f"out= has result {path_text(path)} of {name}"
        positions = jax.tree.leaves(
            [subtree(leaves, path, text(path)) for path in self.results]
        )
        if len(set(positions)) < len(positions):
            raise DrjaxValueError(
                "out= needs different results, got two of which one has a part of the "
                f"other: {', '.join(map(path_text, self.results))}."
            )
        return positions

    def _write(self, leaf: int, x: Array, partition: Partition) -> GlobalArray:
        own = {"writer": self.number, "leaf": leaf, "n": partition.size}

        def write(group: Array, slice_: Array) -> Array:
            return write_groups_p.bind(group, slice_, **own)

        write.__name__ = OF_LIBRARY + "write_groups"
        groups = partition_index(partition=partition)
        written = map_fn(write, (groups, x), partition=partition)
        return reduce_max(written, partition=partition)


@dataclass(frozen=True)
class Out:
    """The option `out=`, checked: for each result what it is written to.

    Attributes:
      targets: From paths to pytrees of what has a `shape`, a `dtype` and items by
        slices, such as a `numpy.memmap`.
    """

    targets: dict[KeyPath, PyTree]

    @classmethod
    def checked(cls, out: Any) -> "Out":
        items = out if isinstance(out, dict) else {(): out}
        targets = {as_path(result): target for result, target in items.items()}
        for path, target in targets.items():
            for x in jax.tree.leaves(target):
                if not all(hasattr(x, a) for a in ("shape", "dtype", "__setitem__")):
                    raise DrjaxTypeError(
                        f"out= needs for result {path_text(path)} what has a shape, a "
                        "dtype and items to set, such as numpy.lib.format.open_memmap "
                        f"returns, got {type(x).__name__}."
                    )
        return cls(targets)

    def call(self, written: Written, run: Callable[[], PyTree]) -> PyTree:
        """Call a function that writes; return the targets in its result.

        It returns numbers in their places.
        """
        if _compat.under_trace():
            raise DrjaxValueError(
                "A function of drjax.jit(out=) writes when it is called, so it cannot "
                "be called inside of jax.jit, jax.grad or jax.vmap. Give out= to the "
                "outermost: drjax.jit(jax.grad(f), out=...)."
            )
        writer = _Writer(jax.tree.leaves([*self.targets.values()]))
        with _opened(written, writer):
            results = jax.block_until_ready(run())
        for path, target in self.targets.items():
            own = jax.tree.structure(subtree(results, path, ""))
            if own != jax.tree.structure(target):
                raise DrjaxTypeError(
                    f"out= needs for result {path_text(path)} something for each of "
                    f"its leaves, {own}, got {jax.tree.structure(target)}."
                )
        if writer.error is not None:
            raise writer.error
        for path, target in self.targets.items():
            results = replaced(results, path, target)
        return results


@contextlib.contextmanager
def _opened(written: Written, writer: "_Writer") -> Iterator[None]:
    with written.lock:
        WRITERS[written.number] = writer
        try:
            yield
        finally:
            del WRITERS[written.number]


class _Writer:
    """Writes the slices of chunks, one chunk at a time.

    Attributes:
      error: That of a chunk that could not be written; later ones are not. None: none.
        An error of one device would let other devices wait for it forever.
    """

    def __init__(self, targets: Sequence[Any]):
        self._targets, self._lock = targets, threading.Lock()
        self.error: Exception | None = None

    def __call__(self, leaf: int, n: int, low: int, slices: np.ndarray) -> None:
        with self._lock:
            try:
                if self.error is None:
                    self._write(self._targets[leaf], n, low, slices)
            except DrjaxError as error:
                self.error = error
            except Exception as error:
                self.error = DrjaxValueError(
                    f"The results of groups {low} to {low + len(slices) - 1} cannot be "
                    f"written: {type(error).__name__}: {error}"
                )

    def _write(self, target: Any, n: int, low: int, slices: np.ndarray) -> None:
        shape = n, *slices.shape[1:]
        if target.dtype != slices.dtype or tuple(target.shape) != shape:
            raise DrjaxTypeError(
                f"out= needs what has the type of the result, {slices.dtype}"
                f"{[*shape]}, got {target.dtype}{[*target.shape]}."
            )
        target[low : low + len(slices)] = slices
