"""Indexing each group's slice by its own index, as batched indexing.

Input: the equations of an inlined jaxpr and its constants. Output: the same results, in
the same variables; `gather` and `scatter` may have fewer columns of indices.

JAX writes "element i[g] of slice g" in two ways: with a batch dimension that operand
and indices share (`jnp.take_along_axis`, `vmap`), or with one more column of indices
that counts the slices (`x[jnp.arange(n), i]`, `.at[jnp.arange(n), i]`). The first has
an unbatching rule. `share_batch_dimensions` turns the second into the first:

    gather(x, [k, i])  with  k[g] = g   ==   gather(x, [i]) with batch dimension g

where k is known to be 0, 1, ..., n - 1 before the program runs.

Invariants: both equations mean the same for every input, so the rewrite needs no
partitioning inference and comes before it. Sharp edges: k must be an integer computed
from constants by the primitives of `_LAYOUT` and pointwise ones.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax._jaxprs.walk import backward_slice, definitions
from drjax._planner.unbatching.rules import ELEMENTWISE

_LAYOUT = frozenset(
    "broadcast_in_dim concatenate iota reshape slice squeeze transpose".split()
)


def share_batch_dimensions(eqns: list, consts: dict) -> list:
    """Rewrite gathers and scatters: batch dimensions for columns that count slices.

    Args:
      eqns: The equations of a program.
      consts: For each constant of the program its value.

    Returns:
      All equations of the program, with rewritten ones among them.
    """
    if not any(eqn.primitive.name in _DIMENSION_FIELDS for eqn in eqns):
        return eqns
    known = _KnownIntegers(eqns, consts)
    return [new for eqn in eqns for new in _rewrite(eqn, known)]


class _KnownIntegers:
    """The integers of a program that depend on constants only: constant propagation.

    Args:
      eqns: The equations of the program.
      consts: For each constant of the program its value.
    """

    def __init__(self, eqns: list, consts: dict):
        self.consts = consts
        self.definition = definitions(eqns)
        self._order = {id(e): i for i, e in enumerate(eqns)}

    def value(self, var) -> np.ndarray | None:
        """The value of a variable or literal; None if planning cannot evaluate it.

        It can if the variable depends on constants only, by integer equations.
        """
        if isinstance(var, Literal):
            return np.asarray(var.val)
        eqns, starts = backward_slice([var], self.definition, _is_evaluable)
        if not all(v in self.consts for v in starts):
            return None
        values: dict[Any, Any] = {}

        def read(atom):
            if isinstance(atom, Literal):
                return atom.val
            return values[atom] if atom in values else self.consts[atom]

        with jax.ensure_compile_time_eval():
            for eqn in sorted(eqns.values(), key=lambda e: self._order[id(e)]):
                outs = _compat.bind_equation(eqn, list(map(read, eqn.invars)))
                values.update(zip(eqn.outvars, outs, strict=True))
        return np.asarray(read(var))


def _is_evaluable(var, eqn) -> bool:
    """Whether `eqn`, which defines `var`, is cheap integer work to do in planning."""
    if eqn.primitive.name not in ELEMENTWISE | _LAYOUT:
        return False
    return all(atom.aval.dtype.kind in "iub" for atom in (var, *eqn.invars))


def _rewrite(eqn, known: _KnownIntegers) -> list:
    """Remove the columns of indices that count 0, 1, ..., n - 1 from one equation.

    Returns:
      The equation that joins the columns that are left, if there are several, and the
      gather or scatter; `[eqn]` if it is another equation or has no such columns.
    """
    fields = _DIMENSION_FIELDS.get(eqn.primitive.name)
    if fields is None or isinstance(eqn.invars[1], Literal):
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
    indexed, batch, operand_batch, gone = (list(getattr(dims, f)) for f in fields)
    # Batch dimensions of the operand, and the dimensions of the indices they share.
    shared = dict(zip(operand_batch, batch, strict=True))
    kept = []
    for d, column in zip(indexed, columns, strict=True):
        b = None
        # Only a dimension of window size one can be a batch dimension.
        if d in gone:
            size = operand.shape[d]
            b = _counting_dimension(known.value(column), size, shared.values())
        if b is None:
            kept.append((d, column))
        else:
            shared[d] = b
    # With no column left there would be no indices; with all left, nothing changes.
    if len(kept) in (0, len(columns)):
        return [eqn]
    operand_batch = sorted(shared)
    changed = (
        tuple(d for d, _ in kept),
        tuple(shared[d] for d in operand_batch),
        tuple(operand_batch),
        tuple(d for d in gone if d not in shared),
    )
    dims = dims._replace(**dict(zip(fields, changed, strict=True)))
    # The promise was about indices with the column that is gone.
    params = {**eqn.params, "dimension_numbers": dims, "indices_are_sorted": False}
    joined, more = kept[0][1], []
    if len(kept) > 1:
        shape = (*indices.shape[:-1], len(kept))
        joined = _compat.new_var(indices.update(shape=shape))
        ins = [column for _, column in kept]
        more = [join.replace(invars=ins, outvars=[joined])]
    ins = [eqn.invars[0], joined, *eqn.invars[2:]]
    return [*more, eqn.replace(invars=ins, params=params)]


def _counting_dimension(column: np.ndarray | None, size: int, shared) -> int | None:
    """The dimension of indices along which a column of them counts 0, 1, ..., size - 1.

    Args:
      column: The values of the column, `[..., 1]`; None: they are not known.
      size: The size of the operand's dimension that the column indexes.
      shared: Dimensions of the indices that are batch dimensions already.

    Returns:
      None if there is no such dimension.
    """
    if column is None:
        return None
    for b, length in enumerate(column.shape[:-1]):
        if length != size or b in shared:
            continue
        others = tuple(d for d in range(column.ndim) if d != b)
        counts = np.expand_dims(np.arange(size), others)
        if np.array_equal(column, np.broadcast_to(counts, column.shape)):
            return b
    return None


_SCATTER = (
    "scatter_dims_to_operand_dims",
    "scatter_indices_batching_dims",
    "operand_batching_dims",
    "inserted_window_dims",
)
# The fields of dimension numbers: indexed dimensions, batch dimensions (of the indices,
# of the operand), and dimensions that the windows lack.
_DIMENSION_FIELDS: dict[str, Sequence[str]] = {
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
