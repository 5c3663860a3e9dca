"""What gradients through rounds compute and keep: no more than hand-written loops.

Covers: benchmarks, drjax._planner.rematerialize_rounds,
drjax._planner.rematerialize_loops, drjax._planner.rematerialize_branches.
"""

import functools

import jax
import pytest

from benchmarks import residuals
from benchmarks.residuals import ALL, CHECKPOINTED, OURS, OURS_ALL

N = 16  # two groups of a device


@functools.cache
def rows(task: str, rounds: int) -> dict[str, dict]:
    """The rows of a task, by implementation."""
    # The derivative of a hand-written loop leaves tracers in a cycle.
    with jax.check_tracer_leaks(False):
        few, many = ((rounds,), ()) if rounds < 16 else ((), (rounds,))
        each = residuals.measure(N, few, many, show_progress=False, only=task)
    return {row["implementation"]: row for row in each}


ROUNDS = [2, *(pytest.param(r, marks=pytest.mark.slow) for r in (1, 4, 8))]


@pytest.mark.parametrize("ours, reference", [(OURS_ALL, ALL), (OURS, CHECKPOINTED)])
@pytest.mark.parametrize("task", residuals.TASKS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_no_more_work_memory_or_collectives(rounds, task, ours, reference):
    row, baseline = rows(task, rounds)[ours], rows(task, rounds)[reference]
    assert row["passes"] <= 1.01 * baseline["passes"]
    assert row["temp"] <= 1.05 * baseline["temp"]
    assert row["collectives"] <= baseline["collectives"]


@pytest.mark.parametrize("task", residuals.BRANCHES)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_rounds_in_branches(rounds, task):
    test_no_more_work_memory_or_collectives(rounds, task, OURS, CHECKPOINTED)
    row, baseline = rows(task, rounds)[OURS_ALL], rows(task, rounds)[ALL]
    assert row["passes"] <= 1.01 * baseline["passes"]
    assert row["collectives"] <= baseline["collectives"]
    # Compilers keep the order in which a conditional returns residuals, groups first:
    # those of a round are copied (`benchmarks.refused`).
    one_round = rows("straight-line rounds", 1)[ALL]
    assert row["temp"] <= 1.05 * baseline["temp"] + one_round["temp"]


@pytest.mark.parametrize("ours, reference", [(OURS_ALL, ALL), (OURS, CHECKPOINTED)])
@pytest.mark.parametrize("task", residuals.SEGMENTED)
@pytest.mark.parametrize("rounds", [16, 64])
@pytest.mark.slow
def test_checkpoints_of_some_rounds(rounds, task, ours, reference):
    """As the hand-written nested scans, with the best number of rounds in a segment."""
    row, baseline = rows(task, rounds)[ours], rows(task, rounds)[reference]
    assert row["passes"] <= 1.01 * baseline["passes"]
    assert row["temp"] <= 1.05 * baseline["temp"]
    assert row["collectives"] <= baseline["collectives"]


def test_the_table():
    both = rows("straight-line rounds", 1), rows("straight-line rounds", 2)
    table = residuals.markdown(
        [row for each in both for row in each.values()], N, "CPU"
    )
    assert table.count("\n") == 4 + 4 * len(both)
