"""Saved plans compute what the plans compute, whatever the program; and how they look.

Every program of the table and its derivatives, loops over rounds, keys, small floats:
saved, loaded, and run by both backends.
"""

import functools
import json
import subprocess
import sys
import zipfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.__main__ import main
from drjax.backends import reference, xla
from drjax.interpret.files.report import inspect
from tests.cases import CASES, MESHES, N, on_mesh
from tests.meshes import in_mesh_of
from tests.raising import raises
from tests.test_planned import SLOW, TRANSFORMS, assert_same, expected

pytestmark = pytest.mark.usefixtures("leaks_unchecked")
program = drjax.program(clients=N)


def saved(plan, path):
    """A plan that went through a file."""
    plan.save(path)
    loaded = drjax.load_plan(path)
    assert str(loaded) == str(plan)
    assert str(loaded.communication(4)) == str(plan.communication(4))
    return loaded


def pairs():
    """Each case and transform on one mesh, in chunks of one size."""
    for i, case in enumerate(CASES):
        for j, name in enumerate(TRANSFORMS):
            ways = [w for w in MESHES if case.on_explicit or "explicit" not in w]
            mesh, step = ways[(3 * i + j) % len(ways)], (1, 3, None)[(i + j) % 3]
            often = name == "value_and_grad" or (
                name == "grad of rounds" and i % 4 == 0
            )
            yield pytest.param(
                case, name, mesh, step, marks=() if often else SLOW,
                id=f"{case.name}-{name}-{mesh}-{step}",
            )  # fmt: skip


@pytest.mark.parametrize(("case", "name", "mesh", "step"), [*pairs()])
def test_programs(case, name, mesh, step, tmp_path):
    with on_mesh(case, "none") as args:
        plan = drjax.make_plan(TRANSFORMS[name](case))(*args)
        loaded = saved(plan, tmp_path / "plan.drjax")
        found = reference.compile(loaded)(*args)
    assert_same(found, expected(case, name))
    with on_mesh(case, mesh) as args:
        found = jax.jit(xla.compile(loaded, groups_per_step=step))(*args)
    assert_same(found, expected(case, name))


def both_ways(fn, *args, tmp_path, exact=True):
    """The results of a saved plan, which are those of the program."""
    loaded = saved(drjax.make_plan(fn)(*args), tmp_path / "plan.drjax")
    wanted = jax.jit(fn)(*args)
    close = np.testing.assert_array_equal
    if not exact:
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    for run in (reference.compile(loaded), jax.jit(xla.compile(loaded))):
        found = run(*args)
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            close(np.asarray(a), np.asarray(b))
    return loaded


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


def test_closed_over_keys_and_large_arrays_are_members_of_their_own(tmp_path):
    key, table = jax.random.key(3), jnp.arange(2000, dtype=jnp.bfloat16)

    @program
    def f(x):
        y = drjax.map_fn(lambda x: x + table[:3].astype(x.dtype), x)
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool"])
def test_dtypes(dtype, tmp_path):
    @program
    def f(x):
        y = drjax.map_fn(lambda x: x[::-1], x)
        return drjax.reduce_sum(y), drjax.reduce_max(y), drjax.gather(y), y

    x = jnp.asarray(np.arange(N * 3).reshape(N, 3) % 5, dtype)
    both_ways(f, x, tmp_path=tmp_path)


@pytest.mark.parametrize("step", [1, 3, None])
@pytest.mark.parametrize("mesh", [None, {"clients": 4}, {"clients": 3}])
def test_loops_of_every_sort_on_meshes(mesh, step, tmp_path):
    @program
    def f(x, data):
        mean = lambda x: drjax.reduce_mean(
            drjax.map_fn(lambda x, d: jnp.tanh(x + d), (drjax.broadcast(x), data))
        )
        rows = drjax.map_fn(jnp.sin, data)
        x, means = jax.lax.scan(lambda x, _: (mean(x), mean(x)), x, None, length=2)
        x = jax.lax.while_loop(lambda x: jnp.sum(x) > 0.1, mean, x)
        add = lambda x: x + drjax.reduce_max(rows)
        return jax.lax.cond(x[0] > 5, mean, add, x), means, rows

    args = jnp.ones(2), jnp.linspace(-1, 0.1, 2 * N).reshape(N, 2)
    loaded = both_ways(f, *args, tmp_path=tmp_path, exact=False)
    with in_mesh_of(mesh):
        found = jax.jit(xla.compile(loaded, groups_per_step=step))(*args)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, found, jax.jit(f)(*args))


def test_a_group_that_pads_the_last_device_never_counts(tmp_path):
    @drjax.program(clients=5)
    def f(x):
        y = drjax.map_fn(lambda x: 1 / x, x)  # infinite for a row of zeros
        return drjax.reduce_sum(y), drjax.reduce_min(y), drjax.reduce_max(-y)

    x = jnp.arange(1.0, 6.0)
    loaded = saved(drjax.make_plan(f)(x), tmp_path / "plan.drjax")
    with in_mesh_of({"clients": 4}):
        found = jax.jit(xla.compile(loaded))(x)
    np.testing.assert_allclose(found, jax.jit(f)(x), rtol=1e-6)


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


# ---------------------------------------------------------------------------------
# Pytrees


class Point(NamedTuple):
    x: Any
    y: Any


class Box:
    """A class of the user's, which a loaded plan does not know."""

    def __init__(self, low, high):
        self.low, self.high = low, high


jax.tree_util.register_dataclass(Box, ["low", "high"], [])


@jax.tree_util.register_pytree_node_class
class Nameless:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)


def test_pytrees_come_back_without_their_classes(tmp_path):
    @program
    def f(point, box, *, scale):
        total = drjax.reduce_sum(drjax.map_fn(jnp.multiply, (point.x, point.y)))
        made = Point(total * scale["by"][0], [box.low, None, ()])
        return made, {"box": Box(box.high, box.low), "more": {3: (total,)}}

    args = Point(jnp.arange(float(N)), jnp.ones(N)), Box(jnp.ones(2), jnp.zeros(2))
    scale = {"by": [jnp.float32(2.0)]}
    loaded = saved(drjax.make_plan(f)(*args, scale=scale), tmp_path / "plan.drjax")
    wanted, others = f(*args, scale=scale)
    for run in (reference.compile(loaded), jax.jit(xla.compile(loaded))):
        point, more = run(*args, scale=scale)
        assert type(point).__name__ == "Point" and point._fields == ("x", "y")
        assert point.x == wanted.x and point.y[1:] == [None, ()]
        assert sorted(map(str, more)) == ["box", "more"]
        np.testing.assert_array_equal(more["box"].low, others["box"].low)
        assert type(more["box"]).__name__ == "Box"
    again = run(type(point)(*args[0]), args[1], scale=scale)[0]  # or what came back
    assert again.x == wanted.x
    manifest = read_manifest(tmp_path / "plan.drjax")
    assert manifest["plan"]["out_tree"]["paths"] == [
        "[0].x", "[0].y[0]", "[1]['box'].low", "[1]['box'].high", "[1]['more'][3][0]",
    ]  # fmt: skip
    text = (
        "was planned for arguments (args, kwargs) of structure ((Point(x=*, y=*), Box"
    )
    raises(drjax.DrjaxTypeError, text, run, args[0])


@pytest.mark.parametrize(
    "result, text",
    [
        (lambda x: Nameless(x), "JAX knows none for those of Nameless"),
        (lambda x: {(1, 2): x}, "got the key (1, 2)"),
    ],
)
def test_pytrees_that_need_their_class_are_refused(result, text, tmp_path):
    plan = drjax.make_plan(program(lambda x: result(drjax.reduce_sum(x))))(jnp.ones(N))
    raises(drjax.PlanFileError, text, plan.save, tmp_path / "plan.drjax")
    assert not [*tmp_path.iterdir()]


# ---------------------------------------------------------------------------------
# What is refused, and what is in the file


def called_back(x):
    jax.debug.print("x = {}", x)
    return x


def host(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.sin, shape, x, vmap_method="sequential")


@pytest.mark.parametrize("fn, name", [(called_back, "debug"), (host, "pure_callback")])
def test_callbacks_are_refused_with_their_line(fn, name, tmp_path):
    nested = lambda x: jax.lax.fori_loop(0, 2, lambda _, x: fn(x), x)
    f = program(lambda x: drjax.reduce_sum(drjax.map_fn(nested, x)))
    plan = drjax.make_plan(f)(jnp.ones(N))
    text = raises(
        drjax.PlanFileError, "round 1, groups calls back into Python", plan.save,
        tmp_path / "plan.drjax",
    )  # fmt: skip
    line = fn.__code__.co_firstlineno + (1 if name == "debug" else 2)
    assert f"{name}" in text and f"{__file__}:{line} ({fn.__name__})" in text
    assert not [*tmp_path.iterdir()]


def sgd_plan():
    @program
    def step(model, data):
        def work(model, x):
            return model - 0.1 * jax.grad(lambda m: jnp.mean((x @ m) ** 2))(model)

        return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(model), data)))

    return drjax.make_plan(step)(jnp.ones(3), jnp.ones((N, 5, 3)))


def read_manifest(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("manifest.json"))


def test_the_same_plan_makes_the_same_file(tmp_path):
    paths = [tmp_path / f"{i}.drjax" for i in range(3)]
    plan = sgd_plan()
    plan.save(paths[0])
    sgd_plan().save(paths[1])
    drjax.load_plan(paths[0]).save(paths[2])
    first, *others = (path.read_bytes() for path in paths)
    assert all(other == first for other in others)


def test_what_is_in_the_file(tmp_path):
    path = tmp_path / "new" / "folder" / "plan.drjax"
    sgd_plan().save(path)
    manifest = read_manifest(path)
    assert manifest["platforms"] == ["cpu", "cuda", "tpu"]
    assert manifest["producer"]["jax"] == jax.__version__
    assert manifest["producer"]["drjax"] == drjax.__version__
    assert manifest["x64"] is False and manifest["prng"] == []
    assert manifest["plan"]["partition"]["name"] == "clients"
    (only,) = manifest["plan"]["rounds"]
    assert only["groups"]["partials"] == [{"op": "mean", "value": "work"}]
    assert [m["op"] for m in manifest["ledger"]] == ["broadcast", "mean"]
    ends = ["batch.jexp", "batch.mlirbc", "jaxpr.txt", "jexp", "mlirbc"]
    assert sorted(manifest["members"]) == [f"stages/1.groups.{end}" for end in ends]
    with zipfile.ZipFile(path) as archive:
        assert "dot_general" in archive.read("stages/1.groups.jaxpr.txt").decode()
        blob = archive.read("stages/1.groups.jexp")
    assert b".py" not in path.read_bytes()  # of nobody's file system
    exported = jax.export.deserialize(bytearray(blob))
    assert exported.platforms == ("cpu", "cuda", "tpu")


def test_inspect(tmp_path, capsys):
    with jax.enable_x64(True):
        square = jnp.eye(3)
        f = program(lambda x: jnp.linalg.cholesky(square + drjax.reduce_sum(x)))
        plan = drjax.make_plan(f)(jnp.ones((N, 3, 3)))
        plan.save(tmp_path / "plan.drjax")
    picture = tmp_path / "plan.svg"
    assert main(["inspect", str(tmp_path / "plan.drjax"), "--draw", str(picture)]) == 0
    out = capsys.readouterr().out
    assert str(plan) in out and str(plan.communication()) in out
    assert f"jax {jax.__version__}" in out and "64-bit values: yes" in out
    assert "cpu, cuda, tpu" in out and "lapack_dpotrf_ffi" in out
    assert picture.read_text().startswith("<?xml")
    assert main(["inspect", str(tmp_path / "none.drjax")]) == 1
    assert "drjax: " in capsys.readouterr().err
    command = [sys.executable, "-m", "drjax", "inspect", tmp_path / "plan.drjax"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == out and not done.returncode


def test_64_bit_values_need_64_bits(tmp_path):
    path = tmp_path / "plan.drjax"
    with jax.enable_x64(True):
        plan = drjax.make_plan(program(drjax.reduce_sum))(jnp.ones(N))
    plan.save(path)
    assert read_manifest(path)["x64"] is True
    raises(drjax.PlanFileError, "with jax.enable_x64(True)", drjax.load_plan, path)
    with jax.enable_x64(True):
        found = reference.compile(drjax.load_plan(path))(jnp.ones(N))
    assert float(found) == N and found.dtype == np.float64


def test_a_mesh_in_context_does_not_bind_the_file(tmp_path):
    with in_mesh_of({"clients": 8}):
        loaded = saved(sgd_plan(), tmp_path / "plan.drjax")
    args = jnp.ones(3), jnp.ones((N, 5, 3))
    found = jax.jit(xla.compile(loaded))(*args)
    np.testing.assert_allclose(found, reference.compile(loaded)(*args), rtol=1e-6)


def filtered(x, key):
    """A convolution whose filter is the group's own, and bits of two sorts of keys."""
    rows = jax.lax.conv(x.reshape(1, 1, 3, 3), x[:2].reshape(1, 1, 1, 2), (1, 1), "SAME")
    return rows.sum() + jax.random.normal(jax.random.fold_in(key, 1))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_what_cannot_be_batched_for_any_number_of_groups_goes_in_turn(impl, tmp_path):
    @program
    def f(x, key):
        key = jax.random.fold_in(key, 5)
        own = lambda x, key: filtered(x, jax.random.fold_in(key, x[0].astype(int)))
        y = drjax.map_fn(own, (x, drjax.broadcast(key)))
        return drjax.reduce_mean(y), y

    x, key = jnp.linspace(0, 9, N * 9).reshape(N, 9), jax.random.key(2, impl=impl)
    plan = drjax.make_plan(f)(x, key)
    loaded = saved(plan, tmp_path / "plan.drjax")
    assert loaded.rounds[0].local.forms.in_turn
    assert "groups of a batch in turn" in inspect(tmp_path / "plan.drjax")[1]
    wanted = reference.compile(plan)(x, key)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    for step in (1, 3, None):
        run = jax.jit(xla.compile(loaded, groups_per_step=step))
        jax.tree.map(close, run(x, key), wanted)
