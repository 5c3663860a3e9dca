"""What the benchmarks of plan files promise about bytes, never about times.

Covers: benchmarks.
"""

import jax
import pytest

from benchmarks import plan_files

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


@pytest.mark.slow
def test_files_are_small_and_the_report_names_each_goal():
    with jax.numpy_rank_promotion("allow"):  # as users of the examples do
        results = plan_files.measure(plan_files.QUICK, show_progress=False)
    text, result = plan_files.markdown(results), plan_files.goals(results)
    assert {goal[0]: goal[3] for goal in result}["bytes of the file"]
    for goal, limit, measured, met in result:
        verdict = "met" if met else "missed"
        assert f"| {goal} | {limit} | {measured} | {verdict} |" in text
    (row,) = results["rows"]
    assert row["program"] in text and 10_000 < row["bytes"] < plan_files.BYTES
