"""Plans of programs over one group and over a few: whether there is one, and which.

Indexing by slices means the same however JAX writes it, and a single group, whose axis
looks like any other axis of size one, needs no other code than many groups.

Covers: drjax._planner.partitioning.infer, drjax._planner.unbatching.indexing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import reference
from tests.helpers.cases import checkerboard

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


def slices(x):
    return drjax.map_fn(jnp.sin, x)


def number(i):
    """The index of each slice, as a partitioned value."""
    return drjax.map_fn(lambda i: i + 0, i)


def counted(i):
    return jnp.arange(i.shape[0])


BY_SLICES = {
    "take_along_axis": lambda x, i: jnp.take_along_axis(
        slices(x), number(i)[:, None], 1
    ),
    "several of each": lambda x, i: jnp.take_along_axis(
        slices(x), jnp.stack([number(i), i], 1), 1
    ),
    "counted slices": lambda x, i: slices(x)[counted(i), i],
    "counted slices, then chosen": lambda x, i: slices(x)[counted(i), number(i)],
    "counted from the end": lambda x, i: slices(x)[counted(i) - i.shape[0], i],
    "counted and two more": lambda x, i: jnp.stack([slices(x), x], 1)[
        counted(i), (i + 1) % 2, i
    ],
    "group axis last": lambda x, i: slices(x).T[i, counted(i)],
    "set": lambda x, i: slices(x).at[counted(i), i].set(2.0),
    "add": lambda x, i: slices(x).at[counted(i), number(i)].add(slices(x)[:, 0]),
    "one hot": lambda x, i: slices(x) * jax.nn.one_hot(number(i), 3),
    "squeezed": lambda x, i: slices(x)[:, :1].squeeze(1) * x[:, 0],
    "transposed twice": lambda x, i: (slices(x).T * i[None]).T,
}


@checkerboard(15, name=BY_SLICES, n=[1, 2, 3])
def test_work_by_slices(name, n):
    """One round, with what is reduced, and one more for the derivative at most."""

    @drjax.program(clients=n)
    def fn(x, i):
        return jnp.sum(drjax.reduce_mean(BY_SLICES[name](x, i)) ** 2)

    x, i = jnp.arange(3.0 * n).reshape(n, 3) / 5, (jnp.arange(n) + 1) % 3
    both = jax.value_and_grad(fn)
    want = jax.jit(both)(x, i)
    assert len(drjax.make_plan(fn)(x, i).rounds) == 1
    plan = drjax.make_plan(both)(x, i)
    assert len(plan.rounds) == 2
    for got in (reference.compile(plan)(x, i), drjax.jit(both)(x, i)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want
        )


ALONE = {
    "sorted": lambda x: jnp.sort(x, axis=0),
    "reversed": lambda x: x[::-1],
    "added up": lambda x: jnp.cumsum(x, axis=0),
    "joined": lambda x: jnp.concatenate([x, x], axis=0),
    "without the axis": lambda x: x.reshape(-1),
    "first": lambda x: x[0],
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "products": lambda x: x @ x.T,
    "largest": lambda x: jnp.argmax(x, axis=0).astype(jnp.float32),
}


@checkerboard(3, name=ALONE)
def test_all_work_of_a_single_group_is_by_slices(name):
    fn = drjax.program(clients=1)(lambda x: jnp.sum(ALONE[name](slices(x)) ** 2))
    x = jnp.array([[0.3, 0.1, 0.7]])
    both = jax.value_and_grad(fn)
    want = jax.jit(both)(x)
    plan = drjax.make_plan(both)(x)
    for got in (reference.compile(plan)(x), drjax.jit(both)(x)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want
        )


def test_callbacks_see_slices_of_a_map_only():
    @drjax.program(clients=1)
    def fn(x):
        jax.debug.print("{x}", x=slices(x))
        return drjax.reduce_mean(x)

    with pytest.raises(drjax.PlanError, match="slices of all groups to Python at once"):
        drjax.make_plan(fn)(jnp.ones(1))
