"""Flower's clients keep state from round to round, and no message has it.

Covers: drjax.engines.flower.adapter, drjax.engines.flower.client_data,
drjax.engines.slices.worker_slices.
"""

# pyright: reportMissingImports=false

import pickle
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import flower, reference
from drjax.engines.flower.records import Request
from tests.engines.flower.clients import (
    ROOT,
    Grid,
    as_in_a_server_app,  # noqa: F401
    federation,
)
from tests.engines.flower.messages import Recorded, check_no_slice
from tests.helpers import kept_programs as programs
from tests.helpers.cases import some
from tests.helpers.conformance import wait_for
from tests.helpers.raising import raises

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Flower's own
]
N, ROUNDS = 3, 3
PLANS = {name: algorithm.plan for name, algorithm in programs.ALGORITHMS.items()}
REDUCTIONS = {"scaffold": 2, "diloco": 1, "personalization": 1}


def load(context):
    return programs.data_of(context.node_config["partition-id"])


def first_control(context):
    return programs.first_control(context.node_config["partition-id"])


def grid_of(name, n=N, **options):
    return Grid(load, n, initial=first_control if name == "scaffold" else None)


def check_state(state, name, rounds=ROUNDS, n=N):
    arrays, slices = programs.expected_on_clients(name, n, rounds)
    # In the order of the leaves: of a dict by key.
    for a, b in zip(state, arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    return [x for each in slices for x in each]


@pytest.mark.parametrize("name", PLANS)
def test_state_stays_with_the_clients(name):
    grid = Recorded(grid_of(name))
    run, start, keep = programs.on_clients(name, flower.Clients())
    kept = flower.compile(PLANS[name](N), grid, start=0.5, keep=keep)
    state = run(kept, start, ROUNDS, flower.Clients())
    slices = check_state(programs.without_kept(state), name)
    check_no_slice(grid.messages, slices, REDUCTIONS[name])
    handle = programs.kept_of(state)
    text = "stays with the clients, and the server cannot read it"
    raises(drjax.DrjaxTypeError, text, handle.fetch)

    run(kept, state, 3, flower.Clients())
    # Two versions at most: that of the latest call, and the one that it has read.
    assert all(len(x.state.array_records) <= 2 for x in grid.contexts.values())


def test_clients_keep_what_a_later_round_reads():
    """Without keep=: two rounds of one call, also as the carry of a loop."""

    @drjax.program(clients=N)
    def rounds(model, x):
        def step(carry, _):
            m, own = carry
            own = drjax.map_fn(lambda m, o, x: o + m * x, (drjax.broadcast(m), own, x))
            return (drjax.reduce_mean(own), own), None

        y = drjax.map_fn(jnp.sin, x)
        m = drjax.reduce_mean(y)
        own = drjax.map_fn(lambda y, m: y - m, (y, drjax.broadcast(m)))
        (model, own), _ = jax.lax.scan(step, (model, own), length=3)
        return model, drjax.reduce_max(own)

    x = np.arange(1, N + 1, dtype=np.float32)
    plan = drjax.make_plan(rounds)(np.float32(2), x)
    grid = Grid(lambda c: x[c.node_config["partition-id"]], N)
    run = flower.compile(plan, grid, start=0.5)
    for _ in range(2):
        result = run(np.float32(2), flower.Clients())
        expected = reference.compile(plan)(np.float32(2), x)
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    text = "in another stay with the clients, so that no checkpoint can have them"
    compile = lambda **options: flower.compile(plan, grid, **options)
    raises(drjax.DrjaxValueError, text, lambda: compile(checkpoint="runs/x"))


def test_the_first_call_may_have_arrays():
    arrays = np.stack([programs.first_control(i) for i in range(N)])
    start = *programs.scaffold_start(N)[:2], arrays
    run = flower.compile(
        PLANS["scaffold"](N), Grid(load, N), start=0.5, keep=programs.SCAFFOLD_KEEP
    )
    state = programs.run_scaffold(run, start, ROUNDS, flower.Clients())
    check_state(programs.without_kept(state), "scaffold")


def test_a_client_that_misses_a_round_keeps_what_it_had():
    grid = grid_of("scaffold")
    options = {"on_error": "drop", "timeout": 1.0, "retries": 0, "start": 0.5}
    run = flower.compile(
        PLANS["scaffold"](N), grid, keep=programs.SCAFFOLD_KEEP, **options
    )
    model, control, kept = run(
        *programs.on_clients("scaffold", flower.Clients())[1], flower.Clients()
    )
    grid.silent = [1]
    model, control, kept = run(model, control, kept, flower.Clients())
    assert [*run.report.dropped] == [1]
    grid.silent = []
    model, control, kept = run(model, control, kept, flower.Clients())
    assert run.report.dropped == {}
    # The same by the reference backend, with two clients in the second round.
    expected = programs.scaffold_start(N)
    controls = np.stack([programs.first_control(i) for i in range(N)])
    m, c, some = *expected[:2], controls
    for group in ([0, 1, 2], [0, 2], [0, 1, 2]):
        data = tuple(x[group] for x in programs.data(N))
        step = reference.compile(programs.scaffold_plan(len(group)))
        m, c, new = step(m, c, some[group], data)
        some[group] = new
    np.testing.assert_allclose(model, m, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(control, c, rtol=1e-4, atol=1e-6)


def test_a_client_that_lost_its_state():
    grid = grid_of("scaffold")
    run = flower.compile(
        PLANS["scaffold"](N), grid, start=0.5, keep=programs.SCAFFOLD_KEEP
    )
    start = programs.on_clients("scaffold", flower.Clients())[1]
    state = run(*start, flower.Clients())
    del grid.contexts[1]
    text = "its client does not have the slices that an earlier call left with it"
    raises(drjax.EngineError, text, run, *state, flower.Clients())
    run(*start, flower.Clients())


def test_a_handle_survives_a_call_that_raises():
    grid = grid_of("scaffold")
    options = {"timeout": 1.0, "retries": 0, "start": 0.5}
    run = flower.compile(
        PLANS["scaffold"](N), grid, keep=programs.SCAFFOLD_KEEP, **options
    )
    state = run(*programs.on_clients("scaffold", flower.Clients())[1], flower.Clients())
    grid.silent = [1]  # the others have run the round
    raises(drjax.EngineError, "took longer", run, *state, flower.Clients())
    grid.silent = []
    for _ in range(2):
        state = run(*state, flower.Clients())
    check_state(programs.without_kept(state), "scaffold")


def test_what_a_client_refuses():
    """A stage that returns slices, for which the request has no key to store them."""
    from drjax.engines.flower import client_data

    grid, requests = grid_of("scaffold"), []
    run = flower.compile(
        PLANS["scaffold"](N), grid, start=0.5, keep=programs.SCAFFOLD_KEEP
    )
    push = grid.push_messages
    grid.push_messages = lambda messages: push(map(_seen(requests), messages))
    run(*programs.on_clients("scaffold", flower.Clients())[1], flower.Clients())
    request = Request.received(requests[-1])
    request = replace(request, about={**request.about, "key": None})
    code = grid.contexts[0].state["drjax_code"]
    load = lambda: programs.data_of(0)
    with pytest.raises(ValueError, match="which stay with their client"):
        client_data.answer(request, load, next(iter(code.items())), {})


def _seen(requests):
    def see(message):
        if message.metadata.message_type == "train":
            requests.append(message.content)
        return message

    return see


def test_initial_slices_that_do_not_fit():
    grid = Grid(load, N, initial=lambda context: np.zeros(3, np.float32))
    run = flower.compile(
        PLANS["scaffold"](N), grid, start=0.5, keep=programs.SCAFFOLD_KEEP
    )
    start = programs.on_clients("scaffold", flower.Clients())[1]
    text = "its data is float32[3], but the plan is for controls float32[6]"
    raises(drjax.EngineError, text, run, *start, flower.Clients())


def test_code_in_docs_runs():
    text = (ROOT / "docs" / "engines" / "data.md").read_text()
    (block,) = re.findall(r"```python flower_kept\n(.*?)```", text, re.S)
    zeros, plan = np.zeros(programs.D, np.float32), PLANS["scaffold"](N)
    names = {"drjax": drjax, "plan": plan, "model": zeros, "control": zeros}
    block = block.replace("    run =", "    global state\n    run =")
    exec(compile(block, "docs", "exec"), names)
    grid = grid_of("scaffold")
    names["main"](grid, None)
    check_state(programs.without_kept(names["state"]), "scaffold", rounds=10)


# ---------------------------------------------------------------------------------
# Real processes


@pytest.mark.parametrize("name", some(PLANS, "personalization"))
def test_state_stays_in_supernodes(name, tmp_path):
    PLANS[name](N).save(tmp_path / f"{name}.drjax")
    output = tmp_path / "state"
    with federation(tmp_path, "insecure = true") as processes:
        processes.link("--insecure")
        for group in range(N):
            processes.node("--insecure", group=group)
        app = Path(__file__).with_name("kept")
        config = {"plan": str(tmp_path / f"{name}.drjax"), "output": str(output)}
        processes.run_app(app, rounds=ROUNDS, **config)
        wait_for(output.exists)
    state, messages = pickle.loads(output.read_bytes())
    slices = check_state(state, name)
    check_no_slice(messages, slices, REDUCTIONS[name])
    # The search finds what is there: the clients have these slices.
    for group in range(N):
        stored = pickle.loads((tmp_path / f"state.client{group}").read_bytes())
        stays = [x[0] for arrays in stored.values() for x in arrays if x.ndim == 2]
        mine = slices[group::N]
        assert any(np.allclose(x, y, 1e-4) for x in stays for y in mine)
