"""Checkpoints of `drjax.contrib.diloco`: a run that resumes has the same bits.

Covers: drjax.contrib.diloco.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from drjax.contrib import diloco
from tests.helpers.meshes import in_mesh_of

H, ADAM = 4, optax.adam(0.1)
WAYS: dict[str, Any] = {
    "plain": {},
    "streaming": dict(fragments=2, delay=1, mixing=0.5, drop_diverged=True),
    "replaced": dict(fragments=3, wire="bfloat16"),
}
MESHES = {"8 devices": {"workers": 8}, "1 device": None}


@pytest.fixture(autouse=True)
def rank_promotion_of_optax():
    with jax.numpy_rank_promotion("allow"):
        yield


def first_state(width=3):
    params = {"a": jnp.ones((width, 2)), "b": [jnp.zeros(2), jnp.arange(2.0)]}
    return {"params": params, "opt": ADAM.init(params), "key": jax.random.key(3)}


def step(state, x):
    key = jax.random.fold_in(state["key"], 0)

    def loss(params):
        y = jnp.tanh(x @ params["a"]) + params["b"][0] * params["b"][1]
        return jnp.mean((y - jax.random.key_data(key) * 2.0**-32) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = ADAM.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "key": key}, value


def advance(round_, state, rounds, run=None):
    run = run or jax.jit(round_)
    for r in rounds:
        shape = round_.partition.size, H, 3
        x = np.random.default_rng(r).normal(size=shape).astype(np.float32)
        state, _ = run(state, jnp.asarray(x))
    return state


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype


@pytest.mark.once
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", WAYS)
def test_a_run_resumes_with_the_same_bits(tmp_path, name, mesh):
    with in_mesh_of(MESHES[mesh]):
        round_ = diloco.Round(step, 8, **WAYS[name])
        checkpoints = diloco.Checkpoints(tmp_path)
        like = round_.init(first_state())
        assert checkpoints.metadata() is None
        assert checkpoints.restore(round_, like) == (0, like)
        state, run = like, jax.jit(round_)
        for r in range(3):
            state = advance(round_, state, [r], run)
            checkpoints.save(r + 1, state, {"seen": r})
        checkpoints.close()
        expected = advance(round_, state, [3, 4], run)
        assert diloco.Checkpoints(tmp_path).metadata() == {"seen": 2}
        rounds, state = diloco.Checkpoints(tmp_path).restore(round_, like)
        assert rounds == 3
        layout = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
        assert layout(state) == layout(like)
        assert_same_bits(advance(round_, state, [3, 4], run), expected)


@pytest.mark.once
@pytest.mark.sampled
@pytest.mark.parametrize("workers", [3, 8, 12, 16])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_run_goes_on_with_another_number_of_workers(tmp_path, mesh, workers):
    shape = MESHES[mesh]
    ways = WAYS["streaming"]
    with in_mesh_of(shape and {"workers": 4}):
        before = diloco.Round(step, 4, **ways)
        state = advance(before, before.init(first_state()), [0, 1])
        checkpoints = diloco.Checkpoints(tmp_path)
        checkpoints.save(2, state)
        checkpoints.close()
    with in_mesh_of(shape):
        round_ = diloco.Round(step, workers, **ways)
        like = round_.init(first_state())
        resized = round_.resize(state)
        rounds, restored = diloco.Checkpoints(tmp_path).restore(round_, like)
        layout = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
        assert rounds == 2 and layout(restored) == layout(resized) == layout(like)
        assert_same_bits(restored, resized)
        run = jax.jit(round_)
        expected = advance(round_, resized, [2, 3], run)
        assert_same_bits(advance(round_, restored, [2, 3], run), expected)
    # Workers that stay are as they were, and new ones are as the first one.
    kept, n = min(workers, 4), lambda tree, i: jax.tree.map(lambda x: x[i], tree)
    assert_same_bits(n(resized.workers, slice(kept)), n(state.workers, slice(kept)))
    assert_same_bits(resized.params, state.params)
    for i in range(4, workers):
        own, of_first = n(resized.workers, i), n(state.workers, 0)
        key, first_key = own.pop("key"), of_first.pop("key")
        assert_same_bits(own, of_first)
        assert_same_bits(key, jax.random.fold_in(first_key, i))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    checkpoints = diloco.Checkpoints(tmp_path)
    round_ = diloco.Round(step, 2)
    checkpoints.save(1, round_.init(first_state()))
    wider = round_.init(first_state(4))
    text = r"differs in .*, \.theta\['a'\], \.workers\['opt'\]\[0\]\.mu\['a'\], "
    with pytest.raises(ValueError, match=text):
        checkpoints.restore(round_, wider)
    others: Any = dict(fragments=2), dict(mixing=0.5), dict(outer=optax.sgd(1.0))
    for other in others:
        other = diloco.Round(step, 2, **other)
        with pytest.raises(ValueError, match=r"differs in \.(outer|workers)"):
            checkpoints.restore(other, other.init(first_state()))
    checkpoints.close()
