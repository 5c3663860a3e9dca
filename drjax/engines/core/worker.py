"""The worker: a block of groups, through one stage of a plan file.

Input: a plan file, a `Task`, and the stage's global inputs, as numpy arrays. Output: a
`BlockResult`. `run` is the entry point in a worker's process; it keeps the latest plan
files with their compiled stages, by the hash of the file.

Invariants: a failure of one group is reported for that group alone. A block that fails
or yields NaN runs again to find which groups do, each alone or by halving the block. A
block runs in batches of one size, the last is padded, so that a stage compiles once;
their partial reductions are added up on the device. A full block runs in fewer batches
if the compiled stage shows that they fit.

Sharp edges: a group of a block that fails runs more than once. What fails in a block
and in no group alone is raised as it is: then the block, not a group, was too much, as
for memory.
"""

import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drjax._plan.normal_form import rounds_of
from drjax._plan_file.exported_stage import ExportedFunction, batched_of, exported_of
from drjax._plan_file.load import plan_from_bytes
from drjax._primitives.reduce_ops import REDUCE_OPS, Running, is_compensated
from drjax._sharding.group_mesh import (
    in_local_mesh,
    put_whole,
    read_whole,
    spans_processes,
)
from drjax.engines.core.block_size import fitting_batch
from drjax.engines.core.encoded_partials import encode_partials, fits, wire_of
from drjax.engines.core.messages import (
    Block,
    BlockResult,
    File,
    Task,
    WorkerState,
)
from drjax.plan import Reduce, Stage

_FEW = 64  # groups that are tried one by one
_HALVINGS = 128  # most batches to find them


class LoadedPlan:
    """A plan file that a worker has loaded, with its compiled local stages.

    Attributes:
      demands: For each local stage, in the order of `rounds_of`, a list with one int
        for each array of `BlockResult.partials`: the least number of groups to sum,
        `Reduce.secure`; 0 if it is not secure, or belongs to a fold.
      bounds: For each local stage a list with the `Reduce.bound` of each secure sum.
    """

    def __init__(self, file: File):
        self.file = file
        # The plan's precision: the worker's process may be set to another.
        with jax.enable_x64(file.x64):
            plan = plan_from_bytes(
                Path(f"{file.key[:12]}.drjax"),
                file.data,
                custom_calls=file.custom_calls,
            )
        rounds = [a_round for _, a_round in rounds_of(plan)]
        states = [len(r.sources) - len(r.partials) for r in rounds]
        self._stages = [
            CompiledStage(r.local, r.partials, k)
            for r, k in zip(rounds, states, strict=True)
        ]
        # After the sums come the index of the block's first group and its states.
        self.demands = [
            [*(x.secure for x in r.partials), *[0] * (k + bool(k))]
            for r, k in zip(rounds, states, strict=True)
        ]
        self.bounds = [[x.bound for x in r.partials if x.secure] for r in rounds]

    def run(self, task: Task, shared: list[np.ndarray]) -> BlockResult:
        """Run a stage on a block, and find the groups that fail.

        If groups fail and `task.drop` is true, the block runs again without them; if it
        is false, the result has only the reasons. `shared` are the global inputs of the
        stage, in order, here and below. What is raised is no single group's failure:
        the stage failed.
        """
        mesh = self._stages[task.stage].stage.mesh
        with jax.enable_x64(self.file.x64), in_local_mesh(mesh):
            return self._run(task, shared)

    def _run(self, task: Task, shared: list[np.ndarray]) -> BlockResult:
        """Run a stage on a block, as `run`, in the plan's precision, which is set.

        The slices of the result, `[c, ...]`, are without padding.
        """
        start, stage = time.perf_counter(), self._stages[task.stage]
        block, failed, outs, error = task.block, {}, None, None
        # The partial reductions include the groups that failed, so the block runs
        # again.
        for _ in range(2):  # as it is, then without the groups that failed
            if block.empty:
                break
            try:
                outs = stage.run_block(block, shared, task.size, task.full)
                error = None
            except Exception as caught:
                if stage.spans_processes:
                    raise
                outs, error = None, caught
            if outs and not (task.check_nans and outs.has_nan(stage, block)):
                break
            if error is None:
                # A NaN in a reduction does not say whose it is.
                suspects = _suspects(stage, block, shared, task.size)
            else:
                # An error says nothing of groups, and a half might raise again.
                suspects = np.flatnonzero(block.valid)
            failures = _failures(stage, block, shared, suspects, task.check_nans)
            # Infinities of several groups may add up to NaN: then no group has failed.
            if not failures:
                break
            failed |= failures
            if not task.drop:
                break
            block = block.without_failed(failures)
        # No single group raises: memory, a bug of the batched function, or an error
        # that comes and goes. To drop groups for that would hide it.
        if error is not None and (not failed or (task.drop and not block.empty)):
            raise error
        if block.empty or (failed and not task.drop):
            outs = None
        partials: list[Any] = []
        if outs is not None:
            encode = functools.partial(encode_partials, stage.reduces)
            partials = encode(outs.partials) if task.encode else outs.partials
            # Driver and combiners put the states in order by the first groups.
            partials = [*partials, *([outs.first, *outs.states] if outs.states else ())]
        slices = [] if outs is None else outs.slices
        seconds = time.perf_counter() - start
        return BlockResult(partials, slices, failed, os.getpid(), seconds)

    def search(
        self,
        task: Task,
        shared: list[np.ndarray],
        begin: Callable[[int, int], None],
    ) -> BlockResult:
        """Run the groups of a block one by one, so that a slow one can be observed.

        `begin` is called when a group begins, with its group index as both arguments.
        Groups that are masked do not run, and errors of groups are ignored. The result
        has no values.
        """
        start, block = time.perf_counter(), task.block
        stage, compiled = self._stages[task.stage], None
        with jax.enable_x64(self.file.x64), in_local_mesh(stage.stage.mesh):
            for i in np.flatnonzero(block.valid):
                function = stage.per_group
                args = stage.args_of_group(block, shared, int(i))
                # It is partial over the stage's constants: `lower` needs them too.
                args = *function.args, *args
                with suppress(Exception):  # `run` reports what fails
                    # Compiling is no part of a group's time.
                    compiled = compiled or function.func.lower(*args).compile()
                    begin(int(block.groups[i]), int(block.groups[i]))
                    # Dispatch is asynchronous: a group ends when its results are ready.
                    jax.block_until_ready(compiled(*args))
        return BlockResult([], [], {}, os.getpid(), time.perf_counter() - start)


@dataclass
class StageOutputs:
    """What a stage computed for a block of c groups, in k batches, on the host.

    Attributes:
      partials: The partial reductions over the block, `[*s]`.
      first: The index of the first group that takes part of each batch, int32 `[k]`.
      states: The leaves of the batches' states for folds, `[k, *s]`.
      slices: The outputs that are read later, `[c, ...]`; undefined for masked groups.
    """

    partials: list[np.ndarray]
    first: np.ndarray
    states: list[np.ndarray]
    slices: list[np.ndarray]

    def has_nan(self, stage: "CompiledStage", block: Block) -> bool:
        """Return whether outputs of a block have a NaN, except for masked groups.

        What `wire=` would make a NaN counts as one: an infinity of a sum with it.
        Partial reductions and states are looked at as a whole.
        """
        return (
            any(map(_has_nan, self.partials, stage.encoded))
            or any(map(_has_nan, self.states))
            or any(_has_nan(x[block.valid]) for x in self.slices)
        )


class CompiledStage:
    """A local stage, whose exported functions are compiled when they are first used.

    Attributes:
      reduces: The `Reduce`s of the batched function's first outputs, which are partial
        reductions.
      states: How many outputs after these are leaves of folded states. The outputs
        after them are slices.
      read: Copies an output to the host.
      spans_processes: Whether other processes work on the same groups. They may go on
        when this one fails, and never come to where it tries the groups one by one.
      encoded: For each of `reduces` whether its partial reductions are encoded.
    """

    def __init__(self, stage: Stage, reduces: Sequence[Reduce], states: int = 0):
        self.stage, self.reduces, self.states = stage, reduces, states
        self.encoded = [wire_of(reduce) is not None for reduce in reduces]
        sources = itertools.compress(reduces, self.encoded)
        self._encoded_sources = {reduce.source.name for reduce in sources}
        self._fitting: dict[tuple[int, int], int] = {}
        self.read = read_whole if stage.mesh else np.asarray
        self.spans_processes = bool(stage.mesh) and spans_processes()
        self._compiled_identities: dict[tuple[bool, ...], Callable[[], Any]] = {}
        self._alone = set[int]()  # for how many groups `batched` is compiled

    @functools.cached_property
    def batched(self) -> Callable[..., list[Any]]:
        """The function of a block of b groups, compiled.

        It takes `(b, mask, groups, consts, *inputs)`: which groups count in reductions,
        bool `[b]`, or None if all do, which is compiled to less work; the group
        indices, int32 `[b]`, or the first of consecutive ones, int32 `[]`; and the
        inputs of the stage, in order: slices `[b, ...]` of a partitioned one, the value
        of a global one. It returns the partial reductions, then the leaves of the
        block's states for folds, `[*s]`, then the slices `[b, ...]` of each output that
        is read later.
        """
        if self.stage.mesh:
            return lambda b, mask, groups, consts, *inputs: self._on_mesh(
                *consts, mask, groups, *inputs
            )
        return jax.jit(self._batch, static_argnums=0)

    @functools.cached_property
    def _consts(self) -> list[Any]:
        consts = exported_of(self.stage).consts
        return [*consts] if self.stage.mesh else list(map(jax.device_put, consts))

    def _batch(
        self, b: int, mask: Any, groups: Any, consts: list[Any], *inputs: Any
    ) -> Any:
        call = batched_of(self.stage).function.call
        # Here, so that the compiler leaves out what the stage does not read: the
        # indices, and the choice of a slice or zero.
        mask = jax.numpy.ones(b, bool) if mask is None else mask
        if not groups.ndim:
            groups = groups + jax.numpy.arange(b, dtype="int32")
        return call(*consts, mask, groups, *inputs)

    @functools.cached_property
    def _on_mesh(self) -> Any:
        """The batched function, compiled for the group's mesh, which is in context.

        The compiler chooses how its operands and results are sharded.
        """
        function = batched_of(self.stage).function
        return jax.jit(function.call).lower(*function.in_avals).compile()

    @functools.cached_property
    def per_group(self) -> functools.partial:
        """The function of one group, compiled.

        It takes `(group, *inputs)`: the group index, int32 `[]`, and the inputs of the
        stage, in order, of partitioned ones the group's slice. It returns all outputs
        of the stage.
        """
        return self._compiled(exported_of(self.stage).per_group)

    def _compiled(self, exported: ExportedFunction) -> functools.partial:
        """Wrap an exported function of the stage in `jax.jit`; nothing compiles yet.

        The constants of the stage, its first arguments, are bound in the result.
        """
        # The exported function itself, without the guards against vmap and grad.
        compiled = jax.jit(exported.function.call)
        return functools.partial(compiled, *exported_of(self.stage).consts)

    @functools.cached_property
    def next_batch(self) -> Callable[..., tuple[list[Running], list[Any]]]:
        """The function of a further batch of a block, compiled.

        It is `batched`, with the `Running` reductions of the batches before as its
        second argument, whose memory it takes; they are what it returns first.
        """
        count = len(self.reduces)

        def add(running: list[Running], outs: Any) -> list[Running]:
            return [x.add(y) for x, y in zip(running, outs, strict=True)]

        def run(
            b: int, running: list[Running], *args: Any
        ) -> tuple[list[Running], list[Any]]:
            outs = self._batch(b, *args)
            return add(running, outs[:count]), [*outs[count:]]

        if self.stage.mesh:
            # Apart, so that sums stay sharded as the results of a group are.
            add_ = jax.jit(add, donate_argnums=0)

            def run_on_mesh(b: int, running: list[Running], *args: Any) -> tuple:
                outs = self.batched(b, *args)
                return add_(running, outs[:count]), outs[count:]

            return run_on_mesh
        return jax.jit(run, static_argnums=0, donate_argnums=1)

    def _placed(self, shared: list[np.ndarray]) -> list[Any]:
        """Put the global inputs on the device, or as the code needs them on a mesh."""
        if not self.stage.mesh:
            return list(map(jax.device_put, shared))
        inputs = self.stage.inputs
        shardings = self._on_mesh.input_shardings[0][-len(inputs) :]
        pairs = zip(inputs, shardings, strict=True)
        return list(map(put_whole, shared, [s for v, s in pairs if not v.partitioned]))

    def run_block(
        self, block: Block, shared: list[np.ndarray], size: int, full: int = 0
    ) -> StageOutputs:
        """Run the stage on a block in batches of `size` groups; wait for the results.

        One group of the block takes part at least. A block of `full` groups runs in
        fewer batches if they fit.
        """
        whole = len(block) == full and isinstance(block.place, slice)
        if whole and size < full and block.full and not self.stage.mesh:
            size = self._fitting_batch(block, shared, size)
        batches = -(-len(block) // size)
        if batches > 1:
            # Once, and not for each batch.
            shared = self._placed(shared)
        # Not for one batch: to make them takes longer than a small stage.
        running = self._identities(batches) if batches > 1 else []
        count, first, states = len(self.reduces), [], []
        parts: list[tuple[slice, list[np.ndarray]]] = []
        for part, batch in block.batches(size):
            # One shape for all batches, so that XLA compiles the stage once.
            padded = batch.padded(size)
            # On a mesh a batch is one group, compiled for a mask.
            all_ = padded.full and not self.stage.mesh
            mask = None if all_ else padded.valid
            one = all_ and isinstance(padded.place, slice)
            groups = np.int32(padded.group(0)) if one else padded.groups
            inputs = self._inputs(shared, padded.slices)
            args = mask, groups, self._consts, *inputs
            if batches == 1:
                outs = self.batched(size, *args)
                self._alone.add(size)
                sums, outs = outs[:count], outs[count:]
            else:
                running, outs = self.next_batch(size, running, *args)
                sums = [x.value for x in running]
            # On the host now, so that an error of the device is raised in this block.
            outs = list(map(self.read, outs))
            first.append(batch.group(0 if batch.full else int(np.argmax(batch.valid))))
            states.append(outs[: self.states])
            # Without the padding.
            parts.append((part, [y[: len(batch)] for y in outs[self.states :]]))
        return StageOutputs(
            list(map(self.read, sums)),
            np.array(first, np.int32),
            [np.stack(x) for x in zip(*states, strict=True)],
            _joined(parts, len(block)),
        )

    def _fitting_batch(self, block: Block, shared: list[np.ndarray], size: int) -> int:
        """Return how many groups of a full block run at once: `size`, or more.

        It is more if the stage, compiled for `size`, and for more, holds little of each
        group: `size` counts all results, which the compiler may add up unseen.
        """
        full = len(block)
        if (size, full) not in self._fitting:
            larger = self._fits(block, shared, size)
            # Compiled only where it pays.
            if larger < 2 * size or self._fits(block, shared, larger) < larger:
                larger = size
            self._fitting[size, full] = larger
        return self._fitting[size, full]

    def _fits(self, block: Block, shared: list[np.ndarray], size: int) -> int:
        """Return how many groups fit, if each needs as much as in batches of `size`."""
        count, slices = len(self.reduces), [x[:size] for x in block.slices]
        inputs = self._inputs(shared, slices)
        args = None, np.int32(block.group(0)), self._consts, *inputs
        batches = -(-len(block) // size)
        # Of two functions that hold as much of each group, the one that is compiled.
        if batches == 1 or size in self._alone:
            lowered = self.batched.lower(size, *args)
        else:
            lowered = self.next_batch.lower(size, self._identities(batches), *args)
        # The call that follows does not compile it again.
        memory = lowered.compile().memory_analysis()
        if memory is None:  # not every compiler tells
            return size
        kept = batched_of(self.stage).function.out_avals[count + self.states :]
        of_group = sum(x.nbytes // size for x in slices)
        of_group += sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in kept)
        of_group += memory.temp_size_in_bytes / size
        return fitting_batch(len(block), of_group)

    def _identities(self, batches: int) -> list[Running]:
        """Return the running reductions over no groups."""
        compensated = tuple(is_compensated(x, batches) for x in self.reduces)
        if compensated not in self._compiled_identities:
            self._compiled_identities[compensated] = self._compile_identities(
                compensated
            )
        return self._compiled_identities[compensated]()

    def _compile_identities(
        self, compensated: tuple[bool, ...]
    ) -> Callable[[], list[Running]]:
        """Compile `_identities`: on a mesh each array by itself takes milliseconds."""
        types = batched_of(self.stage).function.out_avals
        # A device, as results of an exported function have one: else the second batch
        # would compile the stage again.
        places: Any = [jax.numpy.zeros(()).sharding] * len(types)
        if self.stage.mesh:
            places = self._on_mesh.output_shardings

        def running(make: Callable[[Any, Any, Any], Any]) -> list[Running]:
            values = zip(self.reduces, types, places, compensated, strict=False)
            return [
                Running(
                    reduce.op,
                    make(x, REDUCE_OPS[reduce.op].identity(x.dtype), place),
                    make(x, 0, place) if excess else None,
                )
                for reduce, x, place, excess in values
            ]

        return jax.jit(
            lambda: running(lambda x, y, _: jax.numpy.full(x.shape, y, x.dtype)),
            out_shardings=running(lambda x, y, place: place),
        )

    def args_of_group(
        self, block: Block, shared: list[np.ndarray], position: int
    ) -> list[np.ndarray | np.generic]:
        """Return what `per_group` takes for one group, by its position in the block."""
        slices = [x[position] for x in block.slices]
        return [block.groups[position], *self._inputs(shared, slices)]

    def _inputs(
        self, shared: list[np.ndarray], slices: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Merge global and partitioned inputs into one list, in the stage's order.

        The latter are slices of one group or of several.
        """
        shared_, slices_ = iter(shared), iter(slices)
        inputs = self.stage.inputs
        return [next(slices_ if v.partitioned else shared_) for v in inputs]

    def names_of_nans(self, outs: list[np.ndarray]) -> list[str]:
        """Return the names of the outputs of the stage, of one group, that have a NaN.

        What `wire=` would make a NaN counts as one, as in `has_nan`.
        """
        return [
            value.name
            for value, y in zip(self.stage.outputs, outs, strict=True)
            if _has_nan(y, value.name in self._encoded_sources)
        ]


def _joined(
    parts: list[tuple[slice, list[np.ndarray]]], count: int
) -> list[np.ndarray]:
    """Join slices of parts of a block of `count` groups; no part: undefined."""
    part, arrays = parts[0]
    if part == slice(0, count):
        return arrays
    joined = [np.zeros((count, *x.shape[1:]), x.dtype) for x in arrays]
    for part, arrays in parts:
        for whole, x in zip(joined, arrays, strict=True):
            whole[part] = x
    return joined


def _suspects(
    stage: CompiledStage, block: Block, shared: list[np.ndarray], size: int
) -> np.ndarray:
    """Narrow down which groups of a block yield NaN, by halving the block.

    The result is positions in the block, int `[k]`, in order: of all groups that yield
    a NaN, and of some others. Parts of the block, which yields one, run with the other
    groups masked. Halving ends at parts of 64 groups or fewer, and early if many groups
    yield a NaN, as trying each group is then faster.
    """
    suspects, parts, left = [], [np.flatnonzero(block.valid)], _HALVINGS
    while parts:
        part = parts.pop()
        if len(part) <= _FEW or left <= 0:
            suspects.append(part)
            continue
        middle = len(part) // 2
        for half in (part[middle:], part[:middle]):
            # Masked, not cut: a smaller block would be compiled again.
            only = block.without(~np.isin(np.arange(len(block)), half))
            left -= 1
            if stage.run_block(only, shared, size).has_nan(stage, only):
                parts.append(half)
    # No suspect: infinities of the two halves added up to NaN, and no group has one.
    return np.sort(np.concatenate(suspects)) if suspects else np.zeros(0, int)


def _failures(
    stage: CompiledStage,
    block: Block,
    shared: list[np.ndarray],
    suspects: np.ndarray,
    check_nans: bool,
) -> dict[int, str]:
    """Run groups of a block one by one; return why some failed, by group index.

    `suspects` are the positions in the block of the groups to run, int `[k]`.
    """
    failures = {}
    for i in suspects:
        # One group: an error has one possible cause.
        args = stage.args_of_group(block, shared, int(i))
        group = int(block.groups[i])
        try:
            outs = list(map(stage.read, stage.per_group(*args)))
        except Exception as error:
            if stage.spans_processes:
                raise
            failures[group] = f"{type(error).__name__}: {error}"
            continue
        if check_nans and (names := stage.names_of_nans(outs)):
            failures[group] = f"it yields NaN as {', '.join(names)}"
    return failures


def _has_nan(x: np.ndarray, encoded: bool = False) -> bool:
    """Return whether an array has a NaN; False if its dtype has none.

    If it will be encoded, or is added up and then encoded, whatever the encoding makes
    a NaN of counts as one.
    """
    if encoded:
        return not fits(x)
    # Not numpy's `issubdtype`, to which bfloat16 is not inexact.
    return jax.numpy.issubdtype(x.dtype, np.inexact) and bool(np.isnan(x).any())


# ---------------------------------------------------------------------------------
# In a worker's process

_files: dict[str, LoadedPlan] = {}  # the latest last
_state = WorkerState()
_lock = threading.Lock()
_skipped: set[int] = set()
_MOST = 4


def run(file: File, task: Task, shared: list[np.ndarray]) -> BlockResult:
    """Run a task in this process: the entry point of a worker.

    `shared` are the global inputs of the stage, in order. The four plan files that were
    used last stay loaded and compiled. The result is empty, with `pid` 0, if the driver
    has called `skip` for the task. What is raised is no single group's failure: the
    stage failed.
    """
    # Its driver gave up; the pid 0 marks a result that does not count.
    if task.number in _skipped:
        _skipped.remove(task.number)
        return BlockResult([], [], {})
    loaded = _loaded(file)

    def begin(first: int, last: int) -> None:
        _state.task, _state.since = task.number, time.time()
        _state.groups = first, last

    try:
        if task.search:
            return loaded.search(task, shared, begin)
        begin(task.block.group(0), task.block.group(-1))
        return loaded.run(task, shared)
    finally:
        _state.groups = None
        # A `skip` may have come too late; its number would stay in the set forever.
        _skipped.discard(task.number)


def _loaded(file: File) -> LoadedPlan:
    """Return the plan of a file, loading it unless it is one of the four used last.

    The file then counts as the latest; of five loaded ones the least recently used is
    forgotten, with its compiled stages.
    """
    with _lock:
        loaded = _files.pop(file.key, None) or LoadedPlan(file)
        # Back at the end: the least recently used file is the first.
        _files[file.key] = loaded
        while len(_files) > _MOST:
            _files.pop(next(iter(_files)))
    return loaded


def demands(file: File, stage: int) -> list[int]:
    """Return `LoadedPlan.demands` of a stage, an index as `Task.stage` is."""
    return _loaded(file).demands[stage]


def bounds(file: File, stage: int) -> list[float | None]:
    """Return the `Reduce.bound` of each secure sum of a stage, as `demands` does."""
    return _loaded(file).bounds[stage]


def skip(number: int) -> None:
    """Record that a task's result is not needed, so that `run` does not begin it.

    `number` is the `Task.number`. A task that runs already is not stopped.
    """
    _skipped.add(number)  # without the lock, which is held while a file is loaded


def state() -> WorkerState:
    """Return what this process is doing now."""
    return replace(_state, seconds=time.time() - _state.since)
