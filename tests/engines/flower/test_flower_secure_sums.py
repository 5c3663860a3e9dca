"""Secure sums on Flower: what the server sees, that sums are right, and who is missing.

Covers: drjax.engines.flower.adapter, drjax.engines.flower.secure_sums,
drjax.engines.flower.secure_replies, drjax.engines.flower.secure_masks.
"""

# pyright: reportMissingImports=false

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._extras import needed
from drjax.backends import flower, reference
from drjax.engines.flower import records, secure_masks, secure_sums, untrusted_replies
from tests.engines.flower.clients import (
    Grid,
    as_in_a_server_app,  # noqa: F401
    federation,
)
from tests.helpers.conformance import wait_for
from tests.helpers.raising import raises

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Flower's own
]
N, D = 5, 4096
CONFIGS = "secaggplus_configs"
RANDOM = np.random.RandomState(0)
DATA = RANDOM.randn(9, D).astype(np.float32)


def load(context):
    return DATA[context.node_config["partition-id"]]


class Logged(Grid):
    """A grid that keeps all messages, and whose clients may fall silent or lie.

    Attributes:
      log: For each message its group, what the server sent, and the reply.
      stages: The stage of the protocol of each message that was sent.
      gone: For a stage of the protocol, groups that do not answer from then on.
      lie: `lie(stage, group, reply)` may change a reply.
    """

    def __init__(self, n=N, gone=None, lie=None, load=load):
        super().__init__(load, n)
        self.log: list[tuple[int, Any, Any]] = []
        self.stages: list[str] = []
        self.gone, self.lie, self.left = gone or {}, lie, set()

    def answer(self, message, group, query):
        stage = "query"
        if CONFIGS in message.content:
            stage = message.content[CONFIGS]["stage"]
        self.left |= {*self.gone.get(stage, ())}
        if group in self.left and not query:
            from flwr.app import Error, Message

            return Message(Error(4, "the node is gone"), reply_to=message)
        self.stages.append(stage)
        # The records are copied, as clients take fields out of them.
        sent = {k: record.copy() for k, record in message.content.items()}
        reply = super().answer(message, group, query)
        if self.lie is not None and not reply.has_error():
            self.lie(stage, group, reply)
        self.log.append((group, sent, reply))
        return reply


def plan_of(n=N, min_groups=3, rounds=1):
    """A model is the secure mean of what clients compute; their loss is a plain one."""

    @drjax.program(clients=n)
    def train(model, data):
        def work(model, x):
            return jnp.tanh(model + x), (x > 0).astype(jnp.int32), jnp.mean(x**2)

        def step(model, _):
            y, count, loss = drjax.map_fn(work, (drjax.broadcast(model), data))
            total, count = drjax.reduce_sum(
                (y, count), secure=True, min_groups=min_groups
            )
            return total / n, (count, drjax.reduce_mean(loss))

        return jax.lax.scan(step, model, length=rounds)

    kind = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return drjax.make_plan(train)(kind(D), kind(n, D))


MODEL = np.zeros(D, np.float32)
TANH = 2 * 2**-23  # by how much one of numpy may differ from one of XLA


def check_sums(results, good, n=N):
    """The results of one round are those of the groups in `good`."""
    model, (count, loss) = results
    y = np.tanh(DATA[good], dtype=np.float32)
    bound = len(good) * secure_sums.step(n, 8.0) / n
    assert np.abs(model - y.sum(0, dtype=np.float64) / n).max() < bound + TANH
    np.testing.assert_array_equal(count[0], (DATA[good] > 0).sum(0))
    np.testing.assert_allclose(loss[0], (DATA[good] ** 2).mean(), rtol=1e-5)


def numbers_in(x):
    """All arrays in a Flower record dict, and its fields of bytes, as they are."""
    for record in x.values():
        for value in record.values():
            values = value if isinstance(value, list) else [value]
            for item in values:
                data = getattr(item, "data", item)  # of an array
                if isinstance(data, bytes):
                    yield data


def test_the_server_sees_masked_values_only():
    grid = Logged()
    results = flower.compile(plan_of(), grid, start=0.5)(MODEL, flower.Clients())
    check_sums(results, [*range(N)])
    masked, everything = {}, []
    for group, sent, reply in grid.log:
        for data in (*numbers_in(sent), *numbers_in(reply.content)):
            everything.append((group, data))
        if CONFIGS in reply.content and "masked_params" in reply.content[CONFIGS]:
            _, vector = reply.content[CONFIGS]["masked_params"]
            masked[group] = np.frombuffer(vector[-8 * 2 * D :], np.int64)
            # What is not to be masked: the loss alone.
            plain = records.from_record(reply.content[records.ARRAYS])
            assert [x.shape for x in plain] == [()]
    assert {*masked} == {*range(N)}
    plain = {i: np.concatenate([np.tanh(DATA[i]), DATA[i] > 0]) for i in range(N)}
    step = secure_sums.step(N, 8.0)
    for i, secret in plain.items():
        # Neither the numbers, nor what is added up of them, are in any message.
        codes = np.round((secret.astype(np.float64) + 8) / step)
        pieces = [
            x[:8].tobytes()
            for x in (DATA[i], secret[:D].astype(np.float32), codes.astype(np.int64))
        ]
        assert not any(p in data for p in pieces for _, data in everything)
        for j, vector in masked.items():
            # 2 D numbers: a correlation of 0.08 is more than seven deviations.
            assert not np.any(vector == codes)
            for x in (secret, codes % 2**16):
                assert abs(np.corrcoef(vector[:D], x[:D])[0, 1]) < 0.1, (i, j)
    # Masked values are spread evenly over all integers modulo 2^32.
    every = np.concatenate([*masked.values()]) / 2**32
    assert 0 <= every.min() and every.max() < 1
    histogram, _ = np.histogram(every, 16, (0, 1))
    assert np.abs(histogram / histogram.mean() - 1).max() < 0.15


def test_rounds_in_a_loop():
    plan = plan_of(rounds=2)
    model, (counts, losses) = flower.compile(plan, Logged(), start=0.5)(
        MODEL, flower.Clients()
    )
    expected = reference.compile(plan)(MODEL, DATA[:N])
    np.testing.assert_allclose(model, expected[0], atol=1e-6)
    np.testing.assert_array_equal(counts, expected[1][0])
    np.testing.assert_allclose(losses, expected[1][1], rtol=1e-5)


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors"])
def test_groups_that_are_gone(stage):
    grid = Logged(gone={stage: [1]})
    run = flower.compile(plan_of(), grid, start=0.5, on_error="drop")
    check_sums(run(MODEL, flower.Clients()), [0, 2, 3, 4])
    assert [*run.report.dropped] == [1]
    assert "the node is gone (code 4)" in run.report.dropped[1]
    run = flower.compile(plan_of(), Logged(gone={stage: [1]}), start=0.5)
    with pytest.raises(drjax.EngineError, match="the node is gone") as e:
        run(MODEL, flower.Clients())
    assert e.value.group == 1


def test_a_client_that_never_answers():
    grid = Logged()
    grid.silent = [1]
    options = {"timeout": 2.0, "on_error": "drop"}
    run = flower.compile(plan_of(), grid, start=0.5, **options)
    check_sums(run(MODEL, flower.Clients()), [0, 2, 3, 4])
    assert "took longer than 2.0 s" in run.report.dropped[1]


def test_a_client_that_is_gone_after_its_masked_value():
    run = flower.compile(plan_of(), Logged(gone={"unmask": [1]}), start=0.5)
    check_sums(run(MODEL, flower.Clients()), [*range(N)])


@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors"])
def test_too_few_groups_abort(stage):
    grid = Logged(gone={stage: [0, 1]})
    run = flower.compile(plan_of(min_groups=4), grid, start=0.5, on_error="drop")
    text = "is not revealed: 3 groups are left, and it needs 4: min_groups=4"
    raises(drjax.EngineError, text, run, MODEL, flower.Clients())
    # No client was asked for the masks.
    assert "unmask" not in grid.stages


def test_half_of_the_groups_are_too_few():
    grid = Logged(gone={"collect_masked_vectors": [0, 1, 4]})
    run = flower.compile(plan_of(min_groups=2), grid, start=0.5, on_error="drop")
    text = (
        "2 groups are left, and it needs 3: min_groups=2, and more than half of the 5"
    )
    raises(drjax.EngineError, text, run, MODEL, flower.Clients())


def test_too_few_shares_of_masks():
    grid = Logged(gone={"unmask": [0, 1, 2]})
    run = flower.compile(plan_of(), grid, start=0.5, on_error="drop")
    text = "too few clients sent shares of the masks"
    raises(drjax.EngineError, text, run, MODEL, flower.Clients())


def test_groups_without_clients():
    run = flower.compile(plan_of(), Logged(4), start=0.2, on_error="drop")
    check_sums(run(MODEL, flower.Clients()), [*range(4)])
    assert "no client has the group" in run.report.dropped[4]


def test_two_groups():
    run = flower.compile(plan_of(2, 2), Logged(2), start=0.5)
    check_sums(run(MODEL, flower.Clients()), [0, 1], 2)


def test_a_number_out_of_range():
    def too_large(context):
        x = load(context)
        return x if context.node_config["partition-id"] != 3 else x + np.nan

    grid = Logged(load=too_large)
    run = flower.compile(plan_of(), grid, start=0.5, on_error="drop")
    check_sums(run(MODEL, flower.Clients()), [0, 1, 2, 4])
    assert "is not in the range of 8, or no number" in run.report.dropped[3]
    run = flower.compile(plan_of(), Logged(), start=0.5, secure_range=0.3)
    with pytest.raises(drjax.EngineError, match="not in the range of 0.5, or no"):
        run(MODEL, flower.Clients())

    # The client's own data cannot be read.
    def broken(context):
        raise OSError("the disk is gone")

    run = flower.compile(plan_of(), Logged(load=broken), start=0.5)
    with pytest.raises(drjax.EngineError, match="OSError: the disk is gone"):
        run(MODEL, flower.Clients())


def test_a_larger_range_is_as_precise_as_documented():
    n, r = 5, 1000.0
    total = drjax.program(clients=n)(lambda x: drjax.reduce_sum(x, secure=True))
    plan = drjax.make_plan(total)(jax.ShapeDtypeStruct((n, D), jnp.float32))
    big = lambda context: 200 * load(context)
    run = flower.compile(plan, Logged(load=big), start=0.5, secure_range=r)
    error = np.abs(run(flower.Clients()) - 200 * DATA[:n].sum(0, dtype=np.float64))
    step = secure_sums.step(n, r)
    assert step == 1024 / 2 ** (30 - math.ceil(math.log2(n)))
    # And the rounding of the result to float32.
    assert error.max() < n * step + 1000 * 2**-23


def change(stage, name, value):
    """A lie: the client of group 2 sends this in a stage."""

    def lie(now, group, reply):
        if now == stage and group == 2:
            fields = reply.content[CONFIGS]
            new = value(fields[name]) if callable(value) else value
            if new is None:
                del fields[name]
            else:
                fields[name] = new

    return lie


@pytest.mark.parametrize(
    "stage, name, value, text",
    [
        ("setup", "pk1", 3, "are not bytes"),
        ("setup", "pk2", b"x" * 5000, "are not bytes, of 4096 at most"),
        ("setup", "pk1", lambda _: None, "it has no 'pk1'"),
        ("share_keys", "dsts", lambda x: [x[0]] * len(x), "not the clients that take"),
        ("share_keys", "ctxts", lambda x: x[1:], "has not 4 items"),
        ("collect_masked_vectors", "masked_params", lambda x: x[1:], "not 2 items"),
        (
            "collect_masked_vectors",
            "masked_params",
            lambda x: [x[0], x[1] + b"0" * 8],
            "its masked value has",
        ),
        (
            "collect_masked_vectors",
            "masked_params",
            lambda x: [x[0], x[0]],
            "is no array of 8192 integers",
        ),
        ("unmask", "nids", lambda x: [*x[1:], 7], "are not the clients"),
    ],
)
def test_replies_that_do_not_fit(stage, name, value, text):
    grid = Logged(lie=change(stage, name, value))
    run = flower.compile(plan_of(), grid, start=0.5, on_error="drop")
    results = run(MODEL, flower.Clients())
    if stage == "unmask":
        # Its value is in the sum; the others' shares are enough.
        check_sums(results, [*range(N)])
        assert not run.report.dropped
    else:
        check_sums(results, [0, 1, 3, 4])
        assert text in run.report.dropped[2]


def test_clients_check_the_demand_themselves(monkeypatch):
    honest = secure_sums.least_groups

    def too_few(partials, clients):
        return 2 if clients else honest(partials, clients)

    monkeypatch.setattr(secure_sums, "least_groups", too_few)
    run = flower.compile(plan_of(), Logged(), start=0.5)
    text = "the server would reveal a sum of 2 groups, but the plan demands 3"
    with pytest.raises(drjax.EngineError, match=text):
        run(MODEL, flower.Clients())


def test_clients_send_no_secure_sum_without_the_protocol(monkeypatch):
    run = flower.compile(plan_of(), Logged(), start=0.5)
    honest = untrusted_replies.partials_of

    def asks_for_all(file):
        return [[replace(p, secure=0) for p in stage] for stage in honest(file)]

    monkeypatch.setattr(untrusted_replies, "partials_of", asks_for_all)
    with pytest.raises(drjax.EngineError, match="a secure sum, which is to be masked"):
        run(MODEL, flower.Clients())


def test_a_round_with_a_fold():
    """The states of a fold are sent as they are, the secure sum is masked."""
    n = 4

    @drjax.program(clients=n)
    def f(x):
        fold = drjax.reduce(jnp.logaddexp, drjax.map_fn(jnp.sum, x), -jnp.inf)
        return drjax.reduce_sum(drjax.map_fn(jnp.sin, x), secure=True), fold

    plan = drjax.make_plan(f)(jax.ShapeDtypeStruct((n, D), jnp.float32))
    run = flower.compile(plan, Logged(n), start=0.5)
    total, fold = run(flower.Clients())
    x = DATA[:n].astype(np.float64)
    np.testing.assert_allclose(total, np.sin(x).sum(0), atol=n * secure_sums.step(n, 8))
    np.testing.assert_allclose(fold, np.log(np.exp(x.sum(1)).sum()), rtol=1e-5)


def test_what_cannot_be_masked():
    n = 3
    three = drjax.program(clients=n)
    x = np.zeros((n, 2), np.float32)

    def both(reduce):
        def fn(x):
            y = drjax.map_fn(jnp.sin, x)
            return drjax.reduce_sum(y, secure=True), reduce(y)

        return fn

    folded = lambda y: drjax.reduce(jnp.logaddexp, y, jnp.full(2, -jnp.inf))
    for op, reduce in {"max": drjax.reduce_max, "fold": folded}.items():
        plan = drjax.make_plan(three(both(reduce)))(x)
        text = f"and also its {op}, in which the server would see each client's"
        raises(drjax.DrjaxValueError, text, flower.compile, plan, None)
    total = three(lambda x: drjax.reduce_sum(x, secure=True))
    plan = drjax.make_plan(total)(x.astype(np.complex64))
    text = "are of real numbers"
    raises(drjax.DrjaxValueError, text, flower.compile, plan, None)
    plan = drjax.make_plan(total)(x)
    wrongs: tuple[Any, ...] = 0.0, -1, float("inf"), float("nan"), "8", True
    for wrong in wrongs:
        compiling = lambda r=wrong: flower.compile(plan, None, secure_range=r)
        raises(drjax.DrjaxValueError, "secure_range must be a positive", compiling)


# ---------------------------------------------------------------------------------
# Masks, ranges, and clients that lie


def test_masks_are_of_the_whole_secret():
    """Secrets that Flower folds to one seed have masks that have nothing in common."""
    secret = bytes(range(32))
    swapped = secret[4:8] + secret[:4] + secret[8:]
    a, b = (
        secure_masks.masks(x, 2**32, [(1,), (8, 512)])[1] for x in (secret, swapped)
    )
    assert a.shape == (8, 512) and a.dtype == np.int64
    assert 0 <= min(a.min(), b.min()) and max(a.max(), b.max()) < 2**32
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.1
    # Of each bit about a half are set.
    for bit in range(32):
        assert abs(np.mean(a >> bit & 1) - 0.5) < 0.05
    with pytest.raises(ValueError, match="masks are modulo 2"):
        secure_masks.masks(secret, 2**16, [(1,)])


def test_both_ends_draw_them(monkeypatch):
    import sys

    drawn = []
    honest = secure_masks.hashlib.shake_256
    monkeypatch.setattr(
        secure_masks.hashlib, "shake_256", lambda x: drawn.append(x) or honest(x)
    )
    for name in (secure_masks.CLIENT, secure_masks.SERVER):
        needed(name, "flower", "Flower")
        fail = lambda *_: pytest.fail("a mask of 32 bits")
        monkeypatch.setattr(sys.modules[name], "pseudo_rand_gen", fail)
    check_sums(
        flower.compile(plan_of(), Logged(), start=0.5)(MODEL, flower.Clients()),
        [*range(N)],
    )
    # Each client one of its own and four pairwise ones; the server those of clients.
    assert len(drawn) == N * N + N and len({*drawn}) == N + N * (N - 1) // 2


def test_another_release_of_flower_is_refused():
    with pytest.raises(drjax.EngineError, match="This release of Flower draws the mas"):
        secure_masks._copy(load, pseudo_rand_gen=None)


def test_each_sum_has_its_own_range():
    n = 5
    small = (1e-3 * DATA[:n]).astype(np.float32)

    @drjax.program(clients=n)
    def f(x):
        grad, count = drjax.map_fn(lambda x: (x, jnp.full((), 600.0)), x)
        grad = drjax.reduce_sum(grad, secure=True, bound=0.01)
        return grad, drjax.reduce_sum(count, secure=True, bound=1000)

    plan = drjax.make_plan(f)(jax.ShapeDtypeStruct((n, D), jnp.float32))
    assert "numbers up to 0.01" in str(plan)
    of_context = lambda context: small[context.node_config["partition-id"]]
    grad, count = flower.compile(plan, Logged(load=of_context), start=0.5)(
        flower.Clients()
    )
    assert count == 3000
    error = np.abs(grad - small.sum(0, dtype=np.float64)).max()
    assert error < n * secure_sums.step(n, 0.01) + 1e-9
    big = lambda context: 20 * of_context(context)
    run = flower.compile(plan, Logged(load=big), start=0.5)
    with pytest.raises(drjax.EngineError, match="not in the range of 0.015625, or no"):
        run(flower.Clients())


def test_gradients_are_masked():
    n = 4

    @drjax.program(clients=n)
    def loss(model, x):
        square = lambda m, x: jnp.sum((m * x - 1) ** 2) / D
        y = drjax.map_fn(square, (drjax.broadcast(model), x))
        return drjax.reduce_sum(y, secure=True, min_groups=3)

    kind = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    grid = Logged(n)
    plan = drjax.make_plan(jax.value_and_grad(loss))(kind(D), kind(n, D))
    value, grad = flower.compile(plan, grid, start=0.5)(MODEL + 1, flower.Clients())
    expected = jax.value_and_grad(loss)(MODEL + 1, DATA[:n])
    np.testing.assert_allclose(value, expected[0], atol=1e-6)
    np.testing.assert_allclose(grad, expected[1], atol=1e-6)
    masked = 0
    for _, _, reply in grid.log:
        if CONFIGS in reply.content and "masked_params" in reply.content[CONFIGS]:
            masked += 1
            assert len(reply.content[records.ARRAYS]) == 0
    assert masked == n


def array(change):
    """A lie about one of the two masked arrays."""
    import io

    def lie(data):
        x = change(np.load(io.BytesIO(data)))
        buffer = io.BytesIO()
        np.save(buffer, x)
        return buffer.getvalue()

    return lie


LEVELS = secure_sums._levels(N)


@pytest.mark.parametrize(
    "stage, name, value, text",
    [
        (
            "collect_masked_vectors", "masked_params",
            lambda x: [array(lambda a: (a - N * LEVELS) % 2**32)(x[0]), x[1]],
            "weights add up to 0, not to",
        ),
        (
            "collect_masked_vectors", "masked_params",
            lambda x: [array(lambda a: (a + 1) % 2**32)(x[0]), x[1]],
            "weights add up to",
        ),
        (
            "collect_masked_vectors", "masked_params",
            lambda x: [x[0], array(lambda v: (v + 3 * 2**30) % 2**32)(x[1])],
            "it is larger than the range of all numbers allows",
        ),
        ("unmask", "shares", lambda x: [b"y" * 34] * len(x), "shares of a mask do not"),
    ],
)  # fmt: skip
def test_sums_that_cannot_be_right(stage, name, value, text):
    grid = Logged(lie=change(stage, name, value))
    run = flower.compile(plan_of(), grid, start=0.5, on_error="drop")
    with pytest.raises(drjax.EngineError, match=text) as caught:
        run(MODEL, flower.Clients())
    assert "one of 5 clients has sent a wrong mask" in str(caught.value)
    assert not run.report.dropped  # no one is blamed


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("pk1", b"x" * 100, "its pk1 is no public key"),
        ("pk2", b"", "its pk2 is no public key"),
    ],
)
def test_a_bad_key_is_its_clients_failure(name, value, text):
    grid = Logged(lie=change("setup", name, value))
    run = flower.compile(plan_of(), grid, start=0.5, on_error="drop")
    check_sums(run(MODEL, flower.Clients()), [0, 1, 3, 4])
    assert [*run.report.dropped] == [2] and text in run.report.dropped[2]


def test_a_repeated_key_is_its_clients_failure():
    def lie(now, group, reply):
        if now == "setup" and group == 2:
            reply.content[CONFIGS]["pk1"] = reply.content[CONFIGS]["pk2"]

    run = flower.compile(plan_of(), Logged(lie=lie), start=0.5, on_error="drop")
    check_sums(run(MODEL, flower.Clients()), [0, 1, 3, 4])
    assert "or that of another client" in run.report.dropped[2]


def test_a_share_that_cannot_be_decrypted_names_its_sender():
    lie = change("share_keys", "ctxts", lambda x: [b"x" * 50, *x[1:]])
    run = flower.compile(plan_of(), Logged(lie=lie), start=0.5, on_error="drop")
    run(MODEL, flower.Clients())
    (why,) = run.report.dropped.values()
    assert "node 102 sent it a share that it cannot decrypt" in why


def test_clients_refuse_to_reveal_both_secrets():
    from flwr.app import ConfigRecord

    fields = ConfigRecord({"active_nids": [1, 2, 3], "dead_nids": [3]})
    with pytest.raises(ValueError, match="asks for both secrets of node 3"):
        secure_sums._check_unmasking(fields)


def test_keys_and_shares_are_deleted():
    state = lambda grid, i: grid.contexts[i].state.config_records.keys()
    grid = Logged(gone={"unmask": [1]})
    run = flower.compile(plan_of(), grid, start=0.5)
    run(MODEL, flower.Clients())
    assert "secaggplus_state" not in state(grid, 0)
    # The client that was not asked has them until the next message.
    assert "secaggplus_state" in state(grid, 1)
    grid.gone, grid.left = {}, set()
    run(MODEL, flower.Clients())
    assert "secaggplus_state" not in state(grid, 1)


# ---------------------------------------------------------------------------------
# Real processes


def test_supernodes(tmp_path):
    from examples.flower.drjax_app.client import load
    from examples.flower.plan import step

    def secure_step(n):
        @drjax.program(clients=n)
        def step(model, data):
            def work(model, x, y):
                loss = lambda m: jnp.mean((x @ m - y) ** 2)
                value, grad = jax.value_and_grad(loss)(model)
                return model - 0.2 * grad, value / 8  # in the range of 8

            outputs = drjax.map_fn(work, (drjax.broadcast(model), *data))
            model, loss = drjax.reduce_sum(outputs, secure=True, min_groups=n)
            return model / n, 8 * loss / n

        return step

    n, model = 3, np.zeros(3, np.float32)
    slices = [load(SimpleNamespace(node_config={"partition-id": i})) for i in range(n)]
    data = tuple(np.stack(column) for column in zip(*slices, strict=True))
    drjax.make_plan(secure_step(n))(model, data).save(tmp_path / "step.drjax")
    output = tmp_path / "model.npz"
    with federation(tmp_path, "insecure = true") as processes:
        processes.link("--insecure")
        for i in range(n):
            processes.node("--insecure", group=i)
        plan = str(tmp_path / "step.drjax")
        processes.run_example(plan=plan, output=str(output), rounds=2)
        wait_for(output.exists)
    with np.load(output) as file:
        result, history = file["model"], json.loads(str(file["history"]))
    expected = reference.compile(drjax.make_plan(step(n))(model, data))
    for a_round in history:
        model, loss = expected(model, data)
        np.testing.assert_allclose(a_round["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(result, model, atol=1e-6)
