"""What code Flower's clients get: the groups' stages only, once; what they refuse.

Covers: drjax.engines.flower.code_of_stages.
"""

# pyright: reportMissingImports=false

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import flower, reference
from drjax.engines.flower import code_of_stages, records
from tests.engines.flower.clients import (
    Grid,
    as_in_a_server_app,  # noqa: F401
)
from tests.engines.flower.messages import Recorded, arrays_of
from tests.helpers.raising import raises

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Flower's own
]
N, D = 3, 50
DATA = np.random.RandomState(0).rand(N, D).astype(np.float32)
SECRET = np.random.RandomState(5).rand(D).astype(np.float32)
MODEL = np.zeros(D, np.float32)


def load(context):
    return DATA[context.node_config["partition-id"]]


@drjax.program(clients=N)
def train(model, data):
    """Two steps; the server has numbers of its own, on which it validates the model."""

    def step(model, _):
        y = drjax.map_fn(lambda m, x: jnp.sin(x - m), (drjax.broadcast(model), data))
        model = model + drjax.reduce_mean(y)
        return model, jnp.mean((model - SECRET) ** 2)

    return jax.lax.scan(step, model, length=2)


def plan_of(program=train):
    kind = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return drjax.make_plan(program)(kind(D), kind(N, D))


def codes_of(messages):
    """Of each request whether it has code."""
    return ["code" in fields for kind, fields in messages if kind == "train"]


def check(run, plan):
    expected = reference.compile(plan)(MODEL, DATA)
    for a, b in zip(run(MODEL, flower.Clients()), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_clients_get_the_code_of_groups_once():
    plan, grid = plan_of(), Recorded(Grid(load, N))
    run = flower.compile(plan, grid, start=0.5)
    check(run, plan)
    assert codes_of(grid.messages) == [True] * N + [False] * N
    check(run, plan)
    assert codes_of(grid.messages) == [True] * N + [False] * 3 * N
    for kind, fields in grid.messages:
        arrays = [*fields.get(records.SHARED, []), *arrays_of(fields)]
        sent = [x for x in fields.values() if isinstance(x, bytes)]
        assert not any(SECRET.tobytes() in x for x in (*sent, *map(bytes, arrays)))
        # A request without code is its values, and little else.
        if kind == "train":
            assert [x.nbytes for x in arrays] == [MODEL.nbytes]
            assert len(fields["request"]) < 1000
    assert len(flower.stage_hashes(plan)) == 1
    # The ledger knows what was sent.
    code = {len(f["code"]) for _, f in grid.messages if "code" in f}
    ledger = plan.communication(code=True)
    assert code == {ledger.code} and plan.communication().code is None
    assert str(ledger).endswith(f"code: {ledger.code:,} bytes to each client, once")


def test_a_client_that_was_started_again_asks_for_it():
    plan, grid = plan_of(), Recorded(Grid(load, N))
    run = flower.compile(plan, grid, start=0.5)
    check(run, plan)
    grid.contexts[1].state.config_records.pop("drjax_code")
    grid.messages.clear()
    check(run, plan)
    assert sum(codes_of(grid.messages)) == 1
    needs = [fields for kind, fields in grid.messages if "needs" in fields]
    assert len(needs) == 1


def test_secure_sums_ask_for_it_too():
    secure = drjax.program(clients=N)(
        lambda m, x: m + drjax.reduce_sum(x, secure=True, min_groups=2)
    )
    plan, grid = plan_of(secure), Recorded(Grid(load, N))
    run = flower.compile(plan, grid, start=0.5)
    for lost in (False, True):
        if lost:
            grid.contexts[2].state.config_records.pop("drjax_code")
        total = run(MODEL, flower.Clients())
        np.testing.assert_allclose(total, DATA.sum(0), atol=1e-6)
    assert sum(codes_of(grid.messages)) == N + 1


def test_a_client_that_always_asks_has_failed():
    class Forgetful(Grid):
        def answer(self, message, group, query):
            if group == 1 and group in self.contexts:
                self.contexts[1].state.config_records.pop("drjax_code", None)
                if not query:
                    fields = message.content["drjax"]
                    del fields["code"]
            return super().answer(message, group, query)

    run = flower.compile(plan_of(), Forgetful(load, N), start=0.5, on_error="drop")
    run(MODEL, flower.Clients())
    text = "it must have pid and seconds, or failed, but has 'needs'"
    assert text in run.report.dropped[1]


def grid_of(**options):
    grid = Grid(load, N)
    grid.app = flower.client(load, **options)
    return grid


def test_an_owner_lists_the_code_that_may_run():
    plan = plan_of()
    hashes = flower.stage_hashes(plan)
    check(flower.compile(plan, grid_of(stages=hashes), start=0.5), plan)
    run = flower.compile(plan, grid_of(stages=["0" * 64]), start=0.5)
    with pytest.raises(drjax.EngineError, match="the owner of this client does not al"):
        run(MODEL, flower.Clients())
    text = "stages= as a list of hashes, got one text"
    raises(drjax.DrjaxTypeError, text, lambda: flower.client(load, stages="0" * 64))
    text = "stage_hashes needs a drjax.plan.Plan, got bytes"
    raises(drjax.DrjaxTypeError, text, flower.stage_hashes, b"plan")


def test_code_of_another_hash_does_not_run():
    (hash_,) = flower.stage_hashes(plan_of())
    fields = {"stage": hash_, "stages": [hash_], "code": b"another"}
    with pytest.raises(ValueError, match="the code that was sent is not that of the"):
        code_of_stages.received(fields, {}, None)
    store = {"old": b"1", hash_: b"2"}
    del fields["code"]
    assert code_of_stages.received(fields, store, None) == (hash_, b"2")
    assert [*store] == [hash_]


def test_an_owner_demands_secure_sums():
    text = "the owner of this client demands secure sums of 3 groups at least, and the"
    run = flower.compile(plan_of(), grid_of(min_groups=3), start=0.5)
    with pytest.raises(drjax.EngineError, match=text):
        run(MODEL, flower.Clients())

    def total(model, x, **options):
        return model + drjax.reduce_sum(x, secure=True, **options)

    def both(model, x):
        return total(model, x, min_groups=3), drjax.reduce_mean(
            drjax.map_fn(jnp.sin, x)
        )

    of = lambda fn: plan_of(drjax.program(clients=N)(fn))
    secure = of(lambda m, x: total(m, x, min_groups=3))
    run = flower.compile(secure, grid_of(min_groups=3), start=0.5)
    np.testing.assert_allclose(run(MODEL, flower.Clients()), DATA.sum(0), atol=1e-6)
    for plan in (of(total), of(both)):
        run = flower.compile(plan, grid_of(min_groups=3), start=0.5)
        with pytest.raises(drjax.EngineError, match=text):
            run(MODEL, flower.Clients())
    text = "client needs min_groups= as an integer, got 2.5"
    raises(
        drjax.DrjaxTypeError,
        text,
        lambda: flower.client(load, min_groups=cast(Any, 2.5)),
    )
