"""Wrong programs: what each refusal says, and that plain JAX still runs the program.

Covers: drjax._planner.check, drjax._planner.partitioning.diagnostics,
drjax._planner.partitioning.consistency, drjax._jaxprs.provenance.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from tests.helpers.meshes import AUTO, make_mesh

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N = 4
four = drjax.program(clients=N)
X = np.arange(12.0, dtype=np.float32).reshape(N, 3)
IN_MAP = "inside the function given to drjax.map_fn"
GATHER = "drjax.gather"


def squares(x):
    """Slices that are certainly partitioned."""
    return drjax.map_fn(jnp.square, x)


def product_over_groups(x):
    return squares(x).prod(axis=0)


def sort_over_groups(x):
    return jnp.sort(squares(x), axis=0)


def cumsum_over_groups(x):
    return jnp.cumsum(squares(x), axis=0)


def argmax_over_groups(x):
    return jnp.argmax(squares(x), axis=0)


def leave_out_a_group(x):
    return squares(x)[1:]


def merge_groups(x):
    return squares(x).reshape(-1)


def merge_groups_behind(x):
    return squares(x).T.reshape(-1)


def broadcast_slices(x):
    return drjax.broadcast(squares(x))


def scan_over_groups(x):
    return lax.scan(lambda c, slice_: (c + slice_, c), jnp.zeros(3), squares(x))


def gram_matrix(x):
    slices = squares(x)
    return slices @ slices.T


def most_slices(x):
    return squares(x)[:3]


def concatenate_groups(x):
    return jnp.concatenate([squares(x), squares(x)])


def padded_groups(x):
    return jnp.pad(squares(x), ((0, 1), (0, 0)))


def while_of_a_group(x):
    slices = squares(x)
    return lax.while_loop(
        lambda r: jnp.sort(r, 0)[0, 0] < 100.0, lambda r: r * 2.0 + 1.0, slices
    )


def cond_of_a_group(x):
    slices = squares(x)
    return lax.cond(jnp.sort(slices, 0)[0, 0] > 0.0, jnp.sin, jnp.cos, slices)


def mixed_in_a_scan(x):
    def a_round(slices, _):
        return slices - jnp.sort(slices, axis=0)[2:3], None

    return lax.scan(a_round, squares(x), length=2)[0]


def reduce_transposed(x):
    square = drjax.scatter(x[:, :1] * jnp.ones((1, N)))
    return drjax.reduce_sum(square.T)


# program -> (primitive, kinds of its operands, the way out)
REFUSED = {
    product_over_groups: ("reduce_prod", "(float32[4,3] partitioned)", "reduce_sum"),
    sort_over_groups: ("sort", "(float32[4,3] partitioned)", GATHER),
    cumsum_over_groups: ("cumsum", "(float32[4,3] partitioned)", GATHER),
    argmax_over_groups: ("argmax", "(float32[4,3] partitioned)", GATHER),
    leave_out_a_group: ("slice", "(float32[4,3] partitioned)", GATHER),
    merge_groups: ("reshape", "(float32[4,3] partitioned)", GATHER),
    merge_groups_behind: (
        "reshape", "(float32[3,4] partitioned along axis 1)", IN_MAP,
    ),
    broadcast_slices: (
        "drjax_broadcast", "(float32[4,3] partitioned)", "leave out the broadcast",
    ),
    scan_over_groups: ("scan", "float32[4,3] partitioned)", IN_MAP),
    gram_matrix: (
        "dot_general",
        "(float32[4,3] partitioned, float32[3,4] partitioned along axis 1)",
        GATHER,
    ),
    most_slices: (None, "(float32[4,3] partitioned", "select"),
    concatenate_groups: (
        "concatenate", "(float32[4,3] partitioned, float32[4,3] partitioned)", GATHER,
    ),
    padded_groups: ("pad", "(float32[4,3] partitioned, float32[] global)", GATHER),
    while_of_a_group: (None, "(float32[4,3] partitioned", IN_MAP),
    cond_of_a_group: (None, "(float32[4,3] partitioned", "select"),
    mixed_in_a_scan: ("sort", "(float32[4,3] partitioned)", "drjax.gather"),
    reduce_transposed: (
        "drjax_reduce_sum", "(float32[4,4] partitioned along axis 1)", "axis 0",
    ),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_mixing_slices_is_refused(fn):
    primitive, operands, fix = REFUSED[fn]
    with pytest.raises(drjax.PlanError) as caught:
        drjax.make_plan(four(fn))(X)
    text = str(caught.value)
    assert primitive is None or text.startswith(f"{primitive} at ")
    lines, first = inspect.getsourcelines(fn)
    location = re.search(r"test_refusals\.py:(\d+)", text)
    assert location, text
    assert first <= int(location.group(1)) < first + len(lines)
    assert f"takes ({operands.lstrip('(')}"[:7] in text and operands in text
    assert "over partition clients:4" in text
    assert fix in text
    with pytest.raises(drjax.PlanError, match=re.escape(text)):
        drjax.jit(four(fn))(X)
    jax.block_until_ready(jax.jit(four(fn))(X))


# -------------------------------------------------------------------------------------
# Partitions and meshes


def refused(fn, *args, partitioned=None) -> str:
    """The message of a program that has no plan, and runs under `jax.jit`."""
    jax.block_until_ready(jax.jit(fn)(*args))
    with pytest.raises(drjax.PlanError) as caught:
        drjax.make_plan(fn, partitioned)(*args)
    return str(caught.value)


@four
def mean_square(x):
    return drjax.reduce_mean(squares(x))


@jax.custom_vjp
def times(x, w):
    return x * w


times.defvjp(
    lambda x, w: (x * w, w), lambda w, ct: (jnp.sort(ct, 0) * w, jnp.zeros(()))
)


def test_derivative_of_what_is_planned():
    """Found while JAX transposes: it follows the causes of errors to their end."""

    @four
    def program(x, w):
        return drjax.reduce_mean(times(squares(x), w)).sum()

    with pytest.raises(drjax.PlanError, match="sort at .* may mix the slices"):
        jax.grad(drjax.jit(program))(X, 2.0)


def test_prints_of_all_slices():
    @four
    def prints(x):
        jax.debug.print("{x}", x=squares(x))
        return drjax.reduce_mean(x)

    text = refused(prints, X)
    assert "slices of all groups to Python at once" in text
    assert IN_MAP in text and GATHER in text


def test_mutable_arrays_of_the_server():
    def update(m, x):
        ref = jax.new_ref(m)
        ref[...] += mean_square(x)
        return ref[...]

    text = refused(update, X[0], X)
    assert "works on a mutable array (jax.new_ref)" in text
    assert "test_refusals.py" in text


def test_mesh_of_a_program():
    mesh = make_mesh({"clients": 2}, AUTO)
    text = refused(drjax.program(clients=N, mesh=mesh)(squares), X)
    assert "test_refusals.py" in text
    assert "leave out mesh=" in text


def test_sharding_constraint():
    sharding = jax.NamedSharding(make_mesh({"clients": 2}, AUTO), jax.P("clients"))

    @four
    def constrained(x):
        return drjax.reduce_sum(lax.with_sharding_constraint(squares(x), sharding))

    text = refused(constrained, X)
    assert text.startswith("sharding_constraint at ") and "test_refusals.py" in text
    assert "shard_map and sharding constraints outside of mapped functions" in text


def test_errors_of_a_function_on_a_mesh_stay():
    def too_coarse(x):
        raise ValueError("the finite-element mesh is too coarse")

    nested = lambda x: drjax.map_fn(lambda a: drjax.reduce_sum(x), x)
    with jax.set_mesh(make_mesh({"clients": 2}, AUTO)):
        with pytest.raises(ValueError, match="^the finite-element mesh"):
            drjax.make_plan(four(too_coarse))(X)
        with pytest.raises(drjax.ScopeError):
            drjax.make_plan(four(nested))(X)


def test_shard_map():
    mesh = make_mesh({"model": 2}, AUTO)
    spec = jax.P(None)

    @four
    def manual(x):
        double = jax.shard_map(lambda y: 2 * y, mesh=mesh, in_specs=spec,
                               out_specs=spec)  # fmt: skip
        return drjax.reduce_sum(double(squares(x)))

    text = refused(manual, X)
    assert text.startswith("shard_map at ")
    assert "free of devices" in text


# -------------------------------------------------------------------------------------
# What partitioned= says


@four
def scaled(m, x):
    return drjax.reduce_sum(drjax.map_fn(lambda m, x: m * x, (drjax.broadcast(m), x)))


M = np.ones(3, np.float32)


def test_partitioned_without_leading_axis():
    text = refused(scaled, M, X, partitioned=(True, True))
    assert "partitioned= declares that m is partitioned over clients:4" in text
    assert "leading axis of 4, but its shape is (3,)" in text


def test_partitioned_where_it_is_broadcast():
    text = refused(scaled, np.ones((N, 3), np.float32)[:, 0], X[:, 0],
                   partitioned=(True, True))  # fmt: skip
    assert text.startswith("drjax_broadcast at ")
    assert "(float32[4] partitioned)" in text
    assert "partitioned= declares that m has a slice for each group" in text


def test_partitioned_without_partition():
    text = refused(jnp.sin, X, partitioned=(True,))
    assert "calls no drjax building block" in text


@pytest.mark.parametrize(
    "tree",
    [(True,), (True, {"a": True}), {"m": True}, (False, 2), (0, 1), (False, "x")],
)
def test_partitioned_is_no_prefix(tree):
    text = refused(scaled, M, X, partitioned=tree)
    assert "a tree of bools that is a prefix of the arguments" in text
    assert "(False, True)" in text and "for 2 arguments" in text


def test_arguments_that_are_none_have_no_kind():
    def fn(m, state, x):
        assert state == {"a": None}
        return scaled(m, x)

    for tree in [(False, None, True), (np.False_, True, np.True_),
                 (None, {"a": False}, True), [False, {"a": None}, None]]:  # fmt: skip
        plan = drjax.make_plan(fn, partitioned=tree)(M, {"a": None}, X)
        assert [value.partitioned for value in plan.inputs] == [False, True]


def test_global_argument_is_scattered():
    plan = drjax.make_plan(scaled, partitioned=(False, False))(M, X)
    assert [value.partitioned for value in plan.inputs] == [False, False]
    ((whole, slices),) = plan.rounds[0].scatter
    assert whole == plan.inputs[1] and slices.shape == (3,)
    got = drjax.backends.reference.compile(plan)(M, X)
    np.testing.assert_allclose(got, jax.jit(scaled)(M, X), rtol=1e-6)
