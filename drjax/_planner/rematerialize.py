"""Residuals of a loop over rounds: computed again instead of stacked.

The derivative of a scan is a scan that runs backwards and takes, step by step, what
the first one kept. Where that is a partitioned value, memory grows with the number of
groups times the number of steps. `recompute` rewrites such a pair of scans: the first
keeps only global values (what it carried, and what it reduced), and the second starts
each step with the groups' work of that step.

    scan F: carry, x_t -> y_t (partitioned)     scan B: ..., y_t -> ...
    becomes F': carry, x_t -> carry_t           B': ..., carry_t, x_t -> y_t -> ...

What does not change from step to step is kept by JAX outside the loop, a row for each
group. Where that is cheap, pointwise work, it moves into the loop, too.
"""

from typing import Any

from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax._planner.inline import Flat, live_equations
from drjax._planner.no_rematerialize import exact
from drjax._planner.partitioning.infer import Kinds
from drjax._planner.rounds import is_reduction
from drjax._planner.unbatching.rules import ROW_RULES
from drjax.primitives import broadcast_p, map_fn_p, partition_index_p, scatter_p


def recompute(program: Flat, kinds: Kinds) -> Flat | None:
    """The program with one more scan, or pair of scans, rewritten; or None."""
    for eqn in program.eqns:
        if eqn.primitive.name == "scan" and kinds.is_loop(eqn):
            sunk = _sink(program, kinds, _Scan(program, eqn))
            if sunk is not None:
                return sunk
            pair = _Pair(program, kinds, eqn)
            if pair.residuals:
                return pair.rewritten()
    return None


class _Scan:
    """The parts of a scan equation and of its body."""

    def __init__(self, program: Flat, eqn):
        self.eqn = eqn
        (self.body,) = program.bodies(eqn)
        n_consts, n_carry = _compat.scan_sizes(eqn)
        first = n_consts + n_carry
        self.consts, self.carry, self.xs = _split(eqn.invars, n_consts, first)
        self.body_consts, self.body_carry, self.body_xs = _split(
            self.body.invars, n_consts, first
        )
        self.n_carry = n_carry
        self.ys, self.body_ys = eqn.outvars[n_carry:], self.body.outvars[n_carry:]

    def replaced(self, consts, xs, body_consts, body_xs, body_eqns, more_consts, ys):
        """The equation and the body with other parts; `ys` are pairs (outer, body)."""
        eqn = self.eqn.replace(
            invars=[*consts, *self.carry, *xs],
            outvars=[*self.eqn.outvars[: self.n_carry], *(y for y, _ in ys)],
            params={
                "sizes": (len(consts), self.n_carry),
                "length": self.eqn.params["length"],
                "reverse": self.eqn.params["reverse"],
            },
        )
        body = Flat(
            [*body_consts, *self.body_carry, *body_xs],
            body_eqns,
            [*self.body.outvars[: self.n_carry], *(y for _, y in ys)],
            {**self.body.consts, **more_consts},
        )
        return eqn, body


class _Pair:
    """A scan and those that take its stacked partitioned values.

    Attributes:
      residuals: For each such value of the first scan, its variable in the body.
    """

    def __init__(self, program: Flat, kinds: Kinds, eqn):
        self.program, self.first = program, _Scan(program, eqn)
        self.body_kinds = kinds.loops[eqn].bodies[0]
        self.definition = {v: e for e in self.first.body.eqns for v in e.outvars}
        self.exact = exact(self.first.body)
        self.residuals: dict[Any, Any] = {}
        for outer, inner in zip(self.first.ys, self.first.body_ys, strict=True):
            found = self.body_kinds[inner].partitioned and self._only_scanned(outer)
            if found and self._slice([inner]) is not None:
                self.residuals[outer] = inner

    def _only_scanned(self, var) -> bool:
        """Whether all that happens to a stack is another scan over it."""
        if var in self.program.outvars:
            return False
        users = [e for e in self.program.eqns if var in e.invars]
        length = self.first.eqn.params["length"]
        return bool(users) and all(
            e.primitive.name == "scan"
            and e.params["length"] == length
            and var in (scan := _Scan(self.program, e)).xs
            and var not in (*scan.consts, *scan.carry)
            for e in users
        )

    def _slice(self, wanted: list) -> "tuple[list, list] | None":
        """`(equations that compute these again, variables they start from)`."""
        eqns, starts, todo = {}, {}, list(wanted)
        while todo:
            var = todo.pop()
            if isinstance(var, Literal) or var in self.first.body.consts:
                continue
            eqn = self.definition.get(var)
            communicates = eqn is not None and (
                is_reduction(eqn, self.body_kinds) or self.body_kinds.is_loop(eqn)
            )
            if eqn is None or communicates:
                stored = communicates or var in self.first.body_carry
                if stored and self.body_kinds[var].partitioned:
                    return None
                starts[var] = None
            elif eqn.effects or var in self.exact:
                return None
            elif id(eqn) not in eqns:
                eqns[id(eqn)] = eqn
                todo += eqn.invars
        ordered = [e for e in self.first.body.eqns if id(e) in eqns]
        return ordered, list(starts)

    def rewritten(self) -> Flat:
        first = self.first
        found = self._slice(list(self.residuals.values()))
        assert found is not None
        _, starts = found
        given = {*first.body_consts, *first.body_xs}
        length = first.eqn.params["length"]
        self.stacks = {
            v: _compat.new_var(_compat.stacked_aval(v.aval, length))
            for v in starts
            if v not in given
        }
        ys = [
            pair
            for pair in zip(first.ys, first.body_ys, strict=True)
            if pair[0] not in self.residuals
        ]
        ys += [(stack, v) for v, stack in self.stacks.items()]
        replaced = {
            id(first.eqn): first.replaced(
                first.consts, first.xs, first.body_consts, first.body_xs,
                first.body.eqns, {}, ys,
            )
        }  # fmt: skip
        for eqn in self.program.eqns:
            if any(v in self.residuals for v in _variables(eqn)):
                replaced[id(eqn)] = self._second(_Scan(self.program, eqn))
        return _with(self.program, replaced)

    def _second(self, scan: _Scan):
        """A scan over residuals, which computes them again first."""
        taken = list(zip(scan.xs, scan.body_xs, strict=True))
        wanted = {b: self.residuals[x] for x, b in taken if x in self.residuals}
        found = self._slice(list(wanted.values()))
        assert found is not None
        eqns, starts = found
        fresh, work = _copied(eqns, starts)
        first = self.first
        outer = dict(zip(first.body_consts, first.consts, strict=True))
        steps = dict(zip(first.body_xs, first.xs, strict=True)) | self.stacks
        consts = [v for v in starts if v in outer]
        xs = [v for v in starts if v in steps]
        names = {b: fresh[inner] for b, inner in wanted.items()}
        for eqn in scan.body.eqns:
            work.append(eqn.replace(invars=_renamed(eqn, names)))
        kept = [pair for pair in taken if pair[0] not in self.residuals]
        new = scan.replaced(
            [*scan.consts, *(outer[v] for v in consts)],
            [*(x for x, _ in kept), *(steps[v] for v in xs)],
            [*scan.body_consts, *(fresh[v] for v in consts)],
            [*(b for _, b in kept), *(fresh[v] for v in xs)],
            work,
            first.body.consts,
            list(zip(scan.ys, scan.body_ys, strict=True)),
        )
        eqn, body = new
        body.outvars = [names.get(v, v) for v in body.outvars]
        body.known_bodies = {**first.body.known_bodies, **scan.body.known_bodies}
        return eqn, body


def _sink(program: Flat, kinds: Kinds, scan: _Scan) -> Flat | None:
    """Move the cheap work that a scan's partitioned constants need into its steps."""
    definition = {v: e for e in program.eqns for v in e.outvars}
    for var in exact(program):
        definition.pop(var, None)
    moved = {
        v
        for v in scan.consts
        if kinds[v].axis == 0 and v in definition and _is_cheap(definition[v])
    }
    if not moved:
        return None
    eqns, starts, todo = {}, {}, list(moved)
    while todo:
        var = todo.pop()
        if var in program.consts:
            starts[var] = None
            continue
        eqn = definition.get(var)
        if eqn is None or not kinds[var].partitioned or not _is_cheap(eqn):
            starts[var] = None
        elif id(eqn) not in eqns:
            eqns[id(eqn)] = eqn
            todo += _variables(eqn)
    fresh, work = _copied([e for e in program.eqns if id(e) in eqns], starts)
    pairs = list(zip(scan.consts, scan.body_consts, strict=True))
    names = {inner: fresh[v] for v, inner in pairs if v in moved}
    work += [e.replace(invars=_renamed(e, names)) for e in scan.body.eqns]
    kept = [pair for pair in pairs if pair[0] not in moved]
    eqn, body = scan.replaced(
        [*(v for v, _ in kept), *starts],
        scan.xs,
        [*(inner for _, inner in kept), *(fresh[v] for v in starts)],
        scan.body_xs,
        work,
        {},
        list(zip(scan.ys, scan.body_ys, strict=True)),
    )
    body.outvars = [names.get(v, v) for v in body.outvars]
    body.known_bodies = scan.body.known_bodies
    return _with(program, {id(scan.eqn): (eqn, body)})


def _is_cheap(eqn) -> bool:
    """Whether an equation is pointwise work or a change of shape or place."""
    if eqn.effects or eqn.primitive is lax.dot_general_p:
        return False
    if eqn.primitive is map_fn_p or eqn.primitive.name == "jit":
        return all(map(_is_cheap, _compat.open_jaxpr(eqn.params["jaxpr"]).eqns))
    return eqn.primitive in (broadcast_p, scatter_p, partition_index_p) or (
        eqn.primitive.name in ROW_RULES or eqn.primitive.name == "iota"
    )


def _copied(eqns: list, starts) -> tuple[dict, list]:
    """Equations in new variables: `(new name of each variable, the equations)`."""
    fresh: dict[Any, Any] = {v: _compat.new_var(v.aval) for v in starts}
    work = []
    for eqn in eqns:
        for var in eqn.outvars:
            fresh[var] = _compat.new_var(var.aval)
        outs = [fresh[v] for v in eqn.outvars]
        work.append(eqn.replace(invars=_renamed(eqn, fresh), outvars=outs))
    return fresh, work


def _with(program: Flat, replaced: dict[int, tuple]) -> Flat:
    """The program with other equations and bodies, by the identity of the old ones."""
    eqns, bodies = [], {}
    for eqn in program.eqns:
        new, body = replaced.get(id(eqn), (eqn, None))
        eqns.append(new)
        if body is not None:
            bodies[new] = (body,)
    known = {**program.known_bodies, **bodies}
    live = live_equations(eqns, program.outvars)
    return Flat(program.invars, live, program.outvars, program.consts, known)


def _variables(eqn) -> list:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _renamed(eqn, names: dict) -> list:
    return [v if isinstance(v, Literal) else names.get(v, v) for v in eqn.invars]


def _split(values, first: int, second: int) -> tuple[list, list, list]:
    return list(values[:first]), list(values[first:second]), list(values[second:])
