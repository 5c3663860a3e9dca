"""A partitioned value, wherever its slices are: one interface for the driver.

    HostSlices      an array of this process
    Lazy            data that is read group by group (`groups`)
    WorkerSlices    pieces that workers have: objects, files, a client's own
                    (`worker_slices`)

Input: what a stage or a call needs of a value. Output: its slices for a block, as
columns, in other groups, without dropped groups, or all in one array.

Invariants: nothing is read but by `whole` and by `block` of data of the caller; where
it must be, the result is a `HostSlices`.

Sharp edges: the driver stores an array as it is; `as_slices` is the one place that
asks. Slices of groups without results are NaN, or zero if the dtype has no NaN.
"""

import abc
from collections.abc import Sequence
from typing import Any, TypeAlias, Union, cast

import jax
import numpy as np
from jax.typing import DTypeLike

from drjax._jaxprs.prng_keys import raw_type
from drjax.plan import Value

# As the driver has it between stages.
Partitioned: TypeAlias = Union[np.ndarray, "Slices"]


class Slices(abc.ABC):
    """A partitioned value of n groups.

    Attributes:
      n: The number of groups; of columns that of coordinates.
      source: What is read in the order of the groups, for several values at once; None:
        nothing is.
      held: Whether a handle of the caller has the slices: then they are needed after
        the call.
    """

    value: Value
    n: int
    source: Any = None
    held = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array `[..., n, ...]` of all groups, as the plan has it."""
        return self.value.whole_shape(self.n)

    @property
    def dtype(self) -> Any:
        return self.value.dtype

    @abc.abstractmethod
    def whole(self) -> np.ndarray:
        """Read the slices of all groups into one numpy array `[n, ...]`.

        Random keys are key data. `DrjaxTypeError`: only the workers have the slices,
        and give none away.
        """

    @abc.abstractmethod
    def block(self, low: int, high: int, leaves: Sequence[Any] = ()) -> Any:
        """Return the slices of the groups from `low` to before `high`, for a worker.

        It is an array `[c, ...]`, or the `Pieces` of slices that workers have. `leaves`
        has for each of the groups what `source` has read, None for one that takes no
        part.
        """

    def columns(self, value: Value, size: int) -> "Slices":
        """Return the columns of `size` coordinates, in the place of groups.

        `value` is the input of the body of a `columns` loop.
        """
        x = np.reshape(self.whole(), value.whole_shape(size))
        return HostSlices(value, np.moveaxis(x, value.axis, 0))

    def moved(self, value: Value, index: np.ndarray) -> "Slices":
        """Return the slices in other groups: group i has that of group `index[i]`."""
        return HostSlices(value, self.whole()[index])

    def masked(self, alive: np.ndarray) -> "Slices":
        """Return the value with no slices of dropped groups, whose `alive` is false."""
        x = self.whole()
        if not alive.all():
            # A copy: the caller's array, or a later round's input, must not change.
            x = np.array(x)
            x[~alive] = _missing(x.dtype)
        return HostSlices(self.value, x)

    def replacing(self, value: Value, old: Partitioned, alive: np.ndarray) -> "Slices":
        """Return the slices as a kept result: dropped groups have those of `old`.

        `old` is the argument that the result `value` replaces in the next call.
        """
        x = self.whole()
        if not alive.all():
            x = np.array(x)
            x[~alive] = read_if_lazy(old)[~alive]
        return HostSlices(value, x)

    def opened(self) -> Partitioned:
        """Return the value as stages take it; `EngineError` if the slices are gone."""
        return self

    def in_steps(self) -> Partitioned:
        """Return the value as a stack of a scan, which takes `x[:, t]` in step t."""
        return self.whole()

    def release(self) -> None:
        """Drop what refers to the slices, as they are not needed any more."""
        self.held = False


class HostSlices(Slices):
    """The slices as an array `[c, ...]` of this process, from group `first` on.

    A kept result whose workers keep nothing is one, too. Without a `value` it is only
    cut into blocks.
    """

    def __init__(self, value: Value | None, slices: np.ndarray, first: int = 0):
        self.value, self.n = cast(Value, value), len(slices)
        self._slices, self._first = slices, first

    def whole(self) -> np.ndarray:
        return self._slices

    def block(self, low: int, high: int, leaves: Sequence[Any] = ()) -> np.ndarray:
        # A view: workers that share this memory read it without a copy.
        return self._slices[low - self._first : high - self._first]

    def opened(self) -> np.ndarray:
        return self._slices


def as_slices(value: Value, x: Partitioned) -> Slices:
    """Return what the driver has for a partitioned value by its one interface."""
    return x if isinstance(x, Slices) else HostSlices(value, x)


def read_if_lazy(x: Partitioned) -> np.ndarray:
    """Read all groups' slices of a `Slices`, `[n, ...]`; return an array unchanged."""
    return x.whole() if isinstance(x, Slices) else x


def in_steps(x: Partitioned) -> Partitioned:
    """Return a stack of a scan as its steps take it, unless it is an array."""
    return x.in_steps() if isinstance(x, Slices) else x


def empty_slices(value: Value, n: int) -> np.ndarray:
    """Return n slices for groups without results; of random keys it is key data."""
    raw = raw_type(value)
    return np.full((n, *raw.shape), _missing(raw.dtype), raw.dtype)


def _missing(dtype: DTypeLike) -> float:
    """The number in the place of one that no group has."""
    # Not numpy's `issubdtype`, to which bfloat16 is not inexact.
    return np.nan if jax.numpy.issubdtype(dtype, np.inexact) else 0
