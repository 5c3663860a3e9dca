"""A round of `drjax.contrib.diloco` against a loop over steps and workers.

Covers: drjax.contrib.diloco.round, drjax.contrib.diloco.train_state,
drjax.contrib.diloco.fragments, drjax.contrib.diloco.checkpoint.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from drjax.contrib import diloco
from tests.helpers.meshes import in_mesh_of

K, H, ROUNDS = 4, 6, 3
RNG = np.random.default_rng(0)
BATCHES = RNG.normal(size=(ROUNDS, K, H, 5)).astype(np.float32)
ADAM = optax.adam(0.1)
RATE, MOMENTUM = 0.7, 0.9


@pytest.fixture(autouse=True)
def rank_promotion_of_optax():
    with jax.numpy_rank_promotion("allow"):
        yield


def first_state() -> dict[str, Any]:
    params = {
        "blocks": {"w": jnp.linspace(-1, 1, 20).reshape(4, 5), "b": jnp.ones((4, 1))},
        "embed": jnp.linspace(0, 1, 5),
        "calls": 0,  # no float: each worker has its own
    }
    floats = {"blocks": params["blocks"], "embed": params["embed"]}
    return {"params": params, "opt": ADAM.init(floats), "key": jax.random.key(1)}


def step(state, batch):
    params = dict(state["params"])
    calls = params.pop("calls")
    noise = jax.random.normal(jax.random.fold_in(state["key"], calls), (5,))

    def loss(params):
        x = jnp.tanh(params["blocks"]["w"] * (batch + 0.1 * noise)[None])
        x = x + params["blocks"]["b"]
        return jnp.mean((x - params["embed"][None]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = ADAM.update(grads, state["opt"])
    params = optax.apply_updates(params, updates)
    params["calls"] = calls + 1
    return {"params": params, "opt": opt, "key": state["key"]}, {"loss": value}


def of_blocks(count, **patterns):
    return diloco.fragments(first_state()["params"], count, **patterns)


def loop(parts, delay=0, mixing=0.0, where=None, weights=None, drop_diverged=False):
    """The algorithm as written: after each step, which fragment is due."""
    state, once = first_state(), jax.jit(step)
    tree = jax.tree.structure(state["params"])
    keys = [jax.random.fold_in(state["key"], i) for i in range(K)]
    workers = [{**state, "key": key} for key in keys]
    theta = [np.array(x) for x in jax.tree.leaves(state["params"])]
    momentum = [np.zeros(x.shape, np.float32) for x in theta]
    get = lambda worker: [np.array(x) for x in jax.tree.leaves(worker["params"])]
    put = lambda worker, x: {**worker, "params": tree.unflatten(x)}
    with_theta = lambda worker: put(
        worker,
        [
            x.copy() if y.dtype == np.float32 else y
            for x, y in zip(theta, get(worker), strict=True)
        ],
    )
    P, losses = len(parts.parts), np.zeros((ROUNDS, K, H))
    for r in range(ROUNDS):
        alive = np.ones(K, bool) if where is None else np.array(where[r])
        weight = np.ones(K) if weights is None else np.array(weights[r])
        alive &= weight > 0
        before, sent = list(workers), {}
        for t in range(H + 1):
            for i in range(K if t else 0):
                workers[i], metrics = once(workers[i], BATCHES[r, i, t - 1])
                losses[r, i, t - 1] = metrics["loss"]
            for p in range(P):
                leaves = parts.parts[p].leaves
                rows = {
                    j: slice(None) if x is None else list(x) for j, x in leaves.items()
                }
                received = (p + 1) * H // P
                if t == received - delay:
                    change = {
                        j: [theta[j][x] - get(worker)[j][x] for worker in workers]
                        for j, x in rows.items()
                    }
                    if drop_diverged:
                        finite = lambda i, change=change: all(
                            np.isfinite(x[i]).all() for x in change.values()
                        )
                        alive &= [finite(i) for i in range(K)]
                    sent[p] = {
                        j: np.average(np.array(x)[alive], 0, weight[alive])
                        for j, x in change.items()
                        if alive.any()
                    }
                if t == received:
                    for j, g in sent[p].items():
                        x = rows[j]
                        momentum[j][x] = g + MOMENTUM * momentum[j][x]
                        theta[j][x] -= RATE * (g + MOMENTUM * momentum[j][x])
                    for i in range(K):
                        own = get(workers[i])
                        for j, x in rows.items():
                            mixed = mixing * own[j][x] if mixing else 0
                            own[j][x] = mixed + (1 - mixing) * theta[j][x]
                        workers[i] = put(workers[i], own)
        pairs = zip(alive, workers, before, strict=True)
        workers = [new if there else with_theta(old) for there, new, old in pairs]
    return tree.unflatten(theta), workers, losses


def run(round_, mesh=None, where=None, weights=None, jit=jax.jit, state=None):
    nth = lambda x, r: None if x is None else jnp.asarray(x[r])
    with in_mesh_of(mesh):
        state = round_.init(first_state()) if state is None else state
        compiled, losses = jit(round_), []
        for r, batches in enumerate(BATCHES):
            args = jnp.asarray(batches), nth(where, r), nth(weights, r)
            state, metrics = compiled(state, *args)
            losses.append(metrics["loss"])
    return state, np.array(losses)


def close(x, y):
    if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def assert_is_loop(state, losses, parts, **settings):
    theta, workers, expected = loop(parts, **settings)
    close(losses, expected)
    floats = lambda tree: [
        x for x in jax.tree.leaves(tree) if jnp.asarray(x).dtype == np.float32
    ]
    jax.tree.map(close, floats(state.params), floats(theta))
    for i, worker in enumerate(workers):
        # Of what is shared the leaves have no value: they are the global ones.
        kept = jax.tree.map(lambda x, i=i: x[i], state.workers)
        for x, y in zip(
            jax.tree.leaves(kept, is_leaf=is_shared),
            jax.tree.leaves(worker),
            strict=True,
        ):
            close(jax.tree.leaves(state.theta)[x.index] if is_shared(x) else x, y)


def is_shared(x):
    return type(x).__name__ == "Shared"


AWAY = [[True, False, True, True], [True, False, False, True], [True] * K]
ALL_AWAY = [[True] * K, [False] * K, [True, False, True, True]]
TOKENS = [[1, 2, 3, 4], [5, 0, 1, 1], [0, 0, 3, 1]]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": dict(delay=2),
    "mixed": dict(delay=1, mixing=0.5),
    "away": dict(where=AWAY),
    "all away": dict(where=ALL_AWAY),
    "weighted": dict(weights=TOKENS, delay=1, mixing=0.25),
    "both": dict(weights=TOKENS, where=ALL_AWAY),
    "finite": dict(drop_diverged=True, mixing=0.5),
}
FRAGMENTS: dict[str, dict[str, Any]] = {
    "one": dict(count=1),
    "leaves": dict(count=3),
    "layers": dict(count=2, layers="blocks"),
    "slices": dict(count=3, scanned="blocks", apart="embed"),
    "four slices": dict(count=4, scanned="blocks"),
}


@pytest.mark.parametrize("fragments", FRAGMENTS)
@pytest.mark.parametrize("name", SETTINGS)
def test_rounds_are_a_loop_over_steps_and_workers(name, fragments):
    parts, settings = of_blocks(**FRAGMENTS[fragments]), dict(SETTINGS[name])
    settings["delay"] = min(settings.get("delay", 0), H // len(parts.parts))
    members = {x: settings.pop(x, None) for x in ("where", "weights")}
    round_ = diloco.Round(step, K, fragments=parts, **settings)
    mesh = {"workers": 2} if fragments in ("one", "slices") else None
    state, losses = run(round_, mesh, **members)
    assert_is_loop(state, losses, parts, **settings, **members)
