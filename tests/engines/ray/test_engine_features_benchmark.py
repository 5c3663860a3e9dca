"""What the benchmark of the Ray engine's features promises, but for times.

Covers: drjax.engines.ray.adapter, benchmarks.
"""

import json

import pytest

from benchmarks import engine_features as features
from benchmarks.engine_features import HAND_WRITTEN, OURS, Measured
from tests.helpers.run_python import run


def measured(seconds, **more):
    times = {OURS: [seconds], HAND_WRITTEN: [1.0]}
    return Measured("a round", 1.2, times, **more)


def test_goals_are_shares_of_the_baseline():
    goals = features.goals_of(features.STATE, measured(1.3))
    assert goals == [("State in checkpoints: time", "≤ 1.2", "1.30", False)]
    other = {
        "goodput": {OURS: [0.5, 0.7], HAND_WRITTEN: [0.6, 0.6]},
        "lost": {OURS: 0, HAND_WRITTEN: 0},
    }
    sizes = {OURS: 1.004e6, HAND_WRITTEN: 1e6}
    x = measured(1.1, peak=sizes, bytes=sizes, other=other)
    goals = features.goals_of(features.STATE, x)
    assert [goal[2] for goal in goals] == ["1.10", "1.00", "1.00", "1.00", "0"]
    assert all(goal[3] for goal in goals)
    text, table = features.section(features.STATE, x)
    assert "Goodput" in text and text.endswith("0 and 0, after a kill within the next.")
    assert "| drjax | 1100 (1100 to 1100) | 1.10 (1.10 to 1.10) | 1 | 1.004 |" in table
    other["goodput"] = {OURS: [0.5], HAND_WRITTEN: [0.6]}
    assert not features.goals_of(features.STATE, x)[3][3]


@pytest.mark.engines
@pytest.mark.grid  # more than a minute
def test_loops_by_plain_ray_give_the_same_results(tmp_path):
    run("-m", "benchmarks.engine_features", "--quick", "--out", str(tmp_path))
    (file,) = tmp_path.glob("*.json")
    points = json.loads(file.read_text())
    assert len(points) == 10
    for name, x in points.items():
        assert x["difference"] < 1e-5, name
        assert [*x["seconds"]][:2] == [OURS, HAND_WRITTEN]
    assert points[features.STATE]["other"]["lost"] == {OURS: 0, HAND_WRITTEN: 0}
    seen = points[features.SEEN]["other"]
    assert seen["events"] == seen["lines"] and seen["spans"] == 2 * 4
