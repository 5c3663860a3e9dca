"""Communication in the compiled program: what the algorithm needs, and no more.

Counted in the HLO after compilation for eight devices.

Covers: drjax._primitives.collectives, drjax._primitives.lowered_equations.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.compiled import flops, hlo_text
from tests.helpers.meshes import EXPLICIT, in_mesh, make_mesh

X = jnp.ones(4)
N = 16


def collectives(f, *args, mesh=None, n=N):
    """How often each kind of collective stands in the compiled `f(*args)`."""
    with in_mesh(mesh or make_mesh({"clients": 8})):
        return drjax.collectives(f)(*args).counts


def make_loss(n=N):
    @drjax.program(clients=n)
    def loss(x):
        def fit(y):
            return jnp.sum(jnp.sin(y) ** 2)

        return drjax.reduce_mean(drjax.map_fn(fit, drjax.broadcast(x)))

    return loss


def make_maml(n=N):
    @drjax.program(clients=n)
    def loss(x, rate, data):
        def task_loss(w, d):
            return jnp.sum((jnp.tanh(w * d) - 1.0) ** 2)

        def adapted(w, rate, d):
            return task_loss(w - rate * jax.grad(task_loss)(w, d), d)

        args = (*drjax.broadcast((x, rate)), data)
        return drjax.reduce_mean(drjax.map_fn(adapted, args))

    return loss, (X, 0.1, jnp.ones((n, 4)))


def jvp(f):
    return lambda x: jax.jvp(f, (x,), (x,))


ONE = {"all-reduce": 1}
TRANSFORMS = {
    "value": lambda f: f,
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "jvp": jvp,
    "hessian": jax.hessian,
}


@pytest.mark.sampled
@pytest.mark.parametrize("n", [16, 10, 3])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_one_all_reduce(name, n):
    assert collectives(TRANSFORMS[name](make_loss(n)), X) == ONE


@pytest.mark.parametrize("name", ["value", "value_and_grad"])
@pytest.mark.parametrize(
    "shape, kind",
    [
        ({"clients": 4, "model": 2}, None),
        ({"clients": 8}, EXPLICIT),
        ({"clients": 4, "model": 2}, EXPLICIT),
    ],
    ids=str,
)
def test_one_all_reduce_on_other_meshes(name, shape, kind):
    mesh = make_mesh(shape, kind) if kind else make_mesh(shape)
    assert collectives(TRANSFORMS[name](make_loss()), X, mesh=mesh) == ONE


@pytest.mark.parametrize("axes", [("dcn", "ici"), ("ici", "dcn")], ids=str)
def test_one_all_reduce_over_two_axes(axes):
    @drjax.program(clients=16, mesh_axes=axes)
    def f(x):
        y = drjax.map_fn(lambda a: jnp.sum(a**2), drjax.broadcast(x))
        return drjax.reduce_mean(y)

    mesh = make_mesh({"dcn": 4, "ici": 2})
    assert collectives(jax.value_and_grad(f), X, mesh=mesh) == ONE


def test_maml():
    loss, args = make_maml()
    assert collectives(loss, *args) == ONE
    assert collectives(jax.grad(loss), *args) == ONE
    assert collectives(jax.value_and_grad(loss, (0, 1)), *args) == ONE


@pytest.mark.parametrize("n", [16, 10])
def test_local_sgd_round(n):
    @drjax.program(clients=n)
    def train(params, data):
        def local(params, data):
            def step(p, d):
                loss = lambda p: jnp.sum((p["w"] * d + p["b"]) ** 2)
                return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p)), 0.0

            new, _ = jax.lax.scan(step, params, data)
            return jax.tree.map(jnp.subtract, new, params)

        deltas = drjax.map_fn(local, (drjax.broadcast(params), data))
        mean = drjax.reduce_mean(deltas)
        return jax.tree.map(jnp.add, params, mean)

    params = {"w": X, "b": X}
    assert collectives(train, params, jnp.ones((n, 5, 4))) == ONE


def test_weighted_mean_needs_no_more_than_one_all_reduce():
    @drjax.program(clients=N)
    def f(x):
        y = drjax.map_fn(jnp.sin, drjax.broadcast(x))
        weights = drjax.partition_index() + 1.0
        return drjax.reduce_weighted_mean({"a": y, "b": 2 * y}, weights)

    assert collectives(f, X) == ONE


def mapped(block):
    """A program that applies a block to what each group computed."""

    @drjax.program(clients=N)
    def f(x):
        return block(drjax.map_fn(jnp.sin, drjax.broadcast(x)))

    return f


@pytest.mark.parametrize(
    "block, expected",
    [
        (drjax.reduce_max, ONE),
        (drjax.reduce_min, ONE),
        (lambda y: drjax.select(y, 3), ONE),
        (drjax.gather, {"all-gather": 1}),
        (lambda y: y, {}),
        (lambda y: drjax.scatter(jnp.ones((N, 4))) * y, {}),
        (lambda y: (drjax.partition_index(), y), {}),
    ],
    ids=["max", "min", "select", "gather", "broadcast", "scatter", "index"],
)
def test_blocks(block, expected):
    assert collectives(mapped(block), X) == expected


def test_gradient_of_the_maximum_needs_a_count():
    """Ties are shared, so the number of groups at the maximum makes another round."""
    f = lambda x: mapped(drjax.reduce_max)(x).sum()
    assert collectives(jax.grad(f), X) == {"all-reduce": 3}


@pytest.mark.parametrize("n, expected", [(16, {}), (10, ONE)])
def test_transpose_of_gather_is_without_communication(n, expected):
    gather = drjax.program(clients=n)(drjax.gather)
    slices = jnp.ones((n, 4))
    partition = {"clients": n}

    def f(ct):
        (y,) = jax.linear_transpose(gather, slices)(ct)
        y = drjax.map_fn(jnp.sin, y, partition=partition)
        # An uneven value would be gathered to return it.
        return y if n % 8 == 0 else drjax.reduce_sum(y, partition=partition)

    assert collectives(f, slices) == expected


def test_transpose_of_scatter_is_one_all_gather():
    scatter = drjax.program(clients=N)(drjax.scatter)
    slices = jnp.ones((N, 4))

    def f(x):
        y = mapped(lambda y: y * (1.0 + drjax.partition_index())[:, None])(x)
        return jax.linear_transpose(scatter, slices)(y)

    assert collectives(f, X) == {"all-gather": 1}


@pytest.mark.sampled
@pytest.mark.parametrize("n", [16, 10])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_one_all_reduce_in_each_body_of_a_scan_over_rounds(n, checkpoint):
    loss = make_loss(n)

    def total(x):
        def body(x, _):
            return x - 0.1 * loss(x) * x, None

        body = jax.checkpoint(body) if checkpoint else body
        return jnp.sum(jax.lax.scan(body, x, None, length=5)[0])

    with in_mesh(make_mesh({"clients": 8})):
        reports = [drjax.collectives(f)(X) for f in (total, jax.grad(total))]
    # With checkpoint, the rematerialized value shares one all-reduce with
    # the gradient.
    for report, loops in zip(reports, (1, 2), strict=True):
        assert report.counts == {"all-reduce": loops}
        assert [(c.times, c.loops[0].trip_count) for c in report.collectives] == (
            [(5, 5)] * loops
        )


# ---------------------------------------------------------------------------------
# What each device holds and does


def test_lowered_blocks_are_shard_maps_with_pcast_and_psum():
    f = make_loss()
    with in_mesh(make_mesh({"clients": 8})):
        text = jax.jit(f).lower(X).as_text()
    assert text.count("sdy.manual_computation") == 3  # broadcast, map_fn, reduce_mean
    assert text.count("stablehlo.all_reduce") == 1
    assert 'manual_axes={"clients"}' in text


def test_lowering_functions_in_terms_of_jax():
    """What the primitives lower to, as jaxprs."""
    from drjax._primitives import collectives as p

    partition = drjax.Partition("clients", 16)
    mesh = make_mesh({"clients": 8}).abstract_mesh
    with in_mesh(make_mesh({"clients": 8})):
        params: Any = dict(partition=partition, mesh=mesh)
        down = str(jax.make_jaxpr(lambda x: p.execute_broadcast(x, **params))(X))
        up = str(
            jax.make_jaxpr(lambda x: p.execute_reduce_sum(x, **params))(
                jnp.ones((16, 4))
            )
        )
    # lax.pcast(..., to="varying") binds the primitive that prints as pvary
    assert "shard_map" in down and "pvary" in down and "psum" not in down
    assert "shard_map" in up and "psum" in up and "check_vma=True" in up


@pytest.mark.parametrize("n", [8, 16, 10])
def test_work_is_divided_over_the_devices(n):
    def square(a, number):
        a = a * (1.0 + number)
        return a @ a

    @drjax.program(clients=n)
    def f(x):
        y = drjax.map_fn(square, (drjax.broadcast(x), drjax.partition_index()))
        return y if n % 8 == 0 else drjax.reduce_sum(jnp.sin(y))

    x = jnp.ones((32, 32))
    whole = flops(f, x)
    with in_mesh(make_mesh({"clients": 8})):
        per_device, y = flops(f, x), jax.jit(f)(x)
    k = -(-n // 8)
    assert per_device == pytest.approx(whole * k / n, rel=0.1)
    if n % 8 == 0:
        assert y.sharding.shard_shape(y.shape) == (k, 32, 32)


def test_pointwise_work_between_blocks_stays_sharded():
    @drjax.program(clients=N)
    def f(x, data):
        y = drjax.map_fn(jnp.multiply, (drjax.broadcast(x), data))
        z = jnp.exp(y) * 2.0 + y
        return drjax.reduce_sum(z)

    total = lambda x, data: f(x, data).sum()
    mesh = make_mesh({"clients": 8})
    data = drjax.shard(np.ones((N, 77), np.float32), mesh, partition=f)
    with in_mesh(mesh):
        for fn in (f, jax.grad(total)):
            text = hlo_text(fn, jnp.ones(77), data)
            assert "f32[2,77]" in text and "f32[16,77]" not in text


def test_data_given_by_shard_stays_where_it_is():
    data = np.ones((N, 77), np.float32)

    @drjax.program(clients=N)
    def f(x, data):
        return drjax.reduce_mean(drjax.map_fn(jnp.multiply, (drjax.broadcast(x), data)))

    mesh = make_mesh({"clients": 8})
    data = drjax.shard(data, mesh, partition=f)
    assert collectives(f, jnp.ones(77), data, mesh=mesh) == ONE
