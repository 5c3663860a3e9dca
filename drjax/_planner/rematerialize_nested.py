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
    if not has_loops(kinds.loops[eqn].bodies[0]):
        return None
    for other in kinds.program.eqns:
        if other is eqn or other.primitive.name != "scan" or not kinds.is_loop(other):
            continue
        if other.params["length"] == eqn.params["length"]:
            new = _Steps(kinds, eqn, other).rewritten(rewrite)
            if new is not None:
                return new
    return None


def has_loops(kinds: Environment) -> bool:
    """Whether a body has scans or branches whose residuals may be rematerialized."""
    return any(
        e.primitive.name in ("scan", "cond") and kinds.is_loop(e)
        for e in kinds.program.eqns
    )


class _Steps:
    """A forward scan, and a backward one that reads its stacks, step by step."""

    def __init__(self, kinds: Environment, forward: Eqn, backward: Eqn):
        self.kinds, self.program = kinds, kinds.program
        self.forward = ScanEquation(self.program, forward)
        self.backward = ScanEquation(self.program, backward)
        self._kinds = [kinds.loops[eqn].bodies[0] for eqn in (forward, backward)]
        first, second = self._kinds
        stacked = dict(zip(self.forward.ys, self.forward.body_ys, strict=True))
        same = lambda table, x, b: x in table and first[table[x]] == second[b]
        # For each argument of the second body, what it is in the first one.
        self._read = dict[Var, Var]()
        steps = dict(zip(self.forward.xs, self.forward.body_xs, strict=True)) | stacked
        consts = dict(zip(self.forward.consts, self.forward.body_consts, strict=True))
        for table, pairs in (
            (steps, zip(self.backward.xs, self.backward.body_xs, strict=True)),
            (consts, zip(self.backward.consts, self.backward.body_consts, strict=True)),
        ):
            self._read.update((b, table[x]) for x, b in pairs if same(table, x, b))
        self._reads_stacks = not {*stacked.values()}.isdisjoint(self._read.values())
        kept = lambda xs, bs: [
            pair for pair in zip(xs, bs, strict=True) if pair[1] not in self._read
        ]
        self._kept_xs = kept(self.backward.xs, self.backward.body_xs)
        self._kept_consts = kept(self.backward.consts, self.backward.body_consts)
        # What else reads stacks of the forward scan.
        others = [e for e in self.program.eqns if e is not backward]
        used = {*variables(self.program.outvars), *self.backward.carry}
        used.update(x for x, _ in (*self._kept_consts, *self._kept_xs))
        used.update(v for e in others for v in variables(e.invars))
        self._kept_ys = [(y, v) for y, v in stacked.items() if y in used]

    def rewritten(self, rewrite: Rewrite) -> InlinedJaxpr | None:
        """Rewrite what one step of both scans does; None: nothing is rewritten."""
        if not self._reads_stacks:
            return None
        together = self._together()
        new = rewrite(together)
        if new is None:
            return None
        first, second = divided(new, self._second)
        outs = new.outvars[len(self.forward.carry) + len(self._kept_ys) :]
        known = {*self.backward.body_carry, *new.consts}
        known.update(b for _, b in (*self._kept_consts, *self._kept_xs))
        return self._split(new, first, second, outs, crossing(second, outs, known))

    def _together(self) -> Environment:
        """Make the kinds of the jaxpr that has one step of both scans."""
        (first, second), names = self._kinds, self._read
        renamed = [(e, with_names(e, names)) for e in second.program.eqns]
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
                **with_keys(second.program.known_bodies, renamed),
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
            {**first.loops, **with_keys(second.loops, renamed)},
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
        renamed = [(e, with_names(e, fresh)) for e in second]
        bodies = [
            InlinedJaxpr(
                forward.body.invars,
                first,
                results,
                used_constants(new.consts, first, results),
                {e: new.known_bodies[e] for e in first if e in new.known_bodies},
            ),
            InlinedJaxpr(
                [
                    *(b for _, b in self._kept_consts),
                    *(fresh[v] for v in outer_consts),
                    *backward.body_carry,
                    *(b for _, b in self._kept_xs),
                    *(fresh[v] for v in outer_xs),
                ],
                [e for _, e in renamed],
                substitute(outs, fresh),
                used_constants(new.consts, second, outs),
                with_keys(new.known_bodies, renamed),
            ),
        ]
        scans = [
            _scan(forward, forward.consts, forward.xs, [y for y, _ in ys]),
            _scan(
                backward,
                [
                    *(x for x, _ in self._kept_consts),
                    *(consts[v] for v in outer_consts),
                ],
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


def divided(new: InlinedJaxpr, second: Sequence[Eqn]) -> tuple[list[Eqn], list[Eqn]]:
    """Divide the equations of a rewritten jaxpr that had `second` after others."""
    ids = set(map(id, second))
    parts: tuple[list[Eqn], list[Eqn]] = [], []
    for eqn in new.eqns:
        parts[id(new.replaced.get(eqn, eqn)) in ids].append(eqn)
    return parts


def crossing(
    second: Iterable[Eqn], outs: Sequence[Atom], known: Iterable[Var]
) -> list[Var]:
    """List what equations and results read that neither they nor `known` have."""
    second = [*second]
    defined = {*known, *(v for e in second for v in e.outvars)}
    reads = (*(v for e in second for v in variables(e.invars)), *variables(outs))
    return [v for v in dict.fromkeys(reads) if v not in defined]


def with_names(eqn: Eqn, names: dict[Var, Var]) -> Eqn:
    if names.keys().isdisjoint(variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=substitute(eqn.invars, names))


def with_keys(table: dict[Any, Any], renamed: Iterable[tuple[Eqn, Eqn]]) -> dict:
    """Look up what a table has for equations, by those that replace them."""
    return {new: table[old] for old, new in renamed if old in table}


def used_constants(
    consts: dict[Var, Any], eqns: Iterable[Eqn], outs: Iterable[Atom]
) -> dict[Var, Any]:
    used = {*variables(outs), *(v for e in eqns for v in variables(e.invars))}
    return {v: x for v, x in consts.items() if v in used}
