"""Programs, and what is made of them, can be sent to another process.

Ray, Beam, dask, loky and submitit pickle functions with cloudpickle, and what can be
imported with the standard library.

Covers: drjax._api.program, drjax._context, drjax._jit.jit, drjax._jit.tune, drjax.plan.
"""

import os
import pickle
import subprocess
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax

X = np.arange(4.0, dtype=np.float32)


@drjax.program(clients=4)
def of_module(x):
    return drjax.reduce_sum(drjax.map_fn(jnp.square, x))


def local_program(**options):
    """A program that no import finds, so that it is pickled by value."""

    @drjax.program(clients=4, **options)
    def of_function(x):
        return drjax.reduce_sum(drjax.map_fn(lambda x: x**2, x))

    return of_function


def two_levels():
    @drjax.program(pods=2, groups=2)
    def of_pods(x):
        return drjax.reduce_sum(drjax.map_fn(jnp.square, x.reshape(2, 2)))

    return of_pods


def calls_a_program():
    f = local_program()
    return lambda x: f(x)


RESULTS = {
    "program": local_program,
    "levels": two_levels,
    "a function that calls one": calls_a_program,
    "jax.jit": lambda: jax.jit(local_program()),
    "drjax.jit": lambda: drjax.jit(local_program(), groups_per_step=2),
    "drjax.jit, auto": lambda: drjax.jit(local_program(), groups_per_step="auto"),
    "drjax.jit, tune": lambda: drjax.jit(local_program(), groups_per_step="tune"),
    "of a module": lambda: of_module,
    "drjax.jit of a module": lambda: drjax.jit(of_module),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_cloudpickle_restores_computes_the_same(name):
    restored = cloudpickle.loads(cloudpickle.dumps(RESULTS[name]()))
    assert restored(X) == 14


def test_a_pickled_program_keeps_its_partition_and_name():
    restored = cloudpickle.loads(cloudpickle.dumps(local_program()))
    assert restored.partition == drjax.Partition("clients", 4)
    assert restored.__name__ == "of_function"
    with pytest.raises(drjax.DrjaxValueError, match="4"):
        restored(np.ones(3, np.float32))


def test_the_standard_library_pickles_the_program_of_a_module():
    assert pickle.loads(pickle.dumps(of_module)) is of_module


def test_another_process_runs_a_pickled_program():
    code = (
        "import sys, pickle, numpy as np\n"
        "f, step = pickle.load(sys.stdin.buffer)\n"
        "x = np.arange(4, dtype=np.float32)\n"
        "print(f(x), step(x))"
    )
    f = local_program()
    env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", code], input=cloudpickle.dumps((f, drjax.jit(f))),
        capture_output=True, check=True, env=env,
    )  # fmt: skip
    assert run.stdout.split() == [b"14.0", b"14.0"]


@pytest.mark.parametrize("package", [pickle, cloudpickle], ids=lambda p: p.__name__)
def test_a_plan_is_pickled_as_its_file(package):
    plan = drjax.make_plan(local_program())(X)
    restored = package.loads(package.dumps(plan))
    assert str(restored) == str(plan)
    for backend in (drjax.backends.reference, drjax.backends.xla):
        assert backend.compile(restored)(X) == 14


def test_a_plan_that_has_no_file_has_no_pickle():
    @drjax.program(clients=4)
    def prints(x):
        return drjax.map_fn(lambda x: (jax.debug.print("{}", x), x)[1], x)

    plan = drjax.make_plan(prints)(X)
    with pytest.raises(drjax.PlanFileError, match="calls back into Python"):
        pickle.dumps(plan)
