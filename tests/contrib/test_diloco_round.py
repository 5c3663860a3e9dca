"""A round of `drjax.contrib.diloco` against a loop over steps and workers.

Covers: drjax.contrib.diloco.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import drjax
from drjax.compiled import Report, read_hlo
from drjax.contrib import diloco
from tests.helpers.compiled import hlo_text
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
    params: dict[str, Any] = {
        "blocks": {"w": jnp.linspace(-1, 1, 20).reshape(4, 5), "b": jnp.ones((4, 1))},
        "embed": jnp.linspace(0, 1, 5),
        "calls": 0,  # no float: each worker has its own
    }
    floats = {"blocks": params["blocks"], "embed": params["embed"]}
    return {"params": params, "opt": ADAM.init(floats), "key": jax.random.key(1)}


def step(state, batch):
    params = dict(state["params"])
    calls = params.pop("calls")
    # A draw of JAX in each loop over steps takes most of the time to compile.
    bits = jax.random.key_data(state["key"])[-1] + calls.astype(jnp.uint32)
    noise = jnp.sin(jnp.arange(5.0) + bits % 1009)

    def loss(params):
        x = jnp.tanh(params["blocks"]["w"] * (batch + 0.1 * noise)[None])
        x = x + params["blocks"]["b"]
        return jnp.mean((x - params["embed"][None]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt = ADAM.update(grads, state["opt"])
    new: Any = optax.apply_updates(params, updates)
    new["calls"] = calls + 1
    return {"params": new, "opt": opt, "key": state["key"]}, {"loss": value}


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
                slices = {
                    j: slice(None) if x is None else list(x) for j, x in leaves.items()
                }
                received = (p + 1) * H // P
                if t == received - delay:
                    change = {
                        j: [theta[j][x] - get(worker)[j][x] for worker in workers]
                        for j, x in slices.items()
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
                        x = slices[j]
                        momentum[j][x] = g + MOMENTUM * momentum[j][x]
                        theta[j][x] -= RATE * (g + MOMENTUM * momentum[j][x])
                    for i in range(K):
                        own = get(workers[i])
                        for j, x in slices.items():
                            mixed = mixing * own[j][x] if mixing else 0
                            own[j][x] = mixed + (1 - mixing) * theta[j][x]
                        workers[i] = put(workers[i], own)
        pairs = zip(alive, workers, before, strict=True)
        workers = [new if present else with_theta(old) for present, new, old in pairs]
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


@pytest.mark.sampled
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


# ---------------------------------------------------------------------------------
# Devices


def exact_step(state, batch):
    """Sums of small integers: exact in any order."""
    new = {name: x - batch for name, x in state["params"].items()}
    return {"params": new, "seen": state["seen"] + 1}, {"norm": batch.sum()}


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit], ids=["jax.jit", "drjax.jit"])
@pytest.mark.parametrize("name", ["one", "mixed", "away", "weighted"])
def test_where_sums_are_exact_bits_do_not_depend_on_devices(name, jit):
    settings: dict[str, Any] = {
        "one": {},
        "mixed": dict(fragments=2, delay=2, mixing=0.5),
        "away": dict(fragments=2),
        "weighted": dict(delay=1, drop_diverged=True),
    }[name]
    round_ = diloco.Round(exact_step, 8, outer=optax.sgd(0.5), **settings)
    draw = np.random.default_rng(0).integers
    batches = jnp.asarray(draw(-8, 8, (8, H, 4)).astype(np.float32))
    members: dict[str, Any] = {
        "away": dict(where=jnp.arange(8) % 2 == 0),
        "weighted": dict(weights=jnp.array([1, 2, 0, 1, 2, 0, 1, 1])),
    }.get(name, {})
    states = []
    for mesh in (None, {"workers": 1}, {"workers": 2}, {"workers": 8}):
        with in_mesh_of(mesh):
            params = {"a": jnp.zeros(4), "b": jnp.ones(4)}
            state, run_round = round_.init({"params": params, "seen": 0}), jit(round_)
            for _ in range(2):
                state, metrics = run_round(state, batches, **members)
            states.append(jax.device_get((state, metrics)))
    for other in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, states[0], other)


def test_temporary_memory_does_not_grow_with_the_workers_of_a_device():
    def temporary(workers):
        width, slices = 64, 16

        def step(state, batch):
            loss = lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2)
            value, grads = jax.value_and_grad(loss)(state["params"])
            return {"params": state["params"] - 0.1 * grads}, value

        round_ = diloco.Round(step, workers)
        state = jax.eval_shape(round_.init, {"params": jnp.zeros((width, width))})
        batches = jax.ShapeDtypeStruct((workers, H, slices, width), jnp.float32)
        run = drjax.jit(round_, groups_per_step=1)
        compiled = run.lower(state, batches).compile()
        return Report.of(compiled).temp_bytes

    few, many = temporary(2), temporary(64)
    assert many < 1.2 * few


def test_a_kernel_without_a_rule_of_vmap_runs_with_one_worker_on_a_device():
    @jax.custom_batching.custom_vmap
    def kernel(x):
        return 2 * x

    @kernel.def_vmap
    def refuse(size, batched, x):
        raise NotImplementedError("vmap of the kernel")

    def step(state, batch):
        return {"params": state["params"] - kernel(batch)}, kernel(batch)

    settings: dict[str, Any] = dict(fragments=1, delay=1, mixing=0.5)
    round_ = diloco.Round(step, 8, outer=optax.sgd(1.0), **settings)
    batches, present = jnp.ones((8, H, 3)), jnp.arange(8) > 2
    with in_mesh_of({"workers": 8}):
        state = round_.init({"params": jnp.zeros(3)})
        state, metrics = jax.jit(round_)(state, batches, present)
    np.testing.assert_array_equal(state.params, np.full(3, -2.0 * (H - 1)))
    assert metrics.shape == (8, H, 3)


def test_a_fragment_is_reduced_once_and_nothing_else_is_sent():
    parts = of_blocks(3, scanned="blocks", apart="embed")
    round_ = diloco.Round(step, K, fragments=parts, delay=1, mixing=0.5)
    with in_mesh_of({"workers": K}):
        state = round_.init(first_state())
        compiled = read_hlo(hlo_text(round_, state, jnp.asarray(BATCHES[0])))
        plan = drjax.make_plan(round_)(state, jnp.asarray(BATCHES[0]))
    assert {x.kind for x in compiled} == {"all-reduce"}
    sizes = [part.bytes for part in parts.parts]
    assert sorted(x.result_bytes for x in compiled) == sorted(sizes)
    assert plan.communication(devices=K).reduced_per_device() == sum(sizes)


@pytest.mark.once
@pytest.mark.parametrize("jit", [jax.jit, drjax.jit], ids=["jax.jit", "drjax.jit"])
@pytest.mark.parametrize("members", [{}, {"where": jnp.array(AWAY[0])}])
def test_numbers_in_few_bits_are_those_of_one_exchange(jit, members, monkeypatch):
    """In two legs behind the delay, but for the rounding of other loops over steps.

    bfloat16 has no blocks, which legs would cut elsewhere. With members that are away,
    a sum is divided by their number before it is rounded in the second leg, else after.
    """
    settings: dict[str, Any] = dict(fragments=2, delay=3, mixing=0.5, wire="bfloat16")
    results = []
    for divided in (True, False):
        if not divided:
            monkeypatch.setattr(diloco, "is_divided", lambda partition: False)
        round_ = diloco.Round(step, K, **settings)
        with in_mesh_of({"workers": 2, "model": 2}):
            state = round_.init(first_state())
            args = state, jnp.asarray(BATCHES[0])
            compiled = jit(round_).lower(*args, **members).compile()
            new, metrics = compiled(*args, **members)
            results.append((new.theta, new.outer, new.workers["opt"], metrics))
            sent = read_hlo(compiled.as_text(), {"workers": 2, "model": 2})
        kinds = [x.kind for x in sent if x.axes == ("workers",)]
        assert kinds.count("all-to-all") == kinds.count("all-gather") > 0
    for pair in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(*pair, rtol=2**-7 if members else 1e-6, atol=1e-7)


@pytest.mark.once
@pytest.mark.parametrize("jit", [jax.jit, drjax.jit], ids=["jax.jit", "drjax.jit"])
def test_chips_of_a_worker_divide_what_it_sends(jit):
    """Leaves that they divide evenly, along any axis, or not; values are as on one.

    Shards of some have whole registers of 128 numbers.
    """
    shapes = {"lead": (8, 3), "columns": (3, 12), "odd": (3, 5), "one": (), "v": (4,)}
    shapes |= {"lanes": (2, 512), "of lead": (512, 3, 128), "not": (4, 128)}
    random = np.random.default_rng(0)
    params = {x: jnp.asarray(random.normal(size=s)) for x, s in shapes.items()}

    def step(state, batch):
        move = lambda x: x * batch
        return {"params": jax.tree.map(move, state["params"])}, batch

    batches = jnp.asarray(random.uniform(0.9, 1.1, size=(K, 8)))
    settings: dict[str, Any] = dict(fragments=2, delay=4, mixing=0.5)
    exact, _ = jax.jit(diloco.Round(step, K, **settings))(
        diloco.Round(step, K, **settings).init({"params": params}), batches
    )
    for wire, rtol in (("bfloat16", 2**-7), ("int8", 2**-6)):
        round_ = diloco.Round(step, K, wire=wire, **settings)
        with in_mesh_of({"workers": 2, "model": 4}):
            new, _ = jit(round_)(round_.init({"params": params}), batches)
        for x, y in zip(*map(jax.tree.leaves, (new.theta, exact.theta)), strict=True):
            np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * 0.3)


def test_a_plan_of_diloco_is_one_round_that_takes_its_steps_once():
    round_ = diloco.Round(step, K)
    state = round_.init(first_state())
    plan = drjax.make_plan(round_)(state, jnp.asarray(BATCHES[0]))
    assert len(plan.rounds) == 1


@pytest.mark.once
def test_a_plan_of_a_round_computes_it():
    round_ = diloco.Round(step, K, fragments=2, delay=1, mixing=0.5)
    state = round_.init(first_state())
    args = state, jnp.asarray(BATCHES[0][:, :4]), jnp.array(AWAY[0])
    plan = drjax.make_plan(round_)(*args)
    got = jax.tree.leaves(drjax.backends.reference.compile(plan)(*args))
    for x, y in zip(got, jax.tree.leaves(jax.jit(round_)(*args)), strict=True):
        close(x, y)


@pytest.mark.once
def test_a_round_has_a_derivative_by_what_the_outer_optimizer_closes_over():
    def step(state, batch):
        params = state["params"]
        loss = lambda params: jnp.mean((params["a"] * batch - params["b"]) ** 2)
        value, grads = jax.value_and_grad(loss)(params)
        new = jax.tree.map(lambda x, g: x - 0.2 * g, params, grads)
        return {"params": new}, {"loss": value}

    @jax.jit
    def loss(rate, mixing):
        outer = optax.sgd(rate, momentum=0.9, nesterov=True)
        options: Any = dict(outer=outer, fragments=2, delay=1, mixing=mixing)
        round_ = diloco.Round(step, K, **options)
        state = round_.init({"params": {"a": jnp.ones(5), "b": jnp.zeros(5)}})
        _, metrics = jax.lax.scan(round_, state, jnp.asarray(BATCHES[:2, :, :4]))
        return metrics["loss"][-1].mean()

    point = 0.5, 0.25
    slopes = jax.grad(loss, (0, 1))(*point)
    for i, slope in enumerate(slopes):
        step_by = lambda h, i=i: loss(*(x + h * (i == j) for j, x in enumerate(point)))
        numeric = (step_by(1e-2) - step_by(-1e-2)) / 2e-2
        np.testing.assert_allclose(slope, numeric, rtol=0.02)


# ---------------------------------------------------------------------------------
# Members


def test_a_worker_that_diverges_does_not_count_and_returns():
    """Its numbers are not finite in the second round only."""
    round_ = diloco.Round(step, K, fragments=2, mixing=0.5, drop_diverged=True)
    run, state = jax.jit(round_), round_.init(first_state())
    broken = jnp.asarray(BATCHES[1]).at[2, 1].set(jnp.nan)
    state, _ = run(state, jnp.asarray(BATCHES[0]))
    after, metrics = run(state, broken)
    # The first fragment was sent before it diverged, the second one after.
    assert np.isnan(metrics["loss"][2, 1:]).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))
    own = lambda tree: jax.tree.map(lambda x: x[2], tree)
    close(
        own(after.workers["opt"])[0].mu["embed"],
        own(state.workers["opt"])[0].mu["embed"],
    )
    for name in ("w", "b"):
        close(
            own(after.workers["params"])["blocks"][name], after.params["blocks"][name]
        )
    assert after.workers["params"]["calls"].tolist() == [2 * H, 2 * H, H, 2 * H]
    _, metrics = run(after, jnp.asarray(BATCHES[2]))
    assert np.isfinite(metrics["loss"]).all()


def test_a_worker_without_weight_may_have_any_numbers():
    round_ = diloco.Round(step, K)
    batches = jnp.asarray(BATCHES[0]).at[1].set(jnp.nan)
    weights = jnp.array([1.0, 0.0, 2.0, 1.0])
    state, _ = jax.jit(round_)(round_.init(first_state()), batches, weights=weights)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


# ---------------------------------------------------------------------------------
# Special cases of the algorithm


def test_h_of_one_and_sgd_is_data_parallel_training():
    def step(params, batch):
        loss = lambda w: jnp.mean((w @ batch - 1.0) ** 2)
        return params - jax.grad(loss)(params), ()

    outer, w = optax.adam(0.1), jnp.linspace(-1, 1, 10).reshape(2, 5)
    round_ = diloco.Round(step, K, outer=outer, params=lambda state: state)
    state, opt = round_.init(w), outer.init(w)
    run = jax.jit(round_)
    for t in range(4):
        batches = jnp.asarray(BATCHES[0][:, t : t + 1])
        state, _ = run(state, batches)
        loss = lambda w, x=batches: jnp.mean((w @ x[:, 0].T - 1.0) ** 2)
        updates, opt = outer.update(jax.grad(loss)(w), opt)
        w = optax.apply_updates(w, updates)
    close(state.params, w)


# ---------------------------------------------------------------------------------
# What cannot be


ROUND = diloco.Round(step, K, fragments=2, delay=1)


def refused(text, *args, error: Any = drjax.DrjaxValueError, round_=ROUND, **kwargs):
    state = round_.init(first_state())
    with pytest.raises(error, match=text):
        jax.jit(round_)(state, *args, **kwargs)


def test_batches_of_another_shape():
    good = jnp.asarray(BATCHES[0])
    refused(r"\[k, H, \.\.\.\], .* k = 4 .*, batches: \(3, 6, 5\)\.", good[:3])
    refused(r", batches\['y'\]: \(4,\)\.", {"x": good, "y": jnp.ones(4)})
    refused(r", batches\['y'\]: \(4, 5\)\.", {"x": good, "y": jnp.ones((4, 5))})
    refused(r"got H = 0, P = 2, delay = 1\.", {})
    refused(r"got H = 0, P = 2, delay = 1\.", good[:, :0])


@pytest.mark.parametrize(
    "settings", [dict(fragments=3, delay=3), dict(fragments=7), dict(delay=7)]
)
def test_a_delay_or_fragments_that_a_round_has_no_steps_for(settings):
    parts = dict(fragments=2) | settings
    if parts["fragments"] == 7:
        parts["fragments"] = of_blocks(5, scanned="blocks")
    round_ = diloco.Round(step, K, **parts)
    batches = jnp.asarray(BATCHES[0][:, :4])
    P = 5 if settings.get("fragments") == 7 else parts["fragments"]
    refused(f"got H = 4, P = {P}", batches, round_=round_)


def test_members_of_the_wrong_type_or_shape():
    batches = jnp.asarray(BATCHES[0])
    refused("where= as bool", batches, jnp.ones(K), error=drjax.DrjaxTypeError)
    refused(r"where= as bool \[4\].* got shape \(3,\)", batches, jnp.ones(3, bool))
    refused(r"leading axis", batches, weights=jnp.ones(5))


@pytest.mark.parametrize(
    "name, value, what",
    [
        ("step", 3, "a function"),
        ("params", "params", "a function"),
        ("outer", 0.7, "an optimizer of optax"),
        ("delay", -1, "a number of steps"),
        ("delay", 1.5, "a number of steps"),
        ("mixing", 1.5, "a share from 0 to 1"),
    ],
)
def test_settings_that_cannot_be(name, value, what):
    settings: dict[str, Any] = dict(step=step, workers=K) | {name: value}
    with pytest.raises(drjax.DrjaxValueError, match=f"{name}=.* needs {what}.* got "):
        diloco.Round(**settings)


def test_fragments_of_other_parameters():
    other = diloco.fragments({"w": jnp.ones(3)})
    with pytest.raises(drjax.DrjaxValueError, match="got those of others"):
        diloco.Round(step, K, fragments=other).init(first_state())
    with pytest.raises(drjax.DrjaxValueError, match="at most 3, .* got 4"):
        diloco.Round(step, K, fragments=4).init(first_state())


def test_parameters_that_are_not_found():
    with pytest.raises(drjax.DrjaxTypeError, match="a tuple that has neither"):
        diloco.Round(step, K).init((jnp.ones(2), jnp.ones(2)))
    double = diloco.Round(step, K, params=lambda x: jax.tree.map(jnp.sin, x["opt"]))
    with pytest.raises(drjax.DrjaxValueError, match=r"as they are, got another at p"):
        double.init(first_state())
    with pytest.raises(drjax.DrjaxValueError, match="at most 0"):
        diloco.Round(step, K).init({"params": {}})


def test_a_step_that_returns_other_types():
    def other(state, batch):
        return {**state, "key": jnp.zeros(2)}, batch

    refused(
        "key", jnp.asarray(BATCHES[0]), error=TypeError, round_=diloco.Round(other, K)
    )
    half = lambda state, x: (jax.tree.map(lambda x: x.astype(jnp.float16), state), x)
    round_ = diloco.Round(half, K)
    with pytest.raises(TypeError, match=r"params.*float32.*float16"):
        round_(round_.init({"params": {"w": jnp.ones(3)}}), jnp.ones((K, H)))
