"""Saved plans run where their source is not: no user's module, no flax, or no JAX.

Covers: drjax._plan_file.pytrees, drjax._plan_file.load.
"""

import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._planner.arguments import flat_inputs
from drjax.backends import reference
from examples.algorithms import maml
from examples.common.sinusoid import init, sample_task
from examples.reproductions import diloco

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

# Runs in a process of its own, in an empty folder.
WITHOUT_SOURCE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("examples", "flax", "optax", "tests"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import drjax, jax, numpy as np

for name in ("examples", "flax", "optax"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name)

source, input_path, output_path = sys.argv[1:]
drjax.make_plan = jax.make_jaxpr  # never called below
plan = drjax.load_plan(source)
arrays = np.load(input_path)
arrays = [arrays[f"arr_{i}"] for i in range(len(plan.inputs))]
args, kwargs = plan.in_tree.unflatten(arrays)
run = {
    "reference": drjax.backends.reference.compile(plan),
    "xla": jax.jit(drjax.backends.xla.compile(plan, groups_per_step=2)),
}
outputs = {}
for name, fn in run.items():
    for i, leaf in enumerate(jax.tree.leaves(fn(*args, **kwargs))):
        outputs[f"{name}.{i}"] = np.asarray(leaf)
np.savez(output_path, **outputs)
"""


def round_of_diloco():
    """The program that examples/reproductions/diloco.py trains, small."""
    one = diloco.engine_round()
    return one.step, (one.shared, one.own, one.data[:, :1000])


def gradient_of_maml():
    keys = jax.random.split(jax.random.key(1), maml.META_BATCH)
    args = init(jax.random.key(0)), jnp.float32(0.01), jax.vmap(sample_task)(keys)
    return jax.grad(maml.meta_loss, argnums=(0, 1)), args


class Model(NamedTuple):
    w: jax.Array
    b: jax.Array


def gradient_of_a_regression():
    @drjax.program(clients=4)
    def loss(model, x, y):
        error = lambda m, x, y: jnp.mean((x @ m.w + m.b - y) ** 2)
        return drjax.reduce_mean(drjax.map_fn(error, (drjax.broadcast(model), x, y)))

    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    model = Model(jnp.ones(3), jnp.float32(0.5))
    return jax.value_and_grad(loss), (model, x, np.sin(x.sum(-1)))


OF_EXAMPLES = [round_of_diloco, gradient_of_maml]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        gradient_of_a_regression,
        *(pytest.param(make, marks=pytest.mark.slow) for make in OF_EXAMPLES),
    ],
)
def test_a_process_without_the_source(make, tmp_path):
    with jax.numpy_rank_promotion("allow"):  # as users of the examples do
        program, args = make()
        plan = drjax.make_plan(program)(*args)
        plan.save(tmp_path / "plan.drjax")
    flat_inputs(drjax.load_plan(tmp_path / "plan.drjax"), args, {})  # users' classes
    np.savez(tmp_path / "inputs.npz", *jax.tree.leaves(args))
    expected = [np.asarray(x) for x in jax.tree.leaves(reference.compile(plan)(*args))]
    empty = tmp_path / "empty"
    empty.mkdir()
    names = [str(tmp_path / n) for n in ("plan.drjax", "inputs.npz", "outputs.npz")]
    run_alone(WITHOUT_SOURCE, names, empty)
    assert not [*empty.iterdir()]
    with np.load(tmp_path / "outputs.npz") as file:
        output = dict(file)
    assert len(output) == 2 * len(expected)
    for i, want in enumerate(expected):
        for name in ("reference", "xla"):
            result = output[f"{name}.{i}"]
            assert result.dtype == want.dtype
            np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-6)


def run_alone(code, arguments, folder):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


WITHOUT_JAX = """
import json, sys, zipfile
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

source, input_path, output_path = sys.argv[1:]
with zipfile.ZipFile(source) as archive:
    manifest = json.loads(archive.read("manifest.json"))
    steps = manifest["plan"]["steps"]
    (groups,) = [step for step in steps if step.get("local")]
    code = archive.read(groups["member"] + ".mlirbc")
arrays = np.load(input_path).values()
inputs = dict(zip(manifest["plan"]["inputs"], arrays, strict=True))
tables = manifest["plan"]["values"]
n = manifest["plan"]["partition"]["size"]
sums = 0.0
with ir.Context() as context:
    stablehlo.register_dialect(context)
    module = stablehlo.deserialize_portable_artifact(context, code)
    whole = lambda x: ir.DenseElementsAttr.get(np.asarray(x))
    for group in range(n):
        args = [np.int32(manifest["platforms"].index("cpu")), np.int32(group)]
        for name in groups["inputs"]:
            x = inputs[name]
            args.append(x if tables[name]["group_axis"] is None else x[group])
        (out,) = stablehlo.eval_module(module, [whole(x) for x in args])
        sums += np.asarray(out).astype(np.float64)
assert "jax" not in sys.modules
[reduction] = [step for step in steps if step["step"] == "Reduce"]
np.save(output_path, sums / n if reduction["op"] == "mean" else sums)
"""


def test_a_process_without_jax(tmp_path):
    @drjax.program(clients=5)
    def step(model, data):
        def work(model, x):
            key = jax.random.fold_in(jax.random.key(0), drjax.partition_index())
            drawn = jax.random.normal(key, model.shape)

            def descend(model, slice_):
                return model - 0.1 * jnp.tanh(
                    slice_ @ model + drawn @ model
                ) * slice_, None

            return jax.lax.scan(descend, model, x)[0]

        return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(model), data)))

    args = jnp.ones(3), jnp.sin(jnp.arange(60.0)).reshape(5, 4, 3)
    plan = drjax.make_plan(step)(*args)
    plan.save(tmp_path / "plan.drjax")
    np.savez(tmp_path / "inputs.npz", *args)
    names = [str(tmp_path / n) for n in ("plan.drjax", "inputs.npz", "made.npy")]
    run_alone(WITHOUT_JAX, names, tmp_path)
    want = np.asarray(reference.compile(plan)(*args))
    np.testing.assert_allclose(np.load(tmp_path / "made.npy"), want, rtol=1e-6)
