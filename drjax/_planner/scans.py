"""Scans of the planner, as constants, carried values and stacks, and their rewriting.

Input: an inlined jaxpr and the equation of a scan. Output: scans with other operands.

A stack is taken step by step: its axis 0 has the steps. A rewritten scan may also take
it block by block, several steps at once: then what its body takes, or returns, has as
many axes as the stack.

Sharp edges: a rewritten scan has no jaxpr in its parameters: its body is in
`InlinedJaxpr.known_bodies` alone.
"""

from collections.abc import Sequence
from typing import Any

from drjax import _compat
from drjax._compat.types import Atom, Eqn, Var
from drjax._jaxprs.walk import live_equations, split_scan, substitute
from drjax._planner.inline import InlinedJaxpr


class ScanEquation:
    """A scan equation and its body, as constants, carried values and stacks.

    `consts`, `carry` and `xs` are the operands of the equation; `xs` are the stacks
    over whose steps it runs. `body_consts`, `body_carry` and `body_xs` are the
    arguments of its body; `body_xs` are one step of `xs`. `ys` are the stacked results
    of the equation, and `body_ys` one step of them.
    """

    def __init__(self, program: InlinedJaxpr, eqn: Eqn):
        self.eqn = eqn
        (self.body,) = program.bodies(eqn)
        self.consts, self.carry, self.xs = split_scan(eqn, eqn.invars)
        self.body_consts, self.body_carry, self.body_xs = split_scan(
            eqn, self.body.invars
        )
        n_carry = len(self.carry)
        self.ys, self.body_ys = eqn.outvars[n_carry:], self.body.outvars[n_carry:]

    def replace(
        self,
        consts: Sequence[Atom],
        xs: Sequence[Atom],
        body_consts: Sequence[Var],
        body_xs: Sequence[Var],
        first: Sequence[Eqn],
        names: dict[Var, Var],
        more_consts: dict[Var, Any],
        ys: Sequence[tuple[Var, Atom]],
    ) -> tuple[Eqn, InlinedJaxpr]:
        """Build a scan and its body, with other operands and more equations.

        The carry stays the same. The new body has the equations `first` before the old
        ones; `more_consts` has the values of constants that these use, and that the old
        body may lack. `names` has for each argument of the old body that is none of the
        new one the variable of the new body that replaces it. `ys` are pairs of a
        stacked result and its variable in the body.
        """
        n_carry = len(self.carry)
        eqn = self.eqn.replace(
            invars=[*consts, *self.carry, *xs],
            outvars=[*self.eqn.outvars[:n_carry], *(y for y, _ in ys)],
            params={
                **_compat.scan_size_params(self.eqn, len(consts), n_carry, len(xs)),
                # No `jaxpr`, which would be that of the old body.
                "length": self.eqn.params["length"],
                "reverse": self.eqn.params["reverse"],
            },
        )
        renamed = [
            e.replace(invars=substitute(e.invars, names)) for e in self.body.eqns
        ]
        # A result of a step may be one of the replaced arguments itself.
        outs = [*self.body.outvars[:n_carry], *(y for _, y in ys)]
        # Equations that were rewritten, and programs, have no bodies elsewhere.
        known = self.body.known_bodies
        bodies = {
            new: known[e]
            for new, e in zip(renamed, self.body.eqns, strict=True)
            if e in known
        }
        body = InlinedJaxpr(
            [*body_consts, *self.body_carry, *body_xs],
            [*first, *renamed],
            [names.get(v, v) for v in outs],
            {**self.body.consts, **more_consts},
            bodies,
        )
        return eqn, body


def step_axes(eqn: Eqn, body: InlinedJaxpr) -> tuple[list[int], list[int]]:
    """For each stack of a scan, 1 if its axis 0 has the steps; 0 if they are blocks.

    The lists are those of the stacks that it takes, and of those that it returns.
    """
    _, carry, xs = split_scan(eqn, eqn.invars)
    _, _, body_xs = split_scan(eqn, body.invars)
    n_carry = len(carry)
    ys, body_ys = eqn.outvars[n_carry:], body.outvars[n_carry:]
    axes = lambda stacks, entries: [
        x.aval.ndim - y.aval.ndim for x, y in zip(stacks, entries, strict=True)
    ]
    return axes(xs, body_xs), axes(ys, body_ys)


def replace_scans(
    program: InlinedJaxpr, replaced: dict[int, tuple[Eqn, InlinedJaxpr]]
) -> InlinedJaxpr:
    """Replace scans of an inlined jaxpr, and remove equations that are dead then.

    `replaced` has for the `id` of each old scan equation the new one and its body.
    """
    bodies = {old: (eqn, (body,)) for old, (eqn, body) in replaced.items()}
    return replace_loops(program, bodies)


def replace_loops(
    program: InlinedJaxpr, replaced: dict[int, tuple[Eqn, tuple[InlinedJaxpr, ...]]]
) -> InlinedJaxpr:
    """Replace loops and branches of an inlined jaxpr, as `replace_scans` does."""
    eqns = [replaced.get(id(eqn), (eqn,))[0] for eqn in program.eqns]
    known = {**program.known_bodies, **dict(replaced.values())}
    # The equations that only residuals needed are dead now.
    live = live_equations(eqns, program.outvars)
    new = InlinedJaxpr(program.invars, live, program.outvars, program.consts, known)
    new.replaced = {
        eqn: old
        for eqn, old in zip(eqns, program.eqns, strict=True)
        if id(old) in replaced
    }
    return new
