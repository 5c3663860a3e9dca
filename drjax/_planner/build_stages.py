"""Cutting a flat program at its communication: levels become rounds, work stages.

The stages are cut out of the flat program at its communication. Each is traced anew
as a function of its inputs and so type-checked, and its results are compared with the
types that the program gave them.

What does not cross a cut: a broadcast value is an input of every local stage that
uses it (groups never store copies of global values), and so is a scattered one. What
does: partitioned values that a later level uses are outputs of a local stage.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from drjax import _compat, primitives
from drjax._planner import group_index
from drjax._planner.inline import Flat
from drjax._planner.naming import function_name
from drjax._planner.no_rematerialize import exact
from drjax._planner.partitioning.infer import Kinds
from drjax._planner.partitioning.kind import Kind
from drjax._planner.rounds import Levels, reduction
from drjax._planner.stage_values import Places, spread
from drjax.plan import Loop, Plan, Reduce, Round, Stage

_TO_PARTITIONED = (
    primitives.broadcast_p,
    primitives.scatter_p,
    primitives.partition_index_p,
)


class Cutter:
    """Makes the plan of one flat program.

    Args:
      program: The program.
      kinds: The kinds of its variables.
      results: The kind that each result must have. A global value may be wanted as
        a partitioned one.
      arguments: A name for each argument.
      recompute: Whether a level repeats the work of earlier levels that it needs,
        instead of each group keeping its results. Work with effects is never repeated,
        nor what an extremum is taken of.
      called: A name for each result, if it has one.
    """

    def __init__(
        self,
        program: Flat,
        kinds: Kinds,
        results: Sequence[Kind],
        arguments: Sequence[str],
        recompute: bool,
        called: Sequence[str] = (),
    ):
        self.program, self.kinds, self.results = program, kinds, results
        self.partition, self.recompute = kinds.partition, recompute
        self.levels, self._exact = Levels(program, kinds), exact(program)
        self.at = Places(program, kinds, arguments, called)
        self._order = {id(e): i for i, e in enumerate(program.eqns)}

    def is_work(self, eqn) -> bool:
        """Whether a partitioned equation is work, not a change of place."""
        return eqn.primitive not in _TO_PARTITIONED

    @functools.cache  # noqa: B019
    def leaves(self, level: int) -> list[tuple[Any, int]]:
        """What leaves the groups at the end of a level: `(variable, group axis)`."""
        found = [(e.invars[0], 0) for e in self.levels.reduces.get(level, ())]
        for eqn in self.levels.loops.get(level, ()):
            needs = self.kinds.loops[eqn].ins
            found += [
                (v, need.axis)
                for v, need in zip(eqn.invars, needs, strict=True)
                if need.axis is not None
            ]
        found += [
            (v, kind.axis)
            for v, kind in zip(self.program.outvars, self.results, strict=True)
            if kind.axis is not None and self.levels.of(v) == level
        ]
        return _unique(found)

    # -----------------------------------------------------------------------------
    # The plan

    def plan(self, name: str, in_tree: Any = None, out_tree: Any = None) -> Plan:
        tables = self.levels.reduces, self.levels.loops
        levels = [level for table in tables for level in table]
        for level, eqns in self.levels.local.items():
            if any(map(self.is_work, eqns)):
                levels.append(level)
        outvars = self.program.outvars
        wanted = set()  # global values that someone needs
        for var, kind in zip(outvars, self.results, strict=True):
            if kind.partitioned:
                levels.append(self.levels.of(var))
            else:
                wanted.add(var)
        count = self._count = 1 + max(levels, default=-1)
        locals_ = [self._local(level) for level in range(count)]
        loops = [tuple(map(self._loop, self.levels.loops.get(level, ())))
                 for level in range(count)]  # fmt: skip
        for _, broadcast, scatter, _ in locals_:
            wanted |= {*broadcast, *(var for var, _ in scatter)}
        for eqns in self.levels.loops.values():
            for eqn in eqns:
                needs = self.kinds.loops[eqn].ins
                wanted |= {
                    v for v, need in zip(eqn.invars, needs, strict=True)
                    if not need.partitioned
                }  # fmt: skip
        servers = [self._server(level, wanted) for level in reversed(range(count + 1))]
        servers.reverse()
        rounds = tuple(
            Round(
                server,
                tuple(map(self.at.value, broadcast)),
                tuple(
                    (self.at.value(v), self.at.row_value(v, axis))
                    for v, axis in scatter
                ),
                stage,
                reduces,
                loops_here,
            )
            for server, (stage, broadcast, scatter, reduces), loops_here in zip(
                servers[:-1], locals_, loops, strict=True
            )
        )
        outputs = [
            self.at.value(v) if kind.axis is None else self.at.sent(v, kind.axis)
            for v, kind in zip(outvars, self.results, strict=True)
        ]
        inputs = tuple(map(self.at.value, self.program.invars))
        return Plan(
            name, self.partition, rounds, servers[-1], inputs, tuple(outputs),
            in_tree, out_tree,
        )  # fmt: skip

    def _server(self, level: int, wanted: set) -> Stage:
        """Global work of a level; adds what it needs to `wanted`."""
        kept: list[Any] = []
        for eqn in reversed(self.levels.server.get(level, [])):
            if eqn.effects or any(v in wanted for v in eqn.outvars):
                kept.append(eqn)
                wanted |= {v for v in eqn.invars if not isinstance(v, Literal)}
        kept.reverse()
        made = [v for e in kept for v in e.outvars if v in wanted]
        consts: dict[Any, Any] = self.program.consts
        if level == 0:
            made = [c for c in consts if c in wanted] + made
        own = {v for e in kept for v in e.outvars}
        needed = [v for e in kept for v in e.invars if not isinstance(v, Literal)]
        inputs = _unique(v for v in needed if v not in own and v not in consts)

        def run(*args):
            known = {**consts, **dict(zip(inputs, args, strict=True))}
            for eqn in kept:
                operands = [
                    v.val if isinstance(v, Literal) else known[v] for v in eqn.invars
                ]
                outs = _compat.bind_equation(eqn, operands)
                known.update(zip(eqn.outvars, outs, strict=True))
            return [known[v] for v in made]

        ins, outs = map(self.at.value, inputs), map(self.at.value, made)
        return _stage("server", tuple(ins), tuple(outs), run, numbered=False)

    def _local(self, level: int):
        """`(stage, broadcast vars, scattered (var, axis), reduces)` of a level."""
        eqns, made = self._work(level), self._made(level)
        sent = [x for x in self.leaves(level) if not self.at.is_row(*x)]
        passed = _unique(
            e.invars[0]
            for e in self.levels.reduces.get(level, ())
            if self.at.is_row(e.invars[0], 0) and e.invars[0] not in made
        )
        kept = [v for v in made if self._is_kept(v, level)]
        once = self._exact.intersection(kept)
        needs = [s for e in eqns for s in self.at.sources(e)]
        needs += [self.at.source(*x) for x in sent] + [("row", v) for v in passed]
        needs += [
            self.at.copy(what[0].invars[0]) for how, what in needs if how == "spread"
        ]
        broadcast = _unique(what for how, what in needs if how == "global")
        scatter = _unique(what for how, what in needs if how == "scatter")
        rows = _unique(what for how, what in needs if how == "row" and what not in made)

        def run(group, *args):
            known = dict(zip([*broadcast, *scatter, *rows], args, strict=True))

            def read(source):
                how, what = source
                if how == "literal":
                    return what
                if how == "number":
                    return group
                if how == "spread":
                    eqn, axis = what
                    return spread(eqn, axis, read(self.at.copy(eqn.invars[0])))
                return known[what]

            for eqn in eqns:
                operands = list(map(read, self.at.sources(eqn)))
                outs = self._run_row(eqn, group, operands)
                for var, out in zip(eqn.outvars, outs, strict=True):
                    if var in made:
                        known[var] = _once(out) if var in once else out
            sent_on = [read(self.at.source(*x)) for x in sent]
            return [*(known[v] for v in kept), *sent_on, *(known[v] for v in passed)]

        inputs = [*map(self.at.value, broadcast)]
        inputs += [self.at.row_value(var, axis) for var, axis in scatter]
        inputs += map(self.at.value, rows)
        outputs = [*map(self.at.value, kept), *(self.at.sent(*x) for x in sent)]
        outputs += [self.at.passed(v, level) for v in passed]
        name = " + ".join(_unique(_work_names(eqns))) or "rows"
        stage = _stage(name, tuple(inputs), tuple(outputs), run, numbered=True)
        reduces = tuple(
            Reduce(
                str(reduction(e.primitive)),
                self.at.passed(e.invars[0], level)
                if e.invars[0] in passed
                else self.at.sent(e.invars[0], 0),
                self.at.value(e.outvars[0]),
            )
            for e in self.levels.reduces.get(level, ())
        )
        return stage, broadcast, scatter, reduces

    def _is_kept(self, var, level: int) -> bool:
        """Whether a row that a stage makes leaves it."""
        if any(v is var for v, axis in self.leaves(level) if self.at.is_row(v, axis)):
            return True
        return self.levels.of(var) == level < self._last_use.get(var, -1)

    @functools.cached_property
    def _last_use(self) -> dict[Any, int]:
        """The last level that needs a row of an earlier one."""
        return {v: at for at in range(self._count) for v in self._external(at)}

    @functools.cache  # noqa: B019  (the cutter lives as long as its plan is made)
    def _external(self, level: int) -> frozenset:
        """The rows that a level needs of earlier ones."""
        eqns = self._work(level)
        needed = {w for e in eqns for how, w in self.at.sources(e) if how == "row"}
        needed |= {v for v, axis in self.leaves(level) if self.at.is_row(v, axis)}
        return frozenset(needed - self._made(level).keys())

    @functools.cache  # noqa: B019
    def _work(self, level: int) -> tuple:
        """The equations of a level's stage, those that it repeats included."""
        eqns = [e for e in self.levels.local.get(level, ()) if self.is_work(e)]
        if not self.recompute:
            return tuple(eqns)
        rows = [v for v, axis in self.leaves(level) if self.at.is_row(v, axis)]
        todo = eqns + [self.at.definition[v] for v in rows if self._repeatable(v)]
        found = {id(e): e for e in todo}
        while todo:
            for how, what in self.at.sources(todo.pop()):
                if how == "row" and self._repeatable(what):
                    eqn = self.at.definition[what]
                    if id(eqn) not in found:
                        found[id(eqn)] = eqn
                        todo.append(eqn)
        return tuple(sorted(found.values(), key=lambda e: self._order[id(e)]))

    def _made(self, level: int) -> dict[Any, None]:
        """What the stage of a level makes, in order: not what it must not repeat."""
        made = (v for eqn in self._work(level) for v in eqn.outvars)
        return dict.fromkeys(
            v for v in made if v not in self._exact or self.levels.of(v) == level
        )

    def _repeatable(self, var) -> bool:
        eqn = self.at.definition.get(var)
        if eqn is None or eqn.effects or var in self._exact:
            return False
        return not self.kinds.is_loop(eqn)

    def _run_row(self, eqn, group, operands) -> list:
        """The results of a local equation for one group."""
        if eqn.primitive is primitives.map_fn_p:
            jaxpr = eqn.params["jaxpr"]
            return group_index.evaluate(jaxpr, group, self.partition, *operands)
        rows = self.kinds.rows(eqn)
        assert rows is not None
        return rows.run(eqn, operands)

    # -----------------------------------------------------------------------------
    # Loops

    def _loop(self, eqn) -> Loop:
        op, loop = eqn.primitive.name, self.kinds.loops[eqn]
        ins, outs = loop.ins, loop.outs
        names = [self.at.names.of(v) for v in eqn.invars]
        inputs = [
            self.at.value(v) if need.axis is None else self.at.sent(v, need.axis)
            for v, need in zip(eqn.invars, ins, strict=True)
        ]
        outputs = tuple(map(self.at.value, eqn.outvars))
        name = self.at.names.fresh(op)
        parts: dict[str, Any] = {}
        results = [outs] * len(loop.bodies)
        arguments = [names] * len(loop.bodies)
        if op == "scan":
            consts, carry = _compat.scan_sizes(eqn)
            first = consts + carry
            results = [[*outs[:carry], *(_step(kind) for kind in outs[carry:])]]
            arguments = [[*names[:first], *(f"{x}[step]" for x in names[first:])]]
            parts = dict(
                consts=(consts,), carry=carry, length=eqn.params["length"],
                reverse=eqn.params["reverse"],
            )  # fmt: skip
        elif op == "while":
            n_cond, n_body = (eqn.params[f"{p}_nconsts"] for p in ("cond", "body"))
            n = n_cond + n_body
            results[0] = [Kind("global")]
            arguments = [names[:n_cond] + names[n:], names[n_cond:]]
            parts = dict(consts=(n_cond, n_body), carry=len(names) - n)
        else:
            arguments = [names[1:]] * len(loop.bodies)
        bodies = tuple(
            Cutter(kinds.program, kinds, wanted, named, self.recompute).plan(
                f"{name} body {i}"
            )
            for i, (kinds, wanted, named) in enumerate(
                zip(loop.bodies, results, arguments, strict=True)
            )
        )
        return Loop(op, name, tuple(inputs), outputs, bodies, **parts)


def _once(row):
    """A row that the compiler must not compute twice, in two ways."""
    if not isinstance(row, jax.Array):  # a constant
        return row
    if jax.dtypes.issubdtype(row.dtype, jax.dtypes.extended):
        return row
    return jax.lax.optimization_barrier(row)


def _step(kind: Kind) -> Kind:
    """The kind of one step of what a scan stacks."""
    return kind if kind.axis is None else Kind(kind.name, kind.axis - 1)


def _work_names(eqns) -> list[str]:
    return [
        function_name(e.params["name"])
        for e in eqns
        if e.primitive is primitives.map_fn_p
    ]


def _stage(name: str, inputs, outputs, run, numbered: bool) -> Stage:
    """Trace `run` as a stage, which gives each equation its types, and check them."""
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    if numbered:
        avals = [jax.ShapeDtypeStruct((), np.int32), *avals]
    jaxpr = _compat.without_dead_code(jax.make_jaxpr(run)(*avals))
    avals_out: list[Any] = jaxpr.out_avals
    for aval, value in zip(avals_out, outputs, strict=True):
        assert (aval.shape, aval.dtype) == (value.shape, value.dtype), (aval, value)
    return Stage(name, tuple(inputs), tuple(outputs), jaxpr)


def _unique(items) -> list:
    return list(dict.fromkeys(items))
