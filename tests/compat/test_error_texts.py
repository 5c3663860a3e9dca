"""What JAX's errors say, in the version that is installed.

Covers: drjax._compat.error_texts.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from drjax import _compat
from tests.helpers.meshes import make_mesh


@pytest.mark.parametrize("axis", ["clients", "my-clients", "v1.0 of a. b"])
def test_a_collective_outside_of_its_axis_names_the_axis(axis):
    with pytest.raises(NameError) as info:
        jax.make_jaxpr(lambda x: jax.lax.psum(x, axis))(1.0)
    assert _compat.unbound_axis(info.value) == axis


def test_an_undefined_name_names_no_axis():
    assert _compat.unbound_axis(NameError("name 'clients' is not defined")) is None


def test_a_constraint_without_a_mesh_is_about_a_mesh():
    constrain = lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("clients"))
    with pytest.raises(RuntimeError) as info:
        jax.make_jaxpr(constrain)(jnp.zeros(4))
    assert _compat.is_about_a_mesh(info.value)


def test_an_array_of_a_mesh_that_is_not_in_context_is_about_a_mesh():
    mesh = make_mesh({"clients": 2}, AxisType.Explicit)
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("clients"))
    array = jax.device_put(jnp.zeros(2), sharding)
    with (
        jax.set_mesh(make_mesh({"others": 2}, AxisType.Explicit)),
        pytest.raises(ValueError) as info,
    ):
        jax.make_jaxpr(lambda x: x + array)(jnp.zeros(2))
    assert _compat.is_about_a_mesh(info.value)


def test_an_axis_without_a_mesh_is_about_a_mesh():
    mesh = make_mesh({"clients": 2}, AxisType.Auto)
    with pytest.raises(ValueError) as info:
        jax.sharding.NamedSharding(mesh, PartitionSpec("others"))
    assert _compat.is_about_a_mesh(info.value)


@pytest.mark.parametrize(
    "text", ["the rate is negative", "the finite-element mesh is too coarse"]
)
def test_an_error_of_the_user_is_not_about_a_mesh(text):
    assert not _compat.is_about_a_mesh(ValueError(text))
