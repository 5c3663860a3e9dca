"""The group index as an explicit argument of a per-group jaxpr.

Input: a per-group jaxpr that may hold `partition_index`, and an index. Output: the
results for the group with this index.

Inside a mapped function `partition_index` is an equation without operands, as
`jax.lax.axis_index` is. A local stage runs anywhere, one group at a time, so its jaxpr
takes the group index as its first argument. `evaluate_for_group` evaluates a per-group
jaxpr with the index bound: where a loop, branch or call contains the equation, it is
rebuilt by JAX's public control flow around a closure over the index.

Invariants: only the partition of the plan is bound; an inner program's index stays as
it is. Sharp edges: other equations with jaxprs in their parameters are refused.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax

from drjax import _compat
from drjax._compat.types import Array, ClosedJaxpr, Eqn, OpenJaxpr
from drjax._errors import PlanError
from drjax._jaxprs import eval_jaxpr
from drjax._jaxprs.provenance import source_line
from drjax._jaxprs.walk import CALLS, deep_equations, split_scan, split_while
from drjax._partition import Partition
from drjax._planner.inline import any_of_batch, step_where
from drjax._primitives.map_fn import broadcast_consts, trace_group
from drjax._sharding.layout import make_layout
from drjax.primitives import map_fn_p, partition_index_p


def evaluate_for_group(
    jaxpr: ClosedJaxpr | OpenJaxpr,
    group: Array,
    partition: Partition | None,
    *args: Array,
) -> list[Array]:
    """Evaluate a per-group jaxpr for one group, whose index replaces `partition_index`.

    `args` are the slices of this group, and `partition` is the one whose index `group`
    is; None if the plan has none. A jaxpr that uses the index in an equation other than
    a loop, a branch or a call raises a `PlanError`.
    """
    # Without the index the jaxpr is called as it is, with its calls and their caches.
    if not uses_group_index(jaxpr, partition):
        return _compat.jaxpr_as_fun(_compat.closed(jaxpr))(*args)

    def run(inner: ClosedJaxpr | OpenJaxpr) -> Callable[..., list[Array]]:
        return lambda *xs: evaluate_for_group(inner, group, partition, *xs)

    def step(eqn: Eqn, operands: list[Array]) -> Sequence[Array] | None:
        if _is_group_index(eqn, partition):
            return [group]
        if _is_inner_scope(eqn, partition) or not any(
            uses_group_index(j, partition) for j in _compat.jaxprs_in(eqn.params)
        ):
            return None
        # The index is bound inside of this equation, so it must be rebuilt.
        rule = _RULES.get(eqn.primitive.name)
        if rule is None and eqn.primitive.name in CALLS:
            return run(eqn.params[CALLS[eqn.primitive.name]])(*operands)
        if rule is None:
            raise PlanError(
                f"drjax.partition_index() inside {eqn.primitive.name} at "
                f"{source_line(eqn)} has no plan. Compute the index outside of "
                "it, in the function given to drjax.map_fn, and close over it."
            )
        return rule(eqn, operands, run)

    return eval_jaxpr.evaluate(jaxpr, args, step)


def _is_group_index(eqn: Eqn, partition: Partition | None) -> bool:
    """Whether an equation of a per-group jaxpr is the `partition_index` of `partition`.

    False for the `partition_index` of a program over another partition, which a mapped
    function calls; and if the plan has no partition.
    """
    return (
        eqn.primitive is partition_index_p
        # Outside of a map_fn the primitive returns the indices of all groups.
        and eqn.params["per_group"]
        and eqn.params["partition"] == partition
    )


def uses_group_index(
    jaxpr: ClosedJaxpr | OpenJaxpr, partition: Partition | None
) -> bool:
    """Whether a per-group jaxpr has the `partition_index` of `partition` at any depth.

    Mapped functions inside it over an equal partition are not searched: in them, it is
    the index of other groups.
    """
    outside = lambda eqn: not _is_inner_scope(eqn, partition)
    return any(
        _is_group_index(eqn, partition) for eqn in deep_equations(jaxpr, outside)
    )


def _is_inner_scope(eqn: Eqn, partition: Partition | None) -> bool:
    """Whether `partition_index` means another group index inside of an equation.

    That is so in a `map_fn` over a partition that equals the plan's. In a jaxpr of one
    group, such a `map_fn` is that of an inner program, one that the mapped function
    calls. Its partition equals the outer one, so only its position tells the two group
    indices apart.
    """
    return eqn.primitive is map_fn_p and eqn.params["partition"] == partition


# Rules that evaluate an equation again whose bodies use the group index:
# `rule(eqn, operands, run)` returns its results. `run(jaxpr)` is a function that
# evaluates a jaxpr with the index bound.
Run: TypeAlias = Callable[[ClosedJaxpr], Callable[..., list[Array]]]


def _scan(eqn: Eqn, operands: Sequence[Array], run: Run) -> list[Array]:
    """Rebuild a scan whose step uses the group index, now a value from outside."""
    consts, carry, xs = split_scan(eqn, operands)
    n_carry = len(carry)
    # Through the public function, as parameters of the primitive differ by version.
    body = run(eqn.params["jaxpr"])

    def step(
        carry: Sequence[Array], xs: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        outs = body(*consts, *carry, *xs)
        return outs[:n_carry], outs[n_carry:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, carry, xs, **options)
    return [*carry, *ys]


def _while(eqn: Eqn, operands: Sequence[Array], run: Run) -> Sequence[Array]:
    """Rebuild a while that uses the group index, now a value from outside."""
    params = eqn.params
    cond_consts, body_consts, init = split_while(eqn, operands)
    cond, body = run(params["cond_jaxpr"]), run(params["body_jaxpr"])
    condition = lambda *carry: cond(*cond_consts, *carry)[0]
    step = lambda *carry: body(*body_consts, *carry)
    # vmap gives the primitive a condition for each element; lax.while_loop takes one.
    if params["cond_jaxpr"].out_avals[0].shape:  # a batch of conditions
        condition, step = any_of_batch(condition), step_where(condition, step)
    return jax.lax.while_loop(
        lambda carry: condition(*carry),
        lambda carry: step(*carry),
        init,
    )


def _cond(eqn: Eqn, operands: Sequence[Array], run: Run) -> Sequence[Array]:
    """Rebuild a cond whose branches use the group index, now a value from outside."""
    index, *operands = operands
    # switch, not cond: the primitive has an integer index, also for two branches.
    return jax.lax.switch(index, [run(b) for b in eqn.params["branches"]], *operands)


def _map(eqn: Eqn, operands: Sequence[Array], run: Run) -> list[Array]:
    """Rebuild the `map_fn` of an inner program, which uses the outer group index.

    A mapped function calls the inner program, whose groups are inside one outer group,
    and lie along axis 0 of the operands. The function of an inner group closes over the
    outer group index, which is broadcast to all inner groups.
    """
    params = dict(eqn.params)
    layout = make_layout(params["partition"], params["mesh"])
    avals = [_compat.typeof(x) for x in operands]
    body = run(params.pop("jaxpr"))
    jaxpr, consts = trace_group(body, avals, layout, params["name"])
    copies = broadcast_consts(consts, **params)
    return map_fn_p.bind(*copies, *operands, jaxpr=jaxpr, **params)


# Calls need no rule: the jaxpr that they call is evaluated in their place.
_RULES = {"scan": _scan, "while": _while, "cond": _cond, map_fn_p.name: _map}
