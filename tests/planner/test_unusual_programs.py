"""Plans of unusual programs: against `jax.jit`, and one group at a time.

Covers: drjax._planner.build_stages, drjax._planner.stage_values,
drjax._planner.arguments, drjax._planner.rematerialize_rounds,
drjax._planner.trace_stages.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import temp_bytes
from tests.helpers.meshes import in_mesh_of, make_mesh

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N = 4
four = drjax.program(clients=N)
X = np.arange(16.0, dtype=np.float32).reshape(N, N) + 1
V = np.arange(4.0, dtype=np.float32) + 1


def squares(x):
    return drjax.map_fn(jnp.square, x)


@four
def weighted(v, w):
    return drjax.reduce_sum(squares(v) * w)


def branch_on_an_effect(x):
    total = drjax.reduce_sum(squares(x))
    lax.cond(jnp.isnan(total), lambda: jax.debug.print("NaN"), lambda: None)
    return total


def rounds(xs):
    one = lambda v: drjax.reduce_sum(drjax.map_fn(jnp.sin, drjax.broadcast(v)))
    return lax.map(one, xs).sum()


def solve(b, data):
    """Conjugate gradients with a program as the matrix."""

    def one(w, d):
        return 2 * w + d * (d @ w)

    @four
    def matvec(w):
        return drjax.reduce_mean(drjax.map_fn(one, (drjax.broadcast(w), data)))

    return jax.scipy.sparse.linalg.cg(matvec, b)[0]


def root(x):
    return lax.custom_root(
        lambda z: z - x, 0.0, lambda f, z: z - f(z), lambda g, y: y / g(1.0)
    )


@jax.custom_batching.custom_vmap
def doubled(x):
    return 2 * x


@doubled.def_vmap
def _(size, batched, x):
    return 2 * x, True


@four
def gathered(x):
    """Its gradient scatters what is made of slices."""
    y = drjax.gather(squares(x))
    return drjax.reduce_sum(drjax.map_fn(jnp.sin, x) * y).sum() + (y * y).sum()


@four
def chosen(x, i):
    """Slices of several groups, on either axis."""
    y = squares(x)
    return jnp.take(y, i, axis=0, mode="clip"), jnp.take(y.T, i, axis=1, mode="clip")


@four
def chosen_of_each(x, ts):
    """A slice of each of several arrays: the vmap of a slice by index."""

    def one(t, axis):
        y = drjax.map_fn(lambda x, t: jnp.cos(x * t), (x, drjax.broadcast(t)))
        i = jnp.int32(10 * t)
        return jax.lax.dynamic_index_in_dim(y.swapaxes(0, axis), i, axis)

    both = lambda axis: lambda t, u: one(t * u, axis)
    inner = lambda axis: jax.vmap(both(axis), (None, 0), out_axes=1)
    return [jax.vmap(inner(axis), (0, None))(ts, ts[:1] + 0.5) for axis in (0, 1)]


PROGRAMS = {
    "slices of each": (chosen_of_each, (X, np.array([0.05, 0.2, 0.35]))),
    "gradient of slices of each": (
        jax.grad(lambda *a: sum((y**3).sum() for y in chosen_of_each(*a)), (0, 1)),
        (X, np.array([0.05, 0.2, 0.35])),
    ),
    "several slices": (chosen, (X, np.array([[3, 9, -2]]))),
    "one of them": (chosen, (X, np.int32(2))),
    "gradient of several slices": (
        jax.grad(lambda x, i: sum((y**3).sum() for y in chosen(x, i))),
        (X, np.array([1, 3, 1])),
    ),
    "scattered slices": (four(lambda x: drjax.scatter(squares(x))), (X,)),
    "gathered and used by slices": (jax.grad(gathered), (X,)),
    # One argument that no one axis fits is taken whole.
    "along two axes": (four(lambda x: drjax.reduce_sum(x * x.T)), (X,)),
    "mapped along the other axis": (
        four(lambda x: drjax.reduce_sum(squares(x.T) + x)), (X,),
    ),
    # A global vector as long as there are groups.
    "as wide as groups": (
        four(lambda x, b: drjax.reduce_mean(squares(x) + b[None])), (X, V),
    ),
    "down and across": (
        four(lambda x, b: drjax.reduce_sum(squares(x) * b[:, None] + b[None])), (X, V),
    ),
    "batch of as many": (jax.vmap(weighted), (X, V)),
    "effect in a branch": (four(branch_on_an_effect), (V,)),
    "checkpointed rounds": (
        jax.grad(jax.checkpoint(four(rounds))), (np.ones(3, np.float32),),
    ),
    "linear solve": (solve, (V[:3], X[:, :3])),
    "gradient of a linear solve": (
        jax.grad(lambda b, d: solve(b, d).sum(), (0, 1)), (V[:3], X[:, :3]),
    ),
    "root in a group": (four(lambda v: drjax.reduce_sum(drjax.map_fn(root, v))), (V,)),
    "root outside": (four(lambda v: root(drjax.reduce_sum(squares(v)))), (V,)),
    "custom_vmap": (four(lambda v: drjax.reduce_sum(doubled(squares(v)))), (V,)),
    "planned twice": (drjax.jit(weighted), (V, np.float32(0.5))),
    "barrier": (
        four(lambda v, g: drjax.reduce_sum(
            jnp.multiply(*lax.optimization_barrier((squares(v), g))))),
        (V, np.float32(2)),
    ),
    "the only group": (
        drjax.program(clients=1)(
            lambda v: (squares(v)[0], squares(v)[jnp.int32(0)], squares(v[None].T)[0])),
        (V[:1],),
    ),
    "constants": (four(lambda v: (3, drjax.reduce_sum(v), 2.5)), (V,)),
    "gradient of a maximum": (
        jax.grad(four(lambda v: drjax.reduce_max(jnp.sin(v) / jnp.sqrt(1 + v * v)))),
        (V,),
    ),
}  # fmt: skip


@checkerboard(7, name=PROGRAMS)
def test_corner(name):
    fn, args = PROGRAMS[name]
    want = jax.jit(fn)(*args)
    plan = drjax.make_plan(fn)(*args)
    result = {
        "all at once": drjax.jit(fn)(*args),
        "one by one": drjax.jit(fn, groups_per_step=1)(*args),
        "reference": drjax.backends.reference.compile(plan)(*args),
    }
    with in_mesh_of({"clients": plan.size // 2 or 1}):
        result["on devices"] = drjax.jit(fn)(*args)
    for way, got in result.items():
        assert jax.tree.structure(got) == jax.tree.structure(want), way
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6, err_msg=way)
            assert jnp.asarray(x).dtype == y.dtype, way


@pytest.mark.slow
def test_checkpoints_of_a_planned_function():
    fn = lambda v, w: drjax.jit(weighted)(v, w) ** 2
    want = jax.grad(lambda v, w: weighted(v, w) ** 2, (0, 1))(V, 0.5)
    result = jax.grad(jax.checkpoint(fn), (0, 1))(V, 0.5)
    for x, y in zip(result, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
def test_a_with_mesh_block():
    want = jax.value_and_grad(weighted)(V, 0.5)
    with make_mesh({"clients": 4}):
        result = drjax.jit(jax.value_and_grad(weighted), groups_per_step=1)(V, 0.5)
    for x, y in zip(result, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize(
    "args, error, text",
    [
        (
            (V[:3],),
            drjax.DrjaxValueError,
            r"v of shape \(4,\), got \(3,\). Plan it again",
        ),
        ((X,), drjax.DrjaxValueError, r"v of shape \(4,\), got \(4, 4\)"),
        ((V.astype(int),), drjax.DrjaxTypeError, "v of dtype float32, got int32"),
        ((V, V), drjax.DrjaxTypeError, "was planned for arguments .* of structure"),
        (("clients-*.parquet",), drjax.DrjaxTypeError, "needs an array as v, got str"),
    ],
)
def test_backends_check_arguments(backend, args, error, text):
    plan = drjax.make_plan(four(lambda v: drjax.reduce_sum(squares(v))))(V)
    with pytest.raises(error, match=text):
        getattr(drjax.backends, backend).compile(plan)(*args)


def test_the_xla_backend_checks_its_options():
    plan = drjax.make_plan(four(drjax.reduce_sum))(V)
    with pytest.raises(drjax.DrjaxValueError, match="at least one in groups_per_step"):
        drjax.backends.xla.compile(plan, groups_per_step=0)
    count: Any = np.int64(2)
    assert drjax.backends.xla.compile(plan, groups_per_step=count)(V) == 10


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bool"])
def test_extrema_of_small_types(dtype):
    x = jnp.arange(4).astype(dtype)
    for reduce in (drjax.reduce_max, drjax.reduce_min):
        result = drjax.jit(four(reduce), groups_per_step=1)(x)
        assert result == jax.jit(four(reduce))(x)


@pytest.mark.slow
def test_sums_are_made_within_the_map():
    """A gradient in shared weights contracts over the groups, as by jax.jit."""
    program = drjax.program(clients=64)

    @program
    def loss(w, x):
        one = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
        return drjax.reduce_mean(drjax.map_fn(one, (drjax.broadcast(w), x)))

    args = jnp.ones((128, 128)), jnp.ones((64, 16, 128))
    fn = jax.value_and_grad(loss)
    assert temp_bytes(drjax.jit(fn), *args) <= 1.01 * temp_bytes(jax.jit(fn), *args)


def agree(fn, *args):
    """One group at a time and in chunks, as by `jax.jit`."""
    expected = jax.jit(fn)(*args)
    run = drjax.backends.reference.compile(drjax.make_plan(fn)(*args))
    for result in (drjax.jit(fn, groups_per_step=1)(*args), run(*args)):
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)
        jax.tree.map(close, result, expected)


@pytest.mark.slow
def test_loops_of_which_each_ends_in_its_own_time():
    """A `while` under `vmap` goes on as long as any does."""

    @four
    def halve(t, x):
        return lax.while_loop(
            lambda c: c > 1, lambda c: c * drjax.reduce_mean(x) * 0.1, t
        )

    @four
    def slices_too(t, x):
        def step(carry):
            slices, i, s = carry
            slices = drjax.map_fn(
                lambda r, s: 0.7 * r + s, (slices, drjax.broadcast(s))
            )
            return slices, i + 1, 0.1 * drjax.reduce_mean(slices)

        return lax.while_loop(lambda c: c[1] < t, step, (squares(x), 0, 0.1 * t))

    times = jnp.arange(3.0) + 1
    for fn in (halve, slices_too):
        each = jax.vmap(fn, (0, None))
        agree(each, times, V)
        agree(jax.vmap(each, (0, None)), jnp.stack([times, 2 * times]), V)
        result = jax.vmap(drjax.jit(fn), (0, None))(times, V)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
            result, jax.jit(each)(times, V),
        )  # fmt: skip


def test_loops_in_groups_that_ask_for_their_number_end_in_their_own_time():
    """A batched `while` in a mapped function, of which each group has another end."""

    @four
    def fn(t, x):
        def one(t, x):
            end = lambda c: c[0] < t + drjax.partition_index()
            step = lambda c: (c[0] + 1, c[1] * 0.9 + drjax.partition_index())
            return lax.while_loop(end, step, (0, x))[1]

        return drjax.reduce_mean(drjax.map_fn(one, (drjax.broadcast(t), x)))

    each, times = jax.vmap(fn, (0, None)), jnp.array([1, 3])
    agree(each, times, V)
    agree(jax.vmap(each, (0, None)), jnp.stack([times, 2 * times]), V)
    result = jax.vmap(drjax.jit(fn), (0, None))(times, V)
    np.testing.assert_allclose(result, jax.jit(each)(times, V), rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_the_number_of_a_slice_in_a_small_type(dtype):
    slice_ = drjax.program(clients=300)(lambda x, i: squares(x)[i])
    agree(slice_, jnp.arange(300.0), jnp.array(100, dtype))


@pytest.mark.slow
def test_reductions_of_constants():
    weights = np.array([1.0, 0.0, 2.0, 3.0], np.float32)
    agree(four(lambda x: drjax.reduce_weighted_mean(x, jnp.asarray(weights))), V)
    agree(four(lambda x: x.sum() + drjax.reduce_sum(weights)), V)


@pytest.mark.slow
def test_mutable_arrays_in_a_group():
    def add_one(x):
        ref = jax.new_ref(x)
        ref[...] += 1.0
        return ref[...]

    agree(four(lambda x: drjax.reduce_sum(drjax.map_fn(add_one, x))), V)
