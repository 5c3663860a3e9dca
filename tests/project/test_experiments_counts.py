"""Counts of compiled programs, and the model of links.

Covers: experiments.
"""

import jax
import numpy as np
import pytest

from drjax.compiled import read_hlo
from drjax.compiled.hlo import Module
from experiments import counts, links
from tests.helpers.hlo_texts import in_loop

ARRAYS = ("%a = f32[3,5]{1,0} parameter(0)", "%b = f32[5,4]{1,0} parameter(1)")


def test_products_are_counted_as_often_as_the_loop_runs():
    dot = (
        "%c = f32[3,4] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    assert counts.flops(Module(in_loop(*ARRAYS, dot))) == 7 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("size, stride, pad", [(2, 1, (1, 1)), (3, 2, (0, 2))])
def test_convolutions(size, stride, pad):
    x, w = np.ones((2, 7, 3), np.float32), np.ones((size, 3, 4), np.float32)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride,), [pad], dimension_numbers=("NWC", "WIO", "NWC")
        )

    text = jax.jit(convolve).lower(x, w).compile().as_text() or ""
    # With ones, a result is the number of products that it is the sum of.
    assert "convolution(" in text
    assert counts.flops(Module(text)) == 2 * np.asarray(convolve(x, w)).sum()


def test_a_table_of_collectives():
    """The bytes of a reduce-scatter are those of what is reduced."""
    lines = [
        "%r = f32[3,5]{1,0} reduce-scatter(%a), replica_groups=[4,2]<=[8]",
        "%s = f32[3,5]{1,0} all-reduce(%a), replica_groups={{0,3},{1,2},{4,7},{5,6}}",
        "%t = f32[3,5]{1,0} all-reduce(%a), replica_groups={{0,7},{1,2},{3,4},{5,6}}",
    ]
    text = in_loop(ARRAYS[0], *lines)
    assert counts.count_collectives(read_hlo(text, {"groups": 4, "model": 2})) == [
        {"kind": "all-reduce", "axes": ["?"], "in the program": 2, "in a round": 14,
         "bytes sent in a round": 14 * 60},
        {"kind": "reduce-scatter", "axes": ["model"], "in the program": 1,
         "in a round": 7, "bytes sent in a round": 7 * 60},
    ]  # fmt: skip


def test_overlap_of_collectives_with_products():
    start = "%s = (f32[3,5], f32[3,5]) collective-permute-start(%a)"
    done = "%d = f32[3,5] collective-permute-done(%s)"
    dot = "%c = f32[3,4] dot(%d, %b), lhs_contracting_dims={1}"
    independent = dot.replace("%d", "%a").replace("%c", "%e")
    after = Module(in_loop(*ARRAYS, start, done, dot))
    assert counts.overlaps(after, "collective-permute") == (1, 0)
    during = Module(in_loop(*ARRAYS, start, independent, done, dot))
    assert counts.overlaps(during, "collective-permute") == (1, 1)


def test_the_model_of_links():
    sent = [
        {"kind": "all-reduce", "axes": ["groups"], "bytes sent in a round": 12e9},
        {"kind": "all-gather", "axes": ["model"], "bytes sent in a round": 1e9},
    ]
    chip = links.Chip(devices=2, ici=1e9, dcn=None, source="")
    # Two devices share the links.
    assert links.seconds(sent, {"groups"}, chip, "ici") == 2 * 12
    assert links.seconds(sent, {"groups+model"}, chip, "ici") == 0
    with pytest.raises(ValueError, match="bandwidth on dcn is not stated"):
        links.seconds(sent, {"groups"}, chip, "dcn")


def test_a_loop_of_unknown_length():
    dot = "%c = f32[3,4] dot(%a, %b), lhs_contracting_dims={1}"
    module = Module(in_loop(*ARRAYS, dot, step="multiply"))
    with pytest.raises(ValueError, match="not known how often the loop around c runs"):
        counts.flops(module)


def test_counts_of_a_record():
    line = "%r = f32[3,5]{1,0} all-reduce(%a), replica_groups=[1,8]<=[8]"
    record = {"mesh": {"groups": 8}, "hlo": in_loop(ARRAYS[0], line), "temp bytes": 3}
    result = counts.counted(record)
    assert result.keys() == {"mesh", "temp bytes", "flops", "collectives"}
    assert result["collectives"][0]["bytes sent in a round"] == 7 * 105
    too_large = {"mesh": {"groups": 8}, "out of memory": "by 3 GB"}
    assert counts.counted(too_large) == too_large
