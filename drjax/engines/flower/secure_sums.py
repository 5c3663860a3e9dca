"""Secure sums on Flower: its SecAgg protocol around a stage of the groups.

Input: a `StageCall` whose stage has secure sums, and a link to the clients. Output:
what an `Engine` yields: for each client its other partial reductions, and in the end
the secure sums of all. At a client: a message of the protocol, and its reply.

Both halves are Flower's own, `secaggplus_mod` and `SecAggPlusWorkflow`, on the complete
graph, which is SecAgg (Bonawitz et al. 2017), in four exchanges: keys; shares of the
secrets, encrypted for the other clients; masked values; shares of the masks.
`secure_masks` has the masks; this module hands over the values, and validates what
clients send.

Invariants: of a slice that is summed securely, only the masked value leaves the client.
All secure sums of a stage are one vector of integers modulo 2^32, each sum in steps of
`step(...)` of its own range. A sum is unmasked only if `least_groups(...)` clients sent
masked values, which the clients check as well. Keys and shares are deleted when their
round is over.

Sharp edges: the server is honest but curious: it passes on the clients' public keys,
and names the clients that are gone. A client may send any masked value or share: one
that lies can shift the sum within its range, or end the call.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from drjax._errors import DrjaxValueError, EngineError
from drjax._extras import needed
from drjax._plan.normal_form import rounds_of
from drjax.engines.core.blocks_of_groups import blocks_of_groups
from drjax.engines.core.messages import Block, BlockResult
from drjax.engines.core.protocols import Results, StageCall
from drjax.engines.flower import (
    client_data,
    records,
    secure_masks,
    secure_replies,
    untrusted_replies,
)
from drjax.engines.flower.assignment import Assignment
from drjax.engines.flower.code_of_stages import SentCode, asks
from drjax.engines.flower.records import Request
from drjax.engines.flower.untrusted_replies import BadReply, Context, Message, Partial
from drjax.plan import Exchange, Plan

_POLL = 0.1  # seconds between looks for replies


def _levels(n: int) -> int:
    """Return into how many steps the range of numbers of one group is divided.

    It is a power of 2, so that n groups add up to 2^31 at most; the modulus is 2^32.
    """
    return 2 ** (31 - max(1, math.ceil(math.log2(n))))


def _limit(secure_range: float) -> float:
    """Return the option `secure_range`, rounded up to a power of 2 for the protocol.

    The step to which numbers are rounded is then a power of 2, too: integers are exact.
    """
    return 2.0 ** math.ceil(math.log2(secure_range))


def step(n: int, secure_range: float) -> float:
    """Return the step to a multiple of which each number of a secure sum is rounded.

    `n` is the number of groups of the plan, and `secure_range` the option: the largest
    magnitude of a number of one group.
    """
    return 2 * _limit(secure_range) / _levels(n)


def check_plan(plan: Plan, secure_range: float) -> None:
    """Raise an error unless a plan's secure sums can be masked, and stay secure.

    A `DrjaxValueError` is raised if the option `secure_range`, the largest magnitude of
    a number of one group, is no positive number; if a sum is of complex numbers; or if
    the same value is also reduced otherwise, so that the server would see each
    client's.
    """
    number = isinstance(secure_range, int | float) and type(secure_range) is not bool
    if not (number and 0 < secure_range < float("inf")):
        raise DrjaxValueError(
            f"secure_range must be a positive number, got {secure_range!r}."
        )
    for _, a_round in rounds_of(plan):
        demands = {r.source for r in a_round.partials if r.secure}
        plain = [step for step in a_round.steps if not getattr(step, "secure", 0)]
        others = [s for s in plain if isinstance(s, Exchange) and s.direction == "up"]
        seen = [(step.op, value) for step in others for value in step.inputs]
        for op, source in seen:
            if source in demands:
                raise DrjaxValueError(
                    f"{plan.name} has a secure sum of {source.name}, and also its "
                    f"{op}, in which the server would see each client's."
                )
        for source in demands:
            if np.issubdtype(source.dtype, np.complexfloating):
                raise DrjaxValueError(
                    f"Flower's secure sums are of real numbers: {source.name} of "
                    f"{plan.name} is {source.dtype}. Sum its real and imaginary parts."
                )


def least_groups(partials: Sequence[Partial], clients: int) -> int:
    """Return how many clients must send masked values before their sum is revealed.

    It is the largest demand of the secure sums, and more than half of the `clients`
    that begin, so that no two sets of clients can reveal different sums.
    """
    return max(clients // 2 + 1, *(partial.secure for partial in partials))


# ---------------------------------------------------------------------------------
# The client


def is_step(message: Message) -> bool:
    """Return whether a Flower message to a client is of the SecAgg protocol."""
    return secure_replies.configs_key() in message.content.config_records


def answer(
    message: Message,
    context: Context,
    load: Callable[[], Any],
    code: tuple[str, bytes] | None = None,
    min_groups: int = 0,
) -> Any:
    """Answer a message of the SecAgg protocol of secure sums, at a client.

    Flower's `context` keeps the client's secrets between messages. `load` returns the
    group's own data, a pytree of arrays. `code` is the plan file of the stage and its
    hash, with the message that has the request. `min_groups` is the least number of
    groups that the client's owner demands; 0: that of the plan.

    The result is the reply, a Flower message. A `ValueError` is raised if the server
    demands too few groups, its messages are out of order, or another client sent a
    share that cannot be decrypted.
    """
    flwr = needed("flwr.app", "flower", "Flower")
    key = secure_replies.constants()
    fields = message.content.config_records[secure_replies.configs_key()]
    stage = fields.get(key.Key.STAGE)
    plain: list[BlockResult] = []

    def run(message: Message, context: Context) -> Message:
        content, result = _run_to_be_masked(message, context, load, code, min_groups)
        plain.append(result)
        return flwr.Message(content, reply_to=message)

    over = True  # but for a reply after which the protocol goes on
    try:
        if stage == key.Stage.UNMASK:
            _check_unmasking(fields)
        if stage == key.Stage.COLLECT_MASKED_VECTORS:
            _check_shares(fields, context)
        reply = secure_masks.client_mod()(message, context, run)
        over = stage == key.Stage.UNMASK
        # Now, as Flower empties the records of what is not masked yet.
        for result in plain:
            _add_result(reply.content, result)
        return reply
    except _Failed as failed:
        content = flwr.RecordDict()
        _add_result(content, failed.result)
        return flwr.Message(content, reply_to=message)
    finally:
        if over:
            forget(context)


def forget(context: Context) -> None:
    """Delete a client's keys, and its shares of others' secrets, if it has any."""
    context.state.config_records.pop(secure_replies.constants().RECORD_KEY_STATE, None)


def _check_unmasking(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a server asks for both secrets of one client.

    One unmasks the value that it sent, the other replaces one that it did not send.
    """
    key = secure_replies.constants().Key
    both = {*fields[key.ACTIVE_NODE_ID_LIST]} & {*fields[key.DEAD_NODE_ID_LIST]}
    if both:
        raise ValueError(
            f"the server asks for both secrets of node {min(both)}, which would reveal "
            "its numbers"
        )


def _check_shares(fields: Mapping[str, Any], context: Context) -> None:
    """Raise `ValueError` with the node whose share this client cannot decrypt."""
    module = needed(secure_masks.CLIENT, "flower", "Flower")
    constants = secure_replies.constants()
    record = context.state.config_records.get(constants.RECORD_KEY_STATE, {})
    keys = module.SecAggPlusState(**record).ss2_dict
    names = constants.Key.SOURCE_LIST, constants.Key.CIPHERTEXT_LIST
    for node, data in zip(*(fields[name] for name in names), strict=True):
        try:
            module.decrypt(keys[node], data)
        except Exception as error:
            raise ValueError(
                f"node {node} sent it a share that it cannot decrypt: one of the two "
                "lies, or their messages were changed"
            ) from error


class _Failed(Exception):
    """Raised if a client's group failed, so that nothing of it is masked."""

    def __init__(self, result: BlockResult):
        self.result = result


def _add_result(content: Any, result: BlockResult) -> None:
    """Add the result of a group, but for secure sums, to the records of a reply."""
    flwr = needed("flwr.app", "flower", "Flower")
    fields, arrays = records.of_result(result)
    content[records.FIELDS] = flwr.ConfigRecord(fields)
    for name, record in arrays.items():
        content[name] = record


def _run_to_be_masked(
    message: Message,
    context: Context,
    load: Callable[[], Any],
    code: tuple[str, bytes] | None,
    min_groups: int,
) -> tuple[Any, BlockResult]:
    """Run the stage for the client's group; Flower's `secaggplus_mod` masks the result.

    `message` is the third one of the protocol, with the request. The context has what
    the server has set up. The other arguments are those of `answer`.

    The result is Flower's records with the slices of secure sums as one vector, which
    the mod masks, and the other partial reductions. `_Failed` is raised if the group
    failed, or a number is out of range; a `ValueError` if the server would reveal a sum
    of fewer groups than the plan or the owner demands, or if the owner demands secure
    sums, and the stage has others.
    """
    common = needed("flwr.common", "flower", "Flower")
    compat = needed("flwr.compat.common.recorddict_compat", "flower", "Flower")
    set_up = context.state.config_records[secure_replies.constants().RECORD_KEY_STATE]
    if code is None:
        raise ValueError("the server asks for masked values of no stage")
    request = Request.received(message.content)
    secure = client_data.answer_secure(request, load, code)
    if set_up["threshold"] < secure.min_groups:
        # The server sets the protocol up; the demand of the plan is the client's.
        raise ValueError(
            f"the server would reveal a sum of {set_up['threshold']} groups, but the "
            f"plan demands {secure.min_groups}"
        )
    if set_up["threshold"] < min_groups or (min_groups and secure.result.partials):
        raise ValueError(
            f"the owner of this client demands secure sums of {min_groups} groups at "
            f"least, and the server would reveal {set_up['threshold']}, with "
            f"{len(secure.result.partials)} numbers or arrays in plain"
        )
    if secure.result.failed:
        raise _Failed(secure.result)
    vector, limit = [], set_up["clipping_range"]
    for x, bound in zip(secure.slices, secure.bounds, strict=True):
        own, numbers = _limit(bound or limit), np.ravel(x).astype(np.float64)
        # Of two powers of 2: exact. The protocol has one range for all.
        vector.append(numbers * (limit / own))
        if (np.abs(numbers) <= own).all():
            continue
        # The text does not tell the number.
        why = (
            f"a number of its secure sum is not in the range of {own:g}, or no number: "
        )
        why += "give the sum a larger bound=, or the engine a larger secure_range"
        failed = {request.about["group"]: why}
        result = BlockResult([], [], failed, secure.result.pid, secure.result.seconds)
        raise _Failed(result)
    content = compat.fitres_to_recorddict(
        common.FitRes(
            common.Status(common.Code.OK, ""),
            common.ndarrays_to_parameters([np.concatenate(vector)]),
            1,
            {},
        ),
        False,
    )
    return content, secure.result


# ---------------------------------------------------------------------------------
# The server


class Link(Protocol):
    """The server's connection to its clients; `drjax.backends.flower` implements it."""

    def push(
        self, content: dict[str, Any], node: int, kind: str, **records: Any
    ) -> str | None:
        """Send a message with the fields `content` to a node; return its number, text.

        `kind` is the function of its `ClientApp`, "query" or "train"; `records` are
        further records of Flower, by name. None is returned if it cannot be sent.
        """
        ...

    def pull(self, number: str) -> Any:
        """Return the reply to message `number`, from `push`; None if none has come yet.

        Raises `BadReply` if it cannot be read.
        """
        ...

    def forget(self, number: str) -> None:
        """Discard the reply to message `number`, if any, also one that comes later."""
        ...


@dataclass(frozen=True)
class _Client:
    """A client that takes part in a secure sum.

    Attributes:
      block: The block of its group alone.
      request: The request to run the stage: fields of a message, and more records.
    """

    group: int
    block: Block
    request: tuple[dict[str, Any], records.Records]


def results(
    call: StageCall,
    link: Link,
    nodes: Assignment,
    partials: Sequence[Partial],
    secure_range: float,
    code: SentCode,
) -> Results:
    """Run a stage with secure sums on all clients: the `Engine.results` of such stages.

    `nodes` says which client process, a node of Flower, has which group. `partials` are
    the planned partial reductions of the stage, here and below. `secure_range` is the
    largest magnitude of a number of one group, of sums without one of their own. `code`
    is the record of the code that clients were sent.

    Each block is of one group, and its result without secure sums, in the order of the
    groups but for those that fail before the masked values; the last is an empty block
    with the secure sums. An `EngineError` is raised if too few clients are left to
    reveal the sums.
    """
    clients = {}
    requests = client_data.Requests(call, client_data.new_scope())
    for block, failed in blocks_of_groups(call.slices, call.alive, 1):
        group = int(block.groups[0])
        if block.valid.any() and (node := nodes[group]) is not None:
            request = requests.request(call.job.task(block))
            clients[node] = _Client(group, block, request)
        elif call.alive[group]:
            why = failed.get(group, "no client has the group")
            yield block, untrusted_replies.failure(group, why)
    while True:
        least = _check_enough(call, partials, len(clients), len(clients))
        aggregation = _Aggregation(
            link, clients, partials, call, secure_range, least, code
        )
        aggregation.agree_on_keys()
        if not aggregation.lost:
            break
        # A client that is gone before it has shared its keys cannot be unmasked later:
        # the others begin again.
        yield from aggregation.failures()
        clients = {k: v for k, v in clients.items() if k not in aggregation.lost}
    aggregation.collect()
    yield from sorted(
        [*aggregation.failures(), *aggregation.done()], key=lambda x: x[0].groups[0]
    )
    left = len(clients) - len(aggregation.lost)
    # Before the masks are asked for: so few values must not be unmasked at all.
    _check_enough(call, partials, left, len(clients))
    totals = aggregation.unmask(left)
    empty = Block(np.zeros(0, np.int32), np.zeros(0, bool), [])
    yield empty, BlockResult(totals, [], {})


def _check_enough(
    call: StageCall, partials: Sequence[Partial], left: int, clients: int
) -> int:
    """Return how many clients are needed, or raise an `EngineError` if fewer are left.

    `clients` is the number of those that began.
    """
    least, demand = least_groups(partials, clients), least_groups(partials, 0)
    if left < least:
        raise EngineError(
            f"The secure sum in {call.job.location} is not revealed: {left} groups are "
            f"left, and it needs {least}: min_groups={demand}, and more than half of "
            f"the {clients} that began."
        )
    return least


class _Aggregation:
    """One run of the SecAgg protocol by Flower's workflow: four exchanges.

    The workflow calls it: it has methods of a grid, a strategy and a client manager.
    `clients` are by the ids of their nodes; `least` of them must be left, to the end.

    Attributes:
      lost: The reasons for the nodes that were lost, by their ids.
    """

    def __init__(
        self,
        link: Link,
        clients: dict[int, _Client],
        partials: Sequence[Partial],
        call: StageCall,
        secure_range: float,
        least: int,
        code: SentCode,
    ):
        flwr = needed("flwr.app", "flower", "Flower")
        keys = needed("flwr.server.workflow.constant", "flower", "Flower")
        state = needed(secure_masks.SERVER, "flower", "Flower").WorkflowState
        self.lost: dict[int, str] = {}
        self._link, self._clients, self._call = link, clients, call
        self._partials, self._timeout = partials, call.options.timeout
        self._done: dict[int, BlockResult] = {}
        self._mean: np.ndarray | None = None
        self._code, self._limit = code, _limit(secure_range)
        self._levels = _levels(len(call.alive))
        self._left, self._keys = len(clients), set()
        self._workflow = secure_masks.workflow(
            self._check_total,
            reconstruction_threshold=least,
            clipping_range=self._limit,
            quantization_range=self._levels,
            timeout=self._timeout,
        )
        self._state = state()
        records = {
            keys.MAIN_CONFIGS_RECORD: flwr.ConfigRecord({keys.Key.CURRENT_ROUND: 1}),
            keys.MAIN_PARAMS_RECORD: flwr.ArrayRecord(),
        }
        self._context = SimpleNamespace(
            state=flwr.RecordDict(records), strategy=self, client_manager=self
        )

    def agree_on_keys(self) -> None:
        """Exchange public keys, then shares of secrets, among all clients.

        A client that fails is put into `lost`; the caller then begins again without it.
        """
        for exchange in ("setup_stage", "share_keys_stage"):
            if not self.lost:
                self._exchange(exchange)

    def collect(self) -> None:
        """Run the stage at the clients; store masked values, and results for `done`.

        A client that fails is put into `lost`, with the reason.
        """
        self._exchange("collect_masked_vectors_stage")

    def unmask(self, left: int) -> list[np.ndarray | None]:
        """Collect shares of masks, and remove the masks from the sum.

        `left` is the number of clients whose masked values are in the sum. The result
        has for each partial reduction of the stage its secure sum; None if it is not
        secure. An `EngineError` is raised if too few clients sent their shares.
        """
        self._left = left
        try:
            enough = self._exchange("unmask_stage")
        except EngineError:
            raise
        # What Flower makes of shares that are no shares.
        except Exception as error:
            raise self._wrong(f"the shares of a mask do not fit: {error}") from error
        if not enough or self._mean is None:
            raise EngineError(
                f"The secure sum in {self._call.job.location} cannot be revealed: too "
                f"few clients sent shares of the masks: {'; '.join(self.lost.values())}"
            )
        # Flower's workflow gives the mean.
        vector, totals, start = self._mean * left, [], 0
        for partial in self._partials:
            total = None
            if partial.secure:
                size = math.prod(partial.shape)
                own = _limit(partial.bound or self._limit) / self._limit
                total = own * vector[start : start + size].reshape(partial.shape)
                if np.issubdtype(partial.dtype, np.integer):
                    total = np.rint(total)
                total, start = total.astype(partial.dtype), start + size
            totals.append(total)
        return totals

    def _check_total(self, weights: int, vectors: Sequence[np.ndarray]) -> None:
        """Raise `EngineError` for sums that honest clients cannot have sent.

        Each honest weight is `levels`, and each number from 0 to `levels`.
        """
        most = self._left * self._levels
        if weights != most:
            raise self._wrong(f"weights add up to {weights}, not to {most}")
        if any((x > most).any() for x in vectors):
            raise self._wrong("it is larger than the range of all numbers allows")

    def _wrong(self, why: str) -> EngineError:
        """Return the error for a sum that is not that of numbers in their range."""
        return EngineError(
            f"The secure sum in {self._call.job.location} is not used, as {why}: one "
            f"of {self._left} clients has sent a wrong mask, number or share. Masks "
            "hide which one."
        )

    def failures(self) -> Iterator[tuple[Block, BlockResult]]:
        """Yield the block of each lost client's group, and a result with the reason."""
        for node, why in self.lost.items():
            client = self._clients[node]
            yield client.block, untrusted_replies.failure(client.group, why)

    def done(self) -> Iterator[tuple[Block, BlockResult]]:
        """Yield the block and the result of each client that sent masked values.

        In the places of secure sums its partial reductions have None.
        """
        for node, result in self._done.items():
            others = iter(result.partials)
            partials = [None if p.secure else next(others) for p in self._partials]
            yield self._clients[node].block, replace(result, partials=partials)

    # -----------------------------------------------------------------------------
    # What Flower's workflow calls

    def _exchange(self, name: str) -> bool:
        """Run the workflow's method `name`; return whether enough clients answered."""
        self._now = name
        return getattr(self._workflow, name)(self, self._context, self._state)

    def num_available(self) -> int:
        """Return the number of clients, as the workflow's client manager."""
        return len(self._clients)

    def configure_fit(self, *unused: object) -> list[tuple[Any, Any]]:
        """Return a pair `(client, FitIns)` for each client, as the workflow's strategy.

        All clients take part, and a `FitIns` is empty: what clients get is the request
        of the stage. `unused` are the workflow's arguments.
        """
        common = needed("flwr.common", "flower", "Flower")
        nothing = common.Parameters([], "numpy.ndarray")
        ins = lambda: common.FitIns(nothing, {})
        return [(SimpleNamespace(node_id=node), ins()) for node in self._clients]

    def aggregate_fit(
        self, number: int, pairs: list[tuple[Any, Any]], failures: list[Any]
    ) -> tuple[None, dict[str, Any]]:
        """As the workflow's strategy, store the mean in `pairs[0][1]` for `unmask`."""
        common = needed("flwr.common", "flower", "Flower")
        (self._mean,) = common.parameters_to_ndarrays(pairs[0][1].parameters)
        return None, {}

    def send_and_receive(
        self, messages: Iterable[Any], *, timeout: float | None
    ) -> list[Any]:
        """Send messages to clients: Flower's workflow calls it as its `Grid`.

        A client without a reply in `timeout` seconds (None: no limit), or with one that
        is malformed, enters `lost`. The result is the validated replies of the others.
        """
        sent, again, replies, key = {}, {}, [], secure_replies.configs_key()
        for message in messages:
            node = message.metadata.dst_node_id
            # A copy, as the workflow sends all clients the same one.
            record = message.content.config_records[key].copy()
            sent[node] = self._push(node, {key: record})
            again[node] = {key: record.copy()}
            if sent[node] is None:
                del sent[node]
        end = math.inf if timeout is None else time.monotonic() + timeout
        while sent:
            for node, number in [*sent.items()]:
                try:
                    reply = self._link.pull(number)
                    if reply is not None and asks(reply) and node in again:
                        sent[node] = self._push(node, again.pop(node), code=True)
                        if sent[node] is None:
                            del sent[node]
                        continue
                    if reply is not None:
                        replies.append(self._validated(node, reply))
                except BadReply as error:
                    self.lost[node] = f"the reply of its client, node {node}: {error}"
                    reply = error
                if reply is not None:
                    del sent[node]
            if time.monotonic() >= end:
                break
            if sent:
                time.sleep(_POLL)
        for node, number in sent.items():
            self._link.forget(number)
            self.lost[node] = f"its client took longer than {timeout} s"
        return replies

    def _push(self, node: int, own: dict[str, Any], code: bool = False) -> str | None:
        """Send a message of the exchange; `code`: with the code of the stage again.

        Return its number; None if it cannot be sent, so that the node is lost.
        """
        content: dict[str, Any] = {}
        if self._now == "collect_masked_vectors_stage":
            fields, arrays = self._clients[node].request
            own = own | arrays
            content = fields | self._code.fields(node, self._call.job.stage, again=code)
        number = self._link.push(content, node, "train", **own)
        if number is None:
            self.lost[node] = f"the SuperLink takes no message for node {node}"
        return number

    def _validated(self, node: int, reply: Message) -> Any:
        """Validate a client's reply, a Flower message of any content.

        `node` is the one that was asked. The result is an object like a Flower message,
        with validated fields only. A `BadReply` is raised if the reply does not fit the
        exchange or the plan, or the group has failed.
        """
        if reply.has_error():
            raise BadReply(f"{reply.error.reason} (code {reply.error.code})")
        flwr = needed("flwr.app", "flower", "Flower")
        content, done = flwr.RecordDict(), None
        if self._now == "collect_masked_vectors_stage":
            content, done = self._nothing(), self._validated_result(node, reply)
        nodes = {*self._clients}
        fields = secure_replies.fields_of(reply, self._now, nodes, self._length)
        if self._now == "setup_stage":
            secure_replies.check_keys(fields, self._keys)
        if done is not None:
            self._done[node] = done  # all of the reply fits
        content[secure_replies.configs_key()] = flwr.ConfigRecord(fields)
        # The node that was asked, whatever the reply says of its origin.
        metadata = SimpleNamespace(src_node_id=node)
        return SimpleNamespace(
            metadata=metadata, content=content, has_error=lambda: False
        )

    @property
    def _length(self) -> int:
        """The total number of elements of all partial reductions summed securely."""
        return sum(math.prod(p.shape) for p in self._partials if p.secure)

    def _validated_result(self, node: int, reply: Message) -> BlockResult:
        """Validate the partial reductions that a client sent besides its masked value.

        A `BadReply` is raised if they do not fit the plan, or the group has failed.
        """
        group = self._clients[node].group
        plain = [p for p in self._partials if not p.secure]
        nans = self._call.job.check_nans
        result = untrusted_replies.validate_reply(reply, group, plain, nans)
        if result.failed:
            raise BadReply(result.failed[group])
        return result

    def _nothing(self) -> Any:
        """Make the records of a Flower `FitRes` without parameters."""
        common = needed("flwr.common", "flower", "Flower")
        compat = needed("flwr.compat.common.recorddict_compat", "flower", "Flower")
        status = common.Status(common.Code.OK, "")
        nothing = common.Parameters([], "numpy.ndarray")
        return compat.fitres_to_recorddict(common.FitRes(status, nothing, 1, {}), False)
