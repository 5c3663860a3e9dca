"""Every block where a second axis of the mesh shards the slices, as FSDP does.

Covers: drjax._sharding.eval_on_mesh, drjax._sharding.execute, drjax._primitives.moves,
    drjax._primitives.between_slices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from drjax.plan import Wire
from tests.helpers.meshes import AUTO, EXPLICIT, in_slices, make_mesh
from tests.helpers.plain_blocks import blocks, plainly

N = 8
X = (1 + np.cos(np.arange(N * 4 * 6) * 1.7).reshape(N, 4, 6) / 3).astype(np.float32)
W = np.arange(1, N + 1, dtype=np.float32) / N
EVEN = np.arange(N) % 2 == 0
INDEX = jnp.array([3, 3, 0, 7, 0, 2, 2, 6])
BY = jnp.array([0, 2, 1, 0, 0, 2, 1, 1])
FEW = jnp.array([5, 0, 5, 1])

cubes = lambda x: jnp.sum(x**3) * jnp.cos(x[0])


def maps(x):
    model = blocks.broadcast(jnp.linspace(0.5, 1.5, 6))
    product = lambda m, x: jnp.sin(x * m[None]) + 0.1 * blocks.partition_index()
    y = blocks.map_fn(product, (model, x))
    return blocks.map_fn(lambda y: jnp.tanh(y) * jnp.sum(y, 0)[None], y)


def folds(x):
    combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    return blocks.reduce(combine, (x, x * x), (1.0, 0.0))


BLOCKS = {
    "map": maps,
    "gather": lambda x: blocks.gather(x * x)[1] * blocks.reduce_sum(x),
    "scatter": lambda x: blocks.map_fn(jnp.multiply, (blocks.scatter(x[::-1]), x)),
    "sum": lambda x: blocks.reduce_sum(x * x),
    "sum, where": lambda x: blocks.reduce_sum(x * x, where=EVEN),
    "mean": lambda x: blocks.reduce_mean(jnp.sin(x)),
    "mean, where": lambda x: blocks.reduce_mean(x * x, where=EVEN),
    "weighted mean": lambda x: blocks.reduce_weighted_mean(x * x, W),
    "max": lambda x: blocks.reduce_max(x * jnp.sin(x)),
    "max, where": lambda x: blocks.reduce_max(x**2, where=EVEN, default=-1.0),
    "min": lambda x: blocks.reduce_min(x * jnp.sin(x)),
    "argmax": lambda x: blocks.take(x, jnp.max(blocks.reduce_argmax(x)) + 0 * INDEX),
    "select": lambda x: blocks.select(x * x, 3),
    "select, traced": lambda x: blocks.select(x * x, jnp.int32(jnp.max(x) > 0) + 2),
    "sum by": lambda x: blocks.sum_by(x * x, BY, 3),
    "max by": lambda x: blocks.max_by(x * x, BY, 3),
    "mean by": lambda x: blocks.mean_by(x * x, BY, 3),
    "take": lambda x: blocks.take(x * x, INDEX),
    "take, few": lambda x: blocks.take(x * x, FEW),
    "put": lambda x: blocks.put(x * x, INDEX),
    "put, into": lambda x: blocks.put(x * x, INDEX, into=jnp.sin(x)),
    "put, add": lambda x: blocks.put(x * x, INDEX, add=True),
    "put, add into": lambda x: blocks.put(x * x, INDEX, into=jnp.sin(x), add=True),
    "shift": lambda x: blocks.shift(x * x, 3),
    "columns": lambda x: blocks.reduce_columns(cubes, x),
    "median": lambda x: blocks.reduce_columns(jnp.median, x * x),
    "columns, several": lambda x: blocks.reduce_columns(lambda c: c[:3] ** 2, x),
    "columns, sum": lambda x: blocks.reduce_columns(cubes, x, sum=True) / 100,
    "fold": lambda x: blocks.reduce(lambda a, b: a * b, x, 1.0),
    "fold of pairs": folds,
    "secure sum": lambda x: blocks.secure_sum(x * x),
    "sharded sum": lambda x: blocks.sharded_sum(x * x),
    "sharded gather": lambda x: blocks.sharded_gather(x * x),
    "bfloat16": lambda x: blocks.encoded_mean(x * x, wire="bfloat16"),
    "int8": lambda x: blocks.encoded_mean(x * x, wire="int8"),
    "one collective": lambda x: blocks.encoded_mean(
        x, wire=Wire("int8", collectives=1)
    ),
    "float8": lambda x: blocks.encoded_weighted_mean(x, W, wire="float8_e4m3fn"),
    "float4": lambda x: blocks.encoded_mean(x, wire="float4_e2m1fn"),
    "scan": lambda x: jax.lax.scan(
        lambda c, _: (c + blocks.reduce_mean(x * c[None]), None),
        blocks.reduce_sum(x),
        None,
        length=2,
    )[0],
}
TOLERANCES = {"bfloat16": 2e-2, "int8": 5e-2, "float8": 0.2, "float4": 0.4}
TOLERANCES["one collective"] = TOLERANCES["int8"]


def weights_of(y):
    return jnp.asarray(np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape))


def loss(fn, x):
    leaves = jax.tree.leaves(fn(x))
    return sum(jnp.sum(jnp.sin(y) * weights_of(y)) for y in leaves)


WHAT = {
    "value": lambda fn: fn,
    "gradient": lambda fn: jax.grad(functools.partial(loss, fn)),
    "second derivative": lambda fn: jax.grad(
        lambda x: jnp.sum(jax.grad(functools.partial(loss, fn))(x) ** 2)
    ),
}
MESHES = {
    "auto": (AUTO, AUTO),
    "explicit model": (AUTO, EXPLICIT),
    "auto model": (EXPLICIT, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
}
JITS = {"jax.jit": jax.jit, "drjax.jit": drjax.jit}


@functools.cache
def expected(block, what):
    with plainly():
        fn = blocks.program(clients=N)(BLOCKS[block])
        return WHAT[what](fn)(jnp.asarray(X))


GRID = (pytest.mark.slow, pytest.mark.grid)
GRIDS = {
    "kinds": [pytest.param(k, marks=GRID if "auto" in k else ()) for k in MESHES],
    "what": [pytest.param(w, marks=GRID if "second" in w else ()) for w in WHAT],
}


@pytest.mark.sampled
@pytest.mark.parametrize("kinds", GRIDS["kinds"])
@pytest.mark.parametrize("what", GRIDS["what"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("jit", JITS)
def test_a_second_axis_shards_the_slices(jit, block, what, kinds):
    fn = WHAT[what](drjax.program(clients=N)(BLOCKS[block]))
    mesh = make_mesh({"clients": 4, "model": 2}, MESHES[kinds])
    with jax.set_mesh(mesh):
        on = NamedSharding(mesh, P("clients", None, "model"))
        got = JITS[jit](fn)(jax.device_put(X, on))
    tol = TOLERANCES.get(block, 2e-5)
    wants = jax.tree.leaves(expected(block, what))
    for a, b in zip(jax.tree.leaves(got), wants, strict=True):
        scale = np.max(np.abs(b)) + 1e-30
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=tol)


SLICED = ["gather", "sum", "mean", "max", "sum by", "sharded sum", "float4", "scan"]
OTHERS = [
    "sum, where", "weighted mean", "min", "max by", "mean by", "bfloat16", "int8",
    "float8", "sharded gather", "columns", "fold", "take", "put, add", "shift",
]  # fmt: skip
AXES_INSIDE = {
    "auto": (AUTO,) * 3,
    "explicit": (EXPLICIT,) * 3,
    "explicit inside": (AUTO, EXPLICIT, EXPLICIT),
    "both inside": (AUTO, AUTO, EXPLICIT),
}
SPECS = {
    "replicated": P("clients"),
    "over one": P("clients", None, "model"),
    "over both": P("clients", "data", "model"),
}
RARE = (pytest.mark.slow, pytest.mark.grid)


def some(names, *common):
    return [pytest.param(x, marks=() if x in common else RARE) for x in names]


@pytest.mark.sampled
@pytest.mark.parametrize("spec", some(SPECS, "replicated"))
@pytest.mark.parametrize("kinds", some(AXES_INSIDE, "auto", "explicit"))
@pytest.mark.parametrize("what", some(WHAT, "value", "gradient"))
@pytest.mark.parametrize("block", some([*SLICED, *OTHERS], *SLICED))
@pytest.mark.parametrize("jit", JITS)
def test_devices_inside_a_slice_divide_the_slices(jit, block, what, kinds, spec):
    fn = drjax.program(clients=N)(BLOCKS[block])
    fn = WHAT[what](fn)
    mesh = make_mesh({"clients": 2, "data": 2, "model": 2}, AXES_INSIDE[kinds])
    with in_slices(4), jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, SPECS[spec]))
        got = JITS[jit](fn)(x)
    tol = TOLERANCES.get(block, 2e-5)
    wants = jax.tree.leaves(expected(block, what))
    for a, b in zip(jax.tree.leaves(got), wants, strict=True):
        scale = np.max(np.abs(b)) + 1e-30
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=tol)


@pytest.mark.parametrize("kinds", AXES_INSIDE)
def test_groups_one_at_a_time_in_rounds(kinds):
    """What a loop over them carries is sharded as what they return."""

    @drjax.program(clients=N)
    def rounds(w, x):
        def step(w, _):
            y = drjax.map_fn(lambda w, x: jnp.tanh(w * x), (drjax.broadcast(w), x))
            return w + drjax.reduce_mean(y), drjax.reduce_max(y)

        w, largest = jax.lax.scan(step, w, None, 3)
        return jnp.sum(w * w) + jnp.sum(largest)

    both, w = jax.value_and_grad(rounds), np.ones((4, 6), np.float32)
    mesh = make_mesh({"clients": 2, "data": 2, "model": 2}, AXES_INSIDE[kinds])
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(x, NamedSharding(mesh, P(*spec)))
            for x, spec in ((w, (None, "model")), (X, ("clients", None, "model")))
        ]
        got = drjax.jit(both, groups_per_step=1)(*args)
    for a, b in zip(got, both(w, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


def updates(x):
    def fn(x):
        table = jax.lax.dynamic_update_slice(jnp.ones((4, 6)), x[:2] ** 2, (1, 0))
        return table * jnp.reshape(x, (24,))[:6][None] + jnp.concatenate([x[1:], x[:1]])

    return blocks.map_fn(fn, x)


def test_a_plan_gathers_or_reshards_where_types_of_jax_refuse():
    """The program is traced without the mesh, so it need not know of the axis."""
    fn = drjax.program(clients=N)(updates)
    with plainly():
        plain = blocks.program(clients=N)(updates)
        wants = plain(X), jax.grad(functools.partial(loss, plain))(jnp.asarray(X))
    mesh = make_mesh({"clients": 4, "model": 2}, EXPLICIT)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("clients", None, "model")))
        gots = drjax.jit(fn)(x), drjax.jit(jax.grad(functools.partial(loss, fn)))(x)
        # Under jax.jit it needs out_sharding=, as in a hand-written shard_map.
        with pytest.raises(Exception, match="operand sharding must be equal"):
            jax.jit(fn)(x)
    for got, want in zip(gots, wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
