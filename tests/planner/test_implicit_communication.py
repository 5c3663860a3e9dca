"""What equations outside mapped functions mean for groups: sums and single slices.

Covers: drjax._planner.implicit_communication, drjax._planner.explicit_communication.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax import _compat
from drjax._planner.make_plan import plan_of_jaxpr
from drjax._sharding.planning_context import planning
from drjax.backends import reference
from tests.helpers.cases import CASES, checkerboard

N = 4
program = drjax.program(clients=N)
X = jnp.arange(12.0).reshape(N, 3) / 7
NO_NAMES = jax.make_jaxpr(jnp.sin)(0.0).eqns[0].source_info.name_stack


@program
def scalar(g, x):
    return drjax.reduce_sum(drjax.map_fn(jnp.sin, x) * jnp.sum(g)).sum()


@program
def vector(g, x):
    return drjax.reduce_sum(drjax.map_fn(jnp.sin, x) * g[None]).sum()


@program
def spread(g, x):
    slices = jnp.broadcast_to(g, (N, 3)) ** 2
    return drjax.reduce_mean(drjax.map_fn(jnp.sin, x) + slices * x).sum()


def rounds(g, x):
    step = lambda c, _: (0.1 * scalar(c * g, x), None)
    return jax.lax.scan(step, 1.0, None, length=3)[0]


@program
def first_and_last(g, x):
    y = drjax.map_fn(jnp.sin, x)
    return (y[0] * g + y[-1]).sum()


@program
def slice_of_a_number(g, x):
    y = drjax.map_fn(jnp.sin, x)
    return (y[jnp.argmax(g)] * g).sum()


@program
def small_dimensions(g, x):
    """Dimensions of size one, which lax broadcasts without an equation."""
    y = drjax.map_fn(jnp.sin, x)
    y = y + jnp.arange(3.0)[None] * 0.1 - y[:, :1]
    return drjax.reduce_sum(jax.lax.mul(y, g[None])).sum()


def square(g):
    return jnp.outer(jnp.sin(g), jnp.cos(g))


@program
def product(g, x):
    """Its derivative in the matrix adds up products over the groups."""
    return drjax.reduce_sum(jnp.tanh(drjax.map_fn(jnp.sin, x) @ square(g))).sum()


@program
def product_of_an_argument(g, x):
    return drjax.reduce_mean(jnp.tanh(x @ square(g)) + (square(g) @ x.T).T).sum()


@program
def product_in_calls(g, x):
    """Names of derivatives are those of the calls."""

    @jax.checkpoint
    @jax.jit
    def layer(y, m):
        return jnp.tanh(jnp.einsum("ni,ij,nj->nj", y, m, y) @ m)

    def step(y, _):
        return layer(y, square(g)), None

    y = jax.lax.scan(step, drjax.map_fn(jnp.sin, x), None, length=2)[0]
    return drjax.reduce_mean(y).sum()


FUNCTIONS = [
    product,
    product_of_an_argument,
    product_in_calls,
    small_dimensions,
    scalar,
    vector,
    spread,
    rounds,
    first_and_last,
    slice_of_a_number,
]
TRANSFORMS = {
    "grad": lambda f: jax.grad(f, (0, 1)),
    "hessian": jax.hessian,
    "value_and_grad": jax.value_and_grad,
}


@pytest.mark.parametrize(
    "name",
    [
        "grad",
        pytest.param("hessian", marks=pytest.mark.slow),
        pytest.param("value_and_grad", marks=pytest.mark.slow),
    ],
)
@checkerboard(3, fn=FUNCTIONS)
def test_they_are_reductions(fn, name):
    fn = TRANSFORMS[name](fn)
    args = jnp.arange(3.0), X
    expected = jax.jit(fn)(*args)
    plan = drjax.make_plan(fn)(*args)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    jax.tree.map(close, reference.compile(plan)(*args), expected)
    jax.tree.map(close, drjax.jit(fn, groups_per_step=1)(*args), expected)


def test_a_product_is_added_up_by_one_reduction():
    plan = drjax.make_plan(jax.grad(product))(jnp.arange(3.0), X)
    (only,) = plan.rounds
    assert [r.source.shape for r in only.reduces] == [(3, 3)]
    planned = drjax.jit(jax.vmap(jax.grad(product), (0, None)))
    g = jnp.ones((2, 3))
    want = jax.vmap(jax.grad(product), (0, None))(g, X)
    np.testing.assert_allclose(planned(g, X), want, rtol=1e-5)


def test_only_the_sum_over_the_other_axes_travels():
    plan = drjax.make_plan(jax.grad(scalar))(jnp.arange(3.0), X)
    (only,) = plan.rounds
    assert [r.source.shape for r in only.reduces] == [()]


# Reductions over the group axis, as users write them, of partitioned values [n, 3].
WRITTEN = {
    "sum": lambda y: jnp.sum(y, 0),
    "sum of everything": jnp.sum,
    "mean": lambda y: y.mean(),
    "variance": lambda y: jnp.var(y, axis=0),
    "norm": lambda y: jnp.linalg.norm(y),
    "einsum": lambda y: jnp.einsum("ij->j", y),
    "lax": lambda y: jax.lax.reduce_sum(y, (0, 1)),
    "product": lambda y: y.T @ y,
    "product with an array": lambda y: y.T @ jnp.arange(8.0).reshape(N, 2),
    "norms of columns": lambda y: jnp.einsum("ij,ij->i", y.T, y.T),
    "product in a checkpoint": lambda y: jax.checkpoint(lambda y: y.T @ y)(y),
    "maximum": lambda y: y.max(axis=0),
    "minimum of everything": jnp.min,
    "logsumexp": lambda y: jax.nn.logsumexp(y, axis=0),
    "standardized": lambda y: drjax.reduce_max(jax.nn.standardize(y, axis=0) * y),
    "softmax": lambda y: drjax.reduce_mean(jax.nn.softmax(y, axis=0) * y),
}


@pytest.mark.sampled
@checkerboard(7, name=WRITTEN)
def test_reductions_that_users_write(name):
    fn = program(lambda x: jnp.sum(WRITTEN[name](drjax.map_fn(jnp.sin, x)) ** 2))
    want = jax.jit(jax.value_and_grad(fn))(X)
    plan = drjax.make_plan(jax.value_and_grad(fn))(X)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    jax.tree.map(close, reference.compile(plan)(X), want)
    planned = drjax.jit(fn, groups_per_step=1)
    jax.tree.map(close, jax.jit(jax.value_and_grad(planned))(X), want)


OF_NUMBERS = {
    "any": (lambda y: jnp.any(y > 4, axis=0), "max"),
    "all": (lambda y: jnp.all(y > 4), "min"),
    "small integers": (lambda y: jax.lax.reduce_sum(y.astype(jnp.int8), (0,)), "sum"),
    "count": (lambda y: jnp.sum(y > 4, axis=0), "sum"),
    "smallest integer": (lambda y: y.min(axis=0), "min"),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_reductions_of_integers_and_bools(name):
    """They keep the dtype that the user's equation gives."""
    written, op = OF_NUMBERS[name]
    fn = program(lambda x: written(drjax.map_fn(lambda y: y * 2 - 3, x)))
    x = jnp.arange(12).reshape(N, 3) % 5
    plan = drjax.make_plan(fn)(x)
    want = jax.jit(fn)(x)
    for got in (reference.compile(plan)(x), drjax.jit(fn)(x)):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert [r.op for r in plan.rounds[0].reduces] == [op]


def test_written_and_named_reductions_give_the_same_plan():
    written = program(lambda x: jnp.sum(drjax.map_fn(jnp.sin, x), axis=0))
    named = program(lambda x: drjax.reduce_sum(drjax.map_fn(jnp.sin, x)))
    assert str(drjax.make_plan(written)(X)) == str(drjax.make_plan(named)(X))


def test_sums_of_arguments():
    """Global, as by default a sum needs all of it, or partitioned by argument."""
    fn = program(lambda x: jnp.sum(x, axis=0) * drjax.reduce_mean(x[:, :1]))
    for partitioned, ops in ((None, ["mean"]), (True, ["sum", "mean"])):
        plan = drjax.make_plan(fn, partitioned=partitioned)(X)
        assert plan.inputs[0].partitioned == bool(partitioned)
        assert [r.op for r in plan.rounds[0].reduces] == ops
        got = reference.compile(plan)(X)
        np.testing.assert_allclose(got, jax.jit(fn)(X), rtol=1e-6)


@pytest.mark.parametrize("written", [jnp.prod, lambda y: jnp.max(y + 1j)])
def test_other_reductions_are_refused(written):
    fn = program(lambda x: written(drjax.map_fn(jnp.sin, x)))
    with pytest.raises(drjax.PlanError, match="may mix the slices"):
        drjax.make_plan(fn)(X)


# -------------------------------------------------------------------------------------
# What a program means does not depend on debug data


def stripped(closed, known=None):
    """A closed jaxpr whose equations, at any depth, know no source."""
    known = {} if known is None else known
    if id(closed) in known:  # what is shared stays so
        return known[id(closed)]
    is_jaxpr = lambda x: isinstance(x, _compat.JAXPR_TYPES)
    raw = _compat.open_jaxpr(closed)
    eqns = []
    for eqn in raw.eqns:
        strip = lambda x: stripped(x, known) if is_jaxpr(x) else x
        params = jax.tree.map(strip, eqn.params, is_leaf=is_jaxpr)
        info = eqn.source_info.replace(traceback=None, name_stack=NO_NAMES)
        eqns.append(eqn.replace(params=params, source_info=info))
    new = raw.replace(eqns=eqns, debug_info=raw.debug_info.with_unknown_names())
    known[id(closed)] = new if raw is closed else closed.replace(jaxpr=new)
    return known[id(closed)]


def _plan_or_refusal(closed) -> str:
    """The plan of a jaxpr, its stages included, or its refusal without the line."""
    names = [f"x{i}" for i in range(len(closed.in_avals))]
    try:
        with planning(False):
            plan = plan_of_jaxpr(closed, "f", names, [None] * len(names))
    except drjax.PlanError as error:
        return re.sub(r" at (an unknown line|\S+ \(\S*\))", "", str(error))
    stages = [str(stage.jaxpr) for _, stage in plan.stages()]
    return "\n".join([str(plan), *stages])


def _refused(m, xs):
    return drjax.reduce_sum(jnp.sort(drjax.map_fn(jnp.sin, xs), axis=0)) * m


OTHERS = [
    ("product", lambda x: product(x[0], x), (X,)),
    ("refused", drjax.program(clients=N)(_refused), (jnp.ones(3), X)),
    ("written", program(lambda x: jnp.mean(drjax.map_fn(jnp.sin, x))), (X,)),
]


def _of_all(fn, args):
    """A scalar function of all results, and its arguments' positions."""
    leaves = lambda *xs: jax.tree.leaves(fn(*xs))
    return lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in leaves(*xs)), (
        *range(len(args)),
    )


def _grad(fn, args):
    return jax.grad(*_of_all(fn, args))


DERIVATIVES = {
    "value": lambda fn, args: fn,
    "jvp": lambda fn, args: lambda *xs: jax.jvp(fn, xs, tuple(map(jnp.cos, xs))),
    "grad": _grad,
    "grad_of_grad": lambda fn, args: _grad(_grad(fn, args), args),
    "jvp_of_grad": lambda fn, args: lambda *xs: jax.jvp(_grad(fn, args), xs, xs),
    "vmapped_grad": lambda fn, args: jax.vmap(
        _grad(fn, args), (0, *[None] * (len(args) - 1))
    ),
}


PROGRAMS = {c.name: (c.fn, c.args) for c in CASES} | {
    name: (fn, args) for name, fn, args in OTHERS
}


@pytest.mark.sampled
@checkerboard(5, name=PROGRAMS, derivative=DERIVATIVES)
def test_plans_do_not_depend_on_debug_data(name, derivative):
    fn, args = PROGRAMS[name]
    derived, args = DERIVATIVES[derivative](fn, args), [*map(jnp.asarray, args)]
    if derivative == "vmapped_grad":
        args[0] = jnp.stack([args[0], args[0]])
    with planning(False):
        closed = jax.make_jaxpr(derived)(*args)
    text = _plan_or_refusal(stripped(closed))
    assert text == _plan_or_refusal(closed)
    assert ("may mix the slices" in text) == (fn is OTHERS[1][1])
