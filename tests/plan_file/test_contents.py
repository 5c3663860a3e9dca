"""What is in plan files, and what of a program they refuse.

Covers: drjax._plan_file.encode, drjax._plan_file.inspect,
drjax._plan_file.stage_features, drjax.__main__.
"""

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
from tests.helpers.cases import N
from tests.helpers.plan_files import (
    local_stage,
    program,
    read_manifest,
    saved,
    sgd_plan,
)
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

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
        built = Point(total * scale["by"][0], [box.low, None, ()])
        return built, {"box": Box(box.high, box.low), "more": {3: (total,)}}

    args = Point(jnp.arange(float(N)), jnp.ones(N)), Box(jnp.ones(2), jnp.zeros(2))
    scale = {"by": [jnp.float32(2.0)]}
    loaded = saved(drjax.make_plan(f)(*args, scale=scale), tmp_path / "plan.drjax")
    expected, others = f(*args, scale=scale)
    for run in (reference.compile(loaded), jax.jit(xla.compile(loaded))):
        point, more = run(*args, scale=scale)
        assert type(point).__name__ == "Point" and point._fields == ("x", "y")
        assert point.x == expected.x and point.y[1:] == [None, ()]
        assert sorted(map(str, more)) == ["box", "more"]
        np.testing.assert_array_equal(more["box"].low, others["box"].low)
        assert type(more["box"]).__name__ == "Box"
    again = run(type(point)(*args[0]), args[1], scale=scale)[0]  # or what came back
    assert again.x == expected.x
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
        (lambda x: {float("inf"): x}, "finite numbers, got the key inf"),
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
    partials = local_stage(manifest["plan"])["partials"]
    assert partials == [{"op": "mean", "value": "work"}]
    assert [m["op"] for m in manifest["ledger"]] == ["broadcast", "mean"]
    ends = ["batch.jexp", "batch.mlirbc", "jaxpr.txt", "jexp", "mlirbc"]
    assert sorted(manifest["members"]) == [f"stages/1.groups.{end}" for end in ends]
    with zipfile.ZipFile(path) as archive:
        assert "dot_general" in archive.read("stages/1.groups.jaxpr.txt").decode()
        blob = archive.read("stages/1.groups.jexp")
    assert b".py" not in path.read_bytes()  # no path of a file system
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


def test_the_version_is_that_of_drjax_and_jax(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    versions = f"drjax {drjax.__version__}, JAX {jax.__version__}\n"
    assert capsys.readouterr().out == versions


def test_without_a_command_it_says_what_is_missing(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "are required: command" in capsys.readouterr().err


def test_code_without_a_stable_form_is_refused(tmp_path):
    f = program(lambda x: drjax.map_fn(jnp.linalg.eigvals, x))
    plan = drjax.make_plan(f)(jnp.ones((N, 3, 3)))
    text = raises(
        drjax.PlanFileError, "round 1, groups (eigvals) cannot be exported for cpu",
        plan.save, tmp_path / "plan.drjax",
    )  # fmt: skip
    assert "tpu" in text


def test_dtypes_that_jax_cannot_export_are_refused(tmp_path):
    table = jnp.ones(2000, "uint2")  # of 1 kB or more: an argument of the code
    work = lambda x: x + table[0].astype(x.dtype)
    f = program(lambda x: drjax.reduce_sum(drjax.map_fn(work, x)))
    plan = drjax.make_plan(f)(jnp.ones(N))
    text = "JAX's format has no dtype(uint2). Convert it to another dtype"
    raises(drjax.PlanFileError, text, plan.save, tmp_path / "plan.drjax")


def test_64_bit_values_need_64_bits(tmp_path):
    path = tmp_path / "plan.drjax"
    with jax.enable_x64(True):
        plan = drjax.make_plan(program(drjax.reduce_sum))(jnp.ones(N))
    plan.save(path)
    assert read_manifest(path)["x64"] is True
    raises(drjax.PlanFileError, "with jax.enable_x64(True)", drjax.load_plan, path)
    with jax.enable_x64(True):
        result = reference.compile(drjax.load_plan(path))(jnp.ones(N))
    assert float(result) == N and result.dtype == np.float64
