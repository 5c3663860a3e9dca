"""The Flower backend: clients in this process, and real SuperNodes on loopback.

Covers: drjax.engines.flower.adapter, drjax.engines.flower.client_data,
drjax.engines.flower.assignment, drjax.engines.flower.claim_queries.
"""

# pyright: reportMissingImports=false

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import flower, reference
from tests.engines.flower.clients import (
    ROOT,
    Grid,
    as_in_a_server_app,  # noqa: F401
    federation,
)
from tests.helpers import example_rounds, tensor_parallel
from tests.helpers.conformance import (
    check_example,
    runs,
    slices_for,
    wait_for,
    weighted_plan,
)
from tests.helpers.raising import raises
from tests.helpers.run_python import HANGS

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # Flower's own
]


def plan_of(n, rounds=2):
    """Rounds of a weighted mean of what clients compute, and their largest loss."""

    @drjax.program(clients=n)
    def train(model, data):
        def work(model, x, w):
            loss, grad = jax.value_and_grad(lambda m: jnp.sqrt(x) * m**2)(model)
            return model - 0.1 * grad, loss, w

        def step(model, _):
            models, losses, w = drjax.map_fn(work, (drjax.broadcast(model), *data))
            mean = drjax.reduce_weighted_mean(models, w)
            return mean, drjax.reduce_max(losses)

        return jax.lax.scan(step, model, length=rounds)

    slices = jax.ShapeDtypeStruct((n,), jnp.float32)
    return drjax.make_plan(train)(
        jax.ShapeDtypeStruct((), jnp.float32), (slices, slices)
    )


def expected(n, good):
    x, w = slices_for(n)
    args = np.float32(2), (x[good], w[good])
    return reference.compile(plan_of(int(good.sum())))(*args)


def run_with(load, n=5, silent=(), **options):
    run = flower.compile(plan_of(n), Grid(load, n, silent), start=0.5, **options)
    return run, lambda: run(np.float32(2), flower.Clients())


def same(result, by_reference):
    for a, b in zip(result, by_reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def load(context):
    x, w = slices_for(9)
    i = context.node_config["partition-id"]
    return x[i], w[i]


def broken(kind):
    def load_or_fail(context):
        x, w = load(context)
        if context.node_config["partition-id"] != 3:
            return x, w
        if kind == "raises":
            raise OSError("the disk is gone")
        return {"shape": (np.zeros(2, np.float32), w), "nan": (-x, w)}[kind]

    return load_or_fail


def test_clients_train_on_their_own_data():
    run, call = run_with(load)
    same(call(), expected(5, np.ones(5, bool)))
    assert [s.groups for s in run.report.stages] == [5, 5]


def test_folds_are_in_the_order_of_the_groups():
    """The server sees one state of each client, as it does of a sum."""
    n = 5

    @drjax.program(clients=n)
    def f(scale, data):
        work = lambda x, w: jnp.array([[1.0, jnp.sqrt(x)], [w / 9, 1.0]]) / 2
        return drjax.reduce(jnp.matmul, drjax.map_fn(work, data), jnp.eye(2)) * scale

    x, w = slices_for(9)
    plan = drjax.make_plan(f)(np.float32(2), (x[:n], w[:n]))
    run = flower.compile(plan, Grid(load, n, ()), start=0.5)
    result = run(np.float32(2), flower.Clients())
    np.testing.assert_allclose(result, f(2.0, (x[:n], w[:n])), rtol=1e-5)


def test_the_best_of_a_sweep():
    """The best client's model with its loss: nothing is gathered, nothing else sent."""
    n = 5

    @drjax.program(clients=n)
    def sweep(model, data):
        work = lambda m, x, w: ((jnp.sqrt(x) - m) ** 2, jnp.array([m * w, x]))
        losses, models = drjax.map_fn(work, (drjax.broadcast(model), *data))
        better = lambda a, b: jax.tree.map(
            lambda x, y: jnp.where(a["loss"] <= b["loss"], x, y), a, b
        )
        states = {"loss": losses, "model": models}
        init = {"loss": jnp.inf, "model": 0.0}
        return drjax.reduce(better, states, init, commutative=True)

    x, w = slices_for(9)
    args = np.float32(2), (x[:n], w[:n])
    plan = drjax.make_plan(sweep)(*args)
    result = flower.compile(plan, Grid(load, n), start=0.5)(args[0], flower.Clients())
    jax.tree.map(np.testing.assert_allclose, result, jax.jit(sweep)(*args))


def test_slices_of_a_population_are_refused():
    f = drjax.program(clients=3)(
        lambda p, x, i: drjax.reduce_sum(drjax.map_fn(jnp.add, (drjax.take(p, i), x)))
    )
    plan = drjax.make_plan(f)(np.ones(9), np.ones(3), np.arange(3))
    text = "moves p between groups (take). A client's slices stay with it"
    raises(drjax.DrjaxValueError, text, flower.compile, plan, Grid(load, 3))


@pytest.mark.parametrize(
    "kind, text",
    [
        ("raises", "OSError: the disk is gone"),
        ("shape", "float32[2], float32[], but the plan is for data[0] float32[]"),
        ("nan", "it yields NaN as"),
    ],
)
def test_a_client_that_fails(kind, text):
    with pytest.raises(drjax.EngineError) as e:
        run_with(broken(kind), check_nans=True)[1]()
    assert e.value.group == 3 and e.value.round == "1.scan.0.1" and text in str(e.value)
    run, call = run_with(broken(kind), check_nans=True, on_error="drop")
    same(call(), expected(5, np.arange(5) != 3))
    assert [*run.report.dropped] == [3] and text in run.report.dropped[3]


def test_a_client_that_never_answers():
    options = {"timeout": 1.0, "retries": 0, "on_error": "drop"}
    run, call = run_with(load, silent=[1], **options)
    same(call(), expected(5, np.arange(5) != 1))
    assert "took longer than 1.0 s" in run.report.dropped[1]
    _, call = run_with(load, silent=[1], min_groups=5, **options)
    raises(drjax.EngineError, "4 of 5 groups survive, but min_groups=5", call)


def test_a_group_without_a_client():
    grid = Grid(load, 4)
    run = flower.compile(plan_of(5), grid, start=0.2, on_error="drop")
    same(run(np.float32(2), flower.Clients()), expected(5, np.arange(5) != 4))
    assert "no client has the group" in run.report.dropped[4]


def test_slices_stay_with_the_clients():
    text = "What clients compute stays with them"
    raises(drjax.DrjaxValueError, text, flower.compile, weighted_plan(3), None)


def test_no_client_gets_columns():
    f = drjax.program(clients=3)(lambda x: drjax.reduce_columns(jnp.median, x))
    plan = drjax.make_plan(f)(np.zeros(3, np.float32))
    text = "What clients compute stays with them"
    raises(drjax.DrjaxValueError, text, flower.compile, plan, None)


def test_slices_do_not_move_to_other_clients():
    shifted = drjax.program(clients=3)(lambda x: drjax.reduce_sum(drjax.shift(x, 1)))
    plan = drjax.make_plan(shifted)(np.zeros(3, np.float32))
    text = "between groups (permute). A client's slices stay with it"
    raises(drjax.DrjaxValueError, text, flower.compile, plan, None)


def test_slices_stay_with_the_clients_in_loops_too():
    @drjax.program(clients=3)
    def rounds(model, x):
        def step(m, _):
            y = drjax.map_fn(lambda m, x: jnp.sin(m * x), (drjax.broadcast(m), x))
            return drjax.gather(y).mean(), None

        return jax.lax.scan(step, model, length=2)[0]

    plan = drjax.make_plan(rounds)(np.float32(1), np.zeros(3, np.float32))
    text = "What clients compute stays with them"
    raises(drjax.DrjaxValueError, text, flower.compile, plan, None)


def test_a_stage_without_data_of_the_clients():
    @drjax.program(clients=3)
    def numbered(model):
        work = lambda m: m * drjax.partition_index()
        return drjax.reduce_sum(drjax.map_fn(work, drjax.broadcast(model)))

    plan = drjax.make_plan(numbered)(np.float32(2))
    assert flower.compile(plan, Grid(load, 3), start=0.5)(np.float32(2)) == 6


def test_groups_on_several_devices_are_refused():
    plan, text = tensor_parallel.plan("auto"), "and Flower runs a group on one device"
    raises(drjax.MeshError, text, flower.compile, plan, Grid(load, 5))


def test_structures_and_arguments():
    def named(model, data):
        y = drjax.map_fn(lambda m, d: m * d["x"], (drjax.broadcast(model), data))
        return drjax.reduce_weighted_mean(y, data["w"])

    slices = {"x": np.zeros(3, np.float32), "w": np.zeros(3, np.float32)}
    plan = drjax.make_plan(drjax.program(clients=3)(named))(np.float32(2), slices)
    run = flower.compile(plan, Grid(load, 3), start=0.5)
    text = "its data has the structure"
    raises(drjax.EngineError, text, run, np.float32(2), flower.Clients())
    two = drjax.program(clients=3)(lambda a, b: drjax.reduce_sum((a, b)))
    plan = drjax.make_plan(two)(slices["x"], slices["w"])
    run = flower.compile(plan, Grid(load, 3), start=0.5)
    text = "put it into one tuple"
    raises(drjax.DrjaxError, text, run, flower.Clients(), flower.Clients())


def test_each_group_has_one_client():
    grid = Grid(load, 3)
    plan = plan_of(2)
    run = flower.compile(plan, grid, start=0.5)
    text = "A client has partition-id=2. Each of 0 to 1 must have one client"
    raises(drjax.EngineError, text, run, np.float32(2), flower.Clients())


def test_docstring_example_runs():
    assert runs(flower.client)


def test_code_in_docs_runs():
    text = (ROOT / "docs" / "engines" / "flower.md").read_text()
    (block,) = re.findall(r"```python flower\n(.*?)```", text, re.S)
    train = plan_of(3)
    names = {"drjax": drjax, "plan": train, "load": load, "model": np.float32(2)}
    block = block.replace("    for _", "    global model\n    for _")
    exec(compile(block, "docs", "exec"), names)
    names["main"](Grid(load, 3), None)
    assert abs(names["model"]) < 2


def test_the_example_in_a_simulation(tmp_path):
    check_example("flower", tmp_path)


@pytest.mark.parametrize("name", example_rounds.parameters("flower"))
def test_a_round_of_each_example(name, tmp_path, monkeypatch):
    """As in a simulation, but with clients in this process."""
    from examples.flower import simulation

    def in_process(server, client, n, **_):
        grid = Grid(load, n)
        grid.app = client
        server(grid, None)

    monkeypatch.setattr(simulation, "run_simulation", in_process)
    example_rounds.check_round("flower", name, tmp_path)


def test_kept_layers_in_a_simulation(tmp_path):
    """FedPer by its own command, and the same on the devices."""
    flags = "--only=FedPer", "--rounds=2", "--clients=4", "--width=8", "--seeds=1"
    numbers = {}
    for engine in ("flower", "xla"):
        folder = tmp_path / engine
        done = subprocess.run(
            [sys.executable, "-m", "examples.reproductions.personalization",
             "--engine", engine, "--output", str(folder), *flags],
            cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        numbers[engine] = json.loads((folder / "results.json").read_text())["numbers"]
    (ours,), (expected,) = (x.values() for x in numbers.values())
    assert ours == pytest.approx(expected, abs=0.02)  # of 80 examples, one more


# ---------------------------------------------------------------------------------
# Real processes


def test_supernodes_and_one_that_is_killed(tmp_path):
    with federation(tmp_path, "insecure = true") as processes:
        processes.link("--insecure")
        nodes = [processes.node("--insecure", group=i) for i in range(3)]
        killed_in_the_second_round(processes.run_example, nodes, tmp_path)


def killed_in_the_second_round(run, nodes, tmp_path):
    from examples.flower.plan import save

    save(3, tmp_path / "step.drjax")
    options = {"plan": str(tmp_path / "step.drjax"), "timeout": 45, "rounds": 3}
    output = tmp_path / "model.npz"
    run(output=str(output), **{"on-error": "drop", "min-groups": 2, **options})
    progress = Path(f"{output}.log")
    wait_for(lambda: progress.exists() and len(progress.read_text().splitlines()) == 1)
    time.sleep(1)  # the second round is under way
    assert len(progress.read_text().splitlines()) == 1
    os.killpg(nodes[1].pid, signal.SIGKILL)
    wait_for(output.exists)
    with np.load(output) as file:
        history, model = json.loads(str(file["history"])), file["model"]
    assert (
        len(history) == 3
        and history[0]["dropped"] == {}
        and len(history[0]["pids"]) == 3
    )
    assert [*history[1]["dropped"]] == ["1"]
    assert len({pid for t in history for pid in t["pids"]}) >= 5
    np.testing.assert_allclose(model, expected_model(history), rtol=1e-5)


def expected_model(history):
    """The same rounds by the reference backend, over the clients that were there."""
    from examples.flower.drjax_app.client import load
    from examples.flower.plan import step

    model = np.zeros(3, np.float32)
    for a_round in history:
        remaining = [i for i in range(3) if str(i) not in a_round["dropped"]]
        slices = [
            load(SimpleNamespace(node_config={"partition-id": i})) for i in remaining
        ]
        data = tuple(np.stack(column) for column in zip(*slices, strict=True))
        plan = drjax.make_plan(step(len(remaining)))(model, data)
        model, loss = reference.compile(plan)(model, data)
        np.testing.assert_allclose(loss, a_round["loss"], rtol=1e-5)
    return model
