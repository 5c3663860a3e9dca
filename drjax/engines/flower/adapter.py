"""The Flower backend: each group is a client, and its data stays with it.

Input: a plan, and the grid of a Flower `ServerApp`, in which the driver runs. Output: a
`Runner`. Each stage of the groups is sent to the clients with the round, as a stage of
the plan's file, and they run it on their own data; what they send back is partial
reductions, and no slices. Slices that later stages or calls read stay with the client,
in the state of its context.

Invariants: clients are not trusted: each reply is pulled by itself and validated
against the plan, and a bad one is the failure of that client's group alone. A block is
one group.

Sharp edges: a client sees the stages, and the server sees each client's partial
reduction, unless it is a secure sum: see `drjax.engines.flower.secure_sums`. Without
`nodes`, which group a client is is its own claim. Flower never ends a client, so a late
one is forgotten, not stopped.
"""

import functools
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from drjax._errors import DrjaxTypeError
from drjax._extras import needed
from drjax._partition import integer_of
from drjax._sharding.group_mesh import MeshAxes
from drjax.engines.core import pool_scheduler
from drjax.engines.core.driver import Runner
from drjax.engines.core.messages import (
    BlockResult,
    File,
    Task,
    WorkerState,
    refuse_group_mesh,
)
from drjax.engines.core.options import EngineOptions
from drjax.engines.core.protocols import Results, StageCall
from drjax.engines.flower import (
    client_data,
    code_of_stages,
    records,
    secure_sums,
    untrusted_replies,
)
from drjax.engines.flower.assignment import Assignment
from drjax.engines.flower.background import Background
from drjax.engines.flower.claim_queries import ClaimQueries, ClientFailed
from drjax.engines.flower.records import FIELDS
from drjax.engines.flower.untrusted_replies import BadReply, Context, Message
from drjax.engines.slices.groups import Remote
from drjax.engines.slices.kept import Keep
from drjax.engines.slices.worker_slices import Keeping
from drjax.plan import Plan, Value

# Of Flower, which users may lack.
Grid: TypeAlias = Any

_CODE = "drjax_code"  # the record of the context's state with the code of stages
_POLL, _PATIENCE = 0.1, 1.0  # seconds between looks for replies, and for one look


class Clients(Remote):
    """An argument whose data only the clients have: a placeholder, without any data.

    Pass it in place of arrays `[n, ...]`, or of a pytree of these. Each client loads
    the slice of its group, with the function `load` that `client` got.

    Example:
      >>> import drjax
      >>> clients = drjax.backends.flower.Clients()
      >>> # model = run(model, clients), where `run` is what `compile` returned
    """


def compile(
    plan: Plan,
    grid: Any,
    *,
    start: float = 60.0,
    nodes: Iterable[int] | None = None,
    secure_range: float = 8.0,
    keep: dict[Any, Any] | None = None,
    **options: Any,
) -> Runner:
    """A function that runs the plan with Flower's clients, in a `ServerApp`.

    Pass it `Clients()` as the argument that is the clients' own data.

    Args:
      plan: The plan. Its groups may return values to reductions only: no round may
        gather slices or move them to other groups, and those that it returns must be
        kept. What a later round reads stays with the client.
      grid: The grid that Flower gives to the `ServerApp`.
      start: Seconds to wait until each group has a client. With `on_error="drop"` the
        call then continues with the clients that are present.
      nodes: The id of each group's node, in the order of the groups. Give it if
        SuperNodes authenticate themselves, so that no client takes another's group.
        Default: each client claims a group, and the first to claim a group has it.
      secure_range: The largest magnitude of a number that one group adds to a secure
        sum; a group with a larger one has failed. It is rounded up to a power of 2, r.
        Numbers are rounded, up or down at random, to a multiple of `r / 2**(30 - c)`,
        where c is the number of groups n by its logarithm, `ceil(log2(n))`. The sum is
        off by less than n such steps; integers are exact if the step is not above 1.
      keep: Which partitioned results are arguments of the next call: a dict from
        results to arguments. `{1: 0}` means that element 1 of what the function returns
        is positional argument 0 of the next call, both counted from 0. The function
        returns a `Kept` for each, whose slices stay in the context of their client and
        are in no message. In the first call pass `Clients()` as that argument too: each
        client then begins with zeros, or with what `initial` of its `client` returns.
      **options: See `drjax.backends.EngineOptions`: `on_error`, `min_groups`,
        `check_nans` (here also for infinities, unless they cannot decide a maximum or
        minimum), `timeout` of a client in seconds, `retries` of one that took longer,
        `checkpoint`, `progress`. Each client is a block of its own. In a round with a
        secure sum, `timeout` is that of each of four messages, and nothing is retried.

    Returns:
      A `drjax.engines.core.driver.Runner` with the signature of the planned
      function. The clients are left running when it is closed.

    Raises:
      EngineError: Flower is not installed; (when called) a client failed or sent a
        reply that does not fit the plan, or too few survive.
      DrjaxTypeError, DrjaxValueError: A wrong option; a plan that needs slices; `nodes`
        are not n different ids.
      MeshError: The plan runs a group on several devices.

    Example:
      The server of an app; `client` makes the other half.

      >>> from flwr.serverapp import ServerApp  # doctest: +SKIP
      >>> app = ServerApp()  # doctest: +SKIP
      >>> @app.main()  # doctest: +SKIP
      ... def main(grid, context):
      ...     run = drjax.backends.flower.compile(drjax.load_plan(path), grid)
      ...     for _ in range(10):
      ...         model = run(model, drjax.backends.flower.Clients())
    """
    needed("flwr.app", "flower", "drjax.backends.flower")
    # A client is one group, and cannot run another's.
    checked = replace(EngineOptions.checked(**options), block_size=1)
    refuse_group_mesh(plan.group_mesh, "Flower")
    client_data.refuse_other_partitions(plan)
    client_data.check_slices_stay(plan, Keep(plan, keep), checked)
    secure_sums.check_plan(plan, secure_range)
    clients = Assignment(plan.size, None if nodes is None else [*nodes])
    engine = Nodes(grid, clients, start, checked.on_error == "drop")
    engine.secure_range = float(secure_range)
    return Runner(plan, engine, checked, secure=True, keep=keep)


def client(
    load: Callable[[Any], Any],
    initial: Callable[[Any], Any] | None = None,
    *,
    min_groups: int = 0,
    stages: Collection[str] | None = None,
) -> Any:
    """A Flower `ClientApp` that runs the local stages of a plan on its own data.

    Args:
      load: A function from Flower's `Context` to the data of the client: the group's
        slice of the argument that is `Clients()`, a pytree of arrays. The group index
        is `context.node_config["partition-id"]`.
      initial: A function from the `Context` to the group's slice of the kept argument
        before the first call, a pytree of arrays; of several, a tuple in the order of
        `keep`. Default: zeros.
      min_groups: What the owner of the data demands, whatever the plan does: the client
        sends its numbers masked only, for sums of at least so many groups. Default: 0,
        the demands of the plan.
      stages: The hashes of the code that the client runs, as `stage_hashes` lists them
        for a plan; it refuses all other code. Default: it runs what the server sends.

    Returns:
      The `ClientApp`.

    Raises:
      EngineError: Flower is not installed.
      DrjaxTypeError: `min_groups` is no integer, or `stages` one text and no list.

    Example:
      >>> import numpy as np
      >>> from drjax.backends import flower
      >>> def load(context):
      ...     return np.arange(3.0) * context.node_config["partition-id"]
      >>> app = flower.client(load)
    """
    flwr = needed("flwr.app", "flower", "drjax.backends.flower")
    app = needed("flwr.clientapp", "flower", "drjax.backends.flower").ClientApp()
    least = integer_of(min_groups)
    if least is None:
        raise DrjaxTypeError(
            f"client needs min_groups= as an integer, got {min_groups!r}."
        )
    if isinstance(stages, str):
        raise DrjaxTypeError(
            "client needs stages= as a list of hashes, got one text. Give it what "
            "drjax.backends.flower.stage_hashes returns."
        )
    allowed = None if stages is None else frozenset(stages)

    def reply(message: Message, config: dict[str, Any], **more: Any) -> Message:
        own = flwr.RecordDict({FIELDS: flwr.ConfigRecord(config), **more})
        return flwr.Message(own, reply_to=message)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        # A claim: the server does not trust it.
        return reply(message, {"group": int(context.node_config["partition-id"])})

    @app.train()
    def train(message: Message, context: Context) -> Message:
        code = None
        if records.is_request(message.content):
            codes = context.state.get(_CODE) or flwr.ConfigRecord()
            code = code_of_stages.received(message.content[FIELDS], codes, allowed)
            context.state[_CODE] = codes
            if code is None:
                return reply(message, code_of_stages.NEEDED)
        if secure_sums.is_step(message):
            own = lambda: load(context)
            return secure_sums.answer(message, context, own, code, least)
        secure_sums.forget(context)  # what a round that ended early has left
        if least:
            raise ValueError(
                f"the owner of this client demands secure sums of {least} groups at "
                "least, and the stage has none"
            )
        if code is None:
            raise ValueError("the message is no request to run a stage")
        # Functions: a stage that reads none of the data must not load it.
        begin = None if initial is None else functools.partial(initial, context)
        own = lambda: load(context)
        request = records.Request.received(message.content)
        # Of the context's state, as the next message may start another process.
        store = context.state.array_records
        done = client_data.answer(request, own, code, store, begin)
        fields, arrays = records.of_result(done)
        return reply(message, fields, **arrays)

    return app


class _Messages:
    """Sends messages to nodes and pulls their replies, through a Flower grid.

    It implements `drjax.engines.flower.claim_queries.Link`. A node is identified by
    its id, and a message by its number, the message id, text. A reply is pulled by the
    number of its request, alone, so that a reply that cannot be read affects no other.
    A pulled reply counts only if it names that number, too, and is from the node that
    was asked, or an error that the SuperLink reports for it: the SuperLink returns
    whatever else was sent to the server. A nonce in each request prevents clients from
    guessing the numbers of others: the SuperLink compares the node of a reply with that
    of the request that it names, and not with the connection that it came by.
    """

    def __init__(self, grid: Grid):
        self._grid, self._pulls = grid, Background(_PATIENCE)
        self._nodes: dict[str, int] = {}  # of messages without a reply yet
        self._flwr = needed("flwr.app", "flower", "Flower")
        self._link_errors = (OSError, needed("httpx", "flower", "Flower").HTTPError)

    def present(self) -> set[int]:
        """Return the ids of the nodes that are connected now."""
        return {*self._grid.get_node_ids()}

    def query(self, client: int) -> str | None:
        """Ask a client for its group index, without waiting for the answer.

        The result is the number of the query; None if the SuperLink does not take it.
        """
        return self.push({}, client, "query")

    def claim(self, number: str) -> Any:
        """Return the group index in a client's answer; None if it has not answered yet.

        It is whatever the client sent, not validated, of any type. The call waits for a
        second at most. `ClientFailed`: the client could not answer; `BadReply`: the
        answer cannot be read.
        """
        reply = self.pull(number)
        if reply is None:
            return None
        if reply.has_error():
            raise ClientFailed
        return untrusted_replies.content_of(reply, FIELDS, "group")

    def push(
        self, content: dict[str, Any], node: int, kind: str, **more: Any
    ) -> str | None:
        """Send a message to a node; return its number.

        It is None if the SuperLink does not take the message. `content` are its fields,
        text, numbers or bytes. `kind` is the function of the `ClientApp` that handles
        it: `"query"` or `"train"`. `more` are further records of Flower's.
        """
        # Flower's message id is a hash of the message: without a nonce, equal requests
        # would have equal ids, and clients could compute them.
        content = {"nonce": secrets.token_bytes(16), **content}
        # One message at a time: an error of one must not concern others.
        own = self._flwr.ConfigRecord(content)
        record = self._flwr.RecordDict({FIELDS: own, **more})
        message = self._flwr.Message(record, dst_node_id=node, message_type=kind)
        numbers = [*self._grid.push_messages([message])]
        if not numbers or numbers[0] is None:
            return None
        self._nodes[numbers[0]] = node
        return numbers[0]

    def pull(self, number: str) -> Message | None:
        """Return the reply to a message; None if there is none yet.

        The request to the SuperLink runs in a thread of its own, as Flower waits for
        hours for a reply that a client announces and does not send. If it takes longer
        than a second, this call returns None and the thread goes on; a later call with
        the same number does not wait, and returns the thread's result if it is done.

        `BadReply`: the reply cannot be read. An `OSError` or `httpx.HTTPError` is
        passed on: the SuperLink cannot be reached.
        """
        node = self._nodes[number]

        def counts(reply: Message) -> bool:
            about = reply.metadata
            # The SuperLink reports in its own name that a node or a reply is gone.
            link = reply.has_error() and about.src_node_id == about.dst_node_id
            return about.reply_to_message_id == number and (
                link or about.src_node_id == node
            )

        def pull() -> Message | None:
            # The SuperLink adds other messages to this server: only this reply counts.
            return next(filter(counts, self._grid.pull_messages([number])), None)

        try:
            reply = self._pulls.result(number, pull)
        # The SuperLink is gone, which is no client's failure.
        except self._link_errors:
            raise
        except Exception as error:
            del self._nodes[number]
            why = f"it cannot be read: {type(error).__name__}: {error}"
            raise BadReply(why) from error
        if reply is not None:
            del self._nodes[number]
        return reply

    def forget(self, number: str) -> None:
        """Discard the request for a reply, if `pull` has left one in a thread.

        The message is not canceled. The thread runs until Flower returns, and then its
        result is dropped.
        """
        self._pulls.forget(number)
        self._nodes.pop(number, None)


@dataclass(frozen=True)
class _Sent:
    """The handle of a task: a request to the client of a group.

    Attributes:
      number: The number of the message, Flower's message id; None if it was not sent.
      group: The group index.
      why: The reason for which the message was not sent; ignored if it was sent.
    """

    number: str | None
    group: int
    why: str = ""


class Nodes(Keeping):
    """The clients, as an engine: a `drjax.engines.core.protocols.Pool` of nodes.

    `start` is how many seconds to wait until each group has a client. `drop`: continue
    without a client whose claim is refused; else a refused claim is an error.

    Attributes:
      workers: n: each group has a worker of its own.
      stays: `"all"`: clients have all slices that are read later.
      generation: 0: clients are never replaced.
      secure_range: The largest magnitude of a number of one group in a secure sum.
    """

    def __init__(self, grid: Grid, clients: Assignment, start: float, drop: bool):
        super().__init__()
        self.workers = self.working = clients.size
        self.stays = "all"
        self._scope, self._runs = client_data.new_scope(), itertools.count()
        self._clients, self._start, self._opened = clients, start, False
        self._messages, self.secure_range = _Messages(grid), 8.0
        self._queries = ClaimQueries(self._messages, clients, drop)
        self._replies: dict[_Sent, Any] = {}
        # Requests by handle, and the numbers of those that were sent again, with code.
        self._requested: dict[_Sent, tuple[int, Any]] = {}
        self._again: dict[_Sent, str | None] = {}

    def check_mesh(self, axes: MeshAxes) -> None:
        refuse_group_mesh(axes, "Flower")

    def open(self) -> None:
        # Workers delete the others at their next request, which lists what is needed.
        for x in [*self.in_use]:
            if not x.held:
                x.release()
                self.in_use.discard(x)
        if not self._opened:  # clients that come later are found between rounds
            self._opened = True
            self._queries.run(range(self.workers), self._start, late=True)

    def results(self, call: StageCall) -> Results:
        # Clients that came later, or came back.
        alive = np.flatnonzero(call.alive)
        # The time is for answers of connected clients; absent ones are not waited for.
        self._queries.run(alive, min(5.0, self._start), late=False)
        # Reading the stages of a file takes a while: once for each runner.
        if "partials" not in call.cache:
            call.cache["partials"] = untrusted_replies.partials_of(call.job.file)
            files = code_of_stages.files_of_stages(call.job.file)
            call.cache["code"] = code_of_stages.SentCode(files)
        partials = call.cache["partials"][call.job.stage]
        self._code, self._stage = call.cache["code"], call.job.stage
        if any(partial.secure for partial in partials):
            link, clients, limit = self._messages, self._clients, self.secure_range
            sums = secure_sums.results(call, link, clients, partials, limit, self._code)
            yield from sums
            return
        number = next(self._runs)
        self._requests = client_data.Requests(call, self._scope, number, self.in_use)
        self._checks = partials, call.job.check_nans
        yield from pool_scheduler.results(self, call)

    def share(self, x: Any) -> Any:
        return x

    def fetch(self, value: Value, pieces: list[Any]) -> Any:
        raise DrjaxTypeError(
            f"{value.name} stays with the clients, and the server cannot read it: "
            "reduce it in a plan that takes it."
        )

    def submit(self, task: Task, file: File, shared: list[np.ndarray]) -> _Sent:
        group = int(task.block.groups[0])
        # A failure of this group, when its result is asked for: the policy for failures
        # is the driver's.
        if (node := self._clients[group]) is None:
            refused = "; ".join(["", *self._clients.refused()])
            why = f"no client has the group within {self._start:g} s{refused}"
            return _Sent(None, group, why)
        request = self._requests.request(task)
        number = self._push(node, request)
        sent = _Sent(number, group, f"the SuperLink takes no message for node {node}")
        self._requested[sent] = node, request
        return sent

    def _push(self, node: int, request: Any, again: bool = False) -> str | None:
        """Send a request, with the code of its stage if the node lacks it."""
        fields, arrays = request
        code = self._code.fields(node, self._stage, again)
        return self._messages.push(fields | code, node, "train", **arrays)

    def _pulled(self, sent: _Sent) -> Message | None:
        """Return the reply to a request, None if there is none yet.

        A client that asks for the code gets it, once.
        """
        number = self._again.get(sent, sent.number)
        if number is None:
            raise BadReply(
                "it asks for code, and the SuperLink takes no message for it"
            )
        reply = self._messages.pull(number)
        if reply is None or sent in self._again or not code_of_stages.asks(reply):
            return reply
        self._again[sent] = self._push(*self._requested[sent], again=True)
        return None

    def wait(self, handles: Sequence[_Sent], timeout: float | None) -> Sequence[_Sent]:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            for sent in handles:
                if sent.number is None or sent in self._replies:
                    continue
                try:
                    reply = self._pulled(sent)
                except BadReply as error:
                    # Not raised: `result` turns it into a failure of this group alone.
                    reply = error
                if reply is not None:
                    self._replies[sent] = reply
            done = [x for x in handles if x.number is None or x in self._replies]
            if done or time.monotonic() >= end:
                return done
            time.sleep(_POLL)

    def result(self, handle: _Sent) -> BlockResult:
        group = handle.group
        if handle.number is None:
            return untrusted_replies.failure(group, handle.why)
        reply = self._replies.pop(handle)
        self._requested.pop(handle, None)
        self._again.pop(handle, None)
        try:
            if isinstance(reply, BadReply):
                raise reply
            if reply.has_error():
                why = f"{reply.error.reason} (code {reply.error.code})"
                return untrusted_replies.failure(group, f"its client failed: {why}")
            result = untrusted_replies.validate_reply(reply, group, *self._checks)
            return replace(result, piece=self._requests.key)
        except BadReply as error:
            # The node, so that an operator can find the client.
            whose = f"its client, node {self._clients[group]}"
            why = f"the reply of {whose}, does not fit the plan: {error}"
            return untrusted_replies.failure(group, why)

    def abandon(self, handle: _Sent) -> None:
        self.forget(handle)

    def forget(self, handle: _Sent) -> None:
        self._replies.pop(handle, None)
        self._requested.pop(handle, None)
        for number in (handle.number, self._again.pop(handle, None)):
            if number is not None:
                self._messages.forget(number)

    def states(self) -> list[WorkerState]:
        return []

    def close(self) -> None:
        pass
