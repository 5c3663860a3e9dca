"""Folds over devices: by columns, by swaps, or gathered; the same bits in each way.

Covers: drjax._primitives.fold_devices, drjax._primitives.fold_roots,
drjax._primitives.fold_trees, drjax._jaxprs.elementwise.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from drjax._primitives.fold_devices import is_pointwise, levels
from drjax.compiled import Report
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import in_mesh, make_mesh

AXIS, D = "clients", 250


def better(a, b):
    """The state of the larger score, and of equal ones the first."""
    keep = a["score"] >= b["score"]
    return jax.tree.map(lambda x, y: jnp.where(keep, x, y), a, b)


def states(kind, n):
    rng = np.random.RandomState(0)
    x = rng.randn(n, D).astype(np.float32)
    if kind == "better":
        x = {"score": x[:, 0], "x": x, "y": rng.randn(n, 3, 50).astype(np.float32)}
        zero = {"score": -jnp.inf, "x": jnp.zeros(D), "y": jnp.zeros((3, 50))}
        return better, x, zero
    if kind == "logaddexp":
        return jnp.logaddexp, x, jnp.full(D, -jnp.inf)
    if kind == "affine":  # maps of each number, which do not commute
        then = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
        return then, (np.tanh(x), x[::-1].copy()), (jnp.ones(D), jnp.zeros(D))
    eye = np.eye(10, dtype=np.float32)
    # Small, so that entries of products stay of order one.
    return jnp.matmul, x[:, :100].reshape(n, 10, 10) / 16 + eye[None], jnp.asarray(eye)


def fold_of(kind, n):
    combine, x, init = states(kind, n)
    return drjax.program(clients=n)(lambda x: drjax.reduce(combine, x, init)), x


KINDS = {
    "better": ("all-gather", "all-to-all"),
    "logaddexp": ("all-gather", "all-to-all"),
    "affine": ("all-gather", "all-to-all"),
    "matmul": ("collective-permute",),
}
RUNS = {
    "jax.jit": jax.jit,
    "drjax.jit": drjax.jit,
    "one at a time": functools.partial(drjax.jit, groups_per_step=1),
}


def tree_of(combine, x):
    """The balanced tree over the first axis."""
    while (k := jax.tree.leaves(x)[0].shape[0]) > 1:
        half = 2 * (k // 2)
        left = jax.tree.map(lambda y, h=half: y[:h:2], x)
        right = jax.tree.map(lambda y, h=half: y[1:h:2], x)
        pairs = jax.vmap(combine)(left, right)
        x = jax.tree.map(lambda p, y, h=half: jnp.concatenate([p, y[h:]]), pairs, x)
    return jax.tree.map(lambda y: y[0], x)


@checkerboard(6, devices=[2, 4, 8], kind=KINDS, run=RUNS)
def test_each_way_has_the_bytes_of_the_best(devices, kind, run):
    fn, x = fold_of(kind, 32)
    with in_mesh(make_mesh({AXIS: devices})):
        own = jax.device_put(x, P(AXIS))
        compiled = jax.jit(RUNS[run](fn)).lower(own).compile()
        result = compiled(own)
    report, state = Report.of(compiled), sum(y[0].nbytes for y in jax.tree.leaves(x))
    assert {*report.by_kind} == {*KINDS[kind]}
    sent = sum(c.bytes for c in report.by_kind.values())
    best = np.log2(devices) if kind == "matmul" else 2 * (devices - 1) / devices
    assert sent <= 1.05 * best * state
    # Hand-written: the devices' tree, of the tree of each device.
    if run != "one at a time":
        combine: Any
        combine, _, init = states(kind, 32)
        k = 32 // devices
        split = jax.tree.map(lambda y: y.reshape(devices, k, *y.shape[1:]), x)
        tops = jax.vmap(functools.partial(tree_of, combine))(split)
        expected = combine(init, tree_of(combine, tops))
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
            result,
            expected,
        )


@checkerboard(4, n=[5, 7, 13], kind=KINDS, devices=[3, 4])
def test_devices_without_pairs_or_groups(n, kind, devices):
    fn, x = fold_of(kind, n)
    expected = fn(x)
    with in_mesh(make_mesh({AXIS: devices})):
        for run in RUNS.values():
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
                run(fn)(x),
                expected,
            )


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_have_the_same_bits(kind, monkeypatch):
    """On the same devices the tree is one, whoever evaluates which part of it."""
    fn, x = fold_of(kind, 16)
    with in_mesh(make_mesh({AXIS: 4})):
        own = jax.device_put(x, P(AXIS))
        exchanged = jax.jit(fn)(own)
        saved, _ = jax.jit(lambda x: jax.vjp(fn, x))(own)
        with monkeypatch.context() as patch:
            patch.setattr("drjax._primitives.fold_devices._SMALL", 1 << 30)
            gathered = jax.jit(lambda x: fn(x))(own)
    jax.tree.map(np.testing.assert_array_equal, exchanged, gathered)
    jax.tree.map(np.testing.assert_array_equal, saved, gathered)


def loss_of(fn):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fn(*args)))


@checkerboard(6, devices=[4, 8], kind=KINDS, run=["jax.jit", "drjax.jit"])
def test_gradients_send_no_more_than_by_hand(devices, kind, run):
    """Columns there and back, and a result by columns; or swaps, and nothing back."""
    fn, x = fold_of(kind, 32)
    gradient = jax.value_and_grad(loss_of(fn), allow_int=True)
    with in_mesh(make_mesh({AXIS: devices})):
        own = jax.device_put(x, P(AXIS))
        report = Report.of(jax.jit(RUNS[run](gradient)).lower(own).compile())
    state = sum(y[0].nbytes for y in jax.tree.leaves(x))
    sent = sum(c.bytes for c in report.by_kind.values())
    best = np.log2(devices) if kind == "matmul" else 3 * (devices - 1) / devices
    assert sent <= 1.05 * best * state


def mean_of_weighted(a, b):
    """A scalar that all elements read, with a derivative."""
    w = a["w"] + b["w"]
    return {"w": w, "mean": a["mean"] + (b["mean"] - a["mean"]) * (b["w"] / w)}


def derivatives(kind, n):
    """Derivatives in the groups' states, the first state, and what is closed over."""
    rng = np.random.RandomState(1)
    if kind in ("scalar", "array"):
        x = rng.randn(n, D).astype(np.float32) / 3
        init, c = jnp.ones(D), jnp.float32(0.1)
        c = c if kind == "scalar" else jnp.linspace(-0.3, 0.3, D)
    elif kind == "weighted":
        x = {"w": rng.rand(n).astype(np.float32) + 1, "mean": rng.randn(n, D) * 1.0}
        x = jax.tree.map(np.float32, x)
        init, c = {"w": jnp.float32(0.5), "mean": jnp.ones(D)}, jnp.float32(0.1)
    else:
        _, x, init = states(kind, n)
        init, c = jax.tree.map(jnp.asarray, init), jnp.float32(0.1)
    functions = {"weighted": mean_of_weighted}

    @drjax.program(clients=n)
    def fn(x, init, c):
        product = lambda a, b: a + b + c * a * b
        closed = kind in ("scalar", "array")
        combine = product if closed else functions.get(kind) or states(kind, n)[0]
        return drjax.reduce(combine, x, init)

    gradient = jax.value_and_grad(loss_of(fn), (0, 1, 2))
    two = lambda tree: jax.tree.map(lambda y: jnp.stack([y, 0.9 * y]), tree)

    def all_of(x, init, c):
        tangents = jax.tree.map(jnp.cos, (x, init, c))
        return (
            gradient(x, init, c),
            jax.jvp(fn, (x, init, c), tangents),
            jax.vmap(gradient, (0, None, None))(two(x), init, c),
        )

    return all_of, gradient, (x, init, c)


WAYS = [*KINDS, "scalar", "array", "weighted"]


@pytest.mark.slow
@checkerboard(7, where=[(8, 5), (6, 13), (4, 8), (3, 7), (8, 16)], kind=WAYS)
def test_derivatives_by_each_way(where, kind):
    devices, n = where
    every, gradient, args = derivatives(kind, n)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    expected = jax.jit(every)(*args)
    with in_mesh(make_mesh({AXIS: devices})):
        jax.tree.map(close, jax.jit(every)(*args), expected)
        jax.tree.map(close, drjax.jit(gradient)(*args), expected[0])


@pytest.mark.once
@pytest.mark.parametrize("kind", ["affine", "matmul"])
def test_second_derivatives_by_each_way(kind):
    _, gradient, args = derivatives(kind, 8)
    square = lambda x: sum(
        jnp.sum(y**2) for y in jax.tree.leaves(gradient(x, *args[1:])[1][0])
    )
    expected = jax.jit(jax.grad(square))(args[0])
    with in_mesh(make_mesh({AXIS: 4})):
        result = jax.jit(jax.grad(square))(args[0])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6),
        result,
        expected,
    )


@pytest.mark.parametrize("m", range(1, 18))
def test_swaps_bring_each_device_the_state_of_the_neighbor(m):
    for used in range(1, m + 1):
        states = [frozenset({d}) if d < used else frozenset() for d in range(m)]
        for swap in levels(m, used):
            node = lambda d, size=swap.size: d // size
            others = [frozenset()] * m
            for pairs in swap.rounds:
                sources, targets = zip(*pairs, strict=True)
                assert len({*sources}) == len({*targets}) == len(pairs)
                for source, target in pairs:
                    assert node(source) == node(target) ^ 1
                    others[target] = states[source]
            states = [x | y for x, y in zip(states, others, strict=True)]
        assert states == [frozenset(range(used))] * m


def test_small_states_are_gathered_in_one_message():
    fn = drjax.program(clients=8)(lambda x: drjax.reduce(jnp.logaddexp, x, -jnp.inf))
    with in_mesh(make_mesh({AXIS: 4})):
        report = Report.of(jax.jit(fn).lower(jnp.ones(8)).compile())
    assert {*report.by_kind} == {"all-gather"}


def test_scalars_that_are_closed_over_take_part_in_columns():
    x = jnp.asarray(np.random.RandomState(0).randn(8, D), jnp.float32)

    @drjax.program(clients=8)
    def fn(x, scale):
        add = lambda a, b: a + b + scale * a * b
        return drjax.reduce(add, x, jnp.zeros(D))

    expected = fn(x, 0.1)
    with in_mesh(make_mesh({AXIS: 4})):
        compiled = jax.jit(fn).lower(x, 0.1).compile()
        np.testing.assert_allclose(compiled(x, 0.1), expected, rtol=1e-4, atol=1e-5)
    assert "all-to-all" in Report.of(compiled).by_kind


POINTWISE = {
    "sum": (lambda a, b: a + b, True),
    "logaddexp": (jnp.logaddexp, True),
    "where": (lambda a, b: jnp.where(a > 0, a, b), True),
    "reshaped": (lambda a, b: (a.reshape(6) + b.reshape(6)).reshape(2, 3), True),
    "scaled": (lambda a, b: a * jnp.float32(2) + jnp.full((2, 3), 3.0) * b, True),
    "transposed": (lambda a, b: a.reshape(3, 2).T + b, False),
    "reversed": (lambda a, b: a[::-1] + b, False),
    "summed": (lambda a, b: a + b.sum(), False),
    "of the first": (lambda a, b: a + jnp.broadcast_to(b[:1], a.shape), False),
    "constant": (lambda a, b: a + b * np.arange(6.0).reshape(2, 3), False),
    "cumulative": (lambda a, b: lax.cumsum(a) + b, False),
    "looped": (lambda a, b: lax.fori_loop(0, 3, lambda _, a: a + b, a), False),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_functions_are_recognized(name):
    fn, expected = POINTWISE[name]
    a = jnp.ones((2, 3), jnp.float32)
    assert is_pointwise(jax.make_jaxpr(fn)(a, a)) == expected


@pytest.mark.parametrize("small", [(3,), (1,)])
def test_an_array_in_all_places_of_a_larger_one_is_not_pointwise(small):
    spread = lambda a, b: a * jnp.broadcast_to(jnp.squeeze(b), a.shape)
    jaxpr = jax.make_jaxpr(spread)(jnp.ones((2, 3)), jnp.ones(small))
    assert not is_pointwise(jaxpr)
