"""Streaming DiLoCo by the layer, as the compiler for TPUs schedules it: what is hidden.

Covers: drjax.contrib.diloco.
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from drjax.compiled import Collective, read_hlo
from drjax.contrib import diloco
from experiments import machine
from experiments.config import Machine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu, its compiler"
    ),
]
SIZE, LAYERS, BATCH, H, INNER = 512, 4, 128, 20, optax.adam(1e-3)


def step(state, batch):
    def loss(params):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        x, _ = jax.lax.scan(layer, batch @ params["first"], params["layers"])
        return jnp.mean((x - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = INNER.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def exchanges(fragments, delay, jit, **settings) -> list[Collective]:
    """Those between two slices of four chips, in the compiled round."""
    chips = machine.devices(Machine(platform="tpu", topology="v5e:2x2"), 2)
    mesh = jax.sharding.Mesh(np.reshape(chips, (2, -1)), ("workers", "model"))
    params = {
        "first": jnp.zeros((SIZE, SIZE)),
        "layers": jnp.zeros((LAYERS, SIZE, SIZE)),
    }
    if fragments == "scanned":
        fragments = diloco.fragments(params, 2, scanned="layers", apart="first")
    keywords: Any = dict(fragments=fragments, delay=delay, mixing=0.5) | settings
    round_ = diloco.Round(step, 2, **keywords)
    first = {"params": params, "opt": INNER.init(params)}
    state = jax.eval_shape(round_.init, first)
    batches = jax.ShapeDtypeStruct((2, H, BATCH, SIZE), jnp.float32)

    def on(x, *lead):
        model = (*[None] * (x.ndim - len(lead) - 1), "model") if x.ndim > 2 else ()
        sharding = jax.NamedSharding(mesh, P(*lead, *model))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    of_workers = lambda tree: jax.tree.map(lambda x: on(x, "workers"), tree)
    theta, outer = jax.tree.map(on, (state.theta, state.outer))
    state = diloco.State(theta, outer, of_workers(state.workers))
    args = state, of_workers(batches)
    with jax.set_mesh(mesh):
        text = jit(round_).lower(*args).compile().as_text() or ""
    return [x for x in read_hlo(text, dict(mesh.shape)) if x.between_slices]


@pytest.mark.parametrize("fragments", [2, "scanned"])
def test_all_fragments_are_hidden_behind_the_delay(fragments):
    sent = exchanges(fragments, 5, drjax.jit)
    assert len(sent) == 2 and all(x.hidden for x in sent)
    assert sum(x.result_bytes for x in sent) * 4 == 4 * SIZE * SIZE * (LAYERS + 1)
    for x in sent:  # the steps of the delay, and no others
        assert 5 in [loop.trip_count for loop in x.hidden_by]


def test_without_a_delay_it_is_exposed():
    assert not any(x.hidden for x in exchanges(2, 0, drjax.jit))
