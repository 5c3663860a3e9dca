"""Find the line of the user's code at which a stage fails, or makes its first NaN.

Input: a stage and the inputs with which it failed. Output: text, or None if it is not
known.

The stage runs again, equation by equation and, in loops, step by step.

Invariants: only called after a failure, so that it costs nothing otherwise.

Sharp edges: without compilation results may differ in the last bits, so that a NaN may
not come up again; the text says so. Stages from plan files have no source lines.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from drjax import _compat
from drjax._compat.jax_types import JaxprEqn, Literal
from drjax._compat.types import Array, Atom, Eqn, Var
from drjax._jaxprs.eval_jaxpr import literal_value
from drjax._jaxprs.provenance import source_line
from drjax._jaxprs.walk import definitions, split_scan, split_while, variables
from drjax._planner.inline import CONTROL, InlinedJaxpr, inline_calls
from drjax.plan import Stage


class _Located(Exception):
    """Raised to end the evaluation of a jaxpr once the origin of a failure is known.

    Its only argument, `args[0]`, is the origin: the equation that raises, or that
    yields the first NaN; or, if the NaN was in the jaxpr's inputs or constants, the
    `Var` of that input or constant.
    """


def of_error(stage: Stage, inputs: Sequence[ArrayLike]) -> str | None:
    """Rerun a failed stage to find the line of the user's code that raises.

    `inputs` are the arguments of its jaxpr. The text has file, line and function, or is
    "an unknown line". None if no equation raises in the rerun, or if the stage is from
    a plan file, which has no lines.
    """
    program = _with_lines(stage)
    if program is None:
        return None
    try:
        _run(program, inputs)
    except _Located as located:
        return source_line(located.args[0])
    return None


def of_nan(stage: Stage, inputs: Sequence[ArrayLike]) -> str:
    """Rerun a stage to find the origin of a NaN in its outputs, as text for an error.

    It names the primitive and line of an equation that yields a NaN from operands
    without NaN, or the input that has a NaN; or it says that a constant has one; or, if
    the stage is from a plan file or the rerun gives no NaN, that the origin is not
    known for this reason. `inputs` are the arguments of the stage's jaxpr.
    """
    program = _with_lines(stage)
    if program is None:
        return "a plan file does not hold the lines of its source"
    try:
        _run(program, inputs, find_nan=True)
    except _Located as located:
        origin = located.args[0]
        if origin in program.invars:
            position = program.invars.index(origin)
            first = len(program.invars) - len(stage.inputs)  # after the group index
            return f"there is one in its input {stage.inputs[position - first].name}"
        if isinstance(origin, JaxprEqn):
            return f"made by {origin.primitive.name} at {source_line(origin)}"
        # A variable, of the stage or of the body of a loop or branch.
        return "there is one in a constant that its functions close over"
    return "made by work that gives none when it runs operation by operation"


def _with_lines(stage: Stage) -> InlinedJaxpr | None:
    """Return the equations of a stage; None if it is from a file, without lines."""
    return None if stage.exported is not None else inline_calls(stage.jaxpr)


def has_nan(x: Array | np.ndarray) -> bool:
    """Return whether an array has a NaN; False for integers and random keys."""
    return jnp.issubdtype(x.dtype, jnp.inexact) and bool(jnp.isnan(x).any())


def _run(
    program: InlinedJaxpr, args: Sequence[ArrayLike], find_nan: bool = False
) -> list[Array]:
    """Evaluate an inlined jaxpr equation by equation; raise the origin of a failure.

    A failure, raised as `_Located`, is an equation that raises; or, with `find_nan`, a
    NaN in a result.
    """
    values = {**program.consts, **dict(zip(program.invars, args, strict=True))}

    def read(atom: Atom) -> Array:
        return literal_value(atom) if isinstance(atom, Literal) else values[atom]

    for eqn in program.eqns:
        try:
            outs = _outs(program, eqn, list(map(read, eqn.invars)))
        # An equation in a body is closer to the cause than the loop that has the body.
        except _Located:
            raise
        except Exception as error:
            raise _Located(eqn) from error
        values.update(zip(eqn.outvars, outs, strict=True))
    if find_nan:
        # At the end, not at the first NaN: most programs make some and mask them.
        bad = {v for v, x in values.items() if has_nan(x)}
        for var in program.outvars:
            if var in bad:
                raise _Located(_origin(program, var, bad, read))
    return list(map(read, program.outvars))


def _origin(
    program: InlinedJaxpr, var: Atom, bad: set[Var], read: Callable[[Atom], Array]
) -> Eqn | Atom:
    """Return the equation that yields a NaN from operands without NaN.

    It is searched from `var`, a result, backwards, always from the first operand with a
    NaN. If an input or a constant has the NaN, the result is its variable. If the
    equation is a loop or branch, `_Located` is raised for an equation in its body.
    `bad` has all variables whose arrays have a NaN.
    """
    definition = definitions(program.eqns)
    while var in definition:
        eqn = definition[var]
        before = [v for v in variables(eqn.invars) if v in bad]
        if not before:
            # The NaN is made inside a loop or branch: the line in its body is more
            # help.
            if eqn.primitive.name in CONTROL:
                _outs(program, eqn, list(map(read, eqn.invars)), find_nan=True)
            return eqn
        # A NaN operand is the cause: go on from where it was made.
        var = before[0]
    return var


def _outs(
    program: InlinedJaxpr, eqn: Eqn, operands: list[Array], find_nan: bool = False
) -> list[Array]:
    """Evaluate one equation; loops and branches run step by step.

    If an equation that is no loop or branch raises, its error is passed on unchanged. A
    failure in a body is raised as `_Located`, as by `_run`.
    """
    if eqn.primitive.name not in CONTROL:
        return _compat.bind_equation(eqn, operands)
    bodies = [
        lambda *xs, body=body: _run(body, xs, find_nan) for body in program.bodies(eqn)
    ]
    if eqn.primitive.name == "cond":
        return bodies[np.clip(int(operands[0]), 0, len(bodies) - 1)](*operands[1:])
    if eqn.primitive.name == "while":
        first, second, carry = split_while(eqn, operands)
        while bool(bodies[0](*first, *carry)[0]):
            carry = bodies[1](*second, *carry)
        return carry
    return _scan(eqn, bodies[0], operands)


def _scan(
    eqn: Eqn, body: Callable[..., list[Array]], operands: list[Array]
) -> list[Array]:
    """Evaluate the equation of a scan step by step.

    `body(*constants, *carried values, *entries of the stacks)` runs one step, and
    returns the new carried values, then the outputs to stack. Entry t of a stacked
    output is that of step t, also if the scan is reversed.
    """
    consts, carry, stacks = split_scan(eqn, operands)
    n_carry = len(carry)
    steps = range(eqn.params["length"])
    # By step: a reversed scan runs from the last step, but stacks in order.
    stacked: dict[int, list] = {}
    for t in reversed(steps) if eqn.params["reverse"] else steps:
        outs = body(*consts, *carry, *(x[t] for x in stacks))
        carry, stacked[t] = outs[:n_carry], outs[n_carry:]
    ys = [
        jnp.stack([stacked[t][i] for t in steps])
        if stacked
        else jnp.zeros(v.aval.shape, v.aval.dtype)
        for i, v in enumerate(eqn.outvars[n_carry:])
    ]
    return [*carry, *ys]
