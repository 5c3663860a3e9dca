"""What the benchmarks promise about counts and bytes; times are never asserted.

Covers: benchmarks.
"""

import dataclasses

import pytest

from benchmarks import report, run

# ---------------------------------------------------------------------------------
# The goals, in a process of their own: leak checks change what is cached


IMPLEMENTATIONS = (report.OURS, report.BASELINE)


@pytest.fixture(scope="module")
def results():
    settings = dataclasses.replace(
        run.QUICK, sizes=(8, 32), builds=1, rounds=1, seconds=0.0, leaks=(1000, 10),
        implementations=IMPLEMENTATIONS,
    )  # fmt: skip
    return run.measure(settings, peer_python=None, show_progress=False)


@pytest.fixture(scope="module")
def cases(results):
    return report.cases(results["rows"])


@pytest.mark.slow
def test_every_case_is_there(cases):
    assert len(cases) == len(run.TASKS) * 2 * 3
    assert all(set(case) == set(IMPLEMENTATIONS) for case in cases)


@pytest.mark.slow
def test_collectives_and_their_bytes_are_those_of_hand_written_code(cases):
    for case in cases:
        ours = case[report.OURS]["collectives"]
        assert ours == case[report.BASELINE]["collectives"]
        assert [kind for kind, _ in ours.items()] == ["all-reduce"]


@pytest.mark.slow
def test_temporary_memory_is_at_most_that_of_hand_written_code(cases):
    for case in cases:
        assert report.temp_ratio(case) <= 1.0


@pytest.mark.slow
def test_flops_are_at_most_those_of_hand_written_code(cases):
    for case in cases:
        assert case[report.OURS]["flops"] <= case[report.BASELINE]["flops"]


@pytest.mark.slow
def test_warm_calls_compile_nothing(results):
    for probe in results["probes"]:
        if probe["name"] != "eager shard_map":
            assert probe["compiled"] == 0, probe["name"]


@pytest.mark.slow
def test_programs_leave_nothing_behind(results):
    for name in ("program", "program, traced"):
        result = results["leaks"][report.OURS][name]
        assert (result["objects"], result["entries"]) == (0, 0), name


@pytest.mark.slow
def test_the_report_names_each_goal_and_its_measure(results):
    text = report.markdown(results, everything=False)
    for goal, limit, measured, met in report.goals(results):
        assert (
            f"| {goal} | {limit} | {measured} | {'met' if met else 'missed'} |" in text
        )
