"""Collectives that the devices inside a slice divide, on virtual slices.

Covers: drjax._primitives.between_slices, drjax._compat.propagation.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import drjax
from drjax._primitives import between_slices
from drjax._sharding.layout import axes_inside_slices
from tests.helpers.meshes import AUTO, EXPLICIT, in_slices, make_mesh


def sent(fn, x):
    report = drjax.collectives(fn)(x)
    return [(c.kind, c.axes, c.result_bytes) for c in report.collectives]


MESH = {"clients": 2, "data": 4}
WHOLE, PART = 256 * 64 * 4, 256 * 16 * 4
NETWORKS = {
    "one slice": (8, [("all-reduce", ("clients",), WHOLE)]),
    "two slices": (
        4,
        [
            ("all-reduce", ("clients",), PART),
            ("all-gather", ("data",), WHOLE),
        ],
    ),
    "slices across": (1, [("all-reduce", ("clients",), WHOLE)]),
}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_slice_sends_a_value_once(network, kind):
    """It is divided by axes inside slices only, if the groups' axis is between them."""
    size, expected = NETWORKS[network]
    mesh = make_mesh(MESH, kind)
    x = jnp.ones((2, 256, 64))
    with in_slices(size), jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("clients")))
        got = sent(drjax.program(clients=2)(drjax.reduce_sum), x)
    assert sorted(got) == sorted(expected)


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (jnp.ones((2, 64, 16)), "small"),
        (jnp.ones((2, 257, 65)), "no dimension is a multiple of four"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_not_divided(x, why, monkeypatch):
    mesh = make_mesh(MESH)
    with in_slices(4), jax.set_mesh(mesh):
        monkeypatch.setattr(between_slices, "SMALL", 2**14)
        x = jax.device_put(x, NamedSharding(mesh, P("clients")))
        got = sent(drjax.program(clients=2)(drjax.reduce_max), x)
    assert got == [("all-reduce", ("clients",), x.nbytes // 2)]


def test_shardings_around_a_sum_are_as_without_slices():
    mesh = make_mesh(MESH)
    fn = drjax.program(clients=2)(drjax.reduce_mean)
    for spec in (P("clients"), P("clients", None, "data"), P("clients", "data")):
        with in_slices(4), jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((2, 256, 64)), NamedSharding(mesh, spec))
            y = jax.jit(fn)(x)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec[1:])), 2)


def test_slices_of_processes():
    """Devices that know of no slices are in that of their process.

    So are GPUs that are all in one slice, as those of compilers without devices say.
    """

    class Device:
        def __init__(self, process_index, slice_index=None, platform="tpu"):
            self.process_index, self.platform = process_index, platform
            if slice_index is not None:
                self.slice_index = slice_index

    def mesh(*devices):
        grid = np.array(devices).reshape(2, 2)
        return SimpleNamespace(devices=grid, axis_names=("a", "b"))

    inside = axes_inside_slices.__wrapped__
    hosts = mesh(*(Device(p) for p in (0, 0, 1, 1)))
    assert inside(hosts, ("a",)) == ("b",) and inside(hosts, ("b",)) == ()
    one_slice = mesh(*(Device(p, 0) for p in (0, 0, 1, 1)))
    assert inside(one_slice, ("a",)) == ()
    gpus = mesh(*(Device(p, 0, "gpu") for p in (0, 0, 1, 1)))
    assert inside(gpus, ("a",)) == ("b",) and inside(gpus, ("b",)) == ()
    of_hosts = mesh(*(Device(i, i // 2, "gpu") for i in range(4)))
    assert inside(of_hosts, ("a",)) == ("b",)
    a_process_each = mesh(*(Device(i, 0, "gpu") for i in range(4)))
    assert inside(a_process_each, ("a",)) == ()


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
def test_transformations(jit):
    """The derivative of a plan's code, too, and batches of programs."""
    mesh = make_mesh(MESH)
    fn = drjax.program(clients=2)(lambda x: drjax.reduce_mean(jnp.sin(x)))
    x = jnp.arange(2 * 16 * 8.0).reshape(2, 16, 8)
    want = jnp.mean(jnp.sin(x), 0), jnp.mean(jnp.cos(x), 0)
    with in_slices(4), jax.set_mesh(mesh):
        y, t = jax.jvp(jit(fn), (x,), (jnp.ones_like(x),))
        both = jax.vmap(jit(fn))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(y, want[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(t, want[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(both[1], jnp.mean(jnp.sin(2 * x), 0), 1e-6, 1e-6)
