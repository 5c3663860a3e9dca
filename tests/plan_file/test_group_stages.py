"""Plan files of single local stages.

Covers: drjax._plan_file.group_stages.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._plan_file.export_plan import export_plan
from drjax._plan_file.group_stages import bytes_of_code, file_of_stage
from drjax._plan_file.load import plan_from_bytes
from drjax.backends import in_process
from tests.helpers.cases import N

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

SECRET = np.random.RandomState(0).rand(64).astype(np.float32)


def validated(secret):
    """A program whose server has numbers of its own."""

    @drjax.program(clients=N)
    def f(model, x):
        model = model * jnp.float32(2)
        pairs = drjax.broadcast(model), x
        mean = drjax.reduce_mean(drjax.map_fn(jnp.multiply, pairs))
        return mean, jnp.mean((mean - secret) ** 2)

    return f


def planned(program):
    return export_plan(
        drjax.make_plan(program)(np.ones(64, "f"), np.ones((N, 64), "f"))
    )


def test_a_file_has_the_work_of_the_groups_alone():
    plan = planned(validated(SECRET))
    (a_round,) = [r for r in plan.rounds if not r.local.empty]
    data = file_of_stage(plan, a_round)
    assert SECRET.tobytes() not in data
    alone = plan_from_bytes("stage", data)
    assert [v.name for v in alone.inputs] == [v.name for v in a_round.local.inputs]
    model, x = np.arange(64, dtype="f"), np.random.RandomState(1).rand(N, 64)
    args = [x.astype("f") if v.partitioned else model for v in alone.inputs]
    (mean,) = jax.tree.leaves(in_process.compile(alone)(*args))
    np.testing.assert_allclose(mean, model * x.mean(0), rtol=1e-5)


def test_equal_stages_have_equal_files():
    """Whatever the server does in these plans; and a client gets each file once."""
    plans = [planned(validated(secret)) for secret in (SECRET, 2 * SECRET)]
    first, second = (
        file_of_stage(plan, a_round)
        for plan in plans
        for a_round in plan.rounds
        if not a_round.local.empty
    )
    assert first == second
    steps = lambda model, x: jax.lax.scan(
        lambda m, _: validated(SECRET)(m, x), model, length=3
    )
    loop = planned(drjax.program(clients=N)(steps))
    assert bytes_of_code(plans[0]) == len(first)
    # Once, though it runs three times; names of values differ.
    assert bytes_of_code(loop) < 1.5 * len(first)
