"""Rematerialize the residuals of a loop over rounds instead of stacking them.

What a round outside of loops rematerializes of earlier ones is decided in
`rematerialize_rounds.py`.

Input: the kinds of an inlined jaxpr. Output: an equivalent one in which one more scan,
or pair of scans, is rewritten; None when there is no more.

The derivative of a scan is a scan that runs backward and takes, step by step, the
residuals of the forward scan. Where these are partitioned, memory grows with the number
of groups times the number of steps. `rematerialize_residuals` rewrites such a pair: the
forward scan saves what enters the groups' work of a step (what it carries, as the
states of groups, and what it communicates), and the backward scan starts each step with
that work:

    forward F: carry, x_t -> y_t (partitioned)     backward B: ..., y_t -> ...
    becomes F': carry, x_t -> carry_t              B': ..., carry_t, x_t -> y_t -> ...

Soundness: let S be the backward slice of y_t in the body of F, cut at the body's
arguments, at every equation that communicates or has effects, and at variables where
rounding could be observed (`bitwise_observable.py`). Then

* each equation of S is a pure function: no effects, no communication;
* each variable where S starts has in step t of B' the value that it has in step t of F.
  Constants are the same, stacks are indexed by the step whatever the direction of a
  scan, and carried and reduced values are stacked by F' itself;
* so step t of B' computes y_t by the same equations from the same values. It is equal
  up to the compiler's rounding.

Stacks of global values do not grow with the number of groups. Partitioned values where
S starts are stacked only if they have fewer bytes than the residuals that they replace.
Residuals of the server's work are rematerialized likewise, where that needs fewer bytes
together with what is stacked for the groups.

JAX moves residuals that do not change from step to step outside of the loop, as
partitioned constants of the backward scan. `_sink` moves the cheap equations that
compute them into the steps, so that they are not live during the whole loop.

Invariants: communication is neither added nor repeated. Arithmetic of S is done twice.
Sharp edges: a
rewritten scan has no jaxpr in its parameters: its body is in
`InlinedJaxpr.known_bodies` alone.
"""

import math
from typing import Any

from drjax import _compat
from drjax._compat.types import Eqn, Var
from drjax._jaxprs.walk import (
    backward_slice,
    copy_equations,
    definitions,
    variables,
)
from drjax._planner.bitwise_observable import bitwise_observable
from drjax._planner.exchanges import exchange_rule
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.partitioning.environment import Environment
from drjax._planner.rematerialize_nested import rematerialize_inside
from drjax._planner.scans import ScanEquation, replace_scans
from drjax._planner.unbatching.rules import UNBATCHING_RULES
from drjax._planner.work import COSTLY, bytes_of, is_cheap, operations
from drjax._primitives.map_fn import eliminate_dead_code
from drjax._primitives.read_groups import read_groups_p
from drjax.primitives import broadcast_p, map_fn_p, partition_index_p, scatter_p


def rematerialize_residuals(kinds: Environment) -> InlinedJaxpr | None:
    """Rewrite one scan, or pair of scans, to rematerialize residuals in each step.

    Residuals are values of a scan that its derivative, a backward scan, needs. Kinds
    are to be inferred again, and then the caller asks again: None if no scan is left to
    rewrite. The first scan that allows one of these rewrites is rewritten:

    * Cheap equations, which cost little compared with the memory of their result, and
      compute partitioned constants of the scan, are moved into its steps.
    * A forward scan no longer stacks its partitioned residuals. The backward scans that
      read them rematerialize them step by step, from global values, or from states of
      groups that are smaller.
    """
    for eqn in kinds.program.eqns:
        if eqn.primitive.name == "scan" and kinds.is_loop(eqn):
            # One rewrite at a time, as kinds are inferred again after each.
            sunk = _sink(kinds, ScanEquation(kinds.program, eqn))
            if sunk is not None:
                return sunk
            pair = _ScanPair(kinds, eqn)
            if pair.residuals:
                return pair.rewritten()
            inside = rematerialize_inside(kinds, eqn, rematerialize_residuals)
            if inside is not None:
                return inside
    return None


class _ScanPair:
    """A forward scan, and the backward scans over its stacked partitioned results.

    Attributes:
      residuals: For each stacked result that backward scans can rematerialize, its
        variable in the forward body.
      stacks: For each variable of the forward body of which the rewritten forward scan
        stacks the values in place of residuals, the variable of the stack; set by
        `rewritten`.
    """

    def __init__(self, kinds: Environment, eqn: Eqn):
        self.program, self.forward = kinds.program, ScanEquation(kinds.program, eqn)
        self.body_kinds = kinds.loops[eqn].bodies[0]
        self.observable = bitwise_observable(self.forward.body)
        # What a backward scan can read without the forward one stacking it.
        self._available = {*self.forward.body_consts, *self.forward.body_xs}
        pairs = zip(self.forward.ys, self.forward.body_ys, strict=True)
        candidates = {y: v for y, v in pairs if self._only_scanned(y)}
        # First those of groups: what these need of the server is stacked anyway, as its
        # memory does not grow with the number of groups.
        self.residuals: dict[Any, Any] = {}
        for partitioned in (True, False):
            self.residuals |= self._worth(
                {
                    y: v
                    for y, v in candidates.items()
                    if self.body_kinds[v].partitioned == partitioned
                },
                partitioned,
            )

    def _worth(self, candidates: dict[Any, Any], partitioned: bool) -> dict[Any, Any]:
        """Choose the residuals whose memory is more than that of what replaces them.

        One by one, the largest first, as those that are chosen share what is stacked
        with the next; or all together, if that saves more. `partitioned` tells whether
        slices of groups count, or values of the server.
        """
        before = self._stacked([*self.residuals.values()], partitioned)
        stacked = {y: self._stacked([v], partitioned) for y, v in candidates.items()}
        chosen, stacks = dict[Any, Any](), set(before)
        for y in sorted(stacked, key=lambda y: -bytes_of([candidates[y]])):
            if bytes_of(stacked[y] - stacks) < bytes_of([candidates[y]]):
                chosen[y] = candidates[y]
                stacks |= stacked[y]
        every = before.union(*stacked.values())
        saved = lambda residuals, stacks: (
            bytes_of({*residuals.values()}) - bytes_of(stacks - before)
        )
        if saved(candidates, every) > max(0.0, saved(chosen, stacks)):
            return candidates
        # In the order of the scan, as names depend on it.
        return {y: v for y, v in candidates.items() if y in chosen}

    def _stacked(self, roots: list[Var], partitioned: bool) -> set[Var]:
        """Collect the values of a kind to stack in order to rematerialize `roots`."""
        _, starts = self._backward_slice(roots)
        return {
            v
            for v in starts
            if self.body_kinds[v].partitioned == partitioned
            and v not in self._available
        }

    def _only_scanned(self, var: Var) -> bool:
        """Whether a stack is used, and only as a stack of scans of the same length.

        False if it is a result of the program, a constant or an initial carried value
        of a scan, or an operand of any other equation.
        """
        # A result of the program must be stacked anyway.
        if var in self.program.outvars:
            return False
        users = [e for e in self.program.eqns if var in e.invars]
        length = self.forward.eqn.params["length"]
        return bool(users) and all(
            e.primitive.name == "scan"
            and e.params["length"] == length
            and var in (scan := ScanEquation(self.program, e)).xs
            # A constant or an initial carry is read whole, not step by step.
            and var not in (*scan.consts, *scan.carry)
            for e in users
        )

    def _backward_slice(self, roots: list[Var]) -> tuple[list[Eqn], list[Var]]:
        """Find the forward body's equations that a backward scan may rematerialize.

        They compute the roots, and are in the order of the body. They are returned with
        the variables of the body from which they start, without its constants: its
        arguments, results of communication and of effects, and bitwise-observable
        values, whose exact bits the program may compare. Of a mapped function they
        have the part that is needed: a new state may take the old one, of which its
        derivative needs nothing.
        """
        body = self.forward.body
        needed: set[Any] = {*variables(roots)}
        parts: dict[int, Eqn] = {}
        for eqn in reversed(body.eqns):
            used = [v in needed and self._is_pure(v, eqn) for v in eqn.outvars]
            if any(used):
                parts[id(eqn)] = part = _part(eqn, used)
                needed.update(variables(part.invars))
        eqns, starts = backward_slice(roots, definitions(parts.values()), self._is_pure)
        # In the order of the body: definitions precede uses.
        ordered = [e for e in reversed(parts.values()) if id(e) in eqns]
        # Constants of the jaxpr are no operands: the rewritten body has them itself.
        return ordered, [v for v in starts if v not in body.consts]

    def _is_pure(self, var: Var, eqn: Eqn) -> bool:
        communicates = exchange_rule(eqn, self.body_kinds) is not None
        looped = self.body_kinds.is_loop(eqn)
        return not (communicates or looped or eqn.effects or var in self.observable)

    def rewritten(self) -> InlinedJaxpr:
        """Rewrite the program so that backward scans rematerialize the residuals.

        The forward scan returns, in place of the residuals, stacks of the global values
        from which they are computed. These are recorded in `self.stacks`.
        """
        forward = self.forward
        # One slice for all, so that a start that they share is stacked once.
        _, starts = self._backward_slice(list(self.residuals.values()))
        length = forward.eqn.params["length"]
        self.stacks = {
            v: _compat.new_var(_compat.stacked_aval(v.aval, length))
            for v in starts
            if v not in self._available
        }
        ys = [
            pair
            for pair in zip(forward.ys, forward.body_ys, strict=True)
            if pair[0] not in self.residuals
        ]
        ys += [(stack, v) for v, stack in self.stacks.items()]
        replaced = {
            id(forward.eqn): forward.replace(
                forward.consts,
                forward.xs,
                forward.body_consts,
                forward.body_xs,
                [],
                {},
                {},
                ys,
            )
        }
        for eqn in self.program.eqns:
            if any(v in self.residuals for v in variables(eqn.invars)):
                replaced[id(eqn)] = self._backward(ScanEquation(self.program, eqn))
        return replace_scans(self.program, replaced)

    def _backward(self, scan: ScanEquation) -> tuple[Eqn, InlinedJaxpr]:
        """Rewrite a backward scan: each step first rematerializes its residuals.

        In place of the residuals, the new scan takes the values from which they are
        computed. `self.stacks` must be set, as `rewritten` does.
        """
        scanned = list(zip(scan.xs, scan.body_xs, strict=True))
        roots = {b: self.residuals[x] for x, b in scanned if x in self.residuals}
        eqns, starts = self._backward_slice(list(roots.values()))
        # Fresh variables: a forward scan may have several backward scans.
        fresh, first = copy_equations(map(_compat.as_rematerialized, eqns), starts)
        forward = self.forward
        outer = dict(zip(forward.body_consts, forward.consts, strict=True))
        steps = dict(zip(forward.body_xs, forward.xs, strict=True)) | self.stacks
        consts = [v for v in starts if v in outer]
        xs = [v for v in starts if v in steps]
        names = {b: fresh[inner] for b, inner in roots.items()}
        # The backward scan takes the starts of the slice in place of the residuals.
        kept = [pair for pair in scanned if pair[0] not in self.residuals]
        return scan.replace(
            [*scan.consts, *(outer[v] for v in consts)],
            [*(x for x, _ in kept), *(steps[v] for v in xs)],
            [*scan.body_consts, *(fresh[v] for v in consts)],
            [*(b for _, b in kept), *(fresh[v] for v in xs)],
            first,
            names,
            forward.body.consts,
            list(zip(scan.ys, scan.body_ys, strict=True)),
        )


def _sink(kinds: Environment, scan: ScanEquation) -> InlinedJaxpr | None:
    """Move the cheap equations that compute a scan's partitioned constants into it.

    A constant is then rematerialized in each step, and not live during the whole loop.
    None if there is no constant to move: one that is partitioned along axis 0, the
    result of a cheap chain of equations, and not bitwise-observable (the program may
    compare its bits).
    """
    program = kinds.program
    consts = {v for v in scan.consts if kinds[v].axis == 0}
    eqns = [part for eqn in program.eqns for part in _with_cheap_part(eqn, consts)]
    # An observable variable has no definition here: the slice starts from it.
    definition = definitions(eqns)
    for var in bitwise_observable(program):
        definition.pop(var, None)
    # Global values are computed once by the server, not by each group in each step.
    of_groups = {
        v: e for v, e in definition.items() if kinds[v].partitioned and _may_move(e)
    }
    spare = _spare(scan)
    # A dict, as a set would make the order of operands depend on identities.
    sunk = {
        v: None
        for v in scan.consts
        if v in consts and v in of_groups and is_cheap(v, of_groups.get, spare)
    }
    if not sunk:
        return None
    needed, starts = backward_slice(sunk, of_groups, lambda *_: True)
    # No start is sunk by a later call, so the calls come to an end: each start is an
    # argument, a constant, observable, global, or not cheap.
    moved = (_compat.as_rematerialized(e) for e in eqns if id(e) in needed)
    fresh, first = copy_equations(moved, starts)
    pairs = list(zip(scan.consts, scan.body_consts, strict=True))
    names = {inner: fresh[v] for v, inner in pairs if v in sunk}
    kept = [pair for pair in pairs if pair[0] not in sunk]
    eqn, body = scan.replace(
        [*(v for v, _ in kept), *starts],
        scan.xs,
        [*(inner for _, inner in kept), *(fresh[v] for v in starts)],
        scan.body_xs,
        first,
        names,
        {},
        list(zip(scan.ys, scan.body_ys, strict=True)),
    )
    return replace_scans(program, {id(scan.eqn): (eqn, body)})


# Work before a loop of T steps may be done in each step instead, if that is at most
# this share of the work of the steps.
_SHARE = 1 / 16


def _spare(scan: ScanEquation) -> float:
    """Count the operations before a scan that each of its steps may do instead."""
    steps = scan.eqn.params["length"]
    if steps <= 1:  # nothing is done twice
        return math.inf
    return _SHARE * steps * sum(map(operations, scan.body.eqns)) / (steps - 1)


def _with_cheap_part(eqn: Eqn, consts: set[Var]) -> list[Eqn]:
    """Return the equation, and then one of a `map_fn` that has its cheap results alone.

    These are those of its results in `consts` that no costly equation is needed for,
    such as the zeros with which an optimizer begins. Both define the cheap results: of
    two definitions, `definitions` has the later one.
    """
    if eqn.primitive is not map_fn_p or eqn.effects or consts.isdisjoint(eqn.outvars):
        return [eqn]
    if _may_move(eqn):
        return [eqn]
    cheap = [
        var in consts and _may_move(_part(eqn, [var is other for other in eqn.outvars]))
        for var in eqn.outvars
    ]
    return [eqn, _part(eqn, cheap)] if any(cheap) else [eqn]


def _part(eqn: Eqn, used: list[bool]) -> Eqn:
    """Return a `map_fn` for some of its results, of which at least one is used.

    Another equation is returned itself.
    """
    if eqn.primitive is not map_fn_p or all(used):
        return eqn
    _, live = eliminate_dead_code(used, eqn)
    assert live is not None
    return live


def _may_move(eqn: Eqn) -> bool:
    """Whether an equation may be evaluated in each step of a loop, to save memory.

    It has no effects, is not costly, and is a `broadcast`, `scatter`, `read_groups`,
    `partition_index` or `iota`, or any primitive with an unbatching rule. A `map_fn` or
    `jit` may move if all equations of its jaxpr may.
    """
    name = eqn.primitive.name
    if eqn.effects or name in COSTLY:
        return False
    if eqn.primitive is map_fn_p or name == "jit":
        # Inlining does not enter mapped functions, so calls remain in them.
        return all(map(_may_move, _compat.open_jaxpr(eqn.params["jaxpr"]).eqns))
    # Data that the host reads may not fit in memory, so that they are read again.
    inputs = (broadcast_p, scatter_p, partition_index_p, read_groups_p)
    return eqn.primitive in inputs or (name in UNBATCHING_RULES or name == "iota")
