"""Rematerialization of residuals in the branches of a `lax.cond`.

Input: the kinds of an inlined jaxpr, and a cond of it whose branches have work of the
groups. Output: the jaxpr, in which a backward cond rematerializes residuals, or None.

The derivative of a cond is a cond with the same index, whose branches read the
residuals of the same branches of the forward cond. So each branch, and the one that
reads its residuals, are together a jaxpr without the conds around them, in which

* the second may compute again what it reads of the first, from its operands and from
  what the first has communicated, as a backward scan does (`rematerialize_loops.py`);
* loops and conds inside are pairs like any others.

It is split again: what the second branch then reads of the first one is a result of the
forward cond, for which the other branches return zeros. Branches that read values of
the same types share these results.

Soundness: both conds have the same index, which is one variable, or computed alike from
the same integers, so that the second branch runs if and only if the first one has run,
on the same operands.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
from jax import lax

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, Aval, Eqn, Var
from drjax._jaxprs.eval_jaxpr import literal_value
from drjax._jaxprs.walk import (
    copy_equations,
    definitions,
    live_equations,
    substitute,
    variables,
)
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.partitioning.environment import Environment, LoopKinds
from drjax._planner.partitioning.kind import Kind
from drjax._planner.rematerialize_nested import (
    Rewrite,
    crossing,
    divided,
    has_loops,
    used_constants,
    with_keys,
    with_names,
)
from drjax._planner.rematerialized import (
    BodyWork,
    indices_of_branches,
    same_integer,
    worth_more,
)
from drjax._planner.scans import replace_loops
from drjax._planner.work import bytes_of
from drjax._sharding.planning_context import outside_meshes


def rematerialize_in_branches(
    kinds: Environment, eqn: Eqn, rewrite: Rewrite
) -> InlinedJaxpr | None:
    """Rewrite a cond, and one with the same index that reads its results.

    None if there is none, or nothing to rewrite. `rewrite` is for what is inside.
    """
    results, definition = {*eqn.outvars}, definitions(kinds.program.eqns)
    for other in kinds.program.eqns:
        if other is eqn or other.primitive.name != "cond" or not kinds.is_loop(other):
            continue
        reads = not results.isdisjoint(variables(other.invars))
        indices = (_index(kinds, e, definition) for e in (other, eqn))
        if reads and same_integer(definition, *indices):
            pair = Pair(kinds, eqn, other)
            new = pair.rematerialized() or pair.rewritten(rewrite)
            if new is not None:
                return new
    return None


# Its shape and dtype.
_Type: TypeAlias = tuple[tuple[int, ...], Any]


def _index(kinds: Environment, eqn: Eqn, definition: dict[Var, Eqn]) -> Atom:
    """Return the index of a cond, before `lax.switch` has clamped it again.

    The index of a cond is one of a branch: to clamp it to these changes nothing.
    """
    index, last = eqn.invars[0], len(kinds.program.bodies(eqn)) - 1
    source = definition.get(index)
    if source is None or source.primitive.name != "clamp":
        return index
    low, var, high = source.invars
    if not (isinstance(low, Literal) and isinstance(high, Literal)):
        return index
    return var if (int(low.val), int(high.val)) == (0, last) else index


@dataclass(frozen=True)
class _Branch:
    """What a branch of both conds does, in variables of the forward one.

    Attributes:
      first: The equations of the forward branch.
      second: Those of the backward branch.
      outs: What the backward branch returns.
      consts: The values of constants, of both.
      known_bodies: The bodies of loops, of both.
      loops: The kinds of loops, of both.
    """

    first: list[Eqn]
    second: list[Eqn]
    outs: list[Atom]
    consts: dict[Var, Any]
    known_bodies: dict[Any, tuple[InlinedJaxpr, ...]]
    loops: dict[Any, LoopKinds]


class Pair:
    """A forward cond, and a backward one that reads its results, branch by branch."""

    def __init__(self, kinds: Environment, forward: Eqn, backward: Eqn):
        self.kinds, self._program = kinds, kinds.program
        self.forward, self._backward = forward, backward
        self._first, self._second = (
            kinds.loops[eqn].bodies for eqn in (forward, backward)
        )
        # Where the backward cond reads what a branch of the forward one has.
        operands = {v: i for i, v in reversed([*enumerate(forward.invars[1:])])}
        results = {v: i for i, v in enumerate(forward.outvars)}
        self._results = dict[int, int]()
        self._names: list[dict[Var, Var]] = [{} for _ in self._first]
        self._own = list[int]()
        for place, var in enumerate(backward.invars[1:]):
            if var in results and self._rename(place, results[var], of_result=True):
                self._results[place] = results[var]
            elif var not in operands or not self._rename(place, operands[var], False):
                self._own.append(place)
        others = [e for e in self._program.eqns if e is not backward]
        used = {*variables(self._program.outvars)}
        used.update(v for e in others for v in variables(e.invars))
        used.update(backward.invars[1 + place] for place in self._own)
        # The results of the forward cond that it returns in any case.
        self._kept = [i for i, v in enumerate(forward.outvars) if v in used]

    def _rename(self, place: int, index: int, of_result: bool) -> bool:
        """Name an argument of the backward branches as what it is in the forward ones.

        False if the kinds differ in a branch that uses it.
        """
        names = list[tuple[Var, Var] | None]()
        for first, second in zip(self._first, self._second, strict=True):
            argument = second.program.invars[place]
            program = first.program
            var = (program.outvars if of_result else program.invars)[index]
            if argument not in _used(second.program):
                names.append(None)
            elif first[var] == second[argument]:
                names.append((argument, var))
            else:
                return False
        for table, pair in zip(self._names, names, strict=True):
            table.update([pair] if pair else [])
        return True

    def _branches(self) -> list[_Branch]:
        branches = []
        for first, second, names in zip(
            self._first, self._second, self._names, strict=True
        ):
            a, b = first.program, second.program
            renamed = [(e, with_names(e, names)) for e in b.eqns]
            bodies = {**a.known_bodies, **with_keys(b.known_bodies, renamed)}
            branches.append(
                _Branch(
                    a.eqns,
                    [new for _, new in renamed],
                    substitute(b.outvars, names),
                    {**b.consts, **a.consts},
                    bodies,
                    {**first.loops, **with_keys(second.loops, renamed)},
                )
            )
        return branches

    def rematerialized(self) -> InlinedJaxpr | None:
        """Let the backward branches compute residuals again; None: none is worth it."""
        residuals = self.worth()
        if not residuals:
            return None
        branches = []
        for i, branch in enumerate(self._branches()):
            roots = self._roots(i, residuals)
            eqns, _ = self._work[i].backward_slice(roots)
            fresh, again = copy_equations(map(_compat.as_rematerialized, eqns), ())
            names = {v: fresh[v] for v in roots if v in fresh}
            renamed = [(e, with_names(e, names)) for e in branch.second]
            branches.append(
                replace(
                    branch,
                    second=[*again, *(new for _, new in renamed)],
                    outs=substitute(branch.outs, names),
                    known_bodies={
                        **branch.known_bodies,
                        **with_keys(branch.known_bodies, renamed),
                    },
                )
            )
        return self._joined(branches)

    def worth(self) -> list[int]:
        """Choose the results of the forward cond to compute again, by their bytes."""
        self._work = [BodyWork(kinds) for kinds in self._first]
        indices = {
            place
            for kinds in self._second
            for place, v in enumerate(kinds.program.invars)
            if v in kinds.program.memoize(indices_of_branches, kinds.program)
        }
        read = dict.fromkeys(
            i for place, i in self._results.items() if place not in indices
        )
        candidates = [i for i in read if i not in self._kept]
        # First those of groups: what these need of the server is global, and few bytes.
        chosen = self._worth_more(candidates, [], partitioned=True)
        return sorted(chosen + self._worth_more(candidates, chosen, partitioned=False))

    def _worth_more(
        self, candidates: Sequence[int], chosen: Sequence[int], partitioned: bool
    ) -> list[int]:
        results = self.forward.outvars
        return worth_more(
            [
                i
                for i in candidates
                if self.kinds[results[i]].partitioned == partitioned
            ],
            lambda which: bytes_of(results[i] for i in which),
            lambda which: self._bytes_kept([*chosen, *which], partitioned),
        )

    def _bytes_kept(self, residuals: Sequence[int], partitioned: bool) -> float:
        """Count the bytes of what the forward cond returns in place of residuals."""
        types, examples = Counter[_Type](), dict[_Type, Var]()
        for i, kinds in enumerate(self._first):
            body = kinds.program
            known = {*body.invars, *(body.outvars[j] for j in self._kept)}
            starts = self._work[i].starts(self._roots(i, residuals))
            kept = [
                v
                for v in starts
                if kinds[v].partitioned == partitioned and v not in known
            ]
            types |= Counter(map(_type, kept))
            examples.update((_type(v), v) for v in kept)
        return sum(bytes_of([examples[t]]) * n for t, n in types.items())

    def _roots(self, branch: int, residuals: Iterable[int]) -> list[Var]:
        """List what a backward branch reads of some results of the forward one."""
        read = {*self._names[branch].values()}
        outs = self._first[branch].program.outvars
        return [outs[i] for i in residuals if outs[i] in read]

    def rewritten(self, rewrite: Rewrite) -> InlinedJaxpr | None:
        """Rewrite the loops inside of the branches; None: nothing is rewritten."""
        branches, changed = self._branches(), False
        for i, (first, second) in enumerate(
            zip(self._first, self._second, strict=True)
        ):
            if not has_loops(first):
                continue
            new = rewrite(self._together(first, second, branches[i]))
            if new is None:
                continue
            changed = True
            parts = divided(new, branches[i].second)
            outs = new.outvars[len(self._kept) :]
            branches[i] = replace(
                branches[i],
                first=parts[0],
                second=parts[1],
                outs=outs,
                consts=new.consts,
                known_bodies=new.known_bodies,
            )
        return self._joined(branches) if changed else None

    def _together(
        self, first: Environment, second: Environment, branch: _Branch
    ) -> Environment:
        """Make the kinds of the jaxpr that has one branch of both conds."""
        a, b = first.program, second.program
        jaxpr = InlinedJaxpr(
            [*a.invars, *(b.invars[place] for place in self._own)],
            [*branch.first, *branch.second],
            [*(a.outvars[j] for j in self._kept), *branch.outs],
            branch.consts,
            branch.known_bodies,
        )
        jaxpr.known_arguments = {**b.known_arguments, **a.known_arguments}
        kinds: list[Kind | None] = [None] * len(jaxpr.invars)
        cells = {**second.cells, **first.cells}
        return Environment(jaxpr, self.kinds.partition, kinds, cells, branch.loops)

    def _joined(self, branches: Sequence[_Branch]) -> InlinedJaxpr:
        """Make two conds again, of which the second takes what it reads of the first.

        That are operands of the first one, results that it returns in any case, and
        results for what else the second one reads, shared by types.
        """
        forward, backward = self.forward, self._backward
        operands, results, types = set[int](), set[int](), Counter[_Type]()
        places = list[dict[Var, tuple[Any, int]]]()
        for first, second, branch in zip(
            self._first, self._second, branches, strict=True
        ):
            a, b = first.program, second.program
            own = (b.invars[place] for place in self._own)
            place: dict[Var, tuple[Any, int]] = {}
            counts = Counter[_Type]()
            for v in crossing(branch.second, branch.outs, (*own, *branch.consts)):
                if v in a.invars:
                    place[v] = "operand", a.invars.index(v)
                    operands.add(a.invars.index(v))
                elif j := [j for j in self._kept if a.outvars[j] is v]:
                    place[v] = "result", j[0]
                    results.add(j[0])
                else:
                    place[v] = _type(v), counts[_type(v)]
                    counts[_type(v)] += 1
            places.append(place)
            types |= counts
        keys = [
            *(("operand", i) for i in sorted(operands)),
            *(("result", j) for j in sorted(results)),
            *((kind, i) for kind, count in types.items() for i in range(count)),
        ]
        avals: dict[tuple[Any, int], Any] = {}
        for place in places:
            avals.update({key: v.aval for v, key in place.items()})
        more = [key for key in keys if key[0] not in ("operand", "result")]
        stored = {key: _compat.new_var(avals[key]) for key in more}
        outer = {
            **{("operand", i): forward.invars[1 + i] for i in operands},
            **{("result", j): forward.outvars[j] for j in results},
            **stored,
        }
        pairs = [
            (
                self._forward_branch(first.program, branch, place, more, avals),
                self._backward_branch(second.program, branch, place, keys, avals),
            )
            for first, second, branch, place in zip(
                self._first, self._second, branches, places, strict=True
            )
        ]
        outs = [*(forward.outvars[j] for j in self._kept), *stored.values()]
        own = [backward.invars[1 + place] for place in self._own]
        ins = [backward.invars[0], *own, *(outer[key] for key in keys)]
        new = without_branches(forward), without_branches(backward)
        firsts, seconds = zip(*pairs, strict=True)
        return replace_loops(
            self._program,
            {
                id(forward): (new[0].replace(outvars=outs), firsts),
                id(backward): (new[1].replace(invars=ins), seconds),
            },
        )

    def _forward_branch(
        self,
        old: InlinedJaxpr,
        branch: _Branch,
        place: dict[Var, tuple[Any, int]],
        more: Sequence[tuple[Any, int]],
        avals: dict[tuple[Any, int], Any],
    ) -> InlinedJaxpr:
        """Write a forward branch that returns `more` for the backward cond.

        What its backward branch does not read is zeros.
        """
        stored = {key: v for v, key in place.items()}
        zeros = {key: _zeros(avals[key]) for key in more if key not in stored}
        results = [
            *(old.outvars[j] for j in self._kept),
            *(stored[key] if key in stored else zeros[key][1] for key in more),
        ]
        consts = dict(branch.consts)
        filled = list[Eqn]()
        for eqns, _, values in zeros.values():
            filled += eqns
            consts |= values
        eqns = live_equations([*branch.first, *filled], results)
        new = InlinedJaxpr(
            old.invars,
            eqns,
            results,
            used_constants(consts, eqns, results),
            {e: branch.known_bodies[e] for e in eqns if e in branch.known_bodies},
        )
        new.known_arguments = old.known_arguments
        return new

    def _backward_branch(
        self,
        old: InlinedJaxpr,
        branch: _Branch,
        place: dict[Var, tuple[Any, int]],
        keys: Sequence[tuple[Any, int]],
        avals: dict[tuple[Any, int], Any],
    ) -> InlinedJaxpr:
        """Write a backward branch that takes what `keys` tell of the forward cond."""
        arguments = {key: _compat.new_var(avals[key]) for key in keys}
        names = {v: arguments[key] for v, key in place.items()}
        renamed = [(e, with_names(e, names)) for e in branch.second]
        new = InlinedJaxpr(
            [*(old.invars[i] for i in self._own), *arguments.values()],
            [e for _, e in renamed],
            substitute(branch.outs, names),
            used_constants(branch.consts, branch.second, branch.outs),
            with_keys(branch.known_bodies, renamed),
        )
        new.known_arguments = {
            v: x for v, x in old.known_arguments.items() if v in new.invars
        }
        return new


def _zeros(aval: Aval) -> tuple[list[Eqn], Var, dict[Var, Any]]:
    """Write the equations of an array of zeros, with the variable that it is.

    A scalar is a constant instead, which is returned, too.
    """
    with outside_meshes():
        closed = jax.make_jaxpr(lambda: lax.full(aval.shape, 0, aval.dtype))()
    raw = _compat.open_jaxpr(closed)
    names, eqns = copy_equations(raw.eqns, ())
    (result,) = raw.outvars
    if isinstance(result, Literal):
        var = _compat.new_var(aval)
        return [], var, {var: literal_value(result)}
    return eqns, names[result], {}


def _type(var: Var) -> _Type:
    return var.aval.shape, var.aval.dtype


def _used(program: InlinedJaxpr) -> set[Var]:
    reads = (v for e in program.eqns for v in variables(e.invars))
    return {*reads, *variables(program.outvars)}


def without_branches(eqn: Eqn) -> Eqn:
    """Return a cond whose branches are inlined jaxprs, in the jaxpr that has it."""
    params = {k: v for k, v in eqn.params.items() if k != "branches"}
    return eqn.replace(params=params)
