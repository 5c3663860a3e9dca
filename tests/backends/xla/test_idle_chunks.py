"""Chunks of groups that only add zeros do no work.

Covers: drjax.backends.xla.idle_chunks, drjax.backends.xla.chunked_stage.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends.xla import idle_chunks
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

N, SIZE = 12, 8
W = jnp.asarray(np.random.RandomState(0).randn(SIZE, SIZE), jnp.float32)
X = jnp.asarray(np.random.RandomState(1).randn(N, 4, SIZE), jnp.float32)
program = drjax.program(clients=N)


@pytest.fixture(autouse=True)
def little_work(monkeypatch):
    monkeypatch.setattr(idle_chunks, "LEAST_WORK", 0)


def slices(w, x, calls: Any = None):
    def work(w, x, i):
        h = jnp.tanh(jnp.tanh(x @ w) @ w)
        if calls is None:
            return h

        def record(i):
            calls.append(int(i))
            return np.float32(1)

        one = jax.ShapeDtypeStruct((), jnp.float32)
        return h * jax.pure_callback(record, one, i, vmap_method="sequential")

    return drjax.map_fn(work, (drjax.broadcast(w), x, drjax.partition_index()))


def losses(y):
    return drjax.map_fn(lambda y: jnp.sum(y**2), y)


def total(y):
    return sum(map(jnp.sum, jax.tree.leaves(y)))


# Of the slices of all groups, which of them have work in the last round.
PROGRAMS = {
    "one": lambda y: drjax.select(y, jnp.int32(5)),
    "two": lambda y: [drjax.select(y, jnp.int32(i)) for i in (2, 7)],
    "a batch": lambda y: jax.vmap(lambda i: drjax.select(y, i))(jnp.array([2, 7])),
    "a mask": lambda y: drjax.reduce_mean(y, where=jnp.arange(N) % 6 == 1),
    "a maximum": lambda y: drjax.reduce_max(losses(y)),
    "of segments": lambda y: drjax.reduce_sum(
        y, by=jnp.arange(N) % 3, num=3, where=jnp.arange(N) % 6 == 1
    ),
    "the best": lambda y: drjax.select(y, drjax.reduce_argmin(losses(y))),
    "all": drjax.reduce_mean,
}


def make(name, derived=jax.value_and_grad, calls=None):
    return derived(program(lambda w, x: total(PROGRAMS[name](slices(w, x, calls)))))


@checkerboard(4, name=list(PROGRAMS), step=[1, 5], mesh=[None, 4, 5])
def test_values_and_gradients(name, step, mesh):
    expected = jax.jit(make(name))(W, X)
    with in_mesh(None if mesh is None else make_mesh({"clients": mesh})):
        result = drjax.jit(make(name), groups_per_step=step)(W, X)
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, step, groups",
    [
        ("one", 1, [5]),
        ("one", 4, [5]),
        ("one", None, [5]),
        ("two", 1, [2, 7]),
        ("a batch", 1, [2, 7]),
        ("a mask", 1, [1, 7]),
        ("of segments", 1, [1, 7]),
        ("all", 1, [*range(N)]),
    ],
)
def test_the_groups_that_work(name, step, groups):
    calls: list[int] = []
    run = drjax.jit(make(name, lambda f: f, calls), groups_per_step=step)
    jax.block_until_ready(run(W, X))
    assert sorted(calls) == groups


def test_nothing_of_other_groups_leaks():
    broken = X.at[3].set(jnp.nan)
    run = drjax.jit(make("one"), groups_per_step=1)
    for x, y in zip(run(W, broken), run(W, X), strict=True):
        np.testing.assert_array_equal(x, y)


def count(jaxpr_of, name):
    return str(jaxpr_of).count(f"{name}[")


@pytest.mark.parametrize("name", PROGRAMS)
def test_where_there_is_a_branch(name, monkeypatch):
    branches = lambda step: jax.make_jaxpr(
        lambda w, x: drjax.backends.xla.compile(plan, groups_per_step=step)(w, x)
    )(W, X)
    plan = drjax.make_plan(make(name))(W, X)
    # Of one index, no loop looks for the group.
    by_index = name in ("one", "the best")
    assert bool(count(branches(1), "cond")) == (not by_index and name != "all")
    assert bool(count(branches(1), "scan")) == (name != "one")
    # All groups of a device at once have no chunks.
    assert not count(branches(None), "cond")
    monkeypatch.setattr(idle_chunks, "LEAST_WORK", 1e9)
    idle_chunks._decision.cache_clear()
    assert not count(branches(1), "cond")


@checkerboard(
    2, step=[1, 2], name=["one", "a maximum", "the best"], kind=[AUTO, EXPLICIT]
)
def test_devices_that_share_a_model(step, name, kind):
    expected = jax.jit(make(name))(W, X)
    mesh = make_mesh({"clients": 2, "model": 2}, (AUTO, kind))
    with in_mesh(mesh):
        w = jax.device_put(W, jax.NamedSharding(mesh, jax.P(None, "model")))
        run = drjax.jit(make(name), groups_per_step=step)
        branches = "conditional" in run.lower(w, X).compile().as_text()
        # Of groups that are known by their indices there is no branch.
        assert branches == (name == "a maximum")
        result = run(w, X)
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------
# Groups that are known by their indices


def of_indices(w, x, indices):
    """A sum over the groups whose index is one of some; each counts once."""
    ids = drjax.partition_index()
    one = lambda x, i, w, js: jnp.where(
        jnp.any(i.astype(js.dtype) == js), jnp.tanh(x @ w), 0
    )
    args = x, ids, drjax.broadcast(w), drjax.broadcast(indices)
    return total(drjax.reduce_sum(drjax.map_fn(one, args)))


@checkerboard(
    2,
    indices=[[3], [11], [N], [-1], [3, 3, 7], [-5, 0, 11, 40]],
    dtype=[np.int32, np.uint32, np.int64],
    mesh=[None, 4, 5, 8],
    step=[1, 2, None],
)
def test_indices(indices, dtype, mesh, step):
    with jax.enable_x64(dtype == np.int64):
        indices = np.array(indices).astype(dtype)
        if dtype == np.int64:
            indices += (np.arange(len(indices)) == 1) * 2**32  # no group's index
        f = jax.value_and_grad(program(of_indices))
        mask = np.isin(np.arange(N), indices)
        dense = lambda w, x: jnp.sum(jnp.tanh(x[mask] @ w))
        expected = jax.value_and_grad(dense)(W, X)
        with in_mesh(None if mesh is None else make_mesh({"clients": mesh})):
            result = drjax.jit(f, groups_per_step=step)(W, X, jnp.asarray(indices))
        for x, y in zip(result, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0,), (2, 3), (1, 1)])
@pytest.mark.parametrize("step", [1, None])
def test_batches_of_indices(step, shape):
    indices = jnp.arange(np.prod(shape)).reshape(shape) % 4

    def chosen(w, x, indices):
        select = lambda i: drjax.select(slices(w, x), i)
        for _ in shape:
            select = jax.vmap(select)
        return select(indices)

    run = drjax.jit(program(chosen), groups_per_step=step)
    expected = jnp.tanh(jnp.tanh(X @ W) @ W)[indices]
    np.testing.assert_allclose(run(W, X, indices), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("index, groups", [(7, [7]), (30, []), (-1, [])])
def test_no_other_group_decides(index, groups):
    broken = X.at[jnp.array([i for i in range(N) if i != index])].set(jnp.nan)
    run = drjax.jit(jax.value_and_grad(program(of_indices)), groups_per_step=1)
    result = run(W, broken, jnp.array([index]))
    dense = jax.value_and_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    for x, y in zip(result, dense(W, X[jnp.array(groups, int)]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [1, 5, None, "auto"])
def test_a_round_of_one_group_is_compiled_once(step):
    compiled = drjax.jit(make("one"), groups_per_step=step).lower(W, X).compile()
    written = jax.jit(jax.value_and_grad(lambda w, x: total(one_group(w, x))))
    products = lambda compiled: compiled.as_text().count(" dot(")
    written = written.lower(W, X).compile()
    assert products(compiled) == products(written) == 5


def one_group(w, x):
    return jnp.tanh(jnp.tanh(x[5] @ w) @ w)
