"""A plan of one round, split into the stage of the groups and what follows it.

Covers: drjax.engines.beam.one_round, drjax.engines.core.executable_plan.
"""

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from drjax.backends import Groups
from drjax.engines.beam import one_round
from drjax.engines.core.blocks_of_groups import block_of_pairs
from drjax.engines.core.combine import Totals, add
from drjax.engines.core.options import EngineOptions
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

X = np.arange(5, dtype=np.float32)


@drjax.program(clients=5)
def moments(scale, x):
    near = scale * 2
    mean = drjax.reduce_mean(
        drjax.map_fn(lambda x, s: x * s, (x, drjax.broadcast(near)))
    )
    return mean + near, drjax.reduce_max(x), scale


@pytest.fixture(scope="module")
def plan():
    return drjax.make_plan(moments)(np.float32(1), X)


def totals(stage, groups):
    """The partial reductions of these groups in blocks of two, and their number."""
    job = stage.job
    total: Totals = [None] * len(job.ops)
    for i in range(0, len(groups), 2):
        pairs = [(group, np.float32(group)) for group in groups[i : i + 2]]
        block, failed = block_of_pairs(pairs, stage.lazy)
        total = add(job.ops, total, job.run(block, failed).partials)
    return [*total, np.int64(len(groups)) if groups else None]


def test_totals_of_blocks_give_the_results_of_the_function(plan):
    options = EngineOptions.checked(block_size=2)
    stage, finish = one_round.split(plan, (np.float32(3), ...), options)
    assert stage.job.size == 2 and stage.job.location.startswith("round 1, ")
    finish = pickle.loads(pickle.dumps(finish))  # as pipelines send it
    mean, largest, scale = finish(totals(stage, [0, 1, 2, 3, 4]))
    assert (mean, largest, scale) == (2 * 6 + 6, 4, 3)
    assert mean.dtype == np.float32
    text = "The plan is for 5 groups, got 3"
    raises(drjax.EngineError, text, finish, totals(stage, [0, 1, 2]))


def test_dropped_groups(plan):
    options = EngineOptions.checked(block_size=2, on_error="drop", min_groups=2)
    stage, finish = one_round.split(plan, (np.float32(1), ...), options)
    mean, largest, _ = finish(totals(stage, [1, 3, 2]))
    assert (mean, largest) == (2 * 2 + 2, 3)
    text = "1 of 5 groups survive, but min_groups=2"
    raises(drjax.EngineError, text, finish, totals(stage, [1]))
    text = "The plan is for 5 groups, got 6"
    raises(drjax.EngineError, text, finish, totals(stage, [0, 1, 2, 3, 4, 4]))


def test_any_number_of_groups():
    plan = drjax.make_plan(moments, open_groups=True)(np.float32(1), X)
    options = EngineOptions.checked(block_size=2)
    for groups, want in (([0, 1, 2], 2 * 1 + 2), ([0, 1, 2, 3, 4, 5, 6], 2 * 3 + 2)):
        stage, finish = one_round.split(plan, (np.float32(1), ...), options)
        mean, largest, _ = finish(totals(stage, groups))
        np.testing.assert_allclose((mean, largest), (want, groups[-1]), rtol=1e-6)


def test_what_cannot_be_split(plan):
    split = lambda plan, *args: one_round.split(plan, args, EngineOptions())
    fails = lambda text, *args: raises(drjax.DrjaxError, text, split, *args)
    fails("One argument of moments must be ...: that whose slices", plan, 1.0, X)
    two = drjax.make_plan(
        drjax.program(clients=5)(lambda x, y: drjax.reduce_weighted_mean(x, y))
    )
    fails("must be in the argument ..., and its groups must use it", two(X, X), ..., X)
    fails("takes scale as a global value, got Groups", plan, ..., Groups([*X]))
    kept = drjax.make_plan(drjax.program(clients=5)(lambda x: (drjax.reduce_sum(x), x)))
    fails("with reduced results alone", kept(X), ...)
    both = lambda x: (drjax.reduce_sum(x), drjax.reduce_sum(drjax.shift(x, 1)))
    fails(
        "Only plans of one round",
        drjax.make_plan(drjax.program(clients=5)(both))(X),
        ...,
    )


def test_secure_sums_are_refused():
    total = drjax.program(clients=5)(lambda x: drjax.reduce_sum(x, secure=True))
    text = "no process but a group's own may see its slice. This engine's processes"
    plan, options = drjax.make_plan(total)(X), EngineOptions()
    raises(drjax.DrjaxValueError, text, one_round.split, plan, (...,), options)


def test_groups_on_several_devices_are_refused():
    auto = jax.sharding.AxisType.Auto
    mesh = jax.sharding.AbstractMesh((2,), ("model",), axis_types=(auto,))
    shard = lambda x: jax.lax.with_sharding_constraint(x, P("model"))
    total = lambda x: drjax.reduce_sum(drjax.map_fn(shard, x))
    make = drjax.make_plan(drjax.program(clients=5)(total), group_mesh=mesh)
    plan, options = make(np.ones((5, 2), np.float32)), EngineOptions()
    text = "runs each group on a mesh of model=2, and Beam runs a group on one device"
    raises(drjax.MeshError, text, one_round.split, plan, (...,), options)
