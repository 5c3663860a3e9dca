"""Partitioning inference alone: the kinds of variables in small programs.

Covers: drjax._planner.partitioning.infer, drjax._planner.partitioning.environment,
drjax._planner.partitioning.propagation_rules,
drjax._planner.partitioning.consistency.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import drjax
from drjax._partition import Partition
from drjax._planner.inline import inline_calls
from drjax._planner.partitioning.consistency import check_partitioning, contradictions
from drjax._planner.partitioning.infer import PHASES, infer_partitioning
from drjax._planner.partitioning.kind import FREE, GLOBAL, PARTITIONED
from drjax._planner.partitioning.kind import partitioned_along as along

CLIENTS = Partition("clients", 4)
X, SQUARE, MATRIX = jnp.ones(4), jnp.ones((4, 4)), jnp.ones((4, 3))
program = drjax.program(clients=4)


def infer(fn, *args, kinds=None, last_phase=PHASES[-1]):
    inlined = inline_calls(jax.make_jaxpr(program(fn))(*args))
    kinds = [None] * len(args) if kinds is None else kinds
    return infer_partitioning(inlined, CLIENTS, kinds, last_phase=last_phase)


def arguments(env):
    return [env[v] for v in env.program.invars]


def results(env):
    return [env[v] for v in env.program.outvars]


def test_demands_are_global_first_and_partitioned_then():
    def fn(model, data, unused):
        y = drjax.map_fn(jnp.multiply, (drjax.broadcast(model), data + 1.0))
        return y, drjax.reduce_sum(y), unused * 2.0

    args = jnp.float32(2), X, X
    env = infer(fn, *args)
    assert arguments(env) == [GLOBAL, PARTITIONED, GLOBAL]
    assert results(env) == [PARTITIONED, GLOBAL, GLOBAL]
    before = infer(fn, *args, last_phase="forward")
    assert [before.cell(v) for v in before.program.invars] == [FREE] * 3
    assert results(before)[0] == PARTITIONED


def test_the_group_axis_moves_with_the_layout():
    turned = lambda x: (drjax.map_fn(jnp.sin, x), x.T, jnp.sum(x, axis=1))
    env = infer(turned, MATRIX)
    assert results(env) == [PARTITIONED, along(1), PARTITIONED]


def test_an_argument_with_two_group_axes_is_global():
    fn = lambda x: (drjax.reduce_sum(x), drjax.reduce_sum(x.T))
    assert arguments(infer(fn, SQUARE)) == [GLOBAL]
    declared = infer(fn, SQUARE, kinds=[PARTITIONED])
    assert [v for e in declared.program.eqns for v in contradictions(declared, e)]
    with pytest.raises(drjax.PlanError, match="reduce_sum"):
        check_partitioning(declared)


def test_a_carried_value_is_partitioned_in_all_steps():
    def fn(x):
        step = lambda c, _: (drjax.map_fn(jnp.sin, c), drjax.reduce_sum(c))
        return lax.scan(step, x, None, length=3)

    env = infer(fn, X, kinds=[GLOBAL])
    ((eqn, loop),) = env.loops.items()
    assert env.is_loop(eqn)
    assert loop.operand_kinds == [PARTITIONED]
    assert loop.result_kinds == [PARTITIONED, GLOBAL]
    (body,) = loop.bodies
    assert arguments(body) == [PARTITIONED]
    # A global initial value is scattered before the loop.
    assert check_partitioning(env) is env
    again = infer_partitioning(env.program, CLIENTS, [GLOBAL])
    assert again.loops[eqn].bodies == (body,)
