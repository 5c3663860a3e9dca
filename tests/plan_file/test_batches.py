"""The body of a stage computes the same, whatever the stage was made of.

Covers: drjax._plan_file.batches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._plan_file.batches import over_groups, run_batch
from drjax._plan_file.export_plan import export_plan

N, D = 5, 3


def plan_of_a_round():
    @drjax.program(clients=N)
    def step(model, x):
        y = drjax.map_fn(lambda m, x: jnp.sin(m * x), (drjax.broadcast(model), x))
        return y, drjax.reduce_sum(y), drjax.reduce_max(x)

    return drjax.make_plan(step)(jnp.ones(D), jnp.ones((N, D)))


@pytest.mark.parametrize("mask", [None, [1, 0, 1, 1, 0], [0, 0, 0, 0, 1]])
def test_a_jaxpr_and_its_exported_functions_run_the_same_batch(mask):
    plan = plan_of_a_round()
    mask = None if mask is None else jnp.array(mask, bool)
    x = jax.random.normal(jax.random.key(0), (N, D))
    model, results = jnp.arange(1.0, 1 + D), []
    for version in (plan, export_plan(plan)):
        (a_round,) = version.rounds
        stage = a_round.local
        inputs = [x if v.partitioned else model for v in stage.inputs]
        kept = [v for v in stage.outputs if v.name in version.kept()]
        groups = np.arange(N, dtype=np.int32)
        partials, slices = run_batch(
            stage, a_round.partials, kept, mask, groups, inputs
        )
        results.append([*partials, *slices])
    one, two = results
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    chosen = x if mask is None else x[mask]
    chosen = np.asarray(chosen)
    want = {"sum": np.sin(np.asarray(model) * chosen).sum(0), "max": chosen.max(0)}
    for reduce, y in zip(plan.rounds[0].partials, one, strict=False):
        np.testing.assert_allclose(y, want[reduce.op], rtol=1e-5)


def test_groups_along_other_axes():
    plan = plan_of_a_round()
    x = jax.random.normal(jax.random.key(0), (N, D))
    model, groups = jnp.arange(1.0, 1 + D), np.arange(N, dtype=np.int32)
    for version in (plan, export_plan(plan)):
        (a_round,) = version.rounds
        stage = a_round.local
        kept = [v for v in stage.outputs if v.name in version.kept()]
        run = functools.partial(run_batch, stage, a_round.partials, kept, None, groups)
        inputs = [x if v.partitioned else model for v in stage.inputs]
        moved = [x.T if v.partitioned else model for v in stage.inputs]
        axes = [1 if v.partitioned else None for v in stage.inputs]
        for a, b in zip(
            jax.tree.leaves(run(inputs)), jax.tree.leaves(run(moved, axes)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_groups_of_both_are_mapped(count):
    stages = (plan_of_a_round(), export_plan(plan_of_a_round()))
    x = jnp.arange(float(count))
    for plan in stages:
        fn = lambda a, b: [a * b, a + b]
        run = over_groups(plan.rounds[0].local, fn, count, [0, None])
        product, total = run(x, jnp.float32(2))
        np.testing.assert_array_equal(product, 2 * x)
        np.testing.assert_array_equal(total, 2 + x)
