"""Functions of one coordinate of all groups: values, derivatives, batches, and bytes.

Covers: drjax._primitives.map_columns, drjax._api.column_reductions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.groups import TREES, assert_trees_equal, four
from tests.helpers.meshes import AUTO, EXPLICIT, groups_and_meshes, in_mesh, make_mesh
from tests.helpers.raising import KEYS3, X3, raises, three

# The number of groups, and the mesh.
MESHES = groups_and_meshes(
    "none",
    "two each",
    "uneven",
    "empty devices",
    "model",
    "explicit",
    "explicit model",
    "other axis",
)


def trimmed_mean(c):
    return jnp.sort(c)[1:-1].mean()


def spread(c):
    """A tree of numbers and a small array."""
    return {"mad": jnp.median(jnp.abs(c - jnp.median(c))), "quantiles": jnp.quantile(
        c, jnp.array([0.1, 0.5]))}  # fmt: skip


REDUCTIONS = {
    "median": jnp.median,
    "trimmed mean": trimmed_mean,
    "sign vote": lambda c: jnp.sign(c).sum() * c.mean(),
    "soft": lambda c: jnp.sum(c * jax.nn.softmax(3 * c)),
    "tree": spread,
}


def plainly(fn, x):
    """`fn` of each coordinate of `[n, *s]`, by `jax.vmap`."""
    columns = jnp.moveaxis(x, 0, -1).reshape(-1, len(x))
    outs = jax.vmap(fn)(columns)
    return jax.tree.map(lambda y: y.reshape(*x.shape[1:], *y.shape[1:]), outs)


def program_of(fn, n: int):
    @drjax.program(clients=n)
    def f(x):
        return drjax.reduce_columns(fn, drjax.map_fn(jnp.sin, x))

    return f


def squares(tree):
    return sum(jnp.sum(jnp.cos(y) * y) for y in jax.tree.leaves(tree))


def both_losses(fn, n: int):
    """The loss of the program, and of its plain meaning."""
    f = program_of(fn, n)
    return lambda x: squares(f(x)), lambda x: squares(plainly(fn, jnp.sin(x)))


def data(n: int, *shape: int):
    return np.random.RandomState(n).randn(n, *shape).astype(np.float32)


close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@checkerboard(17, mesh=MESHES, name=REDUCTIONS)
def test_values_and_gradients(name, mesh):
    n, make = MESHES[mesh]
    fn, x = REDUCTIONS[name], data(n, 3, 2)
    loss, direct = both_losses(fn, n)
    want = jax.jit(lambda x: (plainly(fn, jnp.sin(x)), jax.grad(direct)(x)))(x)
    with in_mesh(make and make()):
        result = jax.jit(lambda x: (program_of(fn, n)(x), jax.grad(loss)(x)))(x)
    jax.tree.map(close, result, want)


@pytest.mark.slow
@checkerboard(3, mesh=["uneven", "none", "explicit"])
def test_second_derivatives_and_batches(mesh):
    n, make = MESHES[mesh]
    x = data(n, 2)
    xs, dx = np.stack([x, 2 * x], 1), data(n + 1, 2)[1:]

    def derivatives(f):
        return jax.jit(
            lambda x, xs: (
                jax.hessian(f)(x),
                jax.vmap(jax.grad(f), 1)(xs),
                jax.jvp(f, (x,), (dx,)),
            )
        )

    loss, direct = both_losses(REDUCTIONS["soft"], n)
    want = derivatives(direct)(x, xs)
    with in_mesh(make and make()):
        result = derivatives(loss)(x, xs)
    jax.tree.map(close, result, want)


@checkerboard(4, mesh=["uneven", "two each", "none"], name=["median", "tree"])
def test_plans(name, mesh):
    n, make = MESHES[mesh]
    x = data(n, 3)
    loss, direct = both_losses(REDUCTIONS[name], n)
    both = jax.value_and_grad(loss)
    want = jax.jit(jax.value_and_grad(direct))(x)
    plan = drjax.make_plan(both)(x)
    assert str(plan).count("-> gather(") == 1
    jax.tree.map(close, drjax.backends.reference.compile(plan)(x), want)
    with in_mesh(make and make()):
        jax.tree.map(close, drjax.jit(both)(x), want)


def test_communication():
    """What a device receives, for 32 groups of 20000 numbers on 8 devices."""
    n, d = 32, 20_000
    f = drjax.program(clients=n)(lambda x: drjax.reduce_columns(jnp.median, x))
    with jax.set_mesh(make_mesh({"clients": 8})):
        x = drjax.shard(np.ones((n, d), np.float32), partition={"clients": n})
        forward = drjax.collectives(f)(x).collectives
        both = jax.value_and_grad(lambda x: jnp.sum(f(x) ** 2))
        gradient = drjax.collectives(both)(x).collectives
    sizes = {"all-to-all": n * d * 4 // 8, "all-gather": d * 4}
    assert {c.kind: c.result_bytes for c in forward} == sizes and len(forward) == 2
    # The backward pass sends the cotangents of all groups back, and nothing else.
    large = sorted(c.result_bytes for c in gradient if c.kind != "all-reduce")
    assert large == [80_000, 320_000, 320_000]


# ---------------------------------------------------------------------------------
# Sums over the coordinates, and what the function closes over


@checkerboard(3, mesh=["uneven", "none", "explicit model"])
def test_a_sum_over_coordinates(mesh):
    """The Gram matrix of the groups, and its gradients to x and to a closed array."""
    n, make = MESHES[mesh]
    x, scale = data(n, 3, 3), jnp.array([1.0, 2.0])

    @drjax.program(clients=n)
    def gram(x, scale):
        outer = lambda c: jnp.outer(c, c) * scale.sum()
        return drjax.reduce_columns(outer, x, sum=True)

    def direct(x, scale):
        x = x.reshape(n, -1)
        return x @ x.T * scale.sum()

    grad = lambda f: jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1))
    want = jax.jit(lambda *xs: (direct(*xs), grad(direct)(*xs)))(x, scale)
    with in_mesh(make and make()):
        result = jax.jit(lambda *xs: (gram(*xs), grad(gram)(*xs)))(x, scale)
        jax.tree.map(close, result, want)
    plan = drjax.make_plan(grad(gram))(x, scale)
    result = drjax.backends.reference.compile(plan)(x, scale)
    jax.tree.map(close, result, want[1])


def test_one_all_reduce_adds_the_coordinates():
    f = drjax.program(clients=16)(
        lambda x: drjax.reduce_columns(lambda c: jnp.outer(c, c), x, sum=True)
    )
    with jax.set_mesh(make_mesh({"clients": 8})):
        x = drjax.shard(data(16, 100), partition={"clients": 16})
        sizes = {c.kind: c.result_bytes for c in drjax.collectives(f)(x).collectives}
    assert sizes == {"all-to-all": 16 * 104 * 4 // 8, "all-reduce": 16 * 16 * 4}


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map(check_vma):
    n, x, scale = 8, data(8, 3), jnp.float32(2.0)
    mesh = make_mesh({"clients": 4})

    @drjax.program(clients=n)
    def f(x, scale):
        return drjax.reduce_columns(lambda c: jnp.median(c) * scale, x)

    loss = lambda x, scale: jnp.sum(f(x, scale) ** 2)
    direct = lambda x, scale: jnp.sum((jnp.median(x, 0) * scale) ** 2)
    specs = P("clients"), P()
    with jax.set_mesh(mesh):
        run = jax.shard_map(f, in_specs=specs, out_specs=P(), check_vma=check_vma)
        close(jax.jit(run)(x, scale), 2 * jnp.median(x, 0))
        if not check_vma:
            return
        grad = jax.grad(loss, (0, 1))
        inside = jax.shard_map(grad, in_specs=specs, out_specs=specs)
        outside = jax.grad(lambda *xs: jnp.sum(run(*xs) ** 2), (0, 1))
        results = jax.jit(inside)(x, scale), jax.jit(outside)(x, scale)
    want = jax.grad(direct, (0, 1))(x, scale)
    for result in results:
        jax.tree.map(close, result, want)


def test_a_partition_over_two_axes():
    x = data(6, 5)
    f = drjax.program(clients=6, mesh_axes=("a", "b"))(
        lambda x: drjax.reduce_columns(trimmed_mean, x)
    )
    loss = lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sum(f(x) ** 2)))
    want = loss(lambda x: plainly(trimmed_mean, x))(x)
    with jax.set_mesh(make_mesh({"a": 2, "b": 2})):
        jax.tree.map(close, loss(f)(x), want)


def on_both_axes(kind, spec, **kwargs):
    """A mesh over two axes, and the arguments of a `shard_map` over some of them."""
    shape = {"clients": 2, "model": 2}
    return lambda: make_mesh(shape, kind), spec, kwargs


LAYOUTS = {
    "model": on_both_axes(AUTO, P(None, None, "model")),
    "explicit": on_both_axes(EXPLICIT, P("clients", None, "model")),
    "model in a shard_map": on_both_axes(
        AUTO, P(None, None, "model"), axis_names={"model"}
    ),
    "model in an unchecked one": on_both_axes(
        AUTO, P(None, None, "model"), axis_names={"model"}, check_vma=False
    ),
    "both in a shard_map": on_both_axes(
        AUTO, P("clients", None, "model"), axis_names={"clients", "model"}
    ),
    "two other axes": (
        lambda: make_mesh({"clients": 2, "model": 2, "data": 2}),
        P(None, "data", "model"),
        {},
    ),
}


@checkerboard(3, layout=LAYOUTS)
def test_coordinates_sharded_over_other_axes(layout):
    make, spec, kwargs = LAYOUTS[layout]
    x, mesh = data(4, 2, 4), make()
    f = drjax.program(clients=4)(lambda x: drjax.reduce_columns(jnp.median, x))
    loss = lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sum(f(x) ** 2)))
    want = loss(lambda x: jnp.median(x, 0))(x)
    with jax.set_mesh(mesh):
        if kwargs:
            f = jax.shard_map(f, in_specs=spec, out_specs=P(*spec[1:]), **kwargs)
        x = jax.device_put(x, jax.NamedSharding(mesh, spec))
        jax.tree.map(close, loss(f)(x), want)


# ---------------------------------------------------------------------------------
# Types, trees, transformations


DTYPES = ("float32", "bfloat16", "float16", "complex64", "int8", "uint32", "bool",
          "float8_e4m3fn")  # fmt: skip


@checkerboard(7, dtype=DTYPES, mesh=["uneven", "none"])
def test_dtypes(dtype, mesh):
    n, make = MESHES[mesh]
    x = jnp.asarray(2 * data(n, 3)).astype(dtype)
    f = drjax.program(clients=n)(lambda x: drjax.reduce_columns(lambda c: c[2], x))
    add = drjax.program(clients=n)(
        lambda x: drjax.reduce_columns(lambda c: c[2], x, sum=True)
    )
    with in_mesh(make and make()):
        result = jax.jit(f)(x)
        total = None if dtype.startswith("float8") else jax.jit(add)(x)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(result), np.asarray(x[2]))
    if total is not None:
        assert total.dtype == x[2].sum().dtype
        close(np.asarray(total, complex), np.asarray(x[2].sum(), complex), rtol=1e-2)


@pytest.mark.parametrize("name", TREES)
def test_trees(name):
    x = TREES[name]()
    maximum = four(lambda x: drjax.reduce_columns(jnp.max, x))
    assert_trees_equal(maximum(x), jax.tree.map(lambda x: x.max(0), x))


def test_a_tree_stands_in_the_place_of_each_leaf():
    f = three(lambda x: drjax.reduce_columns(lambda c: (c[0], {"all": c}), x))
    result = f({"a": X3, "b": np.ones((3, 2), np.float32)})
    assert result["a"][0].shape == () and result["a"][1]["all"].shape == (3,)
    assert result["b"][0].shape == (2,) and result["b"][1]["all"].shape == (2, 3)


@pytest.mark.parametrize("mesh", [None, {"clients": 2}])
def test_no_coordinates_and_one_group(mesh):
    with in_mesh(mesh and make_mesh(mesh)):
        f = four(lambda x: drjax.reduce_columns(jnp.median, x))
        assert jax.jit(f)(np.ones((4, 0, 2))).shape == (0, 2)
        add = four(lambda x: drjax.reduce_columns(jnp.median, x, sum=True))
        assert float(jax.jit(add)(np.ones((4, 0, 2)))) == 0.0
        grad = jax.grad(lambda x: jnp.sum(f(x)))
        assert jax.jit(grad)(np.ones((4, 0, 2))).shape == (4, 0, 2)
        one = drjax.program(clients=1)(lambda x: drjax.reduce_columns(jnp.median, x))
        np.testing.assert_array_equal(jax.jit(one)(np.ones((1, 3))), np.ones(3))


def test_transformations():
    """Scans, checkpoints, custom derivatives, and fn that does not use its column."""
    n, x = 5, data(5, 3) / 9

    @jax.custom_jvp
    def twice(c):
        return 2 * c.sum()

    twice.defjvp(lambda c, dc: (twice(*c), jnp.full(5, 3.0) @ dc[0]))

    @drjax.program(clients=n)
    def f(x):
        def step(total, _):
            move = jax.checkpoint(lambda x: drjax.reduce_columns(twice, x))
            return total / 9 + move(x * total[None]), drjax.reduce_columns(
                lambda c: 1.0, x
            )

        return jax.lax.scan(step, jnp.ones(3), None, 3)

    def direct(x):
        one = jax.vmap(twice, 1)
        step = lambda t, _: (t / 9 + one(x * t[None]), jnp.ones(3))
        return jax.lax.scan(step, jnp.ones(3), None, 3)

    loss = lambda f: lambda x: (jnp.sum(jnp.sin(f(x)[0])), f(x)[1])
    both = lambda f: jax.value_and_grad(loss(f), has_aux=True)
    want = jax.jit(both(direct))(x)
    for run in jax.jit, drjax.jit:
        jax.tree.map(close, run(both(f))(x), want)


@pytest.mark.parametrize("mesh", ["none", "uneven"])
def test_derivative_rules_that_close_over_arrays(mesh):
    """All groups' weights, for each coordinate: one array, which has no coordinates."""
    n, make = MESHES[mesh]
    x, weights = data(n, 3, 2), np.arange(n, dtype=np.float32)
    closed = jnp.asarray(weights)
    total = lambda c: c.sum()
    forward, backward = jax.custom_jvp(total), jax.custom_vjp(total)
    forward.defjvp(lambda c, dc: (total(*c), closed @ dc[0]))
    backward.defvjp(lambda c: (total(c), None), lambda _, ct: (closed * ct,))
    want = np.broadcast_to(weights[:, None, None], x.shape)
    with in_mesh(make and make()):
        for fn in forward, backward:
            f = drjax.program(clients=n)(lambda x, fn=fn: drjax.reduce_columns(fn, x))
            close(jax.jit(jax.grad(lambda x, f=f: f(x).sum()))(x), want)


# ---------------------------------------------------------------------------------
# Errors


def columns(fn, x: Any = X3, **kwargs):
    return lambda: three(lambda x: drjax.reduce_columns(fn, x, **kwargs))(x)


def effect(c):
    jax.debug.print("{}", c)
    return c.sum()


@pytest.mark.parametrize(
    "call, error, text",
    [
        (columns(lambda c: None), drjax.DrjaxTypeError, "returns no array"),
        (columns(lambda c: "a"), drjax.DrjaxTypeError,
         "drjax.reduce_columns needs arrays as leaves, but the result of <lambda>"),
        (columns(effect), drjax.DrjaxTypeError, "given to drjax.reduce_columns has ef"),
        (columns(jnp.sum, KEYS3()), drjax.DrjaxTypeError, "leaves that are numbers"),
        (columns(lambda c: drjax.reduce_sum(c)), drjax.ScopeError,
         "calls a building block or a program; it sees the clients:3 numbers"),
        (columns(lambda c: c * drjax.partition_index()), drjax.ScopeError,
         "calls a building block"),
        (columns(lambda c: jax.lax.psum(c, "clients")), drjax.MeshError,
         "uses a collective over the axis of partition clients:3 itself"),
        (columns(jnp.sum, X3[:2]), drjax.DrjaxValueError, "leading axis [3, ...]"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    raises(error, text, call)


def test_a_closed_value_that_is_sharded_over_the_partition():
    f = three(lambda x, y: drjax.reduce_columns(lambda c: c.sum() + y.sum(), x))
    with jax.set_mesh(make_mesh({"clients": 3}, EXPLICIT)):
        y = drjax.shard(X3, partition={"clients": 3})
        raises(drjax.MeshError, "closes over an array that is sharded", f, X3, y)


def test_a_closed_value_that_is_partitioned_has_no_plan():
    def f(x):
        y = drjax.map_fn(jnp.sin, x)
        return drjax.reduce_columns(lambda c: c.sum() + jnp.sort(y)[0], x)

    raises(drjax.PlanError, "sort at ", drjax.make_plan(three(f)), X3)
