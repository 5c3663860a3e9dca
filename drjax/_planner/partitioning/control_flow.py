"""Propagation rules of `scan`, `while` and `cond`: a fixed point over their bodies.

Input: a loop or branch equation, the environment of its program, and a function that
infers a body. Output: `LoopKinds`: the kind that each operand must have, the kind of
each result, and the environment of each body.

The kinds of carried values are a fixed point: a body is inferred by itself, from the
kinds that are known of its operands, and its results join the carried values until they
leave a step as they entered it. `_join` takes the highest element of the chain `free <
global < partitioned` and keeps an axis once it is there, so each carried value is
raised at most twice, and the iteration ends after at most `2 * carried + 1` inferences.

In this chain partitioned stands above global, unlike in `infer.py`, because the initial
value of a global carry may be scattered before the loop, so one partitioned step makes
all steps partitioned.

Invariants: a body is inferred no further than the phase that the program around it has
begun, which may still demand a global value of the body. Sharp edges: a scan over the
group axis is not such a loop unless it is a map (`scan_over_groups.py`); `check_loop`
refuses it.
"""

import functools
from collections.abc import Callable, Sequence

from drjax._jaxprs.walk import split_scan, split_while
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.environment import Environment, LoopKinds
from drjax._planner.partitioning.kind import (
    FREE,
    GLOBAL,
    PARTITIONED,
    Kind,
    shift_axis,
)

# Infers a body from the kinds of its arguments and of its results, as far as known.
Body = Callable[[Sequence[Kind], Sequence[Kind]], Environment]
# The same, for any body.
InferBody = Callable[[InlinedJaxpr, Sequence[Kind], Sequence[Kind]], Environment]


def infer_loop(env: Environment, eqn, infer_body: InferBody) -> LoopKinds:
    """Infer the kinds of a `scan`, `while` or `cond` and of its bodies.

    Args:
      env: The environment of the program that contains the equation.
      eqn: The equation.
      infer_body: Infers the environment of a body.
    """
    operands = [env.cell(v) for v in eqn.invars]
    results = [env.cell(v) for v in eqn.outvars]
    bodies = [functools.partial(infer_body, b) for b in env.program.bodies(eqn)]
    return _RULES[eqn.primitive.name](eqn, operands, results, bodies)


# A rule for each primitive, from its equation, the kinds of its operands and results as
# far as they are known, and functions that infer its bodies.


def _scan(eqn, operands: list, results: list, bodies: Sequence[Body]) -> LoopKinds:
    (infer_step,) = bodies
    consts, init, stacks = split_scan(eqn, operands)
    n_carry = len(init)
    # The body sees one step of each stack.
    xs = [shift_axis(kind, -1) for kind in stacks]
    ys = [shift_axis(kind, -1) for kind in results[n_carry:]]
    carry = _join(_scatterable(init), results[:n_carry])
    while True:
        body = infer_step([*consts, *carry, *xs], [*carry, *ys])
        ins, outs = _argument_and_result_kinds(body)
        const_kinds, carry_kinds, x_kinds = split_scan(eqn, ins)
        # Arguments and results of the body are the same carried values.
        joined = _join(carry, carry_kinds, outs[:n_carry])
        if joined == carry:
            break
        carry = joined
    xs = [shift_axis(kind, +1) for kind in x_kinds]
    ys = [shift_axis(kind, +1) for kind in outs[n_carry:]]
    return LoopKinds([*const_kinds, *carry, *xs], [*carry, *ys], (body,))


def _while(eqn, operands: list, results: list, bodies: Sequence[Body]) -> LoopKinds:
    infer_condition, infer_step = bodies
    cond_consts, body_consts, init = split_while(eqn, operands)
    n_cond, n_body = len(cond_consts), len(body_consts)
    carry = _join(_scatterable(init), results)
    while True:
        # All groups leave the loop together, so the condition is global.
        cond = infer_condition([*cond_consts, *carry], [GLOBAL])
        body = infer_step([*body_consts, *carry], carry)
        cond_ins, _ = _argument_and_result_kinds(cond)
        ins, outs = _argument_and_result_kinds(body)
        joined = _join(carry, cond_ins[n_cond:], ins[n_body:], outs)
        if joined == carry:
            break
        carry = joined
    operand_kinds = [*cond_ins[:n_cond], *ins[:n_body], *carry]
    return LoopKinds(operand_kinds, carry, (cond, body))


def _cond(eqn, operands: list, results: list, bodies: Sequence[Body]) -> LoopKinds:
    ins, outs = operands[1:], results
    while True:
        branches = tuple(infer_branch(ins, outs) for infer_branch in bodies)
        kinds = [_argument_and_result_kinds(branch) for branch in branches]
        # One partitioned branch makes the result partitioned: the others scatter.
        joined = _join(outs, *(_scatterable(out) for _, out in kinds))
        if joined == outs:
            break
        outs = joined
    operand_kinds = _join(ins, *(branch_ins for branch_ins, _ in kinds))
    # All groups take the same branch, so the index is global.
    return LoopKinds([GLOBAL, *operand_kinds], outs, branches)


_RULES = {"scan": _scan, "while": _while, "cond": _cond}


def check_loop(env: Environment, eqn) -> None:
    """Check that a loop is not over the groups, and takes global values as it needs.

    Its bodies are checked as programs of their own (`check_partitioning`).

    Raises:
      PlanError: The steps or the branch index are the groups, a partitioned operand
        must be global, or a result that must be partitioned is not.
    """
    loop = env.loops[eqn]
    name, kinds = eqn.primitive.name, [env[v] for v in eqn.invars]
    # The steps of a scan and the index of a cond must not be the groups.
    steps = kinds[:1] if name == "cond" else []
    if name == "scan":
        _, _, steps = split_scan(eqn, kinds)
    if PARTITIONED in steps:
        raise diagnostics.refusal(env, eqn, diagnostics.MIXES_GROUPS)
    # A global operand may be scattered before the loop. The other way takes a gather,
    # which users must write.
    for required, kind in zip(loop.operand_kinds, kinds, strict=True):
        if kind.partitioned and required != kind:
            raise diagnostics.refusal(env, eqn, diagnostics.ALREADY_PARTITIONED)
    for result, var in zip(loop.result_kinds, eqn.outvars, strict=True):
        if result.partitioned and env[var] != result:
            raise diagnostics.refusal(env, eqn, diagnostics.MIXES_GROUPS)


def _argument_and_result_kinds(body: Environment) -> tuple[list[Kind], list[Kind]]:
    """`(kinds of arguments, kinds of results)` of a body, as far as inferred."""
    program = body.program
    ins, outs = program.invars, program.outvars
    return [body.cell(v) for v in ins], [body.cell(v) for v in outs]


def _scatterable(kinds: Sequence[Kind]) -> list[Kind]:
    """Replace global kinds by free ones, for initial values and results of branches.

    These values may be scattered where the loop or branch needs partitioned ones.
    """
    return [kind if kind.partitioned else FREE for kind in kinds]


def _join(*columns: Sequence[Kind]) -> list[Kind]:
    """The highest kind of each variable; the first axis, if there are several.

    Args:
      *columns: Each has a kind for every variable, in the same order.
    """
    joined = []
    for kinds in zip(*columns, strict=True):
        highest = [k for k in kinds if k.partitioned] or [
            k for k in kinds if k == GLOBAL
        ]
        joined.append(highest[0] if highest else FREE)
    return joined
