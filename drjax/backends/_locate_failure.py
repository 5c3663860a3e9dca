"""The user's line at which a stage fails, or makes its first NaN.

Input: a stage and the inputs with which it failed. Output: text, or None if it is not
known.

The stage runs again, equation by equation and, in loops, step by step.

Invariants: only called after a failure, so that it costs nothing otherwise.

Sharp edges: without compilation results may differ in the last bits, so that a NaN may
not come up again; the text says so. Stages from plan files have no source lines.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from drjax import _compat
from drjax._jaxprs.provenance import source_line
from drjax._jaxprs.walk import definitions, split_scan, split_while, variables
from drjax._planner.inline import CONTROL, InlinedJaxpr, inline_calls
from drjax.plan import Stage


class _Located(Exception):
    """Raised where a failure is located.

    Its argument is the equation that fails, or the variable of a stage's input.
    """


def of_error(stage: Stage, inputs: Sequence[Any]) -> str | None:
    """Rerun a failed stage to find the line of the user's code that raises.

    Args:
      stage: The stage.
      inputs: The arrays with which it failed, for a local stage the group index first.

    Returns:
      The line, as text; None if no equation raises, or the line is not known.
    """
    if stage.exported is not None:
        return None
    try:
        _run(inline_calls(stage.jaxpr), inputs)
    except _Located as located:
        return source_line(located.args[0])
    return None


def of_nan(stage: Stage, inputs: Sequence[Any]) -> str:
    """Rerun a stage to find what makes a NaN in its outputs; returns text for errors.

    The text names an equation of which no operand has a NaN, or an input that has one.

    Args:
      stage: The stage.
      inputs: The arrays with which it yields a NaN, for a local stage the group index
        first.
    """
    if stage.exported is not None:
        return "a plan file does not hold the lines of its source"
    program = inline_calls(stage.jaxpr)
    try:
        _run(program, inputs, find_nan=True)
    except _Located as located:
        eqn = located.args[0]
        if eqn in program.invars:
            position = program.invars.index(eqn)
            first = len(program.invars) - len(stage.inputs)  # after the group index
            return f"there is one in its input {stage.inputs[position - first].name}"
        if eqn in program.consts:
            return "there is one in a constant that its functions close over"
        return f"made by {eqn.primitive.name} at {source_line(eqn)}"
    return "made by work that gives none when it runs operation by operation"


def has_nan(x: Any) -> bool:
    """Whether an array has a NaN; False if its dtype has none, as integers and keys."""
    return jnp.issubdtype(x.dtype, jnp.inexact) and bool(jnp.isnan(x).any())


def _run(program: InlinedJaxpr, args: Sequence[Any], find_nan: bool = False) -> list:
    """Run a program equation by equation; returns the arrays of its outputs.

    Args:
      program: The inlined jaxpr.
      args: The arrays of its inputs.
      find_nan: Whether to look for the origin of a NaN in the outputs.

    Raises:
      _Located: An equation raises; or, with `find_nan`, an output has a NaN.
    """
    values = {**program.consts, **dict(zip(program.invars, args, strict=True))}

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in program.eqns:
        try:
            outs = _outs(program, eqn, list(map(read, eqn.invars)))
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


def _origin(program: InlinedJaxpr, var, bad: set, read: Callable) -> Any:
    """The equation that makes a NaN from operands without NaN, or the input with a NaN.

    Args:
      program: The inlined jaxpr.
      var: The variable of an output with a NaN.
      bad: All variables whose arrays have a NaN.
      read: From a variable or literal to its array.

    Raises:
      _Located: The equation is inside a loop or branch.
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


def _outs(program: InlinedJaxpr, eqn, operands: list, find_nan: bool = False) -> list:
    """The results of one equation; loops and branches run step by step.

    Args:
      program: The inlined jaxpr of the equation.
      eqn: The equation.
      operands: The arrays of its inputs.
      find_nan: Whether to look in loops and branches for the origin of a NaN.

    Raises:
      _Located: As `_run`, for an equation in the body of a loop or branch.
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


def _scan(eqn, body: Callable, operands: list) -> list:
    """The results of a scan, whose body runs step by step.

    Args:
      eqn: The equation of the scan.
      body: From constants, carried values and slices of the stacks to the outputs.
      operands: The arrays of the equation's inputs.
    """
    consts, carry, stacks = split_scan(eqn, operands)
    n_carry = len(carry)
    steps = range(eqn.params["length"])
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
