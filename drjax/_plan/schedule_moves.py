"""A schedule of collectives that move slices between devices, of a move that is known.

Input: for each slot of a result the slot of the operand whose slice it gets, where m
devices have k slots each. Output: a `Schedule`: some `ppermute`s and at most one
all-to-all; which slices each device puts into them; and where it finds the slice of
each of its slots afterwards.

Let C[s, t] be the number of slices that device s sends to device t. A `ppermute` of c
slices sends up to c from each device to one other, which is a matching. The all-to-all
sends w = max C slices to each other device, those of smaller C padded. A ring shift, or
a move of whole blocks, is one matching or two. A random permutation would need many, so
it is one all-to-all. Between these, matchings are taken off C one after the other, the
widest first, and the all-to-all sends what is left, where that costs less: a `ppermute`
costs as much as `MESSAGE` bytes. Without an all-to-all, the matchings send no more
slices than the busiest device must send or receive: C, filled up so that all send
and receive as many, is a sum of permutations (Birkhoff 1946, "Tres observaciones sobre
el algebra lineal").

Invariants: a slice that stays on its device is not sent, and one that several slots of
a device get is sent there once. Sharp edges: the tables have an element for each slice
and are computed when a program is lowered, by NumPy alone: without a loop over slices.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# So many bytes are sent over a link in the time that a message takes to start, about.
MESSAGE = 2**15
# An all-to-all takes as long to start as so many permutes.
_MESSAGES_OF_ALL_TO_ALL = 4
# Matchings must cost less than this part of what one all-to-all costs.
_WORTH_MATCHINGS = 0.9
# An all-to-all may be so much wider to spare a copy of what is received.
_WORTH_NO_COPY = 1.1
# Matchings are sought among so many pairs of devices at most.
_MOST_PAIRS = 2**16


class Sources(Sequence[int]):
    """An immutable sequence of groups, as a parameter of an equation.

    A tuple would do. But JAX looks for a jaxpr in each element of a tuple, many times,
    and hashes it again each time.
    """

    def __init__(self, groups: ArrayLike) -> None:
        """Make it of a sequence or an array of integers."""
        self._groups = np.asarray(groups, np.int64)
        self._bytes = self._groups.tobytes()
        self._hash = hash(self._bytes)

    @classmethod
    def of(cls, index: Any) -> "Sources | None":
        """An index if it is known without running the program: if it is of NumPy."""
        return cls(index) if isinstance(index, np.ndarray) else None

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._groups, dtype)

    def __getitem__(self, i: Any) -> Any:
        return self._groups.tolist()[i]

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups.tolist())

    def __len__(self) -> int:
        return len(self._groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sources) and self._bytes == other._bytes

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr((*self,))


@dataclass(frozen=True)
class PermuteStep:
    """One `ppermute`, in which each sender sends c of its slices to one receiver.

    Attributes:
      pairs: `(sender, receiver)` device indices, as `lax.ppermute` takes them.
      slots: int32 `[m, c]`: for each of the m devices the slots (places for one group's
        slice, from 0) whose slices it sends. What is received of others is not read.
    """

    pairs: tuple[tuple[int, int], ...]
    slots: np.ndarray


@dataclass(frozen=True)
class Schedule:
    """The collectives that give each device the slices of its slots.

    Attributes:
      steps: The `ppermute`s. Their order does not matter, as all send slices that the
        devices had before the first one.
      exchanged: int32 `[m, m * w]`: for each device the slots whose slices it puts into
        the all-to-all, w for each of the m devices; w is 0 if there is none.
      positions: int32 `[m, l]`: for each of the l slots of each device of the result
        the position of its slice in a concatenation: the device's own k slices, those
        that it receives in each step, and the m * w of the all-to-all.
      filled: bool `[m, l]`: which slots have a source; the others get zeros.
      own: k; 0 if the device's own slices are not in it, but in the all-to-all.
    """

    steps: tuple[PermuteStep, ...]
    exchanged: np.ndarray
    positions: np.ndarray
    filled: np.ndarray
    own: int

    @property
    def all_filled(self) -> bool:
        """Whether all slots but the last ones, which are padding, have a source."""
        filled = self.filled.ravel()
        return bool((filled[1:] <= filled[:-1]).all())

    @property
    def slots(self) -> np.ndarray:
        """The slots whose slices each device sends, in order, int32 `[m, c]`."""
        return np.concatenate([*(s.slots for s in self.steps), self.exchanged], axis=1)

    @property
    def size(self) -> int:
        """The number of slices in the concatenation of which there are positions."""
        return self.own + self.slots.shape[1]

    @property
    def targets(self) -> np.ndarray:
        """The positions, and `size` for slots without a source."""
        return np.where(self.filled, self.positions, np.int32(self.size))

    @property
    def slices_sent(self) -> int:
        """The number of slices that a device sends to others, with padding."""
        devices, exchanged = self.exchanged.shape
        permuted = sum(step.slots.shape[1] for step in self.steps)
        return permuted + exchanged // devices * (devices - 1)


@functools.lru_cache(maxsize=64)
def schedule(sources: Sequence[int], n: int, devices: int, nbytes: int) -> Schedule:
    """Make the `Schedule` by which each slot of a result gets its slice.

    `sources` has for each group of the result the group of the operand, of n groups,
    whose slice it gets; zeros if it is not in 0 to n - 1. On each of m `devices` there
    are ceil(n / m) slots of the operand, and of the result as many for its own number
    of groups; slots beyond the groups are padding. A slice has `nbytes` bytes.
    """
    k, l = -(-n // devices), -(-len(sources) // devices)
    source = np.full(devices * l, -1, np.int64)
    source[: len(sources)] = sources
    filled = (source >= 0) & (source < n)
    stays = source // k == np.arange(devices * l) // l
    positions = np.where(filled, source % k, 0)
    read = np.flatnonzero(filled & ~stays)
    edges = _edges(source[read], read, devices, k, l)
    counts = np.zeros((devices, devices), np.int64)
    np.add.at(counts, (edges.sender, edges.receiver), 1)
    matchings, width = _split(counts, nbytes)
    own = k
    if width and not matchings:
        # If the own slices about fit into the all-to-all, nothing is concatenated.
        all_read = np.flatnonzero(filled)
        every = _edges(source[all_read], all_read, devices, k, l)
        with_own = int(every.place.max()) + 1
        if with_own <= width * _WORTH_NO_COPY:
            read, edges, own, width = all_read, every, 0, with_own
    sender, receiver, slot, place, edge_of = edges
    steps, position, received = [], np.zeros(len(slot), np.int64), own
    for receivers, c in matchings:
        paired = receivers[sender] == receiver
        now = paired & (place >= 0) & (place < c)
        slots = _table(devices, c, sender[now], place[now], slot[now])
        senders = np.unique(sender[now])
        pairs = tuple(zip(senders.tolist(), receivers[senders].tolist(), strict=True))
        steps.append(PermuteStep(pairs, slots))
        position[now] = received + place[now]
        place = np.where(paired, place - c, place)
        received += c
    now = place >= 0
    column = receiver[now] * width + place[now]
    exchanged = _table(devices, devices * width, sender[now], column, slot[now])
    position[now] = received + sender[now] * width + place[now]
    positions[read] = position[edge_of]
    of_slot = np.flatnonzero(filled)
    positions = _table(devices, l, of_slot // l, of_slot % l, positions[of_slot])
    return Schedule(tuple(steps), exchanged, positions, filled.reshape(devices, l), own)


class _Edges(NamedTuple):
    """Slices that devices get, each once, by sender, receiver and slot; `[e]` each.

    `place` is that of a slice among those of its sender and receiver, and `edge_of`
    says for each slot of the result that gets one which it is.
    """

    sender: np.ndarray
    receiver: np.ndarray
    slot: np.ndarray
    place: np.ndarray
    edge_of: np.ndarray


def _edges(
    source: np.ndarray, target: np.ndarray, devices: int, k: int, l: int
) -> _Edges:
    """List what slots `target` of the result get from slots `source` of the operand."""
    keys = (source // k * devices + target // l) * k + source % k
    keys, edge_of = np.unique(keys, return_inverse=True)
    pair, slot = np.divmod(keys, k)
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    place = np.arange(len(pair)) - np.repeat(first, np.diff(first, append=len(pair)))
    return _Edges(pair // devices, pair % devices, slot, place, edge_of)


def _table(
    devices: int,
    columns: int,
    device: np.ndarray,
    column: np.ndarray,
    values: np.ndarray,
) -> np.ndarray:
    """Make an int32 table of values for each device, `[devices, columns]`.

    Where a device has no value, it gets that of the first one that has. It is not read,
    and if the values of all devices are equal, they need no table.
    """
    of_all = np.zeros(columns, np.int32)
    of_all[column[::-1]] = values[::-1]
    table = np.tile(of_all, (devices, 1))
    table[device, column] = values
    return table


def _split(counts: np.ndarray, nbytes: int) -> tuple[list[tuple[np.ndarray, int]], int]:
    """Split the slices that devices send into matchings and an all-to-all, by cost.

    A matching is `(receivers, c)`: device s sends c slices, those of them that there
    are, to device `receivers[s]`. The second result is the width of the all-to-all.
    """
    m, left = len(counts), counts.copy()

    def rest() -> int:
        width = int(left.max(initial=0))
        messages = _MESSAGES_OF_ALL_TO_ALL * bool(width)
        return messages * MESSAGE + width * (m - 1) * nbytes

    width, chosen, cost = int(left.max(initial=0)), 0, 0
    best = rest() * _WORTH_MATCHINGS
    matchings: list[tuple[np.ndarray, int]] = []
    filled = _with_equal_sums(counts)
    sparse = np.count_nonzero(counts) <= _MOST_PAIRS
    while sparse and left.any() and len(matchings) < m and cost + MESSAGE < best:
        receivers, c = _widest_matching(filled)
        pairs = np.arange(m), receivers
        filled[pairs] -= c
        left[pairs] = np.maximum(left[pairs] - c, 0)
        matchings.append((receivers, c))
        cost += MESSAGE + c * nbytes
        if cost + rest() < best:
            best, chosen, width = cost + rest(), len(matchings), int(left.max())
    return matchings[:chosen], width


def _with_equal_sums(counts: np.ndarray) -> np.ndarray:
    """Add to a matrix of counts so that all devices send and receive as many slices.

    The sums become the largest of them; what is added is on the diagonal first, where
    nothing is sent.
    """
    filled = counts.copy()
    most = max(counts.sum(0).max(), counts.sum(1).max())
    diagonal = np.arange(len(counts))
    filled[diagonal, diagonal] += most - np.maximum(counts.sum(0), counts.sum(1))
    # Where what senders and receivers lack, each in a line, overlaps.
    senders, receivers = (np.cumsum(most - filled.sum(axis)) for axis in (1, 0))
    ends = np.union1d(senders, receivers)
    ends = ends[ends > 0]
    pairs = tuple(np.searchsorted(line, ends) for line in (senders, receivers))
    np.add.at(filled, pairs, np.diff(ends, prepend=0))
    return filled


def _widest_matching(filled: np.ndarray) -> tuple[np.ndarray, int]:
    """Find the permutation of devices whose least element in a matrix is largest.

    The matrix is of `_with_equal_sums`. The second result is that element.
    """
    m = len(filled)
    receivers = filled.argmax(1)
    if len(np.unique(receivers)) == m:
        return receivers, int(filled[np.arange(m), receivers].min())
    from scipy import sparse  # takes long to import
    from scipy.sparse.csgraph import maximum_bipartite_matching

    widths = np.unique(filled[filled > 0])
    least, low, high = 0, 0, len(widths)
    while low < high:
        middle = (low + high) // 2
        graph = sparse.csr_array(filled >= widths[middle])
        matching = maximum_bipartite_matching(graph, perm_type="column")
        if (matching < 0).any():
            high = middle
        else:
            receivers, least, low = matching, int(widths[middle]), middle + 1
    return receivers, least
