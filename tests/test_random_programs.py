"""Random programs: value and gradient agree in every way to run a program.

Each program meets one chunk size and one mesh, drawn with it. What it should give is
found by StableHLO's interpreter, which is not of XLA. A long run is
`DRJAX_RANDOM_PROGRAMS=20000 DRJAX_RANDOM_SEED=7 python -m pytest -m slow -n 0 -s
tests/test_random_programs.py`; it goes in batches, each in a fresh process, one per
core, and prints its count, its seeds, and which rules it has reached. It takes hours;
stopped, the same command goes on with the batches that are left.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import hypothesis
import jax
import jax.extend
import jaxlib
import numpy as np
import pytest
from hypothesis import strategies

import drjax
from drjax.backends import in_place
from drjax.interpret import rows
from drjax.interpret.flat import CONTROL
from drjax.interpret.kind import SIGNATURES
from drjax.interpret.kinds import Kinds
from tests.interpreter import interpreted, stage_runner
from tests.meshes import in_mesh_of
from tests.random_programs import arguments, covering, make, recipes
from tests.test_row_rules import INTERNAL

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

COUNT = int(os.environ.get("DRJAX_RANDOM_PROGRAMS", "50"))
BATCH = 500  # what JAX and hypothesis keep of each program makes long processes slow
SEED = int(os.environ.get("DRJAX_RANDOM_SEED", "0"))
# Groups a step, devices, and what runs it: compiling takes most of the time.
WAYS: list[tuple[int | None, int | None, Callable]] = [
    way
    for step in (1, 3, None)
    for way in (
        (step, None, interpreted),
        (step, None, jax.jit),
        (step, 2, jax.jit),
        (step, 3, jax.jit),
    )
]
CHEAP = [i for i, way in enumerate(WAYS) if way[-1] is interpreted]
COMPILED = [i for i, way in enumerate(WAYS) if way[-1] is jax.jit]


def check(recipe, f: int, way: int, run_stage: Callable | None = None) -> None:
    """Run one program in one way, and one group at a time."""
    step, devices, runner = WAYS[way]
    argnums, args = tuple(range(5)), arguments(f)

    def derivative(fn):
        return jax.value_and_grad(fn, argnums, has_aux=True)

    both = _traced_once(derivative(make(recipe)), args)
    if step == 3 and devices is None:  # differentiate what was planned
        planned = derivative(drjax.jit(make(recipe), groups_per_step=step))
    else:
        planned = drjax.jit(both, groups_per_step=step)
    # Compiles in less time, but computes anew what an extremum is compared with.
    extrema = re.search("reduce_p._(max|min)", str(recipe))
    options = {} if extrema else {"xla_backend_optimization_level": 0}
    want = interpreted(both, compiler_options=options)(*args)
    large = 0 if step == 1 else in_place.LARGE
    with (
        in_mesh_of(None if devices is None else {"clients": devices}),
        mock.patch.object(in_place, "LARGE", large),
    ):
        compare(runner(planned, compiler_options=options)(*args), want)
    reference = drjax.backends.reference
    with mock.patch.object(reference, "_run", run_stage or reference._run):
        compare(reference.compile(drjax.make_plan(both)(*args))(*args), want)


def compare(found, want) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        scale = max(1.0, float(np.max(np.abs(y))))
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10 * scale)


def _traced_once(fn, args):
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    tree = jax.tree.structure(out)
    run = jax.extend.core.jaxpr_as_fun(jaxpr)
    return lambda *xs: tree.unflatten(run(*xs))


def random_run(count: int, seed: int) -> None:
    """So many random programs."""
    done = 0

    phases = [hypothesis.Phase.generate]  # shrinking takes minutes: in long runs only
    if "DRJAX_RANDOM_PROGRAMS" in os.environ:
        phases.append(hypothesis.Phase.shrink)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        phases=phases,
        database=None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
        ],
    )
    @hypothesis.given(recipes, strategies.sampled_from((2, 3)),
                      strategies.sampled_from([*range(len(WAYS)), *12 * CHEAP])
    )  # fmt: skip
    def run(recipe, f, way):
        nonlocal done
        check(recipe, f, way, stage_runner())
        done += 1
        if done % 50 == 0:
            jax.clear_caches()

    run()
    print(f"\n{done} random programs, seed {seed}", flush=True)


def batch(count: int, seed: int):
    """A random run in a process of its own: what it has reached."""
    importlib.import_module("tests.conftest")  # as strict as here
    with strict(), counting() as found, jax.check_tracer_leaks(False):
        random_run(count, seed)
    return found


@contextlib.contextmanager
def strict():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def as_in_the_recipes():
    with strict():
        yield


@pytest.fixture
def reached():
    with counting() as found:
        yield found


@contextlib.contextmanager
def counting():
    """How often each row rule gave a form, and each kind of equation was checked."""
    rules, kinds = collections.Counter(), collections.Counter()

    def counted(name, rule):
        @functools.wraps(rule)
        def run(eqn, axes):
            found = rule(eqn, axes)
            if found is not None:
                rules[name] += 1
            return found

        return run

    count_rules = {name: counted(name, rule) for name, rule in rows.ROW_RULES.items()}
    check_equation = Kinds._check

    def check_counted(self, eqn):
        operands = ", ".join(str(self[v]) for v in eqn.invars)
        if eqn.primitive in SIGNATURES:
            kinds[f"{eqn.primitive.name}({operands})"] += 1
        elif self.is_loop(eqn):
            kinds[eqn.primitive.name] += 1
        elif self.meaning(eqn) is not None:
            kinds[f"means {eqn.primitive.name}({operands})"] += 1
        return check_equation(self, eqn)

    with (
        mock.patch.dict(rows.ROW_RULES, count_rules),
        mock.patch.object(Kinds, "_check", check_counted),
    ):
        yield rules, kinds


def report(reached) -> None:
    rules, kinds = reached
    print("row rules:", dict(rules.most_common()))
    print("not reached:", sorted(set(rows.ROW_RULES) - set(rules)))
    print("kinds:", dict(kinds.most_common()))


def assert_all_rules(reached) -> None:
    """Every rule has been reached: pointwise work has one."""
    rules, kinds = reached
    found = {name.split("(")[0] for name in kinds}
    combining = """conv_general_dilated dot_general dynamic_slice dynamic_update_slice
        gather reduce_and reduce_max reduce_min reduce_or reduce_sum scan scatter
        scatter-add slice""".split()
    meanings = {f"means {name}" for name in combining}
    assert found >= {p.name for p in SIGNATURES} | set(CONTROL) | meanings
    others = set(rows.ROW_RULES) - rows.ELEMENTWISE
    assert len(set(rules) - others) > 20
    assert not others - set(rules) - INTERNAL


def test_ways_agree_in_programs_that_reach_every_rule(reached):
    programs = covering()
    for i, recipe in enumerate(programs):
        # As many features as groups, but not where JAX lets residuals of branches share
        # a slot because their shapes are the same: there, such programs are refused.
        branches = recipe[0][0] in ("cond", "switch")
        ways = COMPILED if i % 2 else CHEAP
        way = ways[i // 2 % len(ways)]
        check(recipe, 3 if branches else 3 + i % 2, way, stage_runner())
    print(f"\n{len(programs)} programs")
    report(reached)
    assert_all_rules(reached)


# What long runs have found, made small: (recipe, features, way).
FOUND = [
    ((("scan", 7, 4, (("global_rows_add", 11, 19, ()),)),), 3, 0),
    ((("switch", 19, 14, (("along_features", 26, 23, ()),)),), 2, 8),
    (
        (("scan", 27, 23, (("scan_rows", 27, 26, (("by_global_div", 26, 30, ()),)),)),),
        3,
        9,
    ),
    (
        (("while", 0, 0, (("square", 0, 0, ()),)), ("global_rows_atan2", 0, 0, ()),
         ("times_matrix", 0, 5, ())),
        3,
        4,
    ),
    ((("vmap", 0, 0, (("one_row", 0, 2, ()),)),), 3, 8),
    ((("gather", 0, 2, ()), ("global_rows_where", 1, 2, ())), 2, 8),
    (
        (("gather", 4, 11, ()), ("gather", 6, 10, ()),
         ("switch", 5, 4, (("broadcast1", 4, 11, ()), ("gather", 6, 10, ())))),
        2,
        5,
    ),
]  # fmt: skip


@pytest.mark.parametrize("recipe, f, way", FOUND)
def test_what_was_found(recipe, f, way):
    check(recipe, f, way)


@pytest.mark.parametrize("seed", range(4))
def test_ways_agree(seed, reached):
    random_run(16, seed)
    report(reached)


def batches(count: int, seed: int, size: int, cache: pytest.Cache) -> None:
    """Batches of programs, the seed of each one more than that of the one before.

    Those that agreed are kept in pytest's cache until code changes: a run that was
    stopped goes on.
    """
    counts = [min(size, count - start) for start in range(0, count, size)]
    names = {
        f"{some} from {seed + i}": (some, seed + i) for i, some in enumerate(counts)
    }
    key = f"random_programs/{code()}"
    kept = {name: found for name, found in cache.get(key, {}).items() if name in names}
    print(f"\n{len(kept)} of {len(names)} batches agreed before", flush=True)
    errors = []
    with concurrent.futures.ProcessPoolExecutor(
        os.cpu_count(), multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running = {
            pool.submit(batch, *names[name]): name for name in names if name not in kept
        }
        for done in concurrent.futures.as_completed(running):
            if error := done.exception():
                errors.append(error)
                continue
            kept[running[done]] = done.result()
            cache.set(key, cache.get(key, {}) | kept)
    print(f"\n{count} random programs, seeds {seed} to {seed + len(names) - 1}")
    reached = (collections.Counter(), collections.Counter())
    for found in kept.values():
        for total, some in zip(reached, found, strict=True):
            total.update(some)
    report(reached)
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {len(names)} batches", errors)


def code() -> str:
    """A name for all code that the outcome of a run depends on."""
    folders = Path(drjax.__file__).parent, Path(__file__).parent
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    text = [sys.version, jax.__version__, jaxlib.__version__, hypothesis.__version__]
    text += [path.read_text() for path in files]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.grid
def test_ways_agree_in_many_programs(cache):
    batches(COUNT, SEED, BATCH, cache)


@pytest.mark.slow
def test_a_long_run_goes_on_where_it_was_stopped(cache, capsys, monkeypatch):
    monkeypatch.setattr(f"{__name__}.code", lambda: "test_a_long_run")
    cache.set("random_programs/test_a_long_run", {})
    batches(1, 3, 1, cache)
    assert "0 of 1 batches agreed before" in capsys.readouterr().out
    batches(2, 3, 1, cache)
    out = capsys.readouterr().out
    assert "1 of 2 batches agreed before" in out
    assert "2 random programs, seeds 3 to 4" in out
