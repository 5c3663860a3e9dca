"""The values of stages, and how a local stage obtains each operand.

Input: the kinds of an inlined jaxpr, and names for its arguments. Output:
`StageValues`: for each variable the `Value` that stages exchange, and for each operand
of a local equation an `Operand`, which says how one group obtains its slice.

Invariants: a variable has one `Value` in its plan, whichever stage asks. Global values
are never stored per group: a broadcast or scattered value is an input of each local
stage that uses it. Sharp edges: a scalar constant of the program is part of a stage's
code and not an input.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from drjax import primitives
from drjax._compat.jax_types import Literal, Variable
from drjax._compat.types import Array, Atom, Aval, Eqn, Var
from drjax._partition import Partition
from drjax._planner.naming import Names
from drjax._planner.partitioning.environment import Environment
from drjax._planner.unbatching.core import UnbatchedEquation
from drjax.plan import Value


@dataclass(frozen=True, eq=False)
class ConstantOperand:
    """A scalar constant as an operand: a part of the stage's code."""

    val: Any


@dataclass(frozen=True)
class BroadcastOperand:
    """A global variable that a local stage takes whole: each group has a copy.

    The copy is an input of the stage.
    """

    var: Any


@dataclass(frozen=True)
class ScatteredOperand:
    """A global variable of which a local stage takes one group's slice, along `axis`.

    The slice is an input of the stage.
    """

    var: Any
    axis: int


@dataclass(frozen=True)
class GroupIndexOperand:
    """The group index, int32 `[]`, as an operand: the first argument of a stage."""


@dataclass(frozen=True, eq=False)
class ExpandedOperand:
    """A `broadcast_in_dim` along the group axis: each group expands a copy itself.

    A copy of the operand is smaller than the slices of the expanded array. `eqn` is the
    `broadcast_in_dim`, of a global value; `axis` is the group axis of its result.
    """

    eqn: Any
    axis: int
    operand: Atom | ConstantOperand | BroadcastOperand

    def expand(self, copy: Array) -> Array:
        """Compute a group's slice of the result of `self.eqn`, from its whole operand.

        The slice lacks dimension `self.axis`, along which all slices are equal.
        """
        params, axis = self.eqn.params, self.axis
        shape, dims = params["shape"], params["broadcast_dimensions"]
        return jax.lax.broadcast_in_dim(
            copy,
            (*shape[:axis], *shape[axis + 1 :]),
            tuple(d - (d > axis) for d in dims),
        )


# A literal is part of the stage's code. Of a partitioned variable, a local stage takes
# one group's slice: it computes it, or takes it as an input, from an earlier round or
# an argument of the program. Most operands are these, so they stand for themselves.
Operand = (
    Atom
    | ConstantOperand
    | BroadcastOperand
    | ScatteredOperand
    | GroupIndexOperand
    | ExpandedOperand
)


def slices_among(operands: Iterable[Operand]) -> list[Var]:
    """List the partitioned variables among operands, of which a group has slices."""
    variables: list[Any] = [x for x in operands if type(x) is Variable]
    return variables


@dataclass(frozen=True)
class LocalStageParts:
    """What the local stage of one round takes, computes and returns, for each group.

    Variables are those of the inlined jaxpr.

    Attributes:
      equations: Its equations, in the order of the program.
      computed: The variables that it computes, in that order: the keys of a dict whose
        values are None.
      broadcast: The global variables of which it takes a copy, as operands.
      scatter: The global variables of which it takes a slice, as operands.
      slices: The partitioned variables of which it takes a slice: results of earlier
        rounds, or arguments of the program.
      saved: The variables that it computes and whose slices it returns.
      fenced: The bitwise-observable variables among `saved`, which the compiler must
        not rematerialize either.
      outgoing: Pairs `(variable, group axis)` of values that a reduction, a loop or the
        program's results take as partitioned ones, but whose slices groups do not
        store: global, broadcast and scattered values and group indices. Each group
        returns its slice, or its copy.
      forwarded: The variables among `slices` that a reduction of this round takes: the
        stage returns their slices unchanged.
      rematerialized: The ids of those equations that an earlier round computes, too.
    """

    equations: Sequence[Any]
    computed: dict[Any, None]
    broadcast: list[BroadcastOperand]
    scatter: list[ScatteredOperand]
    slices: list[Any]
    saved: list[Any]
    fenced: frozenset[Any]
    outgoing: list[tuple[Any, int]]
    forwarded: list[Any]
    rematerialized: frozenset[int]


# Building blocks whose results groups take as inputs of their stages.
_DOWN = (primitives.broadcast_p, primitives.scatter_p, primitives.partition_index_p)


class StageValues:
    """The values that stages of one inlined jaxpr exchange, and their names.

    `arguments` and `results` have a name for each argument and result of the jaxpr,
    `kinds.program`; (): results are named by their equations. `definition` has for each
    variable the equation that defines it.
    """

    def __init__(
        self,
        kinds: Environment,
        arguments: Sequence[str],
        results: Sequence[str] = (),
    ):
        program = kinds.program
        self.program, self.kinds = program, kinds
        self.names = Names(program.invars, list(arguments))
        self.definition: dict[Any, Any] = {}
        # In a fixed order, as later names depend on earlier ones.
        for i, var in enumerate(program.consts):
            self.names.constant(var, i)
        # Partitioned variables, but for what is sent down, which no group stores.
        self._slices = {v for v, kind in kinds.cells.items() if kind.axis is not None}
        for eqn in program.eqns:
            self.names.add(eqn)
            for var in eqn.outvars:
                self.definition[var] = eqn
            if eqn.primitive in _DOWN and kinds.signature(eqn) is not None:
                self._slices.difference_update(eqn.outvars)
        for var, name in zip(program.outvars, results, strict=False):
            # An argument or constant that is a result has one Value, and so one name.
            if var in self.definition:
                self.names.rename(var, name)
        self._values: dict[Any, Value] = {}
        self._types: dict[Any, Value] = {}  # one of each type
        self._operands: dict[Any, list[Operand]] = {}
        self._unbatched: dict[Any, UnbatchedEquation] = {}

    def value(self, var: Var) -> Value:
        """Return the `Value` (name, shape, dtype) that stages exchange for a variable.

        It is global or partitioned according to the variable's kind; the shape of a
        partitioned one is that of a slice. The first call for a variable creates the
        value and records it, later calls return the same one.
        """
        if var not in self._values:
            axis = self.kinds[var].axis
            self._values[var] = self._new(self.names.of(var), var, axis)
        return self._values[var]

    def scattered(self, var: Var, axis: int) -> Value:
        """Return the partitioned `Value` for the slices of a global variable.

        Each group gets its slice, along `axis`, when the variable is scattered. The
        first call for `var` and `axis` reserves a name, such as `x[group]`, and creates
        and records the value; later calls return the same one. Reserved names get
        suffixes in the order of the calls, so this order is part of the plan.
        """
        key = ("scattered", var, axis)
        if key not in self._values:
            name = self.names.fresh(f"{self.names.of(var)}[group]")
            self._values[key] = self._new(name, var, axis)
        return self._values[key]

    def outgoing(self, var: Var, axis: int) -> Value:
        """Return the partitioned `Value` of a local stage's output of slices of `var`.

        It is the value of `var` itself if groups compute or store its slices, along
        `axis`. For a variable that is global, or the result of a broadcast, scatter or
        `partition_index`, the first call reserves a name like that of `var`, with a
        suffix, and creates and records a second value; later calls return the same one.
        """
        if self.is_slice(var, axis):
            return self.value(var)
        key = ("outgoing", var, axis)
        if key not in self._values:
            name = self.names.again(var)
            self._values[key] = self._new(name, var, axis)
        return self._values[key]

    def forwarded(self, var: Var, round_index: int) -> Value:
        """Return the `Value` of slices that a local stage takes and returns unchanged.

        It is not the value of the input, so that each value is an output of one stage
        only. The first call for a variable and round reserves a name like that of
        `var`, with a suffix, and creates and records the value; later calls return the
        same one.
        """
        key = ("forwarded", var, round_index)
        if key not in self._values:
            name = self.names.again(var)
            self._values[key] = self._new(name, var, self.kinds[var].axis)
        return self._values[key]

    def state(self, var: Var, side: str) -> Value:
        """Return the global `Value` of an argument of a fold's function of two states.

        `side` is the state that it is a leaf of, "left" or "right", and `var` the
        result of the fold that is the same leaf, and has its type. The first call for
        these reserves a name, such as `left of total`, and creates and records the
        value; later calls return the same one.
        """
        key = ("state", var, side)
        if key not in self._values:
            name = self.names.fresh(f"{side} of {self.names.of(var)}")
            self._values[key] = self._new(name, var, None)
        return self._values[key]

    def _new(self, name: str, var: Var, axis: int | None) -> Value:
        aval: Any = var.aval
        key = aval.shape, aval.dtype, axis
        if key not in self._types:
            self._types[key] = new_value("", aval, axis, self.kinds.partition)
        return self._types[key].named(name)

    # -----------------------------------------------------------------------------
    # Operands of local equations

    def slice_of(self, atom: Atom, axis: int) -> Operand:
        """Decide how a local stage obtains a group's slice of an operand along `axis`.

        A variable may be global, or partitioned along `axis`.
        """
        if type(atom) is Literal or atom in self._slices:
            return atom
        eqn = self.definition.get(atom)
        # Communication down is an input of each stage, not a value that groups store.
        down = eqn is not None and eqn.primitive in _DOWN
        if eqn is not None and down and self.kinds.signature(eqn) is not None:
            if eqn.primitive is primitives.broadcast_p:
                return self.whole_of(eqn.invars[0])
            if eqn.primitive is primitives.scatter_p:
                return ScatteredOperand(eqn.invars[0], 0)
            if eqn.primitive is primitives.partition_index_p:
                return GroupIndexOperand()
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            if axis not in eqn.params["broadcast_dimensions"] and len(eqn.invars) == 1:
                return ExpandedOperand(eqn, axis, self.whole_of(eqn.invars[0]))
        # A global value where slices are needed is an implicit scatter.
        return ScatteredOperand(atom, axis)

    def whole_of(self, atom: Atom) -> Atom | ConstantOperand | BroadcastOperand:
        """Decide how a local stage obtains the whole of a global operand.

        A literal or a scalar constant of the program is part of the stage's code.
        """
        if isinstance(atom, Literal):
            return atom
        # Arrays are inputs, so that the code of a stage stays small.
        if atom in self.program.consts and atom.aval.shape == ():
            return ConstantOperand(self.program.consts[atom])
        return BroadcastOperand(atom)

    def is_slice(self, atom: Atom, axis: int) -> bool:
        """Whether groups compute or store the slices of an operand.

        False for literals, global values, and the results of broadcasts, scatters and
        `partition_index`: of these, each group derives its slice from other inputs of a
        stage.
        """
        return isinstance(self.slice_of(atom, axis), Variable)

    def operands(self, eqn: Eqn) -> list[Operand]:
        """Decide how a local stage obtains each operand of an equation, for one group.

        The equation is a `map_fn` over the plan's partition, or one that can be
        unbatched. The list is computed once for each equation, and cached: do not
        modify it.
        """
        if self.kinds.is_pointwise(eqn) and self._are_slices(eqn.invars):
            return eqn.invars
        # Several rounds ask for the same equation when they rematerialize it.
        operands = self._operands.get(eqn)
        if operands is None:
            operands = self._operands[eqn] = self._compute_operands(eqn)
        return operands

    def _are_slices(self, atoms: Sequence[Atom]) -> bool:
        """Whether groups compute or store the slices of all operands but literals."""
        for atom in atoms:
            if type(atom) is not Literal and atom not in self._slices:
                return False
        return True

    def _compute_operands(self, eqn: Eqn) -> list[Operand]:
        if eqn.primitive is primitives.map_fn_p:
            return [self.slice_of(atom, 0) for atom in eqn.invars]
        return [
            self.whole_of(atom) if axis is None else self.slice_of(atom, axis)
            for atom, axis in zip(eqn.invars, self.unbatched(eqn).in_axes, strict=True)
        ]

    def unbatched(self, eqn: Eqn) -> UnbatchedEquation:
        """Return the equation of one group of one that a local stage computes."""
        unbatched = self._unbatched.get(eqn)
        if unbatched is None:
            unbatched = self.kinds.unbatched(eqn)
            assert unbatched is not None
            self._unbatched[eqn] = unbatched
        return unbatched


def new_value(
    name: str, aval: Aval, axis: int | None, partition: Partition | None
) -> Value:
    """Build the `Value` of an array that stages exchange.

    `aval` is the type of the whole array. With a group axis, it is over `partition`:
    shape and bytes are those of a slice.
    """
    shape = aval.shape if axis is None else aval.shape[:axis] + aval.shape[axis + 1 :]
    # Not converted to an int: jax.export may make dimensions symbolic.
    nbytes = math.prod(shape) * aval.dtype.itemsize
    over = () if axis is None or partition is None else (partition,)
    return Value(name, tuple(shape), aval.dtype, over, nbytes, axis or 0)
