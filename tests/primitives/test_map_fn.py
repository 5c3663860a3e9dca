"""What a mapped function may do, and which group it works for.

Covers: drjax._primitives.map_fn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.groups import MESHES, N, Pair, assert_trees_equal, four, slices
from tests.helpers.meshes import in_mesh_of, make_mesh

SLOW = pytest.mark.slow
W = jnp.array([1, 2, 3], jnp.float32)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (3 * ct,))


@jax.custom_jvp
def tripled(x):
    return 3 * x


tripled.defjvp(lambda p, t: (3 * p[0], 4 * t[0]))


@jax.custom_vjp
def closed_over(x):
    return x * W.sum()


closed_over.defvjp(
    lambda x: (x * W.sum(), jnp.cos(x) * W[0]), lambda s, ct: (ct * s * W.prod(),)
)


@jax.custom_jvp
def closed_over_forward(x):
    return x * W.sum()


closed_over_forward.defjvp(lambda p, t: (p[0] * W.sum(), t[0] * W.prod()))

host_sin = lambda x: jax.pure_callback(
    np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
)

FEATURES = {
    "closure over arrays": lambda a: (a * W).sum() + np.array([1, 2], np.float32).sum(),
    "jit": jax.jit(lambda a: a * W[0] + 1),
    "grad": jax.grad(lambda a: jnp.sin(a) * a),
    "hessian": jax.hessian(lambda a: a**3),
    "scan": lambda a: lax.scan(lambda c, x: (c * x, c), a, W)[0],
    "fori": lambda a: lax.fori_loop(0, 3, lambda i, c: c * a + i, 1.0),
    "cond": lambda a: lax.cond(a > 0, jnp.sin, jnp.cos, a),
    "cond on a constant": lambda a: lax.cond(W[0] > 0, jnp.sin, jnp.cos, a),
    "switch": lambda a: lax.switch(a.astype(int) % 2, [jnp.sin, lambda a: a * 2], a),
    "custom_vjp": lambda a: doubled(a) * a,
    "custom_jvp": lambda a: tripled(a) * a,
    "custom_vjp that closes over arrays": lambda a: closed_over(a) * a,
    "custom_jvp that closes over arrays": lambda a: closed_over_forward(a) * a,
    "checkpoint": jax.checkpoint(lambda a: jnp.sin(jnp.sin(a))),
    "random": lambda a: a * jax.random.normal(jax.random.key(3), (2,)).sum(),
    "vmap": lambda a: jax.vmap(lambda b: a * b)(W).sum(),
    "vmap with collectives": lambda a: jax.vmap(
        lambda b: a * lax.psum(b, "inner"), axis_name="inner"
    )(W).sum(),
    "linalg": lambda a: jnp.linalg.inv(jnp.eye(2) * (a + 20))[0, 0],
    "sort": lambda a: jnp.sort(W * a)[0],
    "relu and softmax": lambda a: jax.nn.softmax(jax.nn.relu(W * a))[0],
}
ONLY_VALUES = {
    "while": lambda a: lax.while_loop(lambda c: c < 10, lambda c: c * c + 1, a),
    "pure_callback": host_sin,
}


FEATURE_X = np.array([-1.5, 0.5, 2.0, 3.5], np.float32)


@functools.cache
def expected_of_feature(feature):
    """Values and slopes of a feature, group by group."""
    fn = FEATURES.get(feature) or ONLY_VALUES[feature]
    fn = jax.jit(jax.value_and_grad(fn) if feature in FEATURES else fn)
    return jax.tree.map(lambda *ys: np.stack(ys), *[fn(a) for a in FEATURE_X])


@pytest.mark.sampled
@checkerboard(4, feature=[*FEATURES, *ONLY_VALUES], mesh=MESHES)
def test_features_inside_a_mapped_function(feature, mesh):
    fn = FEATURES.get(feature) or ONLY_VALUES[feature]

    def program(x):
        y = four(lambda x: drjax.map_fn(fn, x))(x)
        return y.sum(), y

    def value_and_slopes(x):
        if feature in ONLY_VALUES:
            return program(x)[1]
        (_, y), slopes = jax.value_and_grad(program, has_aux=True)(x)
        return y, slopes

    with in_mesh_of(mesh):
        result = jax.jit(value_and_slopes)(FEATURE_X)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    jax.tree.map(close, result, expected_of_feature(feature))


OFTEN = {"scan", "cond", "checkpoint", *(name for name in FEATURES if "custom" in name)}


@pytest.mark.sampled
@pytest.mark.usefixtures("leaks_unchecked")
@pytest.mark.parametrize("mesh", [None, pytest.param({"clients": 3}, marks=SLOW)])
@pytest.mark.parametrize(
    "feature", [f if f in OFTEN else pytest.param(f, marks=SLOW) for f in FEATURES]
)
def test_features_of_a_jitted_program(feature, mesh):
    """Derivatives of it, of any order, as of the program itself."""
    program = four(lambda x: drjax.reduce_sum(drjax.map_fn(FEATURES[feature], x)))

    def derivatives(fn, x):
        slopes = jax.grad(fn)
        squares = lambda x: (slopes(x) ** 2).sum()
        hessian = jax.jacfwd(slopes)(x)
        return jax.grad(jax.checkpoint(fn))(x), hessian, jax.grad(squares)(x)

    want = jax.jit(functools.partial(derivatives, program))(FEATURE_X)
    with in_mesh_of(mesh):
        planned = drjax.jit(program, groups_per_step=1)
        result = jax.jit(functools.partial(derivatives, planned))(FEATURE_X)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, result, want)


def test_closures_over_tracers_are_broadcast():
    x = slices() + 0.5

    @four
    def program(w, x):
        local = jnp.sin(w)
        return drjax.reduce_sum(drjax.map_fn(lambda a: local * a + w, x))

    reference = lambda w, x: (jnp.sin(w) * x + w).sum()
    np.testing.assert_allclose(program(2.0, x), reference(2.0, x), rtol=1e-6)
    grads = jax.jit(jax.grad(program, (0, 1)))(2.0, x)
    for a, b in zip(grads, jax.grad(reference, (0, 1))(2.0, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    jaxpr = str(jax.make_jaxpr(jax.grad(program))(2.0, x))
    assert jaxpr.count("drjax_broadcast") >= 2 and "drjax_reduce_sum" in jaxpr
    batched = jax.vmap(program, (0, None))(jnp.array([1, 2], jnp.float32), x)
    np.testing.assert_allclose(
        batched, [reference(1.0, x), reference(2.0, x)], rtol=1e-6
    )


RESULTS = {
    "nothing": (lambda a: None, None),
    "an empty tree": (lambda a: {}, {}),
    "a constant": (lambda a: 1.5, np.full(N, 1.5, np.float32)),
    "an array closed over": (lambda a: W, np.tile(W, (N, 1))),
    "its argument": (lambda a: a, np.arange(N)),
    "a tree": (lambda a: {"a": (a, None), "p": Pair(a, [])},
               {"a": (np.arange(N), None), "p": Pair(np.arange(N), [])}),
    "twice the same": (lambda a: [a, a], [np.arange(N)] * 2),
    "a number of another dtype": (lambda a: a > 1, np.arange(N) > 1),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("result", RESULTS)
def test_results_of_mapped_functions(result, mesh):
    fn, expected = RESULTS[result]
    program = four(lambda x: drjax.map_fn(fn, x))
    with in_mesh_of(mesh):
        assert_trees_equal(program(np.arange(N)), expected)
        assert_trees_equal(jax.jit(program)(np.arange(N)), expected)


@pytest.mark.parametrize("mesh", [*MESHES, {"clients": 3}])
@pytest.mark.parametrize("arg", [None, (), {}, []], ids=str)
def test_maps_without_operands_still_run_once_a_group(arg, mesh):
    program = four(lambda: drjax.map_fn(lambda *_: (1.0, drjax.partition_index()), arg))
    with in_mesh_of(mesh):
        for y in (program(), jax.jit(program)()):
            assert_trees_equal(y, (np.ones(N), np.arange(N)))


@pytest.mark.parametrize("mesh", MESHES)
def test_effects_inside_a_mapped_function(mesh, capfd):
    seen = []

    def record(a):
        seen.append(float(a))
        return np.float32(a) + 1

    @four
    def program(x):
        def local(a):
            jax.debug.print("group value {a}", a=a)
            return io_callback(record, jax.ShapeDtypeStruct((), jnp.float32), a)

        return drjax.map_fn(local, x)

    with in_mesh_of(mesh):
        np.testing.assert_allclose(jax.jit(program)(slices()), slices() + 1)
        jax.effects_barrier()
    assert sorted(seen) == sorted(slices().tolist())
    assert capfd.readouterr().out.count("group value") == N


DERIVATIVES = {
    "value": lambda fn: drjax.jit(fn),
    "jitted grad": lambda fn: drjax.jit(jax.grad(fn)),
    "grad": lambda fn: jax.grad(drjax.jit(fn, groups_per_step=1)),
    "hessian": lambda fn: jax.hessian(drjax.jit(fn, groups_per_step=3)),
    "jvp": lambda fn: lambda x: jax.jvp(drjax.jit(fn), (x,), (x,)),
}


@checkerboard(2, derivative=DERIVATIVES, mesh=[None, {"clients": 2}])
def test_effects_of_a_jitted_program_happen_once(derivative, mesh):
    seen = []

    @four
    def program(x):
        def local(a):
            jax.debug.callback(lambda a: seen.append(float(a)), a)
            return closed_over_forward(jnp.sin(a))

        return drjax.reduce_sum(drjax.map_fn(local, x))

    with in_mesh_of(mesh):
        jax.block_until_ready(DERIVATIVES[derivative](program)(slices()))
        jax.effects_barrier()
    assert sorted(seen) == sorted(slices().tolist())


def test_an_effect_whose_result_is_unused_still_happens():
    seen = []

    @jax.jit
    @four
    def program(x):
        drjax.map_fn(lambda a: jax.debug.callback(lambda a: seen.append(int(a)), a), x)
        return drjax.reduce_sum(x)

    program(np.arange(N))
    jax.effects_barrier()
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("through", ["shard_map", "with_sharding_constraint"])
def test_sharding_over_another_axis_inside_a_group(through):
    def local(a):
        if through == "with_sharding_constraint":
            return lax.with_sharding_constraint(jnp.sin(a), P("model")).sum()
        inner = jax.shard_map(
            lambda b: lax.psum(jnp.sin(b).sum(), "model"), in_specs=P("model"),
            out_specs=P(), axis_names={"model"},
        )  # fmt: skip
        return inner(a)

    program = four(lambda x: drjax.reduce_sum(drjax.map_fn(local, x)))
    x = slices(4)
    mesh = make_mesh({"clients": 2, "model": 2})
    # The gradient of jax.shard_map alone fails JAX's check of leaks, too.
    with jax.set_mesh(mesh), jax.check_tracer_leaks(False):
        np.testing.assert_allclose(jax.jit(program)(x), np.sin(x).sum(), rtol=1e-5)
        grads = jax.jit(jax.grad(program))(x)
        np.testing.assert_allclose(grads, np.cos(x), rtol=1e-5)


# ---------------------------------------------------------------------------------
# Group indices and randomness


@jax.custom_vjp
def scaled_backward(a):
    return a * drjax.partition_index()


scaled_backward.defvjp(
    lambda a: (scaled_backward(a), None),
    lambda _, ct: (ct * drjax.partition_index(partition={"clients": N}),),
)

I = lambda: drjax.partition_index().astype(jnp.float32)
INDEXED = {
    "plain": lambda a: a * I(),
    "scan": lambda a: lax.scan(lambda c, _: (c + a * I() / 2, None), 0 * a, length=2)[
        0
    ],
    "cond": lambda a: lax.cond(a > 0, lambda a: a * I(), lambda a: I() * a, a),
    "switch": lambda a: lax.switch(
        drjax.partition_index(), [lambda a, i=i: a * i for i in range(N)], a
    ),
    "while": lambda a: a * lax.while_loop(lambda c: c < I(), lambda c: c + 1, 0.0),
    "jit": jax.jit(lambda a: a * I()),
    "vmap": lambda a: jax.vmap(lambda b: a * b * I() / 6)(W).sum(),
    "vmap without use": lambda a: jax.vmap(lambda b: I(), axis_size=2)(W[:2])[0] * a,
    "grad": lambda a: jax.grad(lambda a: a * a * I() / 2)(a),
    "checkpoint": jax.checkpoint(lambda a: a * I()),
    "custom_vjp backward": scaled_backward,
    "explicit": lambda a: a * drjax.partition_index(partition={"clients": N}),
}


@pytest.mark.parametrize(
    "mesh", [{"clients": 3}, pytest.param(None, marks=pytest.mark.slow)]
)
@checkerboard(3, inside=INDEXED)
def test_the_group_index_inside_of_transformations(inside, mesh):
    x = np.array([-1.5, 0.5, 2.0, 3.5], np.float32)
    batch = np.stack([x, 2 * x], 1)
    program = lambda x: four(lambda x: drjax.map_fn(INDEXED[inside], x))(x)

    @jax.jit
    def each_way(x, batch):
        grads = jax.grad(lambda x: program(x).sum())(x)
        return program(x), grads, jax.vmap(program, 1, 1)(batch)

    with in_mesh_of(mesh):
        value, grads, batched = each_way(x, batch)
    np.testing.assert_allclose(value, x * np.arange(N), rtol=1e-6)
    np.testing.assert_allclose(grads, np.arange(N), rtol=1e-6)
    np.testing.assert_allclose(batched, batch * np.arange(N)[:, None], rtol=1e-6)


def test_randomness_belongs_to_the_group_not_to_the_device():
    @drjax.program(clients=8)
    def draw(key):
        def local(key):
            return jax.random.normal(jax.random.fold_in(key, drjax.partition_index()))

        return drjax.map_fn(local, drjax.broadcast(key))

    key = jax.random.key(5)
    expected = [jax.random.normal(jax.random.fold_in(key, i)) for i in range(8)]
    for shape in (None, {"clients": 3}, {"clients": 8}):
        with in_mesh_of(shape):
            np.testing.assert_array_equal(jax.jit(draw)(key), expected)


def test_partition_index_and_size_in_a_program():
    program = four(lambda: (drjax.partition_index(), drjax.partition_size()))
    index, size = program()
    assert size == N and type(size) is int and index.dtype == jnp.int32
    np.testing.assert_array_equal(index, np.arange(N))
    sizes = four(lambda x: drjax.map_fn(lambda a: a * drjax.partition_size(), x))
    np.testing.assert_array_equal(sizes(np.arange(N)), N * np.arange(N))
