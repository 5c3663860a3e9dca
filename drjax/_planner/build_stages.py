"""Build the stages of a plan: split an inlined jaxpr at its communication.

Input: an inlined jaxpr, its kinds, the kinds that its results must have, and names.
Output: a `Plan`, whose rounds are those of `RoundAssignment` and whose loops hold plans
of their bodies.

For each round, the local stage holds its equations on partitioned values, and those of
earlier rounds that it rematerializes. The server's stage holds the global equations
that something needs: it is found by liveness, from the last round back to the first.

What enters a stage: a broadcast or scattered value is an input of every local stage
that uses it (groups never store copies of global values). What leaves it: operands of
reductions, and partitioned values that a later round needs and cannot rematerialize.

Invariants: each stage is traced as a function of its inputs, and so type-checked, and
the types of its results are compared with those of the program. No equation with
effects is in two stages. No bitwise-observable variable, one whose exact bits the
program may compare (see `no_rematerialize.py`), is computed twice.
Sharp edges: the stage of a later round may contain all local work of an earlier one;
`rematerialize=False` saves its results for all groups instead.
"""

import functools
from collections.abc import Sequence
from typing import Any, assert_never

import jax
import numpy as np
from jax.extend.core import Literal

from drjax import _compat, primitives
from drjax._jaxprs.walk import split_scan, split_while, variables
from drjax._planner import group_index
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.naming import function_name
from drjax._planner.no_rematerialize import bitwise_observable
from drjax._planner.partitioning.environment import Environment
from drjax._planner.partitioning.kind import GLOBAL, Kind, shift_axis
from drjax._planner.rounds import RoundAssignment, reduction
from drjax._planner.stage_values import (
    BroadcastOperand,
    ConstantOperand,
    ExpandedOperand,
    GroupIndexOperand,
    Operand,
    ScatteredOperand,
    SliceOperand,
    StageValues,
)
from drjax.plan import Loop, Plan, Reduce, Round, Stage

# These equations are communication down or an index: inputs of a stage, not its work.
_INPUTS_OF_STAGES = (
    primitives.broadcast_p,
    primitives.scatter_p,
    primitives.partition_index_p,
)


class StageBuilder:
    """Builds the plan of one inlined jaxpr.

    Args:
      program: The program.
      kinds: The kinds of its variables.
      results: The kind that each result must have. A global value may be required as
        a partitioned one.
      arguments: A name for each argument.
      rematerialize: Whether a round rematerializes the results of earlier rounds that
        it needs, instead of each group saving them. Equations with effects and
        bitwise-observable variables are never rematerialized.
      result_names: A name for each result, if it has one.
    """

    def __init__(
        self,
        program: InlinedJaxpr,
        kinds: Environment,
        results: Sequence[Kind],
        arguments: Sequence[str],
        rematerialize: bool,
        result_names: Sequence[str] = (),
    ):
        self.program, self.kinds, self.results = program, kinds, results
        self.partition, self.rematerialize = kinds.partition, rematerialize
        self.rounds = RoundAssignment(program, kinds)
        self._observable = bitwise_observable(program)
        self.values = StageValues(program, kinds, arguments, result_names)
        self._order = {id(e): i for i, e in enumerate(program.eqns)}

    def is_work(self, eqn) -> bool:
        """Whether a partitioned equation is computed by a local stage."""
        return eqn.primitive not in _INPUTS_OF_STAGES

    @functools.cache  # noqa: B019
    def leaving(self, index: int) -> list[tuple[Any, int]]:
        """The slices that leave the groups after a round: `(variable, group axis)`."""
        # A reduction takes groups along axis 0. Its operand may be global: then each
        # group sends its slice of it, or its copy of a broadcast.
        leaving = [(e.invars[0], 0) for e in self.rounds.reduces.get(index, ())]
        # A loop starts after the round, so what it takes is an output of the stage.
        for eqn in self.rounds.loops.get(index, ()):
            kinds = self.kinds.loops[eqn].operand_kinds
            leaving += [
                (v, kind.axis)
                for v, kind in zip(eqn.invars, kinds, strict=True)
                if kind.axis is not None
            ]
        leaving += [
            (v, kind.axis)
            for v, kind in zip(self.program.outvars, self.results, strict=True)
            if kind.axis is not None and self.rounds.round_of(v) == index
        ]
        return _unique(leaving)

    # -----------------------------------------------------------------------------
    # The plan

    def plan(self, name: str, in_tree: Any = None, out_tree: Any = None) -> Plan:
        outvars = self.program.outvars
        live = {
            v for v, k in zip(outvars, self.results, strict=True) if not k.partitioned
        }
        count = self._count = self._count_rounds()
        # Local stages and loops first: they determine which global values are live.
        locals_ = [self._local(index) for index in range(count)]
        loops = [
            tuple(map(self._loop, self.rounds.loops.get(index, ())))
            for index in range(count)
        ]
        for _, broadcast, scatter, _ in locals_:
            live |= {*broadcast, *(var for var, _ in scatter)}
        for eqns in self.rounds.loops.values():
            for eqn in eqns:
                kinds = self.kinds.loops[eqn].operand_kinds
                operands = zip(eqn.invars, kinds, strict=True)
                live |= {v for v, kind in operands if not kind.partitioned}
        # Backward, as the server computes in each round what later rounds need.
        servers = [self._server(index, live) for index in reversed(range(count + 1))]
        servers.reverse()
        rounds = tuple(
            Round(
                server,
                tuple(map(self.values.value, broadcast)),
                tuple(
                    (self.values.value(v), self.values.scattered(v, axis))
                    for v, axis in scatter
                ),
                stage,
                reduces,
                round_loops,
            )
            for server, (stage, broadcast, scatter, reduces), round_loops in zip(
                servers[:-1], locals_, loops, strict=True
            )
        )
        outputs = [
            self.values.value(v)
            if kind.axis is None
            else self.values.outgoing(v, kind.axis)
            for v, kind in zip(outvars, self.results, strict=True)
        ]
        return Plan(
            name,
            self.partition,
            rounds,
            servers[-1],
            tuple(map(self.values.value, self.program.invars)),
            tuple(outputs),
            in_tree,
            out_tree,
        )

    def _count_rounds(self) -> int:
        """The number of rounds that communicate or have local work."""
        indices = [*self.rounds.reduces, *self.rounds.loops]
        # Broadcasts and indices alone need no round: a later stage has them as inputs.
        for index, eqns in self.rounds.local.items():
            if any(map(self.is_work, eqns)):
                indices.append(index)
        for var, kind in zip(self.program.outvars, self.results, strict=True):
            if kind.partitioned:
                # A result without local work, such as a scattered argument.
                indices.append(self.rounds.round_of(var))
        return 1 + max(indices, default=-1)

    def _server(self, index: int, live: set) -> Stage:
        """The server's stage of a round; adds its operands to the `live` variables."""
        # The server keeps its values from round to round, so that only their definition
        # matters: a stage that needs none of them is empty.
        eqns: list[Any] = []
        for eqn in reversed(self.rounds.server.get(index, [])):
            if eqn.effects or any(v in live for v in eqn.outvars):
                eqns.append(eqn)
                live.update(variables(eqn.invars))
        eqns.reverse()
        results = [v for e in eqns for v in e.outvars if v in live]
        consts: dict[Any, Any] = self.program.consts
        if index == 0:
            # Constants that others need leave the server's first stage.
            results = [c for c in consts if c in live] + results
        defined = {v for e in eqns for v in e.outvars}
        operands = [v for e in eqns for v in variables(e.invars)]
        inputs = _unique(v for v in operands if v not in defined and v not in consts)

        def run(*args):
            env = {**consts, **dict(zip(inputs, args, strict=True))}
            for eqn in eqns:
                outs = _compat.bind_equation(eqn, _read(env, eqn.invars))
                env.update(zip(eqn.outvars, outs, strict=True))
            return [env[v] for v in results]

        ins, outs = map(self.values.value, inputs), map(self.values.value, results)
        return _stage("server", tuple(ins), tuple(outs), run, takes_index=False)

    def _local(self, index: int):
        """`(stage, broadcast vars, scattered (var, axis), reduces)` of a round."""
        eqns, computed = self._work(index), self._computed(index)
        # Global values that leave the groups, copied or sliced.
        outgoing = [x for x in self.leaving(index) if not self.values.is_slice(*x)]
        # A reduction of a slice of an earlier round: the stage hands it through.
        forwarded = _unique(
            e.invars[0]
            for e in self.rounds.reduces.get(index, ())
            if self.values.is_slice(e.invars[0], 0) and e.invars[0] not in computed
        )
        # Outputs of the stage: slices that it saves, then what leaves the groups.
        saved = [v for v in computed if self._is_saved(v, index)]
        fenced = self._observable.intersection(saved)
        needs: list[Operand] = [x for e in eqns for x in self.values.operands(e)]
        needs += [self.values.slice_of(*x) for x in outgoing]
        needs += [SliceOperand(v) for v in forwarded]
        # Of an expanded array a group takes the operand that it expands.
        needs += [x.operand for x in needs if isinstance(x, ExpandedOperand)]
        broadcast = _unique(x for x in needs if isinstance(x, BroadcastOperand))
        scatter = _unique(x for x in needs if isinstance(x, ScatteredOperand))
        slices = _unique(
            x for x in needs if isinstance(x, SliceOperand) and x.var not in computed
        )

        def run(group, *args):
            env = dict(zip([*broadcast, *scatter, *slices], args, strict=True))

            def read(operand: Operand):
                match operand:
                    case ConstantOperand():
                        return operand.value
                    case GroupIndexOperand():
                        return group
                    case ExpandedOperand():
                        return operand.expand(read(operand.operand))
                    case BroadcastOperand() | ScatteredOperand() | SliceOperand():
                        return env[operand]
                    case _:
                        assert_never(operand)

            for eqn in eqns:
                operands = list(map(read, self.values.operands(eqn)))
                outs = self._run_unbatched(eqn, group, operands)
                for var, out in zip(eqn.outvars, outs, strict=True):
                    # An observable result of a rematerialized equation is an input
                    # of this stage, and must not be replaced by its second value.
                    if var in computed:
                        env[SliceOperand(var)] = _fence(out) if var in fenced else out
            return [
                *(env[SliceOperand(v)] for v in saved),
                *(read(self.values.slice_of(*x)) for x in outgoing),
                *(env[SliceOperand(v)] for v in forwarded),
            ]

        inputs = [self.values.value(x.var) for x in broadcast]
        inputs += [self.values.scattered(x.var, x.axis) for x in scatter]
        inputs += [self.values.value(x.var) for x in slices]
        outputs = [*map(self.values.value, saved)]
        outputs += [self.values.outgoing(*x) for x in outgoing]
        outputs += [self.values.forwarded(v, index) for v in forwarded]
        name = " + ".join(_unique(_function_names(eqns))) or "rows"
        stage = _stage(name, tuple(inputs), tuple(outputs), run, takes_index=True)
        reduces = tuple(
            Reduce(
                str(reduction(e.primitive)),
                self.values.forwarded(e.invars[0], index)
                if e.invars[0] in forwarded
                else self.values.outgoing(e.invars[0], 0),
                self.values.value(e.outvars[0]),
            )
            for e in self.rounds.reduces.get(index, ())
        )
        return (
            stage,
            [x.var for x in broadcast],
            [(x.var, x.axis) for x in scatter],
            reduces,
        )

    def _is_saved(self, var, index: int) -> bool:
        """Whether a slice that a stage computes is one of its outputs."""
        # Leaving slices are outputs under their own name: no copy is made.
        if any(v is var and self.values.is_slice(v, a) for v, a in self.leaving(index)):
            return True
        # Only the round of its definition saves a variable; rematerialized values die
        # with their stage.
        return self.rounds.round_of(var) == index < self._last_use.get(var, -1)

    @functools.cached_property
    def _last_use(self) -> dict[Any, int]:
        """Liveness across rounds: the last round that needs an earlier one's slice."""
        return {v: i for i in range(self._count) for v in self._live_in(i)}

    @functools.cache  # noqa: B019  (the builder lives as long as its plan is built)
    def _live_in(self, index: int) -> frozenset:
        """The slices that a round needs of earlier ones."""
        operands = [x for e in self._work(index) for x in self.values.operands(e)]
        needed = {x.var for x in operands if isinstance(x, SliceOperand)}
        needed |= {
            v for v, axis in self.leaving(index) if self.values.is_slice(v, axis)
        }
        return frozenset(needed - self._computed(index).keys())

    @functools.cache  # noqa: B019
    def _work(self, index: int) -> tuple:
        """The equations of a round's local stage, rematerialized ones included."""
        eqns = [e for e in self.rounds.local.get(index, ()) if self.is_work(e)]
        if not self.rematerialize:
            return tuple(eqns)
        slices = [v for v, axis in self.leaving(index) if self.values.is_slice(v, axis)]
        stack = eqns + [
            self.values.definition[v] for v in slices if self._may_rematerialize(v)
        ]
        work = {id(e): e for e in stack}
        # The backward slice of the round's equations through earlier rounds.
        while stack:
            for operand in self.values.operands(stack.pop()):
                if not isinstance(operand, SliceOperand):
                    continue
                if self._may_rematerialize(operand.var):
                    eqn = self.values.definition[operand.var]
                    if id(eqn) not in work:
                        work[id(eqn)] = eqn
                        stack.append(eqn)
        # In the order of the program, as definitions must precede uses.
        return tuple(sorted(work.values(), key=lambda e: self._order[id(e)]))

    def _computed(self, index: int) -> dict[Any, None]:
        """The variables that the stage of a round computes, in order.

        An equation with several results may be rematerialized for one of them while
        another is observable: that one is read from the round that computed it.
        """
        results = (v for eqn in self._work(index) for v in eqn.outvars)
        return dict.fromkeys(
            v
            for v in results
            if v not in self._observable or self.rounds.round_of(v) == index
        )

    def _may_rematerialize(self, var) -> bool:
        # Arguments have no definition, effects run once, and a loop communicates.
        eqn = self.values.definition.get(var)
        if eqn is None or eqn.effects or var in self._observable:
            return False
        return not self.kinds.is_loop(eqn)

    def _run_unbatched(self, eqn, group, operands) -> list:
        """The results of a local equation for one group."""
        if eqn.primitive is primitives.map_fn_p:
            return group_index.evaluate_for_group(
                eqn.params["jaxpr"], group, self.partition, *operands
            )
        unbatched = self.kinds.unbatched(eqn)
        assert unbatched is not None
        return unbatched.run(eqn, operands)

    # -----------------------------------------------------------------------------
    # Loops

    def _loop(self, eqn) -> Loop:
        op, loop = eqn.primitive.name, self.kinds.loops[eqn]
        names = [self.values.names.of(v) for v in eqn.invars]
        inputs = [
            self.values.value(v)
            if kind.axis is None
            else self.values.outgoing(v, kind.axis)
            for v, kind in zip(eqn.invars, loop.operand_kinds, strict=True)
        ]
        outputs = tuple(map(self.values.value, eqn.outvars))
        name = self.values.names.fresh(op)
        # Of each body: the kinds of its results, and names of its arguments.
        results = [loop.result_kinds] * len(loop.bodies)
        # The first operand of a cond is the index, which no branch takes.
        arguments = [names[1:]] * len(loop.bodies)
        fields: dict[str, Any] = {}
        if op == "scan":
            consts, carry, xs = split_scan(eqn, names)
            n_carry = len(carry)
            # A body sees one step: a stack of partitioned values has its groups one
            # axis earlier there.
            steps = (shift_axis(kind, -1) for kind in loop.result_kinds[n_carry:])
            results = [[*loop.result_kinds[:n_carry], *steps]]
            arguments = [[*consts, *carry, *(f"{x}[step]" for x in xs)]]
            fields = {
                "consts": (len(consts),),
                "carry": n_carry,
                "length": eqn.params["length"],
                "reverse": eqn.params["reverse"],
            }
        elif op == "while":
            cond_consts, body_consts, carry = split_while(eqn, names)
            # Body 0 is the condition.
            results[0] = [GLOBAL]
            arguments = [[*cond_consts, *carry], [*body_consts, *carry]]
            consts = len(cond_consts), len(body_consts)
            fields = {"consts": consts, "carry": len(carry)}
        bodies = tuple(
            StageBuilder(
                kinds.program, kinds, body_results, body_arguments, self.rematerialize
            ).plan(f"{name} body {i}")
            for i, (kinds, body_results, body_arguments) in enumerate(
                zip(loop.bodies, results, arguments, strict=True)
            )
        )
        return Loop(op, name, tuple(inputs), outputs, bodies, **fields)


def _read(env: dict, atoms: Sequence[Any]) -> list:
    return [v.val if isinstance(v, Literal) else env[v] for v in atoms]


def _fence(x):
    """An observable slice, which the compiler must not rematerialize by itself.

    XLA may fuse an equation into each of its users, and round otherwise in each.
    """
    if not isinstance(x, jax.Array):  # a constant
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jax.lax.optimization_barrier(x)


def _function_names(eqns) -> list[str]:
    return [
        function_name(e.params["name"])
        for e in eqns
        if e.primitive is primitives.map_fn_p
    ]


def _stage(name: str, inputs, outputs, run, takes_index: bool) -> Stage:
    """Trace `run` as a stage, and check the types of its results.

    With `takes_index`, `run` has the group index, int32 `[]`, as first argument.
    """
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    if takes_index:
        avals = [jax.ShapeDtypeStruct((), np.int32), *avals]
    # An equation may have been included for one of several results, or as the operand
    # of an equation whose result is a constant.
    jaxpr = _compat.without_dead_code(jax.make_jaxpr(run)(*avals))
    # A wrong unbatching rule often changes a type, and then fails here.
    avals_out: list[Any] = jaxpr.out_avals
    for aval, value in zip(avals_out, outputs, strict=True):
        assert (aval.shape, aval.dtype) == (value.shape, value.dtype), (aval, value)
    return Stage(name, tuple(inputs), tuple(outputs), jaxpr)


def _unique(items) -> list:
    return list(dict.fromkeys(items))
