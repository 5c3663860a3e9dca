"""A round of each example of the gallery, from its plan file.

Covers: examples.
"""

import pytest

from examples import engines
from tests.helpers.example_rounds import CHOSEN, check_round, names, parameters


@pytest.mark.once
@pytest.mark.parametrize("name", parameters("xla", marks=pytest.mark.slow))
def test_a_saved_round_runs_on_xla(name, tmp_path):
    check_round("xla", name, tmp_path)


def test_a_difference_is_relative_to_the_largest_number():
    assert engines.difference([[1.0, 4.5], [3]], [[1.0, 4.0], [3]]) == 0.125
    assert engines.difference([[0.0]], [[0.0]]) == 0


def test_each_example_runs_on_an_engine():
    chosen = [name for engine in CHOSEN for name in CHOSEN[engine]]
    assert set(chosen) == set(engines.EXAMPLES)
    assert all(set(CHOSEN[engine]) <= set(names(engine)) for engine in CHOSEN)
