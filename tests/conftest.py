"""Stricter than users: warnings are errors, ranks do not promote, tracers may not leak.

Every test process has eight virtual CPU devices. What XLA compiles is kept in pytest's
cache: the processes of a run share it, and a later run takes a third of the time.
"""

import collections
import gc
import os
import shutil
from pathlib import Path

import jax
import pytest

# What JAX keeps is long-lived, and looking through it often takes a fifth of the time.
gc.set_threshold(100_000, 20, 50)

DEFAULT = "not slow and not engines"  # as in pyproject.toml
KEPT = 2**30  # bytes; a run adds some hundred million where all has changed

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# With leak checks everything is traced again: only with the newest JAX.
jax.config.update("jax_check_tracer_leaks", jax.__version_info__ >= (0, 12))


def pytest_configure(config):
    keep_compiled(config)
    compile_quickly(config)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    """Of the parameters of a `sampled` test, a third is slow, a third in the grids."""
    from tests.helpers.cases import marks_of  # uses JAX, which is configured by now

    seen = collections.Counter()
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            name = item.nodeid.split("[")[0]
            for mark in marks_of(seen[name] % 3):
                item.add_marker(mark)
            seen[name] += 1


def keep_compiled(config):
    """Compile each computation once, in whichever process and run it comes first."""
    if not hasattr(config, "cache"):  # -p no:cacheprovider
        return
    folder = config.cache.mkdir("compiled")
    if not hasattr(config, "workerinput") and size_of(folder) > KEPT:
        shutil.rmtree(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def compile_quickly(config):
    """Compile the default tests in two thirds of the time, with the newest JAX.

    LLVM does not optimize their code. It does so in the slow tests, and in all tests
    with the oldest JAX.
    """
    if config.option.markexpr == DEFAULT and jax.__version_info__ >= (0, 12):
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"


def pytest_collectstart():
    """Nor is what was imported, where parameters of tests are plans."""
    gc.freeze()


@pytest.fixture(autouse=True)
def what_is_kept():
    """What JAX keeps of a test is not looked through again in each later collection.

    A check for leaks collects whenever a trace is in a cycle: over a second where a
    thousand tests ran before.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def programs_of_a_file():
    """The programs of other files slow down what is compiled after them.

    With leak checks JAX does not keep them.
    """
    yield
    if not jax.config.jax_check_tracer_leaks:
        jax.clear_caches()


@pytest.fixture
def leaks_unchecked():
    """For tests that trace thousands of equations, whose every tracer would be sought.

    What they trace is checked for leaks elsewhere.
    """
    with jax.check_tracer_leaks(False):
        yield
