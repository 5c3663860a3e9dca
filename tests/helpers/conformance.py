"""What every engine must do, as a class of tests: an engine's tests derive from it.

    class TestMine(Conformance):
        compile = staticmethod(drjax.backends.mine.compile)

`compile(plan, workers=..., **options)` gives a `Runner`. Engines whose workers are
processes set `processes = True` and are tested by killing some.
"""

import doctest
import functools
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import reference
from drjax.backends.groups import Groups
from drjax.backends.parquet import Parquet
from drjax.engines.core.driver import Runner
from tests.helpers import dying_driver
from tests.helpers.cases import CASES, N, on_mesh
from tests.helpers.plan_files import program
from tests.helpers.plan_transforms import TRANSFORMS, assert_same, expected
from tests.helpers.run_python import HANGS

ROOT = Path(__file__).parents[2]


def weighted_plan(n: int, work=lambda model, x: model * jnp.sqrt(x), **options: Any):
    """Two rounds: a weighted mean, then slices that depend on it; NaN for x < 0."""

    @drjax.program(clients=n)
    def step(model, data):
        def first(model, x, w):
            y = work(model, x)
            return y, w

        y, w = drjax.map_fn(first, (drjax.broadcast(model), *data))
        mean = drjax.reduce_weighted_mean(y, w)
        far = drjax.map_fn(lambda y, m: jnp.abs(y - m), (y, drjax.broadcast(mean)))
        return mean, drjax.reduce_mean(y), drjax.reduce_max(far), y, w.astype(jnp.int32)

    slices = jax.ShapeDtypeStruct((n,), jnp.float32)
    return drjax.make_plan(step, **options)(
        jax.ShapeDtypeStruct((), jnp.float32), (slices, slices)
    )


def slices_for(n: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.arange(n, dtype=np.float32)
    return numbers + 1, 1 + numbers % 3


def survivors(out, good: np.ndarray) -> None:
    """`weighted_plan`'s results are those over the good groups."""
    x, w = slices_for(len(good))
    y = 2 * np.sqrt(x.astype(np.float64))
    mean = (y * w)[good].sum() / w[good].sum()
    np.testing.assert_allclose(out[0], mean, rtol=1e-6)
    np.testing.assert_allclose(out[1], y[good].mean(), rtol=1e-6)
    np.testing.assert_allclose(out[2], np.abs(y - mean)[good].max(), rtol=1e-5)
    np.testing.assert_allclose(out[3], np.where(good, y, np.nan), rtol=1e-6)
    np.testing.assert_array_equal(out[4], np.where(good, w, 0))


def runs(public) -> bool:
    """Whether the example in a docstring runs, and prints what it says."""
    examples = doctest.DocTestFinder(recurse=False).find(public, "name", globs={})
    (example,) = examples
    return bool(example.examples) and not doctest.DocTestRunner().run(example).failed


def run_docs(engine: str) -> None:
    """Run the code of an engine in docs/engines/."""
    page = ROOT / "docs" / "engines" / f"{engine}.md"
    blocks = re.findall(rf"```python {engine}\n(.*?)```", page.read_text(), re.S)
    assert blocks
    with jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, page.name, "exec"), {})


def check_example(engine: str, folder: Path) -> None:
    """The saved plans of examples/engines.py agree with the reference on an engine."""
    flags = ("--engines", "reference", engine, "--rounds", "2", "--output", folder)
    done = subprocess.run(
        [sys.executable, "-m", "examples.engines", *map(str, flags)],
        cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = re.findall(
        rf"(local_sgd|maml_gradients) +│ +{engine} .* ([\d.e+-]+) +│", done.stdout
    )
    assert len(table) == 2 and all(float(far) < 1e-5 for _, far in table)


def check_resume(engine: str, folder: Path) -> None:
    """A call whose driver was killed goes on after the last round that was saved."""
    died = subprocess.run(
        [sys.executable, "-m", "tests.helpers.dying_driver", engine, folder],
        cwd=ROOT, capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr
    plan, args = dying_driver.plan_of_rounds()
    with dying_driver.compiled(engine, str(folder)) as run:
        result = run(*args)
        rounds = [stage.round for stage in run.report.stages]
        assert run.report.resumed and rounds == ["1.scan.0.1"] * 2
        assert len(run.report.workers) >= 2
    assert_same(result, reference.compile(plan)(*args))


def check_poisoned_file(engine: Any, folder: Path, **settings: Any) -> None:
    """Groups of a part of a file that cannot be read fail, and no others."""
    n, (x, w) = 40, slices_for(40)
    arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    for part, part_slice in enumerate((slice(0, 20), slice(20, 40))):
        path = folder / f"groups-{part}.parquet"
        table = arrow.table({"x": x[part_slice], "w": w[part_slice]})
        parquet.write_table(table, path, row_group_size=8, compression="none")
    columns = parquet.read_metadata(path).row_group(1).column(0)  # of groups 28 to 35
    with path.open("r+b") as file:
        file.seek(columns.dictionary_page_offset or columns.data_page_offset)
        file.write(b"\xff" * 16)
    groups = Parquet(folder / "groups-*.parquet", lambda row: (row["x"], row["w"]))
    text = "it cannot be read from .*groups-1.parquet, row group 1: "
    settings["block_size"] = 6
    with engine.compile(weighted_plan(n), **settings) as run:
        with pytest.raises(drjax.EngineError, match=text) as e:
            run(np.float32(2), groups)
        assert (e.value.round, e.value.group) == ("1", 28)
        assert f"in {e.value.stage}: it cannot be read" in str(e.value)
    with engine.compile(weighted_plan(n), on_error="drop", **settings) as run:
        bad = [*range(28, 36)]
        survivors(run(np.float32(2), groups), ~np.isin(np.arange(n), bad))
        assert sorted(run.report.dropped) == bad


def free_ports(count: int) -> list[int]:
    result = [socket.socket() for _ in range(count)]
    for one in result:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in result]
    for one in result:
        one.close()
    return ports


def wait_for(condition: Callable[[], Any], seconds: float = HANGS) -> Any:
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.2)
    return result


def slow_work(model, x):
    """Takes about a second on one core."""
    return model * dying_driver.later(jnp.sqrt(x), 20_000_000)


def fold_and_mean(x, scale):
    """A product of matrices with a count, a mean, and what groups make of both."""

    def compose(a, b):
        return {"m": a["m"] @ b["m"] * scale, "n": a["n"] + b["n"]}

    work = lambda x: {"m": jnp.array([[1.0, jnp.sqrt(x)], [0.1, 1.0]]) / 2, "n": 1}
    state = drjax.map_fn(work, x)
    neutral = {"m": jnp.eye(2) / scale, "n": 0}
    total = drjax.reduce(compose, state, neutral)
    far = drjax.map_fn(lambda s, m: s["m"] - m, (state, drjax.broadcast(total["m"])))
    return total, drjax.reduce_mean(state["m"]), drjax.reduce_max(far)


class Conformance:
    """The tests. `engine` is a running engine for a plan; it is closed in the end."""

    compile: Any
    processes = False
    cases: tuple = CASES

    @pytest.fixture(autouse=True)
    def _as_users_do(self):
        with jax.check_tracer_leaks(False):
            yield

    # -----------------------------------------------------------------------------
    # Values

    @pytest.mark.once
    @pytest.mark.parametrize("name", ["value", "value_and_grad", "grad of rounds"])
    def test_programs(self, name):
        for i, case in enumerate(self.cases):
            if i % {"value": 1, "value_and_grad": 3, "grad of rounds": 6}[name]:
                continue
            with on_mesh(case, "none") as args:
                plan = drjax.make_plan(TRANSFORMS[name](case))(*args)
                with self.compile(plan, workers=2, block_size=3) as run:
                    result = run(*args)
            assert_same(result, expected(case, name))

    def test_a_cohort_between_rounds_of_all_clients(self):
        """Workers run the groups of both partitions, in two rounds of a loop."""
        n, ids = 8, np.array([5, 0, 2], np.int32)

        @drjax.program(clients=3)
        def train(model, x):
            def step(model, _):
                pair = drjax.broadcast(model), x
                y = drjax.map_fn(lambda m, x: jnp.sin(m - x), pair)
                z = drjax.map_fn(jnp.cos, drjax.shift(y, 1))
                return model + drjax.reduce_mean(z), drjax.reduce_max(y)

            return jax.lax.scan(step, model, length=2)

        @drjax.program(clients=n)
        def rounds(model, x):
            before = drjax.map_fn(lambda m, x: m * x, (drjax.broadcast(model), x))
            cohort = drjax.take(before, ids, partition={"clients": 3})
            model, most = train(model, cohort)
            after = drjax.map_fn(lambda m, y: m - y, (drjax.broadcast(model), before))
            return drjax.reduce_mean(after), after, most

        args = np.float32(2), slices_for(n)[0]
        plan, want = drjax.make_plan(rounds)(*args), rounds(*args)
        near = functools.partial(np.testing.assert_allclose, rtol=1e-5)
        with self.compile(plan, workers=2, block_size=2) as run:
            jax.tree.map(near, run(*args), want)
            locations = [stage.round for stage in run.report.stages]
        inside = [f"2.scan.0.1.program.0.{i}" for i in (1, 2)]
        assert locations == ["1", *inside, *inside, "3"]

    def test_secure_sums_are_refused(self):
        total = drjax.program(clients=3)(lambda x: drjax.reduce_sum(x, secure=True))
        plan = drjax.make_plan(total)(np.zeros(3, np.float32))
        with pytest.raises(drjax.DrjaxValueError, match="own may see its slice. This"):
            self.compile(plan, workers=2)

    def test_block_size_and_workers_do_not_matter(self):
        plan, args = weighted_plan(17), (np.float32(2), slices_for(17))
        by_reference = reference.compile(plan)(*args)
        for workers, block_size in ((1, 1), (2, 4), (3, 7), (2, 17), (2, None)):
            with self.compile(plan, workers=workers, block_size=block_size) as run:
                result = run(*args)
                report = run.report
            survivors(result, np.ones(17, bool))
            for a, b in zip(result, by_reference, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                np.testing.assert_allclose(a, b, rtol=1e-6)
            if block_size is not None:
                blocks = -(-17 // block_size)
                assert [s.blocks for s in report.stages] == [blocks] * 2
            if self.processes and workers == 2 and block_size == 4:
                assert len(report.workers) == 2

    def test_folds_are_in_the_order_of_the_groups(self):
        """Products that do not commute; and without a group that has failed."""
        n, near = 9, functools.partial(np.testing.assert_allclose, rtol=1e-5)
        f, x = drjax.program(clients=n)(fold_and_mean), slices_for(n)[0]
        plan = drjax.make_plan(f)(x, np.float32(2))
        want = f(x, np.float32(2))
        for size in (2, 4, n):
            with self.compile(plan, workers=2, block_size=size) as run:
                jax.tree.map(near, run(x, np.float32(2)), want)
        good = np.arange(n) != 3
        bad = np.where(good, x, -x)
        few = drjax.program(clients=n - 1)(fold_and_mean)(x[good], np.float32(2))
        options = {"on_error": "drop", "check_nans": True, "block_size": 2}
        with self.compile(plan, **options) as run:
            jax.tree.map(near, run(bad, np.float32(2)), few)

    def test_other_numbers_of_groups_than_planned(self):
        plan, model = weighted_plan(5, open_groups=True), np.float32(2)
        with self.compile(plan, workers=1, block_size=4) as run:
            for n in (3, 9):
                survivors(run(model, slices_for(n)), np.ones(n, bool))
            items = Groups([*zip(*slices_for(7), strict=True)])
            survivors(run(model, items), np.ones(7, bool))
        fixed = self.compile(weighted_plan(5), workers=1)
        text = r"of shape \(5,\), got \(4,\).*plan it with open_groups=True"
        with fixed as run, pytest.raises(drjax.DrjaxValueError, match=text):
            run(model, slices_for(4))

    def test_random_keys_depend_on_seed_and_group_alone(self):
        @program
        def draw(key):
            def own(key):
                return jax.random.fold_in(key, drjax.partition_index())

            keys = drjax.map_fn(own, drjax.broadcast(key))
            x = drjax.map_fn(lambda k: jax.random.normal(k, (2,)), keys)
            return keys, x, drjax.gather(x)

        key = jax.random.key(5)
        plan = drjax.make_plan(draw)(key)
        by_reference = reference.compile(plan)(key)
        for block_size in (1, 3, N):
            with self.compile(plan, block_size=block_size) as run:
                keys, x, gathered = run(key)
            assert keys.dtype == by_reference[0].dtype
            data = jax.random.key_data
            np.testing.assert_array_equal(data(keys), data(by_reference[0]))
            np.testing.assert_allclose(x, by_reference[1], rtol=1e-6)
            np.testing.assert_array_equal(gathered, x)

    def test_sums_are_near_those_in_float64(self):
        n = 3000

        @drjax.program(clients=n)
        def reduce(x):
            return drjax.reduce_sum(x), drjax.reduce_mean(x)

        draw = np.random.default_rng(0)
        for x in (
            draw.normal(size=n) * 10.0 ** draw.integers(-6, 6, n),
            np.full(n, 0.1),
            1e4 + draw.uniform(size=n),
        ):
            x = x.astype(np.float32)
            plan = drjax.make_plan(reduce)(x)
            with self.compile(plan) as run:
                total, mean = run(x)
            wide = x.astype(np.float64)
            bound = 1e-6 * np.abs(wide).sum()
            assert abs(float(total) - wide.sum()) <= bound
            assert abs(float(mean) - wide.mean()) <= bound / n

    # -----------------------------------------------------------------------------
    # Faults

    @pytest.mark.parametrize("how", ["raise", "drop"])
    def test_a_group_whose_data_has_the_wrong_shape(self, how):
        n, (x, w) = 9, slices_for(9)
        items = [(x[i], w[i]) for i in range(n)]
        items[4] = (np.zeros(3, np.float32), w[4])
        with self.compile(weighted_plan(n), block_size=2, on_error=how) as run:
            if how == "raise":
                with pytest.raises(
                    drjax.EngineError, match=r"data\[0\] is float32\[3\]"
                ) as e:
                    run(np.float32(2), Groups(items))
                assert (e.value.round, e.value.group) == ("1", 4)
                assert "Group 4 failed in round 1 of step, in first" in str(e.value)
            else:
                survivors(run(np.float32(2), Groups(items)), np.arange(n) != 4)
                assert [*run.report.dropped] == [4]

    @pytest.mark.parametrize("how", ["raise", "drop"])
    def test_a_group_that_produces_nan(self, how):
        n, (x, w) = 9, slices_for(9)
        bad = np.isin(np.arange(n), [3, 6, 7])
        args = np.float32(2), (np.where(bad, -x, x), w)
        options = {"on_error": how, "check_nans": True, "block_size": 4}
        with self.compile(weighted_plan(n), **options) as run:
            if how == "raise":
                with pytest.raises(drjax.EngineError, match="it yields NaN as ") as e:
                    run(*args)
                assert (e.value.round, e.value.group) == ("1", 3)
                assert f"in {e.value.stage}: " in str(e.value)
            else:
                survivors(run(*args), ~bad)
                assert sorted(run.report.dropped) == [3, 6, 7]
                assert [s.groups for s in run.report.stages] == [6, 6]

    def test_too_few_survivors(self):
        x, w = slices_for(5)
        options = {"on_error": "drop", "check_nans": True, "min_groups": 3}
        with self.compile(weighted_plan(5), **options) as run:
            with pytest.raises(drjax.EngineError, match="2 of 5 groups survive") as e:
                run(np.float32(2), (np.where(x < 4, -x, x), w))
        assert (e.value.round, e.value.group) == ("1", None)

    def test_a_worker_killed_while_a_stage_runs(self):
        if not self.processes:
            return
        n = 8
        with self.compile(weighted_plan(n, slow_work), workers=2, block_size=1) as run:
            killed = Killer(run)
            survivors(run(np.float32(2), slices_for(n)), np.ones(n, bool))
            assert killed.state is not None and killed.state.groups is not None
            assert len(run.report.lost) >= 1
            assert len(run.report.workers) >= 2
            assert killed.state.pid not in {s.pid for s in run.engine.states()}


class Killer:
    """Ends the first worker that is seen at work for a while; `state`: what it did."""

    def __init__(self, run: Runner):
        self.run, self.state = run, None
        self.engine: Any = run.engine
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while self.state is None:
            time.sleep(0.1)
            if not self.run.report.stages:
                continue
            for state in self.engine.states():
                if state.groups is not None and time.time() - state.since > 0.3:
                    os.kill(state.pid, signal.SIGKILL)
                    self.state = state
                    return
