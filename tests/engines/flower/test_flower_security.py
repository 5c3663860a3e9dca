"""Flower with clients that lie.

What a reply may hold is tested without Flower, in `test_untrusted_replies.py`; here,
that the server asks, and what becomes of the run.

Covers: drjax.engines.flower.adapter, drjax.engines.flower.untrusted_replies.
"""

# pyright: reportMissingImports=false

import math
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import flower
from drjax.engines.flower import records
from tests.engines.flower.clients import (
    Grid,
    as_in_a_server_app,  # noqa: F401
)
from tests.helpers.raising import raises

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Flower's own
]
N, EVIL = 5, 3


class Lying(Grid):
    """A grid in which the client of group 3 answers what `lie` makes of its reply.

    `lie(message, reply)` gives a message, or raises what the pulling of it raises.
    """

    def __init__(self, lie=None, claim=None, n=N, **options):
        super().__init__(load, n, **options)
        self.lie, self.claim = lie, claim

    def answer(self, message, group, query):
        reply = super().answer(message, group, query)
        try:
            if group == EVIL and query and self.claim is not None:
                return self.claim(message, reply)
            if group == EVIL and not query and self.lie is not None:
                return self.lie(message, reply)
        except Exception as error:
            return error
        return reply

    def pull_messages(self, numbers):
        result = super().pull_messages(numbers)
        for reply in result:
            if isinstance(reply, Exception):
                raise reply
        return result


def load(context):
    i = context.node_config["partition-id"]
    return np.full(3, i, np.float32)


def step(n):
    @drjax.program(clients=n)
    def step(model, data):
        def work(model, x):
            return model + x, jnp.sum(x)

        models, losses = drjax.map_fn(work, (drjax.broadcast(model), data))
        return drjax.reduce_mean(models), drjax.reduce_max(losses)

    return step


def plan_of(n):
    kind = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return drjax.make_plan(step(n))(kind(3), kind(n, 3))


def config(**values):
    """A lie: a reply that holds this."""

    def lie(message, reply):
        import flwr.app as flwr

        record = flwr.RecordDict({"drjax": flwr.ConfigRecord(values)})
        return flwr.Message(record, reply_to=message)

    return lie


def content(make):
    """A lie: a reply of this content, `make(flwr.app)`."""

    def lie(message, reply):
        import flwr.app as flwr

        return flwr.Message(make(flwr), reply_to=message)

    return lie


def content_of(fields, arrays=None):
    """The content of a reply of these fields, and of arrays under these names."""
    import flwr.app as flwr

    own = {"drjax": flwr.ConfigRecord(fields)}
    if arrays is not None:
        pairs = {name: flwr.Array(*x) for name, x in arrays.items()}
        own["drjax.arrays"] = flwr.ArrayRecord(pairs)
    return flwr.RecordDict(own)


def of_arrays(change, **fields):
    """A lie: `change(arrays)`, of the fields of Flower's arrays by name."""

    def lie(message, reply):
        import flwr.app as flwr

        arrays = {
            name: (x.dtype, x.shape, x.stype, x.data)
            for name, x in reply.content["drjax.arrays"].items()
        }
        own = {"pid": 1, "seconds": 0.0, **fields}
        return flwr.Message(content_of(own, change(arrays)), reply_to=message)

    return lie


def partials(change, **fields):
    """A lie: other arrays, and with these fields more than an honest reply has."""

    def changed(arrays):
        honest = [
            np.frombuffer(data[-4 * math.prod(shape) :], dtype).reshape(shape)
            for dtype, shape, _, data in arrays.values()
        ]
        lies = map(records.fields_of, change(honest))
        return {str(i): x for i, x in enumerate(lies)}

    return of_arrays(changed, **fields)


def first(change):
    """A lie about the fields of the first array: dtype, shape, format, data."""
    return of_arrays(lambda arrays: arrays | {"0": change(*arrays["0"])})


def fails(**fields):
    """A lie: no arrays, and these fields."""
    return config(**{"pid": 1, "seconds": 0.0} | fields)


def breaks(error):
    """A lie: a message that Flower cannot read."""

    def lie(message, reply):
        raise error

    return lie


def error_of(reason):
    def lie(message, reply):
        import flwr.app as flwr

        return flwr.Message(flwr.Error(2, reason), reply_to=message)

    return lie


def called(grid, **options):
    run = flower.compile(plan_of(N), grid, start=0.5, check_nans=True, **options)
    return run, run(np.zeros(3, np.float32), flower.Clients())


def check(result, good):
    """The results of these groups."""
    np.testing.assert_allclose(result[0], np.full(3, np.mean(good)), rtol=1e-6)
    assert result[1] == 3 * max(good)


LIES = {
    "NaN": (partials(lambda p: [p[0] * np.nan, p[1]]), "it yields NaN as"),
    "infinite": (partials(lambda p: [p[0] + np.inf, p[1]]), "it yields an infinity as"),
    "shape": (partials(lambda p: [np.ones(7, np.float32), p[1]]), "is float32[7], but"),
    "scalar": (partials(lambda p: [np.float32(9), p[1]]), "is float32[], but the plan"),
    "complex": (partials(lambda p: [p[0] + 0j, p[1]]), "is complex64[3], but the plan"),
    "int64": (partials(lambda p: [p[0].astype(np.int64), p[1]]), "is int64[3], but"),
    "string": (partials(lambda p: [np.array(["abc"] * 3), p[1]]), "is <U3[3], but the"),
    "too few": (partials(lambda p: p[:1]), "it has 1 arrays, but the plan is for 2"),
    "none": (partials(lambda p: []), "it has 0 arrays, but the plan is for 2"),
    "slices": (
        partials(lambda p: [*p, np.zeros((1, 3))]),
        "it has 3 arrays, but the plan is for 2",
    ),
    "names": (
        of_arrays(lambda x: {"1": x["0"], "0": x["1"]}),
        "array 0 has the name '1'",
    ),
    "pickle": (
        first(lambda dtype, shape, stype, data: (dtype, shape, "pickle", data)),
        "is not written as float32[3] is",
    ),
    "object": (
        first(lambda dtype, shape, stype, data: ("object", shape, stype, data)),
        "is object[3], but the plan is for float32[3]",
    ),
    "other header": (
        first(lambda d, s, f, data: (d, s, f, data.replace(b"(3,)", b"(9,)"))),
        "is not written as float32[3] is",
    ),
    "header of objects": (
        first(lambda d, s, f, data: (d, s, f, data.replace(b"<f4", b"|O8"))),
        "is not written as float32[3] is",
    ),
    "more bytes": (
        first(lambda d, s, f, data: (d, s, f, data + b"0000")),
        "has 16 bytes, but the plan is for 12",
    ),
    "fewer bytes": (
        first(lambda d, s, f, data: (d, s, f, data[:-1])),
        "has 11 bytes, but the plan is for 12",
    ),
    "huge": (
        first(lambda d, s, f, data: (d, (2**62, 2**62), f, data)),
        "is float32[4611686018427387904, 4611686018427387904], but",
    ),
    "others": (
        partials(lambda p: p, groups=[0, 1, 2]),
        "it must have pid and seconds, or failed, but has 'pid', 'seconds', 'groups'",
    ),
    "other group": (partials(lambda p: p, group=0), "has 'pid', 'seconds', 'group'"),
    "failed with values": (
        partials(lambda p: p, failed="evil"),
        "it has values of a group that failed",
    ),
    "failed of others": (
        fails(failed=["evil"] * 3),
        "its failure is ['evil', 'evil', ",
    ),
    "empty": (config(), "it must have pid and seconds, or failed, but has "),
    "text": (fails(pid="x"), "its process is 'x', which is no process number"),
    "no arrays": (fails(), "it has no record 'drjax.arrays': KeyError"),
    "no fields": (config(x=1), "it must have pid and seconds, or failed, but has 'x'"),
    "no record": (content(lambda f: f.RecordDict({})), "it has no record 'drjax': Key"),
    "metrics": (
        content(lambda f: f.RecordDict({"drjax": f.MetricRecord({"done": 1})})),
        "it must have pid and seconds, or failed, but has 'done'",
    ),
    "metrics for arrays": (
        content(
            lambda f: f.RecordDict(
                {
                    "drjax": f.ConfigRecord({"pid": 1, "seconds": 0.0}),
                    "drjax.arrays": f.MetricRecord({"0": 1.0, "1": 2.0}),
                }
            )
        ),
        "is no array",
    ),
    "arrays": (
        content(lambda f: f.RecordDict({"drjax": f.ArrayRecord([np.zeros(3)])})),
        "it must have pid and seconds, or failed, but has '0'",
    ),
    "unreadable": (breaks(KeyError("Bomb")), "it cannot be read: KeyError: 'Bomb'"),
    "undecodable": (breaks(ValueError("bad")), "it cannot be read: ValueError: bad"),
    "error": (error_of("no\x1b[2J\nway"), "failed: no\\x1b[2J way (code 2)"),
    "own failure": (fails(failed="a\nb"), "work: a b"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_the_failure_of_its_client_alone(name):
    lie, text = LIES[name]
    run, result = called(Lying(lie), on_error="drop")
    check(result, [0, 1, 2, 4])
    assert [*run.report.dropped] == [EVIL] and text in run.report.dropped[EVIL]
    with pytest.raises(drjax.EngineError) as e:
        called(Lying(lie))
    assert (e.value.group, e.value.round) == (EVIL, "1") and text in str(e.value)
    assert str(e.value).startswith("Group 3 failed in round 1 of step, in work: ")
    if name not in ("error", "own failure"):
        whose = "the reply of its client, node 103, does not fit the plan: "
        assert whose in str(e.value)


def test_replies_are_told_apart_by_what_was_asked():
    """A client cannot answer for another one, whatever its reply says."""

    def lie(message, reply):
        reply.metadata.__dict__["_reply_to_message_id"] = victim[0]
        reply.metadata.__dict__["_src_node_id"] = 100
        return reply

    victim, grid = ["m6"], Lying(lie)  # after queries m1 to m5
    run, result = called(grid, on_error="drop", timeout=1.0, retries=0)
    check(result, [0, 1, 2, 4])
    assert [*run.report.dropped] == [EVIL] and grid.sent == 2 * N


def test_a_reply_counts_by_the_node_that_sent_it():
    """Also if it names the request of another, whose number is no secret here."""
    import flwr.app as flwr

    class Answering(Grid):
        """The client of group 3 answers for that of group 1, and first."""

        def __init__(self, make):
            super().__init__(load, N)
            self.make, self.early = make, []

        def answer(self, message, group, query):
            reply = super().answer(message, group, query)
            if group == 1 and not query:
                forged = self.make(message)
                forged.metadata.__dict__["_src_node_id"] = 100 + EVIL
                self.early.append(forged)
            return reply

        def pull_messages(self, numbers):
            return [*self.early, *super().pull_messages(numbers)]

    values = [np.full(shape, 1e6, np.float32) for shape in (3, ())]
    arrays = {str(i): records.fields_of(x) for i, x in enumerate(values)}
    lie = content_of({"pid": 1, "seconds": 0.0}, arrays)
    for make in (
        lambda message: flwr.Message(lie, reply_to=message),
        lambda message: flwr.Message(flwr.Error(2, "evil"), reply_to=message),
    ):
        grid = Answering(make)
        run, result = called(grid)
        check(result, range(N))
        assert len(grid.early) == 1 and run.report.dropped == {}


def test_errors_in_the_name_of_the_link_count():
    """The SuperLink itself reports that a node is gone, or its reply."""

    def lie(message, reply):
        reply = error_of("Node Unavailable")(message, reply)
        reply.metadata.__dict__["_src_node_id"] = reply.metadata.dst_node_id
        return reply

    run, result = called(Lying(lie), on_error="drop")
    check(result, [0, 1, 2, 4])
    assert "Node Unavailable (code 2)" in run.report.dropped[EVIL]


def test_arrays_are_those_of_flower():
    """Its own tools read them; the parameters are one record for all clients."""
    shared = []

    class Watching(Grid):
        def answer(self, message, group, query):
            reply = super().answer(message, group, query)
            if not query:
                shared.append(message.content["drjax.shared"])
                a, b = reply.content["drjax.arrays"].to_numpy_ndarrays()
                assert a.dtype == b.dtype == np.float32 and a.shape == (3,)
            return reply

    called(Watching(load, N))
    assert len(shared) == N and len({x.object_id for x in shared}) == 1


def test_messages_that_answer_nothing_are_passed_over():
    """Flower's grid gives these to the server with the replies that it asks for."""

    class Adding(Grid):
        more: list[Any] = []

        def answer(self, message, group, query):
            import flwr.app as flwr

            reply = super().answer(message, group, query)
            self.more.append(flwr.Message(reply.content, 1, "train"))
            return reply

        def pull_messages(self, numbers):
            return [*self.more, *super().pull_messages(numbers)]

    grid = Adding(load, N)
    run, result = called(grid)
    check(result, range(N))
    assert len(grid.more) == 2 * N and run.report.dropped == {}


def test_requests_cannot_be_guessed():
    """The number of a message is a hash of it: equal requests must differ."""
    seen = []

    class Watching(Grid):
        def answer(self, message, group, query):
            seen.append(bytes(message.content["drjax"]["nonce"]))
            return super().answer(message, group, query)

    called(Watching(load, N))
    assert len({*seen}) == len(seen) == 2 * N and {len(x) for x in seen} == {16}


def test_errors_of_the_link_are_nobodys_failure():
    import httpx

    lie = breaks(httpx.ConnectError("the SuperLink is gone"))
    text = (
        "The groups' work failed in round 1 of step, in work: ConnectError: the Super"
    )
    raises(drjax.EngineError, text, lambda: called(Lying(lie), on_error="drop"))


def test_a_message_that_the_link_does_not_take():
    class Refusing(Grid):
        def push_messages(self, messages):
            for message in messages:
                refused = message.metadata.dst_node_id == 100 + EVIL
                query = message.metadata.message_type == "query"
                taken = [] if refused and not query else [message]
                yield next(super().push_messages(taken), None)

    run, result = called(Refusing(load, N), on_error="drop")
    check(result, [0, 1, 2, 4])
    text = "the SuperLink takes no message for node 103"
    assert text in run.report.dropped[EVIL]


CLAIMS = {
    "taken": (config(group=0), "has partition-id=0.", ", and client 100 has this one"),
    "too large": (config(group=2**62), "has partition-id=4611686018427387904.", ""),
    "negative": (config(group=-1), "has partition-id=-1.", ""),
    "true": (config(group=True), "has partition-id=True.", ""),
    "text": (config(group="3"), "has partition-id='3'.", ""),
    "list": (config(group=[3]), "has partition-id=[3].", ""),
    "nothing": (config(x=1), "does not report its partition-id: it has no 'group'", ""),
    "unreadable": (
        breaks(KeyError("x")),
        "does not report its partition-id: it cann",
        "",
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_false_claim_is_the_failure_of_its_client_alone(name):
    claim, text, also = CLAIMS[name]
    run, result = called(Lying(claim=claim), on_error="drop")
    check(result, [0, 1, 2, 4])
    (why,) = run.report.dropped.values()
    assert [*run.report.dropped] == [EVIL]
    assert f"no client has the group within 0.5 s; client 103 {text.rstrip('.')}" in why
    with pytest.raises(drjax.EngineError) as e:
        called(Lying(claim=claim))
    assert f"A client {text}" in str(e.value)
    assert f"Each of 0 to 4 must have one client. This is client 103{also}" in str(
        e.value
    )


def test_a_client_takes_over_from_one_that_is_gone():
    grid = Grid(load, 2)
    grid.nodes = [100, 101, 105]
    answer = grid.answer

    def same_group(message, group, query):
        return answer(message, 1 if group == 5 else group, query)

    grid.answer = same_group
    run = flower.compile(plan_of(2), grid, start=0.5, on_error="drop")
    args = np.zeros(3, np.float32), flower.Clients()
    check(run(*args), [0, 1])
    grid.nodes, grid.silent = [100, 105], [1]  # 105 was refused, as 101 was there
    check(run(*args), [0, 1])
    assert run.report.dropped == {}


def test_a_client_that_answers_no_query_holds_up_nobody():
    grid = Grid(load, N, mute=[6])
    grid.nodes = [*grid.nodes, 106]
    run = flower.compile(plan_of(N), grid, start=300.0)
    start = time.monotonic()
    for _ in range(2):
        check(run(np.zeros(3, np.float32), flower.Clients()), range(N))
    assert time.monotonic() - start < 60


def test_a_client_that_announces_what_it_does_not_send():
    """Flower's grid waits within the pull for the rest of such a reply."""
    end = threading.Event()

    class Stuck(Grid):
        def pull_messages(self, numbers):
            if numbers == ["m9"]:  # after queries m1 to m5
                assert end.wait(60)
            return super().pull_messages(numbers)

    run, result = called(Stuck(load, N), on_error="drop", timeout=3.0, retries=0)
    end.set()
    check(result, [0, 1, 2, 4])
    assert "a block took longer than 3.0 s" in run.report.dropped[EVIL]


def test_groups_of_given_nodes():
    """With `nodes` no client is asked which group it is."""
    nodes = [100 + i for i in (4, 3, 2, 1, 0)]
    grid = Lying(claim=config(group=0))
    grid.nodes = [*grid.nodes, 177]
    _, result = called(grid, nodes=nodes)
    check(result, range(N))
    assert grid.sent == N
    grid.silent = [0]  # whose node is that of group 4
    run, result = called(
        grid, nodes=nodes, on_error="drop", timeout=1.0, retries=0
    )  # fmt: skip
    check(result, [1, 2, 3, 4])
    assert [*run.report.dropped] == [4]
    text = "The ids of 5 different clients are needed, one integer for each group"
    for wrong in (nodes[:4], [*nodes[:4], nodes[0]], []):
        raises(
            drjax.DrjaxValueError, text,
            lambda wrong=wrong: flower.compile(plan_of(N), grid, nodes=wrong),
        )  # fmt: skip
