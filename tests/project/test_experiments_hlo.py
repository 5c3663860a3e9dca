"""The parser of compiled programs, and the model of links.

Covers: experiments.
"""

import jax
import numpy as np
import pytest

from experiments import links
from experiments.hlo import Module


def module(*body: str, mesh=None) -> Module:
    """A program with these instructions in the body of a loop of 7 steps."""
    lines = [
        "HloModule m", "%body (p: s32[]) -> s32[] {", *body, "}",
        "%cond (p: s32[]) -> pred[] {", "  %p = s32[]{:T(256)} parameter(0)",
        "  %seven = s32[] constant(7)",
        "  ROOT %lt = pred[] compare(%p, %seven), direction=LT", "}",
        "ENTRY %main (a: f32[8]) -> s32[] {", "  %zero = s32[] constant(0)",
        "  ROOT %w = (s32[], f32[2]) while(%zero), condition=%cond, body=%body", "}",
    ]  # fmt: skip
    return Module("\n".join(lines), mesh or {"groups": 4, "model": 2})


ARRAYS = ("%a = f32[3,5]{1,0} parameter(0)", "%b = f32[5,4]{1,0} parameter(1)")


def test_products_are_counted_as_often_as_the_loop_runs():
    dot = (
        "%c = f32[3,4] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    assert module(*ARRAYS, dot).flops == 7 * 2 * 3 * 4 * 5


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
    result = Module(text, {"groups": 1}).flops
    assert result == 2 * np.asarray(convolve(x, w)).sum()


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("groups",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("[4,2]<=[8]", ("model",)),
        ("[2,4]<=[4,2]T(1,0)", ("groups",)),
        ("[1,8]<=[8]", ("groups", "model")),
        ("mesh['x'=4,'y'=2] {'x'}", ("groups",)),
        ("mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'c'}", ("groups",)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("model",)),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'b'}", ("?",)),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("?",)),
    ],
)
def test_axes_of_collectives(groups, axes):
    line = f"%r = f32[3,5]{{1,0}} all-reduce(%a), replica_groups={groups}"
    (collective,) = module(ARRAYS[0], line).collectives
    assert (collective.kind, collective.bytes, collective.times) == (
        "all-reduce",
        60,
        7,
    )
    assert collective.axes == axes


def test_bytes_of_a_reduce_scatter_are_those_of_what_is_reduced():
    line = "%r = f32[3,5]{1,0} reduce-scatter(%a), replica_groups=[4,2]<=[8]"
    (collective,) = module(ARRAYS[0], line).collectives
    assert collective.bytes == 2 * 60


def test_links_of_a_chain_are_one_collective():
    attributes = (
        'replica_groups={{0,1}}, channel_id=1, frontend_attributes={chain_id="0"}'
    )
    links = [f"%r{i} = f32[3,5]{{1,0}} all-gather(%a), {attributes}" for i in range(3)]
    alone = "%r = f32[3,5]{1,0} all-gather(%a), replica_groups={{0,1}}, channel_id=1"
    assert len(module(ARRAYS[0], *links, alone).collectives) == 2


def test_overlap_of_collectives_with_products():
    start = "%s = (f32[3,5], f32[3,5]) collective-permute-start(%a)"
    done = "%d = f32[3,5] collective-permute-done(%s)"
    dot = "%c = f32[3,4] dot(%d, %b), lhs_contracting_dims={1}"
    independent = dot.replace("%d", "%a").replace("%c", "%e")
    after = module(*ARRAYS, start, done, dot)
    assert after.overlaps("collective-permute") == (1, 0)
    during = module(*ARRAYS, start, independent, done, dot)
    assert during.overlaps("collective-permute") == (1, 1)


def test_the_model_of_links():
    sent = [
        {"kind": "all-reduce", "axes": ["groups"], "bytes in a round": 8e9},
        {"kind": "all-gather", "axes": ["model"], "bytes in a round": 1e9},
    ]
    chip = links.Chip(devices=2, ici=1e9, dcn=None, source="")
    # An all-reduce among 4 sends 2 * 3/4 of its bytes; two devices share the links.
    assert links.seconds(sent, {"groups": 4}, chip, "ici") == 2 * 12
    assert links.seconds(sent, {"groups": 1}, chip, "ici") == 0
    with pytest.raises(ValueError, match="bandwidth on dcn is not stated"):
        links.seconds(sent, {"groups": 4}, chip, "dcn")


@pytest.mark.parametrize("groups", ["mesh['x'=8] {'x':(1)4}", "mesh['x'=8], ids {'x'}"])
def test_groups_that_are_written_in_an_unknown_way(groups):
    line = f"%r = f32[3,5]{{1,0}} all-reduce(%a), replica_groups={groups}"
    with pytest.raises(ValueError, match="This way to write groups is not known"):
        _ = module(ARRAYS[0], line).collectives


@pytest.mark.parametrize("count", ["%seven", "%copied"])
def test_a_loop_that_is_given_how_often_it_runs(count):
    text = "\n".join(
        ["%c (p: (s32[], s32[])) -> pred[] {", "  %p = (s32[], s32[]) parameter(0)",
         "  %i = s32[] get-tuple-element(%p), index=0",
         "  %n = s32[] get-tuple-element(%p), index=1",
         "  ROOT %lt = pred[] compare(%i, %n), direction=LT", "}",
         "%b (q: (s32[], s32[])) -> (s32[], s32[]) {", *ARRAYS,
         "  %d = f32[3,4] dot(%a, %b), lhs_contracting_dims={1}", "}",
         "ENTRY %main (x: f32[8]) -> s32[] {", "  %zero = s32[] parameter(0)",
         "  %seven = s32[] constant(7)", "  %copied = s32[] copy(%seven)",
         f"  %t = (s32[], s32[]) tuple(%zero, {count})",
         "  ROOT %w = (s32[], s32[]) while(%t), condition=%c, body=%b", "}"]
    )  # fmt: skip
    assert Module(text, {"groups": 8}).flops == 7 * 2 * 3 * 4 * 5


def test_a_loop_that_does_not_count():
    text = "\n".join(
        ["%c (p: s32[]) -> pred[] {", "  ROOT %p = pred[] parameter(0)", "}",
         "ENTRY %main (a: f32[8]) -> s32[] {",
         "  ROOT %w = s32[] while(%a), condition=%c, body=%c", "}"]
    )  # fmt: skip
    with pytest.raises(ValueError, match="The loop w does not count to a constant"):
        _ = Module(text, {"groups": 8}).flops
