"""The bandwidth that compiled rounds ask for is that of two published tables.

Covers: benchmarks, examples.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bandwidth
from examples.reproductions.bandwidth import MODELS, index_of
from tests.helpers.compiled import BY_TPU_COMPILER

TABLE = Path(__file__).parents[2] / "benchmarks/results/bandwidth.md"
compiles = [
    pytest.mark.slow,
    BY_TPU_COMPILER,
]


def committed() -> dict[str, list[str]]:
    """The cells of each line: bandwidths, in brackets the published."""
    text, _ = TABLE.read_text().split("## ")
    split = (line.strip("| ").split(" | ") for line in text.splitlines())
    return {name: cells for name, *cells in split if re.match(r"\d: ", name)}


def test_the_committed_table_has_all_published_numbers():
    lines = committed()
    assert len(lines) == sum(len(model.quoted) for model in MODELS)
    off = []
    for model in MODELS:
        for line, quoted in model.quoted.items():
            cells = lines[f"{model.table}: {model.billions:.0f}B, {line}"]
            ours = [float(x.split(" (")[0].replace("> 1000", "inf")) for x in cells]
            off.append(np.abs(index_of(ours) - index_of(quoted)))
            assert [x.split(" (")[1] for x in cells] == [
                "> 1000)" if x == np.inf else f"{x:.1f})" for x in quoted
            ]
    assert np.max(off) <= 2
    assert f"all within {np.max(off)}." in TABLE.read_text()


class TestCompiled:
    """By the compiler for TPUs, of the model with a billion parameters."""

    pytestmark = compiles

    @pytest.mark.parametrize("line", MODELS[0].quoted)
    def test_published_bandwidths_within_two_steps_of_their_grid(self, line):
        model = MODELS[0]._replace(quoted={line: MODELS[0].quoted[line]})
        (measured,) = bandwidth.measure([model])
        assert np.abs(measured.off).max() <= 2
        assert (measured.steps >= measured.layers).all()

    def test_the_schedule_is_that_of_the_compiled_round(self):
        sent = bandwidth.exchanges(24, 100, 8, 1, None)
        assert [x.sent for x in sent] == [11, 24, 36, 49, 61, 74, 86, 99]
        assert {(x.delay, x.gbits) for x in sent} == {(1, 2.0)}  # 16 bits, an eighth
        assert [[*x.layers] for x in sent] == [[p, p + 8, p + 16] for p in range(8)]

    def test_numbers_in_few_bits_have_two_exchanges(self):
        sent = bandwidth.exchanges(24, 100, 8, 2, bandwidth.WIRE)
        assert [x.sent for x in sent][:4] == [10, 11, 23, 24]
        assert {x.delay for x in sent} == {1} and len(sent) == 16
        assert sum(x.gbits for x in sent) == pytest.approx(5)  # with those of scales
