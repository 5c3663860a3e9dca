"""What rounds and steps of loops do not rematerialize.

That are slices which a later round compares with a reduction's result, as they must be
bitwise equal; and costly work.

Covers: drjax._planner.bitwise_observable, drjax._planner.rematerialize_loops.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax._jaxprs.walk import deep_equations
from drjax._planner import bitwise_observable
from drjax._planner.inline import inline_calls
from drjax._planner.unbatching.rules import ELEMENTWISE, UNBATCHING_RULES
from drjax.backends import xla
from tests.helpers.cases import checkerboard

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N = 256
program = drjax.program(clients=N)
ARGS = (
    jax.random.normal(jax.random.key(1), (7,)),
    jax.random.normal(jax.random.key(0), (N, 16, 7)),
)


def loss(w, x):
    h = jnp.tanh(x @ w) * jnp.sin(x[:, 0])
    smooth = jnp.mean(h**2 / jnp.sqrt(1 + h * h)) + jnp.exp(-0.1 * jnp.sum(h))
    return smooth + jnp.mean(jnp.log1p(jnp.exp(-(x @ w) * jnp.sign(x[:, 0]))))


def losses(w, x):
    return drjax.map_fn(loss, (drjax.broadcast(w), x))


def gradients(w, x):
    return drjax.map_fn(jax.grad(loss), (drjax.broadcast(w), x))


def chosen(compare, slices, value):
    """1 for groups for which the comparison of slice and global value is true."""
    one = lambda slice_, value: jnp.float32(compare(slice_, value))
    return drjax.map_fn(one, (slices, drjax.broadcast(value)))


@program
def of_least_loss(w, x):
    slices = losses(w, x)
    mine = chosen(jnp.equal, slices, drjax.reduce_min(slices))
    return drjax.reduce_weighted_mean(gradients(w, x), mine)


@program
def of_least_loss_with_gradient(w, x):
    """The loss and the rematerialized gradients come from one mapped function."""
    slices, grads = drjax.map_fn(jax.value_and_grad(loss), (drjax.broadcast(w), x))
    mine = chosen(jnp.equal, slices, drjax.reduce_min(slices))
    return drjax.reduce_weighted_mean(grads, mine)


@program
def of_least_loss_that_may(w, x):
    """The extremum is that of slices some of which were replaced."""
    slices, number = losses(w, x), drjax.partition_index()
    may = lambda slice_, i: jnp.where(i >= 10, slice_, jnp.inf)
    least = drjax.reduce_min(drjax.map_fn(may, (slices, number)))
    grads = gradients(w, x)
    return drjax.reduce_weighted_mean(grads, chosen(jnp.equal, slices, least))


@program
def of_a_hundred(w, x):
    slices = losses(w, x)
    threshold = jnp.sort(drjax.gather(slices))[-100]
    mine = chosen(jnp.greater_equal, slices, threshold)
    return drjax.reduce_sum(mine), drjax.reduce_weighted_mean(gradients(w, x), mine)


@program
def of_the_loss_of_one(w, x):
    slices = losses(w, x)
    mine = chosen(jnp.equal, slices, drjax.select(slices, 37))
    return drjax.reduce_weighted_mean(gradients(w, x), mine)


@program
def ranks(w, x):
    slices = losses(w, x)
    rank = lambda slice_, every: jnp.sum(every > slice_)
    return drjax.map_fn(rank, (slices, drjax.broadcast(drjax.gather(slices))))


@program
def of_least_losses_by_segment(w, x):
    """The derivative of a minimum by segment compares the losses with it."""
    by = jnp.arange(N) % 3
    least = lambda w: drjax.reduce_min(losses(w, x), by=by, num=3)
    return jax.grad(lambda w: jnp.sum(least(w) * jnp.arange(1.0, 4.0)))(w)


PROGRAMS = [
    of_least_losses_by_segment,
    of_least_loss,
    of_least_loss_with_gradient,
    of_least_loss_that_may,
    of_a_hundred,
    of_the_loss_of_one,
    ranks,
]


@pytest.mark.once
@checkerboard(7, fn=PROGRAMS, step=[1, 64])
def test_they_are_found(fn, step):
    expected = jax.jit(fn)(*ARGS)
    assert not any(bool(jnp.isnan(x).any()) for x in jax.tree.leaves(expected))
    run = xla.compile(drjax.make_plan(fn)(*ARGS), groups_per_step=step)
    for result in (drjax.jit(fn, groups_per_step=step)(*ARGS), jax.jit(run)(*ARGS)):
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        jax.tree.map(close, result, expected)


def test_ranks_are_a_permutation():
    result = drjax.jit(ranks, groups_per_step=64)(*ARGS)
    np.testing.assert_array_equal(jnp.sort(result), jnp.arange(N))


MOVES = {
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(jnp.zeros(9), x, (1,)),
    "scatter": lambda x: jnp.zeros(9).at[jnp.arange(7)].set(x),
    "scatter-max": lambda x: jnp.zeros(9).at[jnp.arange(7)].max(x),
    "reduce_window_max": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (2,), (1,), "VALID"
    ),
    "sort": jnp.sort,
    "concatenate": lambda x: jnp.concatenate([x, x[:2]]),
    "select_n": lambda x: lax.select(x > 3, lax.full_like(x, -1.0), x),
}


@pytest.mark.parametrize("name", MOVES)
def test_values_that_are_moved_before_they_are_compared(name):
    def fn(x):
        doubled = drjax.map_fn(lambda a: 2 * a, x)
        return drjax.gather(drjax.map_fn(MOVES[name], doubled))

    inlined = inline_calls(jax.make_jaxpr(program(fn))(ARGS[1][:, 0]))
    doubling, moving, _ = inlined.eqns
    assert name in str(moving.params["jaxpr"])
    assert doubling.outvars[0] in bitwise_observable.bitwise_observable(inlined)


@pytest.mark.parametrize("move", [drjax.take, functools.partial(drjax.put, add=True)])
def test_slices_that_other_groups_get(move):
    def fn(x, index):
        return move(drjax.map_fn(lambda a: 2 * a, x), index)

    index = jnp.arange(N)[::-1]
    inlined = inline_calls(jax.make_jaxpr(program(fn))(ARGS[1][:, 0], index))
    (doubling,) = (e for e in inlined.eqns if e.primitive is drjax.primitives.map_fn_p)
    assert doubling.outvars[0] in bitwise_observable.bitwise_observable(inlined)


INFINITY = jnp.float32(jnp.inf)
LOOPS = {
    "cond": lambda x: lax.cond(
        x.sum() > 0, lambda: drjax.reduce_min(x), lambda: drjax.reduce_max(x)
    ),
    "scan": lambda x: lax.scan(
        lambda c, _: (jnp.minimum(c, drjax.reduce_min(x)), None), INFINITY, length=2
    )[0],
    "while": lambda x: lax.while_loop(
        lambda c: c < 2, lambda c: c + drjax.gather(-x).sum(), jnp.float32(0)
    ),
    "condition of a while": lambda x: lax.while_loop(
        lambda c: c < drjax.reduce_max(x), lambda c: c + 1, jnp.float32(0)
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_values_that_a_loop_compares(name):
    def fn(x):
        return LOOPS[name](drjax.map_fn(lambda a: 2 * a, x))

    inlined = inline_calls(jax.make_jaxpr(program(fn))(ARGS[1][:, 0, 0]))
    doubled = inlined.eqns[0].outvars[0]
    assert doubled in bitwise_observable.bitwise_observable(inlined)


def test_values_that_a_loop_adds_are_rematerialized():
    def fn(x):
        doubled = drjax.map_fn(lambda a: 2 * a, x)
        add = lambda c, _: (c + drjax.reduce_sum(doubled), None)
        return lax.scan(add, jnp.float32(0), length=2)[0]

    inlined = inline_calls(jax.make_jaxpr(program(fn))(ARGS[1][:, 0, 0]))
    assert not bitwise_observable.bitwise_observable(inlined)


def masked_maximum(x):
    index = drjax.partition_index()
    kept = drjax.map_fn(lambda v, i: jnp.where(i > 3, v, -jnp.inf), (x, index))
    return chosen_slices(kept, drjax.reduce_max(kept))


def chosen_slices(slices, value):
    equal = lambda slice_, value: jnp.where(slice_ == value, 1.0, 0.0)
    return drjax.reduce_sum(drjax.map_fn(equal, (slices, drjax.broadcast(value))))


OF_ARGUMENTS = {
    "argmax": drjax.reduce_argmax,
    "argmin, where": lambda x: drjax.reduce_argmin(x, where=jnp.arange(len(x)) > 2),
    "stopped": lambda x: chosen_slices(
        lax.stop_gradient(x), drjax.reduce_max(lax.stop_gradient(x))
    ),
    "masked": masked_maximum,
    "moved": lambda x: chosen_slices(
        drjax.map_fn(lambda v: -v[::-1], x),
        drjax.reduce_max(drjax.map_fn(lambda v: -v[::-1], x)),
    ),
    "gathered": lambda x: chosen_slices(
        drjax.map_fn(jnp.negative, x), drjax.gather(drjax.map_fn(jnp.negative, x))[2]
    ),
    "gradient": jax.grad(lambda x: drjax.reduce_max(x).sum()),
}


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_what_is_moved_from_arguments_is_no_copy(name):
    """Two passes over the argument, without a slice for each group in between."""
    x = jax.random.normal(jax.random.key(3), (64, 500))
    fn = drjax.program(clients=64)(OF_ARGUMENTS[name])
    run: Any = drjax.jit(fn, groups_per_step=1).lower(x).compile()
    np.testing.assert_array_equal(run(x), jax.jit(fn)(x))
    gathered = 2 * 64 * (name == "gathered")
    slices = run.memory_analysis().temp_size_in_bytes / x[0].nbytes
    assert slices <= 8 + gathered
    assert not saved(drjax.make_plan(fn)(x))


def saved(plan):
    """Slices that a round takes from an earlier one."""
    taken = {v.name for r in plan.rounds for v in r.local.inputs if v.partitioned}
    return taken & {v.name for r in plan.rounds for v in r.local.outputs}


def test_what_rounds_is_kept():
    def fn(x):
        halved = drjax.map_fn(lambda v: (v / 3).astype("bfloat16"), x)
        wide = drjax.map_fn(lambda v: v.astype("float32"), halved)
        return chosen_slices(wide, drjax.reduce_max(wide))

    plan = drjax.make_plan(program(fn))(ARGS[1][:, 0])
    (name,) = saved(plan)
    # Not the bfloat16: compilers may leave out the rounding where they compute both.
    outputs = plan.rounds[0].local.outputs
    assert [v.dtype for v in outputs if v.name == name] == [np.float32]


def test_each_primitive_moves_values_or_computes_new_ones():
    computes = """argmax argmin bitcast_convert_type cholesky conv_general_dilated
        cumlogsumexp cumprod cumsum dot_general eig eigh fence fft hessenberg
        householder_product lu lu_pivots_to_permutation qr random_gamma random_unwrap
        random_wrap reduce_and reduce_or reduce_prod reduce_sum reduce_window_sum
        reduce_xor scatter-add scatter-mul scatter-sub schur select_and_scatter_add sort
        svd triangular_solve tridiagonal tridiagonal_solve""".split()
    rules = set(UNBATCHING_RULES) - ELEMENTWISE
    assert rules == (set(computes) | set(bitwise_observable.MOVED_OPERANDS)) & rules
    assert not set(computes) & set(bitwise_observable.MOVED_OPERANDS)


def test_only_they_are_kept():
    """The gradients are rematerialized, the losses are not."""
    plan = drjax.make_plan(of_least_loss_with_gradient)(*ARGS)
    taken = [v.shape for v in plan.rounds[1].local.inputs if v.partitioned]
    assert sorted(taken) == [(), ARGS[1].shape[1:]]


def costly_svd(x):
    return jnp.linalg.svd(x, compute_uv=False)[:7]


def costly_convolution(x):
    return lax.conv_general_dilated(x[None, None], x[None, None], (1, 1), "SAME")[0, 0]


COSTLY = {
    "svd": costly_svd,
    "conv_general_dilated": costly_convolution,
    "sort": jnp.sort,
}


@pytest.mark.parametrize("primitive", COSTLY)
def test_costly_work_that_no_step_changes_is_done_once(primitive):
    """A loop reads its results as constants, and does the work in no step."""
    work = COSTLY[primitive]

    @program
    def fn(w, x):
        constant = drjax.map_fn(work, x)

        def step(w, _):
            products = drjax.map_fn(jnp.vdot, (drjax.broadcast(w), constant))
            return w - 0.1 * drjax.reduce_mean(products), None

        return lax.scan(step, w, length=3)[0]

    w = jnp.ones(jax.eval_shape(work, ARGS[1][0]).shape)
    (a_round,) = drjax.make_plan(fn)(w, ARGS[1]).rounds
    (step,) = a_round.loops[0].bodies[0].rounds
    count = lambda stage: sum(
        eqn.primitive.name == primitive for eqn in deep_equations(stage.jaxpr)
    )
    assert (count(a_round.local), count(step.local)) == (1, 0)
