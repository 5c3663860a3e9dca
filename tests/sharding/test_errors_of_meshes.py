"""Errors of meshes, and of collectives and closures on them.

Covers: drjax._sharding.layout, drjax._sharding.avals.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh
from tests.helpers.raising import X3, X8, eight, raises

COLLECTIVES = {
    "psum": lambda a: lax.psum(a, "clients"),
    "pmean": lambda a: lax.pmean(a, "clients"),
    "pmax": lambda a: lax.pmax(a, "clients"),
    "axis_index": lambda a: a + lax.axis_index("clients"),
    "axis_size": lambda a: a * lax.axis_size("clients"),
    "all_gather": lambda a: lax.all_gather(a, "clients"),
    "ppermute": lambda a: lax.ppermute(a, "clients", [(0, 1)]),
    "in scan": lambda a: lax.scan(
        lambda c, _: (lax.psum(c, "clients"), None), a, length=2
    )[0],
    "in jit": jax.jit(lambda a: lax.psum(a, "clients")),
}
MESHES = [None, ({"clients": 4}, AUTO), ({"clients": 4}, EXPLICIT),
          ({"clients": 4, "model": 2}, AUTO)]  # fmt: skip
OWN_AXIS = "uses a collective over the axis of partition clients:8 itself, ('clients',)"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_over_the_partitions_own_axis(collective, mesh):
    fn = COLLECTIVES[collective]
    with in_mesh(mesh and make_mesh(*mesh)):
        for f in (eight(lambda x: drjax.map_fn(fn, x)),) * 2:
            result = raises(drjax.MeshError, OWN_AXIS, f, X8)
    assert "with drjax.reduce_sum, drjax.reduce_max or drjax.gather" in result


def test_collectives_over_a_partition_whose_name_has_a_hyphen():
    program = drjax.program(placements={"my-clients": 3})
    f = program(lambda x: drjax.map_fn(lambda a: lax.psum(a, "my-clients"), x))
    raises(drjax.MeshError, "over the axis of partition my-clients:3 itself", f, X3)


def test_collectives_over_the_own_axis_where_it_is_bound():
    nested = jax.shard_map(
        lambda a: lax.psum(a, "clients"), in_specs=P(), out_specs=P(),
        axis_names={"clients"}, check_vma=False,
    )  # fmt: skip
    with jax.set_mesh(make_mesh({"clients": 4})):
        raises(drjax.MeshError, OWN_AXIS, eight(lambda x: drjax.map_fn(nested, x)), X8)
        manual = jax.shard_map(
            eight(lambda x: drjax.map_fn(COLLECTIVES["psum"], x)),
            in_specs=P("clients"), out_specs=P("clients"),
        )  # fmt: skip
        raises(drjax.MeshError, OWN_AXIS, manual, X8)


def test_unbound_axes_that_are_not_the_partitions_stay_jaxs_error():
    for name in ("a", "axis", "unbound"):
        f = drjax.program(placements={name: 3})(
            lambda x: drjax.map_fn(lambda a: lax.psum(a, "model"), x)
        )
        with pytest.raises(NameError, match="unbound axis name: model"):
            f(X3)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kind", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)]
)
@pytest.mark.parametrize("what", ["array", "tracer", "key"])
def test_closures_on_explicit_meshes_are_broadcast(kind, what):
    mesh = make_mesh({"clients": 4, "model": 2}, kind)
    with jax.set_mesh(mesh):
        w = jax.random.key(1) if what == "key" else jnp.ones((2, 2)) * 2
        use = jax.random.normal if what == "key" else lambda w: (w @ w).sum()

        def closing(w, x):
            return drjax.map_fn(lambda a: a * use(w), x)

        f = jax.jit(eight(closing)) if what == "tracer" else eight(closing)

        @eight
        def through_broadcast(w, x):
            return drjax.map_fn(lambda w, a: a * use(w), (drjax.broadcast(w), x))

        expected = X8 * np.asarray(use(w))
        for program in (f, through_broadcast):
            result = jax.jit(program)(w, X8)
            np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_a_closure_that_is_sharded_over_the_partitions_axes():
    with jax.set_mesh(make_mesh({"clients": 4}, EXPLICIT)):
        w = jax.device_put(jnp.ones(4), P("clients"))
        f = eight(lambda x: drjax.map_fn(lambda a: a * w.sum(), x))
        text = "closes over an array that is sharded over ('clients',)"
        raises(drjax.MeshError, text, f, X8)


@pytest.mark.parametrize(
    "shard",
    [
        lambda mesh: lambda a: lax.with_sharding_constraint(a, P("clients")),
        lambda mesh: (
            lambda a: lax.with_sharding_constraint(
                a, jax.NamedSharding(mesh, P(("model", "clients")))
            )
        ),
        lambda mesh: jax.shard_map(
            lambda a: a, mesh=mesh, in_specs=P("clients"), out_specs=P("clients")
        ),
    ],
    ids=["spec", "sharding", "shard_map"],
)
def test_shardings_over_the_partitions_axes_inside_a_group(shard):
    mesh = make_mesh({"clients": 4, "model": 2})
    f = eight(lambda x: drjax.map_fn(shard(mesh), x))
    with jax.set_mesh(mesh):
        text = "shards a value over ('clients',), along which the groups of clients:8 "
        raises(drjax.MeshError, text, f, np.ones((8, 8), np.float32))


def test_closures_that_explicit_meshes_allow():
    host, device = np.ones(3, np.float32), jnp.ones(3)  # not arrays of the mesh
    f = eight(lambda x: drjax.map_fn(lambda a: (a * host * device).sum(), x))
    with jax.set_mesh(make_mesh({"clients": 4}, EXPLICIT)):
        np.testing.assert_allclose(f(X8), 3 * X8)
        np.testing.assert_allclose(jax.jit(f)(X8), 3 * X8)


def test_uneven_groups_on_explicit_axes():
    ten = drjax.program(clients=10)(drjax.broadcast)
    with jax.set_mesh(make_mesh({"clients": 4}, EXPLICIT)):
        text = "Partition clients:10 does not divide evenly over the 4 devices of mesh "
        result = raises(drjax.MeshError, text, ten, 1.0)
    assert "make the axes Auto" in result and "or use 12 groups" in result


def test_uneven_groups_inside_a_manual_shard_map():
    ten = drjax.program(clients=10)(drjax.broadcast)
    f = jax.shard_map(ten, in_specs=P(), out_specs=P("clients"))
    with jax.set_mesh(make_mesh({"clients": 4})):
        text = "each of the 4 devices needs the same number of groups, but 10 groups"
        raises(drjax.MeshError, text, f, 1.0)


def test_partly_manual_axes():
    f = drjax.program(clients=8, mesh_axes=("dcn", "ici"))(drjax.broadcast)
    f = jax.shard_map(f, in_specs=P(), out_specs=P("dcn"), axis_names={"dcn"})
    with jax.set_mesh(make_mesh({"dcn": 2, "ici": 2})):
        text = "lies on mesh axes ('dcn', 'ici'), of which only ['dcn'] are Manual here"
        raises(drjax.MeshError, text, jax.jit(f), 1.0)


def test_a_mesh_with_only_some_of_the_axes():
    f = drjax.program(clients=8, mesh_axes=("dcn", "ici"))(drjax.broadcast)
    with jax.set_mesh(make_mesh({"dcn": 2, "model": 2})):
        text = "needs mesh axes ('dcn', 'ici'), but the mesh (dcn: 2, model: 2) lacks "
        assert "['ici']. Name only axes of" in raises(drjax.MeshError, text, f, 1.0)


def test_a_mesh_argument_that_contradicts_the_context():
    f = drjax.program(clients=8, mesh=make_mesh({"clients": 4}))(drjax.broadcast)
    with jax.set_mesh(make_mesh({"clients": 8})):
        text = "mesh= is (clients: 4), but the mesh in context is (clients: 8); JAX "
        raises(drjax.MeshError, text, f, 1.0)


def test_a_mesh_argument_with_other_devices_than_the_context():
    shape, axes = (4,), ("clients",)
    context, other = (
        jax.make_mesh(shape, axes, devices=d, axis_types=(AUTO,))
        for d in (jax.devices()[:4], jax.devices()[4:8])
    )
    f = drjax.program(clients=8, mesh=other)(drjax.broadcast)
    explicit = jax.sharding.Mesh(context.devices, axes, axis_types=(EXPLICIT,))
    with jax.set_mesh(context):
        devices = f"device {jax.devices()[4]} in the place of {jax.devices()[0]} of"
        text = f"mesh= (clients: 4) has {devices} the mesh in context; JAX needs"
        raises(drjax.MeshError, text, f, 1.0)
        raises(drjax.MeshError, text, jax.jit(f), 1.0)
        same = drjax.program(clients=8, mesh=explicit)(drjax.broadcast)
        assert same(1.0).devices() == set(context.devices.flat)
    assert f(1.0).devices() == set(other.devices.flat)


def test_an_abstract_mesh_without_devices():
    mesh = make_mesh({"clients": 4})
    f = drjax.program(clients=8, mesh=mesh.abstract_mesh)(drjax.broadcast)
    text = "mesh= is the AbstractMesh (clients: 4), which names no devices, and no mesh"
    raises(drjax.MeshError, text, f, 1.0)
    with jax.set_mesh(mesh):
        assert f(1.0).sharding.num_devices == 4  # as the message advises


def test_shard_without_devices():
    with jax.sharding.use_abstract_mesh(make_mesh({"clients": 4}).abstract_mesh):
        text = "drjax.shard needs devices, but the mesh in context, (clients: 4), is"
        raises(drjax.MeshError, text, eight(drjax.shard), X8)


@pytest.mark.parametrize("mesh", ["clients", 8, {"clients": 8}])
def test_mesh_arguments_that_are_no_mesh(mesh):
    text = f"mesh= needs a jax.sharding.Mesh or AbstractMesh, got {type(mesh).__name__}"
    raises(drjax.MeshError, text, eight(lambda x: drjax.broadcast(x, mesh=mesh)), 1.0)
    text = "drjax.program(mesh=) needs a jax.sharding.Mesh or AbstractMesh, got "
    raises(drjax.MeshError, text, lambda: drjax.program(clients=8, mesh=mesh))
