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

import jax

from drjax import _compat
from drjax._errors import PlanError
from drjax._jaxprs import eval_jaxpr
from drjax._jaxprs.provenance import source_line
from drjax._jaxprs.walk import deep_equations, split_scan, split_while
from drjax._partition import Partition
from drjax._planner.inline import CALLS, any_of_batch, step_where
from drjax._primitives.map_fn import broadcast_consts, trace_group
from drjax._sharding.layout import make_layout
from drjax.primitives import map_fn_p, partition_index_p


def evaluate_for_group(jaxpr, group, partition: Partition | None, *args) -> list:
    """Evaluate a per-group jaxpr for one group, whose index replaces `partition_index`.

    Args:
      jaxpr: The jaxpr of one group, open or closed, such as that of a `map_fn`.
      group: The group index, an int32 scalar.
      partition: The partition whose index `group` is; None if the plan has none.
      *args: An array or tracer for each argument of the jaxpr: the slices of this
        group.

    Returns:
      The list of results of the jaxpr.

    Raises:
      PlanError: An equation other than a loop, a branch or a call contains a jaxpr that
        uses the group index.
    """
    # Without the index the jaxpr is called as it is, with its calls and their caches.
    if not _uses_group_index(jaxpr, partition):
        return _compat.jaxpr_as_fun(_compat.closed(jaxpr))(*args)

    def run(inner):
        return lambda *xs: evaluate_for_group(inner, group, partition, *xs)

    def step(eqn, operands):
        if _is_group_index(eqn, partition):
            return [group]
        if _is_inner_scope(eqn, partition) or not any(
            _uses_group_index(j, partition) for j in _compat.jaxprs_in(eqn.params)
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


def _is_group_index(eqn, partition: Partition | None) -> bool:
    """Whether an equation of a per-group jaxpr is the `partition_index` of `partition`.

    False for the `partition_index` of a program over another partition, which a mapped
    function calls.

    Args:
      eqn: The equation, of any primitive.
      partition: The partition of the plan; None: it has none, and the answer is False.
    """
    return (
        eqn.primitive is partition_index_p
        # Outside of a map_fn the primitive returns the indices of all groups.
        and eqn.params["per_group"]
        and eqn.params["partition"] == partition
    )


def _uses_group_index(jaxpr, partition: Partition | None) -> bool:
    """Whether a per-group jaxpr has the `partition_index` of `partition` at any depth.

    Mapped functions inside it over an equal partition are not searched: in them, it is
    the index of other groups.

    Args:
      jaxpr: The jaxpr of one group, open or closed.
      partition: The partition of the plan; None: it has none, and the answer is False.
    """
    outside = lambda eqn: not _is_inner_scope(eqn, partition)
    return any(
        _is_group_index(eqn, partition) for eqn in deep_equations(jaxpr, outside)
    )


def _is_inner_scope(eqn, partition: Partition | None) -> bool:
    """Whether `partition_index` means another group index inside of an equation.

    That is so in a `map_fn` over a partition that equals the plan's. In a jaxpr of one
    group, such a `map_fn` is that of an inner program, one that the mapped function
    calls. Its partition equals the outer one, so only its position tells the two group
    indices apart.

    Args:
      eqn: An equation of a per-group jaxpr, of any primitive.
      partition: The partition of the plan; None: it has none, and the answer is False.
    """
    return eqn.primitive is map_fn_p and eqn.params["partition"] == partition


# Rules that evaluate an equation again whose bodies use the group index:
# `rule(eqn, operands, run)` returns its results. `run(jaxpr)` is a function that
# evaluates a jaxpr with the index bound.


def _scan(eqn, operands, run):
    """Rebuild a scan whose step uses the group index, now a value from outside.

    Args:
      eqn: The scan, whose jaxpr uses the group index.
      operands: An array or tracer for each operand: constants, initial carried values,
        stacks.
      run: `run(jaxpr)` returns a function `(*args) -> list of results` that evaluates
        `jaxpr` with the group index in place of `partition_index`.

    Returns:
      The list of results of the scan: carried values, then stacked results.
    """
    consts, carry, xs = split_scan(eqn, operands)
    n_carry = len(carry)
    # Through the public function, as parameters of the primitive differ by version.
    body = run(eqn.params["jaxpr"])

    def step(carry, xs):
        outs = body(*consts, *carry, *xs)
        return outs[:n_carry], outs[n_carry:]

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, carry, xs, **options)
    return [*carry, *ys]


def _while(eqn, operands, run):
    """Rebuild a while that uses the group index, now a value from outside.

    Args:
      eqn: The while, of which a jaxpr uses the group index.
      operands: An array or tracer for each operand: constants of the condition,
        constants of the step, initial carried values.
      run: `run(jaxpr)` returns a function `(*args) -> list of results` that evaluates
        `jaxpr` with the group index in place of `partition_index`.

    Returns:
      The list of the final carried values.
    """
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


def _cond(eqn, operands, run):
    """Rebuild a cond whose branches use the group index, now a value from outside.

    Args:
      eqn: The cond, of which a branch uses the group index.
      operands: An array or tracer for each operand: the index of the branch, then the
        operands of all branches.
      run: `run(jaxpr)` returns a function `(*args) -> list of results` that evaluates
        `jaxpr` with the group index in place of `partition_index`.

    Returns:
      The list of results of the branch that the index selects.
    """
    index, *operands = operands
    # switch, not cond: the primitive has an integer index, also for two branches.
    return jax.lax.switch(index, [run(b) for b in eqn.params["branches"]], *operands)


def _map(eqn, operands, run):
    """Rebuild the `map_fn` of an inner program, which uses the outer group index.

    A mapped function calls the inner program, whose groups are inside one outer group.
    The function of an inner group closes over the outer group index, which is broadcast
    to all inner groups.

    Args:
      eqn: The `map_fn` of the inner program, over another partition than the outer one.
      operands: An array or tracer for each operand, with the inner groups along axis 0.
      run: `run(jaxpr)` returns a function `(*args) -> list of results` that evaluates
        `jaxpr` with the group index in place of `partition_index`.

    Returns:
      The list of results of the `map_fn`.
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
