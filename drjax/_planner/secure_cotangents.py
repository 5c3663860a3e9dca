"""The demand of a secure sum holds for cotangents: `secure` of the sums that add them.

Input: the kinds of an inlined jaxpr. Output: the same jaxpr, in which sums and means of
cotangents of a secure sum are secure too, or None if there are none.

The transpose of a secure sum is a `broadcast` with the parameter `secure`. What groups
compute from its copies is linear in them: their cotangents, of the sum or of what the
sum was computed from. A group's slice of these tells as much as its summand does.

Invariants: a value inherits the largest demand of what it is computed from; only
partitioned values have one, as a global one is a result that the program reveals. Sharp
edges: values that also depend on other sums inherit the demand; it is not dropped for a
factor that is known to be constant.
"""

from collections.abc import Sequence

from drjax._compat.types import Atom, Eqn
from drjax._errors import PlanError
from drjax._jaxprs.provenance import source_line
from drjax._jaxprs.walk import split_scan, split_while
from drjax._planner.inline import CONTROL, InlinedJaxpr
from drjax._planner.partitioning.environment import Environment
from drjax.primitives import broadcast_p, reduce_mean_p, reduce_sum_p

# A rewritten program, None if nothing changed; and the demands on its results.
Rewritten = tuple[InlinedJaxpr | None, list[int]]


def demand_of_cotangents(kinds: Environment) -> InlinedJaxpr | None:
    """Make the sums of cotangents of secure sums secure; None if there are none.

    Raises `PlanError` if such cotangents leave their group in another way.
    """
    if not _has_secure_broadcast(kinds.program):
        return None
    return _rewrite(kinds, [0] * len(kinds.program.invars))[0]


def _has_secure_broadcast(program: InlinedJaxpr) -> bool:
    """Whether a broadcast, at any depth of loops, is the transpose of a secure sum."""
    return any(
        "secure" in eqn.params
        if eqn.primitive is broadcast_p
        else eqn.primitive.name in CONTROL
        and any(map(_has_secure_broadcast, program.bodies(eqn)))
        for eqn in program.eqns
    )


def _rewrite(kinds: Environment, demands: Sequence[int]) -> Rewritten:
    """Rewrite a program, or the body of a loop, given the demands on its arguments."""
    program = kinds.program
    inherited = dict(zip(program.invars, demands, strict=True))
    eqns, bodies, changed = [], dict(program.known_bodies), False

    def demand(atom: Atom) -> int:
        # A literal has none, and that on a value ends where it becomes global.
        return inherited.get(atom, 0) if kinds.cell(atom).partitioned else 0

    for eqn in program.eqns:
        operands = [demand(v) for v in eqn.invars]
        least = max(operands, default=0)
        if eqn.primitive is broadcast_p:
            least = eqn.params.get("secure", 0)
        results = [least] * len(eqn.outvars)
        if kinds.is_loop(eqn):
            rewritten, results = _rewrite_loop(kinds, eqn, operands)
            if loop := program.replaced_bodies(eqn, rewritten):
                bodies[eqn], changed = loop, True
        elif kinds.signature(eqn) is not None and _reveals(kinds, eqn):
            if least and eqn.primitive not in (reduce_sum_p, reduce_mean_p):
                raise PlanError(
                    f"{eqn.primitive.name} at {source_line(eqn)} is of cotangents of a "
                    "secure sum, of which no process but a group's own may see a "
                    "slice. Sums and means of them are secure, other reductions cannot "
                    "be: leave out this one, or secure=True."
                )
            if eqn.params.get("secure", 0) < least:
                eqn = eqn.replace(params=eqn.params | {"secure": least})
                changed = True
        eqns.append(eqn)
        inherited.update(zip(eqn.outvars, results, strict=True))
    outs = [demand(v) for v in program.outvars]
    if not changed:
        return None, outs
    return program.rewritten(eqns, bodies), outs


def _reveals(kinds: Environment, eqn: Eqn) -> bool:
    """Whether an equation makes a global value of slices."""
    return not any(kinds[v].partitioned for v in eqn.outvars)


def _rewrite_loop(
    kinds: Environment, eqn: Eqn, operands: list[int]
) -> tuple[list[InlinedJaxpr | None], list[int]]:
    """Rewrite the bodies of a loop; return them, and the demands on its results."""
    bodies, name = kinds.loops[eqn].bodies, eqn.primitive.name
    if name == "program":  # over another partition: here, its values are global
        return [_rewrite(bodies[0], [0] * len(operands))[0]], [0] * len(eqn.outvars)
    if name == "cond":
        runs = [_rewrite(body, operands[1:]) for body in bodies]
        outs = zip(*(outs for _, outs in runs), strict=True)
        return [new for new, _ in runs], [max(each) for each in outs]
    if name == "scan":
        consts, carry, stacks = split_scan(eqn, operands)
        constants = [consts]
    else:
        *constants, carry = split_while(eqn, operands)
        stacks = []
    while True:  # ends, as the demands on carried values only grow
        pairs = zip(bodies, constants, strict=True)
        runs = [_rewrite(body, [*own, *carry, *stacks]) for body, own in pairs]
        outs = runs[-1][1]
        joined = [max(pair) for pair in zip(carry, outs, strict=False)]
        if joined == carry:
            return [new for new, _ in runs], [*carry, *outs[len(carry) :]]
        carry = joined
