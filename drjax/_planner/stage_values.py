"""Where values are: what a stage calls them, and how a group gets its row of each."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from drjax import primitives
from drjax._planner.inline import Flat
from drjax._planner.naming import Names
from drjax._planner.partitioning.infer import Kinds
from drjax.plan import Value


class Places:
    """The values of one flat program.

    Args:
      program: The program.
      kinds: The kinds of its variables.
      arguments: A name for each argument.
      results: A name for each result, if it has one.
    """

    def __init__(
        self,
        program: Flat,
        kinds: Kinds,
        arguments: Sequence[str],
        results: Sequence[str] = (),
    ):
        self.program, self.kinds = program, kinds
        self.names = Names(program.invars, list(arguments))
        self.definition = {v: e for e in program.eqns for v in e.outvars}
        for i, var in enumerate(program.consts):
            self.names.constant(var, i)
        for eqn in program.eqns:
            self.names.add(eqn)
        for var, name in zip(program.outvars, results, strict=False):
            if var in self.definition:
                self.names.rename(var, name)
        self._values: dict[Any, Value] = {}
        self._sources: dict[Any, list[tuple[str, Any]]] = {}

    def value(self, var) -> Value:
        if var not in self._values:
            axis = self.kinds[var].axis
            self._values[var] = new_value(self.names.of(var), var.aval, axis)
        return self._values[var]

    def row_value(self, var, axis: int) -> Value:
        """The partitioned value that scattering a global one gives."""
        key = ("row of", var, axis)
        if key not in self._values:
            name = self.names.fresh(f"{self.names.of(var)}[group]")
            self._values[key] = new_value(name, var.aval, axis)
        return self._values[key]

    def sent(self, var, axis: int) -> Value:
        """The partitioned value under which a group sends its row of `var`."""
        if self.is_row(var, axis):
            return self.value(var)
        key = ("sent", var, axis)
        if key not in self._values:
            name = self.names.fresh(self.names.of(var))
            self._values[key] = new_value(name, var.aval, axis)
        return self._values[key]

    # -----------------------------------------------------------------------------
    # Where a group's row comes from

    def source(self, atom, axis: int) -> tuple[str, Any]:
        """How a local stage gets a group's row of `atom`, whose groups lie on `axis`.

        Returns `("literal", value)`, `("global", var)` (a copy of the whole),
        `("spread", (eqn, axis))` (a copy of an operand, broadcast in the group),
        `("scatter", (var, axis))`, `("number", None)` or `("row", var)`.
        """
        if isinstance(atom, Literal):
            return "literal", atom.val
        eqn = self.definition.get(atom)
        if eqn is not None and self.kinds.signature(eqn) is not None:
            if eqn.primitive is primitives.broadcast_p:
                return self.copy(eqn.invars[0])
            if eqn.primitive is primitives.scatter_p:
                return "scatter", (eqn.invars[0], 0)
            if eqn.primitive is primitives.partition_index_p:
                return "number", None
        if self.kinds[atom].partitioned:
            return "row", atom
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            if axis not in eqn.params["broadcast_dimensions"] and len(eqn.invars) == 1:
                return "spread", (eqn, axis)
        return "scatter", (atom, axis)

    def is_row(self, atom, axis: int) -> bool:
        return self.source(atom, axis)[0] == "row"

    def copy(self, atom) -> tuple[str, Any]:
        if isinstance(atom, Literal):
            return "literal", atom.val
        if atom in self.program.consts and atom.aval.shape == ():
            return "literal", self.program.consts[atom]  # part of the stage's code
        return "global", atom

    def sources(self, eqn) -> list[tuple[str, Any]]:
        """Where the operands of a local equation come from."""
        if eqn not in self._sources:
            self._sources[eqn] = self._find_sources(eqn)
        return self._sources[eqn]

    def _find_sources(self, eqn) -> list[tuple[str, Any]]:
        if eqn.primitive is primitives.map_fn_p:
            return [self.source(atom, 0) for atom in eqn.invars]
        rows = self.kinds.rows(eqn)
        assert rows is not None
        return [
            self.copy(atom) if axis is None else self.source(atom, axis)
            for atom, axis in zip(eqn.invars, rows.ins, strict=True)
        ]

    def passed(self, var, level: int) -> Value:
        """Under what name a stage hands on a row that it did not make."""
        key = ("passed", var, level)
        if key not in self._values:
            name = self.names.fresh(self.names.of(var))
            self._values[key] = new_value(name, var.aval, self.kinds[var].axis)
        return self._values[key]


def spread(eqn, axis: int, operand):
    """A `broadcast_in_dim` into the group axis, for one group's row."""
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    return jax.lax.broadcast_in_dim(
        operand,
        (*shape[:axis], *shape[axis + 1 :]),
        tuple(d - (d > axis) for d in dims),
    )


def new_value(name: str, aval: Any, axis: int | None) -> Value:
    shape = aval.shape if axis is None else aval.shape[:axis] + aval.shape[axis + 1 :]
    nbytes = math.prod(shape) * aval.dtype.itemsize
    return Value(name, tuple(shape), aval.dtype, axis is not None, nbytes, axis or 0)
