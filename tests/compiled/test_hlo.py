"""The parser of HLO text: shapes, loops and how often they run.

Covers: drjax.compiled.hlo.
"""

import jax
import jax.numpy as jnp
import pytest

from drjax.compiled.hlo import Module, shape_bytes
from tests.helpers.hlo_texts import in_entry, in_loop


def trip_count(text: str) -> int | None:
    module = Module(text)
    (loop,) = [x for x in module.instructions.values() if x.opcode == "while"]
    return module.trip_count(loop)


def test_bytes_of_shapes():
    assert shape_bytes("(f32[], s4[3], token[], c64[2], f8e4m3fn[<=5])") == 27
    with pytest.raises(ValueError, match="unknown element type 'strange'"):
        shape_bytes("strange[3]")


def test_parts_of_an_instruction():
    text = in_entry(
        "  ROOT %f.1 = (f32[2]{0}, /*index=1*/s32[]) fusion(f32[2]{0} %a, b.2), "
        'kind=kLoop, calls=%c, metadata={op_name="jit(f)/sin"}'
    )
    (x,) = Module(text).computations["main"]
    assert (x.name, x.opcode, x.root) == ("f.1", "fusion", True)
    assert (x.shape, x.operands) == ("(f32[2]{0}, s32[])", ("a", "b.2"))
    assert x.called == [("calls", "c")]
    assert Module(text).devices == 8 and Module(text).name == "jit_m"


@pytest.mark.parametrize(
    "first, step, by, count",
    [
        (0, "add", 1, 7),
        (3, "add", 1, 4),
        (0, "add", 2, 4),
        (9, "add", 1, 0),
        (1, "multiply", 2, None),
        (0, "add", -1, None),
    ],
)
def test_trip_counts_of_counting_loops(first, step, by, count):
    assert trip_count(in_loop(first=first, step=step, by=by)) == count


def test_the_compiler_says_the_trip_count():
    known = 'body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    assert trip_count(in_loop().replace("body=%body", known)) == 12


def looping(state: str, body: str, condition: str) -> str:
    """A loop over (counter, bound), whose body and condition are as these lines say."""
    return "\n".join(
        ["%inc (i: s32[]) -> s32[] {", "  %i = s32[] parameter(0)",
         "  %one = s32[] constant(1)", "  ROOT %add = s32[] add(%i, %one)", "}",
         "%c (p: (s32[], s32[])) -> pred[] {", "  %p = (s32[], s32[]) parameter(0)",
         "  %c0 = s32[] get-tuple-element(%p), index=0",
         "  %c1 = s32[] get-tuple-element(%p), index=1",
         f"  ROOT %lt = pred[] {condition}", "}",
         "%b (q: (s32[], s32[])) -> (s32[], s32[]) {",
         "  %q = (s32[], s32[]) parameter(0)",
         "  %b0 = s32[] get-tuple-element(%q), index=0",
         "  %b1 = s32[] get-tuple-element(%q), index=1",
         "  %next = s32[] fusion(%b0), kind=kLoop, calls=%inc",
         f"  ROOT %bt = (s32[], s32[]) tuple({body})", "}",
         "ENTRY %main (x: s32[]) -> s32[] {", "  %x = s32[] parameter(0)",
         "  %zero = s32[] constant(0)", "  %seven = s32[] constant(7)",
         "  %copied = s32[] copy(%seven)", f"  %t = (s32[], s32[]) tuple({state})",
         "  ROOT %w = (s32[], s32[]) while(%t), condition=%c, body=%b", "}"]
    )  # fmt: skip


LESS = "compare(%c0, %c1), direction=LT"


@pytest.mark.parametrize(
    "state, body, condition, count",
    [
        ("%zero, %seven", "%next, %b1", LESS, 7),
        ("%zero, %copied", "%next, %b1", LESS, 7),
        ("%x, %seven", "%next, %b1", LESS, None),
        ("%zero, %x", "%next, %b1", LESS, None),
        ("%zero, %seven", "%next, %next", LESS, None),  # the bound changes
        ("%zero, %seven", "%b1, %b1", LESS, None),
        ("%zero, %seven", "%next, %b1", "compare(%c0, %c1), direction=NE", None),
        ("%zero, %seven", "%next, %b1", "and(%c0, %c1)", None),
    ],
)
def test_a_loop_with_its_bound_in_the_state(state, body, condition, count):
    assert trip_count(looping(state, body, condition)) == count


def test_loops_of_jax():
    """What the compiler writes, and what it does not know."""

    def f(x, n):
        x = jax.lax.fori_loop(3, 10, lambda i, x: jnp.cos(x * i), x)
        return jax.lax.fori_loop(0, n, lambda i, x: jnp.sin(x), x)

    module = Module(jax.jit(f).lower(1.0, 5).compile().as_text() or "")
    loops = [r for r in module.running() if r.instruction.opcode == "while"]
    assert [module.trip_count(r.instruction) for r in loops] == [7, None]


def test_a_condition_runs_once_more_than_the_body():
    module = Module(in_loop())
    times = {r.instruction.name: r.times for r in module.running()}
    assert times == {
        "w": 1, "first": 1, "q": 7, "by": 7, "next": 7, "p": 8, "seven": 8, "lt": 8
    }  # fmt: skip
