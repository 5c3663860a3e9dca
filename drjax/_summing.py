"""Sums over groups inside the map that makes the summands, where that saves memory.

The gradient of a broadcast value is a sum over groups of what a map computes, very
often of products of matrices. Made one by one, the summands of a device's k groups
need k times the memory of their sum. Code written by hand never makes them: the
transpose of a vmap contracts over the groups too. `RowSum` does the same: it walks
from a result of the per-group jaxpr back through the linear equations that end it,
with S(v) for the sum over groups of v,

    S(a + b) = S(a) + S(b)      S(-a) = -S(a)      S(transpose a) = transpose S(a)
    S(sum_j a_j b_j) = sum_{i,j} a_ij b_ij         (dot_general: one more contraction)

and sums whatever it meets elsewhere row by row.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from drjax import _compat

_THROUGH = ("neg", "transpose", "add", "add_any", "sub")


class RowSum:
    """How to sum one result of a per-group jaxpr over the rows of a device.

    Args:
      jaxpr: The per-group jaxpr of a map.
      index: Which of its results to sum.

    Attributes:
      worthwhile: Whether a product is contracted that is good for nothing else. Only
        straight-line code counts: the compiler recognises that the map and the sum
        compute the same values and computes them once, but not so for loops.
      used: Which inputs of the jaxpr the sum takes.
    """

    def __init__(self, jaxpr, index: int):
        raw = _compat.open_jaxpr(jaxpr)
        self._result = raw.outvars[index]
        self._definitions = {v: e for e in raw.eqns for v in e.outvars}
        uses = collections.Counter(
            v for e in raw.eqns for v in e.invars if not isinstance(v, Literal)
        )
        uses.update(v for v in raw.outvars if not isinstance(v, Literal))
        self._used_once = {v for v, count in uses.items() if count == 1}
        self._rows: dict[Any, None] = {}  # variables whose rows are needed, in order
        plain = not raw.effects and all(map(_is_plain, raw.eqns))
        self.worthwhile = plain and self._plan(self._result)
        if self.worthwhile:
            self._make_rows, self.used = _compat.select_outputs(jaxpr, [*self._rows])

    def _tail(self, atom: Any) -> Any:
        """The equation that ends in `atom`, if the sum can go through it."""
        if isinstance(atom, Literal) or atom not in self._used_once:
            return None
        eqn = self._definitions.get(atom)
        if eqn is None or atom.aval.dtype != jnp.float32:
            return None
        through = eqn.primitive is lax.dot_general_p or eqn.primitive.name in _THROUGH
        return eqn if through else None

    def _plan(self, atom) -> bool:
        """Note which rows the sum of `atom` needs; whether a product is contracted."""
        eqn = self._tail(atom)
        if eqn is None:
            if not isinstance(atom, Literal):
                self._rows[atom] = None
            return False
        if eqn.primitive is lax.dot_general_p:
            self._rows.update(
                dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal))
            )
            return True
        return any([self._plan(v) for v in eqn.invars])

    def __call__(self, count: int, over_rows: Callable, operands):
        """The sum over `count` rows; `over_rows(fn)(*operands)` runs `fn` on all."""
        rows = over_rows(self._make_rows)(*operands)
        known = dict(zip(self._rows, rows, strict=True))

        def rows_of(atom):
            if not isinstance(atom, Literal):
                return known[atom]
            aval: Any = atom.aval
            value = jnp.asarray(atom.val, aval.dtype)
            return jnp.broadcast_to(value, (count, *aval.shape))

        def total(atom):
            eqn = self._tail(atom)
            if eqn is None:
                return jnp.sum(rows_of(atom), axis=0)
            if eqn.primitive is lax.dot_general_p:
                return _contract(eqn, *map(rows_of, eqn.invars))
            return _compat.bind_equation(eqn, [total(v) for v in eqn.invars])[0]

        return total(self._result)


def _is_plain(eqn) -> bool:
    if eqn.primitive.name == "jit":
        return all(map(_is_plain, _compat.open_jaxpr(eqn.params["jaxpr"]).eqns))
    return not _compat.jaxprs_in(eqn.params)


def _contract(eqn, a, b):
    """A dot_general of rows, contracted over the groups as well."""
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    shift = lambda dims: tuple(d + 1 for d in dims)
    dims = (
        ((0, *shift(contract_a)), (0, *shift(contract_b))),
        (shift(batch_a), shift(batch_b)),
    )
    return lax.dot_general(
        a, b, dims, eqn.params["precision"], eqn.params["preferred_element_type"]
    )
