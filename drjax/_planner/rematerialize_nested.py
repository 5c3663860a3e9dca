"""Rematerialization where loops over rounds are nested, as rounds in epochs.

Input: the kinds of an inlined jaxpr, and a scan of it whose body has scans of rounds.
Output: the jaxpr, in which the body of a backward scan rematerializes residuals of the
loops inside, or None.

One step of a forward scan, and the same step of the backward scan that reads its
stacks, are together a jaxpr without the scans around them: what the first stacks, the
second reads. In it, loops inside are a pair like any other (`rematerialize_loops.py`).
The rewritten jaxpr is split again, and what the second step reads of the first one is
stacked: the starts of the rematerialized work, in place of residuals. They are
residuals of the scans around them, which are rewritten in their turn.

Invariants: as for one loop. Sharp edges: variables of the forward body would be those
of two bodies, so that the backward one gets fresh ones.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from drjax import _compat
from drjax._compat.types import Atom, Eqn, Var
from drjax._jaxprs.walk import substitute, variables
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.partitioning.environment import Environment
from drjax._planner.scans import ScanEquation, replace_scans

# `rematerialize_residuals`.
Rewrite: TypeAlias = Callable[[Environment], InlinedJaxpr | None]


def rematerialize_inside(
    kinds: Environment, eqn: Eqn, rewrite: Rewrite
) -> InlinedJaxpr | None:
    """Rewrite the loops inside of a scan and of a backward scan that reads its stacks.

    None if there are none, or `rewrite` has nothing to rewrite.
    """
    (inside,) = kinds.loops[eqn].bodies
    if not any(_is_scan_of_rounds(inside, e) for e in inside.program.eqns):
        return None
    for other in kinds.program.eqns:
        if other is eqn or not _is_scan_of_rounds(kinds, other):
            continue
        if other.params["length"] == eqn.params["length"]:
            new = _Steps(kinds, eqn, other).rewritten(rewrite)
            if new is not None:
                return new
    return None


def _is_scan_of_rounds(kinds: Environment, eqn: Eqn) -> bool:
    return eqn.primitive.name == "scan" and kinds.is_loop(eqn)


class _Steps:
    """A forward scan, and a backward one that reads its stacks, step by step."""

    def __init__(self, kinds: Environment, forward: Eqn, backward: Eqn):
        self.kinds, self.program = kinds, kinds.program
        self.forward = ScanEquation(self.program, forward)
        self.backward = ScanEquation(self.program, backward)
        self._kinds = [kinds.loops[eqn].bodies[0] for eqn in (forward, backward)]
        first, second = self._kinds
        stacked = dict(zip(self.forward.ys, self.forward.body_ys, strict=True))
        # For each argument of the second body, what it is in the first one.
        self._read = {
            b: stacked[x]
            for x, b in zip(self.backward.xs, self.backward.body_xs, strict=True)
            if x in stacked and first[stacked[x]] == second[b]
        }
        self._kept_xs = [
            pair
            for pair in zip(self.backward.xs, self.backward.body_xs, strict=True)
            if pair[1] not in self._read
        ]
        # What else reads stacks of the forward scan.
        others = [e for e in self.program.eqns if e is not backward]
        used = {*variables(self.program.outvars), *self.backward.consts}
        used.update(self.backward.carry, (x for x, _ in self._kept_xs))
        used.update(v for e in others for v in variables(e.invars))
        self._kept_ys = [(y, v) for y, v in stacked.items() if y in used]

    def rewritten(self, rewrite: Rewrite) -> InlinedJaxpr | None:
        """Rewrite what one step of both scans does; None: nothing is rewritten."""
        if not self._read:
            return None
        together = self._together()
        new = rewrite(together)
        if new is None:
            return None
        of_second = {v for e in self._second for v in e.outvars}
        ids = {id(e) for e in self._second}
        second = [
            e for e in new.eqns if id(e) in ids or not of_second.isdisjoint(e.outvars)
        ]
        ids = set(map(id, second))
        first = [e for e in new.eqns if id(e) not in ids]
        outs = new.outvars[len(self.forward.carry) + len(self._kept_ys) :]
        known = {*of_second, *self.backward.body_consts, *self.backward.body_carry}
        known.update(b for _, b in self._kept_xs)
        reads = (*(v for e in second for v in variables(e.invars)), *variables(outs))
        crossing = [
            v for v in dict.fromkeys(reads) if v not in known and v not in new.consts
        ]
        return self._split(new, first, second, outs, crossing)

    def _together(self) -> Environment:
        """Make the kinds of the jaxpr that has one step of both scans."""
        (first, second), names = self._kinds, self._read
        renamed = [(e, _with_names(e, names)) for e in second.program.eqns]
        self._second = [new for _, new in renamed]
        n_carry = len(self.forward.carry)
        jaxpr = InlinedJaxpr(
            [
                *first.program.invars,
                *(v for v in second.program.invars if v not in names),
            ],
            [*first.program.eqns, *self._second],
            [
                *first.program.outvars[:n_carry],
                *(v for _, v in self._kept_ys),
                *substitute(second.program.outvars, names),
            ],
            {**second.program.consts, **first.program.consts},
            {
                **first.program.known_bodies,
                **_with_keys(second.program.known_bodies, renamed),
            },
        )
        jaxpr.known_arguments = {
            **second.program.known_arguments,
            **first.program.known_arguments,
        }
        return Environment(
            jaxpr,
            self.kinds.partition,
            [None] * len(jaxpr.invars),
            {**second.cells, **first.cells},
            {**first.loops, **_with_keys(second.loops, renamed)},
        )

    def _split(
        self,
        new: InlinedJaxpr,
        first: list[Eqn],
        second: list[Eqn],
        outs: Sequence[Atom],
        crossing: Sequence[Var],
    ) -> InlinedJaxpr:
        """Make two scans again, of which the second takes `crossing` of the first."""
        forward, backward = self.forward, self.backward
        length, n_carry = forward.eqn.params["length"], len(forward.carry)
        consts = dict(zip(forward.body_consts, forward.consts, strict=True))
        xs = dict(zip(forward.body_xs, forward.xs, strict=True))
        stacks = {v: y for y, v in self._kept_ys}
        more = []
        for v in crossing:
            if v not in consts and v not in xs and v not in stacks:
                stacks[v] = _compat.new_var(_compat.stacked_aval(v.aval, length))
                more.append((stacks[v], v))
        ys = [*self._kept_ys, *more]
        steps = xs | stacks
        outer_consts = [v for v in crossing if v in consts]
        outer_xs = [v for v in crossing if v not in consts]
        fresh = {v: _compat.new_var(v.aval) for v in crossing}
        results = [*forward.body.outvars[:n_carry], *(v for _, v in ys)]
        renamed = [(e, _with_names(e, fresh)) for e in second]
        bodies = [
            InlinedJaxpr(
                forward.body.invars,
                first,
                results,
                _used(new.consts, first, results),
                {e: new.known_bodies[e] for e in first if e in new.known_bodies},
            ),
            InlinedJaxpr(
                [
                    *backward.body_consts,
                    *(fresh[v] for v in outer_consts),
                    *backward.body_carry,
                    *(b for _, b in self._kept_xs),
                    *(fresh[v] for v in outer_xs),
                ],
                [e for _, e in renamed],
                substitute(outs, fresh),
                _used(new.consts, second, outs),
                _with_keys(new.known_bodies, renamed),
            ),
        ]
        scans = [
            _scan(forward, forward.consts, forward.xs, [y for y, _ in ys]),
            _scan(
                backward,
                [*backward.consts, *(consts[v] for v in outer_consts)],
                [*(x for x, _ in self._kept_xs), *(steps[v] for v in outer_xs)],
                backward.ys,
            ),
        ]
        pairs = zip((forward, backward), zip(scans, bodies, strict=True), strict=True)
        return replace_scans(self.program, {id(old.eqn): new for old, new in pairs})


def _scan(
    old: ScanEquation, consts: Sequence[Atom], xs: Sequence[Atom], ys: Sequence[Var]
) -> Eqn:
    """Write a scan with other operands and stacks, without its body."""
    n_carry = len(old.carry)
    return old.eqn.replace(
        invars=[*consts, *old.carry, *xs],
        outvars=[*old.eqn.outvars[:n_carry], *ys],
        params={
            **_compat.scan_size_params(old.eqn, len(consts), n_carry, len(xs)),
            "length": old.eqn.params["length"],
            "reverse": old.eqn.params["reverse"],
        },
    )


def _with_names(eqn: Eqn, names: dict[Var, Var]) -> Eqn:
    if names.keys().isdisjoint(variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=substitute(eqn.invars, names))


def _with_keys(table: dict[Any, Any], renamed: Iterable[tuple[Eqn, Eqn]]) -> dict:
    """Look up what a table has for equations, by those that replace them."""
    return {new: table[old] for old, new in renamed if old in table}


def _used(
    consts: dict[Var, Any], eqns: Iterable[Eqn], outs: Iterable[Atom]
) -> dict[Var, Any]:
    used = {*variables(outs), *(v for e in eqns for v in variables(e.invars))}
    return {v: x for v, x in consts.items() if v in used}
