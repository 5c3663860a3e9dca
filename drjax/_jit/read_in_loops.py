"""Evaluate a jaxpr whose arguments are partly unread: each part reads what it needs.

Input: a jaxpr, its arguments, and how to read one that is unread. Output: its results.

A loop or branch that takes unread data reads them in each of its steps. Read before it,
they would have to be kept for all groups while it runs.

Sharp edges: what the program computes of the data before a loop is not data. Where it
is cheap, the planner computes it in each step of a scan (`rematerialize_loops`).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax import lax

from drjax import _compat
from drjax._compat.types import Array, ClosedJaxpr, Eqn, OpenJaxpr
from drjax._jaxprs.eval_jaxpr import evaluate
from drjax._jaxprs.walk import split_scan, split_while

Operand: TypeAlias = Any  # an array, or an unread one
Run: TypeAlias = Callable[[Any, Sequence[Operand]], list[Array]]


def run(
    jaxpr: ClosedJaxpr | OpenJaxpr,
    args: Sequence[Operand],
    is_unread: Callable[[Operand], bool],
    reader: Callable[[], Callable[[Operand], Array]],
) -> list[Array]:
    """Evaluate a jaxpr; `reader()` makes what reads for one step, and may remember."""
    read = reader()
    inside: Run = lambda body, operands: run(body, operands, is_unread, reader)

    def array(x: Operand) -> Array:
        return read(x) if is_unread(x) else x

    def step(eqn: Eqn, operands: list[Operand]) -> Sequence[Operand] | None:
        if not any(map(is_unread, operands)):
            return None
        rule = _RULES.get(eqn.primitive.name)
        if rule is not None:
            return rule(eqn, operands, inside, array)
        return _compat.bind_equation(eqn, list(map(array, operands)))

    return list(map(array, evaluate(jaxpr, args, step)))


def _scan(
    eqn: Eqn, operands: list[Operand], inside: Run, array: Callable[[Operand], Array]
) -> list[Array]:
    consts, carry, xs = split_scan(eqn, operands)
    params = eqn.params

    def step(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
        outs = inside(params["jaxpr"], [*consts, *carry, *xs])
        return outs[: len(carry)], outs[len(carry) :]

    carry, ys = lax.scan(
        step,
        list(map(array, carry)),
        list(map(array, xs)),
        params["length"],
        params["reverse"],
        params["unroll"],
    )
    return [*carry, *ys]


def _while(
    eqn: Eqn, operands: list[Operand], inside: Run, array: Callable[[Operand], Array]
) -> list[Array]:
    of_condition, of_body, carry = split_while(eqn, operands)
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    return lax.while_loop(
        lambda carry: inside(condition, [*of_condition, *carry])[0],
        lambda carry: inside(body, [*of_body, *carry]),
        list(map(array, carry)),
    )


def _cond(
    eqn: Eqn, operands: list[Operand], inside: Run, array: Callable[[Operand], Array]
) -> list[Array]:
    index, *rest = operands
    branches = [lambda b=b: inside(b, rest) for b in eqn.params["branches"]]
    return lax.switch(array(index), branches)


def _call(
    eqn: Eqn, operands: list[Operand], inside: Run, array: Callable[[Operand], Array]
) -> list[Array]:
    return inside(eqn.params["jaxpr"], operands)


_RULES = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "jit": _call,
}
