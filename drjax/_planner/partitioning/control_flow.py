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

from drjax._compat.types import Eqn
from drjax._jaxprs.walk import split_scan, split_while
from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.environment import Environment, LoopKinds
from drjax._planner.partitioning.kind import (
    FREE,
    GLOBAL,
    PARTITIONED,
    Kind,
    shift_axis,
)
from drjax._planner.scans import step_axes

# Infers a body from the kinds of its arguments and of its results, as far as known:
# `(argument_kinds, result_kinds)`, and for that of a `program` its partition.
Body = Callable[..., Environment]
# The same, for any body, an `InlinedJaxpr`, which is the first argument.
InferBody = Callable[..., Environment]


def infer_loop(env: Environment, eqn: Eqn, infer_body: InferBody) -> LoopKinds:
    """Infer the kinds of a `scan`, `while`, `cond` or `program`, and of its bodies.

    `env` has the kinds so far. It is only read; the caller records the result.
    """
    operands = [env.cell(v) for v in eqn.invars]
    results = [env.cell(v) for v in eqn.outvars]
    programs = env.program.bodies(eqn)
    bodies = [functools.partial(infer_body, b) for b in programs]
    if eqn.primitive.name == "scan":
        return _scan(eqn, operands, results, bodies, step_axes(eqn, *programs))
    return _RULES[eqn.primitive.name](eqn, operands, results, bodies)


# A rule for each primitive, from its equation, the kinds of its operands and results as
# far as they are known (else free), and functions that infer its bodies.


def _scan(
    eqn: Eqn,
    operands: list[Kind],
    results: list[Kind],
    bodies: Sequence[Body],
    axes: tuple[list[int], list[int]],
) -> LoopKinds:
    """Infer the kinds of a scan: a fixed point over its carried values.

    A carried value has one kind in all steps. If the body raises it, say from free to
    partitioned, the body is inferred again with the raised kind. A stack has the steps
    along axis 0, so a group axis k of a stack is axis k - 1 in the body. `axes` tells
    it from stacks of blocks (see `scans.py`).
    """
    (infer_step,) = bodies
    one_step = lambda kinds, axes: list(map(shift_axis, kinds, (-k for k in axes)))
    stack = lambda kinds, axes: list(map(shift_axis, kinds, axes))
    x_axes, y_axes = axes
    consts, init, stacks = split_scan(eqn, operands)
    n_carry = len(init)
    # The body sees one step of each stack.
    xs, ys = one_step(stacks, x_axes), one_step(results[n_carry:], y_axes)
    # A carried value has one kind in all steps, so that a demand on the last one is a
    # demand on each.
    carry = _join(_scatterable(init), results[:n_carry])
    while True:
        # From the start in each iteration: an environment never raises a variable from
        # global to partitioned, as `_join` does.
        body = infer_step([*consts, *carry, *xs], [*carry, *ys])
        ins, outs = _argument_and_result_kinds(body)
        const_kinds, carry_kinds, x_kinds = split_scan(eqn, ins)
        # Arguments and results of the body are the same carried values.
        joined = _join(carry, carry_kinds, outs[:n_carry])
        if joined == carry:
            break
        carry = joined
    xs, ys = stack(x_kinds, x_axes), stack(outs[n_carry:], y_axes)
    return LoopKinds([*const_kinds, *carry, *xs], [*carry, *ys], (body,))


def _while(
    eqn: Eqn, operands: list[Kind], results: list[Kind], bodies: Sequence[Body]
) -> LoopKinds:
    """Infer the kinds of a while: a fixed point over its carried values.

    A carried value has one kind in all steps, before and after the step and in the
    condition.
    """
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
        # The condition reads the carried values too, so its demands hold in all steps.
        joined = _join(carry, cond_ins[n_cond:], ins[n_body:], outs)
        if joined == carry:
            break
        carry = joined
    operand_kinds = [*cond_ins[:n_cond], *ins[:n_body], *carry]
    return LoopKinds(operand_kinds, carry, (cond, body))


def _cond(
    eqn: Eqn, operands: list[Kind], results: list[Kind], bodies: Sequence[Body]
) -> LoopKinds:
    """Infer the kinds of a cond: a result is partitioned if one branch's result is."""
    ins, outs = operands[1:], results
    while True:
        branches = tuple(infer_branch(ins, outs) for infer_branch in bodies)
        kinds = [_argument_and_result_kinds(branch) for branch in branches]
        # One partitioned branch makes the result partitioned: the others scatter.
        joined = _join(outs, *(_scatterable(out) for _, out in kinds))
        if joined == outs:
            break
        outs = joined
    # Operands need no iteration: after one is raised, the equation is visited again.
    operand_kinds = _join(ins, *(branch_ins for branch_ins, _ in kinds))
    # All groups take the same branch, so the index is global.
    return LoopKinds([GLOBAL, *operand_kinds], outs, branches)


def _program(
    eqn: Eqn, operands: list[Kind], results: list[Kind], bodies: Sequence[Body]
) -> LoopKinds:
    """Infer the kinds of a program over another partition: here, all values are global.

    In the body all kinds are inferred over that partition, from free arguments and
    results.
    """
    (infer_program,) = bodies
    # What is partitioned over another partition is global to the program around it.
    free = [FREE] * len(operands), [FREE] * len(results)
    body = infer_program(*free, eqn.params["over"])
    return LoopKinds([GLOBAL] * len(operands), [GLOBAL] * len(results), (body,))


_RULES = {"while": _while, "cond": _cond, "program": _program}


def check_loop(env: Environment, eqn: Eqn) -> None:
    """Raise a `PlanError` if the kinds of a loop's operands or results do not fit.

    The equations of the bodies are not checked. The kinds do not fit in these cases:

    * the groups are the steps of a scan, or the index of a cond is partitioned;
    * an operand is partitioned where the loop needs a global value, or one that is
      partitioned along another axis;
    * the bodies make a result partitioned that has another kind outside the loop;
    * a body moves the group axis of a carried value, or a branch that of a result.
    """
    loop = env.loops[eqn]
    name, kinds = eqn.primitive.name, [env[v] for v in eqn.invars]
    # The steps of a scan and the index of a cond must not be the groups.
    steps = kinds[:1] if name == "cond" else []
    if name == "scan":
        _, _, steps = split_scan(eqn, kinds)
    # With the groups along another axis of a stack, each step has all of them. A scan
    # over the groups that is a map is no loop (`Environment.is_loop`).
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
    # A body that moves the group axis: slices along the new axis are those of other
    # groups, which the next step, or another branch, would take for its own.
    for body, required in _required_of_bodies(eqn, loop):
        for var, kind in zip(body.program.outvars, required, strict=True):
            if body[var].partitioned and body[var] != kind:
                raise diagnostics.refusal(env, eqn, diagnostics.MOVES_GROUP_AXIS)


def _required_of_bodies(
    eqn: Eqn, loop: LoopKinds
) -> list[tuple[Environment, list[Kind]]]:
    """List the kinds that the results of each body must have, with its environment.

    There is no pair for the condition of a while, whose result is global; and none for
    a `program`, whose results may have any kinds over its own partition.
    """
    results = list(loop.result_kinds)
    match eqn.primitive.name:
        case "program":
            return []  # any kinds over its partition
        case "scan":
            _, carry, _ = split_scan(eqn, eqn.invars)
            n_carry = len(carry)
            # The body returns one step of each stack.
            _, axes = step_axes(eqn, loop.bodies[0].program)
            pairs = zip(results[n_carry:], axes, strict=True)
            steps = [shift_axis(kind, -axis) for kind, axis in pairs]
            return [(loop.bodies[0], [*results[:n_carry], *steps])]
        case "while":
            return [(loop.bodies[1], results)]
        case _:
            return [(body, results) for body in loop.bodies]


def _argument_and_result_kinds(body: Environment) -> tuple[list[Kind], list[Kind]]:
    """Return the kinds of a body's arguments and of its results; some may be free."""
    program = body.program
    ins, outs = program.invars, program.outvars
    # Not `body[v]`, which is global for a free variable that a later phase may raise.
    return [body.cell(v) for v in ins], [body.cell(v) for v in outs]


def _scatterable(kinds: Sequence[Kind]) -> list[Kind]:
    """Replace global kinds by free ones; partitioned and free kinds stay.

    It is applied to the initial values of a loop and to the results of branches. A
    global one of these may still be scattered, if the loop or another branch needs a
    partitioned value, so it must not decide that the kind is global.
    """
    return [kind if kind.partitioned else FREE for kind in kinds]


def _join(*columns: Sequence[Kind]) -> list[Kind]:
    """Return the highest kind of each variable: free < global < partitioned.

    Each column has one kind for each variable. If it is partitioned along different
    axes in different columns, the first of these wins.
    """
    joined = []
    for kinds in zip(*columns, strict=True):
        highest = [k for k in kinds if k.partitioned] or [
            k for k in kinds if k == GLOBAL
        ]
        joined.append(highest[0] if highest else FREE)
    return joined
