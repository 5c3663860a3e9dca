"""Transposition: efficient, closed under itself, and made of our primitives only.

Examples 1 to 5 are those of JAX's note 17111 ("Efficient transposition of
replication-inducing collectives"), at the level of groups.

Covers: drjax._primitives.collectives, drjax._primitives.extrema,
drjax._primitives.map_fn, drjax._primitives.partition_index.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.cases import CASES, N, assert_close
from tests.helpers.jaxprs import COMMUNICATION, blocks, live, mixing_equations

X = jnp.arange(float(N * 3)).reshape(N, 3)
Y = jnp.cos(X)
program = drjax.program(clients=N)


def g(x):
    """A linear function of one group's value."""
    return 3.0 * x[::-1]


def transpose(fn, *primals):
    """The transpose of a linear function of one argument."""
    linear = jax.linear_transpose(fn, *primals)
    return lambda ct: linear(ct)[0]


def test_example_1_sum_to_a_global_value():
    f = program(lambda x: drjax.reduce_sum(drjax.map_fn(g, x)))
    ft = transpose(f, X)
    assert blocks(ft, f(X)) == ["broadcast", "map_fn"]
    assert blocks(transpose(ft, f(X)), X) == ["map_fn", "reduce_sum"]


def test_example_2_sum_used_by_every_group():
    @program
    def f(x):
        total = drjax.reduce_sum(drjax.map_fn(g, x))
        return drjax.map_fn(jnp.multiply, (drjax.broadcast(total), Y))

    ft = transpose(f, X)
    want = ["map_fn", "reduce_sum", "broadcast", "map_fn"]
    assert blocks(f, X) == blocks(ft, X) == blocks(transpose(ft, X), X) == want


def test_example_3_identity_does_not_grow():
    f = program(lambda x: drjax.reduce_mean(drjax.broadcast(x)))
    x = X[0]
    for _ in range(4):
        assert sorted(set(blocks(f, x))) in (
            ["broadcast", "reduce_mean"],
            ["broadcast", "reduce_sum"],
        )
        assert len(live(jax.make_jaxpr(f)(x))) <= 3
        assert_close(f(x), x, 1e-6)
        f = transpose(f, x)


def test_example_4_gather_transposes_to_scatter():
    f = program(drjax.gather)
    ft = transpose(f, X)
    assert blocks(f, X) == ["gather"]
    assert blocks(ft, X) == ["scatter"]
    assert blocks(transpose(ft, X), X) == ["gather"]
    assert_close(ft(Y), Y)


def test_example_5_gather_used_by_every_group():
    @program
    def f(x):
        slices = drjax.broadcast(drjax.gather(x))
        return drjax.map_fn(lambda slices, y: jnp.sum(slices) * y, (slices, Y))

    ft = transpose(f, X)
    assert blocks(ft, X) == ["map_fn", "reduce_sum", "scatter"]
    assert blocks(transpose(ft, X), X) == blocks(f, X)
    assert_close(ft(Y), np.full_like(X, np.sum(Y * Y)), 1e-6)


def _printed(fn, x):
    """The program's live equations as text, as its jaxpr prints them."""
    return str(jax.make_jaxpr(fn)(x))


@pytest.mark.parametrize(
    "linear",
    [
        lambda x: drjax.reduce_sum(drjax.map_fn(g, x)),
        lambda x: drjax.map_fn(g, drjax.broadcast(x)),
        lambda x: drjax.gather(drjax.map_fn(g, x)),
        lambda x: drjax.reduce_sum(drjax.map_fn(g, drjax.broadcast(x))),
        lambda x: drjax.map_fn(g, drjax.scatter(x)),
    ],
)
def test_transposing_twice_gives_the_program_back(linear):
    f = program(linear)
    ft = transpose(f, X)
    ftt = transpose(ft, f(X))
    fttt = transpose(ftt, X)
    assert blocks(ftt, X) == blocks(f, X)
    assert _printed(transpose(fttt, f(X)), X) == _printed(ftt, X)
    assert _printed(fttt, f(X)) == _printed(ft, f(X))


@pytest.mark.parametrize(
    "linear",
    [
        lambda x: drjax.reduce_sum(drjax.map_fn(g, drjax.broadcast(x))),
        lambda x: drjax.gather(drjax.map_fn(g, drjax.scatter(x))),
        # Known without any operand: computed in the map, not stored for each group.
        lambda x: drjax.reduce_sum(
            drjax.map_fn(lambda x: x * drjax.partition_index(), drjax.broadcast(x))
        ),
        lambda x: drjax.reduce_sum(
            drjax.map_fn(lambda x: x * jnp.arange(3.0)[::-1].sum(), drjax.broadcast(x))
        ),
    ],
)
def test_transposing_inside_a_trace_adds_nothing(linear):
    f = program(linear)
    texts = [_printed(f, X)]
    for _ in range(4):
        f = lambda ct, f=f: jax.linear_transpose(f, X)(ct)[0]
        texts.append(_printed(f, X))
    assert texts[0] == texts[2] == texts[4] and texts[1] == texts[3]
    assert texts[1].count("drjax_map_fn") == 1


def _tangents(args):
    return tuple(map(jnp.ones_like, args))


def _jvp(fn):
    return lambda *args: jax.jvp(fn, args, _tangents(args))


def _vjp(fn):
    def pulled_back(*args):
        y, back = jax.vjp(fn, *args)
        return back(jnp.cos(y))

    return pulled_back


DERIVATIVES = {
    "value": lambda fn: fn,
    "jvp": _jvp,
    "vjp": _vjp,
    "jvp of vjp": lambda fn: _jvp(_vjp(fn)),
    "vjp of jvp": lambda fn: _vjp(lambda *args: _jvp(fn)(*args)[1]),
}


@pytest.mark.sampled
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_derivatives_mix_groups_by_our_primitives_only(case, derivative):
    args = tuple(jnp.asarray(np.float32(a)) for a in case.args)
    jaxpr = jax.make_jaxpr(DERIVATIVES[derivative](case.fn))(*args)
    names = inspect.signature(case.fn).parameters
    partitioned = [name in ("xs", "weights") for name in names]
    result = mixing_equations(jaxpr, partitioned)
    assert not result, "\n".join(map(str, result))


def test_paper_maml_gradient_has_no_other_communication():
    (case,) = [c for c in CASES if c.name == "maml"]
    args = tuple(map(jnp.asarray, case.args))
    assert blocks(case.fn, *args) == ["broadcast", "broadcast", "map_fn", "reduce_mean"]
    names = blocks(jax.grad(case.fn, (0, 1)), *args)
    kept = [name for name in names if name in COMMUNICATION]
    assert kept == ["broadcast"] * 3 + ["reduce_sum"] * 2
