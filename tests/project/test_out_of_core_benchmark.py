"""What the benchmark of data larger than memory promises about counts, never of times.

Covers: benchmarks.
"""

import pytest

from benchmarks import out_of_core


def test_groups_are_read_as_often_as_by_hand():
    n, rounds = 8, 2
    planned, baseline, array = (out_of_core.measure(k, n) for k in out_of_core._KINDS)
    assert (planned["reads"], baseline["reads"]) == (rounds * n + 1, rounds * n)
    for other in (baseline, array):
        for key in ("value", "norm"):
            assert planned[key] == pytest.approx(other[key], rel=1e-5)


def test_tiny_groups_have_the_same_results():
    pytest.importorskip("pyarrow")
    first, *others = (
        out_of_core.measure_tiny(k, 1000) for k in out_of_core._TINY_KINDS
    )
    for other in others:
        for key in ("value", "norm"):
            assert first[key] == pytest.approx(other[key], rel=1e-5)


def test_results_are_written_as_by_hand():
    first, *others = (
        out_of_core.measure_results(k, 8) for k in out_of_core._RESULT_KINDS
    )
    for other in others:
        assert first["value"] == pytest.approx(other["value"], rel=1e-5)
