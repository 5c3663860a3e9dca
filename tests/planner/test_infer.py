"""Partitioning inference alone: the kinds of variables in small programs.

Covers: drjax._planner.partitioning.infer, drjax._planner.partitioning.environment,
drjax._planner.partitioning.propagation_rules,
drjax._planner.partitioning.consistency, drjax._planner.partitioning.control_flow.
"""

import jax
import jax.numpy as jnp
import numpy as np
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


def test_a_building_block_has_a_kind_for_each_operand():
    """A map whose unused operands were dropped has none."""
    env = infer(lambda x: drjax.map_fn(lambda a, b: jnp.ones(2), (x, x)), X)
    [eqn] = env.program.eqns
    for num_operands in 0, 1, 2:
        operands = eqn.invars[:1] * num_operands
        kinds = env.signature(eqn.replace(invars=operands))
        assert kinds is not None
        assert kinds.operand_kinds == [PARTITIONED] * num_operands
        assert kinds.result_kinds == [PARTITIONED]


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


@pytest.mark.parametrize("first", [0, 1])
def test_two_demands_are_no_contradiction_in_either_order(first):
    """A value that one use takes partitioned, and another use must have global."""
    slices = lambda x: drjax.map_fn(jnp.sin, x)
    uses = [
        lambda x, z: drjax.reduce_sum(slices(x) * z),
        lambda x, z: drjax.reduce_sum(z.T),
    ]
    fn = program(lambda x, z: uses[first](x, z) + uses[1 - first](x, z))
    x = jnp.arange(16.0).reshape(4, 4)
    result = drjax.backends.reference.compile(drjax.make_plan(fn)(x, x))(x, x)
    np.testing.assert_allclose(result, jax.jit(fn)(x, x), rtol=1e-5)


MOVING_BODIES = {
    "scan": lambda y: lax.scan(lambda c, _: (c.T, None), y, length=3)[0],
    "scan in a scan": lambda y: lax.scan(
        lambda c, _: (lax.scan(lambda c, _: (c.T, None), c, length=1)[0], None),
        y,
        length=2,
    )[0],
    "while": lambda y: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1].T), (0, y)
    )[1],
    "cond": lambda y: lax.cond(True, lambda y: y.T, lambda y: y, y),
}


@pytest.mark.parametrize("name", MOVING_BODIES)
def test_a_body_that_moves_the_group_axis_is_refused(name):
    """Else a step would take slices along one axis for slices along another."""
    fn = program(lambda x: MOVING_BODIES[name](drjax.map_fn(jnp.sin, x)))
    with pytest.raises(drjax.PlanError, match="Move the group axis back at the end"):
        drjax.make_plan(fn)(SQUARE)


def test_a_body_that_moves_the_group_axis_and_back():
    def fn(x):
        step = lambda c, _: (jnp.sin(c.T).T, jnp.cos(c.T))
        return lax.scan(step, drjax.map_fn(jnp.sin, x), length=3)

    x = jnp.arange(16.0).reshape(4, 4)
    plan = drjax.make_plan(program(fn))(x)
    result = drjax.backends.reference.compile(plan)(x)
    for got, want in zip(result, jax.jit(program(fn))(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


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
