"""Stages that have the same code are exported, written and read once.

Covers: drjax._plan_file.export_plan.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._plan_file.export_plan import export_plan
from tests.helpers.plan_files import read_members

N = 4


def rounds(count, scale=lambda i: 2.0, table=lambda i: np.ones(2)):
    """Rounds one after another, each with a number and a table of its own."""

    @drjax.program(clients=N)
    def program(w, x):
        for i in range(count):
            work = lambda w, x, i=i: jnp.sin(w * x * scale(i)) + table(i).sum()
            w = drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(w), x)))
        return w

    return program


def plan_of(fn):
    return drjax.make_plan(fn)(jnp.float32(1), jnp.arange(4.0))


@pytest.fixture
def count(monkeypatch):
    """How many functions were exported and read."""
    counts = {"export": 0, "deserialize": 0}

    def counted(name):
        original = getattr(jax.export, name)

        def call(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(jax.export, name, call)

    for name in counts:
        counted(name)
    return counts


@pytest.mark.parametrize("derive", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_as_many_functions_as_stages_that_differ(derive, count, tmp_path):
    sizes, functions = [], []
    for rounds_ in (4, 12):
        plan = plan_of(derive(rounds(rounds_)))
        count.update(export=0, deserialize=0)
        plan.save(tmp_path / "plan.drjax")
        loaded = drjax.load_plan(tmp_path / "plan.drjax")
        assert count["export"] == count["deserialize"]
        functions.append(count["export"])
        members = read_members(tmp_path / "plan.drjax")
        sizes.append(sum(map(len, members.values())) - len(members["manifest.json"]))
        args = jnp.float32(0.3), jnp.arange(4.0)
        expected = drjax.backends.reference.compile(plan)(*args)
        actual = drjax.backends.reference.compile(loaded)(*args)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert functions[0] == functions[1]
    assert sizes[0] == sizes[1]


def different_tables(i):
    return jnp.full(2, i, jnp.float32)


@pytest.mark.parametrize(
    "program",
    [rounds(3, scale=float), rounds(3, table=different_tables)],
    ids=["a number", "a table"],
)
def test_stages_that_differ_by_a_constant_are_not_shared(program, tmp_path):
    plan = plan_of(program)
    exported = export_plan(plan)
    stages = [a_round.local.exported for a_round in exported.rounds]
    assert len({id(stage) for stage in stages}) == 3
    plan.save(tmp_path / "plan.drjax")
    loaded = drjax.load_plan(tmp_path / "plan.drjax")
    args = jnp.float32(0.3), jnp.arange(4.0)
    np.testing.assert_allclose(
        drjax.backends.reference.compile(loaded)(*args), program(*args), rtol=1e-6
    )


def test_stages_that_differ_by_what_is_reduced_are_not_shared():
    @drjax.program(clients=N)
    def program(x):
        y = drjax.reduce_sum(drjax.map_fn(jnp.sin, x))
        z = drjax.reduce_max(drjax.map_fn(jnp.sin, x + y))
        return drjax.map_fn(lambda x, z: jnp.sin(x + z), (x, drjax.broadcast(z)))

    exported = export_plan(drjax.make_plan(program)(jnp.arange(4.0)))
    stages = {id(r.local.exported) for r in exported.rounds if r.local.exported}
    assert len(stages) == sum(not r.local.empty for r in exported.rounds)


def test_a_loaded_plan_is_written_as_it_was_read(tmp_path):
    first, second = tmp_path / "first.drjax", tmp_path / "second.drjax"
    plan_of(rounds(3)).save(first)
    drjax.load_plan(first).save(second)
    assert first.read_bytes() == second.read_bytes()
