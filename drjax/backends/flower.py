"""The Flower backend: each group is a client, and its data stays with it.

Input: a plan, and the grid of a Flower `ServerApp`, in which the driver runs. Output: a
`Runner`. Each stage of the groups is sent to the clients with the round, as a stage of
the plan's file, and they run it on their own data; what they send back is partial
reductions, and no slices.

Invariants: clients are not trusted: each reply is pulled by itself and validated
against the plan, and a bad one is the failure of that client's group alone. A block is
one group.

Sharp edges: a client sees the stages, and the server sees each client's partial
reduction: there is no secure aggregation. Without `nodes`, which group a client is is
its own claim. Flower never ends a client, so a late one is forgotten, not stopped.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drjax._errors import DrjaxValueError
from drjax.backends.engine import client_data, pool_scheduler, untrusted_replies
from drjax.backends.engine.assignment import Assignment
from drjax.backends.engine.background import Background
from drjax.backends.engine.claim_queries import ClaimQueries, ClientFailed
from drjax.backends.engine.driver import Runner
from drjax.backends.engine.extras import needed
from drjax.backends.engine.messages import (
    BlockResult,
    File,
    Task,
    WorkerState,
    kept_outputs,
    rounds_of,
)
from drjax.backends.engine.options import EngineOptions
from drjax.backends.engine.protocols import Results, StageCall
from drjax.backends.engine.untrusted_replies import BadReply
from drjax.backends.groups import Remote
from drjax.plan import Plan

Clients = Remote
_POLL, _PATIENCE = 0.1, 1.0  # seconds between looks for replies, and for one look


def compile(
    plan: Plan,
    grid: Any,
    *,
    start: float = 60.0,
    nodes: Iterable[int] | None = None,
    **options: Any,
) -> Runner:
    """A function that runs the plan with Flower's clients, in a `ServerApp`.

    Give it `Clients()` for the argument that is the clients' own data.

    Args:
      plan: The plan; its rounds may need of the groups what they reduce, and no slices.
      grid: The grid that Flower gives to the `ServerApp`.
      start: Seconds to wait until each group has a client. With `on_error="drop"` it
        goes on with those that are there.
      nodes: The id of each group's node, in the order of the groups. Give it where
        SuperNodes authenticate themselves, so that no client takes another's group.
        Default: each client says which group it is, and the first to do so has it.
      **options: See `drjax.backends.EngineOptions`: `on_error`, `min_groups`,
        `check_nans` (here also for infinities, unless they cannot decide a maximum
        or minimum), `timeout` of a client in seconds, `retries` of one that took
        longer, `checkpoint`, `progress`. Each client is a block of its own.

    Returns:
      A `drjax.backends.engine.driver.Runner` with the signature of the planned
      function. The clients are left running when it is closed.

    Raises:
      EngineError: Flower is not installed; (when called) a client failed or sent what
        does not fit the plan, or too few survive.
      DrjaxTypeError, DrjaxValueError: A wrong option; a plan that needs slices; ids
        of
        other than n nodes.

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
    for owner, a_round in rounds_of(plan):
        if kept := kept_outputs(owner, a_round):
            raise DrjaxValueError(
                f"{plan.name} needs or returns {kept[0].name}, a slice of each group. "
                "What clients compute stays with them, unless it is reduced."
            )
    clients = Assignment(plan.size, None if nodes is None else [*nodes])
    engine = Nodes(grid, clients, start, checked.on_error == "drop")
    return Runner(plan, engine, checked)


def client(load: Callable[[Any], Any]) -> Any:
    """A Flower `ClientApp` that runs stages on its own data.

    Args:
      load: Gives the data of a client from Flower's `Context`: the group's slice of the
        argument that is `Clients()`, a pytree of arrays. The group index is
        `context.node_config["partition-id"]`.

    Example:
      >>> import numpy as np
      >>> from drjax.backends import flower
      >>> def load(context):
      ...     return np.arange(3.0) * context.node_config["partition-id"]
      >>> app = flower.client(load)
    """
    flwr = needed("flwr.app", "flower", "drjax.backends.flower")
    app = needed("flwr.clientapp", "flower", "drjax.backends.flower").ClientApp()

    def reply(message: Any, **config: Any) -> Any:
        record = flwr.RecordDict({"drjax": flwr.ConfigRecord(config)})
        return flwr.Message(record, reply_to=message)

    @app.query()
    def query(message: Any, context: Any) -> Any:
        # A claim: the server does not trust it.
        return reply(message, group=int(context.node_config["partition-id"]))

    @app.train()
    def train(message: Any, context: Any) -> Any:
        request = message.content["drjax"]["request"]
        return reply(message, done=client_data.answer(request, lambda: load(context)))

    return app


class _Messages:
    """Messages to nodes and their replies: a `claim_queries.Link` by Flower's grid.

    A reply is pulled by the number of its request, alone, so that one that cannot be
    read spoils no other. It must bear that number too: the SuperLink adds whatever else
    was sent to the server. A nonce in each request keeps clients from guessing the
    numbers of others.
    """

    def __init__(self, grid: Any):
        self._grid, self._pulls = grid, Background(_PATIENCE)
        self._flwr = needed("flwr.app", "flower", "Flower")
        self._link_errors = (OSError, needed("httpx", "flower", "Flower").HTTPError)

    def present(self) -> set[int]:
        """The ids of the nodes that are connected."""
        return {*self._grid.get_node_ids()}

    def query(self, client: int) -> str | None:
        """Ask a node for its group; returns the query's number, None if it fails."""
        return self.push({}, client, "query")

    def claim(self, number: str) -> Any:
        """The group in a node's answer, of any type, by the number of the query.

        None if the node has not answered yet.

        Raises:
          ClientFailed: The client could not answer.
          BadReply: The answer cannot be read.
        """
        reply = self.pull(number)
        if reply is not None and reply.has_error():
            raise ClientFailed
        return None if reply is None else _content(reply, "group")

    def push(self, content: dict, node: int, kind: str) -> str | None:
        """Send a message; returns its number, None if the SuperLink does not take it.

        Args:
          content: The fields of the message: text, numbers or bytes by name.
          node: The id of the node.
          kind: Which function of the client it is for: `"query"` or `"train"`.
        """
        content = {"nonce": secrets.token_bytes(16), **content}
        # One message at a time: an error of one must not concern others.
        record = self._flwr.RecordDict({"drjax": self._flwr.ConfigRecord(content)})
        message = self._flwr.Message(record, dst_node_id=node, message_type=kind)
        numbers = [*self._grid.push_messages([message])]
        return numbers[0] if numbers else None

    def pull(self, number: str) -> Any:
        """The reply to the message with this number; None if there is none yet.

        Flower waits for hours for what a client announces and does not send. So a pull
        that takes long goes on in its own thread, and holds up no other client.

        Raises:
          BadReply: The reply cannot be read.
        """

        def pull() -> Any:
            messages = self._grid.pull_messages([number])
            # The SuperLink adds other messages to this server: only this reply counts.
            answers = (x for x in messages if x.metadata.reply_to_message_id == number)
            return next(answers, None)

        try:
            return self._pulls.result(number, pull)
        # The SuperLink is gone, which is no client's failure.
        except self._link_errors:
            raise
        except Exception as error:
            why = f"it cannot be read: {type(error).__name__}: {error}"
            raise BadReply(why) from error

    def forget(self, number: str) -> None:
        """Release the message with this number: its reply will not be pulled."""
        self._pulls.forget(number)


@dataclass(frozen=True)
class _Sent:
    """A request to the client of a group.

    Attributes:
      number: The number of the message; None if it was not sent.
      group: The group index.
      why: Why the message was not sent; of no meaning if it was.
    """

    number: str | None
    group: int
    why: str = ""


class Nodes:
    """The clients, as an engine: a `drjax.backends.engine.protocols.Pool` of nodes.

    Args:
      grid: The grid of the `ServerApp`.
      clients: The assignment of groups to nodes.
      start: Seconds to wait until each group has a client.
      drop: Whether to go on without clients whose claim is refused.
    """

    def __init__(self, grid: Any, clients: Assignment, start: float, drop: bool):
        self.workers, self.generation = clients.size, 0
        self._clients, self._start, self._opened = clients, start, False
        self._messages = _Messages(grid)
        self._queries = ClaimQueries(self._messages, clients, drop)
        self._replies: dict[_Sent, Any] = {}

    def open(self) -> None:
        if not self._opened:  # clients that come later are found between rounds
            self._opened = True
            self._queries.run(range(self.workers), self._start, late=True)

    def results(self, call: StageCall) -> Results:
        # Clients that came later, or came back.
        alive = np.flatnonzero(call.alive)
        self._queries.run(alive, min(5.0, self._start), late=False)
        self._requests = client_data.Requests(call)
        # Reading the stages of a file takes a while: once for each runner.
        if "partials" not in call.cache:
            call.cache["partials"] = untrusted_replies.partials_of(call.job.file)
        self._checks = call.cache["partials"][call.job.stage], call.job.check_nans
        yield from pool_scheduler.results(self, call)

    def share(self, x: Any) -> Any:
        return x

    def submit(self, task: Task, file: File, shared: list[np.ndarray]) -> Any:
        group = int(task.block.groups[0])
        # A failure of this group, when its result is asked for: the policy for failures
        # is the driver's.
        if (node := self._clients[group]) is None:
            refused = "; ".join(["", *self._clients.refused()])
            why = f"no client has the group within {self._start:g} s{refused}"
            return _Sent(None, group, why)
        content = {"request": self._requests.to_bytes(task)}
        number = self._messages.push(content, node, "train")
        return _Sent(number, group, f"the SuperLink takes no message for node {node}")

    def wait(self, handles: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            for sent in handles:
                if sent.number is None or sent in self._replies:
                    continue
                try:
                    reply = self._messages.pull(sent.number)
                except BadReply as error:
                    reply = error
                if reply is not None:
                    self._replies[sent] = reply
            done = [x for x in handles if x.number is None or x in self._replies]
            if done or time.monotonic() >= end:
                return done
            time.sleep(_POLL)

    def result(self, handle: Any) -> BlockResult:
        group = handle.group
        if handle.number is None:
            return untrusted_replies.failure(group, handle.why)
        reply = self._replies.pop(handle)
        try:
            if isinstance(reply, BadReply):
                raise reply
            if reply.has_error():
                why = f"{reply.error.reason} (code {reply.error.code})"
                return untrusted_replies.failure(group, f"its client failed: {why}")
            data = _content(reply, "done")
            return untrusted_replies.validate_reply(data, group, *self._checks)
        except BadReply as error:
            # The node, so that an operator can find the client.
            whose = f"its client, node {self._clients[group]}"
            why = f"the reply of {whose}, does not fit the plan: {error}"
            return untrusted_replies.failure(group, why)

    def abandon(self, handle: Any) -> None:
        self.forget(handle)

    def forget(self, handle: Any) -> None:
        self._replies.pop(handle, None)
        self._messages.forget(handle.number)

    def states(self) -> list[WorkerState]:
        return []

    def close(self) -> None:
        pass


def _content(reply: Any, name: str) -> Any:
    """The field of this name in a reply.

    Raises:
      BadReply: The reply has no such field.
    """
    try:
        return reply.content["drjax"][name]
    except Exception as error:
        raise BadReply(f"it has no {name!r}: {type(error).__name__}: {error}") from None
