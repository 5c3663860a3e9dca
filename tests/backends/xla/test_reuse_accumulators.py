"""Rounds whose results reuse the accumulators of chunks: `reuse_accumulators.py`.

That their numbers are right, `test_values_of_plans.py` and the random programs see too.

Covers: drjax.backends.xla.reuse_accumulators, drjax.backends.xla.chunked_stage.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends.xla import reuse_accumulators
from tests.helpers.meshes import in_mesh_of

N = 8


@pytest.fixture(autouse=True)
def even_small_ones(monkeypatch):
    monkeypatch.setattr(reuse_accumulators, "LARGE", 1)


@drjax.program(clients=N)
def updates(x, slices):
    def one(x, slice_):
        return x * jnp.sin(slice_), jnp.max(x * slice_)

    means = drjax.map_fn(one, (drjax.broadcast(x), slices))
    return drjax.reduce_mean(means[0]), drjax.reduce_max(means[1])


def momentum(x, speed, slices):
    """A server with a state of its own: one result has no sum whose memory it takes."""
    mean, highest = updates(x, slices)
    speed = 0.9 * speed + mean
    return x - 0.1 * speed, speed, highest


def clipped(x, speed, slices):
    """A server that needs the whole mean before it can use any of it."""
    mean, highest = updates(x, slices)
    return x - mean / jnp.maximum(1, jnp.linalg.norm(mean)), highest


def two_rounds(x, speed, slices):
    """What the second round receives is made at the end of the first."""
    first, _ = updates(x, slices)
    second, highest = updates(x - first, slices)
    return first * second, highest


def in_a_loop(x, speed, slices):
    def one(carry, _):
        x, speed = carry
        x, speed, highest = momentum(x, speed, slices)
        return (x, speed), highest

    return jax.lax.scan(one, (x, speed), length=3)


def of_keys(x, speed, slices):
    """Random keys are created at the end, and reuse no accumulator."""
    mean, highest = updates(x, slices)
    key = jax.random.key(jnp.int32(100 * highest))
    return mean, jax.random.split(key, 2)


def with_effects(x, speed, slices):
    mean, highest = updates(x, slices)
    jax.debug.callback(lambda _: None, highest)
    return mean, highest


def reused(fn, *args) -> list[int]:
    """Bytes of reused buffers, for each round that reuses accumulators."""
    plan = drjax.make_plan(fn)(*args)
    result = (reuse_accumulators.find_reuse(plan, i) for i, _ in enumerate(plan.rounds))
    return [end.reused_bytes for end in result if end is not None]


X, SLICES = np.linspace(0, 1, 12, dtype=np.float32), np.linspace(0, 2, N)
ARGS = X.reshape(3, 4), np.ones((3, 4), np.float32), np.float32(SLICES)
ONE = 4 * 12 + 4  # bytes of both means


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", [None, {"clients": 4}, {"clients": 3}])
@pytest.mark.parametrize(
    "fn, result",
    [
        (momentum, [ONE]),
        (clipped, [ONE]),
        (two_rounds, [ONE - 4, ONE]),
        (in_a_loop, []),  # the loop's body is a plan of its own
        (of_keys, []),
        (with_effects, []),
    ],
)
def test_the_same_numbers(fn, result, mesh):
    args = [jnp.asarray(x) for x in ARGS]
    want = jax.jit(fn)(*args)
    with in_mesh_of(mesh):
        got = drjax.jit(fn, groups_per_step=1)(*args)
        assert reused(fn, *args) == result

    def same(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        np.testing.assert_allclose(a, b, 1e-5)

    jax.tree.map(same, got, want)


@pytest.mark.parametrize("fn", [momentum, in_a_loop])
def test_one_all_reduce_still(fn):
    with in_mesh_of({"clients": 4}):
        report = drjax.collectives(drjax.jit(fn, groups_per_step=1))(*ARGS)
        once = drjax.collectives(drjax.jit(fn))(*ARGS)
    # The maximum has one too.
    assert report.counts == once.counts


def test_sums_of_another_dtype_have_no_place():
    """Sums of bfloat16 are in float32, twice as large as the result."""
    half = [x.astype(jnp.bfloat16) for x in ARGS]

    def mean(x, speed, slices):
        return updates(x, slices)[0]

    assert reused(mean, *half) == []
    assert reused(mean, *ARGS) == [ONE - 4]


def test_donated_arguments():
    args = [jnp.asarray(x) for x in ARGS]
    want = jax.jit(momentum)(*args)
    planned = drjax.jit(momentum, groups_per_step=1, donate_argnums=(0, 1))
    got = planned(*map(jnp.copy, args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), got, want)


def test_small_ones_are_left_to_the_compiler(monkeypatch):
    monkeypatch.setattr(reuse_accumulators, "LARGE", ONE)
    assert reused(momentum, *ARGS) == [ONE]
    monkeypatch.setattr(reuse_accumulators, "LARGE", ONE + 1)
    assert reused(momentum, *ARGS) == []


def test_one_chosen_group_needs_no_loop():
    """Without a loop over groups there are no running sums."""
    w, x = jnp.eye(64), jnp.ones((N, 64, 64))

    @drjax.program(clients=N)
    def one(w, x):
        work = lambda w, x: jnp.tanh(x @ w) @ w
        slices = drjax.map_fn(work, (drjax.broadcast(w), x))
        return jnp.sin(drjax.select(slices, jnp.int32(3)))

    run = drjax.jit(one, groups_per_step=1)
    assert "stablehlo.while" not in run.lower(w, x).as_text()
    np.testing.assert_allclose(run(w, x), one(w, x), rtol=1e-6)
