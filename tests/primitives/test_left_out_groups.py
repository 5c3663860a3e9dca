"""Groups that a reduction leaves out, and whose work diverged: values and derivatives.

Covers: drjax._primitives.map_fn, drjax._context.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from drjax.backends import Groups, in_process
from tests.helpers.cases import MODES, checkerboard
from tests.helpers.meshes import AUTO, in_mesh, make_mesh

N = 5
TARGET = np.array([1.0, -1.0, 2.0, -3.0, 0.25], np.float32)  # two below the root
KEPT = TARGET > -0.5
near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def work(rate, target):
    return jnp.sqrt(1 + 2 * rate * target)


def mean(rate, target):
    y = drjax.map_fn(work, (drjax.broadcast(rate), target))
    return drjax.reduce_mean(y, where=jnp.isfinite(y))


def weighted(rate, target):
    y = drjax.map_fn(work, (drjax.broadcast(rate), target))
    amounts = drjax.map_fn(lambda t: 1 + t**2, target)
    return drjax.reduce_weighted_mean(y, amounts, where=jnp.isfinite(y))


def folded(rate, target):
    y = drjax.map_fn(work, (drjax.broadcast(rate), target))
    return drjax.reduce(jnp.logaddexp, y, -jnp.inf, where=jnp.isfinite(y))


def segments(rate, target):
    y = drjax.map_fn(work, (drjax.broadcast(rate), target))
    by = jnp.where(jnp.isfinite(y), drjax.partition_index() % 2, -1)
    return drjax.reduce_sum(y, by=by, num=2) @ jnp.array([1.0, 2.0])


def largest(rate, target):
    y = drjax.map_fn(work, (drjax.broadcast(rate), target))
    return drjax.reduce_max(y, where=jnp.isfinite(y))


def chained(rate, target):
    """Two maps, closed-over values, a helper under jit, and two rounds in a loop."""

    @jax.jit
    def step(rate, _):
        inner = drjax.map_fn(lambda t: 1 + 2 * rate * t, target)
        y = drjax.map_fn(lambda s: jnp.log(s) / jnp.sqrt(s), inner)
        new = drjax.reduce_mean(y, where=drjax.map_fn(lambda y: ~jnp.isnan(y), y))
        return jnp.tanh(new) / 4, new

    return jax.lax.scan(step, rate, None, length=2)[0]


PROGRAMS = {
    "mean": mean,
    "weighted": weighted,
    "folded": folded,
    "segments": segments,
    "largest": largest,
    "chained": chained,
    "checkpoint": lambda rate, target: jax.checkpoint(mean)(rate, target),
}
# Positions decide segments: what is left out stays, as a copy of a group that is kept.
DIRECT = {
    "mean": lambda r, t: jnp.mean(work(r, t[KEPT])),
    "weighted": lambda r, t: jnp.average(work(r, t[KEPT]), weights=1 + t[KEPT] ** 2),
    "folded": lambda r, t: jax.nn.logsumexp(work(r, t[KEPT])),
    "segments": lambda r, t: work(r, t[0]) + work(r, t[2]) + work(r, t[4]),
    "largest": lambda r, t: jnp.max(work(r, t[KEPT])),
}


def direct_chain(rate, target):
    for _ in range(2):
        s = 1 + 2 * rate * target[KEPT]
        rate = jnp.tanh(jnp.mean(jnp.log(s) / jnp.sqrt(s))) / 4
    return rate


DIRECT |= {"chained": direct_chain, "checkpoint": DIRECT["mean"]}


# In the second round of the chain other groups would be kept: its rate is small.
@checkerboard(5, name=PROGRAMS, mode=MODES)
def test_the_gradient_is_that_of_the_others(name, mode):
    rate, target = jnp.float32(0.9), jnp.asarray(TARGET)
    if name == "chained":
        rate, target = jnp.float32(0.6), jnp.where(KEPT, target, -9.0)
    f = drjax.program(clients=N)(PROGRAMS[name])
    run = MODES[mode]
    if name == "chained":
        # -9 times the second rate is below the root, too.
        assert direct_chain(rate, target) > 0.02
    want = jax.value_and_grad(DIRECT[name], (0, 1))(rate, target)
    value, (of_rate, of_target) = run(jax.value_and_grad(f, (0, 1)))(rate, target)
    near(value, want[0])
    near(of_rate, want[1][0])
    near(of_target, want[1][1])
    assert not np.asarray(of_target)[~KEPT].any()


@checkerboard(6, devices=[1, 2, 3], name=["mean", "folded", "weighted", "segments"])
def test_on_devices(devices, name):
    rate, target = jnp.float32(0.9), jnp.asarray(TARGET)
    f = drjax.program(clients=N)(PROGRAMS[name])
    want = jax.grad(DIRECT[name])(rate, target)
    with in_mesh(make_mesh({"clients": devices}, AUTO)):
        for run in (jax.jit, drjax.jit, lambda f: drjax.jit(f, groups_per_step=1)):
            near(run(jax.grad(f))(rate, target), want)


@checkerboard(3, name=["mean", "weighted", "folded"])
def test_higher_and_forward_derivatives(name):
    rate, target = jnp.float32(0.9), jnp.asarray(TARGET)
    f, direct = drjax.program(clients=N)(PROGRAMS[name]), DIRECT[name]
    near(jax.jvp(lambda r: f(r, target), (rate,), (rate,))[1],
         jax.jvp(lambda r: direct(r, target), (rate,), (rate,))[1])  # fmt: skip
    rev, fwd = jax.jacrev, jax.jacfwd
    for outer, inner in ((rev, rev), (rev, fwd), (fwd, rev), (fwd, fwd)):
        second = lambda f, o=outer, i=inner: jax.jit(o(i(f)))(rate, target)
        near(second(f), second(direct), rtol=1e-4)
    third = lambda f: jax.jit(rev(fwd(rev(f))))(rate, target)
    near(third(f), third(direct), rtol=1e-3)


def test_an_engine_drops_it_from_the_gradient():
    rate, target = jnp.float32(0.9), jnp.asarray(TARGET)
    f = drjax.program(clients=N)(mean)
    run = in_process.compile(drjax.make_plan(jax.grad(f))(rate, target))
    near(
        run(np.float32(0.9), Groups(list(TARGET))),
        jax.grad(DIRECT["mean"])(rate, target),
    )


def test_zero_weights_are_values_like_others():
    """The derivative by a weight at zero is not zero: no mask is made of zeros."""
    target = jnp.asarray(TARGET)

    @drjax.program(clients=N)
    def slope(weights):
        def loss(rate):
            y = drjax.map_fn(
                lambda r, t, w: w * jnp.sin(r * t),
                (drjax.broadcast(rate), target, weights),
            )
            return drjax.reduce_sum(y, where=weights > -1)

        return jax.grad(loss)(1.0)

    want = target * jnp.cos(target)
    near(jax.jacrev(slope)(jnp.zeros(N)), want)
    near(jax.jacfwd(slope)(jnp.zeros(N)), want)


def test_programs_without_a_mask_pay_nothing():
    """The jaxpr of a gradient asks no group whether it diverged, unless one may."""

    def total(rate, target):
        return drjax.reduce_sum(drjax.map_fn(work, (drjax.broadcast(rate), target)))

    @jax.jit
    def shared(rate, target):
        return drjax.map_fn(work, (drjax.broadcast(rate), target))

    plain = drjax.program(clients=N)(lambda r, t: drjax.reduce_sum(shared(r, t)))
    text = lambda f: str(jax.make_jaxpr(jax.grad(f))(0.9, TARGET))
    assert "is_finite" not in text(drjax.program(clients=N)(total))
    assert "is_finite" not in text(plain)
    masked = drjax.program(clients=N)(
        lambda r, t: drjax.reduce_mean(shared(r, t), where=t > 0)
    )
    assert "is_finite" in text(masked)
    assert "is_finite" not in text(plain)
    near(
        jax.grad(masked)(0.9, TARGET),
        jax.grad(lambda r: jnp.mean(work(r, TARGET[TARGET > 0])))(0.9),
    )
