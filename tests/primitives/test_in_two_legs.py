"""An exchange whose two collectives are at places of their own in a program.

Covers: drjax._primitives.in_two_legs, drjax._planner.fences.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._primitives.in_two_legs import (
    auto_devices_in_context,
    complete,
    is_divided,
    received_after,
)
from drjax._sharding.layout import Placement, find_mesh
from drjax.compiled import read_hlo
from drjax.plan import Wire
from tests.helpers.compiled import hlo_text
from tests.helpers.meshes import EXPLICIT, in_mesh, in_mesh_of, in_slices, make_mesh

N, SIZE = 8, 4096
X = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)
X[0, :3] = np.nan, np.inf, 0
MESHES = {
    "none": None,
    "one device": {"clients": 1},
    "two each": {"clients": 4},
    "another axis": {"clients": 2, "model": 4},
}
JITS = {"jax.jit": jax.jit, "drjax.jit": drjax.jit}
WIRES = "bfloat16", "int8", "float8_e4m3fn", "float4_e2m1fn"


def of_partition(f):
    """A program of f, which takes the partition and the operands."""
    program = drjax.program(clients=N)
    partition = drjax.Partition("clients", N)
    return program(functools.partial(f, partition))


def in_two_legs(wire, partition, x):
    """The mean of x, and what groups do meanwhile: the result of the second leg."""
    on: Placement = {"partition": partition, "mesh": find_mesh(partition)}
    m = auto_devices_in_context(partition)
    cut = lambda x: x.reshape(m, N // m, -1)
    mean = drjax.reduce_mean(drjax.map_fn(cut, x), wire=wire, result="sharded")
    work = drjax.map_fn(jnp.sin, x)
    (mean,) = received_after([mean], work, on, sharded=True)
    mean = complete(mean, Wire(wire), partition)
    work = drjax.map_fn(jnp.sin, work)
    return received_after([mean], work, on)[0].reshape(-1), work


@pytest.mark.sampled
@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_two_legs_are_the_encoded_mean(mesh, wire, jit):
    """To the bit: they cut the vector in the same parts."""
    one = drjax.program(clients=N)(lambda x: drjax.reduce_mean(x, wire=wire))
    two = of_partition(functools.partial(in_two_legs, wire))
    with in_mesh_of(MESHES[mesh]):
        mean, work = JITS[jit](two)(X)
        np.testing.assert_array_equal(mean, JITS[jit](one)(X))
        np.testing.assert_allclose(work, jnp.sin(jnp.sin(X)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("jit", JITS)
def test_devices_send_codes_in_two_collectives(jit):
    two = of_partition(functools.partial(in_two_legs, "int8"))
    with in_mesh_of({"clients": 4}):
        text = hlo_text(JITS[jit](two), X)
    sent = read_hlo(text, {"clients": 4})
    part = Wire("int8").nbytes(SIZE // 4)
    assert [(x.kind, x.result_bytes) for x in sent] == [
        ("all-to-all", 4 * part), ("all-gather", 4 * part),
    ]  # fmt: skip


def a_result_after_work(partition, x):
    """Only what is computed from the work is read otherwise, not the work itself."""
    on: Placement = {"partition": partition, "mesh": find_mesh(partition)}
    work = drjax.map_fn(jnp.sin, x)
    mean = received_after([drjax.reduce_mean(x)], work, on)
    return mean, drjax.map_fn(jnp.cos, work)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda", "rocm"])
@pytest.mark.parametrize("jit", JITS)
def test_where_collectives_are_asynchronous_results_wait_for_work(jit, platform):
    """By data: XLA removes barriers before it schedules."""
    with in_mesh_of({"clients": 4}):
        traced = JITS[jit](of_partition(a_result_after_work)).trace(X)
        lowered = traced.lower(lowering_platforms=(platform,))
    assert ("stablehlo.popcnt" in lowered.as_text()) == (platform != "cpu")


@pytest.mark.once
@pytest.mark.parametrize("jit", JITS)
def test_between_slices_their_devices_divide_both(jit):
    two = of_partition(functools.partial(in_two_legs, "int8"))
    with in_slices(4), in_mesh_of({"clients": 2, "model": 4}):
        text = hlo_text(JITS[jit](two), X)
        mean, _ = JITS[jit](two)(X)
        one = drjax.program(clients=N)(lambda x: drjax.reduce_mean(x, wire="int8"))
        np.testing.assert_array_equal(mean, JITS[jit](one)(X))
    sent = read_hlo(text, {"clients": 2, "model": 4})
    part = Wire("int8").nbytes(SIZE // 8)
    between = [(x.kind, x.result_bytes) for x in sent if x.axes == ("clients",)]
    assert between == [("all-to-all", 2 * part), ("all-gather", 2 * part)]


@pytest.mark.parametrize("mesh", MESHES)
def test_derivatives_and_batches_are_those_of_the_identity(mesh):
    """As the derivative of the rounding is that of the sum, whatever the wire."""
    two = of_partition(lambda *x: in_two_legs("int8", *x)[0])
    one = drjax.program(clients=N)(drjax.reduce_mean)
    x = np.nan_to_num(X, posinf=1.0)
    with in_mesh_of(MESHES[mesh]):
        slope = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(3 * f(x))))(x)
        np.testing.assert_array_equal(slope(one), slope(two))
        slope = lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(x)
        np.testing.assert_allclose(slope(one), slope(two), rtol=1e-6, atol=1e-6)
        pair = np.stack([x, 2 * x])
        means = [jax.jit(jax.vmap(f))(pair) for f in (one, two)]
        np.testing.assert_allclose(*means, atol=0.02)


def test_a_plan_has_the_order():
    """The server's stages that receive a leg wait for the groups' work."""
    plan = drjax.make_plan(of_partition(functools.partial(in_two_legs, "int8")))(X)
    assert [r.wire for x in plan.rounds for r in x.reduces] == [Wire("int8")]
    after = [v for step in plan.steps for v in getattr(step, "after", ())]
    assert len(after) == 2 and all(v.partitioned for v in after)


def test_which_meshes_divide_the_groups():
    partition = drjax.Partition("clients", N)
    assert not is_divided(partition)
    for shape, kind, divides in (
        ({"clients": 4}, None, True),
        ({"clients": 1, "model": 4}, None, False),
        ({"model": 4}, None, False),
        ({"clients": 4}, EXPLICIT, False),
    ):
        mesh = make_mesh(shape) if kind is None else make_mesh(shape, kind)
        with in_mesh(mesh):
            assert is_divided(partition) is divides
