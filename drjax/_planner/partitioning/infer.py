"""Kinds: is a variable global or partitioned? `unbatching/rules.py` has the rules.

Each variable of the flat program has a cell in a lattice:

            partitioned along axis 0, 1, ...    global
                                     \\         /
                                        free

Arguments start free, and so does what is computed from free values only. Three passes
of a worklist move cells up and never down:

1. forward: what drjax primitives and row-by-row equations make of partitioned values;
2. demands for global values (a broadcast, an equation that mixes rows), backwards
   through free values; they win, since a global value can still be scattered;
3. demands for partitioned values (a map, a reduction, a row-by-row partner).

What is free in the end is global. A partitioned value where a global one is needed
has no meaning and is refused; a global `[n, ...]` value where a partitioned one is
needed is a scatter.

Loops are in `control_flow.py`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from drjax import _compat
from drjax._errors import PlanError
from drjax._partition import Partition
from drjax._planner.implicit_communication import Meaning, meaning, of_all_rows
from drjax._planner.inline import CONTROL, Flat, uses_blocks
from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.control_flow import LoopKinds
from drjax._planner.partitioning.kind import (
    FREE,
    GLOBAL,
    PARTITIONED,
    Kind,
    along,
    signature,
)
from drjax._planner.unbatching.core import Rows
from drjax._planner.unbatching.rules import by_rows, candidates, of_one_group
from drjax.primitives import scatter_p

PASSES = ("forward", "global", "partitioned")


class _Refused(Exception):
    """An equation cannot take variables by rows, which others demand; they may."""

    def __init__(self, loose: set[Any]):
        self.loose = loose


def _of_axes(axes: Sequence[int | None]) -> list[Kind]:
    return [GLOBAL if axis is None else along(axis) for axis in axes]


class Kinds:
    """The kinds of all variables of a flat program.

    Args:
      program: The program.
      partition: Its partition.
      given: For each argument its kind, if it is known.
      wanted: For each result its kind, if it is known.
      last: The last pass to make.

    Attributes:
      loops: For each loop on partitioned values: how it loops.
      demand: The pass that it has begun.
    """

    def __init__(
        self,
        program: Flat,
        partition: Partition | None,
        given: Sequence[Kind | None],
        wanted: Sequence[Kind | None] = (),
        last: str = PASSES[-1],
    ):
        self.program, self.partition, self._last = program, partition, last
        self._size = -1 if partition is None else partition.size
        self._said = dict(zip(program.invars, given, strict=True))
        whole: set[Any] = set()  # variables that no one axis fits
        while (found := self._infer(whole, wanted)) - whole:
            whole |= found

    def _infer(self, whole: set, wanted: Sequence[Kind | None]) -> set:
        """Infer everything; returns what is wanted in ways that contradict."""
        self.loops: dict[Any, LoopKinds] = {}
        self._cells = dict.fromkeys((*self.program.consts, *whole), GLOBAL)
        self._moved: list[Any] = []
        self._raise_to(list(self._said), list(self._said.values()))
        self._sure = sure = set()  # partitioned, whoever uses it
        for demand in PASSES[: PASSES.index(self._last) + 1]:
            self.demand = demand
            if demand != "forward":
                sure |= set(self._cells)
            for var, kind in zip(self.program.outvars, wanted, strict=False):
                if kind is not None and kind.name == demand:
                    self._raise_to([var], [kind])
            try:
                self._until_stable(demand)
            except _Refused as found:
                return found.loose
        self._bad = {}
        if self._last != PASSES[-1]:
            return set()
        self._bad = {e: vs for e in self.program.eqns if (vs := self._contradicted(e))}
        return {v for found in self._bad.values() for v in found} - sure

    def _contradicted(self, eqn) -> list:
        """The variables of an equation that do not lie as it takes or gives them."""
        if self.is_loop(eqn):
            ins, outs = self.loops[eqn].ins, self.loops[eqn].outs
        elif self.signature(eqn) is not None:
            ins, outs = [PARTITIONED] * len(eqn.invars), []
        elif (meant := self.meaning(eqn)) is not None:
            ins, outs = map(_of_axes, (meant.ins, meant.of_results(eqn)))
        else:
            rows = self.rows(eqn)
            if rows is None:
                return [v for v in eqn.outvars if self.cell(v).partitioned]
            ins, outs = map(_of_axes, (rows.ins, rows.outs))
        atoms, kinds = [*eqn.invars, *eqn.outvars[: len(outs)]], [*ins, *outs]
        return [
            atom
            for atom, kind in zip(atoms, kinds, strict=True)
            if self.cell(atom).partitioned and self.cell(atom) != kind
        ]

    def check(self) -> "Kinds":
        """Refuse what has no meaning: partitioned values in a global place."""
        for eqn in self.program.eqns:
            self._check(eqn)
        return self

    def __getitem__(self, atom) -> Kind:
        """The kind of a variable; literals and what stayed free are global."""
        found = self.cell(atom)
        return GLOBAL if found is FREE else found

    def cell(self, atom: Any) -> Kind:
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            return GLOBAL if aval.shape else FREE
        return self._cells.get(atom, FREE)

    def rows(self, eqn) -> Rows | None:
        """How an equation works row by row, also if only its results are so."""
        axes = tuple([self.cell(v).axis for v in eqn.invars])
        if any(axis is not None for axis in axes):
            forms = self.program.forms
            if (eqn, axes) not in forms:
                found = by_rows(eqn, axes)
                if found is None and self._size == 1:
                    found = of_one_group(eqn, axes)
                forms[eqn, axes] = found
            return forms[eqn, axes]
        outs = [self.cell(v) for v in eqn.outvars]
        return self._rows_for(eqn, outs) if any(o.partitioned for o in outs) else None

    def signature(self, eqn) -> tuple[Kind, Kind] | None:
        if self.partition is None or eqn.params.get("partition") != self.partition:
            return None
        return signature(eqn.primitive)

    def meaning(self, eqn) -> Meaning | None:
        """What an equation that combines groups means; None for any other."""
        if self.partition is None or self.signature(eqn) is not None:
            return None
        axes = [self.cell(v).axis for v in eqn.invars]
        if all(axis is None for axis in axes):
            return None
        found = meaning(eqn, axes)
        if found is None and self._size == 1 and eqn.primitive.name not in CONTROL:
            return of_all_rows(eqn, axes) if self.rows(eqn) is None else None
        return found

    def scatters_rows(self, eqn) -> bool:
        """Whether it scatters what is partitioned already, as derivatives may.

        The transpose of a gather scatters the cotangent of its result, which is made of
        rows where the result was used row by row.
        """
        if self.signature(eqn) is None or eqn.primitive is not scatter_p:
            return False
        return self.cell(eqn.invars[0]) == PARTITIONED

    def is_loop(self, eqn) -> bool:
        """Whether a loop or branch needs a plan of its own."""
        if eqn.primitive.name not in CONTROL or self.meaning(eqn) is not None:
            return False
        if "sizes" in eqn.params or any(self.cell(v).partitioned for v in eqn.invars):
            return True
        return self.partition is not None and any(
            uses_blocks(jaxpr, self.partition)
            for jaxpr in _compat.jaxprs_in(eqn.params)
        )

    def body(
        self, flat: Flat, given: Sequence[Kind], wanted: Sequence[Kind]
    ) -> "Kinds":
        """The engine of the body of a loop, as far as this one has come."""
        key = (self.partition, *given, "->", *wanted, self.demand)
        if key not in flat.inferred:
            engine = Kinds(flat, self.partition, given, wanted, self.demand)
            flat.inferred[key] = engine
        return flat.inferred[key]

    # -----------------------------------------------------------------------------
    # The worklist

    def _raise_to(self, atoms: Sequence[Any], kinds: Sequence[Kind | None]) -> None:
        """Move free cells up."""
        for atom, kind in zip(atoms, kinds, strict=True):
            if kind is None or kind == FREE or isinstance(atom, Literal):
                continue
            if self.cell(atom) == FREE:
                self._cells[atom] = kind
                self._moved.append(atom)

    def _until_stable(self, demand: str) -> None:
        """Visit every equation, and again those around each cell that moves."""
        eqns = self.program.eqns
        order = range(len(eqns))
        if demand != "forward":
            order = reversed(order)
        waiting = OrderedDict.fromkeys(order)  # as a set
        while waiting:
            at, _ = waiting.popitem(last=False)
            eqn = eqns[at]
            self._moved.clear()
            loop = self.is_loop(eqn)
            try:
                if loop or any(self.cell(v) == FREE for v in eqn.outvars):
                    self._forward(eqn)
                if demand != "forward" and (loop or self._has_free(eqn)):
                    self._backward(eqn, demand)
            except PlanError as error:
                if loose := self._loose(eqn, demand):
                    raise _Refused(loose) from error
                raise
            for atom in self._moved:
                waiting |= dict.fromkeys(self.program.around[atom])
            if not loop:
                waiting.pop(at, None)

    def _loose(self, eqn, demand: str) -> set:
        """The operands that are partitioned by others' demands alone."""
        if demand != PASSES[-1]:
            return set()
        return {v for v in eqn.invars if self.cell(v).partitioned} - self._sure

    def _has_free(self, eqn) -> bool:
        return any(self.cell(v) == FREE for v in eqn.invars if v.aval.shape)

    def _forward(self, eqn) -> None:
        signature = self.signature(eqn)
        if signature is not None:
            kinds = [signature[1]] * len(eqn.outvars)
        elif self.is_loop(eqn):
            loop = self.loops[eqn] = LoopKinds(self, eqn)
            kinds = loop.outs
        elif (meant := self.meaning(eqn)) is not None:
            kinds = _of_axes(meant.of_results(eqn))
        elif any(self.cell(v).partitioned for v in eqn.invars):
            rows = self.rows(eqn)
            if rows is None:
                raise self.refusal(
                    eqn, [self[v] for v in eqn.invars], diagnostics.MIXES_ROWS
                )
            kinds = _of_axes(rows.outs)
        elif self._is_open(eqn):
            return  # its kind follows from how its results are used
        else:
            kinds = [GLOBAL] * len(eqn.outvars)
        self._raise_to(eqn.outvars, kinds)

    def _is_open(self, eqn) -> bool:
        return self._has_free(eqn) and bool(candidates(eqn, self._size))

    def _backward(self, eqn, demand: str) -> None:
        needs = self._needs(eqn)
        self._raise_to(
            eqn.invars,
            [k if k is not None and k.name == demand else None for k in needs],
        )

    def _needs(self, eqn) -> Sequence[Kind | None]:
        """What an equation asks of each operand; None: nothing."""
        signature = self.signature(eqn)
        if signature is not None:
            return [signature[0]] * len(eqn.invars)
        if self.is_loop(eqn):
            return LoopKinds(self, eqn).ins
        if (meant := self.meaning(eqn)) is not None:
            return _of_axes(meant.ins)
        outs = [self.cell(v) for v in eqn.outvars]
        if any(out.partitioned for out in outs):
            rows = self.rows(eqn)
            if rows is None:
                return [None] * len(eqn.invars)
            return _of_axes(rows.ins)
        possible = candidates(eqn, self._size)
        if possible and GLOBAL not in outs:
            return [None] * len(eqn.invars)
        return [GLOBAL] * len(eqn.invars)

    def _rows_for(self, eqn, outs: Sequence[Kind]) -> Rows | None:
        """The form of an equation whose results lie along these axes."""
        for rows in candidates(eqn, self._size):
            if all(
                out.axis == axis
                for out, axis in zip(outs, rows.outs, strict=True)
                if out.partitioned
            ):
                return rows
        return None

    # -----------------------------------------------------------------------------
    # Refusals

    def _check(self, eqn) -> None:
        kinds = [self[v] for v in eqn.invars]
        if self.is_loop(eqn):
            self.loops[eqn].check()
            return
        if not any(kind.partitioned for kind in kinds):
            return
        signature = self.signature(eqn)
        if signature is None:
            mixes = self.rows(eqn) is None and self.meaning(eqn) is None
            if mixes or eqn in self._bad:
                raise self.refusal(eqn, kinds, diagnostics.MIXES_ROWS)
        elif signature[0] == GLOBAL:
            if not self.scatters_rows(eqn):
                raise self.refusal(eqn, kinds, diagnostics.ALREADY_PARTITIONED)
        elif any(kind.axis for kind in kinds):
            raise self.refusal(eqn, kinds, diagnostics.ANOTHER_AXIS)

    def refusal(self, eqn, kinds: Sequence[Kind], fix: str) -> PlanError:
        said = [v for v, kind in self._said.items() if kind and kind.partitioned]
        return diagnostics.refusal(eqn, kinds, self.partition, fix, self.program, said)
