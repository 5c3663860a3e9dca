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
from collections.abc import Sequence
from typing import Any

from drjax import _compat
from drjax._compat.types import Eqn, Var
from drjax._jaxprs.walk import (
    backward_slice,
    copy_equations,
    definitions,
    live_equations,
    substitute,
    variables,
)
from drjax._planner.bitwise_observable import bitwise_observable
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.partitioning.environment import Environment
from drjax._planner.rematerialize_branches import (
    rematerialize_in_branches,
    without_branches,
)
from drjax._planner.rematerialize_nested import (
    rematerialize_inside,
    with_keys,
    with_names,
)
from drjax._planner.rematerialized import (
    BodyWork,
    indices_of_branches,
    part_of,
    worth_more,
)
from drjax._planner.scans import ScanEquation, replace_loops, replace_scans
from drjax._planner.unbatching.rules import UNBATCHING_RULES
from drjax._planner.work import COSTLY, bytes_of, is_cheap, operations
from drjax._primitives.read_groups import read_groups_p
from drjax.primitives import broadcast_p, map_fn_p, partition_index_p, scatter_p


def rematerialize_residuals(kinds: Environment) -> InlinedJaxpr | None:
    """Rewrite one loop or branch, or a pair, to rematerialize residuals in each step.

    Residuals are values of a scan that its derivative, a backward scan, needs. Kinds
    are to be inferred again, and then the caller asks again: None if no scan is left to
    rewrite. The first scan that allows one of these rewrites is rewritten:

    * Cheap equations, which cost little compared with the memory of their result, and
      compute partitioned constants of the scan, are moved into its steps; or operands
      of a cond, into its branches.
    * A forward scan no longer stacks its partitioned residuals. The backward scans that
      read them rematerialize them step by step, from global values, or from states of
      groups that are smaller. So do the branches of conds.
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
        elif eqn.primitive.name == "cond" and kinds.is_loop(eqn):
            sunk = _sink_into_branches(kinds, eqn)
            if sunk is not None:
                return sunk
            inside = rematerialize_in_branches(kinds, eqn, rematerialize_residuals)
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
        self.work = BodyWork(self.body_kinds)
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

        `partitioned` tells whether slices of groups count, or values of the server.
        """
        stacked = lambda ys: bytes_of(
            v
            for v in self.work.starts(
                [*self.residuals.values(), *(candidates[y] for y in ys)]
            )
            if self.body_kinds[v].partitioned == partitioned
            and v not in self._available
        )
        of_residuals = lambda ys: bytes_of({candidates[y] for y in ys})
        chosen = worth_more(candidates, of_residuals, stacked)
        return {y: candidates[y] for y in chosen}

    def _only_scanned(self, var: Var) -> bool:
        """Whether a stack is used, and only as a stack of scans of the same length.

        False if it is a result of the program, a constant or an initial carried value
        of a scan, or an operand of any other equation; or if it chooses branches.
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
            and indices_of_branches(scan.body).isdisjoint(
                b for x, b in zip(scan.xs, scan.body_xs, strict=True) if x is var
            )
            for e in users
        )

    def rewritten(self) -> InlinedJaxpr:
        """Rewrite the program so that backward scans rematerialize the residuals.

        The forward scan returns, in place of the residuals, stacks of the global values
        from which they are computed. These are recorded in `self.stacks`.
        """
        forward = self.forward
        # One slice for all, so that a start that they share is stacked once.
        starts = self.work.starts(list(self.residuals.values()))
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
        eqns, starts = self.work.backward_slice(list(roots.values()))
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
    moved = _Moved(kinds, scan.consts, _spare(scan))
    if not moved.results:
        return None
    fresh, first = moved.copied()
    pairs = list(zip(scan.consts, scan.body_consts, strict=True))
    names = {inner: fresh[v] for v, inner in pairs if v in moved.results}
    kept = [pair for pair in pairs if pair[0] not in moved.results]
    eqn, body = scan.replace(
        [*(v for v, _ in kept), *moved.starts],
        scan.xs,
        [*(inner for _, inner in kept), *(fresh[v] for v in moved.starts)],
        scan.body_xs,
        first,
        names,
        {},
        list(zip(scan.ys, scan.body_ys, strict=True)),
    )
    return replace_scans(kinds.program, {id(scan.eqn): (eqn, body)})


def _sink_into_branches(kinds: Environment, eqn: Eqn) -> InlinedJaxpr | None:
    """Move the cheap equations that compute partitioned operands into the branches.

    As `_sink` does for a scan: what a branch reads is then not in memory for all groups
    at once. None if there is nothing to move.
    """
    operands = eqn.invars[1:]
    moved = _Moved(kinds, operands, 0)
    if not moved.results:
        return None
    kept = [i for i, v in enumerate(operands) if v not in moved.results]
    branches = []
    for body in kinds.program.bodies(eqn):
        fresh, first = moved.copied()
        names = {
            own: fresh[v]
            for v, own in zip(operands, body.invars, strict=True)
            if v in moved.results
        }
        renamed = [(e, with_names(e, names)) for e in body.eqns]
        outs = substitute(body.outvars, names)
        new = InlinedJaxpr(
            [*(body.invars[i] for i in kept), *(fresh[v] for v in moved.starts)],
            live_equations([*first, *(e for _, e in renamed)], outs),
            outs,
            body.consts,
            with_keys(body.known_bodies, renamed),
        )
        new.known_arguments = body.known_arguments
        branches.append(new)
    invars = [eqn.invars[0], *(operands[i] for i in kept), *moved.starts]
    new = without_branches(eqn).replace(invars=invars)
    return replace_loops(kinds.program, {id(eqn): (new, tuple(branches))})


class _Moved:
    """What to compute in the bodies of a loop or branch instead of before it.

    Attributes:
      results: The operands that are computed there; {}: none is worth it. A dict, as a
        set would make the order of operands depend on identities.
      starts: The variables that are operands instead.
    """

    def __init__(self, kinds: Environment, operands: Sequence[Var], spare: float):
        program = kinds.program
        partitioned = {v for v in operands if kinds[v].axis == 0}
        eqns = [
            part for eqn in program.eqns for part in _with_cheap_part(eqn, partitioned)
        ]
        # An observable variable has no definition here: the slice starts from it.
        definition = definitions(eqns)
        for var in bitwise_observable(program):
            definition.pop(var, None)
        # Global values are computed once by the server, not by each group in each step.
        of_groups = {
            v: e for v, e in definition.items() if kinds[v].partitioned and _may_move(e)
        }
        self.results = {
            v: None
            for v in operands
            if v in partitioned and v in of_groups and is_cheap(v, of_groups.get, spare)
        }
        # No start is moved by a later call, so the calls come to an end: each start is
        # an argument, a constant, observable, global, or not cheap.
        needed, self.starts = backward_slice(self.results, of_groups, lambda *_: True)
        self._eqns = [e for e in eqns if id(e) in needed]

    def copied(self) -> tuple[dict[Var, Var], list[Eqn]]:
        """Copy the equations, with fresh variables for starts and results."""
        again = map(_compat.as_rematerialized, self._eqns)
        return copy_equations(again, self.starts)


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
        var in consts
        and _may_move(part_of(eqn, [var is other for other in eqn.outvars]))
        for var in eqn.outvars
    ]
    return [eqn, part_of(eqn, cheap)] if any(cheap) else [eqn]


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
