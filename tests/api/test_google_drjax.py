"""Code written for google/drjax 0.2.1, and the paper's snippets, run unchanged.

Covers: drjax._api.program, drjax._api.blocks, drjax._api.reductions.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax import lax

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.jaxprs import COMMUNICATION, blocks, mixing_equations
from tests.helpers.meshes import in_mesh, in_mesh_of, make_mesh

K = 4
X = np.arange(K, dtype=np.float32)
MESHES = [None, {"diloco": 4}, {"diloco": 2, "model": 2}]
every_third = checkerboard(3, mesh=MESHES)


@pytest.mark.parametrize(
    "keywords",
    [
        dict(placements={"diloco": K}),
        dict(placements={"diloco": K}, use_abstract_mesh=False),
        dict(diloco=K, use_abstract_mesh=True),
        dict(partition_size=K),
    ],
)
def test_declarations(keywords):
    @drjax.program(**keywords)
    def f(x):
        return drjax.reduce_sum(drjax.map_fn(lambda a: 2 * a, drjax.broadcast(x)))

    assert f(1.0) == 2 * K == jax.jit(f)(1.0) == jax.grad(f)(1.0)


@pytest.mark.parametrize("jitted", [False, True])
def test_mesh_as_argument_of_blocks_and_of_programs(jitted):
    mesh = make_mesh({"diloco": 4})

    def f(x, on=mesh):
        xs = drjax.broadcast(x, mesh=on)
        return xs, drjax.reduce_mean(drjax.map_fn(jnp.sin, xs, mesh=on))

    for declared in (
        drjax.program(placements={"diloco": 8}),
        drjax.program(placements={"diloco": 8}, mesh=mesh),
    ):
        program = jax.jit(declared(f)) if jitted else declared(f)
        for context in (None, mesh):
            with in_mesh(context):
                xs, mean = program(jnp.float32(1))
            np.testing.assert_allclose(mean, np.sin(1), rtol=1e-6)
            assert xs.sharding.is_equivalent_to(
                jax.NamedSharding(mesh, jax.P("diloco")), 1
            )


def test_blocks_imported_by_name():
    from drjax import broadcast, map_fn, program, reduce_mean, reduce_sum
    from drjax import reduce_weighted_mean as weighted

    @program(placements={"diloco": K})
    def f(x, w):
        xs = map_fn(fn=jnp.square, arg=broadcast(x=x))
        return reduce_sum(x=xs), reduce_mean(x=xs), weighted(x=xs, w=w)

    assert f(3.0, X) == (36.0, 9.0, 9.0)


@every_third
def test_none_in_arguments(mesh):
    @drjax.program(placements={"diloco": K})
    def f(x, extra):
        state = drjax.broadcast({"w": x, "extra": extra})
        out = drjax.map_fn(lambda s, a, none: {**s, "a": a}, (state, X, None))
        return drjax.reduce_sum(out)

    with in_mesh_of(mesh):
        result = jax.jit(f)(1.0, None)
    assert result == {"w": K, "extra": None, "a": X.sum()}


@every_third
def test_arithmetic_and_indexing_outside_map_fn(mesh):
    @drjax.program(placements={"diloco": K})
    def f(x, g):
        shifted = x + 1
        delta = drjax.broadcast(g) - shifted * 2
        first, last = x[0], x[-1]
        return (
            drjax.reduce_mean(g[None] - x),
            drjax.reduce_sum(delta),
            first * last,
            x[1],
        )

    def reference(x, g):
        return (g - x).mean(), (g - (x + 1) * 2).sum(), x[0] * x[-1], x[1]

    for args in ((X + 1, 0.5),):
        args = tuple(map(jnp.asarray, args))
        with in_mesh_of(mesh):
            result = (
                [f(*args), jax.jit(f)(*args)] if mesh is None else [jax.jit(f)(*args)]
            )
            grads = jax.jit(jax.grad(lambda *a: sum(f(*a)), (0, 1)))(*args)
        for y in result:
            np.testing.assert_allclose(y, reference(*args), rtol=1e-6)
        expected = jax.grad(lambda *a: sum(reference(*a)), (0, 1))(*args)
        for a, b in zip(grads, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@every_third
def test_closures_over_global_tracers_in_branches(mesh):
    @drjax.program(placements={"diloco": K})
    def f(state, step):
        def synchronise(state):
            mean = drjax.reduce_mean(state)
            return drjax.map_fn(lambda s: s * 0 + mean, state)

        state = lax.cond(step % 2 == 0, synchronise, lambda s: s, state)
        branches = [
            lambda s, i=i: drjax.map_fn(lambda a: a * i + step, s) for i in (1, 2)
        ]
        return lax.switch(step // 2, branches, state)

    with in_mesh_of(mesh):
        np.testing.assert_allclose(f(X, 3), 2 * X + 3)
        jitted, slopes = jax.jit(f), jax.jit(jax.grad(lambda x, i: f(x, i).sum()))
        for step in range(4):
            expected = np.full(K, X.mean()) if step % 2 == 0 else X
            expected = expected * (1 + step // 2) + step
            np.testing.assert_allclose(jitted(X, step), expected)
            slope = slopes(X, step)
            np.testing.assert_allclose(slope, np.full(K, 1.0 + step // 2))


# ---------------------------------------------------------------------------------
# DiLoCo, in the shape in which MaxText writes it (Douillard et al. 2023)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DiLoCoState:
    inner: Any
    params: Any
    outer_opt: Any
    step: Any

    replace = dataclasses.replace


def make_diloco(mesh, period, outer=None):
    outer = outer or optax.sgd(0.7, momentum=0.9, nesterov=True)

    def loss(params, batch):
        return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2)

    @drjax.program(placements={"diloco": K})
    def init(params):
        state = train_state.TrainState.create(
            apply_fn=None, params=params, tx=optax.adam(1e-2)
        )
        inner = drjax.broadcast(state, mesh=mesh)
        return DiLoCoState(inner, params, outer.init(params), state.step)

    def synchronise(state):
        copies = drjax.broadcast(state.params, mesh=mesh)
        delta = jax.tree.map(lambda x, y: y - x, state.inner.params, copies)
        updates, opt = outer.update(
            drjax.reduce_mean(delta), state.outer_opt, state.params
        )
        params = optax.apply_updates(state.params, updates)
        inner = drjax.map_fn(lambda s: s.replace(params=params), state.inner, mesh=mesh)
        return state.replace(params=params, outer_opt=opt, inner=inner)

    @drjax.program(placements={"diloco": K})
    def step(state, batch, key):
        def local(state, batch, key):
            noise = jax.random.normal(key, ()) * 0
            value, grads = jax.value_and_grad(loss)(state.params, batch)
            return state.apply_gradients(grads=grads), {"loss": value + noise}

        keys = drjax.broadcast(key, mesh=mesh)
        inner, metrics = drjax.map_fn(local, (state.inner, batch, keys), mesh=mesh)
        metrics = jax.tree.map(lambda x: x / K, drjax.reduce_sum(metrics))
        state = state.replace(inner=inner, step=inner.step[0])
        due = state.step % period == 0
        return lax.cond(due, synchronise, lambda s: s, state), metrics

    return init, step


@every_third
def test_a_diloco_outer_loop(mesh):
    rng = np.random.RandomState(0)
    w = rng.randn(3).astype(np.float32)
    xs = rng.randn(12, K, 5, 3).astype(np.float32)
    batches = list(zip(xs, xs @ w + 1, strict=True))
    start = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    devices = mesh and make_mesh(mesh)

    def train(on_blocks, context):
        with in_mesh(context):
            init, step = make_diloco(on_blocks, period=4)
            state, losses, step = jax.jit(init)(start), [], jax.jit(step)
            for batch in batches:
                state, metrics = step(state, batch, jax.random.key(0))
                losses.append(float(metrics["loss"]))
        return state, losses

    state, losses = train(None, devices)
    assert losses[-1] < losses[0] and state.step == 12
    for name in ("w", "b"):  # just synchronised: all replicas equal the global model
        inner = np.asarray(state.inner.params[name])
        np.testing.assert_array_equal(inner, np.stack([state.params[name]] * K))
    reference, expected = train(None, None)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(state.params["w"], reference.params["w"], rtol=1e-3)
    if devices is not None:  # mesh= on every block, and no context
        _, again = train(devices, None)
        np.testing.assert_allclose(again, expected, rtol=1e-4)


def test_diloco_over_nnx_state():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)

    @jax.jit
    @drjax.program(placements={"diloco": K})
    def round_(params, batch):
        def local(params, batch):
            loss = lambda p: jnp.mean((nnx.merge(graph, p)(batch[0]) - batch[1]) ** 2)
            return jax.tree.map(
                lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params)
            )

        return drjax.reduce_mean(drjax.map_fn(local, (drjax.broadcast(params), batch)))

    x = np.random.RandomState(1).randn(K, 5, 3).astype(np.float32)
    result = round_(params, (x, x.sum(-1, keepdims=True)))
    assert jax.tree.structure(result) == jax.tree.structure(params)
    nnx.update(model, result)


# ---------------------------------------------------------------------------------
# The paper: Rush et al. 2024, arXiv 2403.07128


def task_loss(model, task):
    return jnp.mean((jnp.sin(task[0] * model) - task[1]) ** 2)


def maml_loss(model, lr, task):  # Snippet 3
    adapted = model - lr * jax.grad(task_loss)(model, task)
    return task_loss(adapted, task)


@drjax.program(partition_size=3)
def parallel_maml_loss(model, lr, tasks):  # Snippet 4
    model_at_tasks = drjax.broadcast(model)
    lr_at_tasks = drjax.broadcast(lr)
    losses = drjax.map_fn(maml_loss, (model_at_tasks, lr_at_tasks, tasks))
    return drjax.reduce_mean(losses)


@jax.jit
def sequential_maml_loss(model, lr, tasks):
    losses = [maml_loss(model, lr, task) for task in zip(*tasks, strict=True)]
    return sum(losses) / 3


RNG = np.random.RandomState(0)
TASKS = tuple(RNG.randn(3, 4).astype(np.float32) for _ in range(2))
MODEL, LR = jnp.float32(0.7), jnp.float32(0.3)


def names(fn, *args):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).eqns]


def test_snippet_2_shows_each_block():
    @drjax.program(partition_size=3)
    def broadcast_double_and_sum(x):
        y = drjax.broadcast(x)
        z = drjax.map_fn(lambda a: 2 * a, y)
        return drjax.reduce_sum(z)

    assert broadcast_double_and_sum(1.0) == 6.0
    shown = names(broadcast_double_and_sum, jnp.float32(1))
    assert shown == ["drjax_broadcast", "drjax_map_fn", "drjax_reduce_sum"]
    text = str(jax.make_jaxpr(broadcast_double_and_sum)(jnp.float32(1)))
    assert "partition_size:3" in text and "mesh" not in text


def test_snippet_4_shows_broadcast_broadcast_map_reduce():
    assert names(parallel_maml_loss, MODEL, LR, TASKS) == [
        "drjax_broadcast", "drjax_broadcast", "drjax_map_fn", "drjax_reduce_mean",
    ]  # fmt: skip
    for mesh in (None, {"partition_size": 3}):
        with in_mesh_of(mesh):
            result = jax.jit(parallel_maml_loss)(MODEL, LR, TASKS)
        np.testing.assert_allclose(
            result, sequential_maml_loss(MODEL, LR, TASKS), rtol=1e-5
        )


def test_the_gradient_of_snippet_4_communicates_by_broadcast_and_reduce_only():
    argnums = (0, 1, 2)
    gradient = jax.grad(parallel_maml_loss, argnums)
    jaxpr = jax.make_jaxpr(gradient)(MODEL, LR, TASKS)
    assert not mixing_equations(jaxpr, [False, False, True, True])
    result = set(blocks(gradient, MODEL, LR, TASKS))
    assert result & COMMUNICATION == {"broadcast", "reduce_sum"}
    assert result - COMMUNICATION == {"map_fn"}
    expected = jax.jit(jax.grad(sequential_maml_loss, argnums))(MODEL, LR, TASKS)
    for mesh in (None, {"partition_size": 3}):
        with in_mesh_of(mesh):
            actual = jax.jit(gradient)(MODEL, LR, TASKS)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            actual, expected,
        )  # fmt: skip


@pytest.mark.slow
def test_snippet_7_tunes_its_own_learning_rate():
    @jax.jit
    def tune(model, lr, tasks):
        by_model, by_lr = jax.grad(parallel_maml_loss, argnums=(0, 1))(model, lr, tasks)
        return model - 0.1 * by_model, lr - 0.1 * by_lr

    model, lr = MODEL, LR
    loss = jax.jit(parallel_maml_loss)
    before = loss(model, lr, TASKS)
    for _ in range(20):
        model, lr = tune(model, lr, TASKS)
    assert loss(model, lr, TASKS) < before and lr != LR

    def after_one_round(lr):  # and through the optimizer's own step
        model, _ = tune(MODEL, lr, TASKS)
        return parallel_maml_loss(model, lr, TASKS)

    def reference(lr):
        gradient = jax.grad(sequential_maml_loss)(MODEL, lr, TASKS)
        return sequential_maml_loss(MODEL - 0.1 * gradient, lr, TASKS)

    np.testing.assert_allclose(
        jax.jit(jax.grad(after_one_round))(LR),
        jax.jit(jax.grad(reference))(LR),
        rtol=1e-4,
    )
