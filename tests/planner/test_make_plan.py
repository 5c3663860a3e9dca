"""What plans look like: rounds, messages, names, printing, and memory when compiled.

Covers: drjax._planner.make_plan, drjax._planner.arguments, drjax._planner.naming,
drjax._planner.rounds, drjax.plan, drjax._drawing.print_plan,
drjax._plan.value, drjax._plan.exchanges, drjax._plan.exported.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.compiled import sent_bytes
from drjax.plan import Columns, Cond, Program
from tests.helpers.cases import some
from tests.helpers.compiled import temp_bytes
from tests.helpers.maml import make_parallel_maml_loss, maml_args, task_loss
from tests.helpers.meshes import in_mesh, in_mesh_of, make_mesh

N = 16
program = drjax.program(clients=N)


def test_the_gradient_of_maml_is_one_round():
    plan = drjax.make_plan(jax.grad(make_parallel_maml_loss(N)))(*maml_args(N))
    (only,) = plan.rounds
    assert {v.name for v in only.broadcast} == {"model['a']", "model['b']", "lr"}
    assert [r.op for r in only.reduces] == ["sum", "sum"]
    assert {r.result.name for r in only.reduces} == {"result['a']", "result['b']"}
    assert only.local.name == "maml_loss" and not only.scatter and not only.loops
    text = str(plan)
    assert "parallel_maml_loss: a plan over partition clients:16 in 1 round" in text
    assert "each group computes  maml_loss" in text
    assert "-> result['a']" in text


@pytest.mark.parametrize("k", some([1, 2, 5], 1, 2, marks=pytest.mark.slow))
def test_k_dependent_reductions_are_k_rounds(k):
    @program
    def f(x):
        for _ in range(k):
            x = drjax.reduce_mean(drjax.map_fn(jnp.sin, drjax.broadcast(x)))
        return x

    plan = drjax.make_plan(f)(1.0)
    assert [len(r.reduces) for r in plan.rounds] == [1] * k


def test_independent_reductions_share_a_round():
    @program
    def f(x, data):
        y = drjax.map_fn(jnp.multiply, (drjax.broadcast(x), data))
        return drjax.reduce_sum(y), drjax.reduce_max(y), drjax.reduce_mean(data)

    (only,) = drjax.make_plan(f)(1.0, jnp.ones(N)).rounds
    assert sorted(r.op for r in only.reduces) == ["max", "mean", "sum"]


def test_the_ledger_counts_what_the_compiler_sends():
    args, fn = maml_args(N), jax.grad(make_parallel_maml_loss(N))
    ledger = drjax.make_plan(fn)(*args).communication(devices=8)
    assert ledger.down() == 2 * 8 * 8 * 4 + 4
    assert ledger.up() == ledger.reduced_per_device() == 2 * 8 * 8 * 4
    with in_mesh(make_mesh({"clients": 8})):
        report = drjax.collectives(drjax.jit(fn))(*args)
    reduced = ledger.reduced_per_device()
    assert [c.result_bytes for c in report.collectives] == [reduced]
    assert report.total.bytes == sent_bytes("all-reduce", reduced, 8) == reduced * 7 / 4
    assert "total: 516 bytes down and 512 up for each group" in str(ledger)


def test_the_ledger_is_of_one_device_or_more():
    plan = drjax.make_plan(program(drjax.reduce_sum))(jnp.ones((N, 3)))
    four: Any = np.int64(4)
    assert plan.communication(four).reduced_per_device() == 12
    wrong: Any = ((0, ValueError), (-1, ValueError), ("4", TypeError))
    for devices, kind in wrong:
        with pytest.raises(kind, match="communication needs") as caught:
            plan.communication(devices)
        assert isinstance(caught.value, drjax.DrjaxError)


def make_rounds(n: int, steps: int = 5):
    @drjax.program(clients=n)
    def rounds(model, data):
        def body(model, _):
            def local(model, x):
                grads = jax.grad(task_loss)(model, x)
                return jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)

            return drjax.reduce_mean(
                drjax.map_fn(local, (drjax.broadcast(model), data))
            ), None

        model, _ = jax.lax.scan(body, model, None, length=steps)
        return sum(jnp.sum(w**2) for w in jax.tree.leaves(model))

    return rounds


def test_loops_hold_plans_and_count_their_steps():
    model, _, data = maml_args(N)
    plan = drjax.make_plan(jax.grad(make_rounds(N)))(model, data)
    loops = [loop for r in plan.rounds for loop in r.loops]
    assert [(loop.op, loop.length, loop.reverse) for loop in loops] == [
        ("scan", 5, False), ("scan", 5, True),
    ]  # fmt: skip
    for loop in loops:  # what goes forward and back is global: nothing grows with n
        assert not any(v.partitioned for v in loop.outputs)
    ledger = plan.communication()
    assert ledger.up() == 2 * 5 * 2 * 8 * 8 * 4
    assert "scan of 5 steps, backwards" not in str(ledger)
    assert "scan_2 of 5 steps, backwards" in str(plan)


@pytest.mark.parametrize("kind", [Cond, Program, Columns])
def test_what_is_no_loop_of_steps_carries_nothing(kind):
    step = kind("a", (), (), ())
    assert (step.consts, step.carry) == ((), 0)
    assert (step.length, step.reverse, step.times) == (None, False, ())


def test_unknown_numbers_of_steps_stay_symbolic():
    @program
    def f(x):
        body = lambda x: drjax.reduce_mean(drjax.map_fn(jnp.sqrt, drjax.broadcast(x)))
        return jax.lax.while_loop(lambda x: x > 2.0, body, x)

    ledger = drjax.make_plan(f)(100.0).communication()
    assert ledger.open_loops == ("while",)
    assert "× while" in str(ledger) and "for one step of while" in str(ledger)


def test_a_function_without_blocks_is_the_servers_work():
    plan = drjax.make_plan(jnp.sin)(1.0)
    assert plan.partition is None and plan.rounds == ()
    assert "calls no building block" in str(plan)
    assert str(plan.communication()).endswith("reduced per device")
    assert drjax.jit(jnp.sin)(1.0) == jnp.sin(1.0)


def test_check_shows_kinds_and_place():
    fn, args = make_parallel_maml_loss(10), maml_args(10)
    text = str(drjax.check(fn)(*args))
    assert "model['a']  float32[8,8]     global" in text
    assert "tasks       float32[10,4,8]  partitioned" in text
    assert "run locally" in text
    with in_mesh_of({"clients": 4}):
        text = str(drjax.check(fn)(*args))
    assert "on mesh axis 'clients' of 4 devices with 3 groups each at most" in text


# ---------------------------------------------------------------------------------
# Memory and collectives of what is compiled


def placed(data):
    return drjax.shard(data, partition={"clients": len(data)})


PROGRAMS = {
    "maml": lambda n: (
        jax.value_and_grad(make_parallel_maml_loss(n)),
        maml_args(n, 64),
    ),
    "crossing": lambda n: (
        jax.grad(lambda *a: jnp.log(make_parallel_maml_loss(n)(*a))),
        maml_args(n, 64),
    ),
    "rounds": lambda n: (jax.value_and_grad(make_rounds(n)), maml_args(n, 64)[::2]),
}


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("rounds", {"clients": 8}),
        pytest.param("maml", None, marks=pytest.mark.slow),
        pytest.param("crossing", {"clients": 8}, marks=pytest.mark.slow),
        pytest.param("maml", {"clients": 8}, marks=pytest.mark.slow),
        pytest.param("crossing", None, marks=pytest.mark.slow),
        pytest.param("rounds", None, marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_groups(name, mesh):
    devices = 1 if mesh is None else 8
    with in_mesh_of(mesh):  # one group a device would need no accumulators
        few, many = (
            temp_bytes(drjax.jit(fn, groups_per_step=1), *rest, placed(data))
            for fn, (*rest, data) in map(PROGRAMS[name], (8 * devices, 64 * devices))
        )
        # Four bytes for the index of each group of the device.
        assert many <= 1.01 * few + 4 * 64


@pytest.mark.slow
def test_stored_residuals_do_grow():
    sizes = [
        temp_bytes(drjax.jit(fn, groups_per_step=1, residuals="store"), *args)
        for fn, args in map(PROGRAMS["rounds"], (8, 128))
    ]
    assert sizes[1] > 4 * sizes[0]


def test_one_all_reduce_for_each_round():
    with in_mesh_of({"clients": 8}):
        for name, rounds in (("maml", 1), ("crossing", 2), ("rounds", 2)):
            fn, args = PROGRAMS[name](N)
            report = drjax.collectives(drjax.jit(fn, groups_per_step=1))(*args)
            assert report.counts == {"all-reduce": rounds}, name


def test_jit_options():
    fn, args = make_parallel_maml_loss(N), maml_args(N)
    expected = jax.jit(fn)(*args)

    def scaled(scale, *args, factor):
        return scale * factor * fn(*args)

    step = drjax.jit(
        scaled, groups_per_step=3, static_argnums=0, static_argnames="factor"
    )
    np.testing.assert_allclose(step(2, *args, factor=3), 6 * expected, rtol=1e-6)
    model = jax.tree.map(jnp.copy, args[0])
    grads = drjax.jit(jax.grad(fn), donate_argnums=0)(model, *args[1:])
    assert all(x.is_deleted() for x in jax.tree.leaves(model))
    assert not any(x.is_deleted() for x in jax.tree.leaves(grads))
    lowered = drjax.jit(fn).lower(*args).compile()
    np.testing.assert_allclose(lowered(*args), expected, rtol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("n", [10, 3])
def test_sizes_that_do_not_divide(n):
    fn, args = jax.value_and_grad(make_parallel_maml_loss(n)), maml_args(n)
    expected = jax.jit(fn)(*args)
    with in_mesh_of({"clients": 8}):
        result = drjax.jit(fn, groups_per_step=1)(*args)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, result, expected)


@pytest.mark.parametrize(
    "options, error, text",
    [
        (
            {"groups_per_step": 0},
            drjax.DrjaxValueError,
            "one in groups_per_step",
        ),
        (
            {"groups_per_step": 1.5},
            drjax.DrjaxTypeError,
            "int, .auto., .tune. or None",
        ),
        ({"residuals": "keep"}, drjax.DrjaxValueError, '"recompute" or "store"'),
    ],
)
def test_wrong_options(options, error, text):
    with pytest.raises(error, match=text):
        drjax.jit(lambda x: x, **options)


def test_a_refused_program_says_why_and_still_runs():
    mixed = program(lambda x: jnp.prod(drjax.map_fn(jnp.sin, x)))
    x = jnp.ones(N)
    with pytest.raises(drjax.PlanError, match="combine the groups with drjax.reduce"):
        drjax.jit(mixed)(x)
    np.testing.assert_allclose(jax.jit(mixed)(x), np.sin(1.0) ** N, rtol=1e-6)


def test_errors_name_the_group():
    @program
    def f(x):
        def check(a):
            assert a != 3, "three is odd"
            return np.asarray(a, np.float32)

        shape = jax.ShapeDtypeStruct((), jnp.float32)
        call = lambda a: jax.pure_callback(check, shape, a, vmap_method="sequential")
        return drjax.reduce_sum(drjax.map_fn(lambda a: jnp.log(a - 5.0), x)), (
            drjax.reduce_sum(drjax.map_fn(call, x))
        )

    x = jnp.arange(float(N))
    plan = drjax.make_plan(f)(x)
    with pytest.raises(drjax.backends.reference.GroupError, match="Group 3 failed"):
        drjax.backends.reference.compile(plan)(x)
    with pytest.raises(drjax.backends.reference.GroupError) as caught:
        drjax.backends.reference.compile(plan, check_nans=True)(x)
    assert caught.value.group == 0 and "yields NaN" in str(caught.value)
    assert caught.value.inputs[1] == 0.0


def test_planned_in_a_jit_that_the_function_closes_over():
    """What it closes over is traced: no constant that the planner could evaluate."""
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)

    def planned(scale, i):
        @drjax.program(clients=4)
        def fn(x):
            slices = drjax.map_fn(jnp.sin, x * jnp.exp(scale))
            return drjax.reduce_sum(slices[jnp.arange(4), i])

        return drjax.backends.xla.compile(drjax.make_plan(fn)(x))(x)

    got = jax.jit(planned)(jnp.float32(0.5), jnp.array([0, 2, 1, 1]))
    expected = np.sin(x * np.exp(0.5))[np.arange(4), [0, 2, 1, 1]].sum()
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.slow
def test_plans_from_types_alone(tmp_path):
    """`jax.ShapeDtypeStruct`s instead of arrays, in trees and for keys, too."""

    def train(state, data, key):
        def work(model, x, key):
            noise = jax.random.normal(
                jax.random.fold_in(key, drjax.partition_index()), model.shape
            )
            return model + 0.1 * jnp.tanh(x @ model) @ x + noise

        operands = drjax.broadcast(state["model"]), data["x"], drjax.broadcast(key)
        models = drjax.map_fn(work, operands)
        return {"model": drjax.reduce_mean(models), "step": state["step"] + 1}

    args = (
        {"model": jnp.ones(3), "step": jnp.int32(2)},
        {"x": jnp.arange(N * 12.0).reshape(N, 4, 3) / 50},
        jax.random.key(0),
    )
    kinds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    plan = drjax.make_plan(program(train))(*kinds)
    assert str(plan) == str(drjax.make_plan(program(train))(*args))
    plan.save(tmp_path / "train.drjax")
    expected = program(train)(*args)
    for each in (plan, drjax.load_plan(tmp_path / "train.drjax")):
        result = drjax.backends.reference.compile(each)(*args)
        np.testing.assert_allclose(result["model"], expected["model"], rtol=1e-5)
        assert result["step"] == 3
    # Data that fits no machine: 40 TB.
    huge = drjax.program(clients=10**6)(lambda x: drjax.reduce_mean(jnp.sin(x)))
    plan = drjax.make_plan(huge)(jax.ShapeDtypeStruct((10**6, 10**7), jnp.float32))
    assert plan.communication(devices=64).reduced_per_device() == 4 * 10**7


# Programs, and the value that each of their reductions communicates.
OF_LIBRARY = {
    "sum of integers": (lambda x, m: drjax.reduce_sum(x > 0), ["gt_2"]),
    "sum of some": (lambda x, m: drjax.reduce_sum(x, where=m), ["x_2"]),
    "mean of some": (lambda x, m: drjax.reduce_mean(x, where=m), ["m_2", "x_2"]),
    "mean of a map": (
        lambda x, m: drjax.reduce_mean(drjax.map_fn(jnp.sin, x), where=m),
        ["m_2", "sin_2"],
    ),
    "by segment": (
        lambda x, m: drjax.reduce_max(x, by=m.astype(int), num=2), ["x_2"]
    ),
    "weighted": (lambda x, m: drjax.reduce_weighted_mean(x, m), ["m_2", "x_2"]),
    "fold": (lambda x, m: drjax.reduce(jnp.add, x, 0.0, where=m), ["x_2"]),
    "select": (lambda x, m: drjax.select(x, 1), ["x_2"]),
    "argmax": (lambda x, m: drjax.reduce_argmax(x), ["x_2", "reduce_argmax"]),
    "wire": (lambda x, m: drjax.reduce_sum([x, x], wire="int8"), ["wire"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_LIBRARY)
def test_values_of_the_librarys_functions_have_the_users_names(name):
    """Not those of its own functions, nor of casts that it makes."""
    fn, expected = OF_LIBRARY[name]
    args = jnp.ones((N, 3)), jnp.arange(N) > 3
    plan = drjax.make_plan(program(fn))(*args)
    up = [m.value.name for m in plan.communication().messages if not m.down]
    assert up == expected
    assert "drjax." not in str(plan)


def test_stages_have_the_names_of_what_was_called():
    fn = lambda x, m: drjax.reduce_mean(drjax.map_fn(jnp.sin, x), where=m)
    plan = drjax.make_plan(program(fn))(jnp.ones((N, 3)), jnp.arange(N) > 3)
    assert plan.rounds[0].local.name == "sin + reduce_mean"


def test_the_server_returns_only_what_others_read():
    scale = np.arange(3, dtype=np.float32)

    @drjax.program(clients=4)
    def program(x):
        mean = drjax.reduce_mean(x)
        sent = jnp.sin(mean) * scale + jnp.cos(mean)
        kept = jnp.exp(mean)
        total = drjax.reduce_sum(drjax.map_fn(jnp.multiply, (drjax.broadcast(sent), x)))
        return total * jnp.tanh(kept)

    plan = drjax.make_plan(program)(np.ones((4, 3), np.float32))
    first, second = (a_round.server for a_round in plan.rounds)
    assert first.empty
    # What is sent, and what the last stage reads; intermediates and constants stay.
    assert len(second.outputs) == 2
    assert {v.name for v in second.outputs} >= {v.name for v in plan.server.inputs} - {
        v.name for a_round in plan.rounds for v in a_round.combined
    }
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    run = drjax.backends.reference.compile(plan)
    np.testing.assert_allclose(run(x), program(x), 1e-6)
