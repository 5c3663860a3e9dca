"""Inner levels run in chunks of their groups, and on mesh axes of their own.

Covers: drjax.backends.xla.inner_programs, drjax.backends.xla.merge_levels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import temp_bytes
from tests.helpers.levels import PROGRAMS
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, in_mesh_of, make_mesh

MODEL = jnp.linspace(0.0, 1.0, 64)
LEVELS: Any = drjax.program(pods=4, groups=8)(lambda x: x)
RNG = np.random.RandomState(0)


@drjax.program(pods=4, groups=8)
def two_means(model, data):
    """Of the logarithms of the means of losses; its gradient has one round more."""
    one = lambda m, x: jnp.mean(jnp.sin(m * x) ** 2)
    losses = drjax.map_fn(one, (drjax.broadcast(model), data))
    of_pods = drjax.reduce_mean(losses, over="groups")
    return drjax.reduce_mean(drjax.map_fn(jnp.log, of_pods, over="pods"), over="pods")


def make(pods: int, groups: int):
    """A loss of a model and data, in two rounds of each pod, and its arguments."""

    @drjax.program(pods=pods, groups=groups)
    def loss(model, data):
        def one(model, x):
            return jnp.sum(jnp.cumsum(jnp.sin(jnp.outer(x, model)), 0) ** 2) / 64

        def in_pod(losses, x):
            mean = drjax.reduce_mean(losses)
            apart = lambda a, x: (a - mean) ** 2 + 0 * x.sum()
            spread = drjax.map_fn(apart, (losses, x))
            return drjax.reduce_max(losses) + drjax.reduce_mean(spread)

        losses = drjax.map_fn(one, (drjax.broadcast(model), data))
        of_pods = drjax.map_fn(in_pod, (losses, data), over="pods")
        return drjax.reduce_mean(of_pods, over="pods")

    return loss, jnp.asarray(RNG.randn(pods, groups, 64), jnp.float32)


BOTH = {"pods": 2, "groups": 4}


@pytest.mark.sampled
@checkerboard(4, shape=[None, {"pods": 2}, {"groups": 4}, BOTH], step=[1, 3])
def test_values_and_gradients(shape, step):
    loss, data = make(4, 8)
    gradient = jax.value_and_grad(loss)
    expected = gradient(MODEL, data)
    with in_mesh_of(shape):
        result = drjax.jit(gradient, groups_per_step=step)(MODEL, data)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)


@pytest.mark.slow
@checkerboard(4, shape=[BOTH, None, {"pods": 2}, {"groups": 4}])
def test_memory_does_not_grow_with_the_groups_of_either_level(shape):
    def used(pods, groups):
        loss, data = make(pods, groups)
        step = drjax.jit(jax.value_and_grad(loss), groups_per_step=1)
        # A type, as an array that is not on the mesh would be divided by a copy.
        return temp_bytes(step, MODEL, jax.ShapeDtypeStruct(data.shape, data.dtype))

    with in_mesh_of(shape):
        few = used(4, 8)
        # The losses, whose maximum has a gradient, are saved: one number a group.
        assert used(4, 128) <= few + 4 * 128
        assert used(32, 8) <= few + 64
    assert few < 20 * MODEL.size**2 * 4


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [None, BOTH])
def test_memory_of_loops_of_rounds_in_each_pod(shape):
    """The data are constants of the loop, and still read in chunks."""

    def used(pods, groups):
        @drjax.program(pods=pods, groups=groups)
        def train(model, data):
            def in_pod(model, data):
                def step(model, _):
                    near = lambda m, x: m - 0.1 * jnp.sin(m - x)
                    return drjax.reduce_mean(
                        drjax.map_fn(near, (drjax.broadcast(model), data))
                    ), None

                return jax.lax.scan(step, model, length=3)[0]

            models = drjax.map_fn(
                in_pod, (drjax.broadcast(model, over="pods"), data), over="pods"
            )
            return drjax.reduce_mean(models, over="pods")

        data = jax.ShapeDtypeStruct((pods, groups, 64), MODEL.dtype)
        return temp_bytes(drjax.jit(train, groups_per_step=1), MODEL, data)

    with in_mesh_of(shape):
        few = used(4, 8)
        assert used(4, 128) <= few + 64
        assert used(32, 8) <= few + 64


@pytest.mark.sampled
@checkerboard(3, name=PROGRAMS, kind=[AUTO, EXPLICIT])
def test_programs_on_a_mesh_of_both_levels(name, kind):
    fn, args = PROGRAMS[name]
    expected = jax.jit(fn)(*args)
    shape = {"pods": 2, "groups": 3} if kind == EXPLICIT else {"pods": 2, "groups": 2}
    with in_mesh(make_mesh(shape, kind)):
        result = drjax.jit(fn, groups_per_step=1)(*args)
        all_at_once = drjax.jit(fn)(*args)
    for a, b, c in zip(
        *map(jax.tree.leaves, (result, all_at_once, expected)), strict=True
    ):
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(b, c, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(3, 6), (1, 3)])
def test_devices_that_do_not_divide_the_groups_of_a_level(sizes):
    loss, data = make(*sizes)
    expected = jax.jit(jax.value_and_grad(loss))(MODEL, data)
    with in_mesh_of(BOTH):
        step = drjax.jit(jax.value_and_grad(loss), groups_per_step=1)
        result = step(MODEL, data)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)


@pytest.mark.sampled
@pytest.mark.parametrize("step", [None, 1])
def test_one_all_reduce_for_each_level_and_round_over_its_axis_only(step):
    data = make(4, 8)[1]
    with in_mesh_of(BOTH):
        data = drjax.shard(data, partition=LEVELS)
        compiled = {
            f: drjax.collectives(drjax.jit(f, groups_per_step=step))(MODEL, data)
            for f in (two_means, jax.value_and_grad(two_means))
        }
    value, gradient = compiled.values()
    axes = lambda module: sorted(tuple(sorted(c.axes)) for c in module.collectives)
    assert {c.kind for m in compiled.values() for c in m.collectives} == {"all-reduce"}
    assert axes(value) == [("groups",), ("pods",)]
    # The gradient of what is broadcast to both levels is a sum over both.
    assert axes(gradient) == [("groups",), ("groups", "pods"), ("pods",)]


@drjax.program(pods=5, groups=6)
def over_both(model, data):
    one = lambda m, x: (jnp.sin(m * x), jnp.bfloat16(x[:3]))
    values, half = drjax.map_fn(one, (drjax.broadcast(model), data))
    means = drjax.reduce_mean(values, over="groups")
    used_twice = drjax.map_fn(jnp.square, means, over="pods")
    return (
        drjax.reduce_sum(values), drjax.reduce_mean(values), drjax.reduce_mean(half),
        drjax.reduce_max(values), drjax.reduce_min(values).sum(),
        drjax.reduce_sum(drjax.reduce_mean(half, over="groups"), over="pods"),
        drjax.reduce_sum(drjax.reduce_max(values, over="groups"), over="pods"),
        drjax.reduce_sum(means, over="pods"),
        drjax.reduce_mean(used_twice, over="pods"),
    )  # fmt: skip


@pytest.mark.slow
@checkerboard(2, shape=[BOTH, {"pods": 4, "groups": 2}])
def test_reductions_over_both_levels(shape):
    data = jnp.asarray(RNG.randn(5, 6, 64), jnp.float32)
    expected = jax.jit(over_both)(MODEL, data)
    with in_mesh_of(shape):
        for step in (None, 1, 2):
            result = drjax.jit(over_both, groups_per_step=step)(MODEL, data)
            for a, b in zip(result, expected, strict=True):
                assert a.dtype == b.dtype
                rtol = 1e-5 if a.dtype == jnp.float32 else 2e-2
                np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize("block", ["reduce_sum", "reduce_mean", "reduce_max"])
def test_a_reduction_over_both_levels_is_one_all_reduce(block, step):
    reduce = getattr(drjax, block)
    fn = drjax.program(pods=4, groups=8)(lambda x: reduce(drjax.map_fn(jnp.sin, x)))
    with in_mesh_of(BOTH):
        data = drjax.shard(make(4, 8)[1], partition=LEVELS)
        report = drjax.collectives(drjax.jit(fn, groups_per_step=step))(data)
    (collective,) = report.collectives
    assert sorted(collective.axes or ()) == ["groups", "pods"]
    assert collective.times == 1


def test_inner_programs_with_effects_run_as_they_are():
    seen = []

    @drjax.program(groups=4)
    def inner(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return drjax.reduce_sum(drjax.map_fn(lambda y: y * x, jnp.arange(4.0)))

    outer = drjax.program(pods=3)(lambda x: drjax.reduce_sum(drjax.map_fn(inner, x)))
    result = drjax.jit(outer, groups_per_step=1)(jnp.arange(3.0))
    jax.effects_barrier()
    assert float(result) == 18.0
    assert sorted(seen) == [0.0, 1.0, 2.0]


def test_a_compiled_plan_called_without_jit():
    """Its reductions over both levels are a shard_map in another one."""
    program, args = PROGRAMS["gradient"]
    plan = drjax.make_plan(program)(*args)
    expected = jax.jit(program)(*args)
    with jax.set_mesh(make_mesh({"pods": 2, "groups": 2})):
        results = drjax.backends.xla.compile(plan)(*args)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, results, expected)


def test_chunks_of_an_inner_level_in_64_bits():
    f = drjax.program(pods=2, groups=4)(
        lambda x: drjax.reduce_sum(drjax.map_fn(jnp.sin, x), over="groups")
    )
    with jax.enable_x64(True):
        x = jnp.arange(24.0).reshape(2, 4, 3)
        result = drjax.jit(f, groups_per_step=1)(x)
        np.testing.assert_allclose(result, jnp.sin(x).sum(1), rtol=1e-12)
