"""Symbolic dimensions: `jax.export` of `drjax.jit`, and plans.

Covers: drjax._jit.jit_primitive.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import in_mesh_of

pytestmark = pytest.mark.usefixtures("leaks_unchecked")
N = 8


@drjax.program(clients=N)
def loss(w, x):
    def one(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    return drjax.reduce_mean(drjax.map_fn(one, (drjax.broadcast(w), x)))


@drjax.program(clients=N)
def spread(w, x):
    """Two rounds; sums and results with the symbolic dimension."""
    slices = drjax.map_fn(lambda w, x: jnp.sin(x @ w), (drjax.broadcast(w), x))
    mean = drjax.reduce_mean(slices)
    far = drjax.map_fn(lambda m, r: (r - m) ** 2, (drjax.broadcast(mean), slices))
    return drjax.reduce_sum(far), drjax.reduce_max(slices)


FUNCTIONS = {
    "value": loss, "gradient": jax.value_and_grad(loss, (0, 1)), "two rounds": spread,
    "gradient of drjax.jit": jax.grad(drjax.jit(loss, groups_per_step=2)),
}  # fmt: skip


def types():
    (b,) = export.symbolic_shape("b")
    return (
        jax.ShapeDtypeStruct((5,), jnp.float32),
        jax.ShapeDtypeStruct((N, b, 5), jnp.float32),
    )


def args(b):
    return jnp.arange(5.0) / 5, jnp.cos(jnp.arange(N * b * 5.0)).reshape(N, b, 5)


def assert_close(result, expected):
    same = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    jax.tree.map(same, result, expected)


@pytest.mark.sampled
@checkerboard(3, name=FUNCTIONS, step=[1, 3, None])
def test_what_is_exported_runs_for_all_sizes(name, step):
    fn = FUNCTIONS[name]
    run = jax.jit(fn) if "of drjax" in name else drjax.jit(fn, groups_per_step=step)
    exported = export.deserialize(export.export(run)(*types()).serialize())
    for b in (1, 7):
        assert_close(exported.call(*args(b)), fn(*args(b)))


def test_exported_for_a_mesh():
    with in_mesh_of({"clients": 4}):
        exported = export.export(drjax.jit(loss))(*types())
        assert exported.nr_devices == 4
        everywhere = jax.sharding.NamedSharding(
            jax.sharding.get_mesh(), jax.sharding.PartitionSpec()
        )
        result = jax.jit(exported.call)(*jax.device_put(args(3), everywhere))
        with pytest.raises(drjax.PlanError, match="Export it without groups_per_step"):
            export.export(drjax.jit(loss, groups_per_step=1))(*types())
    assert_close(result, loss(*args(3)))


def test_plans_with_symbolic_dimensions(tmp_path):
    shapes = types()
    plan = drjax.make_plan(spread)(*shapes)
    assert "float32[b]" in str(plan) and "4*b" in str(plan.communication())
    exported = export.export(jax.jit(drjax.backends.xla.compile(plan)))(*shapes)
    assert_close(exported.call(*args(3)), spread(*args(3)))
    text = "symbolic dimensions.*known shapes|known shapes.*symbolic dimensions"
    with pytest.raises(drjax.PlanError, match=text):
        plan.save(tmp_path / "plan.drjax")
    with pytest.raises(drjax.PlanError, match=text):
        plan.draw(tmp_path / "plan.svg")
