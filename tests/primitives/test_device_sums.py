"""`wire=` and `result="sharded"`: values, derivatives, rounding, bytes, plans, errors.

Covers: drjax._primitives.device_sums, drjax._primitives.wire_codes,
drjax._api.collective_options, drjax._plan_file.check_plan, drjax._plan.wire.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from drjax._plan_file.check_plan import check_step
from drjax._primitives.wire_codes import decode, encode
from drjax.plan import Reduce, Value, Wire
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, EXPLICIT, groups_and_meshes, in_mesh, make_mesh
from tests.helpers.raising import X3, raises, three

# The number of groups, and the mesh.
MESHES = groups_and_meshes(
    "none",
    "two each",
    "uneven",
    "one device",
    "model",
    "explicit",
    "explicit other axis",
)
# The options, and the largest error of a number, as a part of the largest magnitude.
OPTIONS = {
    "sharded": ({"result": "sharded"}, 1e-6),
    "bfloat16": ({"wire": "bfloat16"}, 2**-7),
    "int8": ({"wire": "int8"}, 1 / 120),
    "blocks": ({"wire": ("int8", 16)}, 1 / 120),
    "float8": ({"wire": "float8_e4m3fn"}, 1 / 14),
    "float4": ({"wire": Wire("float4_e2m1fn")}, 1 / 3),
    "sharded int8": ({"wire": "int8", "result": "sharded"}, 1 / 120),
    "one collective": ({"wire": Wire("int8", 16, collectives=1)}, 1 / 120),
    "one or sharded": (
        {"wire": Wire("float8_e4m3fn", collectives=1), "result": "sharded"},
        1 / 14,
    ),
}
REDUCTIONS = {
    "sum": lambda x, **options: drjax.reduce_sum(x, **options),
    "mean": lambda x, **options: drjax.reduce_mean(x, **options),
    "weighted mean": lambda x, **options: drjax.reduce_weighted_mean(
        x, jnp.arange(1, len(x["a"]) + 1.0), **options
    ),
    "masked": lambda x, **options: drjax.reduce_mean(
        x, where=np.arange(len(x["a"])) % 3 == 0, **options
    ),
}


def tree(n: int):
    random = np.random.RandomState(0)
    leaf = lambda *shape: random.randn(n, *shape).astype(np.float32)
    return {"a": leaf(24, 5), "b": 1e-3 * leaf(3), "c": leaf()}


def assert_near(x, y, error: float) -> None:
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=error * 4 * np.abs(b).max())


@checkerboard(31, mesh=MESHES, options=OPTIONS, reduction=REDUCTIONS)
def test_values_and_derivatives(mesh, options, reduction):
    n, make = MESHES[mesh]
    kwargs, error = OPTIONS[options]
    reduce = REDUCTIONS[reduction]
    x = tree(n)

    def loss(x, **kwargs):
        leaves = jax.tree.leaves(reduce(x, **kwargs))
        return sum(
            jnp.sum(y * np.cos(np.arange(y.size)).reshape(y.shape)) for y in leaves
        )

    program = drjax.program(clients=n)
    functions = {
        "value": lambda **kwargs: program(lambda x: reduce(x, **kwargs)),
        "grad": lambda **kwargs: jax.grad(program(lambda x: loss(x, **kwargs))),
        "jvp": lambda **kwargs: (
            lambda x: jax.jvp(
                program(lambda x: reduce(x, **kwargs)),
                (x,),
                (jax.tree.map(jnp.cos, x),),
            )[1]
        ),
    }
    for name, make_function in functions.items():
        want = jax.jit(make_function())(x)
        with in_mesh(make and make()):
            for run in (jax.jit, functools.partial(drjax.jit, groups_per_step=1)):
                result = run(make_function(**kwargs))(x)
                # Derivatives are those of the plain reduction.
                assert_near(result, want, error if name == "value" else 1e-6)


def test_literals_that_another_mesh_has_saved():
    # JAX shares what it linearizes: scalars of a gradient are on no mesh then.
    n, make = MESHES["explicit other axis"]
    x, program = tree(n), drjax.program(clients=n)

    def gradient(reduce, **options):
        def loss(x):
            leaves = jax.tree.leaves(reduce(x, **options))
            return sum(jnp.sum(y * np.ones(y.shape)) for y in leaves)

        return jax.jit(jax.grad(program(loss)))(x)

    gradient(REDUCTIONS["masked"])
    with in_mesh(make()):
        sums = gradient(REDUCTIONS["sum"], wire="bfloat16")
    assert_near(sums, jax.tree.map(np.ones_like, x), 1e-6)


def test_results_are_laid_over_the_devices():
    n, x = 16, tree(16)
    total = drjax.program(clients=n)(lambda x: drjax.reduce_sum(x, result="sharded"))
    gathered = drjax.program(clients=n)(lambda x: drjax.gather(x, result="sharded"))
    for kind in (AUTO, EXPLICIT):
        with jax.set_mesh(make_mesh({"clients": 8}, kind)):
            for run in (jax.jit, drjax.jit):
                y = run(total)(x)
                # Of 24 x 5 numbers each of 8 devices has 3 x 5; 3 are not divided.
                assert y["a"].addressable_shards[0].data.shape == (3, 5)
                assert y["b"].addressable_shards[0].data.shape == (3,)
                np.testing.assert_allclose(y["a"], x["a"].sum(0), rtol=1e-5)
                z = run(gathered)(x)
                assert z["a"].addressable_shards[0].data.shape == (16, 3, 5)
                jax.tree.map(np.testing.assert_array_equal, z, x)


@pytest.mark.parametrize("spec", [P("clients", "model"), P("clients", None, "model")])
def test_another_mesh_axis_divides_results_along_another_axis(spec):
    total = drjax.program(clients=4)(lambda x: drjax.reduce_sum(x, result="sharded"))
    gathered = drjax.program(clients=4)(lambda x: drjax.gather(x, result="sharded"))
    x = np.arange(4 * 8 * 8, dtype=np.float32).reshape(4, 8, 8)
    with jax.set_mesh(make_mesh({"clients": 2, "model": 2}, EXPLICIT)):
        own = jax.device_put(x, spec)
        for fn, want in ((total, x.sum(0)), (gathered, x)):
            result = jax.jit(fn)(own)
            np.testing.assert_array_equal(result, want)
            assert result.addressable_shards[0].data.shape[-2:] == (4, 4)


def test_encoded_values_of_two_layouts_share_an_exchange():
    x = {"a": np.ones((8, 24, 5), np.float32), "b": np.ones((8, 3), np.float32)}
    # Of b each device has the whole.
    total = drjax.program(clients=8)(
        lambda x: drjax.reduce_sum(x, wire="int8", result="sharded")
    )
    with jax.set_mesh(make_mesh({"clients": 4})):
        run = jax.jit(drjax.jit(total, groups_per_step=1))
        kinds = [c.kind for c in drjax.collectives(run)(x).collectives]
        jax.tree.map(lambda y: np.testing.assert_allclose(y, 8), run(x))
    assert sorted(kinds) == ["all-gather", "all-to-all"]


@pytest.mark.sampled
@pytest.mark.parametrize("run", [jax.jit, drjax.jit])
def test_collectives(run):
    """Bytes are results of collectives on one of 8 devices."""
    n, d = 32, 20_000
    x = np.ones((n, d), np.float32)

    def of(fn):
        return drjax.collectives(run(drjax.program(clients=n)(fn)))(x).collectives

    def sizes(fn):
        return {c.kind: c.result_bytes for c in of(fn)}

    step = lambda x, **kwargs: drjax.reduce_mean(jnp.sin(x), **kwargs)
    with jax.set_mesh(make_mesh({"clients": 8})):
        assert sizes(step) == {"all-reduce": 4 * d}
        sharded = functools.partial(step, result="sharded")
        assert sizes(sharded) == {"reduce-scatter": 4 * d // 8}
        # A server optimizer works on its part; a broadcast of it gathers it.
        again = lambda x: drjax.broadcast(jnp.sin(sharded(x)))
        assert sizes(again) == {"reduce-scatter": 4 * d // 8, "all-gather": 4 * d}
        columns = lambda x: drjax.gather(jnp.sin(x), result="sharded")
        assert sizes(columns) == {"all-to-all": 4 * n * d // 8}
        # 10 blocks of 256 numbers, with 4 bytes for the scale, on each of 8 devices.
        encoded = functools.partial(step, wire="int8")
        assert sizes(encoded) == dict.fromkeys(("all-to-all", "all-gather"), 8 * 2600)
        both = functools.partial(step, wire="int8", result="sharded")
        assert sizes(both) == {"all-to-all": 8 * 2600}
        # 79 blocks of each device.
        at_once = functools.partial(step, wire=Wire("int8", collectives=1))
        assert sizes(at_once) == {"all-gather": 8 * 79 * 260}


def test_leaves_share_one_message():
    n = 8
    program = drjax.program(clients=n)(lambda x: drjax.reduce_mean(x, wire="int8"))
    with jax.set_mesh(make_mesh({"clients": 8})):
        for run in (jax.jit, drjax.jit):
            report = drjax.collectives(run(program))(tree(n))
            assert report.counts == {"all-to-all": 1, "all-gather": 1}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float4_e2m1fn"])
def test_blocks_are_rounded_each_by_its_largest_number(dtype):
    wire, random = Wire(dtype, 8), np.random.RandomState(0)
    scale = np.float32(10.0) ** np.arange(-30, 30, 3)
    x = (random.randn(20, 8) * scale[:, None]).astype(np.float32)
    x[3] = 0
    y = np.asarray(jax.jit(lambda x: decode(encode(x, wire), wire))(x.ravel()))
    largest = np.abs(x).max(1, keepdims=True)
    bound = {"int8": 1 / 254, "float8_e4m3fn": 1 / 28, "float4_e2m1fn": 1 / 6}[dtype]
    assert np.all(np.abs(y.reshape(x.shape) - x) <= 1.001 * bound * largest)
    # The largest number of each block is exact but for the rounding of the scale.
    np.testing.assert_allclose(
        np.abs(y.reshape(x.shape)).max(1), largest[:, 0], rtol=1e-6
    )
    assert encode(jnp.asarray(x.ravel()), wire).nbytes == wire.nbytes(x.size)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float4_e2m1fn"])
def test_what_is_not_finite_spreads_in_its_block_alone(dtype):
    wire = Wire(dtype, 4)
    x = jnp.array([1.0, np.nan, 2, 3, 1, 1, 1, 1, np.inf, 0, 0, 1])
    y = decode(encode(x, wire), wire)
    np.testing.assert_array_equal(np.isnan(y), [True] * 4 + [False] * 4 + [True] * 4)


def test_four_bits_are_those_of_the_dtype():
    import ml_dtypes

    every = np.linspace(-6, 6, 385, dtype=np.float32)  # halves of steps among them
    x = np.stack([every, np.full_like(every, 6)], -1).ravel()  # each scale is 1
    y = decode(
        encode(jnp.asarray(x), Wire("float4_e2m1fn", 2)), Wire("float4_e2m1fn", 2)
    )
    want = every.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(y)[::2], want)


@pytest.mark.sampled
@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("block", [32, 96, 128, 256, 384])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float4_e2m1fn"])
def test_hosts_read_what_devices_write(dtype, block, lead):
    """Also of vectors that devices compute in the shape of their registers."""
    wire, random = Wire(dtype, block), np.random.default_rng(0)
    for blocks in (1, 512):
        x = random.normal(size=(*lead, blocks * block)).astype(np.float32)
        x[..., -1], x[..., 0] = 0, -0.0
        data = encode(jnp.asarray(x), wire)
        assert data.shape == (*lead, wire.nbytes(x.shape[-1]))
        y = decode(data, wire)
        np.testing.assert_array_equal(decode(np.asarray(data), wire), y)
        alone = encode(jnp.asarray(x.reshape(-1, block)), wire)
        np.testing.assert_array_equal(decode(alone, wire).reshape(x.shape), y)


def test_the_rounding_error_is_bounded():
    n, d = 8, 4096
    x = np.random.RandomState(1).standard_t(2, (n, d)).astype(np.float32)
    program = drjax.program(clients=n)(lambda x: drjax.reduce_sum(x, wire="int8"))
    with jax.set_mesh(make_mesh({"clients": 8})):
        y = np.asarray(jax.jit(program)(x))
    blocks = lambda x: np.abs(x).reshape(*x.shape[:-1], -1, 256).max(-1)
    bound = (blocks(x).sum(0) + blocks(y)) / 254
    error = np.abs(y - x.sum(0, dtype=np.float64)).reshape(-1, 256)
    assert np.all(error <= 1.001 * bound[:, None])
    # In one collective what is summed is not rounded again.
    wire = Wire("int8", collectives=1)
    program = drjax.program(clients=n)(lambda x: drjax.reduce_sum(x, wire=wire))
    with jax.set_mesh(make_mesh({"clients": 8})):
        y = np.asarray(jax.jit(program)(x))
    error = np.abs(y - x.sum(0, dtype=np.float64)).reshape(-1, 256)
    assert np.all(error <= 1.001 * blocks(x).sum(0)[:, None] / 254)


def test_error_feedback():
    """The example of the docs: what is rounded away is sent in the next step."""
    n, d, steps = 8, 512, 40
    x = np.random.RandomState(2).randn(n, d).astype(np.float32)

    @drjax.program(clients=n)
    def mean(x, error):
        sent = drjax.map_fn(jnp.add, (x, error))
        wire = ("int8", 64)
        own = drjax.map_fn(lambda y: round_trip(y), sent)
        error = drjax.map_fn(jnp.subtract, (sent, own))
        return drjax.reduce_mean(own, wire=wire), error

    def round_trip(y):
        scale = jnp.abs(y.reshape(-1, 64)).max(-1, keepdims=True) / 127
        return (jnp.round(y.reshape(-1, 64) / scale) * scale).reshape(y.shape)

    with jax.set_mesh(make_mesh({"clients": 8})):
        run, error, total = jax.jit(mean), jnp.zeros_like(x), 0.0
        for _ in range(steps):
            # XLA of JAX 0.10 may not end if collectives of several steps are in flight.
            y, error = jax.block_until_ready(run(x, error))
            total = total + y
    assert np.abs(total / steps - x.mean(0)).max() < 0.012


def test_plans(tmp_path):
    n, x = 5, tree(5)
    program = drjax.program(clients=n)(
        lambda x: (
            drjax.reduce_mean(x, wire="int8"),
            drjax.reduce_sum(x["a"], result="sharded"),
            drjax.gather(x["c"], result="sharded"),
        )
    )
    plan = drjax.make_plan(program)(x)
    by_op = {reduce.op: reduce for reduce in plan.rounds[0].reduces}
    encoded, sharded, gathered = map(by_op.__getitem__, ("mean", "sum", "gather"))
    assert encoded.wire == Wire("int8", 256) and sharded.sharded and gathered.sharded
    # Three leaves of whole blocks.
    assert encoded.nbytes == 3 * (256 + 4)
    assert plan.communication().up() == 3 * 260 + 24 * 5 * 4 + 4
    assert "780 B a group as int8/256" in str(plan)
    assert "as int8/256" in str(plan.communication())
    path = tmp_path / "plan.drjax"
    plan.save(path)
    loaded = drjax.load_plan(path)
    assert [(r.wire, r.sharded) for r in loaded.rounds[0].reduces] == [
        (r.wire, r.sharded) for r in plan.rounds[0].reduces
    ]
    want = program(x)
    for each in (plan, loaded):
        assert_near(drjax.backends.reference.compile(each)(x), want, 1e-6)
        # Its workers encode the mean, as devices do.
        mean, *others = drjax.backends.in_process.compile(each)(x)
        assert_near(mean, want[0], 1 / 120)
        assert_near(others, [*want[1:]], 1e-6)
        with jax.set_mesh(make_mesh({"clients": 4})):
            assert_near(jax.jit(drjax.backends.xla.compile(each))(x), want, 1 / 120)


def test_plan_files_have_the_number_of_collectives(tmp_path):
    wire, path = Wire("int8", 64, collectives=1), tmp_path / "plan.drjax"
    program = drjax.program(clients=8)(lambda x: drjax.reduce_mean(x, wire=wire))
    x = np.random.RandomState(5).randn(8, 96).astype(np.float32)
    plan = drjax.make_plan(program)(x)
    assert "as int8/64 in one collective" in str(plan)
    plan.save(path)
    (reduce,) = drjax.load_plan(path).rounds[0].reduces
    assert reduce.wire == wire
    with jax.set_mesh(make_mesh({"clients": 4})):
        run = jax.jit(drjax.backends.xla.compile(drjax.load_plan(path)))
        assert drjax.collectives(run)(x).counts == {"all-gather": 1}
        np.testing.assert_allclose(run(x), x.mean(0), atol=0.02)


def test_batches_loops_and_checkpoints():
    n, m = 8, 3
    x = np.random.RandomState(3).randn(m, n, 16).astype(np.float32)
    mean = drjax.program(clients=n)(
        lambda x: drjax.reduce_mean(x, result="sharded", wire="bfloat16")
    )
    loss = lambda x: (jax.checkpoint(mean)(x) ** 2).sum()
    with jax.set_mesh(make_mesh({"clients": 4})):
        np.testing.assert_allclose(jax.jit(jax.vmap(mean))(x), x.mean(1), atol=0.02)
        scan = lambda x: jax.lax.scan(lambda c, x: (c + mean(x), None), 0 * x[0, 0], x)
        np.testing.assert_allclose(jax.jit(scan)(x)[0], x.mean(1).sum(0), atol=0.04)
        grads = jax.jit(jax.vmap(jax.grad(loss)))(x)
        want = np.broadcast_to(2 * x.mean(1, keepdims=True) / n, x.shape)
        np.testing.assert_allclose(grads, want, atol=0.01)


def test_inside_a_shard_map_of_the_user():
    n = 8
    x = np.random.RandomState(4).randn(n, 16).astype(np.float32)
    mean = drjax.program(clients=n)(
        lambda x: drjax.reduce_mean(x, result="sharded", wire="int8")
    )
    with jax.set_mesh(make_mesh({"clients": 4})):
        mapped = jax.shard_map(mean, in_specs=P("clients"), out_specs=P())
        y = jax.jit(mapped)(x)
    np.testing.assert_allclose(y, x.mean(0), atol=0.03)


def test_a_sharding_constraint_on_the_server_is_obeyed():
    n = 8
    x = np.ones((n, 16), np.float32)

    @drjax.program(clients=n)
    def columns(x):
        y = drjax.gather(x)
        y = jax.lax.with_sharding_constraint(y, P(None, "clients"))
        return jnp.sort(y, axis=0)

    with jax.set_mesh(make_mesh({"clients": 4})):
        for run in (jax.jit, drjax.jit):
            assert run(columns)(x).addressable_shards[0].data.shape == (8, 4)


@pytest.mark.parametrize(
    "error, text, options",
    [
        (ValueError, "wire= needs a dtype of bfloat16", {"wire": "int7"}),
        (TypeError, "wire= as a dtype", {"wire": 8}),
        (TypeError, "wire= as a dtype", {"wire": ("int8", 2, 3)}),
        (ValueError, "positive block size", {"wire": ("int8", -1)}),
        (ValueError, "positive block size", {"wire": ("int8", 0)}),
        (ValueError, "with np.int64(0)", {"wire": ("int8", np.int64(0))}),
        (ValueError, "got 'int8' with True", {"wire": ("int8", True)}),
        (ValueError, "got 'int8' with 64.0", {"wire": ("int8", 64.0)}),
        (ValueError, "with '64'", {"wire": ("int8", "64")}),
        (ValueError, "an even one for 4 bits", {"wire": ("float4_e2m1fn", 3)}),
        (ValueError, "1 for bfloat16", {"wire": ("bfloat16", 2)}),
        (ValueError, 'result= as "sharded" or None', {"result": "replicated"}),
    ],
)
def test_errors(error, text, options):
    for reduce in (drjax.reduce_sum, drjax.reduce_mean):
        raises(error, text, three(functools.partial(reduce, **options)), X3)


@pytest.mark.parametrize("collectives", [0, 3, True, 1.0, "1"])
def test_numbers_of_collectives(collectives):
    of = lambda count: Wire("int8", collectives=count)
    raises(ValueError, "collectives=) needs 1 or 2, got", of, collectives)
    assert of(np.int64(1)) == of(1) != of(2)


def test_only_real_floats_are_encoded():
    encoded = three(functools.partial(drjax.reduce_sum, wire="int8"))
    for x in (np.arange(3, dtype=np.int32), np.ones(3, np.complex64)):
        raises(TypeError, f"leaves of real floats, got {x.dtype}", encoded, x)
    mean = three(lambda x: drjax.reduce_weighted_mean(x, np.ones(3), wire="int8"))
    text = "leaves of real floats, got complex64"
    raises(TypeError, text, mean, (X3, np.ones(3, np.complex64)))


@pytest.mark.parametrize(
    "op, dtype", [("sum", "int32"), ("mean", "complex64"), ("max", "float32")]
)
def test_a_plan_file_in_which_others_are_encoded(op, dtype):
    dtype = np.dtype(dtype)
    groups = (drjax.Partition("clients", 2),)
    x, y = (Value("x", (), dtype, over, 4) for over in (groups, ()))
    with pytest.raises(ValueError, match=f"a {op} of .* cannot be encoded"):
        check_step(Reduce(op, x, y, Wire("int8", 256)), None, None)


@pytest.mark.sampled
@checkerboard(3, options=["int8", "float4", "sharded", "sharded int8"])
def test_odd_trees(options):
    kwargs, _ = OPTIONS[options]
    ones = lambda *shape: np.ones((8, *shape), np.float32)
    trees = (
        {},
        None,
        ones(0, 3),
        {"a": ones(0), "b": ones(3)},
        ones().astype(np.float16),
    )
    mean = drjax.program(clients=8)(lambda x: drjax.reduce_mean(x, **kwargs))
    with jax.set_mesh(make_mesh({"clients": 4})):
        for x in trees:
            for run in (jax.jit, drjax.jit):
                y = run(mean)(x)
                assert jax.tree.structure(y) == jax.tree.structure(x)
                for a, b in zip(jax.tree.leaves(y), jax.tree.leaves(x), strict=True):
                    assert a.shape == b.shape[1:] and a.dtype == b.dtype
                    np.testing.assert_allclose(a, np.ones_like(a), rtol=1e-3)


# ---------------------------------------------------------------------------------
# A server that is divided


def _sent(w):
    """What a server sends: rounded to 16 bits, as its last equation."""
    return drjax.broadcast(jnp.tanh(w).astype(jnp.bfloat16))


def _change(w, x):
    y = drjax.map_fn(lambda w, x: w.astype(jnp.float32) * x, (_sent(w), x))
    return drjax.reduce_mean(y, result="sharded")


# By what the server computes from: a result, the state of a loop, an argument.
SERVERS = {
    "a result": lambda w, x: _change(w - drjax.reduce_mean(x, result="sharded"), x),
    "a state": lambda w, x: jax.lax.fori_loop(0, 3, lambda _, w: w - _change(w, x), w),
    "an argument": _change,
}


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
@pytest.mark.parametrize("name", SERVERS)
def test_parts_are_rounded_before_they_are_gathered(name, jit):
    n, d = 8, 4096
    run = jit(drjax.program(clients=n)(SERVERS[name]))
    with in_mesh(make_mesh({"clients": n}, AUTO)):
        text = run.lower(jnp.ones(d), jnp.ones((n, d))).compile().as_text()
    part = f"bf16[{d // n}]{{0}} convert("
    assert (part in text) == ("all-gather(" in text) == (name != "an argument")
    result = run(jnp.ones(d), jnp.ones((n, d)))
    with in_mesh(make_mesh({"clients": n}, AUTO)):
        np.testing.assert_allclose(run(jnp.ones(d), jnp.ones((n, d))), result, 0, 0.01)
