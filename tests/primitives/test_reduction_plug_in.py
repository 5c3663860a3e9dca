"""A reduction as a plug-in: a primitive, an entry in the table, and a block.

What is in the first part is all that a new reduction needs; every backend then runs it.

Covers: drjax._primitives.reduce_ops, drjax.backends.xla.chunked_stage.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad

import drjax
from drjax._api.resolve import bind_partitioned
from drjax._primitives import reduce_ops, registration
from drjax._primitives.collectives import broadcast_p, reduce_sum_p
from drjax._primitives.map_fn import map_slices
from drjax._sharding.avals import global_aval
from drjax._sharding.execute import shard_map_over_devices, vary
from drjax._sharding.layout import make_layout
from drjax.backends import in_process
from tests.helpers.meshes import in_mesh_of

# ---------------------------------------------------------------------------------
# The plug-in

reduce_prod_p = registration.new_primitive("reduce_prod")


def across_devices(layout, x):
    return jnp.prod(
        lax.all_gather(vary(x, layout.axes), layout.axes, to="invarying"), 0
    )


def execute(x, *, partition, mesh):
    layout = make_layout(partition, mesh)

    def body(x, indices=None):
        y = jnp.prod(layout.mask_padding(x, indices, 1), axis=0)
        return [across_devices(layout, y) if layout.axes else y]

    return shard_map_over_devices(
        layout, body, [x], [True], [False], with_indices=layout.uneven
    )[0]


def others(x, zeros, product):
    """The product of all other groups' numbers, from that of all that are not zero."""
    of_zero = jnp.where(zeros == 1, product, 0)
    of_other = jnp.where(zeros == 0, product / jnp.where(x == 0, 1, x), 0)
    return jnp.where(x == 0, of_zero, of_other)


def jvp(primals, tangents, **params):
    """d prod_i x_i = sum_i (prod_{j != i} x_j) dx_i."""
    (x,), (dx,) = primals, tangents
    zeros = map_slices(lambda x: (x == 0).astype(x.dtype), x, **params)
    zeros = broadcast_p.bind(reduce_sum_p.bind(zeros, **params), **params)
    nonzero = map_slices(lambda x: jnp.where(x == 0, 1, x), x, **params)
    product = broadcast_p.bind(reduce_prod_p.bind(nonzero, **params), **params)
    weight = map_slices(others, x, zeros, product, **params)
    dy = reduce_sum_p.bind(map_slices(lax.mul, dx, weight, **params), **params)
    return reduce_prod_p.bind(x, **params), dy


def abstract_eval(x, *, partition, mesh):
    return global_aval(x, make_layout(partition, mesh))


registration.register_execution(reduce_prod_p, execute)
reduce_prod_p.def_abstract_eval(abstract_eval)
ad.primitive_jvps[reduce_prod_p] = jvp
registration.register_batching(reduce_prod_p, -1, group_axis_in=True)

PROD = reduce_ops.ReduceOp(
    "prod",
    reduce_prod_p,
    "product over groups",
    np.multiply,
    lambda dtype: 1,
    across_devices,
    if_no_group=1.0,
    lax_primitives=(lax.reduce_prod_p,),
)


def reduce_prod(x):
    return bind_partitioned("reduce_prod", x, None, None, reduce_prod_p.bind)


# ---------------------------------------------------------------------------------
# Tests

N = 6
X = np.random.RandomState(0).uniform(0.5, 2, (N, 3))
X[2, 1] = 0.0


@pytest.fixture(autouse=True)
def plug_in(monkeypatch):
    monkeypatch.setitem(reduce_ops.REDUCE_OPS, PROD.name, PROD)
    monkeypatch.setitem(reduce_ops._of_primitive, PROD.primitive, PROD)
    for primitive in PROD.lax_primitives:
        monkeypatch.setitem(reduce_ops._of_lax_primitive, primitive, PROD)
    registration.BLOCKS.add(PROD.primitive)
    yield
    registration.BLOCKS.remove(PROD.primitive)


@drjax.program(clients=N)
def f(scale, x):
    y = drjax.map_fn(lambda s, x: jnp.sin(s * x), (drjax.broadcast(scale), x))
    return reduce_prod(y), drjax.reduce_sum(y)


EXPECTED = np.sin(1.5 * X).prod(0), np.sin(1.5 * X).sum(0)


def close(result):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), result, EXPECTED
    )


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [None, {"clients": 2}, {"clients": 4}], ids=str)
@pytest.mark.parametrize("step", [None, 1, 2])
def test_xla(shape, step):
    with in_mesh_of(shape):
        close(f(1.5, X))
        close(jax.jit(f)(1.5, X))
        close(drjax.jit(f, groups_per_step=step)(1.5, X))


def test_over_an_inner_level():
    @drjax.program(clients=N)
    def of_clients(x):
        return reduce_prod(x)

    @drjax.program(pods=2)
    def of_pods(x):
        return reduce_prod(drjax.map_fn(of_clients, x))

    x = np.stack([X, X + 1])
    plan = drjax.make_plan(of_pods, partitioned=True)(x)
    inner = plan.rounds[0].local.inner
    assert inner is not None
    assert [r.op for p in (inner, plan) for r in p.rounds[0].reduces] == ["prod"] * 2
    for run in (of_pods, drjax.jit(of_pods), in_process.compile(plan)):
        np.testing.assert_allclose(run(x), x.prod((0, 1)), rtol=1e-6)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_its_output_is_a_matrix_product_that_is_also_summed(order):
    """The sum over the groups contracts the product, the other reduction does not."""
    x = np.float32(np.random.RandomState(1).uniform(0.5, 1, (N, 3, 2)))

    @drjax.program(clients=N)
    def both(x):
        y = drjax.map_fn(lambda x: x.T @ x, x)
        reductions = reduce_prod, drjax.reduce_sum
        return [reductions[i](y) for i in order]

    y = np.swapaxes(x, 1, 2) @ x
    expected = [(y.prod(0), y.sum(0))[i] for i in order]
    for result, value in zip(drjax.jit(both)(x), expected, strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-5)


def test_devices_are_combined_by_one_collective():
    with in_mesh_of({"clients": 2}):
        x = drjax.shard(X, partition={"clients": N})
        report = drjax.collectives(drjax.jit(drjax.program(clients=N)(reduce_prod)))(x)
    assert sum(report.counts.values()) == 1


def test_reference():
    close(drjax.backends.reference.compile(drjax.make_plan(f)(1.5, X))(1.5, X))


def test_a_plan_prints_it():
    assert "product over groups" in str(drjax.make_plan(f)(1.5, X))


def test_the_reduction_of_jax_over_the_group_axis_is_it():
    @drjax.program(clients=N)
    def g(x):
        return jnp.prod(drjax.map_fn(lambda x: 2 * x, x), axis=0)

    plan = drjax.make_plan(g, partitioned=True)(X[:2].repeat(3, 0))
    assert [reduce.op for reduce in plan.rounds[0].reduces] == ["prod"]


def test_a_plan_file_and_an_engine(tmp_path):
    drjax.make_plan(f)(1.5, X).save(tmp_path / "f.drjax")
    plan = drjax.load_plan(tmp_path / "f.drjax")
    assert plan.rounds[0].reduces[0].op == "prod"
    for block_size in (1, 4):
        close(in_process.compile(plan, block_size=block_size)(1.5, X))


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
def test_the_gradient_is_right_where_a_number_is_zero(jit):
    g = drjax.program(clients=N)(lambda x: reduce_prod(x).sum())
    others = [[np.delete(X[:, d], i).prod() for d in range(3)] for i in range(N)]
    np.testing.assert_allclose(jit(jax.grad(g))(X), others, rtol=1e-6)
