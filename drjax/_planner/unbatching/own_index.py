"""Indexing each row by its own number, `x[jnp.arange(n), i]`, as indexing by rows.

JAX writes "element i[r] of row r" in two ways: with a batch dimension
that operand and indices share (`jnp.take_along_axis`, `vmap`), or with one more column
of indices that counts the rows (`x[jnp.arange(n), i]` and `.at[jnp.arange(n), i]`). The
first works row by row as it stands. `share_rows` turns the second into the first where
the column is known to be 0, 1, ..., n - 1 before the program runs; the equations mean
the same, so no one needs to know which dimension has the groups.

In: the equations of a flat program and its constants. Out: the same results, in the
same variables, by equations of which `gather` and `scatter` may have fewer columns.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax._planner.unbatching.rules import ELEMENTWISE

_SHAPES = frozenset(
    "broadcast_in_dim concatenate iota reshape slice squeeze transpose".split()
)


def share_rows(eqns: list, consts: dict) -> list:
    """The equations, with batch dimensions in place of columns that count rows."""
    if not any(eqn.primitive.name in _FORMS for eqn in eqns):
        return eqns
    known = _Known(eqns, consts)
    return [new for eqn in eqns for new in _shared(eqn, known)]


class _Known:
    """What integers of a program are known before it runs."""

    def __init__(self, eqns: list, consts: dict):
        self.consts = consts
        self.definition = {v: e for e in eqns for v in e.outvars}
        self._order = {id(e): i for i, e in enumerate(eqns)}

    def value(self, wanted) -> np.ndarray | None:
        """The value of a variable, or None if it depends on any argument."""
        needed, todo = {}, [wanted]
        while todo:
            atom = todo.pop()
            if not _is_integer(atom.aval):
                return None
            if isinstance(atom, Literal) or atom in self.consts:
                continue
            eqn = self.definition.get(atom)
            if eqn is None or eqn.primitive.name not in ELEMENTWISE | _SHAPES:
                return None
            if id(eqn) not in needed:
                needed[id(eqn)] = eqn
                todo += eqn.invars
        values: dict[Any, Any] = {}

        def read(atom):
            if isinstance(atom, Literal):
                return atom.val
            return values[atom] if atom in values else self.consts[atom]

        with jax.ensure_compile_time_eval():
            for eqn in sorted(needed.values(), key=lambda e: self._order[id(e)]):
                outs = _compat.bind_equation(eqn, list(map(read, eqn.invars)))
                values.update(zip(eqn.outvars, outs, strict=True))
        return np.asarray(read(wanted))


def _is_integer(aval) -> bool:
    return aval.dtype.kind in "iub"


def _shared(eqn, known: _Known) -> list:
    form = _FORMS.get(eqn.primitive.name)
    if form is None or isinstance(eqn.invars[1], Literal):
        return [eqn]
    operand, indices = (v.aval for v in eqn.invars[:2])
    join, last = known.definition.get(eqn.invars[1]), indices.ndim - 1
    if join is None or join.primitive is not lax.concatenate_p:
        return [eqn]
    if join.params["dimension"] != last:
        return [eqn]
    columns = list(join.invars)
    if any(v.aval.shape[last] != 1 for v in columns):
        return [eqn]
    dims = eqn.params["dimension_numbers"]
    mapped, batch, operand_batch, gone = (list(getattr(dims, f)) for f in form)
    rows = dict(zip(operand_batch, batch, strict=True))
    kept = []
    for d, column in zip(mapped, columns, strict=True):
        b = None
        if d in gone:
            b = _counted(known.value(column), operand.shape[d], rows.values())
        if b is None:
            kept.append((d, column))
        else:
            rows[d] = b
    if len(kept) in (0, len(columns)):
        return [eqn]
    operand_batch = sorted(rows)
    changed = (
        tuple(d for d, _ in kept),
        tuple(rows[d] for d in operand_batch),
        tuple(operand_batch),
        tuple(d for d in gone if d not in rows),
    )
    dims = dims._replace(**dict(zip(form, changed, strict=True)))
    params = {**eqn.params, "dimension_numbers": dims, "indices_are_sorted": False}
    joined, more = kept[0][1], []
    if len(kept) > 1:
        shape = (*indices.shape[:-1], len(kept))
        joined = _compat.new_var(indices.update(shape=shape))
        ins = [column for _, column in kept]
        more = [join.replace(invars=ins, outvars=[joined])]
    ins = [eqn.invars[0], joined, *eqn.invars[2:]]
    return [*more, eqn.replace(invars=ins, params=params)]


def _counted(column: np.ndarray | None, size: int, taken) -> int | None:
    """The dimension of the indices along which a column counts 0, 1, ..., size - 1."""
    if column is None:
        return None
    for b, length in enumerate(column.shape[:-1]):
        if length != size or b in taken:
            continue
        others = tuple(d for d in range(column.ndim) if d != b)
        if np.array_equal(column, np.broadcast_to(
            np.expand_dims(np.arange(size), others), column.shape
        )):  # fmt: skip
            return b
    return None


_SCATTER = (
    "scatter_dims_to_operand_dims",
    "scatter_indices_batching_dims",
    "operand_batching_dims",
    "inserted_window_dims",
)
# The fields of dimension numbers: indexed dimensions, those shared (of the indices, of
# the operand), and dimensions that the result has no more.
_FORMS: dict[str, Sequence[str]] = {
    "gather": (
        "start_index_map",
        "start_indices_batching_dims",
        "operand_batching_dims",
        "collapsed_slice_dims",
    ),
    **dict.fromkeys(
        "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split(),
        _SCATTER,
    ),
}
