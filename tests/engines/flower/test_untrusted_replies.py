"""Replies of untrusted workers, and which client has which group: no engine needed.

Covers: drjax.engines.flower.untrusted_replies, drjax.engines.flower.assignment,
drjax.engines.flower.background, drjax.engines.flower.code_of_stages,
drjax.engines.flower.records.
"""

import io
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
from drjax.engines.core.encoded_partials import decoded, encode_partials
from drjax.engines.core.messages import BlockResult
from drjax.engines.flower import code_of_stages, records, untrusted_replies
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


def arrays(values):
    """What Flower's `ArrayRecord` of these arrays holds."""
    return {
        str(i): SimpleNamespace(dtype=x[0], shape=x[1], stype=x[2], data=x[3])
        for i, x in enumerate(map(records.fields_of, values))
    }


def message(fields, **more):
    """A reply with these records: fields, and others by name."""
    return SimpleNamespace(content={records.FIELDS: fields} | more)


def reply(values=VALUES, **fields):
    own = {} if values is None else {records.ARRAYS: arrays(values)}
    return message({"pid": 7, "seconds": 0.5} | fields, **own)


def reply_of(result):
    """A reply with the result of a group, as its worker makes it."""
    coded = [getattr(x, "codes", x) for x in result.partials]
    return reply(coded, pid=result.pid, seconds=result.seconds)


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


def of_array(**fields):
    """A reply whose first array has other fields."""
    data = reply()
    vars(data.content[records.ARRAYS]["0"]).update(fields)
    return data


def changed(i, value):
    return reply([value if i == j else x for j, x in enumerate(VALUES)])


NAN, BF16 = np.float32(np.nan), ml_dtypes.bfloat16


def test_an_honest_reply():
    done = checked(reply())
    for result, value in zip(done.partials, VALUES, strict=True):
        assert result is not None and result.dtype == value.dtype
        np.testing.assert_array_equal(result, value)
    assert (done.slices, done.failed, done.pid, done.seconds) == ([], {}, 7, 0.5)


def test_an_honest_failure():
    done = checked(reply(None, failed="it has no data", pid=0))
    assert done.failed == {GROUP: "it has no data"} and not done.partials


HEADER = records.npy_header(np.dtype(np.float32), (3,))
BYTES = VALUES[0].tobytes()


@pytest.mark.parametrize(
    "data, text",
    [
        (None, "it has no record 'drjax': AttributeError"),
        (SimpleNamespace(content=[b"x"]), "it has no record 'drjax': TypeError"),
        (SimpleNamespace(content={}), "it has no record 'drjax': KeyError"),
        (message(5), "it has no record 'drjax': TypeError"),
        (message({}), "it must have pid and seconds, or failed, but has "),
        (message({"pid": 7}), "but has 'pid'"),
        (message({"pid": 7, "seconds": 0.5}), "it has no record 'drjax.arrays': KeyE"),
        (reply(more=1), "but has 'pid', 'seconds', 'more'"),
        (reply(group=1), "but has 'pid', 'seconds', 'group'"),
        (reply(pid=-1), "its process is -1"),
        (reply(pid=True), "its process is True"),
        (reply(pid=2**70), "its process is 1180591620717411303424"),
        (reply(pid="7"), "its process is '7'"),
        (reply(seconds=-1), "it took -1 seconds"),
        (reply(seconds=1e300), "it took 1e+300 seconds"),
        (reply(seconds=float("nan")), "it took nan seconds"),
        (reply(seconds=None), "it took None seconds"),
        (reply(None, failed=[]), "its failure is [], which is no text"),
        (reply(None, failed=b"evil"), "its failure is b'evil', which is no text"),
        (reply(None, failed=None), "its failure is None, which is no text"),
        (reply(failed="no"), "it has values of a group that failed"),
        (reply([], failed="no"), "it has values of a group that failed"),
        (reply([]), "it has 0 arrays, but the plan is for 4"),
        (reply(VALUES[:3]), "it has 3 arrays, but the plan is for 4"),
        (reply([*VALUES, NAN]), "it has 5 arrays, but the plan is for 4"),
        (changed(0, np.ones(7, np.float32)), "the mean of model is float32[7]"),
        (changed(0, np.ones((1, 3), np.float32)), "the mean of model is float32[1, 3]"),
        (changed(0, np.float32(1e6)), "float32[], but the plan is for float32[3]"),
        (changed(0, np.ones(3)), "the mean of model is float64[3]"),
        (changed(0, np.ones(3, np.int32)), "the mean of model is int32[3]"),
        (changed(0, np.ones(3, np.complex64)), "the mean of model is complex64[3]"),
        (changed(0, np.array(["abc"] * 3)), "the mean of model is <U3[3]"),
        (changed(1, np.float16(1)), "the max of loss is float16[]"),
        (changed(1, np.uint16(1)), "the max of loss is uint16[]"),
        (changed(0, VALUES[0] * NAN), "it yields NaN as model"),
        (changed(0, VALUES[0] + np.inf), "it yields an infinity as model"),
        (changed(0, VALUES[0] - np.inf), "it yields an infinity as model"),
        (changed(1, BF16(np.nan)), "it yields NaN as loss"),
        (changed(1, BF16(np.inf)), "it yields an infinity as loss"),
        (reply([VALUES[1], VALUES[0], *VALUES[2:]]), "the mean of model is bfloat16[]"),
        (of_array(dtype="O"), "the mean of model is O[3]"),
        (of_array(dtype="f4,f4"), "the mean of model is f4,f4[3]"),
        (of_array(dtype=None), "the mean of model is None[3]"),
        (of_array(dtype=np.dtype("f4,f4")), "the mean of model is [('f0', '<f4'),"),
        (of_array(shape=(-1,)), "the mean of model is float32[-1]"),
        (of_array(shape=3), "the mean of model is float323"),
        (of_array(shape=[3]), "the mean of model is float32[3], but the plan is for"),
        (of_array(shape=(2**62, 4)), "float32[4611686018427387904, 4]"),
        (of_array(stype="pickle"), "the mean of model is not written as float32[3] is"),
        (of_array(stype=None), "the mean of model is not written as float32[3] is"),
        (of_array(data=None), "the mean of model is not written as float32[3] is"),
        (of_array(data=BYTES), "the mean of model is not written as float32[3] is"),
        (of_array(data=HEADER[:40]), "the mean of model is not written as"),
        (of_array(data=bytearray(HEADER + BYTES)), "the mean of model is not written"),
        (of_array(data=HEADER), "model has 0 bytes, but the plan is for 12"),
        (of_array(data=HEADER + BYTES[:-1]), "has 11 bytes, but the plan is for 12"),
        (of_array(data=HEADER + BYTES + b"0"), "has 13 bytes, but the plan is for 12"),
        (message({"pid": 7, "seconds": 0.5}, **{records.ARRAYS: dict.fromkeys(
            "0123", 1.0)}), "the mean of model is no array"),
        (message({"pid": 7, "seconds": 0.5}, **{records.ARRAYS: dict(zip(
            "1023", arrays(VALUES).values(), strict=True))}),
            "array 0 has the name '1'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(data, text):
    with pytest.raises(BadReply) as e:
        checked(data)
    assert text in str(e.value)


def test_bytes_that_are_no_booleans():
    data = reply()
    flags = data.content[records.ARRAYS]["2"]
    flags.data = flags.data[:-2] + b"\2\0"
    raises_bad(data, "flags has bytes that are neither true nor false")


DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bfloat16", "int4",
    "uint4", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_of_every_dtype_and_order(name):
    """What numpy's files have no name for is written as bits."""
    dtype = np.dtype(name)
    square = np.arange(6).reshape(2, 3).astype(dtype)
    for x in (square, square.T, square[:, ::2], square[1, 1], square[:0]):
        x, planned = np.asarray(x), Partial("sum", "x", np.shape(x), dtype)
        data = reply([x])
        done = untrusted_replies.validate_reply(data, GROUP, [planned], True)
        (result,) = done.partials
        assert result.dtype == dtype and result.shape == x.shape
        assert result.tobytes() == x.tobytes()
        (array,) = data.content[records.ARRAYS].values()
        read = np.load(io.BytesIO(array.data), allow_pickle=False)
        assert read.shape == x.shape and read.tobytes() == x.tobytes()


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
                data, group = reply_of(done), int(block.groups[0])
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
    rng = random.Random(0)
    junk = [
        None, True, -1, 2**63, 1.5, "", "3", "int32", [], {}, [[]], {"3": "x"}, (3,),
        ["float32", [3]], float("inf"), "\ud800", "𝟛", b"", b"\x93NUMPY", object(),
    ]  # fmt: skip
    refused = 0
    for _ in range(3000):
        data = reply()
        fields, sent = data.content[records.FIELDS], data.content[records.ARRAYS]
        array = sent[rng.choice([*sent])]
        kind = rng.randrange(5)
        if kind == 0:  # bytes
            changed = bytearray(array.data)
            for _ in range(rng.randint(1, 6)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            array.data = bytes(changed)
        elif kind == 1:  # cut, or more of it
            position = rng.randrange(len(array.data))
            more, end = rng.randbytes(rng.randrange(9)), rng.random() < 0.5
            array.data = array.data[:position] + more + array.data[position:] * end
        elif kind == 2:
            setattr(array, rng.choice([*vars(array)]), rng.choice(junk))
        elif kind == 3:
            fields[rng.choice(["pid", "seconds", "failed", "x"])] = rng.choice(junk)
        else:  # in place of a record, or of an array, or under another name
            where: Any = rng.choice([data.content, sent, sent, fields])
            name = rng.choice([*where, "x", "9"])
            if rng.random() < 0.3 and name in where:
                where[rng.choice(["x", "3", 5, ""])] = where.pop(name)
            else:
                where[name] = rng.choice(junk)
        try:
            done = checked(data)
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
        data = reply_of(BlockResult(partials, [], {}, 7, 0.5))
        return untrusted_replies.validate_reply(data, 3, planned, True)

    encoded = encode_partials(reduces, one)
    for x in check(encoded).partials:
        np.testing.assert_allclose(decoded(x), 0.5, rtol=1e-6)
    with pytest.raises(untrusted_replies.BadReply, match="but the plan is for uint8"):
        check(one)
    one[0][...] = np.nan
    with pytest.raises(untrusted_replies.BadReply, match="it yields NaN"):
        check(encode_partials(reduces, one))
