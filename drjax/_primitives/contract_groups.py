"""Sums over groups inside the map that makes the summands, where that saves memory.

The gradient of a broadcast value is a sum over groups of what a map computes, very
often of products of matrices. Made one by one, the summands of a device's k groups
need k times the memory of their sum. Hand-written code never makes them: the
transpose of a vmap contracts over the groups too. `RowSums` does the same: it walks
from the results of the per-group jaxpr back through the linear equations that end it,
with S(v) for the sum over groups of v,

    S(a + b) = S(a) + S(b)      S(-a) = -S(a)      S(transpose a) = transpose S(a)
    S(sum_j a_j b_j) = sum_{i,j} a_ij b_ij         (dot_general: one more contraction)
    S(sum_j a_j) = sum_{i,j} a_ij                  (reduce_sum: one more axis)

and sums whatever it meets elsewhere row by row.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from drjax import _compat
from drjax._primitives.rbg_per_group import in_turn_p
from drjax._sharding.eval_on_mesh import sharding_of_product

_THROUGH = (
    "neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "add", "add_any",
    "sub",
)  # fmt: skip
_CONTRACTED = (lax.dot_general_p, lax.reduce_sum_p)


class RowSums:
    """How to sum results of a per-group jaxpr over the rows of a device.

    Args:
      jaxpr: The per-group jaxpr of a map.

    Attributes:
      indices: The results to sum in this way: those for which a product or a sum is
        contracted that is good for nothing else. Only straight-line code counts: the
        compiler recognises that the map and the sums compute the same values and
        computes them once, but not so for loops.
      used: Which inputs of the jaxpr the sums take.
    """

    def __init__(self, jaxpr):
        raw = _compat.open_jaxpr(jaxpr)
        self._definitions = {v: e for e in raw.eqns for v in e.outvars}
        uses = collections.Counter(
            v for e in raw.eqns for v in e.invars if not isinstance(v, Literal)
        )
        uses.update(v for v in raw.outvars if not isinstance(v, Literal))
        self._used_once = {v for v, count in uses.items() if count == 1}
        plain = not raw.effects and all(map(_is_plain, raw.eqns))
        rows: dict[Any, None] = {}  # variables whose rows are needed, in order
        self.indices, self._results = [], []
        for index, result in enumerate(raw.outvars if plain else ()):
            contracts, needs = self._plan(result)
            if contracts:
                self.indices.append(index)
                self._results.append(result)
                rows.update(dict.fromkeys(needs))
        self._rows = list(rows)
        if self.indices:
            self._make_rows, self.used = _compat.select_outputs(jaxpr, self._rows)

    def _tail(self, atom) -> Any:
        """The equation that ends in `atom`, if the sum can go through it."""
        if isinstance(atom, Literal) or atom not in self._used_once:
            return None
        eqn = self._definitions.get(atom)
        if eqn is None or atom.aval.dtype != jnp.float32:
            return None
        through = eqn.primitive in _CONTRACTED or eqn.primitive.name in _THROUGH
        return eqn if through else None

    def _plan(self, atom) -> tuple[bool, list]:
        """Whether the sum of `atom` contracts anything, and which rows it needs."""
        eqn = self._tail(atom)
        if eqn is None:
            return False, [] if isinstance(atom, Literal) else [atom]
        if eqn.primitive in _CONTRACTED:
            return True, [v for v in eqn.invars if not isinstance(v, Literal)]
        parts = [self._plan(v) for v in eqn.invars]
        return any(c for c, _ in parts), [v for _, needs in parts for v in needs]

    def __call__(self, count: int, over_rows: Callable, operands) -> list:
        """The sums over `count` rows; `over_rows(fn)(*operands)` runs `fn` on all."""
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
            if eqn.primitive in _CONTRACTED:
                return _contract(eqn, *map(rows_of, eqn.invars))
            return _compat.bind_equation(eqn, [total(v) for v in eqn.invars])[0]

        return [total(result) for result in self._results]


row_sums = _compat.weakref_lru_cache(RowSums)


def _is_plain(eqn) -> bool:
    if eqn.primitive.name == "jit":
        return all(map(_is_plain, _compat.open_jaxpr(eqn.params["jaxpr"]).eqns))
    if eqn.primitive is in_turn_p:  # a loop, once it is batched
        return False
    return not _compat.jaxprs_in(eqn.params)


def _contract(eqn, a, b=None):
    """A dot_general or reduce_sum of rows, over the groups as well."""
    shift = lambda dims: tuple(d + 1 for d in dims)
    if b is None:
        return jnp.sum(a, axis=(0, *shift(eqn.params["axes"])))
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    dims = (
        ((0, *shift(contract_a)), (0, *shift(contract_b))),
        (shift(batch_a), shift(batch_b)),
    )
    return lax.dot_general(
        a, b, dims, eqn.params["precision"], eqn.params["preferred_element_type"],
        out_sharding=sharding_of_product(dims, a, b),
    )  # fmt: skip
