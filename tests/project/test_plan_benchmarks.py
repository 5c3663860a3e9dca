"""What the benchmarks of plans promise about counts and bytes, never about times.

Covers: benchmarks.
"""

import dataclasses

import pytest

from benchmarks import plan_report, plans

pytestmark = pytest.mark.slow

CROSSING = "gradient through 5 rounds"
IMPLEMENTATIONS = (
    plan_report.PLAIN, "drjax.jit, 1", plan_report.ALL_AT_ONCE, "scan, 1", "slices, 1",
    plan_report.BASELINE, plan_report.BASELINE + plan_report.AGAIN,
)  # fmt: skip


@pytest.fixture(scope="module")
def results():
    settings = dataclasses.replace(
        plans.QUICK, rounds=1, seconds=0.0, equations=(10, 20), many=4000,
        implementations=IMPLEMENTATIONS, tasks=(plan_report.TASKS[0], CROSSING),
    )  # fmt: skip
    return plans.measure(settings, peer_python=None, show_progress=False)


@pytest.fixture(scope="module")
def goals(results):
    return {goal[0]: goal for goal in plan_report.goals(results)}


@pytest.mark.parametrize(
    "name, cases",
    [
        ("temp bytes / temp bytes for few groups", 2),
        ("all-reduces, and no other collective", 2),
        ("temp bytes / data bytes, 4,000 groups", 1),
    ],
)
def test_goals_without_times_are_met(goals, name, cases):
    assert goals[name][3], goals[name]
    assert goals[name][2].endswith(f"{cases} of {cases} cases")


def test_memory_grows_without_a_plan(results):
    for task in (plan_report.TASKS[0], CROSSING):
        few, many = (
            row["temp_bytes"]
            for n in (64, 128)
            for row in results["memory"]
            if row["implementation"] == plan_report.PLAIN
            if (row["task"], row["n"]) == (task, n)
        )
        assert many > 1.9 * few


def test_each_round_is_one_all_reduce(results):
    for row in results["rows"]:
        rounds = 2 if row["task"] == CROSSING else 1
        result = {kind: count for kind, (count, _) in row["collectives"].items()}
        assert result == {"all-reduce": rounds}, row["implementation"]


def test_the_report_names_each_goal_and_its_measure(results, goals):
    text = plan_report.markdown(results)
    for goal, limit, measured, met in goals.values():
        verdict = "met" if met else "missed"
        assert f"| {goal} | {limit} | {measured} | {verdict} |" in text
