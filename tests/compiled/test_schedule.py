"""What is computed while a collective is under way, from the text of a schedule.

Covers: drjax.compiled.schedule.
"""

import re

import pytest

from drjax.compiled import read_hlo
from drjax.compiled.hlo import Module
from drjax.compiled.report import WhileLoop
from drjax.compiled.schedule import Schedule

BODY = """
%body (q: s32[]) -> s32[] {
  %q = s32[] parameter(0)
  %l = f32[8,16]{1,0} constant(0)
  %r = f32[16,4]{1,0} constant(0)
  %product = f32[8,4]{1,0} dot(%l, %r), lhs_contracting_dims={1}
  %one = s32[] constant(1)
  ROOT %next = s32[] add(%q, %one)
}
%cond (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%p, %five), direction=LT
}
"""
PRODUCT = 2 * 8 * 16 * 4
START = "  %zero = s32[] constant(0)"
WHILE = "  %w = s32[] while(%zero), condition=%cond, body=%body"
ROOT = "  ROOT %x = f32[64] parameter(0)"
LOOP = (WhileLoop("w", 5),)
GROUPS = "channel_id=1, replica_groups={{0,1}}, to_apply=%add"


def program(*entry: str, more: str = "", scheduled: str = "is_scheduled=true") -> str:
    return "\n".join(
        [f"HloModule jit_m, {scheduled}, num_partitions=2", BODY, more,
         "ENTRY %main (x: f32[64]) -> f32[64] {", START, *entry, ROOT, "}"]
    )  # fmt: skip


REDUCE = (
    f"  %start = f32[64]{{0}} all-reduce-start(%x), {GROUPS}",
    "  %done = f32[64]{0} all-reduce-done(%start)",
)


def test_a_loop_between_start_and_done_hides_it():
    (c,) = read_hlo(program(REDUCE[0], WHILE, REDUCE[1]))
    assert c.asynchronous and c.hidden
    assert c.hidden_by == LOOP and c.hidden_flops == 5 * PRODUCT


@pytest.mark.parametrize(
    "lines",
    [
        (*REDUCE, WHILE),
        (WHILE, *REDUCE),
        (REDUCE[0], "  %copy = f32[64] copy(%x)", REDUCE[1], WHILE),
    ],
    ids=["after", "before", "only a copy"],
)
def test_a_loop_elsewhere_does_not(lines):
    (c,) = read_hlo(program(*lines))
    assert c.asynchronous and not c.hidden
    assert (c.hidden_by, c.hidden_flops) == ((), 0)


def test_a_synchronous_one_is_exposed():
    (c,) = read_hlo(program(f"  %all = f32[64]{{0}} all-reduce(%x), {GROUPS}", WHILE))
    assert not c.asynchronous and not c.hidden


def test_without_a_schedule_nothing_is_known():
    lines = REDUCE[0], WHILE, REDUCE[1]
    (c,) = read_hlo(program(*lines, scheduled="entry_computation_layout={}"))
    assert not c.asynchronous and not c.hidden


def test_a_wrapped_one_lasts_until_the_done_of_the_wrapper():
    wrapped = f"""
%wrapped (y: f32[64]) -> f32[64] {{
  %y = f32[64] parameter(0)
  ROOT %inside = f32[64]{{0}} all-reduce(%y), {GROUPS}
}}"""
    shape = "((f32[64]), f32[64], u32[])"
    lines = (
        f"  %start = {shape} async-start(%x), calls=%wrapped",
        f"  %update = {shape} async-update(%start), calls=%wrapped",
        WHILE,
        "  %done = f32[64] async-done(%update), calls=%wrapped",
    )
    (c,) = read_hlo(program(*lines, more=wrapped))
    assert c.asynchronous and c.hidden_by == LOOP
    (c,) = read_hlo(program(lines[0], lines[1], lines[3], WHILE, more=wrapped))
    assert c.asynchronous and not c.hidden


def transfer(name: str) -> list[str]:
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        f'_xla_host_transfer_rendezvous="{name}",'
        '_xla_megascale_target={{0,1}},_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    return [
        f"  %{name}.s = (f32[64], u32[], token[]) send(%x, %after), {attributes}",
        f"  %{name}.r = (f32[64], u32[], token[]) recv(%after), {attributes}",
        f"  %{name}.sd = token[] send-done(%{name}.s), {attributes}",
        f"  %{name}.rd = (f32[64], token[]) recv-done(%{name}.r), {attributes}",
    ]


def test_between_slices_it_lasts_while_both_ends_are_open():
    send, recv, sent, received = transfer("a")
    other = transfer("b")
    for lines, hidden in (
        ((send, recv, WHILE, sent, received), True),
        ((recv, send, WHILE, received, sent), True),
        ((send, WHILE, recv, sent, received), False),  # nothing was posted yet
        ((send, recv, sent, WHILE, received), False),  # all is sent
        ((send, recv, received, sent, WHILE), False),
    ):
        first, second = read_hlo(program(*lines, *other))
        assert first.between_slices and first.asynchronous
        assert first.hidden is hidden and not second.hidden


def test_a_chain_lasts_from_its_first_to_its_last_link():
    link = """
%link{i} (y: f32[64]) -> f32[64] {
  %y{i} = f32[64] parameter(0)
  %a{i} = f32[8,16]{1,0} constant(0)
  %b{i} = f32[16,4]{1,0} constant(0)
  %p{i} = f32[8,4]{1,0} convolution(%a{i}, %b{i}), dim_labels=bf_io->bf
  ROOT %r{i} = f32[64]{0} all-gather(%y{i}), ATTRIBUTES
}"""
    attributes = GROUPS + ', frontend_attributes={chain_id="0"}'
    link = link.replace("ATTRIBUTES", attributes)
    more = "\n".join(link.replace("{i}", f"{i}") for i in range(2))
    fusion = "  %f{i} = f32[64] fusion(%x), kind=kOutput, calls=%link{i}"
    lines = fusion.format(i=0), WHILE, fusion.format(i=1)
    (c,) = read_hlo(program(*lines, more=more))
    assert c.asynchronous and c.hidden_by == LOOP
    assert c.hidden_flops == (2 + 5) * PRODUCT


def test_links_of_a_chain_in_a_loop_are_the_same_collective():
    link = f"  %a{{i}} = f32[64] all-gather(%x), {GROUPS}, "
    link += 'frontend_attributes={chain_id="0"}'
    lines = link.replace("{i}", "1"), WHILE, link.replace("{i}", "3")
    text = program(*lines).replace(
        "  %one =", link.replace("{i}", "2") + "\n  %one =", 1
    )
    (c,) = read_hlo(text)
    assert (c.name, c.times, c.hidden_by) == ("a1", 1, LOOP)


def test_flops_of_a_loop_of_unknown_length_are_unknown():
    text = program(REDUCE[0], WHILE, REDUCE[1])
    (c,) = read_hlo(re.sub("constant.5.", "parameter(1)", text))
    assert c.hidden_flops is None and c.hidden


def test_of_branches_the_cheapest_counts():
    branches = BODY.replace("%body", "%dear").replace("%cond", "%unused")
    branches = re.sub(r"%(?!dear|unused)(\w+)", r"%\1.2", branches)
    cheap = "\n%cheap (c: s32[]) -> s32[] {\n  ROOT %c = s32[] parameter(0)\n}"
    line = (
        "  %if = s32[] conditional(%zero, %zero), branch_computations={%dear, %cheap}"
    )
    module = Module(program(line, more=branches + cheap))
    schedule = Schedule(module)
    assert schedule.flops([module.instructions["if"]]) == 0
    assert schedule.flops(module.computations["dear"]) == PRODUCT


@pytest.mark.parametrize(
    ("out", "window", "products"),
    [
        ("1,6,6,16", "size=3x3", (6 * 3) ** 2),
        ("1,8,6,16", "size=3x3 pad=1_1x0_0", (8 * 3 - 2) * (6 * 3)),
        ("1,3,6,16", "size=3x3 stride=2x1", (3 * 3) * (6 * 3)),
        ("1,4,6,16", "size=3x3 rhs_dilate=2x1", (4 * 3) * (6 * 3)),
        ("1,13,6,16", "size=3x3 lhs_dilate=2x1 rhs_reversal=1x1", 20 * (6 * 3)),
    ],
)
def test_flops_of_a_convolution(out, window, products):
    lines = (
        "  %image = f32[1,8,8,3]{3,2,1,0} constant(0)",
        "  %kernel = f32[3,3,3,16]{3,2,1,0} constant(0)",
        f"  %out = f32[{out}]{{3,2,1,0}} convolution(%image, %kernel), "
        f"window={{{window}}}, dim_labels=b01f_01io->b01f",
    )
    module = Module(program(*lines))
    flops = Schedule(module).flops([module.instructions["out"]])
    assert flops == 2 * products * 3 * 16


def test_flops_of_a_batch_of_products_are_those_of_the_products():
    # As a compiler for TPUs writes them.
    lines = (
        "  %left = f32[8,64,32]{2,1,0} constant(0)",
        "  %right = f32[8,32,16]{2,1,0} constant(0)",
        "  %out = f32[8,64,16]{2,1,0} convolution(%left, %right), "
        "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
    )
    module = Module(program(*lines))
    flops = Schedule(module).flops([module.instructions["out"]])
    assert flops == 2 * 8 * 64 * 32 * 16
