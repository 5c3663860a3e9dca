"""Slices that move between a population and a cohort of it: values, derivatives, bytes.

Covers: drjax._primitives.moves, drjax._api.moves, drjax.backends._move_slices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import in_process, reference
from drjax.backends.xla import reuse_accumulators
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh
from tests.helpers.raising import X3, raises, three

near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)

# The number of groups n, that of the population N, and the mesh.
MESHES = {
    "none": (3, 7, None),
    "population of few": (5, 2, None),
    "divided": (4, 12, lambda: make_mesh({"clients": 4})),
    "uneven": (3, 10, lambda: make_mesh({"clients": 4})),
    "population of few, divided": (9, 4, lambda: make_mesh({"clients": 4})),
    "model": (4, 6, lambda: make_mesh({"clients": 2, "model": 2})),
    "explicit": (4, 8, lambda: make_mesh({"clients": 4}, EXPLICIT)),
    "explicit model": (
        3, 6, lambda: make_mesh({"model": 2, "clients": 3}, (EXPLICIT, AUTO)),
    ),
}  # fmt: skip


def index_of(n, size):
    """Some twice, one counted from the end."""
    return (np.arange(n) * 5 % (size - 1) - (np.arange(n) == 1)).astype(np.int32)


def last(pop, x, i):
    """`pop.at[i].set(x)`, of which JAX promises no order."""
    for j in range(len(x)):
        pop = pop.at[i[j]].set(x[j])
    return pop


# Programs of a population `[N, 3]`, groups `[n, 3]`, an index `[n]` into the population
# and one `[N]` into the groups; and what they mean.
MOVES = {
    "take": (lambda p, x, i, j: drjax.take(p, i), lambda p, x, i, j: p[i]),
    "put": (
        lambda p, x, i, j: drjax.put(x, i, into=p),
        lambda p, x, i, j: last(p, x, i),
    ),
    "put, added": (
        lambda p, x, i, j: drjax.put(x, i, into=p, add=True),
        lambda p, x, i, j: p.at[i].add(x),
    ),
    "take of groups": (lambda p, x, i, j: drjax.take(x, j), lambda p, x, i, j: x[j]),
    "put into groups": (
        lambda p, x, i, j: drjax.put(p, j, add=True),
        lambda p, x, i, j: jnp.zeros_like(x).at[j].add(p),
    ),
    "put into groups, known": (
        lambda p, x, i, j: drjax.put(p, np.arange(len(p)) % len(x), into=x),
        lambda p, x, i, j: last(x, p, np.arange(len(p)) % len(x)),
    ),
}


def derivatives(move, mapped):
    """Value, gradient, and the derivative of the gradient, of a loss."""

    def f(p, x, i, j):
        moved = move(p, mapped(jnp.sin, x), i, j)
        return mapped(jnp.square, moved) if len(moved) == len(x) else moved

    def of(p, x, i, j):
        loss = lambda p, x: jnp.sum(jnp.cos(f(p, x, i, j)))
        grad = jax.grad(loss, (0, 1))
        return f(p, x, i, j), grad(p, x), jax.jvp(grad, (p, x), (2 * p, x))[1]

    return of


def program_of(name, n):
    of = derivatives(MOVES[name][0], drjax.map_fn)
    return drjax.program(clients=n)(of)


def meaning_of(name):
    return jax.jit(derivatives(MOVES[name][1], lambda fn, x: fn(x)))


def arguments(n, size):
    """Of each index some elements are equal, and one counts from the end."""
    r = np.random.RandomState(0)
    p, x = (r.randn(k, 3).astype(np.float32) for k in (size, n))
    i = (np.arange(n) * 5 % (size - 1) - (np.arange(n) == 1)).astype(np.int32)
    return p, x, jnp.asarray(i), jnp.arange(size) % n


@checkerboard(12, mesh=MESHES, name=MOVES)
def test_values_and_derivatives(name, mesh):
    n, size, make = MESHES[mesh]
    args = arguments(n, size)
    want = meaning_of(name)(*args)
    with in_mesh(make and make()):
        for run in (jax.jit, functools.partial(drjax.jit, groups_per_step=1)):
            jax.tree.map(near, run(program_of(name, n))(*args), want)


@pytest.mark.sampled
@checkerboard(3, name=MOVES)
def test_plans(name, tmp_path):
    args = arguments(3, 7)
    want = meaning_of(name)(*args)
    plan = drjax.make_plan(program_of(name, 3))(*args)
    plan.save(tmp_path / "plan.drjax")
    loaded = drjax.load_plan(tmp_path / "plan.drjax")
    assert str(loaded) == str(plan)
    for run in (reference.compile(plan), in_process.compile(loaded, block_size=2)):
        jax.tree.map(near, run(*args), want)


def test_batches():
    p, x, i, _ = arguments(3, 7)
    f = drjax.program(clients=3)(
        lambda p, x, i: (drjax.take(p, i), drjax.put(x, i, into=p, add=True))
    )
    for axes in ((0, 0, None), (1, 1, None), (None, None, 0), (0, 0, 0)):
        stack = lambda a, axis: a if axis is None else jnp.stack([a, a[::-1]], axis)
        args = [*map(stack, (p, x, i), axes)]
        plain = lambda p, x, i: (jnp.take(p, i, 0), jnp.asarray(p).at[i].add(x))
        want = jax.vmap(plain, axes)(*args)
        jax.tree.map(near, jax.jit(jax.vmap(f, axes))(*args), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "bool", "complex64", "int8", "key"])
def test_dtypes(dtype):
    """Bits are copied, by a reduce-scatter and by an all-gather."""
    p = jnp.asarray(np.random.RandomState(0).randn(9, 2)).astype(
        "float32" if dtype == "key" else dtype
    )
    if dtype == "bfloat16":
        p = p.at[2].set(jnp.nan).at[3].set(-0.0)
    if dtype == "key":
        p = jax.random.split(jax.random.key(0), 9)
    i = jnp.array([2, 3, 8])
    f = drjax.program(clients=3)(
        lambda p, i: (c := drjax.take(p, i), drjax.put(c, i[::-1], into=p))
    )
    with jax.set_mesh(make_mesh({"clients": 4})):
        taken, put = jax.jit(f)(p, i)
    bits = lambda x: np.asarray(jax.random.key_data(x) if dtype == "key" else x)
    assert bits(taken).tobytes() == bits(p[i]).tobytes()
    assert bits(put).tobytes() == bits(p.at[i[::-1]].set(p[i])).tobytes()


@pytest.mark.sampled
@pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
def test_no_more_than_the_cohort_is_sent(jit):
    n, size, d = 16, 4096, 100
    slice_bytes = 4 * d

    @drjax.program(clients=n)
    def f(p, i):
        return drjax.put(drjax.map_fn(jnp.sin, drjax.take(p, i)), i, into=p)

    mesh, i = make_mesh({"clients": 8}), jnp.arange(n) * 3
    with jax.set_mesh(mesh):
        p = drjax.shard(np.ones((size, d), np.float32), partition={"clients": size})
        report = drjax.collectives(jit(f))(p, i)
        assert {c.kind: c.result_bytes for c in report.collectives} == {
            "all-gather": n * slice_bytes,
            "reduce-scatter": n * slice_bytes // 8,
        }
        assert report.total.count == 2 and report.temp_bytes < 2 * n * slice_bytes
        gradient = jit(jax.grad(lambda p, i: f(p, i).sum()))
        report = drjax.collectives(gradient)(p, i)
    assert report.total.bytes <= 3 * n * slice_bytes


def test_the_ledger_has_the_moves():
    n, size = 4, 12
    f = drjax.program(clients=n)(
        lambda p, i: drjax.put(drjax.map_fn(jnp.sin, drjax.take(p, i)), i, into=p)
    )
    plan = drjax.make_plan(f)(np.ones((size, 3), np.float32), jnp.arange(n))
    taken, put = (m for r in plan.rounds for m in r.moves)
    assert not taken.source.partitioned and taken.result.partitioned
    assert put.source.partitioned and not put.result.partitioned
    ledger = plan.communication(devices=2)
    assert (ledger.down(), ledger.up(), ledger.between()) == (0, 0, 2 * 12)
    assert [m.population for m in ledger.messages] == [size, size]
    # Zeros and slices for 4 groups, and the slices of a device's groups.
    assert ledger.reduced_per_device() == (4 + 2) * 12


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_rounds_that_reuse_accumulators(kind, monkeypatch):
    """A sum and a put in one round; the population is on all devices, or divided."""
    monkeypatch.setattr(reuse_accumulators, "LARGE", 0)

    @drjax.program(clients=4)
    def f(total, p, i):
        y = drjax.map_fn(jnp.sin, drjax.take(p, i))
        return total + drjax.reduce_sum(y), drjax.put(y, i, into=p)

    p, _, i, _ = arguments(4, 8)
    want = f(p[0], p, i)
    with jax.set_mesh(make_mesh({"clients": 2}, kind)):
        run = drjax.jit(f, groups_per_step=1)
        for population in (p, drjax.shard(p, partition={"clients": 8})):
            jax.tree.map(near, run(p[0], population, i), want)


def test_inside_a_shard_map():
    n, size = 4, 8
    p, x, i, _ = arguments(n, size)
    f = drjax.program(clients=n)(
        lambda p, x, i: (drjax.take(p, i), drjax.put(x, i, into=p, add=True))
    )
    spec = jax.P("clients")
    with jax.set_mesh(make_mesh({"clients": 2})):
        mapped = jax.shard_map(
            f, in_specs=(spec, spec, jax.P()), out_specs=(spec, spec)
        )
        result = jax.jit(mapped)(p, x, i)
    jax.tree.map(near, result, (p[i], jnp.asarray(p).at[i].add(x)))


def test_a_loop_of_rounds():
    """The population is carried; each step has a cohort of its own."""

    @drjax.program(clients=3)
    def f(p, ids):
        def step(p, i):
            y = drjax.map_fn(jnp.sin, drjax.take(p, i))
            return drjax.put(y, i, into=p), drjax.reduce_mean(y)

        return jax.lax.scan(step, p, ids)

    p, ids = arguments(3, 7)[0], jnp.arange(12).reshape(4, 3) % 7
    want = jax.jit(f)(p, ids)
    plan = drjax.make_plan(f)(p, ids)
    jax.tree.map(near, reference.compile(plan)(p, ids), want)
    with jax.set_mesh(make_mesh({"clients": 3})):
        jax.tree.map(near, drjax.jit(f)(p, ids), want)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: drjax.take([x[:2], x], [0, 1, 2]), "with leading axis [3, ...]"),
        (lambda x: drjax.take(x[:2], [0, 1]), "the 3 groups of clients:3 and a popul"),
        (lambda x: drjax.take(x[:2], [0, 1, 2]), "groups between -2 and 1, got 2"),
        (lambda x: drjax.put(x[:2], [0, 1], into=x[:2]), "One of the two needs 3."),
        (lambda x: drjax.put(x[:2], [0, 1, 2]), "with leading axis [3, ...]"),
    ],
)
def test_errors(call, text):
    raises(drjax.DrjaxValueError, text, three(call), jnp.asarray(X3))
