"""What the benchmarks of ways to combine groups promise about bytes, never about times.

Covers: benchmarks.
"""

import functools

import jax
import numpy as np
import pytest

from benchmarks import combinations, counts, refused
from benchmarks.combinations import BASELINE, OURS, PLANNED
from tests.helpers.compiled import BY_TPU_COMPILER

# A fold by any function holds parts of the states of m devices, and for a gradient two
# states for each group.
MORE_MEMORY = {"logsumexp", "gradient of a product"}
# The slice of a device, and a few scalars.
SLACK = 4 * 512 * combinations.N // combinations.DEVICES + 64


@pytest.fixture(scope="module")
def rows():
    # jnp.median leaves tracers in a cycle until they are collected.
    with jax.check_tracer_leaks(False):
        rows = combinations.measure(512, 1, show_progress=False)
    return {(row["task"], row["implementation"]): row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", [OURS, PLANNED])
@pytest.mark.parametrize("task", [*combinations.TASKS, *combinations.LEVELS])
def test_no_more_bytes_or_memory_than_hand_written_code(rows, task, name):
    row, baseline = rows[task, name], rows[task, BASELINE]
    total = lambda row: sum(row["bytes"].values())
    # The planner may send the cotangent of a coordinate with its numbers.
    assert total(row) <= 1.15 * total(baseline)
    if task not in MORE_MEMORY:
        assert row["temp"] <= baseline["temp"] + SLACK


@pytest.mark.slow
def test_the_table(rows):
    table = combinations.markdown([*rows.values()], 512)
    assert table.count("\n") == 4 + len(rows) and "| median | drjax |" in table


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("group of the maximum", lambda x, _: x.argmax(0)),
        ("maximum of 100 segments", lambda x, segment: _largest(x, segment).sum(0)),
        ("gradient of a maximum", lambda x, _: _gradient_of_largest(x)),
    ],
)
def test_a_nan_wins_in_ours_and_in_hand_written_code(task, expected):
    x = np.random.default_rng(0).normal(size=(combinations.N, 16)).astype("float32")
    x[13, 3] = x[2, 7] = np.nan
    with jax.set_mesh(counts.mesh_of("clients", combinations.DEVICES)):
        functions = combinations._functions(
            task, combinations.TASKS[task], combinations._program
        )
        # XLA divides the plain one by a `pmax` that loses NaNs.
        for name in (OURS, PLANNED, BASELINE):
            out = np.asarray(functions[name](x))
            correct = expected(x, np.arange(combinations.N) * 7 % 100)
            np.testing.assert_allclose(out, correct, rtol=1e-5, err_msg=name)


def _gradient_of_largest(x):
    largest = x.max(0)
    return np.where(np.isnan(largest) | (x == largest), np.cos(largest), 0)


def _largest(x, segment):
    largest = np.full((100, x.shape[1]), -np.inf, np.float32)
    np.maximum.at(largest, segment, x)
    return np.tanh(largest)


@pytest.mark.once
@pytest.mark.usefixtures("leaks_unchecked")  # jax.shard_map leaves tracers in a cycle
def test_compilers_still_refuse():
    values = np.arange(8.0)
    values[4] = np.nan
    assert refused.largest_of_devices(values) == 7
    assert refused.temporary_bytes(True) > refused.temporary_bytes(False) == 0
    assert [row[1:3] for row in refused.refused()[:2]] == [
        ["nan", "7.0"],
        ["0 bytes", "80,000 bytes"],
    ]
    assert refused.bytes_of_choice(True) > refused.bytes_of_choice(False) == 0
    assert refused.bytes_of_branches(True) > 1.2 * refused.bytes_of_branches(False)
    assert refused.bytes_of_levels(False) > refused.bytes_of_levels(True)


@pytest.mark.slow
@pytest.mark.usefixtures("leaks_unchecked")  # the derivative of a hand-written loop
@BY_TPU_COMPILER
def test_the_compiler_for_tpus_still_refuses():
    count = functools.partial(refused.on_tpu, "v5e:2x4")
    number, largest = (count(refused.slice_of(largest=x))[1] for x in (False, True))
    assert largest > number == 0
    codes, of_bytes = (count(refused.codes(x))[0] for x in (False, True))
    assert of_bytes == codes + 80_000
    apart, together = (refused.bytes_of_sums("v5e:2x4", x) for x in (True, False))
    assert apart > 1.1 * together
