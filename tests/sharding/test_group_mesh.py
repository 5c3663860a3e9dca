"""Groups on several devices: in this process, and what other backends do with them.

Covers: drjax._sharding.group_mesh, drjax.engines.in_process.adapter.
"""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from drjax._sharding import group_mesh
from drjax.backends import in_process, reference, xla
from drjax.engines.core import worker
from drjax.engines.core.messages import refuse_group_mesh
from tests.helpers import random_programs, tensor_parallel
from tests.helpers.cases import some
from tests.helpers.plain_blocks import blocks
from tests.helpers.plan_files import forge, local_stage, read_members
from tests.helpers.raising import raises
from tests.helpers.random_run import compare, strict

# JAX's derivative of a shard_map leaks, by its own check.
pytestmark = pytest.mark.usefixtures("leaks_unchecked")


def auto(sizes, names):
    return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


MODEL = auto((4,), ("model",))
EXPLICIT = AbstractMesh((4,), ("model",), axis_types=(AxisType.Explicit,))


def saved(plan, folder):
    plan.save(folder / "plan.drjax")
    return drjax.load_plan(folder / "plan.drjax")


@pytest.mark.once
@pytest.mark.parametrize("how", tensor_parallel.HOW)
def test_a_transformer_equals_that_of_one_device(how, tmp_path):
    plan = tensor_parallel.plan(how)
    assert plan.group_mesh == (("model", 4),)
    for same in (plan, saved(plan, tmp_path)):
        assert same.group_mesh == plan.group_mesh
        for size in (1, 3, None) if same is plan else (3,):
            run = in_process.compile(same, block_size=size)
            args = tensor_parallel.parameters(), tensor_parallel.data()
            tensor_parallel.check(run(*args))


@pytest.mark.once
@pytest.mark.parametrize("how", tensor_parallel.HOW)
def test_reference_and_xla(how, tmp_path):
    args = tensor_parallel.parameters(), tensor_parallel.data(2)
    plan = tensor_parallel.plan(how, clients=2)
    tensor_parallel.check(reference.compile(plan)(*args), 2)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        run = jax.jit(xla.compile(saved(plan, tmp_path)))
        tensor_parallel.check(run(*args), 2)


def test_parameters_are_never_whole_on_a_device():
    """The compiler shards what comes from the driver as the functions say."""
    plan = tensor_parallel.plan("auto")
    run = in_process.compile(plan, block_size=3)
    run(tensor_parallel.parameters(), tensor_parallel.data())
    loaded = worker._loaded(run.file)
    (stage,) = loaded._stages
    code = stage._on_mesh
    inputs = dict(zip(stage.stage.inputs, code.input_shardings[0][2:], strict=True))
    for value, sharding in inputs.items():
        whole = value.partitioned
        shape = (1, *value.shape) if whole else value.shape
        assert sharding.is_fully_replicated == whole, value
        assert np.prod(sharding.shard_shape(shape)) == np.prod(shape) / (4 - 3 * whole)
    sums = code.output_shardings[: len(stage.reduces)]
    assert not any(s.is_fully_replicated for s in sums)


def layer(w, x):
    w = lax.with_sharding_constraint(w, P("model"))
    return jnp.sum(w * x)


def mean(fn, mesh: AbstractMesh | None = MODEL, **options):
    program = drjax.program(clients=3)(
        lambda w, x: drjax.reduce_mean(drjax.map_fn(fn, (drjax.broadcast(w), x)))
    )
    make = drjax.make_plan(program, group_mesh=mesh, **options)
    return make(jnp.arange(8.0), jnp.ones((3, 8)))


def test_a_plan_tells_what_it_needs():
    text = str(mean(layer))
    assert "needs    model=4 devices for each group" in text


def test_a_mesh_that_functions_close_over():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))

    def constrained(w, x):
        w = lax.with_sharding_constraint(w, NamedSharding(mesh, P("model")))
        return jnp.sum(w * x)

    def mapped(w, x):
        run = lambda w, x: lax.psum(jnp.sum(w * x), "model")
        specs = P("model"), P("model")
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())(w, x)

    for fn in (constrained, mapped):
        plan = mean(fn, None)
        assert plan.group_mesh == (("model", 4),)
        run = in_process.compile(plan)
        assert run(np.arange(8.0, dtype=np.float32), np.ones((3, 8), np.float32)) == 28


def explicit_layer(w, x):
    w, x = jax.sharding.reshard((w, x), P("model"))
    return jnp.einsum("i,i->", w, x, out_sharding=P())


def sum_of_squares(fn):
    @drjax.program(clients=3)
    def loss(w, x):
        losses = drjax.map_fn(lambda w, x: fn(w, x) ** 2, (drjax.broadcast(w), x))
        return drjax.reduce_sum(losses)

    return loss


def test_derivatives_of_programs():
    w, x = jnp.arange(8.0), jnp.ones((3, 8))
    for mesh, fn in ((MODEL, layer), (EXPLICIT, explicit_layer)):
        make = drjax.make_plan(jax.grad(sum_of_squares(fn)), group_mesh=mesh)
        run = in_process.compile(make(w, x))
        np.testing.assert_allclose(run(w, x), 3 * 2 * 28 * np.ones(8), rtol=1e-6)


def test_open_groups():
    w, x = jnp.arange(8.0), jnp.ones((3, 8))
    loss = sum_of_squares(layer)
    plan = drjax.make_plan(loss, group_mesh=MODEL, open_groups=True)(w, x)
    run = in_process.compile(plan)
    assert run(w, jnp.ones((5, 8))) == pytest.approx(5 * 28**2)


def test_a_group_that_fails_is_dropped():
    def fails(w, x):
        return layer(w, x) / x[0]

    run = in_process.compile(mean(fails), on_error="drop", check_nans=True)
    x = np.ones((3, 8), np.float32)
    x[1] = np.nan
    assert run(np.arange(8.0, dtype=np.float32), x) == 28
    assert [*run.report.dropped] == [1]


@pytest.mark.parametrize("name", ["run_block", "per_group"])
def test_what_is_raised_has_no_group_if_others_work_on_it(name, monkeypatch):
    """Other processes, which do not raise it, would not try the groups one by one."""

    def fail(*_):
        raise OSError("of this process")

    monkeypatch.setattr(worker, "spans_processes", lambda: True)
    monkeypatch.setattr(worker.CompiledStage, name, fail)
    twice = mean(lambda w, x: 2 * layer(w, x))  # no process has loaded it
    options = {"on_error": "drop", "check_nans": True}
    run, x = in_process.compile(twice, **options), np.full((3, 8), np.nan, np.float32)
    text = "The groups' work failed in round 1 .*: OSError: of this process"
    with pytest.raises(drjax.EngineError, match=text):
        run(np.arange(8.0, dtype=np.float32), x)


def test_what_a_process_lacks_is_said_when_a_plan_is_compiled():
    needs = auto((2, 8), ("fsdp", "model"))
    text = (
        "The plan runs each group on a mesh of fsdp=2, model=8, which needs 16 "
        "devices, and this process has 8. Give it more (on CPUs, set "
        "JAX_NUM_CPU_DEVICES before JAX starts), or plan for a smaller group_mesh."
    )
    plan = mean(layer, needs)
    raises(drjax.MeshError, text, in_process.compile, plan)
    refuse_group_mesh((), "Beam")
    text = (
        "The plan runs each group on a mesh of model=4, and Beam runs a group on one "
        "device. Use Ray, with devices_per_group=4, or in_process; or plan the "
        "function without shardings in the groups."
    )
    raises(drjax.MeshError, text, refuse_group_mesh, mean(layer).group_mesh, "Beam")


def test_meshes_that_no_group_can_have():
    text = (
        "group_mesh= needs a jax.sharding.AbstractMesh or Mesh, got int. Write "
        'jax.sharding.AbstractMesh((4,), ("model",)).'
    )
    raises(drjax.DrjaxTypeError, text, mean, layer, 4)
    mixed = AbstractMesh(
        (2, 2), ("a", "model"), axis_types=(AxisType.Auto, AxisType.Explicit)
    )
    with pytest.raises(drjax.DrjaxValueError, match="all Auto or all Explicit"):
        mean(layer, mixed)
    text = (
        "group_mesh= has the axes model=4, but no function of a group names one: all "
        "of its devices would compute the same. Shard values in them, as by "
        "jax.lax.with_sharding_constraint(w, P('model'))."
    )
    raises(drjax.PlanError, text, mean, lambda w, x: w[0])
    with pytest.raises(drjax.PlanError, match="has .'clients'., the mesh axis of the"):
        mean(layer, auto((3, 4), ("clients", "model")))
    with pytest.raises(drjax.PlanError, match="close over different meshes, data=4"):
        other = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        model = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))

        def both(w, x):
            w = lax.with_sharding_constraint(w, NamedSharding(model, P("model")))
            return w @ lax.with_sharding_constraint(x, NamedSharding(other, P("data")))

        mean(both, None)


def test_the_server_has_no_mesh():
    @drjax.program(clients=3)
    def server(w, x):
        total = drjax.reduce_mean(drjax.map_fn(layer, (drjax.broadcast(w), x)))
        return lax.with_sharding_constraint(w * total, P("model"))

    make = drjax.make_plan(server, group_mesh=MODEL)
    with pytest.raises(drjax.PlanError, match="sharding_constraint .*is bound to a me"):
        make(jnp.arange(8.0), jnp.ones((3, 8)))


def test_functions_that_need_another_mesh():
    with pytest.raises(drjax.PlanError, match="needs another mesh than group_mesh="):
        other = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

        def fn(w, x):
            run = lambda w: lax.psum(w, "data")
            w = jax.shard_map(run, mesh=other, in_specs=P("data"), out_specs=P())(w)
            return w[0]

        mean(fn)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        with pytest.raises(drjax.PlanError, match="pass the mesh of one group to drja"):
            mean(layer, None)


def test_axes_as_text():
    axes = (("fsdp", 2), ("model", 4))
    assert group_mesh.as_text(axes) == "fsdp=2, model=4"
    assert group_mesh.devices_of(axes) == 8
    assert group_mesh.devices_of(()) == 1


def test_forged_meshes(tmp_path):
    """A manifest with another mesh than that of the code is no plan file."""
    mean(layer).save(tmp_path / "good.drjax")
    members = read_members(tmp_path / "good.drjax")

    def forged(axes):
        def change(manifest):
            local_stage(manifest["plan"])["mesh"] = axes

        path = tmp_path / "forged.drjax"
        forge(path, members, change=change)
        return path

    for axes, text in (
        ([["model", 2]], "runs on another mesh than it is said to"),
        ([["model", 0]], "has a mesh that no group has"),
        ([["model", 4], ["model", 4]], "has a mesh with an axis twice"),
        ([], "runs on another mesh than it is said to"),
        ([["model"]], "not enough values"),
    ):
        raises(drjax.PlanFileError, text, drjax.load_plan, forged(axes))


@pytest.mark.once
@pytest.mark.parametrize("number", some(range(12), 0, 1))
def test_random_programs(number):
    """Programs whose groups shard the results of their functions over features."""
    program = random_programs.draw(36, number)
    names = {name for name, *_ in random_programs.walk(program.recipe)}
    if names & {"effect", "kernel"}:
        pytest.skip("it has no plan file, or needs one device")
    program = dataclasses.replace(program, mesh=None, runner="jax")
    map_fn = blocks.map_fn

    def constrained(fn, arg):
        def shard(x):
            sharded = jnp.ndim(x) and jnp.shape(x)[0] == program.f
            return lax.with_sharding_constraint(x, P("model")) if sharded else x

        return map_fn(lambda *xs: jax.tree.map(shard, fn(*xs)), arg)

    with strict(program.dtype == "float64"):
        make = lambda: random_programs.used(
            program, random_programs.make(program), random_programs.arguments(program)
        )
        fn, inputs = make()
        expected = jax.jit(fn)(*inputs)
        with mock.patch.object(blocks, "map_fn", constrained):
            fn, inputs = make()
            mesh = auto((program.f,), ("model",))
            plan = drjax.make_plan(fn, group_mesh=mesh)(*inputs)
        assert plan.group_mesh == (("model", program.f),)
        with in_process.compile(plan) as run:
            compare(program, run(*inputs), expected)
