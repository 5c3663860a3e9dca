"""`drjax.contrib.diloco` around steps of Flax and Equinox, and in a whole trainer.

Covers: drjax.contrib.diloco.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P

from drjax.compiled import Report
from drjax.contrib import diloco
from tests.helpers.meshes import in_mesh, make_mesh

K, H, ROUNDS, RATE = 4, 3, 2, 0.05
X = np.random.default_rng(0).normal(size=(ROUNDS, K, H, 8, 4)).astype(np.float32)
BATCHES = X, np.sin(X).sum(-1, keepdims=True)
ADAM = optax.adam(RATE)


@pytest.fixture(autouse=True)
def rank_promotion_of_optax():
    with jax.numpy_rank_promotion("allow"):
        yield


def of_nnx():
    """With dropout, whose keys are typed and whose counts are no floats."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(4, 16, rngs=rngs)
            self.out = nnx.Linear(16, 1, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.out(self.dropout(jnp.tanh(self.hidden(x))))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    graph, params, rest = nnx.split((model, optimizer), nnx.Param, ...)

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state["params"], state["rest"])
        loss = lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2)
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        _, params, rest = nnx.split((model, optimizer), nnx.Param, ...)
        return {"params": params, "rest": rest}, {"loss": value}

    return step, {"params": params, "rest": rest}, {}


def of_nnx_state():
    """One state of all, from which a filter selects the parameters."""
    step, state, _ = of_nnx()
    whole = nnx.merge_state(state["params"], state["rest"])
    rest = nnx.filterlib.Not(nnx.Param)

    def of_whole(whole, batch):
        parts = {"params": nnx.Param, "rest": rest}
        state = {x: nnx.filter_state(whole, y) for x, y in parts.items()}
        state, metrics = step(state, batch)
        return nnx.merge_state(state["params"], state["rest"]), metrics

    return of_whole, whole, {"params": lambda x: nnx.filter_state(x, nnx.Param)}


def of_linen():
    net = linen.Sequential([linen.Dense(16), jnp.tanh, linen.Dense(1)])
    params = net.init(jax.random.key(0), X[0, 0, 0])
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=ADAM)

    def step(state, batch):
        error = lambda params: state.apply_fn(params, batch[0]) - batch[1]
        loss = lambda params: jnp.mean(error(params) ** 2)
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step, state, {}


def of_equinox():
    """The model is in the state as it is, with its functions and Python's numbers."""

    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __call__(self, x, key):
            return self.mlp(self.dropout(x, key=key))

    key = jax.random.key(0)
    mlp = eqx.nn.MLP(4, 1, 16, 1, jnp.tanh, key=key)
    model = Model(mlp, eqx.nn.Dropout(0.1))
    opt = ADAM.init(eqx.filter(model, eqx.is_inexact_array))

    def step(state, batch):
        model, opt, key = state

        def loss(model):
            keys = jax.random.split(key, len(batch[0]))
            return jnp.mean((jax.vmap(model)(batch[0], keys) - batch[1]) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, opt = ADAM.update(grads, opt)
        model = eqx.apply_updates(model, updates)
        return (model, opt, jax.random.fold_in(key, 0)), {"loss": value}

    params = lambda state: eqx.filter(state[0], eqx.is_inexact_array)
    return step, (model, opt, key), {"params": params}


def of_arrays():
    """All of the state is parameters: plain local SGD."""
    params = [jnp.ones((4, 1)), jnp.zeros(1)]

    def step(params, batch):
        loss = lambda p: jnp.mean((batch[0] @ p[0] + p[1] - batch[1]) ** 2)
        value, grads = jax.value_and_grad(loss)(params)
        new = [x - RATE * g for x, g in zip(params, grads, strict=True)]
        return new, {"loss": value}

    return step, params, {"params": lambda state: state}


TRAINERS = {
    "nnx": of_nnx,
    "nnx, one state": of_nnx_state,
    "linen": of_linen,
    "equinox": of_equinox,
    "arrays": of_arrays,
}


def floats(tree: Any) -> list[np.ndarray]:
    """The parameters of a tree, as NumPy arrays."""
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    return [np.asarray(x) for x in leaves]


def loop(step, state, params):
    """Local SGD, hand-written: the user's own step, and a mean of parameters."""
    get = params or diloco.default_params
    treedef = jax.tree.structure(state)
    run = eqx.filter_jit(step)
    fold = lambda x, i: (
        jax.random.fold_in(x, i)
        if eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        else x
    )
    workers = [jax.tree.map(lambda x, i=i: fold(x, i), state) for i in range(K)]
    losses = np.zeros((ROUNDS, K, H))
    for r in range(ROUNDS):
        for i in range(K):
            for t in range(H):
                batch = tuple(jnp.asarray(x[r, i, t]) for x in BATCHES)
                workers[i], metrics = run(workers[i], batch)
                losses[r, i, t] = metrics["loss"]
        each = [floats(get(worker)) for worker in workers]
        mean = [np.mean(x, 0) for x in zip(*each, strict=True)]
        for i, worker in enumerate(workers):
            leaves = jax.tree.leaves(worker)
            own = [
                id(x) for x in jax.tree.leaves(get(worker)) if eqx.is_inexact_array(x)
            ]
            new = dict(zip(own, map(jnp.asarray, mean), strict=True))
            workers[i] = treedef.unflatten([new.get(id(x), x) for x in leaves])
    return mean, losses


@pytest.mark.parametrize("name", TRAINERS)
def test_any_train_step_is_local_sgd(name):
    step, state, options = TRAINERS[name]()
    traces = []

    def counted(state, batch):
        traces.append(name)
        return step(state, batch)

    expected, expected_losses = loop(step, state, options.get("params"))
    settings: Any = dict(outer=optax.sgd(1.0)) | options
    round_ = diloco.Round(counted, K, **settings)
    with in_mesh(make_mesh({"workers": 2})):
        run, losses, state, first = jax.jit(round_), [], round_.init(state), 0
        for r in range(ROUNDS):
            state, metrics = run(state, tuple(jnp.asarray(x[r]) for x in BATCHES))
            losses.append(metrics["loss"])
            first = len(traces) if r == 0 else first
    # Nothing changes its type: later rounds are not traced again.
    assert first == len(traces)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4, atol=1e-5)
    for x, y in zip(floats(state.params), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_the_parameters_are_a_model_again():
    step, state, options = of_equinox()
    settings: Any = options
    round_ = diloco.Round(step, K, **settings)
    params = round_.init(state).params
    model = eqx.combine(params, state[0])
    out = model(jnp.ones(4), jax.random.key(0))
    np.testing.assert_array_equal(out, state[0](jnp.ones(4), jax.random.key(0)))


# ---------------------------------------------------------------------------------
# A trainer in the shape of MaxText's: a train state of Flax with scanned layers, on a
# mesh of two slices, each with model axes; a step a batch, checkpoints, evaluation

WIDTH, LAYERS, VOCAB = 16, 4, 32
ADAMW = optax.adamw(1e-2)
SPECS = {
    "embed": P("tensor", "fsdp"),
    "layers": {"w": P(None, "fsdp", "tensor"), "scale": P(None, "tensor")},
}
SLICES = {"slices": 2, "fsdp": 2, "tensor": 2}


def first_train_state() -> train_state.TrainState:
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "embed": 0.5 * jax.random.normal(keys[0], (VOCAB, WIDTH)),
        "layers": {
            "w": 0.2 * jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)),
            "scale": jnp.ones((LAYERS, WIDTH)),
        },
    }
    return train_state.TrainState.create(apply_fn=forward, params=params, tx=ADAMW)


def forward(params, tokens):
    def layer(x, weights):
        x = jax.lax.with_sharding_constraint(x, P("fsdp", None, "tensor"))
        return x + jnp.tanh(x @ weights["w"]) * weights["scale"], None

    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return x @ params["embed"].T


TRACES: list[str] = []  # of the train step


def train_step(state, tokens):
    TRACES.append("step")

    def loss(params):
        logits = state.apply_fn(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value}


def of_specs(mesh, state):
    """The state, its parameters and their moments sharded over the model axes."""
    on = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    like = lambda tree: jax.tree.map(on, tree, SPECS)
    adam, *rest = state.opt_state
    adam = adam._replace(mu=like(adam.mu), nu=like(adam.nu))
    return state.replace(params=like(state.params), opt_state=(adam, *rest))


def text_of_round(r, workers):
    start = np.random.default_rng(r).integers(0, VOCAB, (workers, H, 4, 1))
    return jnp.asarray((start + np.arange(9)) % VOCAB)


class TestTrainer:
    def round_(self, workers=2, count=2):
        params = first_train_state().params
        parts = diloco.fragments(params, count, scanned="layers", apart="embed")
        options: Any = dict(delay=1, mixing=0.5, drop_diverged=True, fragments=parts)
        return diloco.Round(train_step, {"slices": workers}, **options)

    def start(self, round_, mesh):
        return round_.init(of_specs(mesh, first_train_state()))

    def train(self, round_, state, rounds, **members):
        layout = jax.tree.map(lambda x: x.sharding, state)
        run, losses = jax.jit(round_, out_shardings=(layout, None)), []
        traced = 0
        for r in rounds:
            batches = text_of_round(r, round_.partition.size)
            state, metrics = run(state, batches, **members)
            losses.append(float(metrics["loss"].mean()))
            traced = traced or len(TRACES)
        assert traced == len(TRACES)
        return state, losses

    @pytest.mark.once
    def test_parameters_and_moments_stay_sharded(self):
        with in_mesh(mesh := make_mesh(SLICES)):
            round_ = self.round_(count=3)
            state = self.start(round_, mesh)
            state, losses = self.train(round_, state, range(6))
        spec = lambda tree: jax.tree.map(lambda x: x.sharding.spec, tree)
        of_workers = jax.tree.map(lambda spec: P("slices", *spec), SPECS)
        assert spec(state.params) == SPECS
        assert spec(state.workers.params) == of_workers
        for outer in state.outer:
            sizes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(outer)]
            assert all(np.prod(x) < 32 * 16 / 2 for x in sizes)
        assert spec(state.workers.opt_state[0].nu) == of_workers
        assert losses[-1] < 0.5 * losses[0]
        assert state.workers.step.tolist() == [6 * H] * 2
        with in_mesh(mesh := make_mesh(dict.fromkeys(SLICES, 1))):
            round_ = self.round_(count=3)
            _, expected = self.train(round_, self.start(round_, mesh), range(6))
        np.testing.assert_allclose(losses, expected, rtol=1e-3)

    def test_between_slices_fragments_are_sent_and_no_more(self):
        with in_mesh(mesh := make_mesh(SLICES)):
            round_ = self.round_(count=3)
            round_.drop_diverged = False
            state = self.start(round_, mesh)
            compiled = jax.jit(round_).lower(state, text_of_round(0, 2)).compile()
            report = Report.of(compiled, mesh)
        sent = [x for x in report.collectives if x.axes and "slices" in x.axes]
        assert {x.kind for x in sent} == {"all-reduce"}
        parameters = jax.tree.leaves(first_train_state().params)
        assert sum(x.result_bytes for x in sent) <= sum(x.nbytes for x in parameters)

    @pytest.mark.once
    def test_a_slice_that_is_lost_begins_with_the_global_parameters(self):
        """Its loss diverges, or the trainer says that it is away."""
        with in_mesh(mesh := make_mesh(SLICES)):
            round_ = self.round_()
            first, _ = self.train(round_, self.start(round_, mesh), [0])
            broken = lambda x: x.at[1].set(jnp.nan)
            params = jax.tree.map(broken, first.workers.params)
            lost = dataclasses.replace(
                first, workers=first.workers.replace(params=params)
            )
            lost, losses = self.train(round_, lost, [1])
            assert np.isnan(losses)
            away = jnp.array([True, False])
            masked, _ = self.train(round_, first, [1], where=away)
            for state in (lost, masked):
                jax.tree.map(
                    np.testing.assert_array_equal,
                    jax.tree.map(lambda x: x[1], state.workers.params),
                    state.params,
                )
                assert state.workers.step.tolist() == [2 * H, H]
            close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
            jax.tree.map(close, lost.params, masked.params)
            _, losses = self.train(round_, lost, range(2, 6))
            assert losses[-1] < losses[0]

    @pytest.mark.once
    def test_a_checkpoint_is_for_another_number_of_slices(self, tmp_path):
        with in_mesh(mesh := make_mesh(SLICES)):
            round_ = self.round_()
            state, _ = self.train(round_, self.start(round_, mesh), range(2))
            checkpoints = diloco.Checkpoints(tmp_path)
            checkpoints.save(2, state, {"tokens": 2 * H * 8})
            like = self.start(round_, mesh)
            rounds, restored = checkpoints.restore(round_, like)
            assert rounds == 2
            again, expected = (self.train(round_, x, [2]) for x in (restored, state))
            jax.tree.map(np.testing.assert_array_equal, again, expected)
        with in_mesh(mesh := make_mesh(SLICES | {"slices": 4, "fsdp": 1})):
            round_ = self.round_(4)
            like = self.start(round_, mesh)
            _, restored = checkpoints.restore(round_, like)
            assert checkpoints.metadata() == {"tokens": 2 * H * 8}
            layout = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
            assert layout(restored) == layout(like)
            jax.tree.map(np.testing.assert_array_equal, restored.params, state.params)
            _, losses = self.train(round_, restored, range(2, 6))
            assert losses[-1] < losses[0]
        checkpoints.close()
