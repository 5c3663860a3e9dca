"""Results that stay with their groups until the next call, and their handles.

Covers: drjax.engines.slices.kept, drjax.backends.xla.kept_run,
drjax.engines.core.kept_results.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import Kept, in_process, reference, xla
from drjax.engines.slices.kept import Keep
from tests.helpers import kept_programs as programs
from tests.helpers.conformance import runs
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh
from tests.helpers.raising import raises

N = 8


def same(a, b):
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    jax.tree.map(close, a, b)


def fetched(tree):
    """With arrays in the place of handles."""
    return jax.tree.map(lambda x: x.fetch() if isinstance(x, Kept) else x, tree)


COMPILERS = [reference.compile, xla.compile, in_process.compile]


@pytest.mark.sampled
@pytest.mark.parametrize("compile", COMPILERS)
def test_scaffold(compile):
    plan, data = programs.scaffold_plan(N), programs.data(N)
    start = programs.scaffold_start(N)
    kept = compile(plan, keep=programs.SCAFFOLD_KEEP)
    state = programs.run_scaffold(kept, start, 3, data)
    assert isinstance(state[2], Kept) and repr(state[2]) == "Kept(argument 2)"
    expected = programs.run_scaffold(reference.compile(plan), start, 3, data)
    same(fetched(state), expected)
    assert np.ptp(expected[2]) > 0.1


@pytest.mark.sampled
@pytest.mark.parametrize("compile", COMPILERS)
def test_diloco(compile, tmp_path):
    plan, data = programs.diloco_plan(N), programs.data(N)
    plan.save(tmp_path / "diloco.drjax")
    start = programs.diloco_start(N)
    expected = programs.run_diloco(reference.compile(plan), start, 3, data)
    for each in (plan, drjax.load_plan(tmp_path / "diloco.drjax")):
        run = compile(each, keep=programs.DILOCO_KEEP)
        state = programs.run_diloco(run, start, 3, data)
        assert isinstance(state["inner"], Kept)
        same(fetched(state), expected)


def test_all_of_the_result_and_keywords():
    @drjax.program(clients=3)
    def count(*, total):
        return drjax.map_fn(lambda x: {"n": x["n"] + 1}, total)

    start = {"n": np.zeros(3, np.float32)}
    plan = drjax.make_plan(count)(total=start)
    run = reference.compile(plan, keep={(): "total"})
    assert (run(total=run(total=start)).fetch()["n"] == 2).all()
    run = xla.compile(plan, keep={"n": ("total", "n")})
    total = run(total=run(total=start))
    assert isinstance(total["n"], Kept) and (total["n"].fetch() == 2).all()


def test_slices_along_another_axis():
    @drjax.program(clients=4)
    def double(x):
        return jax.vmap(lambda x: drjax.map_fn(lambda x: 2 * x, x), 1, 1)(x)

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    plan = drjax.make_plan(double)(x)
    for compile in COMPILERS:
        run = compile(plan, keep={(): 0})
        np.testing.assert_array_equal(run(run(x)).fetch(), 4 * x)


def test_64_bit_slices_are_fetched_in_their_precision():
    fine = np.arange(4) + 2.0**-40
    double = drjax.program(clients=4)(lambda x: drjax.map_fn(lambda x: 2 * x, x))
    with jax.enable_x64(True):
        plan = drjax.make_plan(double)(fine)
    result = in_process.compile(plan, keep={(): 0})(fine).fetch()
    assert result.dtype == np.float64
    np.testing.assert_array_equal(result, 2 * fine)


# ---------------------------------------------------------------------------------
# Handles


@pytest.mark.sampled
@pytest.mark.parametrize("compile", COMPILERS)
def test_handles_that_cannot_be_used(compile):
    plan, data = programs.scaffold_plan(N), programs.data(N)
    run, other = (compile(plan, keep=programs.SCAFFOLD_KEEP) for _ in range(2))
    model, control, first = run(*programs.scaffold_start(N), data)
    *_, second = run(model, control, first, data)
    text = (
        "Kept(argument 2) was passed to an earlier call, which replaced its slices. "
        "Pass the handle that the latest call of scaffold returned."
    )
    raises(drjax.DrjaxValueError, text, run, model, control, first, data)
    raises(drjax.DrjaxValueError, text, first.fetch)
    text = "Kept(argument 2) is of another compile() than this one of scaffold"
    raises(drjax.DrjaxValueError, text, other, model, control, second, data)
    text = "was passed to scaffold in another place. Pass it as argument 2."
    raises(drjax.DrjaxValueError, text, run, model, second, second, data)
    plain = compile(plan)
    raises(drjax.DrjaxError, "Kept(argument 2) is", plain, model, control, second, data)
    text = "is a handle of slices that stay with their groups, not an array"
    for convert in (np.asarray, jnp.asarray):
        raises(drjax.DrjaxTypeError, text, convert, second)
    run(model, control, second, data)  # which is still valid after all of these


@pytest.mark.parametrize("compile", COMPILERS)
def test_a_handle_survives_a_call_that_raises(compile):
    plan, data = programs.scaffold_plan(N), programs.data(N)
    run = compile(plan, keep=programs.SCAFFOLD_KEEP)
    model, control, kept = run(*programs.scaffold_start(N), data)
    text = "was planned for model of shape (6,), got (2,)"
    raises(drjax.DrjaxValueError, text, run, np.zeros(2), control, kept, data)
    raises(drjax.DrjaxTypeError, "of structure", run, model, control)
    run(model, control, kept, data)


def test_what_cannot_be_kept():
    plan = programs.scaffold_plan(N)
    global_value = "is a global value, which the server has"
    cases = [
        ({0: 2}, global_value),
        ({2: 0}, global_value),
        ({5: 2}, "keep= has result 5 of scaffold, but in its place there is no 5"),
        ({2: 9}, "keep= has argument 9 of scaffold"),
        ({2: "controls"}, "argument controls of scaffold"),
        ({(): 2}, "of the same structure"),
        ({2: (3, 0)}, "is not of the type of the argument data[0]"),
        ({(2, "w"): 2}, "no 'w', only a single array"),
        ({2: 2, (2,): (2,)}, "different results and different arguments"),
    ]
    for keep, text in cases:
        raises(drjax.DrjaxValueError, text, Keep, plan, keep)
    for compile in COMPILERS:
        text = "keep= needs a dict from results to arguments"
        raises(
            drjax.DrjaxTypeError, text, lambda c=compile: c(plan, keep=[2])
        )  # fmt: skip


def test_docstring_examples_run():
    assert runs(Kept)


# ---------------------------------------------------------------------------------
# Donation


@pytest.mark.parametrize("kind", [None, AUTO, EXPLICIT])
@pytest.mark.filterwarnings("error:Some donated buffers")
def test_buffers_are_reused(kind):
    n, d = 8, 1000

    @drjax.program(clients=n)
    def step(model, kept, x):
        kept = drjax.map_fn(lambda m, c, x: 0.5 * c + m * x, _with(model, kept, x))
        return drjax.reduce_mean(kept), kept

    def _with(model, kept, x):
        return drjax.broadcast(model), kept, x

    args = np.ones(d, np.float32), np.zeros((n, d), np.float32), np.ones((n, d), "f")
    plan = drjax.make_plan(step)(*args)
    mesh = kind and make_mesh({"clients": 4}, kind)
    with in_mesh(mesh):
        run = xla.compile(plan, groups_per_step=1, keep={1: 1})
        model, first = run(*args)
        bytes_per_device = n * d * 4 // (4 if mesh else 1)
        memory = run.lower(model, first, args[2]).compile().memory_analysis()
        assert memory.alias_size_in_bytes == bytes_per_device
        (buffer,) = first.leaves()
        address = _addresses(buffer)
        model, second = run(model, first, args[2])
        assert buffer.is_deleted() and not second.leaves()[0].is_deleted()
        assert _addresses(second.leaves()[0]) == address
        same(second.fetch(), np.full((n, d), 1.5, np.float32))
        second.fetch()  # a copy, which a later call does not delete
        copy = second.fetch()
        run(model, second, args[2])
        same(copy, np.full((n, d), 1.5, np.float32))


def _addresses(x):
    return sorted(shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards)


def test_arrays_of_the_first_call_are_donated():
    plan, data = programs.scaffold_plan(N), programs.data(N)
    run = xla.compile(plan, keep=programs.SCAFFOLD_KEEP)
    model, control, controls = map(jnp.array, programs.scaffold_start(N))
    run(model, control, controls, data)
    assert controls.is_deleted() and not model.is_deleted()
    numpy = programs.scaffold_start(N)
    run(*numpy, data)
    assert not numpy[2].any()


def test_uneven_groups_stay():
    n = 6
    plan, data = programs.scaffold_plan(n), programs.data(n)
    start = programs.scaffold_start(n)
    expected = programs.run_scaffold(reference.compile(plan), start, 2, data)
    with in_mesh(make_mesh({"clients": 4})):
        run = xla.compile(plan, keep=programs.SCAFFOLD_KEEP)
        same(fetched(programs.run_scaffold(run, start, 2, data)), expected)


def test_a_kept_run_is_compiled_already():
    plan, data = programs.scaffold_plan(N), programs.data(N)
    run = xla.compile(plan, keep=programs.SCAFFOLD_KEEP)
    text = "with keep= is compiled already, and its handles hold arrays"
    args = *programs.scaffold_start(N), data
    raises(drjax.DrjaxTypeError, text, lambda: jax.jit(run)(*args))
