"""Saved plans compute what the plans compute, whatever the program; and how they look.

Every program of the table and its derivatives, loops over rounds, keys, small floats:
saved, loaded, and run by both backends.

Covers: drjax._plan_file.save, drjax._plan_file.load, drjax._plan_file.encode,
drjax._plan_file.decode, drjax._plan_file.export_stage, drjax._plan_file.exported_stage,
drjax._jaxprs.prng_keys.
"""

import functools
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._plan_file.exported_stage import exported_of
from drjax._plan_file.inspect import inspect
from drjax.backends import reference, xla
from tests.helpers.cases import CASES, GRID, MESHES, N, on_mesh, some
from tests.helpers.meshes import in_mesh_of
from tests.helpers.plan_files import program, read_manifest, saved, sgd_plan
from tests.helpers.plan_transforms import TRANSFORMS, assert_same, expected
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


def pairs():
    """Each case and transform on one mesh, in chunks of one size."""
    for i, case in enumerate(CASES):
        for j, name in enumerate(TRANSFORMS):
            ways = [w for w in MESHES if case.on_explicit or "explicit" not in w]
            mesh, step = ways[(3 * i + j) % len(ways)], (1, 3, None)[(i + j) % 3]
            often = (name, i % 23) == ("value_and_grad", 0) or (
                (name, i % 31) == ("grad of rounds", 0)
            )
            yield pytest.param(
                case, name, mesh, step, marks=() if often else GRID,
                id=f"{case.name}-{name}-{mesh}-{step}",
            )  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "name", "mesh", "step"), [*pairs()])
def test_programs(case, name, mesh, step, tmp_path):
    with on_mesh(case, "none") as args:
        plan = drjax.make_plan(TRANSFORMS[name](case))(*args)
        loaded = saved(plan, tmp_path / "plan.drjax")
        result = reference.compile(loaded)(*args)
    assert_same(result, expected(case, name))
    with on_mesh(case, mesh) as args:
        result = jax.jit(xla.compile(loaded, groups_per_step=step))(*args)
    assert_same(result, expected(case, name))


def both_ways(fn, *args, tmp_path, exact=True):
    """The results of a saved plan, which are those of the program."""
    loaded = saved(drjax.make_plan(fn)(*args), tmp_path / "plan.drjax")
    original = jax.jit(fn)(*args)
    close = np.testing.assert_array_equal
    if not exact:
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    for run in (reference.compile(loaded), jax.jit(xla.compile(loaded))):
        result = run(*args)
        assert jax.tree.structure(result) == jax.tree.structure(original)
        for a, b in zip(
            jax.tree.leaves(result), jax.tree.leaves(original), strict=True
        ):
            assert a.dtype == b.dtype
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            close(np.asarray(a), np.asarray(b))
    return loaded


@pytest.mark.slow
def test_keys_depend_on_seed_and_group_alone(tmp_path):
    key = jax.random.key(3)

    @program
    def f(key, keys):
        def draw(key, own):
            mine = jax.random.fold_in(key, drjax.partition_index())
            return jax.random.split(mine, 2), jax.random.normal(own, (3,))

        pair, x = drjax.map_fn(draw, (drjax.broadcast(key), keys))
        fixed = jax.random.fold_in(jax.random.key(7), 1)
        scaled = drjax.map_fn(lambda p, x: x * jax.random.uniform(p[0]), (pair, x))
        return pair, jnp.square(drjax.gather(x)), drjax.reduce_max(scaled), fixed

    loaded = both_ways(f, key, jax.random.split(key, N), tmp_path=tmp_path, exact=False)
    manifest = read_manifest(tmp_path / "plan.drjax")
    assert manifest["prng"] == ["threefry2x32"]
    assert manifest["plan"]["values"]["key"]["dtype"] == "key:threefry2x32"
    assert "key<fry>" in str(loaded)


def test_constant_results_of_stages_have_dtypes(tmp_path):
    @program
    def f(x):
        slices = drjax.map_fn(lambda a: (a, True, 1), x)
        add = lambda carry: (carry[0] + drjax.reduce_sum(x), False)
        once = jax.lax.while_loop(lambda carry: carry[1], add, (0.0, True))
        return slices, once, True, 1, 1.0

    both_ways(f, jnp.arange(float(N)), tmp_path=tmp_path)


@pytest.mark.slow
def test_closed_over_keys_and_large_arrays_are_members_of_their_own(tmp_path):
    key, table = jax.random.key(3), jnp.arange(2000, dtype=jnp.bfloat16)

    @program
    def f(x):
        noisy = lambda x: x + table[:3].astype(x.dtype) + jax.random.normal(key)
        y = drjax.map_fn(noisy, x)
        total = drjax.reduce_sum(y) + table.astype(jnp.float32).sum()
        again = drjax.map_fn(lambda x, t: x * t, (y, drjax.broadcast(total)))
        more = drjax.reduce_sum(again) * table[7].astype(jnp.float32)
        return more + jax.random.normal(key, (3,))

    both_ways(f, jnp.ones((N, 3)), tmp_path=tmp_path, exact=False)
    with zipfile.ZipFile(tmp_path / "plan.drjax") as archive:
        consts = [n for n in archive.namelist() if n.startswith("consts/")]
        sizes = sorted(archive.getinfo(n).file_size for n in consts)
        stages = [i for i in archive.infolist() if i.filename.startswith("stages/")]
    assert len(consts) == 2 and sizes[1] >= 4000
    assert not any(b"key<fry>" in i.filename.encode() for i in stages)


def test_constants_of_equal_bits_keep_their_dtypes(tmp_path):
    narrow, bits = jnp.zeros(4000, jnp.bfloat16), jnp.zeros(4000, jnp.uint16)

    @program
    def f(x):
        y = drjax.map_fn(lambda x: x + narrow[:3].astype(x.dtype), x)
        return drjax.reduce_sum(y), narrow * 2, bits + jnp.uint16(1)

    both_ways(f, jnp.ones((N, 3)), tmp_path=tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "dtype", ["float8_e5m2", "float8_e4m3fn", "int4", "float16", "bool"]
)
def test_dtypes_of_constants(dtype, tmp_path):
    table = jnp.asarray(np.arange(2000) % 5, dtype)  # of 1 kB or more: a member

    @program
    def f(x):
        y = drjax.map_fn(lambda x: x + table[:3].astype(x.dtype), x)
        return drjax.reduce_sum(y)

    both_ways(f, jnp.ones((N, 3)), tmp_path=tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool"])
def test_dtypes(dtype, tmp_path):
    @program
    def f(x):
        y = drjax.map_fn(lambda x: x[::-1], x)
        return drjax.reduce_sum(y), drjax.reduce_max(y), drjax.gather(y), y

    x = jnp.asarray(np.arange(N * 3).reshape(N, 3) % 5, dtype)
    both_ways(f, x, tmp_path=tmp_path)


@pytest.mark.parametrize("step", some([1, 3, None], 1, marks=pytest.mark.slow))
@pytest.mark.parametrize(
    "mesh",
    [
        {"clients": 3},
        *(pytest.param(m, marks=pytest.mark.slow) for m in (None, {"clients": 4})),
    ],
)
def test_loops_of_every_sort_on_meshes(mesh, step, tmp_path):
    @program
    def f(x, data):
        mean = lambda x: drjax.reduce_mean(
            drjax.map_fn(lambda x, d: jnp.tanh(x + d), (drjax.broadcast(x), data))
        )
        slices = drjax.map_fn(jnp.sin, data)
        x, means = jax.lax.scan(lambda x, _: (mean(x), mean(x)), x, None, length=2)
        x = jax.lax.while_loop(lambda x: jnp.sum(x) > 0.1, mean, x)
        add = lambda x: x + drjax.reduce_max(slices)
        return jax.lax.cond(x[0] > 5, mean, add, x), means, slices

    args = jnp.ones(2), jnp.linspace(-1, 0.1, 2 * N).reshape(N, 2)
    loaded = both_ways(f, *args, tmp_path=tmp_path, exact=False)
    with in_mesh_of(mesh):
        result = jax.jit(xla.compile(loaded, groups_per_step=step))(*args)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, result, jax.jit(f)(*args))


def test_a_group_that_pads_the_last_device_never_counts(tmp_path):
    @drjax.program(clients=5)
    def f(x):
        y = drjax.map_fn(lambda x: 1 / x, x)  # infinite for a slice of zeros
        return drjax.reduce_sum(y), drjax.reduce_min(y), drjax.reduce_max(-y)

    x = jnp.arange(1.0, 6.0)
    loaded = saved(drjax.make_plan(f)(x), tmp_path / "plan.drjax")
    with in_mesh_of({"clients": 4}):
        result = jax.jit(xla.compile(loaded))(x)
    np.testing.assert_allclose(result, jax.jit(f)(x), rtol=1e-6)


@pytest.mark.parametrize("backend", [reference, xla])
def test_derivatives_are_taken_before_a_plan_is_saved(backend, tmp_path):
    loaded, data = saved(sgd_plan(), tmp_path / "plan.drjax"), jnp.ones((N, 5, 3))
    run = backend.compile(loaded)
    text = "can be run, but neither differentiated nor vmapped. Plan jax.grad(f)"
    loss = lambda model: jnp.sum(run(model, data))
    raises(drjax.DrjaxError, text, jax.grad(loss), jnp.ones(3))
    raises(drjax.DrjaxError, text, jax.vmap(loss), jnp.ones((2, 3)))


def test_nested_programs(tmp_path):
    @drjax.program(pods=3)
    def inner(x):
        return drjax.reduce_sum(drjax.map_fn(jnp.square, drjax.broadcast(x)))

    @program
    def f(x):
        return drjax.reduce_mean(drjax.map_fn(inner, x))

    both_ways(f, jnp.arange(float(N)), tmp_path=tmp_path)


def test_a_plan_without_groups_and_one_without_work(tmp_path):
    both_ways(jnp.sin, jnp.ones(3), tmp_path=tmp_path, exact=False)
    both_ways(lambda x, y: {"y": y}, jnp.ones(3), jnp.ones(2), tmp_path=tmp_path)


def filtered(x, _):
    """A convolution whose filter is the group's own."""
    own = x[:2].reshape(1, 1, 1, 2)
    return jax.lax.conv(x.reshape(1, 1, 3, 3), own, (1, 1), "SAME")


def drawn(x, key):
    """Bits that JAX draws otherwise for a batch of keys, if they are of sort rbg."""
    return x * jax.random.normal(jax.random.fold_in(key, drjax.partition_index()))


def viewed(x, _):
    """Bytes of floats, which no batch of a symbolic size can be converted to."""
    return x.view(jnp.uint8).astype(x.dtype)


@pytest.mark.parametrize(
    "work, impl",
    [
        (filtered, "threefry2x32"),
        pytest.param(drawn, "rbg", marks=pytest.mark.slow),
        pytest.param(viewed, "threefry2x32", marks=pytest.mark.slow),
    ],
)
def test_groups_of_a_batch_that_jax_cannot_batch_go_in_turn(work, impl, tmp_path):
    @program
    def f(x, key):
        y = drjax.map_fn(work, (x, drjax.broadcast(key)))
        return drjax.reduce_mean(y), y

    x, key = jnp.linspace(0, 9, N * 9).reshape(N, 9), jax.random.key(2, impl=impl)
    plan = drjax.make_plan(f)(x, key)
    loaded = saved(plan, tmp_path / "plan.drjax")
    assert exported_of(loaded.rounds[0].local).sequential
    assert "groups of a batch in turn" in inspect(tmp_path / "plan.drjax")[1]
    by_reference = reference.compile(plan)(x, key)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for step in (1, 3, None):
        run = jax.jit(xla.compile(loaded, groups_per_step=step))
        jax.tree.map(close, run(x, key), by_reference)


def test_32_bit_values_stay_so_with_64_bits(tmp_path):
    plan, args = sgd_plan(), (jnp.ones(3), jnp.ones((N, 5, 3)))
    by_reference = reference.compile(plan)(*args)
    with jax.enable_x64(True):
        loaded = saved(plan, tmp_path / "plan.drjax")
        for run in (reference.compile(loaded), jax.jit(xla.compile(loaded))):
            result = run(*args)
            assert result.dtype == np.float32
            np.testing.assert_allclose(result, by_reference, rtol=1e-6)


def test_a_mesh_in_context_does_not_bind_the_file(tmp_path):
    with in_mesh_of({"clients": 8}):
        loaded = saved(sgd_plan(), tmp_path / "plan.drjax")
    args = jnp.ones(3), jnp.ones((N, 5, 3))
    result = jax.jit(xla.compile(loaded))(*args)
    np.testing.assert_allclose(result, reference.compile(loaded)(*args), rtol=1e-6)
