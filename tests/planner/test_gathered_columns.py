"""Work on the coordinates of all groups' slices, in plans, plan files and engines.

Covers: drjax._planner.gathered_columns, drjax.backends._all_columns.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process, reference, xla
from tests.helpers.meshes import groups_and_meshes, in_mesh
from tests.helpers.plan_files import forge, read_members, steps_of
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")
N = 5
MESHES = groups_and_meshes("none", "two each", "uneven", "explicit")


def program_of(n: int):
    """Columns in a first round, with a global scale and a sum, then in a scan."""

    @drjax.program(clients=n)
    def f(x, scale):
        y = drjax.map_fn(lambda x, s: s * jnp.sin(x), (x, drjax.broadcast(scale)))
        center = drjax.reduce_columns(lambda c: jnp.median(c) * scale, y)
        gram = drjax.reduce_columns(lambda c: jnp.outer(c, c), y, sum=True)

        def step(model, _):
            moved = drjax.map_fn(jnp.subtract, (y, drjax.broadcast(model)))
            trimmed = drjax.reduce_columns(lambda c: jnp.sort(c)[1:-1].mean(), moved)
            return model + trimmed, drjax.reduce_max(moved)

        return *jax.lax.scan(step, center, None, 2), gram

    return f


def data(n: int):
    x = np.random.RandomState(n).randn(n, 3, 4).astype(np.float32)
    return x, np.float32(1.5)


def columns_of(plan):
    return [loop for loop in plan.loops() if loop.op == "columns"]


def close(result, want):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-5), result, want
    )


@pytest.mark.once
@pytest.mark.parametrize("mesh", MESHES)
def test_backends_agree(mesh, tmp_path):
    n, make = MESHES[mesh]
    f, args = program_of(n), data(n)
    plan = drjax.make_plan(f)(*args)
    assert len(columns_of(plan)) == 3
    want = reference.compile(plan)(*args)
    plan.save(tmp_path / "a.drjax")
    loaded = drjax.load_plan(tmp_path / "a.drjax")
    assert str(loaded) == str(plan)
    close(reference.compile(loaded)(*args), want)
    with in_mesh(make and make()):
        close(jax.jit(f)(*args), want)
        close(drjax.jit(f)(*args), want)
        close(xla.compile(loaded)(*args), want)


def test_columns_are_read_where_they_are():
    """Moved to the front first, the gathered array would be copied."""
    middle = lambda c: jnp.sort(c)[2:-2].mean()
    fn = drjax.program(clients=8)(lambda x: drjax.reduce_columns(middle, x))
    hand_written = lambda x: jax.vmap(middle, 1)(x.reshape(8, 12)).reshape(3, 4)
    x, counts = jnp.ones((8, 3, 4), jnp.float32), []
    for f in (fn, hand_written):
        text = drjax.jit(f).lower(x).as_text()
        counts.append(text.count("stablehlo.transpose"))
    assert counts[0] == counts[1]


def test_a_plan_reads_and_counts_as_it_communicates():
    """Each slice leaves its group once; what workers share is the server's."""
    x, scale = data(N)
    f = drjax.program(clients=N)(lambda x: drjax.reduce_columns(jnp.median, x))
    plan = drjax.make_plan(f)(x)
    assert len(plan.rounds) == 1 and plan.server.empty
    line = "server computes      result: float32[3,4] by median of each coordinate"
    assert line in str(plan)
    assert [(m.op, m.nbytes) for m in plan.communication().messages] == [("gather", 48)]
    assert plan.communication().levels == ("clients",)
    body = columns_of(plan)[0].bodies[0]
    assert body.size == 12 and body.inputs[0].axis == 1


def test_what_needs_the_server_in_between_is_the_servers():
    """A derivative: its cotangents are there only after the server's stage."""
    x, scale = data(N)
    f = drjax.program(clients=N)(
        lambda x, s: jnp.sum(drjax.reduce_columns(jnp.median, x) ** 2) * s
    )
    both = jax.value_and_grad(f, (0, 1))
    plan = drjax.make_plan(both)(x, scale)
    assert len(columns_of(plan)) == 1 and len(plan.rounds) == 2
    close(reference.compile(plan)(x, scale), both(x, scale))
    close(in_process.compile(plan)(x, scale), both(x, scale))


def test_a_closed_value_of_the_groups():
    """What a function of a coordinate does with slices is planned if it can be."""
    x = data(N)[0]

    @drjax.program(clients=N)
    def f(x):
        y = drjax.map_fn(jnp.cos, x)
        return drjax.reduce_columns(lambda c: jnp.median(c) + y.sum(), x)

    close(reference.compile(drjax.make_plan(f)(x))(x), f(x))


def test_workers_compute_chunks_of_coordinates():
    f, args = program_of(N), data(N)
    plan = drjax.make_plan(f)(*args)
    run = in_process.compile(plan, workers=2)
    close(run(*args), reference.compile(plan)(*args))
    stages = [s for s in run.report.stages if "columns" in s.round]
    assert [s.groups for s in stages] == [12] * 4 and stages[0].blocks > 2
    assert [s.round for s in stages][:2] == ["1.columns", "1.columns_2"]


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_slices_of_dropped_groups(dtype):
    """They are NaN or zero in each column, and NaNs of columns are no failures."""
    x = np.arange(1, 13, dtype=dtype).reshape(4, 3)
    x[2] = -1

    @drjax.program(clients=4)
    def f(x):
        root = drjax.map_fn(lambda x: (jnp.sqrt(x[0] + 0.0), x), x)
        return drjax.reduce_columns(lambda c: c, root[1]), drjax.reduce_sum(root[0])

    plan = drjax.make_plan(f)(x)
    run = in_process.compile(plan, on_error="drop", check_nans=True, block_size=3)
    columns, _ = run(x)
    expected = x.copy()
    expected[2] = 0
    if dtype == "float32":
        expected[2] = np.nan
    np.testing.assert_array_equal(columns, expected.T)
    assert set(run.report.dropped) == {2}


def test_a_failure_names_the_round(monkeypatch):
    from drjax.engines.core import worker

    args = data(N)
    plan = drjax.make_plan(program_of(N))(*args)
    run, real = in_process.compile(plan, on_error="drop"), worker.run

    def failing(file, task, shared):
        if task.stage == 1:
            raise RuntimeError("no memory")
        return real(file, task, shared)

    monkeypatch.setattr(worker, "run", failing)
    text = "The groups' work failed in round 1.columns of f, in function: RuntimeError"
    raises(drjax.EngineError, text, run, *args)


FORGED = {
    "a round too many": lambda body: body.update(
        steps=[*body["steps"][:-1], *body["steps"]]
    ),
    "a gather": lambda body: body["steps"].insert(
        2, {"step": "Gather", "source": body["outputs"][0], "result": body["inputs"][0]}
    ),
    "fewer coordinates": lambda body: body["partition"].update(size=6),
    "no partition": lambda body: body.update(partition=None),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_files(name, tmp_path):
    path, x = tmp_path / "a.drjax", data(N)[0]
    f = drjax.program(clients=N)(lambda x: drjax.reduce_columns(jnp.median, x))
    drjax.make_plan(f)(x).save(path)
    members = read_members(path)
    manifest = json.loads(members["manifest.json"])
    assert len(steps_of(manifest["plan"], "Columns")) == 1

    def change(manifest):
        FORGED[name](steps_of(manifest["plan"], "Columns")[0]["bodies"][0])

    forge(path, members, change=change)
    raises(drjax.PlanFileError, "malformed manifest", drjax.load_plan, path)


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
@pytest.mark.parametrize("shape", [(320,), (3, 40), (5, 7)])
def test_a_gradient_sends_each_slice_there_and_back(jit, shape):
    """The compiler sends its columns, not the operands of what computes them."""
    n = 16
    median = drjax.program(clients=n)(lambda x: drjax.reduce_columns(jnp.median, x))
    gradient = jit(jax.grad(lambda x: median(x).sum()))
    x = np.random.default_rng(0).normal(size=(n, *shape)).astype(np.float32)
    with in_mesh(MESHES["two each"][1]()):
        sent = drjax.collectives(gradient)(x).collectives
        got = gradient(x)
    if shape != (5, 7) or jit is jax.jit:  # coordinates that the devices divide
        assert {c.kind for c in sent} == {"all-to-all"} and len(sent) == 2
    want = jax.grad(lambda x: jnp.median(x, axis=0).sum())(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)
