"""Partitioning inference of `scan`, `while` and `cond`.

Input: a loop or branch equation and the inference of the program around it. Output:
`ControlFlowInference`: the kind that each operand must have, the kind of each result,
and the inference of each body.

The kinds of carried values are a fixed point: a body is inferred by an inference of its
own, given the kinds that are known of its operands, and its results join the carried
values until they leave a step as they entered it. `_join` takes the highest element of
the chain `free < global < partitioned` and keeps an axis once it is there, so each
carried value is raised at most twice, and the iteration ends after at most
`2 * carried + 1` inferences.

In this chain partitioned stands above global, unlike in `infer.py`, because the initial
value of a global carry may be scattered before the loop, so one partitioned step makes
all steps partitioned.

Invariants: a body is inferred no further than the phase that the program around it has
begun, which may still demand a global value of the body. Sharp edges: a scan over the
group axis is not such a loop unless it is a map (`scan_over_groups.py`); `check`
refuses it.
"""

from collections.abc import Sequence
from typing import Any

from drjax._jaxprs.walk import split_scan, split_while
from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.kind import (
    FREE,
    GLOBAL,
    PARTITIONED,
    Kind,
    shift_axis,
)


class ControlFlowInference:
    """The kinds of the operands and results of a `scan`, `while` or `cond`.

    Args:
      outer: The inference of the program around it, a `PartitioningInference`.
      eqn: Its equation.

    Attributes:
      bodies: The inferences of its jaxprs, in the order of `InlinedJaxpr.bodies`.
      operand_kinds: The kind that each operand must have.
      result_kinds: The kind of each result.
    """

    def __init__(self, outer: Any, eqn):
        self.outer, self.eqn = outer, eqn
        operands = [outer.lattice_value(v) for v in eqn.invars]
        results = [outer.lattice_value(v) for v in eqn.outvars]
        infer = {"scan": self._scan, "while": self._while, "cond": self._cond}
        self.operand_kinds, self.result_kinds, self.bodies = infer[eqn.primitive.name](
            operands, results
        )

    def _body(self, index: int, arguments: Sequence, results: Sequence) -> Any:
        body = self.outer.program.bodies(self.eqn)[index]
        return self.outer.infer_body(body, arguments, results)

    def _scan(self, operands, results):
        consts, init, stacks = split_scan(self.eqn, operands)
        n_carry = len(init)
        # The body sees one step of each stack.
        xs = [shift_axis(kind, -1) for kind in stacks]
        ys = [shift_axis(kind, -1) for kind in results[n_carry:]]
        carry = _join(_scatterable(init), results[:n_carry])
        while True:
            body = self._body(0, [*consts, *carry, *xs], [*carry, *ys])
            ins, outs = _argument_and_result_kinds(body)
            const_kinds, carry_kinds, x_kinds = split_scan(self.eqn, ins)
            # Arguments and results of the body are the same carried values.
            joined = _join(carry, carry_kinds, outs[:n_carry])
            if joined == carry:
                break
            carry = joined
        xs = [shift_axis(kind, +1) for kind in x_kinds]
        ys = [shift_axis(kind, +1) for kind in outs[n_carry:]]
        return [*const_kinds, *carry, *xs], [*carry, *ys], (body,)

    def _while(self, operands, results):
        cond_consts, body_consts, init = split_while(self.eqn, operands)
        n_cond, n_body = len(cond_consts), len(body_consts)
        carry = _join(_scatterable(init), results)
        while True:
            # All groups leave the loop together, so the condition is global.
            cond = self._body(0, [*cond_consts, *carry], [GLOBAL])
            body = self._body(1, [*body_consts, *carry], carry)
            cond_ins, _ = _argument_and_result_kinds(cond)
            ins, outs = _argument_and_result_kinds(body)
            joined = _join(carry, cond_ins[n_cond:], ins[n_body:], outs)
            if joined == carry:
                break
            carry = joined
        operand_kinds = [*cond_ins[:n_cond], *ins[:n_body], *carry]
        return operand_kinds, carry, (cond, body)

    def _cond(self, operands, results):
        outs, ins = list(results), operands[1:]
        while True:
            branches = tuple(
                self._body(i, ins, outs)
                for i in range(len(self.outer.program.bodies(self.eqn)))
            )
            kinds = [_argument_and_result_kinds(branch) for branch in branches]
            # One partitioned branch makes the result partitioned: the others scatter.
            joined = _join(outs, *(_scatterable(out) for _, out in kinds))
            if joined == outs:
                break
            outs = joined
        operand_kinds = _join(ins, *(branch_ins for branch_ins, _ in kinds))
        # All groups take the same branch, so the index is global.
        return [GLOBAL, *operand_kinds], outs, branches

    def check(self) -> None:
        """Refuse loops over the groups, and whatever the bodies refuse."""
        name = self.eqn.primitive.name
        kinds = [self.outer[v] for v in self.eqn.invars]
        # The steps of a scan and the index of a cond must not be the groups.
        steps = kinds[:1] if name == "cond" else []
        if name == "scan":
            _, _, steps = split_scan(self.eqn, kinds)
        if PARTITIONED in steps:
            raise self.outer.refusal(self.eqn, kinds, diagnostics.MIXES_GROUPS)
        # A global operand may be scattered before the loop. The other way takes a
        # gather, which users must write.
        for required, kind in zip(self.operand_kinds, kinds, strict=True):
            if kind.partitioned and required != kind:
                raise self.outer.refusal(
                    self.eqn, kinds, diagnostics.ALREADY_PARTITIONED
                )
        for result, var in zip(self.result_kinds, self.eqn.outvars, strict=True):
            if result.partitioned and self.outer[var] != result:
                raise self.outer.refusal(self.eqn, kinds, diagnostics.MIXES_GROUPS)
        for body in self.bodies:
            body.check()


def _argument_and_result_kinds(body: Any) -> tuple[list[Kind], list[Kind]]:
    program = body.program
    return (
        [body.lattice_value(v) for v in program.invars],
        [body.lattice_value(v) for v in program.outvars],
    )


def _scatterable(kinds: Sequence[Kind]) -> list[Kind]:
    """Initial or branch values: if global, they may be scattered, so they are free."""
    return [kind if kind.partitioned else FREE for kind in kinds]


def _join(*columns: Sequence[Kind]) -> list[Kind]:
    """The highest kind of each variable; the first axis, if there are several."""
    joined = []
    for kinds in zip(*columns, strict=True):
        highest = [k for k in kinds if k.partitioned] or [
            k for k in kinds if k == GLOBAL
        ]
        joined.append(highest[0] if highest else FREE)
    return joined
