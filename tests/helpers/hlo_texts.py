"""Texts of compiled programs, as short as can be read."""


def in_loop(
    *body: str, first: int = 0, step: str = "add", by: int = 1, devices: int = 8
) -> str:
    """A program with these instructions in the body of a loop.

    Args:
      *body: The instructions.
      first: The number at which the loop's counter starts; it runs while it is below 7.
      step: The opcode of its next value.
      by: The constant operand of that.
      devices: The number of devices.
    """
    return "\n".join(
        [f"HloModule jit_m, is_scheduled=true, num_partitions={devices}",
         "%body (q: s32[]) -> s32[] {", *body, "  %q = s32[]{:T(256)} parameter(0)",
         f"  %by = s32[] constant({by})", f"  ROOT %next = s32[] {step}(%q, %by)", "}",
         "%cond (p: s32[]) -> pred[] {", "  %p = s32[]{:T(256)} parameter(0)",
         "  %seven = s32[] constant(7)",
         "  ROOT %lt = pred[] compare(%p, %seven), direction=LT", "}",
         "ENTRY %main (x: f32[8]) -> s32[] {", f"  %first = s32[] constant({first})",
         "  ROOT %w = s32[] while(%first), condition=%cond, body=%body", "}"]
    )  # fmt: skip


def in_entry(*lines: str, devices: int = 8) -> str:
    """A program of these instructions."""
    return "\n".join(
        [f"HloModule jit_m, is_scheduled=true, num_partitions={devices}",
         "ENTRY %main (x: f32[8]) -> s32[] {", *lines, "}"]
    )  # fmt: skip
