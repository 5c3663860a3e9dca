"""Blocks of groups whose data is with the workers, and stays there.

Input: a `StageCall` in whose arguments the groups' own data is `Remote`; at the worker,
the data itself. Output: a request for each group, and the answer to it.

Invariants: a request names the slices that the worker has: of its data, and of earlier
stages and calls, which it keeps in a store of its own under the key that the request
gives. An answer holds partial reductions only, never slices. The data must have the
planned structure, shapes and dtypes, else the group has failed.

Sharp edges: the server does not decide what code a client's process may call: custom
calls are those of drjax's own list, whatever the request allows. A worker keeps the
slices of the keys that the latest request lists, and forgets others of that runner.
"""

import functools
import secrets
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from drjax._compat.types import PyTree
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._jaxprs.prng_keys import to_raw
from drjax._plan.normal_form import rounds_of
from drjax._plan_file import pytrees
from drjax.engines.core import worker
from drjax.engines.core.job import Job
from drjax.engines.core.messages import (
    Block,
    BlockResult,
    File,
    Task,
    kept_outputs,
)
from drjax.engines.core.options import EngineOptions
from drjax.engines.core.protocols import StageCall
from drjax.engines.flower import records
from drjax.engines.flower.records import ArrayRecord, Records, Request
from drjax.engines.slices.groups import Lazy, as_array
from drjax.engines.slices.kept import Keep
from drjax.engines.slices.worker_slices import (
    INITIAL,
    Pieces,
    WorkerSlices,
    slices_to_read,
)
from drjax.plan import Exchange, Plan, Program

Store = MutableMapping[str, ArrayRecord]  # of a worker: slices by key


def refuse_other_partitions(plan: Plan) -> None:
    """Raise a `DrjaxValueError` for a plan with a program over another partition.

    A client is one group of the plan's own.
    """
    for loop in plan.loops():
        if type(loop) is Program:
            raise DrjaxValueError(
                f"{plan.name} uses two partitions side by side, {plan.partition} and "
                f"{loop.body.partition}. A client is a group of one of them: plan the "
                "two programs one at a time, or run the plan with drjax.jit or on "
                "another engine."
            )


def check_slices_stay(plan: Plan, keep: Keep, options: EngineOptions) -> None:
    """Raise `DrjaxValueError` if a slice that a worker computes is needed elsewhere.

    An engine calls it whose workers have the groups' data and give no slices away, as
    Flower's clients. Slices are needed elsewhere by a gather, by a move between groups
    (such as `drjax.take`), by a server stage, by a scan that stacks them, by the
    condition of a loop, and as results of the plan. Results that are in `keep` stay
    with the workers, as arguments of the next call. Slices that stay between stages are
    refused, too, if the plan has a secure sum or the option `checkpoint` is set.
    """
    for _, a_round in rounds_of(plan):
        for step in a_round.all(Exchange):
            if step.direction != "between":
                continue
            (moved, _), *_ = step.messages()
            raise DrjaxValueError(
                f"{plan.name} moves {moved.name} between groups ({step.op}). A "
                "client's slices stay with it: no other client gets them."
            )
    kept = {plan.outputs[i].name for pair in keep.pairs for i in pair.outputs}
    taken = [plan.inputs[i] for pair in keep.pairs for i in pair.inputs]
    for value in slices_to_read(plan, taken, kept):
        raise DrjaxValueError(
            f"{plan.name} needs or returns {value.name}, a slice of each group. What "
            "clients compute stays with them, unless it is reduced. A result that is "
            "an argument of the next call can stay: compile(plan, grid, keep=...)."
        )
    stay = any(kept_outputs(owner, a_round) for owner, a_round in rounds_of(plan))
    sums = [r for _, a_round in rounds_of(plan) for r in a_round.partials if r.secure]
    if stay and sums:
        raise DrjaxValueError(
            f"{plan.name} has a secure sum, and slices that stay with the clients: "
            "clients keep none in the protocol of secure sums. Leave out secure=True, "
            "or reduce what is read later."
        )
    if stay and options.checkpoint is not None:
        raise DrjaxValueError(
            f"Slices that {plan.name} computes in one round and reads in another stay "
            "with the clients, so that no checkpoint can have them: leave out "
            "checkpoint=."
        )


def new_scope() -> str:
    """Return the beginning of all keys of one runner."""
    return secrets.token_hex(8)


def needed_keys(in_use: Iterable[WorkerSlices], group: int) -> list[str]:
    """Return the keys under which the worker of a group must keep slices, sorted.

    They are the keys of the slices that were not released, and that the group's worker
    has stored.
    """
    keys = set()
    for table in [x.table for x in [*in_use]]:
        piece = table.pieces[i][0] if (i := table.piece[group]) >= 0 else INITIAL
        if isinstance(piece, str) and piece != INITIAL:
            keys.add(piece)
    return sorted(keys)


class Requests:
    """Makes the requests to workers that have the groups' data themselves.

    In one run of a stage there is one request for each group, to its worker. Among the
    partitioned inputs of the call, each `Lazy` is data that the workers have, which
    must all be in one argument of the plan, and `WorkerSlices` are slices of earlier
    stages and calls that they have; arrays are slices that the server sends. The
    workers get the code of the stage apart from the requests.

    Attributes:
      key: The key under which workers store the slices of this stage that are read
        later. It begins with `scope`, which is another for each runner; no two runs of
        a stage have the same. `in_use` are the slices that workers have stored.
    """

    def __init__(
        self,
        call: StageCall,
        scope: str,
        number: int = 0,
        in_use: Iterable[WorkerSlices] = (),
    ):
        self._scope, self._in_use, self.key = scope, in_use, f"{scope}/{number}"
        self._initial, self._stays = call.initial, any(call.job.stay)
        # One record for all requests: Flower sends an array once that many have.
        self._shared, job = records.to_record(call.job.shared), call.job
        lazy = [x for x in call.slices if isinstance(x, Lazy)]
        values, tree = [], None
        if lazy:
            values, tree = lazy[0].source.values, lazy[0].source.node
        # A client loads one pytree; two would need a way to tell them apart.
        if any(x.source is not lazy[0].source for x in lazy):
            raise DrjaxTypeError(
                "The groups' own data can be one argument of the plan: put it into one "
                "tuple."
            )
        self._about = {
            "where": job.location,
            "check_nans": job.check_nans,
            "drop": job.drop,
            "x64": job.file.x64,
            "tree": tree,
            # Whether the plan has 64-bit values, so that clients need x64.
            "wide": bool(lazy) and lazy[0].source.wide,
            "slices": [
                (x.leaf, list(x.steps)) if isinstance(x, Lazy) else None
                for x in call.slices
            ],
            "names": [v.name for v in values],
            "types": [f"{v.dtype}{[*v.shape]}" for v in values],
        }

    def request(self, task: Task) -> tuple[dict[str, Any], Records]:
        """Make the request for the one group of a task's block, which is for `answer`.

        It has the stage's global inputs and the group index. For each partitioned input
        it has the slice, if the driver has it as an array; else which leaf of the
        worker's own data it is, or under which key the worker has stored it. It also
        has the planned structure and types of that data, and the keys under which the
        worker must keep slices and is to store new ones. The result is fields of a
        message, and its further records.
        """
        block, slices, stored = task.block, [], []
        for origin, x in zip(self._about["slices"], block.slices, strict=True):
            stored.append(None)
            if isinstance(x, Pieces):
                piece, leaf = x.pieces[x.piece[0]]
                # A list: slices that the server has, as the first call got arrays.
                if isinstance(piece, str):
                    stored[-1] = piece, leaf
                else:
                    slices.append(x.assemble(lambda arrays: arrays))
            elif origin is None:  # the worker has the others
                slices.append(x)
        group = int(block.groups[0])
        begins = any(x is not None and x[0] == INITIAL for x in stored)
        about = self._about | {
            "group": group,
            "stored": stored,
            "initial": self._initial if begins else None,
            "scope": self._scope,
            "needed": needed_keys(self._in_use, group),
            "key": self.key if self._stays else None,
        }
        return records.of_request(about, self._shared, slices)


def answer(
    request: Request,
    load: Callable[[], Any],
    code: tuple[str, bytes],
    store: Store | None = None,
    initial: Callable[[], Any] | None = None,
) -> BlockResult:
    """Run the stage of a request on the worker's own data, for one group.

    `load` returns the group's slice of the argument that the workers have, a pytree of
    arrays. If it raises, or the data does not fit the plan, the group has failed. It is
    not called if the stage needs none of this data. `code` is the hash and the plan
    file of the stage. `store` has the worker's slices of earlier stages and calls, by
    key; it is changed: new slices are added, and those that the server does not need
    any more are deleted. None: the worker has no earlier slices, and new ones are
    discarded. `initial` returns, before the first call, the group's slice of the kept
    arguments (those that are results of the call before); of several, a tuple. None:
    zeros.

    The result has the group's partial reductions, or the reason why the group failed,
    and no slices. A `RuntimeError` is raised if the stage failed, and no single group
    causes it; a `ValueError` if the stage would return slices of the group, or has a
    secure sum.
    """
    store = {} if store is None else store
    done, (demands, _) = _run(request, load, code, store, initial)
    # The server asks for such sums by another protocol; the client does not rely on it.
    if any(demands):
        raise ValueError("The stage has a secure sum, which is to be masked.")
    return done


@dataclass(frozen=True)
class SecureAnswer:
    """What a stage with secure sums returns for one group.

    Attributes:
      result: Without the secure sums.
      slices: The group's slices of the secure sums, in order: to be masked.
      min_groups: The least number of groups that must be summed before a sum is
        revealed: the largest `Reduce.secure` of these sums.
      bounds: For each of these sums the largest magnitude of a number of one group;
        None: the engine's.
    """

    result: BlockResult
    slices: list[np.ndarray]
    min_groups: int
    bounds: list[float | None]


def answer_secure(
    request: Request, load: Callable[[], Any], code: tuple[str, bytes]
) -> SecureAnswer:
    """Run a stage with secure sums on the worker's own data, for one group.

    Arguments and errors are those of `answer`, but secure sums are no error. The
    `slices`, what is summed securely, are not masked yet: the caller must mask them
    before they leave the process.
    """
    done, (demands, bounds) = _run(request, load, code, {}, None)
    pairs = [*zip(done.partials, demands, strict=True)] if done.partials else []
    plain = [x for x, secure in pairs if not secure]
    slices = [np.asarray(x) for x, secure in pairs if secure]
    return SecureAnswer(replace(done, partials=plain), slices, max(demands), bounds)


def _run(
    request: Request,
    load: Callable[[], Any],
    code: tuple[str, bytes],
    store: Store,
    initial: Callable[[], Any] | None,
) -> tuple[BlockResult, tuple[list[int], list[float | None]]]:
    """Run the stage of a request: the common part of `answer` and `answer_secure`.

    The result is `(result, demands)`: that of the group, without slices; and a pair of
    lists: for each of the stage's partial reductions the `Reduce.secure`, the least
    number of groups to sum, 0 if it is not secure; and for each secure one its
    `Reduce.bound`. If the group failed, the result has only the reason.

    New slices are added to the store; those of the request's runner are deleted if the
    request does not list their keys as needed.
    """
    about, (key, data) = request.about, code
    block = Block(np.array([about["group"]], np.int32), np.ones(1, bool), [])
    failed = {}
    try:
        block = block.with_slices(_slices(request, load, store, initial))
    # Loading is user code: its failure is the group's, and the server gets the text.
    except Exception as error:
        failed = {about["group"]: f"{type(error).__name__}: {error}"}
        block = block.without_failed(failed)
    # A worker has one group, and the driver combines their partial reductions. The
    # server does not decide what other code a client's process may call.
    file = File(data, key, about["x64"], custom_calls=())
    policy = about["check_nans"], about["drop"]
    job = Job(file, 0, about["where"], (), 1, *policy, request.shared)
    # With the group masked out it does not run, and only the failure is answered.
    done = job.run(block, failed)
    # The server refuses such plans as well; the client does not rely on that.
    if done.slices and about["key"] is None:
        raise ValueError(
            "The stage would return a group's own slices, which stay with their client."
        )
    for old in [*store]:
        if old.startswith(f"{about['scope']}/") and old not in about["needed"]:
            del store[old]
    if done.slices:
        store[about["key"]] = records.to_record(done.slices)
    demands = worker.demands(job.file, job.stage), worker.bounds(job.file, job.stage)
    return replace(done, slices=[]), demands


def _slices(
    request: Request,
    load: Callable[[], Any],
    store: Store,
    initial: Callable[[], Any] | None,
) -> list[np.ndarray]:
    """Return the group's slices, `[1, ...]`, of a stage's partitioned inputs in order.

    Each is one that was sent with the request, a leaf of the group's own data, an
    initial slice of a kept argument, or in the store, as the request says. It is a
    `ValueError` if the data does not fit the plan, or slices are not in the store.
    """
    about = request.about
    # A stage may need none of the client's data: then it is not even loaded.
    own = _checked_leaves(load(), about) if about["tree"] is not None else []
    begin, first = about["initial"], []
    if begin is not None:
        first = [np.zeros(shape, dtype) for dtype, shape in begin["raw"]]
        first = first if initial is None else _checked_leaves(initial(), begin)
    slices, rest = [], iter(request.slices)
    earlier = functools.cache(lambda key: records.from_record(store[key]))
    for origin, stored in zip(about["slices"], about["stored"], strict=True):
        if stored is None and origin is None:
            slices.append(next(rest))
        elif stored is None:
            slices.append(own[origin[0]][tuple(origin[1])][None])
        elif stored[0] == INITIAL:
            slices.append(first[stored[1]][None])
        elif stored[0] in store:
            slices.append(earlier(stored[0])[stored[1]])
        else:
            raise ValueError(
                "its client does not have the slices that an earlier call left with "
                "it: it was started again, or another client has the group now. Start "
                "again from arrays or from Clients()"
            )
    return slices


def _checked_leaves(data: PyTree, about: Mapping[str, Any]) -> list[np.ndarray]:
    """Check that a group's data has the planned structure and types; return its leaves.

    These are numpy arrays, random keys as raw data. The fields of `about` are
    `tree`, the planned structure; `types` and `names`, a text for each leaf; and
    `wide`, whether the plan has 64-bit values. A `ValueError` is raised if the data has
    others.
    """
    leaves, tree = jax.tree.flatten(data)
    if text := pytrees.mismatch(tree, about["tree"]):
        raise ValueError(text)
    # The plan's precision, not that of the client's process, decides dtypes.
    with jax.enable_x64(about["wide"]):
        arrays = [as_array(x) for x in leaves]
        types = [f"{x.dtype}{[*x.shape]}" for x in arrays]
        if types != about["types"]:
            pairs = zip(about["names"], about["types"], strict=True)
            planned = ", ".join(f"{name} {kind}" for name, kind in pairs)
            raise ValueError(
                f"its data is {', '.join(types)}, but the plan is for {planned}"
            )
        return [np.asarray(to_raw(x)) for x in arrays]
