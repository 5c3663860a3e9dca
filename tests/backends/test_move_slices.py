"""Moves of slices in plans: values, bytes, plan files, forged files, dropped groups.

Covers: drjax.backends._move_slices.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process
from drjax.backends._move_slices import move_slices
from drjax.plan import Take, Value
from tests.helpers.groups import four
from tests.helpers.plan_files import forge, read_members, steps_of
from tests.helpers.raising import raises


def test_plans_move_slices_between_rounds(tmp_path):
    """Without the server; also from a plan file, and if groups are dropped."""

    def f(x, index):
        moved = drjax.take(drjax.shift(drjax.map_fn(jnp.sin, x), 1), index)
        return drjax.put(drjax.map_fn(jnp.cos, moved), index, add=True)

    f, x, index = four(f), np.array([1.0, 2.0, 3.0, 0.5], np.float32), [1, 1, 0, 3]
    plan = drjax.make_plan(f)(x, jnp.array(index))
    assert len(plan.rounds) == 3 and not any(r.reduces for r in plan.rounds)
    moves = [move for r in plan.rounds for move in r.moves]
    assert [move.op for move in moves] == ["permute", "take", "put_add"]
    assert moves[0].sources == (3, 0, 1, 2) and plan.outputs == (moves[2].result,)
    assert "permuted slices      sin: float32[]   4 B a group -> permute" in str(plan)
    ledger = plan.communication(devices=2)
    assert (ledger.down(), ledger.up(), ledger.between(2)) == (0, 0, 4)
    assert [m.sources for m in ledger.messages] == [(3, 0, 1, 2), (), ()]
    # One slice leaves each device; then two reduce-scatters of four slices.
    assert ledger.reduced_per_device() == 4 * (1 + 4 + 4)
    plan.save(tmp_path / "plan.drjax")
    plan.draw(tmp_path / "plan.svg")
    loaded, want = drjax.load_plan(tmp_path / "plan.drjax"), f(x, jnp.array(index))
    for run in (
        drjax.backends.reference.compile(loaded),
        jax.jit(drjax.backends.xla.compile(loaded)),
        in_process.compile(plan, block_size=3),
    ):
        np.testing.assert_allclose(run(x, jnp.array(index)), want, rtol=1e-5)


@pytest.mark.parametrize(
    "entry, text",
    [
        ({"sources": [0, 0, 1, 2]}, "a permute has no permutation of the groups"),
        ({"sources": [0, 1, 2]}, "a permute has no permutation of the groups"),
        ({"step": "Take"}, "KeyError: 'index'"),
        ({"index": "number"}, "a Permute has no ['index']"),
        ({"source": "number"}, "values that are not partitioned"),
        ({"source": "result"}, "are used before they are made"),
    ],
)
def test_forged_moves_are_refused(entry, text, tmp_path):
    path = tmp_path / "plan.drjax"
    move = lambda x, number: (drjax.shift(x, 1), number)
    drjax.make_plan(four(move))(np.ones(4, np.float32), np.ones(4)).save(path)

    def change(manifest):
        (moved,) = steps_of(manifest["plan"], "Permute")
        names = {"result": moved["result"]}
        moved.update({k: names.get(str(x), x) for k, x in entry.items()})

    forge(path, read_members(path), change=change)
    raises(drjax.PlanFileError, text, drjax.load_plan, path)


def test_a_slice_that_is_dropped_gets_no_cotangent(tmp_path):
    """The transpose of put_add is a take with indices out of bounds: zeros."""

    def loss(x, index):
        added = drjax.put(drjax.map_fn(jnp.sin, x), index, add=True)
        return jnp.sum(drjax.map_fn(lambda a: a**2, added))

    x, index = np.array([1.0, 2.0, 3.0, 0.5], np.float32), jnp.array([1, 4, -5, 1])
    plain = lambda x: jnp.sum(jnp.zeros(4).at[index].add(jnp.sin(x), mode="drop") ** 2)
    plan = drjax.make_plan(jax.grad(four(loss)))(x, index)
    plan.save(tmp_path / "plan.drjax")
    for each in (plan, drjax.load_plan(tmp_path / "plan.drjax")):
        for run in (
            drjax.backends.reference.compile(each),
            jax.jit(drjax.backends.xla.compile(each)),
            in_process.compile(each, block_size=1),
            in_process.compile(each, block_size=3),
        ):
            grad = run(x, index)
            np.testing.assert_allclose(grad, jax.grad(plain)(x), rtol=1e-5)
            assert grad[1] == grad[2] == 0


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "key"])
def test_a_take_out_of_bounds_gives_zeros_on_the_host(dtype):
    slices = jax.random.split(jax.random.key(3), 4)
    slices = slices if dtype == "key" else jnp.ones(4, dtype)
    index = np.array([3, -1, 4, 0])
    value = Value("x", (), slices.dtype, (drjax.Partition("clients", 4),), 4)
    move = Take(value, value, Value("index", (4,), np.dtype("int32"), (), 16))
    with pytest.raises(ValueError, match="a take has no sources of the groups"):
        dataclasses.replace(move, sources=(0, 1)).check()
    bits = jax.random.key_data if dtype == "key" else np.asarray
    taken = np.asarray(bits(move_slices(move, slices, index)))
    np.testing.assert_array_equal(taken[[0, 3]], bits(slices)[np.array([3, 0])])
    assert not taken[1:3].any()


def test_what_dropped_groups_have_is_added_to_none():
    def f(x):
        y = drjax.map_fn(jnp.log, x)
        return drjax.shift(y, 1), drjax.put(y, [1, 1, 1, 2], add=True)

    x = np.array([1.0, np.nan, np.e, np.e], np.float32)
    plan = drjax.make_plan(four(f))(x)
    run = in_process.compile(plan, on_error="drop", check_nans=True)
    shifted, added = run(x)
    assert [*run.report.dropped] == [1]
    np.testing.assert_allclose(shifted, [1.0, np.nan, np.nan, 1.0], rtol=1e-6)
    np.testing.assert_allclose(added, [0.0, np.nan, 1.0, 0.0], rtol=1e-6)
