"""Stricter than users: warnings are errors, ranks do not promote, tracers may not leak.

Every test process has eight virtual CPU devices. What XLA compiles is kept in pytest's
cache: the processes of a run share it, and a later run takes less time.
"""

import collections
import gc
import os
import shutil
import threading
import zlib
from pathlib import Path

import jax
import jax.interpreters.mlir
import pytest
from jaxlib.mlir import ir

# What JAX keeps is long-lived, and looking through it often takes a fifth of the time.
gc.set_threshold(100_000, 20, 50)

DEFAULT = "not slow and not engines"  # as in pyproject.toml
NEWEST = jax.__version_info__ >= (0, 12)
KEPT = 2**30  # bytes; a run adds some hundred million where all has changed

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# With leak checks everything is traced again: only with the newest JAX.
jax.config.update("jax_check_tracer_leaks", NEWEST)


def pytest_configure(config):
    keep_compiled(config)
    compile_quickly(config)
    if not NEWEST:
        reuse_contexts()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    """Of the parameters of a `sampled` test, a third is slow, a third in the grids.

    Of what remains of a test with three or more, half is slow with the oldest JAX, and
    the other half with the newest: each is in one of the two default runs. So it is of
    two of a `sampled` test, and of one that runs `once`, which has the newest where it
    has no parameters.
    """
    from tests.helpers.cases import marks_of  # uses JAX, which is configured by now

    seen, tests = collections.Counter(), collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("engines"):
            continue
        name = item.nodeid.split("[")[0]
        marks = ()
        if item.get_closest_marker("sampled"):
            marks = marks_of(seen[name] % 3)
            seen[name] += 1
        for mark in marks:
            item.add_marker(mark)
        if not marks:
            tests[name].append(item)
    for of_test in tests.values():
        marked = of_test[0].get_closest_marker
        enough = 2 if marked("sampled") else 3
        if len(of_test) >= enough or marked("once"):
            # Every second one would often be one value of the last parameter.
            of_test.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            for item in of_test[NEWEST::2]:
                item.add_marker(pytest.mark.slow)


def keep_compiled(config):
    """Compile each computation once, in whichever process and run it comes first."""
    if not hasattr(config, "cache"):  # -p no:cacheprovider
        return
    folder = config.cache.mkdir("compiled")
    if not hasattr(config, "workerinput") and size_of(folder) > KEPT:
        shutil.rmtree(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.03)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def compile_quickly(config):
    """Compile the default tests in two thirds of the time; in a third with JAX 0.10.

    LLVM does not optimize their code, and the oldest JAX, which can, does not emit it
    by way of MLIR. Both are done in the slow tests, those of engines, the frozen
    programs, and all examples and pages that run.
    """
    if config.option.markexpr == DEFAULT:
        flags = [os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level=0"]
        if jax.__version_info__ < (0, 11):
            flags.append("--xla_cpu_use_fusion_emitters=false")
        os.environ["XLA_FLAGS"] = " ".join(flags)


def reuse_contexts():
    """Lower ten computations of a thread in one MLIR context, as the newest JAX does.

    To make one takes as long as a small computation takes to lower. What is lowered
    while another is gets one of its own: modules would nest.
    """
    make, last = jax.interpreters.mlir.make_ir_context, threading.local()

    def make_ir_context():
        if ir.Context.current is not None:
            return make()
        if getattr(last, "uses", 10) == 10:
            last.context, last.uses = make(), 0
        last.uses += 1
        return last.context

    where = "jax._src.interpreters.mlir.make_ir_context"
    pytest.MonkeyPatch().setattr(where, make_ir_context)


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
