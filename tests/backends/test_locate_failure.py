"""Errors of the reference backend name the user's line.

Covers: drjax.backends._locate_failure, drjax.backends.reference.
"""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax.backends.reference import GroupError

N = 4


def direct(a):
    safe = jnp.where(a < 100, a, jnp.log(-a))
    return jnp.sin(safe) + jnp.sqrt(a - 2)  # here


def in_a_call(a):
    return jax.jit(lambda b: jnp.sqrt(b - 2))(a) * 2  # here


def in_a_scan(a):
    def step(c, x):
        shifted = c - x
        return c - 1, jnp.sqrt(shifted)  # here

    return lax.scan(step, a, jnp.arange(3.0), reverse=True)[1].sum()


def in_a_while(a):
    def step(carry):
        i, c = carry
        return i + 1, jnp.log(c - i)  # here

    return lax.while_loop(lambda carry: carry[0] < 3, step, (0, a + 1))[1]


YES: Any = True  # a literal of the jaxpr


def after_loops_with_flags(a):
    start = a, jnp.asarray(False)
    _, done = lax.while_loop(lambda c: ~c[1], lambda c: (c[0], YES), start)
    _, flags = lax.scan(lambda c, _: (c, YES), a, length=2)
    return jnp.sqrt(a - 2) + done + jnp.any(flags)  # here


def in_a_branch(a):
    return lax.cond(a > 0, jnp.cos, lambda b: b / jnp.abs(b), a)  # here


def of_a_program(a):
    inner = drjax.program(samples=2)(lambda x: drjax.reduce_sum(drjax.broadcast(x)))
    return inner(a) * jnp.arcsin(a)  # here


def line_of(fn) -> str:
    lines, first = inspect.getsourcelines(fn)
    position = next(i for i, line in enumerate(lines) if line.endswith("# here\n"))
    return f"{__file__}:{first + position}"


def fails(fn, x, **options) -> GroupError:
    program = drjax.program(clients=N)(lambda x: drjax.reduce_sum(drjax.map_fn(fn, x)))
    run = drjax.backends.reference.compile(drjax.make_plan(program)(x), **options)
    with pytest.raises(GroupError) as caught:
        run(x)
    return caught.value


@pytest.mark.parametrize(
    "fn",
    [
        direct, in_a_call, in_a_scan, in_a_while, after_loops_with_flags, in_a_branch,
        of_a_program,
    ],
)  # fmt: skip
def test_the_line_that_makes_a_nan(fn):
    x = jnp.arange(float(N)) * (2 if fn is of_a_program else 1)
    error = fails(fn, x, check_nans=True)
    text = rf"yields NaN as the value .* in the stage .*made by \w+ at {line_of(fn)} "
    assert re.search(text, str(error))


def test_an_input_that_has_a_nan_already():
    error = fails(jnp.sin, jnp.array([0, 1, np.nan, 3]), check_nans=True)
    assert error.group == 2
    assert str(error).endswith("there is one in its input x.")


@pytest.mark.parametrize("reverse", [False, True])
def test_the_step_of_a_loop_of_rounds(reverse):
    @drjax.program(clients=N)
    def rounds(x):
        def step(total, t):
            own = drjax.map_fn(lambda a, t: jnp.sqrt(a - t), (x, drjax.broadcast(t)))
            return total + drjax.reduce_sum(own), None

        return lax.scan(step, 0.0, jnp.arange(5.0), reverse=reverse)[0]

    x = jnp.full(N, 9.0).at[2].set(2.0)
    run = drjax.backends.reference.compile(drjax.make_plan(rounds)(x), check_nans=True)
    with pytest.raises(GroupError, match="^Group 2 yields NaN") as error:
        run(x)
    expected = 4 if reverse else 3
    assert str(error.value).endswith(f". This was step {expected} of scan, from 0.")


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_constant_that_has_a_nan_already(wrap):
    constant = np.array([1, np.nan], np.float32)
    error = fails(wrap(lambda a: a * constant), jnp.ones((N, 2)), check_nans=True)
    assert re.search("in (its input|a) constant", str(error))


def test_a_constant_of_a_loop_that_is_a_nan():
    step = lambda carry, _: (carry, jnp.float32(np.nan))
    work = lambda a: jax.lax.scan(step, a, length=3)[1]
    error = fails(work, jnp.ones(N), check_nans=True)
    assert "there is one in a constant" in str(error)


@pytest.mark.parametrize("wrap", ["none", "scan", "while", "cond"])
def test_the_line_that_raises(wrap):
    def check(a):
        assert a < 3, "three is too much"
        return np.asarray(a, np.float32)

    def call(a):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(check, shape, a, vmap_method="sequential")  # here

    def work(a):
        if wrap == "scan":
            return lax.scan(lambda c, x: (call(c + x), None), a, jnp.ones(2))[0]
        if wrap == "while":
            return lax.while_loop(lambda c: c < 4, lambda c: call(c) + 1, a + 1)
        if wrap == "cond":
            return lax.cond(a < 5, call, jnp.sin, a)
        return call(a)

    error = fails(work, jnp.arange(float(N)))
    assert error.group == {"none": 3, "scan": 1, "while": 0, "cond": 3}[wrap]
    assert f"at {line_of(call)} (" in str(error) and "three is too much" in str(error)


def of_the_server(x):
    total = drjax.reduce_sum(x)
    return total - total  # here


@pytest.mark.parametrize(
    "fn, x, text",
    [
        (of_the_server, [1, np.inf], "The server yields NaN .* made by sub at LINE "),
        (
            drjax.reduce_mean,
            [np.inf, -np.inf],
            "reduction of x_2 .* yields NaN in round",
        ),
    ],
)
def test_a_nan_of_infinities(fn, x, text):
    x = jnp.array(x, jnp.float32)
    program = drjax.program(clients=2)(fn)
    run = drjax.backends.reference.compile(drjax.make_plan(program)(x), check_nans=True)
    text = text.replace("LINE", line_of(of_the_server))
    with pytest.raises(GroupError, match=text) as error:
        run(x)
    assert error.value.group is None
