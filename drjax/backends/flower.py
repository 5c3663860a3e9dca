"""The Flower backend: each group is a client, and its data stays with it.

The driver runs in a Flower `ServerApp`; what the groups do is sent to the clients with
each round, as a stage of the plan's file, and they run it on their own data. What comes
back is what a client gives to a reduction, and nothing else of its rows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from drjax._errors import DrjaxValueError, EngineError
from drjax.backends.engine import flights, remote, spool
from drjax.backends.engine.driver import Runner
from drjax.backends.engine.extras import needed
from drjax.backends.engine.groups import Remote
from drjax.backends.engine.options import Options
from drjax.backends.engine.pool import Call, Results
from drjax.backends.engine.work import Done, File, State, Work, rounds_of, rows_of
from drjax.plan import Plan

Clients, _POLL = Remote, 0.1  # seconds between looks for replies


def compile(plan: Plan, grid: Any, *, start: float = 60.0, **options: Any) -> Runner:
    """A function that runs the plan with Flower's clients, in a `ServerApp`.

    Give it `Clients()` for the argument that is the clients' own data.

    Args:
      plan: The plan; its rounds may need of the groups what they reduce, and no rows.
      grid: The grid that Flower gives to the `ServerApp`.
      start: Seconds to wait until each group has a client. With `on_error="drop"` it
        goes on with those that are there.
      **options: See `drjax.backends.engine.options.Options`: `on_error`, `min_groups`,
        `check_nans`, `timeout` of a client in seconds, `retries` of one that took
        longer, `checkpoint`, `progress`. Each client is a block of its own.

    Returns:
      A `drjax.backends.engine.driver.Runner` with the signature of the planned
      function. The clients are left running when it is closed.

    Raises:
      EngineError: Flower is not installed; (when called) a client failed, or too few
        survive.
      DrjaxTypeError, DrjaxValueError: A wrong option; a plan that needs rows.

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
    checked = replace(Options.checked(**options), block_size=1)
    for owner, a_round in rounds_of(plan):
        if rows := rows_of(owner, a_round):
            raise DrjaxValueError(
                f"{plan.name} needs or returns {rows[0].name}, a row of each group. "
                "What clients compute stays with them, unless it is reduced."
            )
    return Runner(plan, Nodes(grid, plan.size, start), checked)


def client(load: Callable[[Any], Any]) -> Any:
    """A Flower `ClientApp` that runs stages on its own data.

    Args:
      load: Gives the data of a client from Flower's `Context`: the group's row of the
        argument that is `Clients()`, a pytree of arrays. The number of the group is
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
        return reply(message, group=int(context.node_config["partition-id"]))

    @app.train()
    def train(message: Any, context: Any) -> Any:
        request = message.content["drjax"]["request"]
        return reply(message, done=remote.answer(request, lambda: load(context)))

    return app


class Nodes:
    """The clients, as an engine: a `drjax.backends.engine.pool.Pool` of nodes."""

    def __init__(self, grid: Any, n: int, start: float):
        self.workers, self.session, self._grid = n, 0, grid
        self._flwr, self._start = needed("flwr.app", "flower", "Flower"), start
        self._nodes: dict[int, int] = {}  # of each group
        self._asked: set[int] = set()
        self._replies: dict[str, Any] = {}

    def open(self) -> None:
        if self._asked:  # clients that come later are found between rounds
            return
        end = time.monotonic() + self._start
        while len(self._nodes) < self.workers and time.monotonic() < end:
            self._find(max(1.0, end - time.monotonic()))
            time.sleep(_POLL)

    def _find(self, timeout: float) -> None:
        """Ask nodes that are new which group they are."""
        present = {*self._grid.get_node_ids()}
        new = sorted(present - self._asked)
        asked = [self._message({}, node, "query") for node in new]
        for answer in self._grid.send_and_receive(asked, timeout=timeout):
            node = answer.metadata.src_node_id
            if answer.has_error():
                continue
            group = int(answer.content["drjax"]["group"])
            there = self._nodes.get(group)
            if not 0 <= group < self.workers or there in present:
                raise EngineError(
                    f"A client has partition-id={group}. Each of 0 to "
                    f"{self.workers - 1} must have one client."
                )
            self._asked.add(node)
            self._nodes[group] = node

    def _message(self, content: dict, node: int, kind: str) -> Any:
        record = self._flwr.RecordDict({"drjax": self._flwr.ConfigRecord(content)})
        return self._flwr.Message(record, dst_node_id=node, message_type=kind)

    def results(self, call: Call) -> Results:
        if set(self._grid.get_node_ids()) - self._asked:
            self._find(min(5.0, self._start))  # clients that came later, or came back
        self._requests = remote.Requests(call)
        yield from flights.results(self, call)

    def share(self, x: Any) -> Any:
        return x

    def submit(self, work: Work, file: File, shared: list[np.ndarray]) -> Any:
        group = int(work.block.groups[0])
        if group not in self._nodes:
            return ("nobody", group)
        content = {"request": self._requests.packed(work, file, shared)}
        message = self._message(content, self._nodes[group], "train")
        (number,) = self._grid.push_messages([message])
        return (number, group)

    def wait(self, flights: Sequence[Any], timeout: float | None) -> Sequence[Any]:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            waiting = [f[0] for f in flights if f[0] not in ("nobody", *self._replies)]
            for reply in self._grid.pull_messages(waiting) if waiting else ():
                self._replies[reply.metadata.reply_to_message_id] = reply
            done = [f for f in flights if f[0] == "nobody" or f[0] in self._replies]
            if done or time.monotonic() >= end:
                return done
            time.sleep(_POLL)

    def result(self, flight: Any) -> Done:
        number, group = flight
        if number == "nobody":
            why = f"no client has the group within {self._start:g} s"
            return Done([], [], {group: why}, 0, 0.0)
        reply = self._replies.pop(number)
        if not reply.has_error():
            return spool.unpacked_done(reply.content["drjax"]["done"])[1]
        why = f"its client failed: {reply.error.reason} (code {reply.error.code})"
        return Done([], [], {group: why}, 0, 0.0)

    def abandon(self, flight: Any) -> None:
        pass

    def forget(self, flight: Any) -> None:
        self._replies.pop(flight[0], None)

    def states(self) -> list[State]:
        return []

    def close(self) -> None:
        pass
