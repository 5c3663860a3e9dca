"""Streaming DiLoCo by the layer, as the compiler for TPUs schedules it: what is hidden.

Covers: drjax.contrib.diloco, drjax._primitives.in_two_legs, drjax._planner.fences.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from benchmarks import overlap
from drjax.compiled import Collective, read_hlo
from drjax.contrib import diloco
from experiments import machine
from experiments.config import Machine
from tests.helpers.compiled import BY_TPU_COMPILER

pytestmark = [
    pytest.mark.slow,
    BY_TPU_COMPILER,
]
SIZE, LAYERS, BATCH, H, INNER = 256, 4, 128, 20, optax.adam(1e-3)
JITS = {"jax.jit": jax.jit, "drjax.jit": drjax.jit}
WIRES = None, "bfloat16", "int8", "float4_e2m1fn"


def step(state, batch):
    def loss(params):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        x, _ = jax.lax.scan(layer, batch @ params["first"], params["layers"])
        return jnp.mean((x - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt = INNER.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def mesh_of(slices):
    chips = machine.devices(Machine(platform="tpu", topology="v5e:2x2"), slices)
    return jax.sharding.Mesh(np.reshape(chips, (slices, -1)), ("workers", "chips"))


def exchanges(
    fragments, delay, jit, slices=2, axis="model", scanned=False, **settings
) -> list[Collective]:
    """Those between slices of four chips, in the compiled round.

    The chips of a slice divide each layer (`model`), or the batch (`data`).
    """
    mesh = mesh_of(slices)
    params = {
        "first": jnp.zeros((SIZE, SIZE)),
        "layers": jnp.zeros((LAYERS, SIZE, SIZE)),
    }
    if scanned:  # more than one fragment has layers
        fragments = diloco.fragments(params, fragments, scanned="layers", apart="first")
    keywords: Any = dict(fragments=fragments, delay=delay, mixing=0.5) | settings
    round_ = diloco.Round(step, slices, **keywords)
    first = {"params": params, "opt": INNER.init(params)}
    state = jax.eval_shape(round_.init, first)
    batches = jax.ShapeDtypeStruct((slices, H, BATCH, SIZE), jnp.float32)

    def on(x, *lead):
        layer, batch = x.shape[-2:] == (SIZE, SIZE), x.shape[-2:] == (BATCH, SIZE)
        divided = {"model": layer and -1, "data": batch and -2}[axis]
        spec = [*lead, *[None] * (x.ndim - len(lead))]
        if divided:
            spec[divided] = "chips"
        sharding = jax.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    of_workers = lambda tree: jax.tree.map(lambda x: on(x, "workers"), tree)
    theta, outer = jax.tree.map(on, (state.theta, state.outer))
    state = diloco.State(theta, outer, of_workers(state.workers))
    args = state, of_workers(batches)
    with jax.set_mesh(mesh):
        text = jit(round_).lower(*args).compile().as_text() or ""
    return [x for x in read_hlo(text, dict(mesh.shape)) if x.between_slices]


def trip_counts(sent: list[Collective]) -> list[list[int | None]]:
    return [[loop.trip_count for loop in x.hidden_by] for x in sent]


def in_every_cell(test):
    """Parametrize by what the exchanges are between, of what, and compiled by."""
    cells = dict(jit=JITS, wire=WIRES, axis=["model", "data"], slices=[2, 4, 8])
    for name, values in reversed(cells.items()):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@in_every_cell
def test_every_exchange_is_hidden(slices, axis, wire, jit):
    sent = exchanges(2, 5, JITS[jit], slices, axis, wire=wire)
    assert {x.asynchronous for x in sent} == {True}
    assert {x.times for x in sent} == {1}
    if wire is None:
        assert {x.kind for x in sent} == {"all-reduce"}
        whole = 4 * SIZE * SIZE * (LAYERS + 1)
        assert sum(x.result_bytes for x in sent) * 4 == whole  # of four chips
        steps = [[5]] * len(sent)
    else:
        assert [x.kind for x in sent] == ["all-to-all", "all-gather"] * 2
        steps = [[3], [2]] * 2
    # The steps of the delay, and no others; the loop over layers is inside of them.
    assert trip_counts(sent) == steps
    assert all(x.hidden_flops for x in sent)


@in_every_cell
def test_one_step_hides_every_exchange(slices, axis, wire, jit):
    """One collective for each fragment, also of numbers in few bits."""
    sent = exchanges(2, 1, JITS[jit], slices, axis, wire=wire)
    kind = "all-gather" if wire else "all-reduce"
    assert {x.kind for x in sent} == {kind} and len(sent) >= 2
    # The loops over layers, forward and backward, of the one step.
    assert trip_counts(sent) == [[LAYERS, LAYERS]] * len(sent)
    assert all(x.hidden_flops for x in sent)


@pytest.mark.parametrize("wire", [None, "int8"])
@pytest.mark.parametrize("jit", JITS)
def test_fragments_of_scanned_layers_are_hidden(jit, wire):
    """Also where the chips of a slice divide layers of which fragments have some."""
    sent = exchanges(3, 5, JITS[jit], wire=wire, scanned=True)
    assert sent and all(x.hidden for x in sent)


@pytest.mark.usefixtures("leaks_unchecked")
@pytest.mark.parametrize("wire", overlap.MODEL_WIRES)
@pytest.mark.parametrize("name", overlap.MODELS)
def test_those_of_language_models_are_hidden(name, wire):
    """Of `experiments`, whose compilation takes a minute or more."""
    with jax.numpy_rank_promotion("allow"):  # as users of the examples do
        report = overlap.compiled_model(name, 2, wire, drjax.jit)
    every, hidden = overlap.between_slices(report)
    assert every.bytes and hidden == every


class TestWrongOrder:
    """What is not hidden is reported as exposed."""

    def test_without_a_delay(self):
        assert not any(x.hidden for x in exchanges(2, 0, drjax.jit))

    def test_of_two_collectives_one_after_the_other(self, monkeypatch):
        monkeypatch.setattr(diloco, "is_divided", lambda partition: False)
        sent = exchanges(2, 5, jax.jit, axis="data", wire="int8")
        kinds = [x.kind for x in sent]
        assert set(kinds) == {"all-to-all", "all-gather"}
        assert [x.hidden for x in sent] == [x == "all-gather" for x in kinds]

    def test_of_what_may_be_received_at_once(self, monkeypatch):
        """Where the inner steps have collectives of their own, the compiler waits."""
        monkeypatch.setattr(diloco, "received_after", lambda xs, *_, **__: xs)
        assert not all(x.hidden for x in exchanges(2, 5, jax.jit))


@pytest.mark.parametrize(
    ("jit", "options", "hides"),
    [
        (drjax.jit, {}, True),
        (jax.jit, {}, False),
        (jax.jit, {"xla_tpu_enable_async_collective_fusion": "false"}, True),
    ],
    ids=["drjax.jit", "jax.jit", "jax.jit with the option"],
)
def test_a_program_of_ones_own_has_a_barrier(jit, options, hides):
    """The lines of docs/explanation/saved_and_sent.md, where chips divide the model."""

    def steps(count, worker, batches):
        carry = {"params": worker, "opt": INNER.init(worker)}
        return jax.lax.scan(step, carry, batches[:count])[0]["params"]

    @drjax.program(workers=2)
    def rounds(theta, batches):
        worker = drjax.broadcast(theta)
        for _ in range(2):
            worker = drjax.map_fn(partial(steps, 5), (worker, batches))
            mean = drjax.reduce_mean(worker)
            worker = drjax.map_fn(partial(steps, 5), (worker, batches))
            mean, worker = jax.lax.optimization_barrier((mean, worker))
            mix = lambda x, y: jax.tree.map(lambda x, y: (x + y) / 2, x, y)
            worker = drjax.map_fn(mix, (worker, drjax.broadcast(mean)))
        return worker

    mesh = mesh_of(2)

    def on(shape, *spec):
        sharding = jax.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    theta = {
        "first": on((SIZE, SIZE), None, "chips"),
        "layers": on((LAYERS, SIZE, SIZE), None, None, "chips"),
    }
    batches = on((2, H, BATCH, SIZE), "workers")
    with jax.set_mesh(mesh):
        text = jit(rounds).lower(theta, batches).compile(options).as_text() or ""
    sent = [x for x in read_hlo(text, dict(mesh.shape)) if x.between_slices]
    assert sent and all(x.hidden for x in sent) is hides
