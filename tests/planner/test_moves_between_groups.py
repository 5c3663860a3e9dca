"""Equations of jax.numpy that move the slices of all groups, in plans.

Covers: drjax._planner.moves_between_groups, drjax._planner.rotations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import reference
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import make_mesh

N = 4
INDEX = jnp.array([3, 1, 1, 0])
X = np.random.RandomState(0).randn(N, 3).astype(np.float32)

# Of partitioned values [n, 3] and an index [n], and the moves of the plan.
WRITTEN = {
    "indexed": (lambda y, i: y[i], "take"),
    "taken": (lambda y, i: jnp.take(y, i, axis=0), "take"),
    "taken, clipped": (lambda y, i: jnp.take(y, i + 1, axis=0, mode="clip"), "take"),
    "taken, filled": (lambda y, i: jnp.take(y, i + 1, 0, fill_value=2.0), "take"),
    "transposed": (lambda y, i: y.T[:, i].T, "take"),
    "by narrow integers": (lambda y, i: y[i.astype(jnp.int8)], "take"),
    "by unsigned integers": (lambda y, i: y[i.astype(jnp.uint32)], "take"),
    "counted from the end": (lambda y, i: y[i - N], "take"),
    "by constants": (lambda y, i: y[np.array([2, 0, 1, 1])], "take"),
    "permuted": (lambda y, i: y[np.array([2, 0, 1, 3])], "permute"),
    "permuted from the end": (lambda y, i: y[jnp.array([-1, 0, 2, 1])], "permute"),
    "permuted behind": (lambda y, i: y.T[:, np.array([2, 0, 1, 3])].T, "permute"),
    "reversed": (lambda y, i: y[::-1], "permute"),
    "reversed twice": (lambda y, i: y[::-1, ::-1], "permute"),
    "rolled": (lambda y, i: jnp.roll(y, 1, axis=0), "permute"),
    "rolled far": (lambda y, i: jnp.roll(y, -N - 2, axis=0), "permute"),
    "rolled on two axes": (lambda y, i: jnp.roll(y, (1, 2), axis=(0, 1)), "permute"),
    "rolled behind": (lambda y, i: jnp.roll(y.T, 3, axis=1).T, "permute"),
    "added": (lambda y, i: y.at[i].add(jnp.cos(y)), "put_add"),
    "added, dropped": (lambda y, i: y.at[i + 1].add(y, mode="drop"), "put_add"),
    "added to zeros": (lambda y, i: jnp.zeros((N, 3)).at[i].add(y), "put_add"),
    "added transposed": (lambda y, i: y.T.at[:, i].add(y.T).T, "put_add"),
    "set": (lambda y, i: y.at[3 - i * jnp.array([1, 1, 0, 1])].set(jnp.cos(y)), "take"),
    "set by a permutation": (
        lambda y, i: y.at[jnp.roll(jnp.arange(N), 1)].set(jnp.cos(y)), "permute",
    ),
    "added by a permutation": (
        lambda y, i: y.at[np.array([1, 3, 0, 2])].add(jnp.cos(y)), "permute",
    ),
    "set some": (lambda y, i: y.at[i * 4].set(2 * y, mode="drop"), "take"),
    "segments": (
        lambda y, i: jax.ops.segment_sum(y, i, num_segments=N), "put_add",
    ),
}  # fmt: skip


def program(name):
    @drjax.program(clients=N)
    def f(x, index):
        y = drjax.map_fn(jnp.sin, x)
        z = drjax.map_fn(jnp.multiply, (WRITTEN[name][0](y, index), y))
        return drjax.reduce_sum(z).sum(), z

    return f


@pytest.mark.parametrize("name", WRITTEN)
def test_plans_have_moves(name):
    plan = drjax.make_plan(program(name))(X, INDEX)
    moves = [move.op for a_round in plan.rounds for move in a_round.moves]
    assert moves == [WRITTEN[name][1]]
    assert not [r for q in plan.rounds for r in q.reduces if r.op == "gather"]
    want = jax.jit(program(name))(X, INDEX)
    for a, b in zip(reference.compile(plan)(X, INDEX), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@checkerboard(17, name=WRITTEN, mesh=["none", "clients"])
def test_gradients(name, mesh):
    both = jax.value_and_grad(program(name), has_aux=True)
    want = jax.tree.leaves(jax.jit(both)(X, INDEX))
    with jax.set_mesh(make_mesh({"clients": 4 if mesh == "clients" else 1})):
        result = jax.tree.leaves(drjax.jit(both, groups_per_step=1)(X, INDEX))
    for a, b in zip(result, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("runner", [jax.jit, drjax.jit])
@pytest.mark.parametrize(
    "update",
    [
        lambda y: y.at[...].add(1.0),
        lambda y: y.at[:].set(jnp.cos(y)),
        lambda y: y.at[:, :].add(jnp.cos(y)),
        lambda y: y.at[:, 1:].multiply(2.0),
    ],
)
def test_updates_of_all_groups_move_nothing(update, runner):
    @drjax.program(clients=N)
    def f(x):
        y = update(drjax.map_fn(jnp.sin, x))
        return drjax.reduce_sum(drjax.map_fn(jnp.square, y)).sum()

    plain = lambda x: (update(jnp.sin(x)) ** 2).sum()
    for derivative in (lambda f: f, jax.grad):
        want = derivative(plain)(X)
        np.testing.assert_allclose(runner(derivative(f))(X), want, rtol=1e-5)
    assert not [m for r in drjax.make_plan(f)(X).rounds for m in r.moves]


def test_parts_that_are_put_together():
    """Any order of all parts is one move; of some parts, or some twice, it is none."""

    def moves(fn):
        f = drjax.program(clients=N)(
            lambda x: drjax.reduce_mean(fn(drjax.map_fn(jnp.sin, x)))
        )
        plan = drjax.make_plan(f)(X)
        np.testing.assert_allclose(reference.compile(plan)(X), f(X), rtol=1e-5)
        return [m.sources for r in plan.rounds for m in r.moves]

    join = lambda *xs: jnp.concatenate(xs)
    assert moves(lambda y: join(y[2:], y[1:2], y[:1])) == [(2, 3, 1, 0)]
    assert moves(lambda y: join(*jnp.split(y, 4)[::-1])) == [(3, 2, 1, 0)]
    twice = lambda y: jnp.roll(jnp.roll(y, 1, axis=0), 1, axis=0)
    assert moves(twice) == [(3, 0, 1, 2)] * 2
    for fn in (lambda y: join(y[1:], y[1:2]), lambda y: join(y[1:], 0 * y[:1])):
        with pytest.raises(drjax.PlanError, match="may mix the slices"):
            moves(fn)


def test_rolls_elsewhere_stay_slices():
    """Of global values, and along other axes than that of the groups."""

    @drjax.program(clients=N)
    def f(x, w):
        y = jnp.roll(drjax.map_fn(jnp.sin, x), 1, axis=1)
        return drjax.reduce_mean(y) * jnp.roll(w, 2)

    w = np.arange(3, dtype=np.float32)
    loss = jax.value_and_grad(lambda x, w: f(x, w).sum(), (0, 1))
    plan = drjax.make_plan(loss)(X, w)
    assert not [m for r in plan.rounds for m in r.moves]
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for result in (reference.compile(plan)(X, w), drjax.jit(loss)(X, w)):
        jax.tree.map(near, result, jax.jit(loss)(X, w))


@pytest.mark.sampled
@pytest.mark.parametrize("n", [4, 7])
def test_a_roll_is_a_shift(n):
    """The ring: one permute of the slices at the edges, also in second derivatives."""
    ring = lambda y: jnp.roll(y, 1, axis=0)
    shift = lambda y: drjax.shift(y, 1)

    def program(move):
        def f(x):
            y = drjax.map_fn(jnp.sin, x)
            return drjax.reduce_sum(drjax.map_fn(jnp.multiply, (move(y), y))).sum()

        f = drjax.program(clients=n)(f)
        second = lambda x, t: jax.jvp(jax.grad(f), (x,), (t,))[1]
        return lambda x, t: (jax.value_and_grad(f)(x), second(x, t))

    x = np.random.RandomState(1).randn(n, 3).astype(np.float32)
    want = jax.jit(program(shift))(x, 2 * x)
    with jax.set_mesh(make_mesh({"clients": 4})):
        run = drjax.jit(program(ring), groups_per_step=1)
        result = run(x, 2 * x)
        sharded = [drjax.shard(y, partition={"clients": n}) for y in (x, 2 * x)]
        kinds = drjax.collectives(run)(*sharded).counts
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, result, want)
    # Results for 7 groups on 4 devices are whole on each.
    assert n % 4 or {*kinds} <= {"collective-permute", "all-reduce"}


ROLLED = {
    "a roll": lambda y: jnp.roll(y, 1, 0),
    "a roll and another use": lambda y: jnp.roll(y, 1, 0) - y,
    "parts and another use": lambda y: jnp.concatenate([y[-1:], y[:-1]]) - y,
    "uses between": lambda y: jnp.concatenate([y[2:], y[:2]]) * y + y[::-1],
    "a reversal": lambda y: y[::-1],
}
WAYS = {
    "grad": lambda f, loss: (jax.grad(loss), 0),
    "vmap": lambda f, loss: (jax.vmap(f), 1),
    "vmap along another axis": lambda f, loss: (jax.vmap(f, 2, 1), 1),
    "vmap of grad": lambda f, loss: (jax.vmap(jax.grad(loss)), 1),
    "jacobian": lambda f, loss: (jax.jacfwd(f), 0),
    "hessian": lambda f, loss: (jax.hessian(loss), 0),
}


@checkerboard(2, way=WAYS, name=ROLLED)
def test_rolls_that_are_batched(way, name):
    """A batch moves the axes of the parts; a derivative adds to them in between."""
    part = ROLLED[name]
    f = drjax.program(clients=4)(lambda x: part(drjax.map_fn(jnp.sin, x)))
    run, batched = WAYS[way](f, lambda x: jnp.sum(jnp.sin(f(x))))
    x = jnp.cos(jnp.arange(64.0).reshape(4, 4, 4))
    args = x if batched else x[0]
    want = jax.jit(run)(args)
    np.testing.assert_allclose(drjax.jit(run)(args), want, rtol=1e-5, atol=1e-5)
    plan = drjax.make_plan(run)(args)
    assert not [r for r in plan.communication().messages if r.op == "gather"]


def test_a_move_in_a_loop():
    @drjax.program(clients=N)
    def f(x, index):
        step = lambda y, _: (drjax.map_fn(jnp.sin, y[::-1]), y[index])
        return jax.lax.scan(step, drjax.map_fn(jnp.cos, x), length=3)

    want = jax.tree.leaves(jax.jit(f)(X, INDEX))
    for run in (reference.compile(drjax.make_plan(f)(X, INDEX)), drjax.jit(f)):
        for a, b in zip(jax.tree.leaves(run(X, INDEX)), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_nothing_is_gathered():
    @drjax.program(clients=N)
    def f(x, index):
        return drjax.map_fn(jnp.sin, x)[index]

    with jax.set_mesh(make_mesh({"clients": N})):
        x = drjax.shard(X, partition={"clients": N})
        report = drjax.collectives(drjax.jit(f))(x, INDEX)
    assert {*report.counts} <= {"reduce-scatter", "all-reduce"}
