"""Sum over the groups inside the map that computes the summands, to save memory.

Input: the per-group jaxpr of a map, prepared for a device; then the number k of groups
of a device, and the operands. Output: for some results of the jaxpr, their sums over
the k groups.

The gradient of a broadcast value is a sum over groups of what a map computes, very
often of products of matrices. The summands of k groups need k times the memory of their
sum. Hand-written code never materializes them: the transpose of a vmap contracts the
group axis, too. `GroupSums` does the same. With S(v) = sum_i v_i over the groups i of a
device, it walks back from the results through the linear equations that end the jaxpr:

    S(a + b) = S(a) + S(b)      S(a - b) = S(a) - S(b)      S(-a) = -S(a)
    S(P a) = P S(a)                     P: transpose, reshape, squeeze, broadcast_in_dim
    S(sum_j a_j b_j) = sum_{i,j} a_ij b_ij       (dot_general: contracts i with j)
    S(sum_j a_j) = sum_{i,j} a_ij                (reduce_sum: one more axis)

Every other variable v that the walk arrives at is computed for each group, and S(v) is
a plain sum. The first two lines are linearity of S, and P acts on each group's slice
alone. For the last two, i and j are both summed, so the order of the sums is free
(Fubini), and one `dot_general` with both in its contracting dimensions computes them.
Free and batch dimensions keep their order, as the group axis stands first.

Invariants: a walk passes only through variables with one use, as others are computed
for each group anyway; the sums equal those of separate summands up to rounding.
Sharp edges: float32 only (a contraction of 16-bit floats would round to 16 bits); a
jaxpr with effects, or with equations that hold jaxprs (but `jit`), has no such sums.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Array, Atom, ClosedJaxpr, Eqn, Var
from drjax._jaxprs import walk
from drjax._primitives.rbg_per_group import draw_per_key_p
from drjax._sharding.eval_on_mesh import (
    evaluate_on_mesh,
    in_one_sharding,
    sharding_of_product,
)

# Linear in all operands together, and independent of the group axis.
_THROUGH = (
    "neg", "transpose", "reshape", "squeeze", "broadcast_in_dim", "add", "add_any",
    "sub",
)  # fmt: skip
# Sums of their own, into which the sum over the groups merges. The walk ends at them.
_CONTRACTED = (lax.dot_general_p, lax.reduce_sum_p)


class GroupSums:
    """Sums of results of a per-group jaxpr over the groups of a device, to save memory.

    If a result is a product of matrices, its sum over k groups is one product that
    contracts the group axis, too, and the k products are never stored. The constructor
    finds the results for which this is possible: those that linear equations
    (additions, negations, reshapes) compute from a `dot_general` or a `reduce_sum` with
    no other use. It also finds the variables from which their sums are computed. A call
    computes these variables for each group by a vmap, and from them the sums.

    The jaxpr has no constants.

    Attributes:
      indices: The positions of the results to sum in this way. It is empty unless the
        jaxpr is straight-line code: the compiler's common subexpression elimination
        merges what the map and the sums both compute, but it does not merge loops.
      per_group: The variables of the jaxpr that are computed for each group.
      used: For each input of the jaxpr, in order, whether a call takes it. It exists
        only if `indices` is not empty.
    """

    def __init__(self, jaxpr: ClosedJaxpr) -> None:
        raw = _compat.open_jaxpr(jaxpr)
        self._definitions = walk.definitions(raw.eqns)
        uses = collections.Counter(
            v for e in raw.eqns for v in walk.variables(e.invars)
        )
        uses.update(walk.variables(raw.outvars))
        self._used_once = {v for v, count in uses.items() if count == 1}
        plain = not raw.effects and all(map(_is_plain, raw.eqns))
        # Variables to compute for each group. A dict is an ordered set: one value of
        # each, in an order that does not depend on hashes.
        per_group: dict[Any, None] = {}
        self.indices, self._results = [], []
        for index, result in enumerate(raw.outvars if plain else ()):
            contracts, needs = self._plan(result)
            if contracts:
                self.indices.append(index)
                self._results.append(result)
                per_group.update(dict.fromkeys(needs))
        self.per_group = list(per_group)
        if self.indices:
            self._live, self.used = _compat.select_outputs(jaxpr, self.per_group)

    def _linear_equation(self, atom: Atom) -> Eqn | None:
        """Return the equation of an atom, if a sum over groups can pass through it.

        There are two sorts of such equations. The sum over groups of an addition,
        subtraction, negation, transpose, reshape, squeeze or `broadcast_in_dim` is the
        same equation of the sums of its operands. That of a `dot_general` or
        `reduce_sum` is one such equation over the slices of all groups.

        None if the atom is a literal or an input of the jaxpr, has more than one use,
        is not float32, or is computed by any other primitive: then its sum needs its
        value in each group.
        """
        if isinstance(atom, Literal) or atom not in self._used_once:
            return None
        eqn = self._definitions.get(atom)
        if eqn is None or atom.aval.dtype != jnp.float32:
            return None
        through = eqn.primitive in _CONTRACTED or eqn.primitive.name in _THROUGH
        return eqn if through else None

    def _plan(self, atom: Atom) -> tuple[bool, list[Var]]:
        """Find the variables from which the sum of an atom over groups is computed.

        It walks back from the atom through linear equations, which `_linear_equation`
        returns. A walk ends at the operands of a `dot_general` or `reduce_sum`, and at
        a variable for which there is no such equation.

        Returns whether the walk has met a `dot_general` or `reduce_sum`, which can sum
        over the groups, too (if not, nothing is saved over a plain sum over the group
        axis); and the variables to compute for each group, perhaps with duplicates.
        """
        eqn = self._linear_equation(atom)
        if eqn is None:
            return False, [] if isinstance(atom, Literal) else [atom]
        if eqn.primitive in _CONTRACTED:
            return True, walk.variables(eqn.invars)
        parts = [self._plan(v) for v in eqn.invars]
        return any(c for c, _ in parts), [v for _, needs in parts for v in needs]

    def __call__(
        self,
        count: int,
        vmap_over_groups: Callable[[Callable], Callable],
        operands: Sequence[Array],
    ) -> list[Array]:
        """Compute the sums of the results in `indices` over the groups, `[*s]` each.

        It may be called only if `indices` is not empty. `vmap_over_groups` makes of a
        function of one group, which takes and returns flat sequences of arrays `[*s]`,
        the function of all groups, which takes `operands` and returns arrays `[count,
        *s]`. `operands` are the inputs of the jaxpr that are marked in `used`, in
        order: `[count, *s]`, or `[*s]` if the groups share one. The sums are in the
        order of `indices`.
        """
        run = lambda *inputs: evaluate_on_mesh(self._live, inputs)
        return self.of_stacks(count, vmap_over_groups(run)(*operands))

    def of_stacks(self, count: int, stacks: Sequence[Array]) -> list[Array]:
        """Compute the sums from the values of the variables in `per_group`.

        `stacks` are those of all groups of a device, `[count, *s]`.
        """
        known = dict(zip(self.per_group, stacks, strict=True))

        def slices_of(atom: Atom) -> Array:
            if not isinstance(atom, Literal):
                return known[atom]
            # A literal is the same for each group: S(literal) = count * literal.
            aval: Any = atom.aval
            value = jnp.asarray(atom.val, aval.dtype)
            return jnp.broadcast_to(value, (count, *aval.shape))

        def total(atom: Atom) -> Array:
            eqn = self._linear_equation(atom)
            if eqn is None:
                return jnp.sum(slices_of(atom), axis=0)
            if eqn.primitive in _CONTRACTED:
                return _contract(eqn, *map(slices_of, eqn.invars))
            # Its parameters have the shapes of one group, and so have the sums.
            totals = in_one_sharding(eqn, [total(v) for v in eqn.invars])
            return _compat.bind_equation(eqn, totals)[0]

        return [total(result) for result in self._results]


# Forward mode, reverse mode and each retracing lower the same jaxpr.
group_sums = _compat.weakref_lru_cache(GroupSums)


def _is_plain(eqn: Eqn) -> bool:
    """Whether an equation is straight-line code: no loop or branch, no call but `jit`.

    The body of a `jit` has to be straight-line code, too. An equation of
    `draw_per_key`, which draws random bits for one group, is not: batched, it is a loop
    over the groups.
    """
    if eqn.primitive.name == "jit":
        return all(map(_is_plain, _compat.open_jaxpr(eqn.params["jaxpr"]).eqns))
    if eqn.primitive is draw_per_key_p:  # a loop, once it is batched
        return False
    return not _compat.jaxprs_in(eqn.params)


def _contract(eqn: Eqn, a: Array, b: Array | None = None) -> Array:
    """Sum the result of a `dot_general` or a `reduce_sum` equation over the groups.

    The group axis becomes one more contracting dimension of the product, or one more
    axis of the sum, so that the results of the groups are never stored. `eqn` is that
    of one group, and the sum has the shape of its result. The operands are `[count,
    *s]`, of all groups; `b` is None for a `reduce_sum`.
    """
    shift = lambda dims: tuple(d + 1 for d in dims)
    if b is None:
        return jnp.sum(a, axis=(0, *shift(eqn.params["axes"])))
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    # The group axis 0 becomes a contracting dimension. As a batch dimension, which is
    # what vmap makes of it, it would stay in the result.
    dims = (
        ((0, *shift(contract_a)), (0, *shift(contract_b))),
        (shift(batch_a), shift(batch_b)),
    )
    # The sum has the type of one group's product.
    sharding = eqn.params["out_sharding"] or sharding_of_product(dims, a, b)
    return lax.dot_general(
        a, b, dims, eqn.params["precision"], eqn.params["preferred_element_type"],
        out_sharding=sharding,
    )  # fmt: skip
