"""Folds in the order of the groups: values, derivatives, batches, plans, and bytes.

Covers: drjax._primitives.fold_groups, drjax._api.fold, drjax._api.pure_functions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.cases import MODES, checkerboard
from tests.helpers.folds import (
    FOLDS,
    MESHES,
    chan,
    close,
    data,
    direct_of,
    loss_of,
    plainly,
    program_of,
)
from tests.helpers.groups import four
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh
from tests.helpers.raising import KEYS3, X3, raises, three


@pytest.mark.slow
@checkerboard(13, mesh=MESHES, name=FOLDS)
def test_values_and_gradients(name, mesh):
    n, make = MESHES[mesh]
    f, direct, x = program_of(name, n), direct_of(name), data(n, 3)
    both = lambda f: jax.jit(lambda x: (f(x), jax.grad(loss_of(f))(x)))
    want = both(direct)(x)
    with in_mesh(make and make()):
        result = both(f)(x)
    jax.tree.map(close, result, want)


@pytest.mark.slow
@checkerboard(5, mesh=["none", "uneven", "explicit"], name=["chan", "best", "affine"])
def test_where(name, mesh):
    """Groups that are left out have the neutral state."""
    n, make = MESHES[mesh]
    combine, init, states = FOLDS[name]
    x, mask = data(n, 3), np.arange(n) % 3 != 1

    @drjax.program(clients=n)
    def f(x):
        every = states(x)
        return drjax.reduce(
            combine, every, init, where=mask, commutative=name == "best"
        )

    second = lambda f: lambda x, t: jax.jvp(jax.grad(loss_of(f)), (x,), (t,))[1]
    both = lambda f: lambda x: (f(x), jax.grad(loss_of(f))(x), second(f)(x, 0 * x + 1))
    chosen = jax.jit(both(direct_of(name)))(x[mask])
    with in_mesh(make and make()):
        for run in (jax.jit(both(f)), drjax.jit(both(f), groups_per_step=2)):
            values, gradient, hessian = run(x)
            jax.tree.map(close, values, chosen[0])
            close(np.asarray(gradient)[mask], chosen[1])
            close(np.asarray(hessian)[mask], chosen[2], rtol=1e-3, atol=1e-3)
            assert not np.asarray(gradient)[~mask].any()


def test_what_is_left_out_may_be_nan():
    x, mask = np.array([1.0, np.nan, 3.0], np.float32), np.array([True, False, True])
    total = three(lambda x: drjax.reduce(jnp.add, x, 0, where=mask))
    assert float(total(x)) == 4
    assert jax.grad(total)(x).tolist() == [1, 0, 1]


@pytest.mark.slow
@checkerboard(1, mesh=["none", "uneven", "explicit"], name=["affine", "chan"])
def test_second_derivatives_and_batches(name, mesh):
    n, make = MESHES[mesh]
    x = data(n, 3) / 2
    xs, dx = np.stack([x, 2 * x], 1), data(n + 1, 3)[1:]

    def derivatives(f):
        loss = loss_of(f)
        return jax.jit(
            lambda x, xs: (
                jax.hessian(loss)(x),
                jax.vmap(jax.grad(loss), 1)(xs),
                jax.vmap(f, 1)(xs),
                jax.jvp(loss, (x,), (dx,)),
                jax.grad(lambda x: jax.jvp(loss, (x,), (dx,))[1])(x),
            )
        )

    want = derivatives(direct_of(name))(x, xs)
    with in_mesh(make and make()):
        result = derivatives(program_of(name, n))(x, xs)
    jax.tree.map(functools.partial(close, rtol=2e-3, atol=1e-3), result, want)


@pytest.mark.slow
@checkerboard(8, mesh=["uneven", "two each", "none"], name=FOLDS)
def test_plans(name, mesh):
    n, make = MESHES[mesh]
    f, direct, x = program_of(name, n), direct_of(name), data(n, 3)
    both = lambda f: jax.value_and_grad(loss_of(f))
    want = jax.jit(both(direct))(x)
    plan = drjax.make_plan(both(f))(x)
    jax.tree.map(close, drjax.backends.reference.compile(plan)(x), want)
    with in_mesh(make and make()):
        jax.tree.map(close, drjax.jit(both(f), groups_per_step=2)(x), want)


@pytest.mark.slow
def test_communication():
    """Columns of the states there and back, and a result by columns."""
    n, d, m = 32, 500, 8
    states = lambda x: {"n": x[:, 0], "mean": x, "m2": x * 2}
    f = drjax.program(clients=n)(
        lambda x: drjax.reduce(chan, states(x), FOLDS["chan"][1])
    )
    with jax.set_mesh(make_mesh({"clients": m})):
        x = drjax.shard(np.ones((n, d), np.float32), partition={"clients": n})
        forward = drjax.collectives(f)(x).collectives
        gradient = drjax.collectives(jax.value_and_grad(loss_of(f)))(x).collectives
    # Of d = 500 elements, padded to 504; and the counts, which are scalars.
    width = 4 * -(-d // m)
    total = lambda calls, kind: sum(c.result_bytes for c in calls if c.kind == kind)
    assert {c.kind for c in forward} == {"all-gather", "all-to-all"}
    assert total(forward, "all-to-all") == 2 * m * width
    assert total(forward, "all-gather") == 2 * m * width + m * 4
    assert total(gradient, "all-to-all") == 4 * m * width
    assert total(gradient, "all-gather") == 2 * m * width + m * 4
    rest = {c.kind for c in gradient} - {"all-gather", "all-to-all"}
    assert all(c.result_bytes <= m * 4 for c in gradient if c.kind in rest)


def test_communication_of_derivatives():
    """A tangent, and a cotangent of what is closed over, are one all-reduce more."""
    n, d, m = 16, 10, 8
    f = drjax.program(clients=n)(
        lambda x, c: drjax.reduce(lambda a, b: a + b + c * a * b, x, 0)
    )
    loss = lambda x, c: jnp.sum(f(x, c) ** 2)
    with jax.set_mesh(make_mesh({"clients": m})):
        x, c = drjax.shard(data(n, d), partition={"clients": n}), jnp.ones(d)
        want = {"all-gather": m * d * 4, "all-reduce": d * 4}
        tangent = lambda x, c: jax.jvp(f, (x, c), (x, c))
        for derivative in (tangent, jax.value_and_grad(loss, (0, 1))):
            result = drjax.collectives(derivative)(x, c).collectives
            assert {c.kind: c.result_bytes for c in result} == want and len(result) == 2
        inner = jax.grad(loss)
        second = jax.grad(lambda x, c: jnp.sum(inner(x, c) ** 2))
        sizes = [c.result_bytes for c in drjax.collectives(second)(x, c).collectives]
        assert max(sizes) == n * d * 4 and len(sizes) < 8


# ---------------------------------------------------------------------------------
# What the function closes over, types and transformations


@checkerboard(6, mesh=["uneven", "none", "two each"], order=[1, 2])
def test_gradients_of_what_is_closed_over(mesh, order):
    """Of an array that the function closes over, and of a neutral state that varies."""
    n, make = MESHES[mesh]
    x, scale = data(n, 2) / 2, jnp.array([0.7, -0.4])

    @drjax.program(clients=n)
    def f(x, scale):
        # Its neutral state is -1 / scale.
        combine = lambda a, b: scale * a * b + a + b + (a + b) / 2 / scale * 0
        shifted = lambda a, b: a + b + scale
        return drjax.reduce(combine, x, 0.0) + drjax.reduce(shifted, x, -scale)

    def direct(x, scale):
        combine = lambda a, b: scale * a * b + a + b
        return plainly(combine, x) + x.sum(0) + (n - 1) * scale

    def derivatives(f):
        loss = lambda *xs: jnp.sum(jnp.sin(f(*xs)))
        if order == 2:
            return jax.jit(jax.hessian(loss, (0, 1)))
        return jax.jit(lambda *xs: (
            f(*xs), jax.grad(loss, (0, 1))(*xs),
            jax.vmap(jax.grad(loss, 1), (None, 0))(xs[0], jnp.stack([xs[1]] * 3)),
        ))  # fmt: skip

    want = derivatives(direct)(x, scale)
    with in_mesh(make and make()):
        result = derivatives(f)(x, scale)
        jax.tree.map(functools.partial(close, rtol=1e-3, atol=1e-4), result, want)
    grad = lambda f: jax.grad(lambda *xs: jnp.sum(f(*xs) ** 2), (0, 1))
    result = drjax.backends.reference.compile(drjax.make_plan(grad(f))(x, scale))
    jax.tree.map(close, result(x, scale), grad(direct)(x, scale))


def test_a_batch_of_groups_alone():
    """What the function closes over has no batch dimension."""
    scaled = three(lambda x, c: drjax.reduce(lambda a, b: c * a + c * b, x, 0.0))
    x, two = np.stack([X3, 2 * X3], 1), jnp.float32(2)
    result = jax.vmap(scaled, (1, None))(x, two)
    close(result, [scaled(X3, two), scaled(2 * X3, two)])


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map(check_vma):
    n, x, scale = 8, data(8, 3), jnp.float32(2.0)
    mesh = make_mesh({"clients": 4})

    @drjax.program(clients=n)
    def f(x, scale):
        def combine(a, b):  # a loop, whose types must not vary either
            step = lambda i, c: c + scale * jnp.ones(3)
            return jax.lax.fori_loop(0, 2, step, jnp.sin(a) * 0 + a) + b

        return drjax.reduce(combine, x, -2 * scale * jnp.ones(3))

    loss = lambda x, scale: jnp.sum(f(x, scale) ** 2)
    direct = lambda x, scale: x.sum(0) + 2 * (n - 1) * scale
    specs = P("clients"), P()
    with jax.set_mesh(mesh):
        run = jax.shard_map(f, in_specs=specs, out_specs=P(), check_vma=check_vma)
        close(jax.jit(run)(x, scale), direct(x, scale))
        if not check_vma:
            return
        grad = jax.grad(loss, (0, 1))
        inside = jax.shard_map(grad, in_specs=specs, out_specs=specs)
        outside = jax.grad(lambda *xs: jnp.sum(run(*xs) ** 2), (0, 1))
        results = jax.jit(inside)(x, scale), jax.jit(outside)(x, scale)
    want = jax.grad(lambda *xs: jnp.sum(direct(*xs) ** 2), (0, 1))(x, scale)
    for result in results:
        jax.tree.map(close, result, want)


def on_both_axes(kind, spec, **kwargs):
    """A mesh over two axes, and the arguments of a `shard_map` over some of them."""
    shape = {"clients": 2, "model": 2}
    return lambda: make_mesh(shape, kind), spec, kwargs


LAYOUTS = {
    "model": on_both_axes(AUTO, P(None, None, "model")),
    "explicit": on_both_axes(EXPLICIT, P("clients", None, "model")),
    "model in a shard_map": on_both_axes(
        AUTO, P(None, None, "model"), axis_names={"model"}
    ),
    "model in an unchecked one": on_both_axes(
        AUTO, P(None, None, "model"), axis_names={"model"}, check_vma=False
    ),
    "both in a shard_map": on_both_axes(
        AUTO, P("clients", None, "model"), axis_names={"clients", "model"}
    ),
    "two other axes": (
        lambda: make_mesh({"clients": 2, "model": 2, "data": 2}),
        P(None, "data", "model"),
        {},
    ),
}


@checkerboard(3, layout=LAYOUTS)
def test_states_sharded_over_other_axes(layout):
    make, spec, kwargs = LAYOUTS[layout]
    x, mesh = data(4, 2, 4), make()

    def combine(a, b):
        return jnp.logaddexp(a[0], b[0]), a[1] + b[1] + 1.0

    @drjax.program(clients=4)
    def f(x):
        top, count = drjax.reduce(combine, (x, x[:, 0]), (-jnp.inf, -1.0))
        return top + count[None]

    loss = lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sum(f(x) ** 2)))
    direct = lambda x: jax.nn.logsumexp(x, 0) + (x[:, 0].sum(0) + 3)[None]
    want = loss(direct)(x)
    with jax.set_mesh(mesh):
        if kwargs:
            f = jax.shard_map(f, in_specs=spec, out_specs=P(*spec[1:]), **kwargs)
        x = jax.device_put(x, jax.NamedSharding(mesh, spec))
        jax.tree.map(close, loss(f)(x), want)


def test_a_batch_sharded_over_an_explicit_axis():
    x = data(4, 6, 3)
    f = drjax.program(clients=4)(
        lambda x: drjax.reduce(lambda a, b: a + b + a * b, x, 0)
    )
    loss = lambda f: jax.value_and_grad(lambda x: jnp.sum(jnp.sin(f(x))))
    batch = lambda f: jax.jit(jax.vmap(loss(f), 1))
    want = batch(lambda x: plainly(lambda a, b: a + b + a * b, x))(x)
    mesh = make_mesh({"clients": 2, "model": 2}, EXPLICIT)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("clients", "model")))
        jax.tree.map(close, batch(f)(x), want)


@pytest.mark.slow
def test_a_partition_over_two_axes():
    x = data(6, 3)
    combine, init, states = FOLDS["affine"]
    f = drjax.program(clients=6, mesh_axes=("a", "b"))(
        lambda x: drjax.reduce(combine, states(x), init)
    )
    both = lambda f: jax.jit(jax.value_and_grad(loss_of(f)))
    want = both(direct_of("affine"))(x)
    with jax.set_mesh(make_mesh({"a": 2, "b": 2})):
        jax.tree.map(close, both(f)(x), want)


DTYPES = ("float32", "bfloat16", "float16", "complex64", "int8", "uint32", "bool",
          "float8_e4m3fn", "key")  # fmt: skip


@checkerboard(9, dtype=DTYPES, mesh=["uneven", "none"])
def test_dtypes(dtype, mesh):
    """The state of the last group, of any dtype, and that of group 2 by its index."""
    n, make = MESHES[mesh]
    x = jnp.asarray(2 * data(n, 3))
    if dtype == "key":
        x = jax.vmap(jax.random.key)(jnp.arange(n))
    else:
        x = x.astype(dtype)

    @drjax.program(clients=n)
    def f(x):
        index = drjax.partition_index()
        pick = lambda a, b: jax.tree.map(lambda x, y: jnp.where(a[0] == 2, x, y), a, b)
        empty = x[0] if dtype == "key" else jnp.zeros(3, dtype)
        return drjax.reduce(pick, (index, x), (-1, empty))[1]

    run = jax.jit(f)
    with in_mesh(make and make()):
        result = run(x)
        planned = drjax.jit(f)(x)
    assert result.dtype == planned.dtype == x.dtype
    raw = jax.random.key_data if dtype == "key" else np.asarray
    for y in (result, planned):
        np.testing.assert_array_equal(np.asarray(raw(y)), np.asarray(raw(x[2])))


@checkerboard(2, mesh=["uneven", "none"])
def test_gradients_beside_random_keys(mesh):
    """The best group's key, whose tangents are zeros, and a gradient of its score."""
    n, make = MESHES[mesh]
    keys = jax.vmap(jax.random.key)(jnp.arange(n))
    x = np.cos(np.arange(n), dtype=np.float32)

    def best(a, b):
        return jax.tree.map(lambda x, y: jnp.where(a[0] >= b[0], x, y), a, b)

    @drjax.program(clients=n)
    def loss(x):
        score, key = drjax.reduce(best, (x, keys), (-jnp.inf, keys[0]))
        return score**2 * jax.random.uniform(key)

    with in_mesh(make and make()):
        result = jax.jit(jax.grad(loss))(x), jax.jit(jax.hessian(loss))(x)
    want = np.zeros((n, n))
    want[0, 0] = 2 * jax.random.uniform(keys[0])
    jax.tree.map(close, result, (want[0], want))


def test_transformations():
    """Scans, checkpoints, and a result that depends on no operand."""
    n, x = 5, data(5, 3) / 9

    @drjax.program(clients=n)
    def f(x):
        def step(total, _):
            move = jax.checkpoint(lambda x: drjax.reduce(jnp.add, x, 0))
            total = total / 9 + move(x * total[None])
            return total, drjax.reduce(lambda a, b: jnp.ones(3), x, 0)

        return jax.lax.scan(step, jnp.ones(3), None, 3)

    def direct(x):
        step = lambda t, _: (t / 9 + (x * t[None]).sum(0), jnp.ones(3))
        return jax.lax.scan(step, jnp.ones(3), None, 3)

    loss = lambda f: lambda x: (jnp.sum(jnp.sin(f(x)[0])), f(x)[1])
    both = lambda f: jax.value_and_grad(loss(f), has_aux=True)
    want = jax.jit(both(direct))(x)
    for run in jax.jit, drjax.jit:
        jax.tree.map(close, run(both(f))(x), want)


def test_a_custom_derivative_of_the_function():
    """That of a function whose own derivative is NaN at the neutral state."""

    @jax.custom_jvp
    def norm(a, b):
        return jnp.sqrt(a * a + b * b)

    @norm.defjvp
    def _(primals, tangents):
        (a, b), (da, db), y = primals, tangents, norm(*primals)
        return y, (a * da + b * db) / jnp.where(y == 0, 1, y)

    x = np.array([0.0, 0.0, 3.0, 4.0], np.float32)
    result = jax.jit(jax.grad(four(lambda x: drjax.reduce(norm, x, 0))))(x)
    close(result, x / 5)


def test_no_leaves_no_numbers_and_one_group():
    f = four(lambda x: drjax.reduce(lambda a, b: b, x, {}))
    assert f({}) == {}
    with in_mesh(make_mesh({"clients": 2})):
        add = four(lambda x: drjax.reduce(jnp.add, x, 0))
        assert jax.jit(add)(np.ones((4, 0, 2))).shape == (0, 2)
        grad = jax.grad(lambda x: jnp.sum(add(x)))
        assert jax.jit(grad)(np.ones((4, 0, 2))).shape == (4, 0, 2)
        one = drjax.program(clients=1)(lambda x: drjax.reduce(jnp.add, x, 0))
        np.testing.assert_array_equal(jax.jit(one)(np.ones((1, 3))), np.ones(3))


def test_neutral_states_are_numbers_or_arrays():
    f = lambda init: three(lambda x: drjax.reduce(jnp.add, x, init))(X3)
    for init in (0, 0.0, np.float32(0), jnp.zeros(())):
        assert float(f(init)) == float(X3.sum())
    some = three(lambda x: drjax.reduce(jnp.logical_or, x > 1, False))
    assert some(np.stack([X3, 0 * X3], 1)).tolist() == [True, False]
    # It starts the fold, as in functools.reduce.
    assert float(f(5)) == float(X3.sum()) + 5


# ---------------------------------------------------------------------------------
# Errors


def fold(combine, x: Any = X3, init: Any = 0):
    return lambda: three(lambda x: drjax.reduce(combine, x, init))(x)


def effect(a, b):
    jax.debug.print("{}", a)
    return a + b


wrong: Any = 1


async def later(a, b):
    return a


@pytest.mark.parametrize(
    "call, error, text",
    [
        (fold(0), drjax.DrjaxTypeError, "needs a function of two states as its first"),
        (lambda: three(lambda x: drjax.reduce(jnp.add, x, 0, commutative=wrong))(X3),
         drjax.DrjaxTypeError, "needs commutative=True if any order of the groups"),
        (lambda: three(lambda x: drjax.reduce(jnp.add, x, 0, where=X3))(X3),
         drjax.DrjaxTypeError, "drjax.reduce needs where= as bool [3]"),
        (fold(later), drjax.DrjaxTypeError, "drjax.reduce needs a plain function"),
        (fold(lambda a, b: None), drjax.DrjaxValueError,
         "needs to return a state, a tree with the structure of x"),
        (fold(lambda a, b: (a, b)), drjax.DrjaxValueError, "result: PyTreeDef((*, *))"),
        (fold(lambda a, b: "a"), drjax.DrjaxTypeError,
         "drjax.reduce needs arrays as leaves, but the result of <lambda>"),
        (fold(lambda a, b: {"k": jnp.stack([a["k"], b["k"]])}, {"k": X3}, {"k": 0}),
         drjax.DrjaxValueError, "leaf result['k'] has shape (2,), but one group's"),
        (fold(lambda a, b: (a + b).astype(jnp.bfloat16)), drjax.DrjaxTypeError,
         "leaf result has dtype bfloat16, but x has float32"),
        (fold(lambda a, b: 1j), drjax.DrjaxTypeError, "has dtype complex64, but x"),
        (fold(jnp.add, X3, (0, 0)), drjax.DrjaxValueError,
         "drjax.reduce needs init with the structure of x"),
        (fold(jnp.add, X3, np.zeros(3, np.float32)), drjax.DrjaxValueError,
         "needs init of the shape of one group's slice, (), got (3,)"),
        (fold(jnp.add, X3, np.int32(0)), drjax.DrjaxTypeError,
         "needs init of the dtype of x there, float32, got int32"),
        (fold(jnp.add, X3.astype(np.int8), 300), drjax.DrjaxTypeError,
         "needs init of the dtype of x there, int8, got int32"),
        (fold(jnp.add, X3, "a"), drjax.DrjaxTypeError,
         "drjax.reduce needs arrays as leaves, but init is str"),
        (fold(jnp.add, KEYS3(), 0), drjax.DrjaxTypeError, "needs init of the dtype"),
        (fold(jnp.add, np.zeros(3, jax.dtypes.float0)), drjax.DrjaxTypeError, "float0"),
        (fold(effect), drjax.DrjaxTypeError, "given to drjax.reduce has effects"),
        (fold(lambda a, b: drjax.reduce_sum(a)), drjax.ScopeError,
         "calls a building block or a program; it sees the states of two groups"),
        (fold(lambda a, b: a * drjax.partition_index()), drjax.ScopeError,
         "calls a building block"),
        (fold(lambda a, b: jax.lax.psum(a, "clients")), drjax.MeshError,
         "uses a collective over the axis of partition clients:3 itself"),
        (fold(jnp.add, X3[:2]), drjax.DrjaxValueError, "leading axis [3, ...]"),
    ],
)  # fmt: skip
def test_errors(call, error, text):
    raises(error, text, call)


def test_a_closed_value_that_is_sharded_over_the_partition():
    f = three(lambda x, y: drjax.reduce(lambda a, b: a + b + y.sum(), x, 0))
    with jax.set_mesh(make_mesh({"clients": 3}, EXPLICIT)):
        y = drjax.shard(X3, partition={"clients": 3})
        raises(drjax.MeshError, "closes over an array that is sharded", f, X3, y)


def test_a_closed_value_that_is_partitioned_has_no_plan():
    def f(x):
        y = drjax.map_fn(jnp.sin, x)
        return drjax.reduce(lambda a, b: a + b + jnp.sort(y)[0], x, 0)

    raises(drjax.PlanError, "It needs a global value", drjax.make_plan(three(f)), X3)


# ---------------------------------------------------------------------------------
# Ties, and a first state that is not neutral

SHIFTS = {
    "none": (4, None),
    "one": (1, None),
    "hundred": (100, None),
    "even": (8, {"clients": 4}),
    "uneven": (7, {"clients": 4}),
    "empty devices": (5, {"clients": 4}),
}


@checkerboard(11, mode=MODES, mesh=SHIFTS)
def test_derivatives_at_ties_are_those_of_one_order(mode, mesh):
    """Along the shift of all groups, the maximum has the derivative 1."""
    n, shape = SHIFTS[mesh]
    f = drjax.program(clients=n)(lambda x: drjax.reduce(jnp.maximum, x, -jnp.inf))
    x = jnp.zeros((n, 2)).at[n // 2, 1].set(-1.0)
    with in_mesh(shape and make_mesh(shape)):
        run = MODES[mode]
        jacobian = run(jax.jacrev(lambda x: f(x)[:, None].sum(1)))(x)
        tangent = lambda x, t: jax.jvp(f, (x,), (t,))[1]
        close(run(tangent)(x, jnp.ones_like(x)), [1, 1])
        t = data(n, 2)
        forward = run(tangent)(x, t)
    jacobian = np.asarray(jacobian)
    close(jacobian.sum((1, 2)), [1, 1])
    assert (jacobian >= 0).all()
    # Reverse and forward mode are the same linear map.
    close(np.einsum("iks,ks->i", jacobian, t), forward)
    # Each part is a product of halves, of one tree.
    parts = jacobian[0, :, 0]
    assert set(np.log2(parts)) <= set(-np.arange(0.0, 1 + np.ceil(np.log2(n))))


@checkerboard(6, mesh=["none", "even", "uneven"], name=["jit", "drjax.jit"])
def test_second_derivatives_at_ties(mesh, name):
    """Of the square of a maximum: twice the outer product of one derivative."""
    n, shape = SHIFTS[mesh]
    f = drjax.program(clients=n)(lambda x: drjax.reduce(jnp.maximum, x, -jnp.inf))
    x = jnp.ones(n)
    with in_mesh(shape and make_mesh(shape)):
        run = MODES[name]
        gradient = run(jax.grad(f))(x)
        hessians = [
            run(outer(inner(lambda x: f(x) ** 2)))(x)
            for outer in (jax.jacrev, jax.jacfwd)
            for inner in (jax.jacrev, jax.jacfwd)
        ]
    for hessian in hessians:
        close(hessian, 2 * np.outer(gradient, gradient))


FIRST = {
    "logaddexp": (jnp.logaddexp, lambda x: x, 0.5),
    "affine": (FOLDS["affine"][0], FOLDS["affine"][2], None),
    "maximum": (jnp.maximum, lambda x: x, 0.25),
    "times": (jnp.multiply, lambda x: x, -1.5),
}


@checkerboard(31, mode=MODES, mesh=SHIFTS, name=FIRST)
def test_a_first_state_that_is_not_neutral(mode, mesh, name):
    """The value, and so its derivatives, is that of functools.reduce."""
    n, shape = SHIFTS[mesh]
    n = min(n, 8)
    combine, states, init = FIRST[name]
    x = data(n, 3) / 2
    first = (np.eye(3, dtype=np.float32) / 2, x[0]) if init is None else init
    first = jax.tree.map(jnp.float32, first)

    @drjax.program(clients=n)
    def f(x, first):
        y = states(x)
        full = jax.tree.map(lambda e, y: jnp.broadcast_to(e, y.shape[1:]), first, y)
        return drjax.reduce(combine, y, full)

    def direct(x, first):
        every = states(x)
        each = [jax.tree.map(lambda y, i=i: y[i], every) for i in range(n)]
        return functools.reduce(combine, each, first)

    both = lambda f: jax.value_and_grad(
        lambda x, e: sum(jnp.sum(jnp.sin(y / 4)) for y in jax.tree.leaves(f(x, e))),
        (0, 1),
    )
    want = jax.jit(both(direct))(x, first)
    with in_mesh(shape and make_mesh(shape)):
        jax.tree.map(close, MODES[mode](both(f))(x, first), want)


def test_rules_of_derivatives_that_one_jaxpr_does_not_show():
    """Two functions of one jaxpr, whose rules differ, have derivatives of their own."""

    def plus(factor):
        @jax.custom_jvp
        def combine(a, b):
            return a + b

        combine.defjvp(lambda p, t: (p[0] + p[1], factor * (t[0] + t[1])))
        return lambda a, b: combine(a, b)

    for factor in (1.0, 3.0):
        f = three(lambda x: drjax.reduce(plus(factor), x, 0))  # noqa: B023
        # Each pair on the way to the root multiplies by the factor.
        close(jax.grad(f)(X3), [factor**3, factor**3, factor**2])
