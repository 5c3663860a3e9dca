"""Indexing of partitioned values along the group axis, outside of mapped functions.

Covers: drjax._planner.read_and_update_groups, drjax._planner.bind_blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax.backends import reference
from drjax.plan import Plan
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import in_mesh_of

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N = 6
program = drjax.program(clients=N)
X = np.cos(np.arange(N * 6.0, dtype=np.float32)).reshape(N, 3, 2)
I = np.array([4, 1], np.int32)


def agree(fn, *args) -> Plan:
    """The plan gives what `jax.jit` gives, in value and gradient; returns its plan."""
    plan = drjax.make_plan(fn)(*args)
    want = jax.jit(fn)(*args)
    scalar = lambda *xs: jnp.sum(jnp.sin(1.0 * fn(*xs)))
    both = jax.value_and_grad(scalar)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for got in (reference.compile(plan)(*args), drjax.jit(fn, 4)(*args)):
        assert got.dtype == want.dtype
        close(got, want)
    if jnp.issubdtype(args[0].dtype, jnp.floating):
        expected = jax.jit(both)(*args)
        jax.tree.map(close, drjax.jit(both, groups_per_step=1)(*args), expected)
    return plan


def slices(x):
    return drjax.map_fn(lambda slice_: slice_ * 2, x)


TAKEN = {
    "first": lambda y, i: y[0],
    "some": lambda y, i: y[:2],
    "some, and of each a part": lambda y, i: y[1:3, ::2, 1],
    "every third": lambda y, i: y[1::3],
    "half": lambda y, i: y[3:],
    "an element": lambda y, i: y[2, 1, 0],
    "at an index": lambda y, i: lax.dynamic_slice(y, (i[0], i[1], 0), (2, 2, 1)),
    "most, at an index": lambda y, i: lax.dynamic_slice_in_dim(y, i[0], N - 1),
    "indices": lambda y, i: y[i],
    "indices of most": lambda y, i: y[jnp.concatenate([i, i + 1, i[:1]])],
    "indices of all and more": lambda y, i: y[jnp.concatenate([i, i, i, i])],
    "indices in pairs": lambda y, i: y[np.array([[3, 1], [2, 0], [5, 4]])],
    "one index of a batch": lambda y, i: jax.vmap(lambda j: y[j])(
        jnp.concatenate([i, i, i, i + 1])
    ),
    "take": lambda y, i: jnp.take(y, i, axis=0),
    "take one": lambda y, i: jnp.take(y, i[0], axis=0),
    "take clip": lambda y, i: jnp.take(y, i - 5, axis=0, mode="clip"),
    "take beyond": lambda y, i: jnp.where(
        jnp.isnan(t := jnp.take(y, i * 3 - 8, axis=0)), 7.0, t
    ),
    "fill in": lambda y, i: jnp.take(y, i + 3, axis=0, mode="fill", fill_value=-2),
    "at small indices": lambda y, i: y.at[i.astype(jnp.int8) + 3].get(mode="fill",
                                                                      fill_value=0),
    "unsigned": lambda y, i: y.at[i.astype(jnp.uint32) + 3].get(mode="clip"),
}  # fmt: skip


@pytest.mark.sampled
@checkerboard(7, name=TAKEN)
def test_slices_of_some_groups(name):
    plan = agree(program(lambda x, i: TAKEN[name](slices(x), i)), X, I)
    (only,) = (r for r in plan.rounds if r.reduces)
    gathers = name in ("half", "most, at an index", "one index of a batch")
    gathers = gathers or name.startswith(("indices of", "indices in"))
    assert [r.op for r in only.reduces] == ["gather" if gathers else "sum"]


def test_the_derivative_of_an_update_of_most_groups():
    """It reads these groups, where no user can call `drjax.gather`."""

    def scalar(new, x, i):
        y = lax.dynamic_update_slice_in_dim(slices(x), jnp.sin(new), i[0], 0)
        return drjax.reduce_sum(drjax.map_fn(jnp.square, y)).sum()

    agree(jax.grad(program(scalar)), X[1:], X, I)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["first", "some", "some, and of each a part"])
def test_second_derivatives_of_slices(name):
    """The cotangent of a slice is padded; the cotangent of that, by less than zero."""
    scalar = program(lambda x: jnp.sin(TAKEN[name](slices(x), I)).sum())
    agree(jax.grad(scalar), X)


def test_unpacking():
    """Where JAX has an `unstack` primitive, a loop over an array is one."""

    def fn(x):
        first, second, *others = slices(x)
        return first + jnp.sin(second) * sum(others)

    agree(program(fn), X)


def test_integers_beyond_the_bounds():
    fn = program(lambda x, i: jnp.take(drjax.map_fn(lambda r: r + 1, x), i, axis=0))
    agree(fn, np.arange(N * 2, dtype=np.int32).reshape(N, 2), I + 3)


CHANGED = {
    "set": lambda y, i: y.at[1].set(0.5),
    "set at an index": lambda y, i: y.at[i[0]].set(jnp.arange(2.0)[None]),
    "set a part": lambda y, i: y.at[i[0], 1].set(0.5),
    "set an element": lambda y, i: y.at[i[0], 1, i[1]].set(0.5),
    "set a slice": lambda y, i: y.at[2:4].set(jnp.arange(12.0).reshape(2, 3, 2)),
    "set most": lambda y, i: y.at[1:].set(0.5),
    "add to several": lambda y, i: y.at[i].add(jnp.arange(2.0)),
    "add twice": lambda y, i: y.at[jnp.zeros_like(i)].add(jnp.ones((2, 3, 2))),
    "multiply": lambda y, i: y.at[i].multiply(3.0),
    "smaller": lambda y, i: y.at[i].min(0.1),
    "beyond": lambda y, i: y.at[i + 3].set(0.5),
    "from the end": lambda y, i: y.at[-i].set(0.5),
    "clip": lambda y, i: y.at[i + 3].set(0.5, mode="clip"),
    "small indices": lambda y, i: y.at[i.astype(jnp.int8)].set(0.5),
    "update": lambda y, i: lax.dynamic_update_slice(
        y, jnp.ones((2, 2, 1)), (i[0] + 3, i[1], 0)
    ),
    "by another": lambda y, i: y.at[i[0]].set(y[i[1]]),
}  # fmt: skip


@pytest.mark.sampled
@checkerboard(7, name=CHANGED)
def test_changes_of_some_groups(name):
    change = CHANGED[name]
    plan = agree(program(lambda x, i: change(slices(x), i)), X, I)
    assert plan.outputs[0].partitioned
    communicates = name == "by another"
    assert any(r.reduces for r in plan.rounds) == communicates


@pytest.mark.slow
def test_batches():
    """The group axis need not come first."""
    fn = program(lambda x, i: slices(x)[i[0]])
    agree(jax.vmap(fn, (2, None), 1), X, I)
    agree(jax.vmap(program(lambda x, i: slices(x).at[i].add(1.0)), (2, None), 1), X, I)


@pytest.mark.once
@pytest.mark.parametrize("times", [1, len(X), 2 * len(X)])
def test_updates_of_a_batch_of_any_size(times):
    """Each array of the batch has its own updates, however many arrays there are."""
    index = jnp.arange(times) % len(X)
    fn = program(lambda x, i: slices(x).at[i].set(0.5))
    agree(jax.vmap(fn, (None, 0)), X, index)
    update = lambda y, i: lax.dynamic_update_slice(y, jnp.ones((1, 3, 2)), (i, 0, 0))
    agree(jax.vmap(program(lambda x, i: update(slices(x), i)), (None, 0)), X, index)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [{"clients": 4}, {"clients": 2, "model": 2}])
def test_on_meshes(shape):
    """Groups are chosen by their index, whatever device has them."""

    @program
    def fn(x, i):
        y = slices(x).at[i].add(1.0)
        y = lax.dynamic_update_slice(y, jnp.ones((2, 3, 1)), (i[1], 0, 0))
        chosen = y[:2] + jnp.take(y, i + 1, axis=0).at[0].set(0.0) + y[1:5:2]
        return drjax.reduce_mean(lax.map(jnp.tanh, y)) * chosen.sum(0) + y[3:].max(0)

    both = jax.value_and_grad(lambda x, i: jnp.sum(fn(x, i)))
    want = jax.jit(both)(X, I)
    with in_mesh_of(shape):
        for step in (None, 1):
            got = drjax.jit(both, groups_per_step=step)(X, I)
            close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
            jax.tree.map(close, got, want)


def test_work_does_not_grow_with_the_square_of_the_groups():
    """Of many chosen groups all are gathered; of few each group sends a slice more."""
    many = drjax.program(clients=100)
    for count, op, shape in (
        (10, "sum", (10, 3)),
        (11, "gather", (3,)),
        (50, "gather", (3,)),
    ):
        plan = drjax.make_plan(many(lambda x, count=count: slices(x)[:count]))(
            jnp.ones((100, 3))
        )
        (reduce,) = plan.rounds[0].reduces
        assert (reduce.op, reduce.source.shape) == (op, shape)
