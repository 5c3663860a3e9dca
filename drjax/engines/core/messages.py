"""Records between the driver and its workers: `Task` down, `BlockResult` up.

Input of a worker: a plan `File` and a `Task`, which is a block of groups and the stage
that they run. Output: a `BlockResult`. `WorkerState` tells the driver what a worker is
doing meanwhile.

Invariants: records hold numpy arrays, bytes, text and numbers; neither JAX's objects
nor users' code. So they can be pickled by any engine, and `wire_format` can write them
without pickle.

Sharp edges: stages and rounds are named by their index in `rounds_of`, which driver and
workers must compute from the same file.
"""

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drjax._errors import DrjaxValueError, MeshError
from drjax._plan.normal_form import rounds_of
from drjax._sharding.group_mesh import MeshAxes, as_text, devices_of
from drjax.plan import Plan, Round, Value


@dataclass(frozen=True)
class File:
    """A plan file in memory, as workers receive it.

    Attributes:
      key: The SHA-256 hash of the content, hexadecimal.
      x64: Whether the plan has 64-bit values: it must run with `jax_enable_x64`.
      custom_calls: Names of custom calls, code outside of the file, that its stages may
        make besides those that drjax always allows.
    """

    data: bytes
    key: str
    x64: bool
    custom_calls: tuple[str, ...] = ()


class Block:
    """c groups that a worker runs for one result, with their inputs. It never changes.

    What follows from consecutive groups that all take part is made when it is read.

    Attributes:
      groups: The group indices, int32 `[c]`.
      valid: Which of them take part, bool `[c]`; the others are masked: they run, or
        hold a place, but their results do not count.
      slices: For each partitioned input of the stage, in order, an array `[c, ...]` of
        the groups' slices. Before it is with its worker it may also have a
        `drjax.engines.slices.worker_slices.PiecesOfBlock`, for slices that workers
        have.
    """

    def __init__(self, groups: np.ndarray, valid: np.ndarray, slices: list[Any]):
        self.groups, self.valid, self.slices = groups, valid, slices

    @classmethod
    def of_range(
        cls, first: int, stop: int, slices: list[Any], valid: np.ndarray | None = None
    ) -> "Block":
        """Make a block of consecutive groups; `valid` None: all of them take part."""
        block = cls.__new__(cls)
        block.slices, block.place = slices, slice(first, stop)
        if valid is None:
            block.full = True
        else:
            block.valid = valid
        return block

    def with_slices(self, slices: list[Any]) -> "Block":
        """Return a copy with other slices."""
        block = Block.__new__(Block)
        vars(block).update(vars(self), slices=slices)
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        # Most blocks are of consecutive groups that all take part: two numbers.
        if isinstance(self.place, slice) and self.full:
            return _of_range, (self.place.start, self.place.stop, self.slices)
        return Block, (self.groups, self.valid, self.slices)

    @functools.cached_property
    def groups(self) -> np.ndarray:
        return range_of_groups(self.place.start, self.place.stop)

    @functools.cached_property
    def valid(self) -> np.ndarray:
        return np.ones(len(self), bool)

    @functools.cached_property
    def place(self) -> Any:
        """Where the groups are among all, a slice if they are consecutive, or int32."""
        if not len(self.groups):
            return self.groups
        first = int(self.groups[0])
        consecutive = range_of_groups(first, first + len(self.groups))
        if not np.array_equal(self.groups, consecutive):
            return self.groups
        return slice(first, first + len(self.groups))

    @functools.cached_property
    def full(self) -> bool:
        """Whether all groups take part."""
        return bool(self.valid.all())

    @property
    def empty(self) -> bool:
        """Whether no group takes part."""
        return not len(self) if self.full else not self.valid.any()

    def __len__(self) -> int:
        place = self.place
        return place.stop - place.start if isinstance(place, slice) else len(place)

    def group(self, position: int) -> int:
        """Return the index of the group at a position, which may be -1: the last."""
        if isinstance(self.place, slice):
            return int(range(self.place.start, self.place.stop)[position])
        return int(self.groups[position])

    def without(self, out: np.ndarray) -> "Block":
        """Return a copy that also masks the groups in `out`, bool `[c]`."""
        return Block(self.groups, self.valid & ~out, self.slices)

    def without_failed(self, failed: dict[int, str]) -> "Block":
        """Return a copy that also masks those groups of the block that have failed."""
        return self.without(np.isin(self.groups, list(failed)))

    def halves(self) -> list["Block"]:
        """Split the groups that take part into two blocks of about equal size.

        The order stays. If the number is odd, the second block has one more.
        """
        # Masked groups are left out: halving must end at one group that takes part.
        chosen = np.flatnonzero(self.valid)
        middle = len(chosen) // 2
        return [self._take_slots(chosen[:middle]), self._take_slots(chosen[middle:])]

    def _take_slots(self, positions: np.ndarray) -> "Block":
        """Return the block of the groups at positions `[k]`, masked ones included."""
        return Block(
            self.groups[positions],
            self.valid[positions],
            [x[positions] for x in self.slices],
        )

    def batches(self, size: int) -> Iterator[tuple[slice, "Block"]]:
        """Yield the parts of up to `size` groups in which a group takes part."""
        if len(self) <= size:
            if not self.empty:
                yield slice(0, len(self)), self
            return
        for low in range(0, len(self), size):
            part = slice(low, min(low + size, len(self)))
            slices = [x[part] for x in self.slices]
            if self.full and isinstance(self.place, slice):
                first = self.place.start
                yield part, Block.of_range(first + low, first + part.stop, slices)
            elif self.valid[part].any():
                yield part, Block(self.groups[part], self.valid[part], slices)

    def padded(self, size: int) -> "Block":
        """Pad the block to `size` groups, so that all batches have one shape.

        The result has arrays `[size, ...]`: the c groups, then masked copies of a
        group. A group that was masked before is replaced by such a copy, too. Copies
        are of the first group of the block that takes part, its index included; there
        must be one. It is this block itself if it has `size` groups and none is masked.
        """
        # Most blocks are full: no copy for them.
        if len(self) == size and self.full:
            return self
        index = np.zeros(size, np.int64)
        index[: len(self.valid)] = np.arange(len(self.valid))
        valid = np.zeros(size, bool)
        valid[: len(self.valid)] = self.valid
        # A real group's slices, as zeros could make a group's work loop forever or
        # raise.
        index[~valid] = np.argmax(self.valid)
        return Block(self.groups[index], valid, [x[index] for x in self.slices])


def _of_range(first: int, stop: int, slices: list[Any]) -> Block:
    return Block.of_range(first, stop, slices)  # pickle is slower for methods


def range_of_groups(first: int, stop: int) -> np.ndarray:
    """Return the indices of consecutive groups, read-only, `[stop - first]`.

    They are int32, the type for which stages are exported.
    """
    return _indices(1 << max(0, stop - 1).bit_length())[first:stop]


@functools.cache
def _indices(count: int) -> np.ndarray:
    # Once: of a million groups, new memory takes longer than the rest of a message.
    indices = np.arange(count, dtype=np.int32)
    indices.flags.writeable = False
    return indices


@dataclass(frozen=True)
class Task:
    """A block and what to do with it: what a worker is sent.

    Attributes:
      stage: The index of the stage's round in `rounds_of(plan)`; rounds in loops count.
      size: How many groups of the block run at once: the worker pads each batch to it.
      check_nans: Whether a group that yields a NaN has failed.
      drop: Whether to go on without groups that fail; if not, a block in which a group
        fails has no results.
      number: Unique among the tasks of a driver.
      search: Whether the groups run one by one and without results, while the
        `WorkerState` says which group runs: to find a group that takes too long.
      stay: For each output of the stage that is read later whether its slices stay with
        the workers; () if none do.
      encode: Whether partial reductions with `wire=` are returned as `EncodedPartial`s.
      save: A folder, by its path or URL, for files with the slices that stay; "": none.
      apart: Whether partial reductions are an object of their own, for other workers.
      full: How many groups a full block has, which may run in fewer batches if the
        compiled stage needs less memory than `size` assumes; 0: it may not.
    """

    stage: int
    block: Block
    size: int
    check_nans: bool
    drop: bool
    # From 1, as `WorkerState.task` is 0 before the first task.
    number: int = field(default_factory=itertools.count(1).__next__)
    search: bool = False
    stay: tuple[bool, ...] = ()
    encode: bool = True
    save: str = ""
    apart: bool = False
    full: int = 0

    def with_block(self, block: Block) -> "Task":
        """Return a copy with another block."""
        return Task(**{**vars(self), "block": block})


@dataclass(frozen=True)
class BlockResult:
    """The result of a stage for one block of c groups.

    Attributes:
      partials: For each of the round's reductions but gathers the partial reduction
        over the block, an array, or None if no group of the block takes part; of one
        with `wire=` an `EncodedPartial`. If the round has folds, two kinds of arrays
        follow: the indices of the first groups of the block's k batches, int32 `[k]`,
        and the leaves of the batches' states, `[k, *s]`. Empty if the block has no
        results.
      slices: For each output of the stage that is read later an array `[c, ...]` of the
        groups' slices, unless they stay with the workers. Empty if the block has no
        results.
      failed: From group index to reason, for groups that failed. If there is one and
        failed groups are not dropped, the block has no results.
      pid: The id of the worker's process; 0 if no worker ran.
      seconds: How long the worker took.
      piece: The engine's reference to the slices that stay with the workers, a list of
        arrays `[c, ...]` in their store; None if there are none.
      saved: The digest of a file with these slices, by `saved_calls.write_slices`; "":
        no file has them.
    """

    partials: Sequence[Any]
    slices: list[np.ndarray]
    failed: dict[int, str]
    pid: int = 0
    seconds: float = 0.0
    piece: Any = None
    saved: str = ""


@dataclass
class WorkerState:
    """What a worker is doing, as it reports it to the driver.

    Attributes:
      groups: The indices of the first and the last group that run now; None if the
        worker is idle.
      since: `time.time()` when these groups began.
      task: The `Task.number` of the task that these groups belong to; 0 before the
        first task.
      seconds: The time since then by the worker's own clock.
    """

    pid: int = field(default_factory=os.getpid)
    groups: tuple[int, int] | None = None
    since: float = 0.0
    task: int = 0
    seconds: float = 0.0


def kept_outputs(plan: Plan, a_round: Round) -> list[Value]:
    """Return the outputs of a round's local stage whose slices are read after it.

    A later round, a gather, a move or a loop reads them, or the plan returns them; the
    others are only reduced. They are in the stage's order. `plan` is the plan, or the
    body of a loop, that has the round.
    """
    # Slices that nothing needs later stay in the worker.
    kept = plan.kept()
    return [v for v in a_round.local.outputs if v.name in kept]


def refuse_secure_sums(plan: Plan) -> None:
    """Raise a `DrjaxValueError` for a plan, or a loop in it, that has a secure sum.

    An engine calls it whose processes see slices.
    """
    for _, a_round in rounds_of(plan):
        for reduce in a_round.partials:
            if reduce.secure:
                raise DrjaxValueError(
                    f"{plan.name} has a secure sum, of {reduce.source.name}: no "
                    "process but a group's own may see its slice. This engine's "
                    "processes see slices of the groups. Run the plan on Flower, or "
                    "leave out secure=True."
                )


def refuse_group_mesh(axes: MeshAxes, engine: str) -> None:
    """Raise a `MeshError` for `Plan.group_mesh`, unless a group runs on one device.

    Engines call it whose workers are not asked how many devices they have.
    """
    if axes:
        raise MeshError(
            f"The plan runs each group on a mesh of {as_text(axes)}, and {engine} runs "
            f"a group on one device. Use Ray, with devices_per_group={devices_of(axes)}"
            ", or in_process; or plan the function without shardings in the groups."
        )
