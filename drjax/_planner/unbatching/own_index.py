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

from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import numpy as np
from jax import core, lax

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, Eqn, Var
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._jaxprs.walk import backward_slice, definitions

# Between an iota and a column of indices lie these and pointwise equations: jax.numpy
# normalizes negative indices by `lt`, `add` and `select_n`.
_LAYOUT = frozenset(
    "broadcast_in_dim concatenate iota rearrange reshape slice squeeze "
    "transpose".split()
)


def share_batch_dimensions(
    eqns: list[Eqn], consts: MutableMapping[Var, Any]
) -> list[Eqn]:
    """Rewrite gathers and scatters: batch dimensions replace columns of indices.

    A column has the indices into one dimension of the operand: a slice of the indices,
    of size one along their last dimension. It is replaced if it is known before the
    program runs and counts up from 0 along a batch, as `jnp.arange(n)` in
    `x[jnp.arange(n), i]`. `consts` has the values of constants and of known arguments;
    those of new columns are added to it. All equations are returned, in order.
    """
    known = KnownIntegers(eqns, consts)
    return [new for eqn in eqns for new in _rewrite(eqn, known)]


class KnownIntegers:
    """The integer variables that depend on constants only: constant propagation.

    `consts` has the values of constants and known arguments; values of new constants
    may be added. `definition` has for each other variable the equation that defines it.
    """

    def __init__(self, eqns: list[Eqn], consts: MutableMapping[Var, Any]):
        self.consts = consts
        self.definition = definitions(eqns)
        self._order = {id(e): i for i, e in enumerate(eqns)}

    def value(self, var: Atom) -> np.ndarray | None:
        """Return the value of a variable, if it is cheap to evaluate while planning.

        None unless it depends only on literals and variables in `self.consts`, by
        equations on integers or bools that are pointwise or in `_LAYOUT`, such as an
        `iota` or a `reshape`; or if one of these is a tracer.
        """
        if isinstance(var, Literal):
            return np.asarray(var.val)
        eqns, starts = backward_slice([var], self.definition, _is_evaluable)
        constants = [self.consts.get(v) for v in starts]
        # Under a jax.jit, what the program closes over may be a tracer.
        if any(x is None or isinstance(x, core.Tracer) for x in constants):
            return None
        values: dict[Any, Any] = {}

        def read(atom: Atom) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            return values[atom] if atom in values else self.consts[atom]

        # The planner may run under a jax.jit, which would stage out the equations.
        with _compat.computing_constants():
            # `backward_slice` has the order of a search; definitions must precede uses.
            for eqn in sorted(eqns.values(), key=lambda e: self._order[id(e)]):
                outs = _compat.bind_equation(eqn, list(map(read, eqn.invars)))
                values.update(zip(eqn.outvars, outs, strict=True))
        return np.asarray(read(var))


def _is_evaluable(var: Var, eqn: Eqn) -> bool:
    """Whether `eqn`, which defines `var`, is cheap enough to evaluate while planning.

    It is if it is pointwise or in `_LAYOUT`, such as an `iota` or a `reshape`, and if
    `var` and all operands are integers or bools.
    """
    if eqn.primitive.name not in ELEMENTWISE | _LAYOUT:
        return False
    # The dtype of random keys has no kind.
    kinds = [getattr(v.aval.dtype, "kind", None) for v in (var, *eqn.invars)]
    return all(kind in ("i", "u", "b") for kind in kinds)


def _rewrite(eqn: Eqn, known: KnownIntegers) -> list[Eqn]:
    """Replace the columns of indices that count 0, 1, ..., n - 1 in one equation.

    The results are the gather or scatter, after a `concatenate` of the columns that are
    left if there are several. `[eqn]` if it is another equation or has no such columns,
    or if no other column would be left.
    """
    fields = _DIMENSION_FIELDS.get(eqn.primitive.name)
    if fields is None or isinstance(eqn.invars[1], Literal):
        return [eqn]
    operand, indices = (v.aval for v in eqn.invars[:2])
    last = indices.ndim - 1
    columns = _columns(eqn.invars[1], known)
    if columns is None:
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
            # A counting column is in bounds, so that no mode acts on its indices. Batch
            # dimensions are pairs: of two columns along one of them, the second stays.
            value = column if isinstance(column, np.ndarray) else known.value(column)
            b = _counting_dimension(value, size, shared.values())
        if b is None:
            kept.append((d, column))
        else:
            shared[d] = b
    # With no column left there would be no indices; with all left, nothing changes.
    if len(kept) in (0, len(columns)):
        return [eqn]
    # In the order that JAX requires of batch dimensions of the operand.
    operand_batch = sorted(shared)
    changed = (
        tuple(d for d, _ in kept),
        tuple(shared[d] for d in operand_batch),
        tuple(operand_batch),
        tuple(d for d in gone if d not in shared),
    )
    dims = dims._replace(**dict(zip(fields, changed, strict=True)))
    # The promise was about indices with the column that is gone.
    # `unique_indices` still holds: the batch dimension distinguishes the same elements.
    params = {**eqn.params, "dimension_numbers": dims, "indices_are_sorted": False}
    columns = [_variable(column, known) for _, column in kept]
    joined, more = columns[0], []
    if len(columns) > 1:
        shape = (*indices.shape[:-1], len(columns))
        joined = _compat.new_var(indices.update(shape=shape))
        join = eqn.replace(primitive=lax.concatenate_p)
        more = [_compat.new_eqn(join, columns, [joined], {"dimension": last}, set())]
    ins = [eqn.invars[0], joined, *eqn.invars[2:]]
    return [*more, eqn.replace(invars=ins, params=params)]


def _columns(indices: Var, known: KnownIntegers) -> list[Atom | np.ndarray] | None:
    """Divide indices `[..., k]` into k columns `[..., 1]`, one for each dimension.

    A column is a variable, an operand of the `concatenate` that defines `indices`; or,
    if `indices` is no result of an equation and its value is known, a NumPy array. None
    if the indices have no such columns.
    """
    last, join = indices.aval.ndim - 1, known.definition.get(indices)
    if join is None:
        value = known.value(indices)
        if value is None:
            return None
        return [value[..., i : i + 1] for i in range(value.shape[last])]
    # jax.numpy concatenates a column for each dimension that it indexes.
    if join.primitive is not lax.concatenate_p or join.params["dimension"] != last:
        return None
    return [*join.invars] if all(v.aval.shape[last] == 1 for v in join.invars) else None


def _variable(column: Atom | np.ndarray, known: KnownIntegers) -> Atom:
    """Return a column of indices as a variable that an equation can take.

    For values, a new variable is recorded as a constant in `known.consts`.
    """
    if not isinstance(column, np.ndarray):
        return column
    var = _compat.new_var(core.ShapedArray(column.shape, column.dtype))
    known.consts[var] = column
    return var


def _counting_dimension(
    column: np.ndarray | None, size: int, shared: Collection[int]
) -> int | None:
    """Return the dimension along which a column of indices counts 0, 1, ..., size - 1.

    The first one that is not in `shared`, the dimensions of the indices that are batch
    dimensions already; None if there is none. `column` is `[..., 1]`, with the indices
    into a dimension of `size` elements; None: they are not known.
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

# Without one of these nothing is rewritten.
INDEXING = _DIMENSION_FIELDS.keys()
