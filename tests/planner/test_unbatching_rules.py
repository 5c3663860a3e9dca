"""Unbatching rules, for every position of the group axis, against the equation itself.

For each assignment of group axes to operands that a rule accepts, the per-group
equation, run for each group, must give the slices of the equation's results.
Assignments that a rule must refuse are in the table too.

Covers: drjax._planner.unbatching.rules, drjax._planner.unbatching.core,
drjax._planner.unbatching.indexing, drjax._planner.unbatching.own_index,
drjax._compat.jaxprs.
"""

import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, Primitive
from jax.interpreters import batching

import drjax
from drjax import _compat
from drjax._jaxprs.prng_keys import is_key
from drjax._planner.inline import inline_calls
from drjax._planner.unbatching.rules import ELEMENTWISE, UNBATCHING_RULES, unbatch
from tests.helpers.unbatching_cases import CASES, INTERNAL, A

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


# What may accept any axis; the others must refuse at least one.
ANY_AXIS = ELEMENTWISE | {"transpose", "random_unwrap", "stack", "broadcast_in_dim",
                          "squeeze"}  # fmt: skip


def equations(name):
    """All equations of this primitive in its cases, with the values of operands."""
    for fn, args in CASES.get(name, ()):
        args = [jnp.asarray(x() if callable(x) else x) for x in args]
        program = inline_calls(jax.make_jaxpr(fn)(*args))
        values = {**program.consts, **dict(zip(program.invars, args, strict=True))}
        for eqn in program.eqns:
            operands = [
                v.val if isinstance(v, Literal) else values[v] for v in eqn.invars
            ]
            outs = _compat.bind_equation(eqn, operands)
            values.update(zip(eqn.outvars, outs, strict=True))
            if eqn.primitive.name == name:
                yield eqn, operands, outs


def check_slices(eqn, operands, outs, per_group) -> None:
    """The slices of the results are the results of the per-group equation."""
    partitioned = [(x, a) for x, a in zip(operands, per_group.in_axes, strict=True)
                   if a is not None]  # fmt: skip
    sizes = {x.shape[a] for x, a in partitioned}
    (n,) = sizes
    columns = []
    for i in range(n):
        args = [
            x if a is None else slice_of(x, i, a)
            for x, a in zip(operands, per_group.in_axes, strict=True)
        ]
        columns.append(per_group.run(eqn, args))
    for got, want, axis in zip(
        zip(*columns, strict=True), outs, per_group.out_axes, strict=True
    ):
        assert all(x.dtype == want.dtype for x in got)
        if is_key(want.dtype):
            got, want = map(jax.random.key_data, got), jax.random.key_data(want)
        stacked = np.stack([*got], axis)
        assert stacked.shape == want.shape
        np.testing.assert_allclose(stacked, want, rtol=1e-6)


def slice_of(x, i, axis):
    """A slice by numpy, which compiles nothing, but has no keys."""
    if is_key(x.dtype):
        return lax.index_in_dim(x, i, axis, keepdims=False)
    return jnp.asarray(np.take(np.asarray(x), i, axis))


# Of the names that share a rule, the first one is not slow, unless it takes long.
FIRST = {rule: name for name, rule in sorted(UNBATCHING_RULES.items(), reverse=True)}
RULES = [
    name
    if name == FIRST[rule] and name != "random_gamma"
    else pytest.param(name, marks=pytest.mark.slow)
    for name, rule in sorted(UNBATCHING_RULES.items())
]


@pytest.mark.parametrize("name", RULES)
def test_rule(name):
    accepted, refused, seen = 0, 0, False
    for eqn, operands, outs in equations(name):
        seen = True
        choices = [[None, *range(np.ndim(x))] for x in operands]
        for axes in itertools.product(*choices):
            if all(axis is None for axis in axes):
                continue
            per_group = unbatch(eqn, axes)
            if per_group is None:
                refused += 1
                continue
            for axis, used in zip(axes, per_group.in_axes, strict=True):
                assert axis is None or axis == used
            check_slices(eqn, operands, outs, per_group)
            accepted += 1
    assert seen or name in INTERNAL, f"no case reaches {name}"
    if seen:
        assert accepted
        assert refused or name in ANY_AXIS


@pytest.mark.slow
def test_without_partitioned_operands_nothing_is_unbatched():
    for name in UNBATCHING_RULES:
        for eqn, operands, _ in equations(name):
            assert unbatch(eqn, [None] * len(operands)) is None


# Pointwise for vmap, but not work on partitioned values outside of drjax.map_fn.
NOT_WORK = {
    "with_memory_space_constraint", "stage", "tie", "to_edtype", "from_edtype",
    "threefry2x32", "threefry4x32", "philox2x32", "philox4x32",
}  # fmt: skip


def test_no_pointwise_primitive_of_this_jax_is_missing():
    known = batching.fancy_primitive_batchers
    everything = {**vars(jax.extend.core.primitives), **vars(lax)}.values()
    primitives = [p for p in everything if isinstance(p, Primitive)]
    rules = {p.name: getattr(known.get(p), "func", None) for p in primitives}
    pointwise = {
        name
        for name, rule in rules.items()
        if getattr(rule, "__name__", "") in ("vectorized_batcher", "broadcast_batcher")
    }
    assert len(pointwise) > 60
    assert not pointwise - set(UNBATCHING_RULES) - NOT_WORK


def test_groups_do_not_draw_from_one_key():
    """Each would split the whole key for itself, and draw what the others draw."""

    def one(x):
        return jax.random.gamma(jax.random.key(0), drjax.map_fn(jnp.square, x))

    with pytest.raises(drjax.PlanError, match=r"random_gamma .*key<fry>\[\] global"):
        drjax.make_plan(drjax.program(clients=len(A))(one))(A)


@pytest.mark.parametrize("mode", ["read", "update"])
def test_a_batched_slice_along_the_features(mode):
    """JAX's batching writes an index for the group axis, too, which is covered."""

    def one(s, i, x):
        x = drjax.map_fn(lambda a: jnp.sin(a * s), x)
        if mode == "read":
            return drjax.reduce_mean(lax.dynamic_slice_in_dim(x, i, 2, axis=1))
        y = lax.dynamic_update_slice_in_dim(x, jnp.cos(x[:, :1]), i, axis=1)
        return drjax.reduce_mean(y)

    fn = jax.vmap(drjax.program(clients=len(A))(one), (0, 0, None))
    args = np.array([0.5, 1.5]), np.array([0, 1]), A[:, 0]
    np.testing.assert_allclose(drjax.jit(fn)(*args), jax.jit(fn)(*args), 1e-6)


def test_a_random_index_of_each_slice():
    def one(x, key):
        i = jax.random.randint(key, (len(x),), 0, x.shape[1])
        y = drjax.map_fn(jnp.sin, x)[jnp.arange(len(x)), i]
        return drjax.reduce_sum(y) + x[i, i].sum()

    fn, args = drjax.program(clients=len(A))(one), (A[:, 0], jax.random.key(0))
    np.testing.assert_allclose(drjax.jit(fn)(*args), jax.jit(fn)(*args), 1e-6)


@drjax.program(clients=len(A))
def in_a_loop(x):
    def one(x, _):
        own = x[jnp.arange(len(x)), jnp.arange(len(x)) % x.shape[1]]
        return drjax.map_fn(lambda a, b: jnp.sin(a * b), (x, own)), None

    x = drjax.map_fn(jnp.cos, x)
    return drjax.reduce_sum(jax.lax.scan(one, x, length=2)[0]).sum()


def in_two_loops(x):
    step = lambda x, _: (x + jax.grad(in_a_loop)(x), None)
    return jax.lax.scan(step, x, length=2)[0].sum()


@pytest.mark.sampled
@pytest.mark.parametrize("fn", [in_a_loop, in_two_loops])
def test_an_index_that_a_derivative_computes_outside_of_a_loop(fn):
    x = A[:, 0] / 7
    for derivative in (jax.grad(fn), lambda x: jax.jvp(jax.grad(fn), (x,), (x,))[1]):
        result = drjax.jit(derivative, groups_per_step=1)(x)
        np.testing.assert_allclose(result, jax.jit(derivative)(x), 1e-5)
