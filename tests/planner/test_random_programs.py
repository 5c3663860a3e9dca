"""Random programs: value and derivatives agree in every way to run a program.

Each program meets one size, dtype, derivative, mesh and chunk size, drawn with it:
half of them run on meshes. Its expected values come from its plain meaning, which
shares no code with drjax, run by StableHLO's interpreter, which shares none with XLA.
A long run is `DRJAX_RANDOM_PROGRAMS=20000 DRJAX_RANDOM_SEED=7 python -m pytest -m slow
-s tests/planner/test_random_programs.py`; it runs in batches, each in a fresh process,
one per core, and prints its count, its seed, and which rules it has reached. It takes
hours; after an interruption the same command runs the remaining batches. `python -m
tests.helpers.random_run SEED NUMBER` minimizes a program that failed.

Covers: drjax._planner.inline, drjax._planner.group_index,
drjax._planner.rematerialize_loops, drjax._planner.partitioning.infer,
drjax._planner.partitioning.environment, drjax._planner.partitioning.propagation_rules,
drjax._planner.partitioning.control_flow, drjax._planner.partitioning.kind,
drjax._planner.unbatching.rules.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib
import pytest
from jax.extend.core import Primitive

import drjax
from drjax import _compat
from drjax._planner.inline import CONTROL
from drjax._planner.unbatching.rules import ELEMENTWISE, UNBATCHING_RULES
from tests.helpers.cases import some
from tests.helpers.random_programs import (
    MESHES,
    MODES,
    Program,
    covering,
    draw,
    fits,
    valid,
)
from tests.helpers.random_run import check, choices, counting, is_known, run
from tests.helpers.unbatching_cases import INTERNAL

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

COUNT = int(os.environ.get("DRJAX_RANDOM_PROGRAMS", "50"))
BATCH = 250  # what JAX keeps of each program makes long processes slow
SEED = int(os.environ.get("DRJAX_RANDOM_SEED", "0"))


@pytest.fixture
def reached():
    with counting() as counts:
        yield counts


def report(reached) -> None:
    rules, kinds = reached
    print("unbatching rules:", dict(rules.most_common()))
    print("not reached:", sorted(set(UNBATCHING_RULES) - set(rules)))
    print("kinds:", dict(kinds.most_common()))


def assert_all_rules(reached) -> None:
    """Every rule has been reached: pointwise work has one."""
    rules, kinds = reached
    names = {name.split("(")[0] for name in kinds}
    combining = """conv_general_dilated dot_general dynamic_slice dynamic_update_slice
        gather reduce_and reduce_max reduce_min reduce_or reduce_sum scan scatter
        scatter-add slice""".split()
    meanings = {f"means {name}" for name in combining}
    public = vars(drjax.primitives).values()
    primitives = {p.name for p in public if isinstance(p, Primitive)}
    # Gathers, when kinds are inferred.
    primitives -= {"drjax_map_columns", "drjax_reduce_fold", "drjax_fold_tree"}
    assert names >= primitives | set(CONTROL) | meanings
    others = set(UNBATCHING_RULES) - ELEMENTWISE
    assert len(set(rules) - others) > 20
    # Samples of gamma distributions take seconds to compile, and factorizations with
    # complex or ambiguous results cannot be compared: `test_rule` has them.
    elsewhere = {"random_gamma", "eig", "hessenberg", "householder_product", "schur"}
    elsewhere |= {"lu_pivots_to_permutation", "tridiagonal", "tridiagonal_solve"}
    assert not others - set(rules) - INTERNAL - elsewhere


def _covering() -> list[Program]:
    """All steps, in programs that also cover meshes, derivatives and sizes."""
    programs = []
    for i, recipe in enumerate(covering()):
        n = (4, 3, 4, 5)[i // 2 % 4]
        # As many features as groups, but not where JAX lets residuals of branches share
        # a slot because their shapes are the same: there, such programs are refused.
        branches = recipe[0][0] in ("cond", "switch")
        windows = "windows" in str(recipe)
        meshes = [k for k, mesh in enumerate(MESHES) if fits(n, *mesh)]
        program = Program(
            recipe,
            n=n,
            f=n if i % 4 == 0 and not branches else n % 3 + 2,
            dtype="float64" if i % 3 else "float32",
            half=("bfloat16", "float16")[i % 2],
            # A batched branch is a select, and windows are refused under vmap.
            mode="grad" if branches or windows else MODES[1:][i // 2 % 4],
            # Of what is closed over there is no derivative.
            closed=((), (), () if windows else (0, 4, 7))[i % 3],
            mesh=meshes[i // 2 % len(meshes)] if i % 2 else None,
            runner="drjax" if windows else ("drjax", "drjax", "inner")[i % 3],
            step=(None, 1, 2)[i // 2 % 3],
            seed=i,
            checkpoints=i % 4 == 2,
        )
        programs.append(valid(program))
    return programs


@pytest.mark.slow
def test_ways_agree_in_programs_that_reach_every_rule(reached):
    programs, refused = _covering(), 0
    for program in programs:
        try:
            check(program)
        except Exception as error:
            if not is_known(program, error):
                raise AssertionError(program) from error
            refused += 1
    assert refused < len(programs) / 10
    print(f"\n{len(programs)} programs")
    report(reached)
    assert_all_rules(reached)


# Failures of long runs, minimized: (recipe, features, (step, mesh)).
MINIMIZED = [
    ((("scan", 7, 4, (("global_slices_add", 11, 19, ()),)),), 3, (1, None)),
    ((("switch", 19, 14, (("along_features", 26, 23, ()),)),), 2, (None, None)),
    (
        (("scan", 27, 23,
          (("scan_slices", 27, 26, (("by_global_div", 26, 30, ()),)),)),),
        3,
        (None, None),
    ),
    (
        (("while", 0, 0, (("square", 0, 0, ()),)), ("global_slices_atan2", 0, 0, ()),
         ("times_matrix", 0, 5, ())),
        3,
        (3, None),
    ),
    ((("vmap", 0, 0, (("one_slice", 0, 2, ()),)),), 3, (None, None)),
    ((("gather", 0, 2, ()), ("global_slices_where", 1, 2, ())), 2, (None, None)),
    (
        (("gather", 4, 11, ()), ("gather", 6, 10, ()),
         ("switch", 5, 4, (("broadcast1", 4, 11, ()), ("gather", 6, 10, ())))),
        2,
        (3, None),
    ),
]  # fmt: skip


# Other failures.
WHOLE = [
    Program(
        (
            ("custom", 17, 51, ()),
            ("custom_vjp", 6, 45, (("integers", 7, 49, ()), ("some", 4, 50, ()))),
            ("while_counted", 32, 31, (
                ("some", 36, 6, ()),
                ("switch", 46, 38, (
                    ("some", 49, 12, ()), ("by_slice_div", 7, 34, ()),
                )),
            )),
        ),
        n=5, f=3, dtype="float32", mode="hvp", closed=(4, 5), runner="inner", step=2,
        seed=686,
    ),
    Program(
        (
            ("scan_short", 4, 53, (
                ("switch", 10, 25, (
                    ("loops", 13, 51, ()), ("side_by_side", 63, 24, ()),
                )),
                ("scatter", 32, 3, ()),
            )),
        ),
        n=1, f=2, dtype="float64", half="float16", mode="vmap", mesh=6, step=2,
        seed=947,
    ),
    Program(
        (
            ("broadcast0", 33, 43, ()),
            ("scan_slices", 12, 30, (("halves", 24, 51, ()),)),
            ("scan_short", 18, 13, (
                ("scan_slices", 5, 45, (("side_by_side", 54, 37, ()),)),
                ("cohort", 33, 61, ()),
            )),
        ),
        n=4, f=4, mesh=12, step=1, seed=457,
    ),
]  # fmt: skip
slowly = functools.partial(some, marks=pytest.mark.slow)


@pytest.mark.sampled
@pytest.mark.parametrize("case", slowly(MINIMIZED, *MINIMIZED[:2]))
def test_what_was_found(case):
    recipe, f, (step, mesh) = case
    check(Program(recipe, f=f, step=step, mesh=mesh))


# By the number of a program of seed 7, what it reaches where one group runs at a time.
CHOICES = {
    2: ["for a result"],
    **({7: ["in place"]} if _compat.UPDATES_BEHIND_BARRIERS else {}),
    26: ["state", "stacked: global values"],
    28: ["stacked: slices"],
    11: ["again: slices"],
    22: ["again: global values"],
    34: ["left out", "by index"],
    44: ["by index"],
    39: ["one slice"],
    36: ["branches: slices"],
    48: ["branches: global values", "in branches"],
}


@pytest.mark.parametrize("number", slowly(CHOICES, 7, 26, 28, 34, 39, 48))
def test_what_is_saved_and_what_is_done_again(number):
    program = draw(7, number)
    program = dataclasses.replace(
        program, runner="drjax", step=1, mesh=None, residuals=None, checkpoints=False
    )
    with choices() as chosen:
        check(program)
    assert all(chosen[name] for name in CHOICES[number]), chosen


@pytest.mark.once
@pytest.mark.parametrize("runner", ["drjax", "jax"])
def test_sums_by_segment_are_added_in_buckets(runner):
    recipe = (("combined", 0, 3, ()), ("out_of_bounds", 0, 0, ()))
    program = Program(recipe, n=5, runner=runner, seed=1)
    with choices() as chosen:
        check(program)
    assert chosen["2 buckets"], chosen


def test_the_group_of_a_maximum_is_folded_in_chunks():
    recipe = (("combined", 0, 5, ()), ("out_of_bounds", 0, 0, ()))
    program = Program(recipe, n=5, runner="drjax", step=2, seed=1)
    with choices() as chosen:
        check(program)
    assert chosen["fold of pairs"], chosen


@pytest.mark.slow
@pytest.mark.parametrize("program", WHOLE)
def test_whole_programs_that_were_found(program):
    check(program)


@pytest.mark.parametrize("start", slowly(range(0, 24, 4), 0))
def test_ways_agree(start, reached, capsys):
    assert run(SEED, start, 4) == 0, capsys.readouterr().out
    report(reached)


def batch(seed: int, start: int, count: int) -> tuple[list, list[str]]:
    """Programs in processes of their own: what they reached, and what went wrong.

    A process that dies is followed by one that goes on with the next program.
    """
    reached, errors, end = [], [], start + count
    while start < end:
        command = [sys.executable, "-m", "tests.helpers.random_run"]
        done = subprocess.run(
            [*command, *map(str, (seed, start, end - start))],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        errors += re.split("^FAILED", done.stdout, flags=re.M)[1:]
        if line := re.search('^{"reached": .*', done.stdout, re.M):
            reached.append(json.loads(line[0])["reached"])
        if done.returncode == 0:
            break
        numbers = re.findall(f"^at {seed} (\\d+)", done.stdout, re.M)
        last = int(numbers[-1]) if numbers else end
        errors.append(f"{seed} {last} died, {done.returncode}: {done.stdout[-5000:]}")
        start = last + 1
    return reached, errors


def batches(count: int, seed: int, size: int, cache: pytest.Cache) -> None:
    """Batches of programs.

    Those that agreed are kept in pytest's cache until code changes, so that a stopped
    run resumes.
    """
    parts = {
        f"{seed} {start} {min(size, count - start)}": None
        for start in range(0, count, size)
    }
    key = f"random_programs/{code()}"
    kept = {name: part for name, part in cache.get(key, {}).items() if name in parts}
    print(f"\n{len(kept)} of {len(parts)} batches agreed before", flush=True)
    errors = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {
            pool.submit(batch, *map(int, name.split())): name
            for name in parts
            if name not in kept
        }
        for done in concurrent.futures.as_completed(running):
            counts, wrong = done.result()
            errors += map(AssertionError, wrong)
            for error in wrong:
                print(f"\nFAILED {error}", flush=True)
            if not wrong:
                kept[running[done]] = counts
                cache.set(key, cache.get(key, {}) | kept)
    print(f"\n{count} random programs, seed {seed}")
    reached = (collections.Counter(), collections.Counter())
    for part in kept.values():
        for counts in part:
            for total, more in zip(reached, counts, strict=True):
                total.update(more)
    report(reached)
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {count} programs", errors)


def code() -> str:
    """A name for all code that the outcome of a run depends on."""
    folders = Path(drjax.__file__).parent, Path(__file__).parents[1]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    text = [sys.version, jax.__version__, jaxlib.__version__]
    text += [path.read_text() for path in files]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.grid
def test_ways_agree_in_many_programs(cache):
    batches(COUNT, SEED, BATCH, cache)


@pytest.mark.slow
def test_a_stopped_run_resumes(cache, capsys, monkeypatch):
    monkeypatch.setattr(f"{__name__}.code", lambda: "test_a_long_run")
    cache.set("random_programs/test_a_long_run", {})
    batches(1, 3, 1, cache)
    assert "0 of 1 batches agreed before" in capsys.readouterr().out
    batches(2, 3, 1, cache)
    out = capsys.readouterr().out
    assert "1 of 2 batches agreed before" in out
    assert "2 random programs, seed 3" in out
