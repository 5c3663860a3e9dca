"""What of the body of a loop or a branch can be rematerialized, and if it is worth it.

Input: the kinds of a body, and the values that a derivative needs of it. Output: the
equations that rematerialize these, and from what; and of the values those that have
more bytes than what they are computed from.

Invariants: communication, effects and loops are not done again, and no variable is
rematerialized whose exact bits the program may compare. Nor is the index of a `cond`: a
derivative takes the same branch.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import jax.numpy as jnp
import numpy as np

from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, Eqn, Var
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._jaxprs.eval_jaxpr import literal_value
from drjax._jaxprs.walk import backward_slice, definitions, variables
from drjax._planner.bitwise_observable import bitwise_observable
from drjax._planner.exchanges import exchange_rule
from drjax._planner.inline import CONTROL, InlinedJaxpr, operands_of_bodies
from drjax._planner.partitioning.environment import Environment
from drjax._primitives.map_fn import eliminate_dead_code
from drjax.primitives import map_fn_p

T = TypeVar("T", bound=Hashable)


class BodyWork:
    """The work of a forward body, of which a backward one may do a part again."""

    def __init__(self, kinds: Environment):
        self._kinds, self._body = kinds, kinds.program
        self._observable = bitwise_observable(kinds.program)

    def backward_slice(self, roots: Sequence[Var]) -> tuple[list[Eqn], list[Var]]:
        """Find the equations of the body that may be done again to compute the roots.

        They are in the order of the body, and returned with the variables from which
        they start, without constants of the body: its arguments, results of
        communication, of loops and of effects, and bitwise-observable values, whose
        exact bits the program may compare. Of a mapped function they have the part that
        is needed: a new state may take the old one, of which its derivative needs
        nothing.
        """
        needed: set[Var] = {*variables(roots)}
        parts: dict[int, Eqn] = {}
        for eqn in reversed(self._body.eqns):
            used = [v in needed and self._is_pure(v, eqn) for v in eqn.outvars]
            if any(used):
                parts[id(eqn)] = part = part_of(eqn, used)
                needed.update(variables(part.invars))
        eqns, starts = backward_slice(roots, definitions(parts.values()), self._is_pure)
        # In the order of the body: definitions precede uses.
        ordered = [e for e in reversed(parts.values()) if id(e) in eqns]
        # Constants of the jaxpr are no operands: the rewritten body has them itself.
        return ordered, [v for v in starts if v not in self._body.consts]

    def starts(self, roots: Sequence[Var]) -> list[Var]:
        """Return only the variables from which the roots are rematerialized."""
        return self.backward_slice(roots)[1]

    def _is_pure(self, var: Var, eqn: Eqn) -> bool:
        communicates = exchange_rule(eqn, self._kinds) is not None
        looped = self._kinds.is_loop(eqn)
        return not (communicates or looped or eqn.effects or var in self._observable)


def worth_more(
    residuals: Iterable[T],
    saved: Callable[[Sequence[T]], float],
    cost: Callable[[Sequence[T]], float],
) -> list[T]:
    """Choose residuals that have more bytes than what they are rematerialized from.

    One by one, the largest first, as those that are chosen share what is kept for them
    with the next; or all together, if that saves more. `saved` are the bytes of some
    residuals, `cost` those of what is kept for them. They stay in order, as names
    depend on it.
    """
    every, chosen = [*residuals], list[T]()
    before = spent = cost([])
    for one in sorted(every, key=lambda one: -saved([one])):
        new = cost([*chosen, one])
        if new - spent < saved([one]):
            chosen.append(one)
            spent = new
    gain = lambda ones: saved(ones) - (cost(ones) - before)
    if gain(every) > max(0.0, gain(chosen)):
        return every
    return [one for one in every if one in chosen]


def indices_of_branches(program: InlinedJaxpr) -> frozenset[Var]:
    """Find the integers that choose a branch of a `cond`, at any depth."""
    definition, indices = definitions(program.eqns), set[Var]()
    for eqn in program.eqns:
        stack = list[Atom]()
        if eqn.primitive.name == "cond":
            stack += eqn.invars[:1]
        if eqn.primitive.name in CONTROL:
            for body, operands in operands_of_bodies(program, eqn):
                inner = body.memoize(indices_of_branches, body)
                pairs = zip(body.invars, operands, strict=True)
                stack += [v for own, v in pairs if own in inner]
        # What they are computed from, as `lax.switch` clamps its index.
        while stack:
            for var in variables([stack.pop()]):
                if var not in indices and _is_whole(var):
                    indices.add(var)
                    source = definition.get(var)
                    if source is not None and source.primitive.name in ELEMENTWISE:
                        stack += source.invars
    return frozenset(indices)


def same_integer(definition: dict[Var, Eqn], a: Atom, b: Atom) -> bool:
    """Whether two integers are the same variable, or computed alike from the same."""
    if a is b:
        return True
    if isinstance(a, Literal) and isinstance(b, Literal):
        return bool(np.all(literal_value(a) == literal_value(b)))
    if isinstance(a, Literal) or isinstance(b, Literal):
        return False
    first, second = definition.get(a), definition.get(b)
    return (
        first is not None
        and second is not None
        and first.primitive is second.primitive
        and first.primitive.name in ELEMENTWISE
        and first.params == second.params
        and _is_whole(a)
        and len(first.invars) == len(second.invars)
        and all(
            same_integer(definition, x, y)
            for x, y in zip(first.invars, second.invars, strict=True)
        )
    )


def _is_whole(var: Var) -> bool:
    """Whether a variable is an integer or a bool, on which arithmetic is exact."""
    dtype = var.aval.dtype
    return jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_


def part_of(eqn: Eqn, used: list[bool]) -> Eqn:
    """Return a `map_fn` for some of its results, of which at least one is used.

    Another equation is returned itself.
    """
    if eqn.primitive is not map_fn_p or all(used):
        return eqn
    _, live = eliminate_dead_code(used, eqn)
    assert live is not None
    return live
