"""Folds in plans: values on meshes and by chunks, memory, bytes, text, and loops.

Covers: drjax.backends.xla.fold_states, drjax.backends.xla.folds_around,
drjax._planner.build_stages.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import temp_bytes
from tests.helpers.folds import (
    FOLDS,
    MESHES,
    close,
    data,
    direct_of,
    loss_of,
    program_of,
)
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

STEPS = {"all": None, "one": 1, "two": 2}


@checkerboard(21, mesh=MESHES, name=FOLDS, step=STEPS)
def test_values(name, mesh, step):
    n, make = MESHES[mesh]
    x = data(n, 3)
    want = jax.jit(direct_of(name))(x)
    with in_mesh(make and make()):
        f = drjax.jit(program_of(name, n), groups_per_step=STEPS[step])
        jax.tree.map(close, f(x), want)


@pytest.mark.slow
@checkerboard(6, mesh=["uneven", "none", "explicit"], name=["affine", "chan"])
def test_derivatives(name, mesh):
    n, make = MESHES[mesh]
    x, dx = data(n, 3) / 2, data(n + 1, 3)[1:]

    def derivatives(f):
        loss = loss_of(f)
        second = lambda x: jax.jvp(jax.grad(loss), (x,), (dx,))[1]
        return lambda x: (jax.value_and_grad(loss)(x), second(x), f(x))

    want = jax.jit(derivatives(direct_of(name)))(x)
    with in_mesh(make and make()):
        f = drjax.jit(derivatives(program_of(name, n)), groups_per_step=2)
        jax.tree.map(functools.partial(close, rtol=2e-3, atol=1e-3), f(x), want)


def _power(x, t):
    """A fold whose states a group computes, and whose function closes over arrays."""
    times = lambda a, b: (a[0] * b[0] * t, a[1] @ b[1])
    states = drjax.map_fn(lambda a: (jnp.sin(a), jnp.outer(a, a) + jnp.eye(3)), x)
    return drjax.reduce(times, states, (1 / t, jnp.eye(3))), drjax.reduce_mean(
        states[0]
    )


@checkerboard(4, mesh=["uneven", "none", "empty devices", "explicit"])
def test_what_is_closed_over_and_other_reductions(mesh):
    n, make = MESHES[mesh]
    x, t = data(n, 3), np.arange(1, 4, dtype=np.float32)
    f = drjax.program(clients=n)(_power)
    want = jax.jit(f)(x, t)
    plan = drjax.make_plan(f)(x, t)
    assert len(plan.rounds) == 1
    jax.tree.map(close, drjax.backends.reference.compile(plan)(x, t), want)
    with in_mesh(make and make()):
        result = drjax.jit(f, groups_per_step=1)(x, t)
        jax.tree.map(close, result, want)
        jax.tree.map(close, drjax.backends.xla.compile(plan)(x, t), want)


def test_text_and_ledger():
    n = 4
    plan = drjax.make_plan(drjax.program(clients=n)(_power))(data(n, 3), np.ones(3))
    assert "fold in order" in str(plan) and "48 B a group by function" in str(plan)
    folds = [m for m in plan.communication().messages if m.op == "fold"]
    assert [m.nbytes for m in folds] == [12, 36]
    assert plan.communication().up() == 12 + 36 + 12
    (fold,) = plan.rounds[0].folds
    assert [v.name for v in fold.consts] == ["t"] and not fold.commutative
    assert "round 1, fold 0" in dict(plan.stages())


def test_memory_is_that_of_one_step():
    """Temporary memory does not grow with n, nor bytes: two states, by columns."""
    d, m, used = 1000, 4, []

    def f(x):
        y = drjax.map_fn(lambda a: a * jnp.arange(1.0, d + 1), x)
        return drjax.reduce(jnp.logaddexp, y, -jnp.inf)

    with jax.set_mesh(make_mesh({"clients": m})):
        for n in (16, 256):
            run = drjax.jit(drjax.program(clients=n)(f), groups_per_step=2)
            x = drjax.shard(np.ones((n,), np.float32), partition={"clients": n})
            used.append(temp_bytes(run, x))
            report = drjax.collectives(run)(x)
            sent = [(c.kind, c.result_bytes) for c in report.collectives]
            assert sorted(sent) == [("all-gather", d * 4), ("all-to-all", d * 4)]
    assert used[0] == used[1] < 16 * d * 4


def test_a_pointwise_function_is_in_no_branch():
    """Of results of a branch the accumulator is a copy; zeros of states pass none."""
    x = np.ones((8, 3, 3), np.float32)

    def branches(combine, init):
        f = drjax.program(clients=8)(lambda x: drjax.reduce(combine, x, init))
        run = drjax.jit(f, groups_per_step=1)
        np.testing.assert_allclose(run(x), f(x), rtol=1e-6)
        return run.lower(x).as_text().count("stablehlo.case")

    assert branches(lambda a, b: a * b / 2, 2.0) == 0
    assert branches(jnp.matmul, jnp.eye(3)) > 0


@pytest.mark.slow
@checkerboard(3, mesh=["auto", "explicit", "loop"])
def test_a_gradient_sends_states_of_devices_alone(mesh):
    """The folds around groups stay on their devices, by rounds as under jax.jit."""
    n, d, m = 12 if mesh == "explicit" else 11, 7, 4

    @drjax.program(clients=n)
    def f(x):
        def step(w, _):
            near_one = lambda a, w: jnp.eye(d) + jnp.sin(a) * w / 10
            y = drjax.map_fn(near_one, (x, drjax.broadcast(w)))
            # No pointwise function: those are folded by columns.
            return drjax.reduce(jnp.matmul, y, jnp.eye(d)), None

        w = jnp.ones((d, d))
        w = jax.lax.scan(step, w, None, 2)[0] if mesh == "loop" else step(w, None)[0]
        return w.sum()

    x = np.sin(np.arange(n * d * d, dtype=np.float32)).reshape(n, d, d)
    gradient = jax.value_and_grad(f)
    want, plan = jax.jit(gradient)(x), drjax.make_plan(gradient)(x)
    sent = lambda run: {
        (c.kind, c.result_bytes) for c in drjax.collectives(jax.jit(run))(x).collectives
    }
    with in_mesh(make_mesh({"clients": m}, EXPLICIT if mesh == "explicit" else AUTO)):
        expected = sent(gradient)
        # Besides, the gradient of an array that is on one device is gathered, and in a
        # loop the cotangents of what a round broadcasts are added.
        others = {("all-gather", 12 * d * d * 4), ("all-reduce", d * d * 4)}
        assert expected - others == {("collective-permute", d * d * 4)}
        assert (("all-reduce", d * d * 4) in expected) == (mesh == "loop")
        by_plan = drjax.backends.xla.compile(plan)
        for run in (drjax.jit(gradient, groups_per_step=1), by_plan):
            assert sent(run) == expected
            jax.tree.map(close, jax.jit(run)(x), want)


def test_gradients_of_one_function_with_two_arrays():
    """Two folds of the same states, whose function closes over an array of each."""
    n = 4
    x, t = data(n, 3), np.array([2.0, 0.5], np.float32)

    @jax.jit  # traced once
    def product(x, one, s):
        return drjax.reduce(lambda a, b: a * b * s, x, one)

    @drjax.program(clients=n)
    def loss(x, one, t):
        return sum(jnp.sum(product(x, one, t[i]) ** 2) for i in range(2))

    gradient, one = jax.grad(loss), np.ones(3, np.float32)
    want = sum(2 * (s**n * x.prod(0)) ** 2 / x for s in t)
    with jax.set_mesh(make_mesh({"clients": 2})):
        run = drjax.jit(gradient)
        close(run(x, one, t), want)
        assert drjax.collectives(run)(x, one, t).counts == {"all-gather": 2}


@pytest.mark.slow
def test_derivatives_of_a_compiled_gradient():
    n = 4
    grad = jax.grad(loss_of(program_of("logsumexp", n)))
    x, dx = data(n, 3), data(n + 1, 3)[1:]
    run = drjax.backends.xla.compile(drjax.make_plan(grad)(x))
    tangent = lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (dx,))[1])
    close(tangent(run)(x), tangent(grad)(x))
    close(jax.jit(jax.vmap(run))(jnp.stack([x, dx]))[1], jax.jit(grad)(dx))


def test_a_fold_in_a_loop_of_rounds():
    """A body with a fold, whose result the next step broadcasts."""
    n = 5

    @drjax.program(clients=n)
    def f(x, w):
        def step(w, _):
            y = drjax.map_fn(lambda a: a * w, x)
            w = jnp.tanh(drjax.reduce(jnp.logaddexp, y, -jnp.inf))
            return w, w.sum()

        return jax.lax.scan(step, w, None, 3)

    x, w = data(n, 3), jnp.ones(3)
    loss = lambda x, w: f(x, w)[0].sum() + f(x, w)[1].sum()
    want = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    run = drjax.jit(jax.value_and_grad(loss, (0, 1)), groups_per_step=2)
    jax.tree.map(close, run(x, w), want)
    plan = drjax.make_plan(f)(x, w)
    jax.tree.map(close, drjax.backends.reference.compile(plan)(x, w), f(x, w))


def test_a_result_that_groups_compare_is_exact():
    """The group whose state was chosen finds it bit by bit."""
    n = 6
    best = lambda a, b: jax.tree.map(lambda x, y: jnp.where(a[0] >= b[0], x, y), a, b)

    @drjax.program(clients=n)
    def f(x):
        score = drjax.map_fn(lambda a: jnp.sin(a).sum() / 3, x)
        top, _ = drjax.reduce(best, (score, x), (-jnp.inf, 0.0))
        return drjax.reduce_sum((score == drjax.broadcast(top)).astype(jnp.int32))

    assert drjax.jit(f, groups_per_step=2)(data(n, 3)) == 1


@pytest.mark.slow
def test_random_keys_and_branches():
    """Keys are states, and a branch in the function stays a branch with one group."""
    n = 5

    def later(a, b):
        key = jax.lax.cond(a[0] >= b[0], lambda: a[1], lambda: b[1])
        return jnp.maximum(a[0], b[0]), key

    @drjax.program(clients=n)
    def f(x, key):
        keys = drjax.map_fn(
            lambda i: jax.random.fold_in(key, i), drjax.partition_index()
        )
        _, best = drjax.reduce(later, (x, keys), (-jnp.inf, jax.random.key(0)))
        return jax.random.uniform(best)

    x, key = data(n), jax.random.key(3)
    want = jax.random.uniform(jax.random.fold_in(key, int(np.argmax(x))))
    plan = drjax.make_plan(f)(x, key)
    close(drjax.backends.reference.compile(plan)(x, key), want)
    for step in (None, 1, 2):
        close(drjax.jit(f, groups_per_step=step)(x, key), want)
    with jax.set_mesh(make_mesh({"clients": 2})):
        close(drjax.jit(f, groups_per_step=1)(x, key), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_over_another_axis(check_vma):
    """Folds of each device of another axis, over the partition's own."""
    mesh = make_mesh({"clients": 2, "seeds": 2})
    n = 3
    f = drjax.jit(program_of("chan", n), groups_per_step=1)
    x = data(2, n, 3)
    want = jax.vmap(direct_of("chan"))(x)
    with jax.set_mesh(mesh):
        each = jax.shard_map(
            lambda x: jax.tree.map(lambda y: y[None], f(x[0])),
            in_specs=P("seeds"),
            out_specs=P("seeds"),
            axis_names={"seeds"},
            check_vma=check_vma,
        )
        jax.tree.map(close, jax.jit(each)(x), want)
