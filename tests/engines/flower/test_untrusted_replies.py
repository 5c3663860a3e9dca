"""Replies of untrusted workers, and which client has which group: no engine needed.

Covers: drjax.engines.flower.untrusted_replies, drjax.engines.flower.assignment,
drjax.engines.flower.background, drjax.engines.flower.code_of_stages,
drjax.engines.core.wire_format.
"""

import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import drjax
from drjax.backends import in_process
from drjax.engines.core import wire_format
from drjax.engines.core.encoded_partials import decoded, encode_partials
from drjax.engines.core.messages import Block, BlockResult
from drjax.engines.flower import code_of_stages, untrusted_replies
from drjax.engines.flower.assignment import Assignment
from drjax.engines.flower.background import Background
from drjax.engines.flower.untrusted_replies import BadReply, Partial
from drjax.engines.in_process.adapter import InProcess
from tests.helpers.raising import raises

GROUP = 3
PARTIALS = [
    Partial("mean", "model", (3,), np.dtype(np.float32)),
    Partial("max", "loss", (), np.dtype(ml_dtypes.bfloat16)),
    Partial("sum", "flags", (2,), np.dtype(bool)),
    Partial("sum", "none", (0, 4), np.dtype(np.int32)),
]
VALUES: list[Any] = [
    np.arange(3, dtype=np.float32), np.asarray(2.5, ml_dtypes.bfloat16),
    np.array([True, False]), np.zeros((0, 4), np.int32),
]  # fmt: skip


def reply(values=VALUES, failed=None, slices=(), group=GROUP, valid=True, **done):
    block = Block(np.array([group], np.int32), np.array([valid]), [])
    fields = {"pid": 7, "seconds": 0.5} | done
    return wire_format.result_to_bytes(
        block, BlockResult(values, [*slices], failed or {}, **fields)
    )


def checked(data, check_nans=True):
    return untrusted_replies.validate_reply(data, GROUP, PARTIALS, check_nans)


def test_states_of_folds():
    """A state is that of the group that was asked; it may have infinities, no NaN."""
    f = lambda x: (drjax.reduce(jnp.maximum, x, -jnp.inf), drjax.reduce_mean(x))
    plan = drjax.make_plan(drjax.program(clients=5)(f))(np.zeros((5, 2), np.float32))
    file = in_process.compile(plan).executable.file
    (planned,) = untrusted_replies.partials_of(file)
    assert [(p.op, p.shape) for p in planned] == [
        ("mean", (2,)), ("fold", (1,)), ("fold", (1, 2)),
    ]  # fmt: skip
    mean = np.zeros(2, np.float32)

    def check(place, state):
        values = [mean, np.array([place], np.int32), np.array([state], np.float32)]
        return untrusted_replies.validate_reply(reply(values), GROUP, planned, True)

    assert check(GROUP, [-np.inf, 1]).partials[1] == GROUP
    with pytest.raises(BadReply, match="the place of another group in a fold"):
        check(1, [0, 1])
    with pytest.raises(BadReply, match="it yields NaN as"):
        check(GROUP, [np.nan, 1])


def header(data):
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(head, body):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + body


def edited(**about):
    head, body = header(reply())
    head["about"] |= about
    return with_header(head, body)


def of_kinds(*kinds):
    head, body = header(reply())
    head["arrays"] = [["int32", [1]], ["bool", [1]], *kinds]
    return with_header(head, body)


def changed(i, value):
    return reply([value if i == j else x for j, x in enumerate(VALUES)])


KINDS = [[str(x.dtype), [*x.shape]] for x in VALUES]
DEEP = b"[" * 50_000 + b"]" * 50_000
NAN, BF16 = np.float32(np.nan), ml_dtypes.bfloat16


def test_an_honest_reply():
    done = checked(reply())
    for result, value in zip(done.partials, VALUES, strict=True):
        assert result is not None and result.dtype == value.dtype
        np.testing.assert_array_equal(result, value)
    assert (done.slices, done.failed, done.pid, done.seconds) == ([], {}, 7, 0.5)


def test_an_honest_failure():
    done = checked(reply([], {GROUP: "it has no data"}, valid=False, pid=0))
    assert done.failed == {GROUP: "it has no data"} and not done.partials


@pytest.mark.parametrize(
    "data, text",
    [
        (None, "it is of type NoneType, not bytes"),
        ([b"x"], "it is of type list, not bytes"),
        ("text", "it is of type str, not bytes"),
        (b"", "it ends within its header, after 0 bytes"),
        (reply()[:40], "it ends within its header, after 40 bytes"),
        (b"\xff" * 50, "it ends within its header, after 50 bytes"),
        (b"\0" * 50, "its header is no JSON: Expecting value"),
        (with_header(b"{" * 10, b""), "its header is no JSON"),
        (with_header(b"\xff\xfe", b""), "its header is no JSON: 'utf-8' codec"),
        (with_header(b" " * (2**20 + 1), b""), "bytes, more than 1048576"),
        (with_header(b'{"about": NaN}', b""), "NaN is no number"),
        (with_header(b'{"about": 1, "about": 2}', b""), "a name is there twice"),
        (with_header(b"9" * 9000, b""), "its header is no JSON: Exceeds the limit"),
        (with_header(DEEP, b""), "its header is nested too deeply"),
        (with_header([], b""), "its header must have about, arrays, but has list"),
        (with_header({"about": 1}, b""), "but has 'about'"),
        (with_header({"about": 1, "arrays": 1}, b""), "its record must have failed"),
        (edited(more=1), "'seconds', 'partials', 'more'"),
        (edited(pid=-1), "its process is -1"),
        (edited(pid=True), "its process is True"),
        (edited(pid=2**70), "its process is 1180591620717411303424"),
        (edited(pid="7"), "its process is '7'"),
        (edited(seconds=-1), "it took -1 seconds"),
        (edited(seconds=1e300), "it took 1e+300 seconds"),
        (edited(seconds=None), "it took None seconds"),
        (edited(partials=3), "it has 3 partial results, but the plan is for 4"),
        (edited(partials=-1), "it has -1 partial results, but the plan is for 4"),
        (edited(partials=4.0), "it has 4.0 partial results, but the plan is for 4"),
        (edited(partials=2**63), "it has 9223372036854775808 partial results"),
        (edited(failed=[]), "it reports failures of []"),
        (edited(failed={"1": "evil"}), "failures of ['1'], but only group 3"),
        (edited(failed={"3": "no", "1": "evil"}), "failures of ['3', '1']"),
        (edited(failed={"03": "evil"}), "failures of ['03']"),
        (edited(failed={"999": "evil"}), "failures of ['999']"),
        (edited(failed={"-1": "evil"}), "failures of ['-1']"),
        (edited(failed={"3": 5}), "its failure is 5, which is no text"),
        (edited(failed={"3": "no"}), "4 partial results, but the plan is for 0"),
        (reply([]), "it has 0 partial results, but the plan is for 4"),
        (reply(VALUES[:3]), "it has 3 partial results, but the plan is for 4"),
        (reply([*VALUES, NAN]), "it has 5 partial results, but the plan is for 4"),
        (reply(slices=[VALUES[0]]), "it has 7 arrays, but the plan is for 6"),
        (reply(group=2), "it is for group 2, but group 3 was asked"),
        (reply(group=-1), "it is for group -1, but group 3 was asked"),
        (reply(valid=False), "it masks its group out without saying why"),
        (changed(0, np.ones(7, np.float32)), "the mean of model is float32[7]"),
        (changed(0, np.ones((1, 3), np.float32)), "the mean of model is float32[1, 3]"),
        (changed(0, np.float32(1e6)), "float32[], but the plan is for float32[3]"),
        (changed(0, np.ones(3)), "the mean of model is float64[3]"),
        (changed(0, np.ones(3, np.int32)), "the mean of model is int32[3]"),
        (changed(0, np.ones(3, np.complex64)), "the mean of model is complex64[3]"),
        (changed(0, np.array(["abc"] * 3)), "the mean of model is <U3[3]"),
        (changed(1, np.float16(1)), "the max of loss is float16[]"),
        (changed(0, VALUES[0] * NAN), "it yields NaN as model"),
        (changed(0, VALUES[0] + np.inf), "it yields an infinity as model"),
        (changed(0, VALUES[0] - np.inf), "it yields an infinity as model"),
        (changed(1, BF16(np.nan)), "it yields NaN as loss"),
        (changed(1, BF16(np.inf)), "it yields an infinity as loss"),
        (of_kinds(), "it has 2 arrays, but the plan is for 6"),
        (of_kinds(*KINDS[1:], KINDS[0]), "the mean of model is bfloat16[]"),
        (of_kinds(["O", [3]], *KINDS[1:]), "the mean of model is O[3]"),
        (of_kinds(["f4,f4", [3]], *KINDS[1:]), "the mean of model is f4,f4[3]"),
        (of_kinds(["float32", [-1]], *KINDS[1:]), "the mean of model is float32[-1]"),
        (of_kinds(["float32", 3], *KINDS[1:]), "the mean of model is float323"),
        (of_kinds(["float32", [2**40]], *KINDS[1:]), "float32[1099511627776]"),
        (of_kinds(["float32", [2**62, 4]], *KINDS[1:]), "but the plan is for float32"),
        (of_kinds(None, *KINDS[1:]), "the mean of model is None"),
        (of_kinds({}, *KINDS[1:]), "the mean of model is {}"),
        (of_kinds(json.loads("[" * 900 + "]" * 900), *KINDS[1:]), "mean of model is"),
        (reply()[:-1], "its arrays have 20 bytes, but the plan is for 21"),
        (reply() + b"\0", "its arrays have 22 bytes, but the plan is for 21"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(data, text):
    with pytest.raises(BadReply) as e:
        checked(data)
    assert text in str(e.value)


def test_bytes_that_are_no_booleans():
    data = reply()
    position = len(data) - 2  # the flags are the last that have bytes
    raises_bad(
        data[:position] + b"\2\0", "flags has bytes that are neither true nor false"
    )


def raises_bad(data, text):
    with pytest.raises(BadReply) as e:
        checked(data)
    assert text in str(e.value)


def test_infinities_that_decide_nothing():
    """The identity of max is what a group without entries gives to it."""
    done = checked(changed(1, BF16(-np.inf)))
    assert done.partials[1] == -np.inf and not done.failed


def test_nans_unless_they_are_checked():
    done = checked(changed(0, VALUES[0] * NAN), check_nans=False)
    assert np.isnan(done.partials[0]).all()


def test_what_is_checked_is_what_stages_give():
    """Types are those of the file, also of sums of 16-bit floats, in loops and x64."""

    @drjax.program(clients=4)
    def step(x, y):
        def body(carry, _):
            mean = drjax.reduce_mean(drjax.map_fn(lambda x: x * 2, x))
            return carry + mean.astype(carry.dtype), drjax.reduce_max(y)

        total, most = jax.lax.scan(body, jnp.zeros(2, jnp.float32), length=3)
        return total, most, drjax.reduce_sum(y)

    args = jnp.ones((4, 2), jnp.bfloat16), jnp.arange(4, dtype=jnp.int8)
    seen = []

    class Checking(InProcess):
        def results(self, call):
            expected = untrusted_replies.partials_of(call.job.file)[call.job.stage]
            for block, done in super().results(call):
                data = wire_format.result_to_bytes(block, done)
                group = int(block.groups[0])
                again = untrusted_replies.validate_reply(data, group, expected, True)
                seen.append({str(partial) for partial in expected})
                yield block, again

    plan = drjax.make_plan(step)(*args)
    run = in_process.compile(plan, block_size=1)
    run.engine = Checking()
    result = run(*args)
    for a, b in zip(result, drjax.backends.reference.compile(plan)(*args), strict=True):
        np.testing.assert_array_equal(a, b)
    assert {"float32[2]", "int8[]"} in seen and {"int32[]"} in seen and len(seen) == 16
    with jax.enable_x64(True):
        wide = drjax.make_plan(drjax.program(clients=2)(drjax.reduce_sum))(np.ones(2))
        file = in_process.compile(wide).file
    assert [*map(str, untrusted_replies.partials_of(file)[0])] == ["float64[]"]


def test_random_changes_of_a_reply():
    """Whatever comes, it is refused or has the planned types: no other error."""
    rng, honest = random.Random(0), reply()
    head, body = header(honest)
    junk = [
        None, True, -1, 2**63, 1.5, "", "3", "int32", [], {}, [[]], {"3": "x"},
        ["float32", [3]], float("inf"), "\ud800", "𝟛",
    ]  # fmt: skip
    refused = 0
    for _ in range(3000):
        data = bytearray(honest)
        kind = rng.randrange(4)
        if kind == 0:  # bytes
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == 1:  # cut, or more of it
            position, more = rng.randrange(len(data)), rng.randbytes(rng.randrange(9))
            data = (
                data[:position] + more
                if rng.random() < 0.5
                else data + more + data[position:]
            )
        else:  # a value in the header
            new = json.loads(json.dumps(head))
            position = new
            while rng.random() < 0.8 and isinstance(position, dict | list) and position:
                keys = (
                    [*position]
                    if isinstance(position, dict)
                    else [*range(len(position))]
                )
                key = rng.choice(keys)
                if not isinstance(position[key], dict | list) or rng.random() < 0.4:
                    position[key] = rng.choice(junk)
                    break
                position = position[key]
            else:
                new[rng.choice(["about", "arrays", "x"])] = rng.choice(junk)
            data = with_header(new, body)
        try:
            done = checked(bytes(data))
        except BadReply as error:
            assert str(error)
            refused += 1
            continue
        assert set(done.failed) <= {GROUP} and done.slices == []
        for result, expected in zip(done.partials, PARTIALS, strict=not done.failed):
            assert (
                result is not None
                and result.dtype == expected.dtype
                and result.shape == expected.shape
            )
    assert refused > 2000


def test_words_of_a_worker_are_made_readable():
    done = untrusted_replies.failure(1, "a\x1b[31m\r\nb\ud800 é" + "x" * 5000)
    text = done.failed[1]
    assert text.startswith("a\\x1b[31m  b\\ud800 éxx") and text.isprintable()
    assert text.endswith("(5012 characters)") and len(text) < 2100
    assert (done.pid, done.seconds) == (0, 0.0)  # the report counts no worker


@pytest.mark.parametrize(
    "content, failed, asks",
    [
        ({"drjax": code_of_stages.NEEDED}, False, True),
        ({"drjax": code_of_stages.NEEDED}, True, False),
        ({"drjax": dict.fromkeys(code_of_stages.NEEDED, "yes")}, False, False),
        ({"drjax": {}}, False, False),
        (None, False, False),
    ],
)
def test_replies_that_ask_for_code(content, failed, asks):
    reply = SimpleNamespace(content=content, has_error=lambda: failed)
    assert code_of_stages.asks(reply) == asks


def test_clients_claim_groups():
    clients, present = Assignment(2), {7, 8, 9}
    assert clients.claim(7, 0, present) is None and clients[0] == 7
    why = clients.claim(8, 0, present)
    assert "client 7 has this one" in str(why) and clients[0] == 7
    for wrong in (2, -1, True, "1", None, 1.0, 2**80, BadReply("it has no 'group'")):
        why = clients.claim(9, wrong, present)
        assert "Each of 0 to 1 must have one client. This is client 9" in str(why)
        assert len(clients.refused()) == 2 and clients[1] is None
    assert not clients.complete([0, 1], present) and clients.complete([0], present)
    assert clients.claim(9, 1, present) is None and clients.complete([0, 1], present)
    assert clients.reclaimable(present) == [] and clients.reclaimable({8}) == [8]
    assert clients.claim(8, 0, {8, 9}) is None and clients[0] == 8
    assert clients.refused() == []


def test_a_client_has_the_group_of_its_latest_claim():
    clients, present = Assignment(3), {5, 6}
    assert clients.claim(5, 0, present) is None
    assert "client 5 has this one" in str(clients.claim(6, 0, present))
    assert clients.reclaimable(present) == []
    assert clients.claim(5, 1, present) is None and clients.claim(5, 1, present) is None
    assert (clients[0], clients[1]) == (None, 5)
    assert not clients.complete([0, 1], present)
    assert clients.reclaimable(present) == [6]
    assert clients.claim(6, 0, present) is None and clients.complete([0, 1], present)
    # Its old data is gone also if its claim is refused; a bool is no group index.
    for client, refused in ((6, 1), (5, True)):
        assert clients.claim(client, refused, present) is not None
    assert (clients[0], clients[1]) == (None, None)
    assert clients.reclaimable(present) == [6]


def test_a_call_that_takes_long_holds_up_no_other():
    calls, end = Background(patience=0.01), threading.Event()

    def stuck():
        assert end.wait(60)
        raise KeyError("the end")

    assert calls.result("stuck", stuck) is None
    patient = Background(patience=60.0)
    assert patient.result("quick", lambda: 5) == 5
    assert calls.result("stuck", lambda: 6) is None  # still the first one
    end.set()
    with pytest.raises(KeyError, match="the end"):
        while True:
            assert calls.result("stuck", stuck) is None
    end.clear()
    assert calls.result("stuck", stuck) is None
    calls.forget("stuck")
    end.set()


def test_clients_that_are_given():
    clients = Assignment(2, [7, 8])
    assert clients.fixed and clients[1] == 8
    text = "The ids of 2 different clients are needed"
    raises(drjax.DrjaxValueError, text, Assignment, 2, [7, 7])
    raises(drjax.DrjaxValueError, text, Assignment, 2, ["7", "8"])
    raises(drjax.DrjaxValueError, "got 1 with 1 different", Assignment, 2, [7])
    raises(drjax.DrjaxValueError, text, Assignment, 2, [])


def test_replies_of_clients_are_decoded_and_checked():
    x = np.zeros((6, 7, 10), np.float32)
    means = lambda x: [drjax.reduce_mean(x, wire=wire) for wire in ("int8", None)]
    plan = drjax.make_plan(drjax.program(clients=6)(means))(x)
    file = in_process.compile(plan).executable.file
    (planned,) = untrusted_replies.partials_of(file)
    reduces = plan.rounds[0].partials
    one = [np.full(p.encoded[1] if p.encoded else p.shape, 0.5, np.float32)
           for p in planned]  # fmt: skip

    def check(partials):
        block = Block(np.array([3], np.int32), np.array([True]), [])
        result = BlockResult(partials, [], {}, 7, 0.5)
        data = wire_format.result_to_bytes(block, result)
        return untrusted_replies.validate_reply(data, 3, planned, True)

    encoded = encode_partials(reduces, one)
    for x in check(encoded).partials:
        np.testing.assert_allclose(decoded(x), 0.5, rtol=1e-6)
    with pytest.raises(untrusted_replies.BadReply, match="but the plan is for uint8"):
        check(one)
    one[0][...] = np.nan
    with pytest.raises(untrusted_replies.BadReply, match="it yields NaN"):
        check(encode_partials(reduces, one))
