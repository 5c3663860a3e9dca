"""The number of a group as an explicit argument of its jaxpr.

Inside a mapped function `partition_index` is an equation without operands. A stage
that runs anywhere must be told which group it works for. `evaluate` runs a per-group
jaxpr with the number given: where a loop, branch or call contains the equation, it is
rebuilt by JAX's public control flow around a closure over the number.
"""

import jax

from drjax import _compat
from drjax._errors import PlanError
from drjax._jaxprs import eval_jaxpr
from drjax._jaxprs.provenance import source_line
from drjax._partition import Partition
from drjax._planner.inline import CALLS, any_of_batch, step_where
from drjax.primitives import partition_index_p


def evaluate(jaxpr, number, partition: Partition | None, *args) -> list:
    """The results of a per-group jaxpr for the group with this number."""
    if not _asks(jaxpr, partition):
        return _compat.jaxpr_as_fun(_compat.closed(jaxpr))(*args)

    def run(inner):
        return lambda *xs: evaluate(inner, number, partition, *xs)

    def step(eqn, operands):
        if _is_number(eqn, partition):
            return [number]
        if not any(_asks(j, partition) for j in _compat.jaxprs_in(eqn.params)):
            return None
        rule = _RULES.get(eqn.primitive.name)
        if rule is None and eqn.primitive.name in CALLS:
            return run(eqn.params[CALLS[eqn.primitive.name]])(*operands)
        if rule is None:
            raise PlanError(
                f"drjax.partition_index() inside {eqn.primitive.name} at "
                f"{source_line(eqn)} has no plan. Compute the number outside, "
                "in the function given to drjax.map_fn, and close over it."
            )
        return rule(eqn, operands, run)

    return eval_jaxpr.evaluate(jaxpr, args, step)


def _is_number(eqn, partition: Partition | None) -> bool:
    return (
        eqn.primitive is partition_index_p
        and eqn.params["per_group"]
        and eqn.params["partition"] == partition
    )


def _asks(jaxpr, partition: Partition | None) -> bool:
    """Whether the number is used anywhere in a per-group jaxpr."""
    return any(
        _is_number(eqn, partition)
        or any(_asks(j, partition) for j in _compat.jaxprs_in(eqn.params))
        for eqn in _compat.open_jaxpr(jaxpr).eqns
    )


def _scan(eqn, operands, run):
    n_consts, n_carry = _compat.scan_sizes(eqn)
    consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
    body = run(eqn.params["jaxpr"])

    def step(carry, xs):
        outs = body(*consts, *carry, *xs)
        return outs[:n_carry], outs[n_carry:]

    carry, ys = jax.lax.scan(
        step, carry, operands[n_consts + n_carry :], eqn.params["length"],
        eqn.params["reverse"], eqn.params["unroll"],
    )  # fmt: skip
    return [*carry, *ys]


def _while(eqn, operands, run):
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    cond, body = run(params["cond_jaxpr"]), run(params["body_jaxpr"])
    goes_on = lambda *carry: cond(*cond_consts, *carry)[0]
    step = lambda *carry: body(*body_consts, *carry)
    if params["cond_jaxpr"].out_avals[0].shape:  # one for each element of a batch
        goes_on, step = any_of_batch(goes_on), step_where(goes_on, step)
    return jax.lax.while_loop(
        lambda carry: goes_on(*carry),
        lambda carry: step(*carry),
        list(operands[n_cond + n_body :]),
    )


def _cond(eqn, operands, run):
    index, *operands = operands
    return jax.lax.switch(index, [run(b) for b in eqn.params["branches"]], *operands)


_RULES = {"scan": _scan, "while": _while, "cond": _cond}
