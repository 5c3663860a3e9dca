"""Programs in programs, and programs as Python functions.

Covers: drjax._api.program, drjax._partition.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.groups import MESHES, N, four, slices
from tests.helpers.meshes import in_mesh, in_mesh_of, make_mesh


@drjax.program(pods=3)
def pod_total(x, w):
    """Each of three pods adds `w` times its number to `x`, times the outer number."""

    def local(a):
        outer = drjax.partition_index(partition={"clients": N})
        return a * w * (1 + drjax.partition_index()) + outer

    return drjax.reduce_sum(drjax.map_fn(local, drjax.broadcast(x)))


def nested(x, w):
    return four(lambda x: drjax.map_fn(lambda a: pod_total(a, w), x))(x)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "mesh", [None, {"clients": 2}, {"pods": 3}, {"clients": 2, "pods": 3}]
)
def test_nested_programs(mesh):
    x = slices() + 0.5
    expected = x * 2.0 * 6 + 3 * np.arange(N)
    with in_mesh_of(mesh):
        np.testing.assert_allclose(nested(x, 2.0), expected, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(nested)(x, 2.0), expected, rtol=1e-6)
        total = lambda x, w: nested(x, w).sum()
        dx, dw = jax.jit(jax.grad(total, (0, 1)))(x, 2.0)
        np.testing.assert_allclose(dx, np.full(N, 12.0), rtol=1e-6)
        np.testing.assert_allclose(dw, 6 * x.sum(), rtol=1e-5)


def test_a_program_called_by_a_program_has_its_own_partition():
    @drjax.program(other=3)
    def inner(x):
        return drjax.reduce_sum(drjax.broadcast(x)), drjax.partition_size()

    @four
    def outer(x):
        before = drjax.partition_size()
        y, size = inner(x)
        return drjax.reduce_sum(drjax.broadcast(y)), (
            before,
            size,
            drjax.partition_size(),
        )

    assert outer(1.0) == (12.0, (4, 3, 4))


def test_partition_argument_names_another_program():
    @four
    def outer(x):
        other = drjax.broadcast(x, partition={"other": 3})
        same = drjax.broadcast(x, partition=inner)
        return other, drjax.reduce_sum(same, partition=drjax.Partition("inner", 5))

    inner = drjax.program(inner=5)(lambda: None)
    other, total = outer(1.0)
    assert other.shape == (3,) and total == 5.0


# ---------------------------------------------------------------------------------
# Programs as Python functions


def test_programs_keep_name_docstring_and_signature():
    @four
    def program(x: int, *, scale: float = 2.0) -> int:
        """Doc."""
        return drjax.reduce_sum(drjax.broadcast(x * scale))

    assert program.__name__ == "program" and program.__doc__ == "Doc."
    parameters = inspect.signature(program).parameters
    assert list(parameters) == ["x", "scale"] and parameters["scale"].default == 2.0
    assert program.partition == drjax.Partition("clients", N)
    assert str(program.partition) == "clients:4"
    assert program(1, scale=3.0) == 12.0


def test_methods_static_and_class_methods():
    class Model:
        scale = 2.0

        @four
        def method(self, x):
            return drjax.map_fn(lambda a: a * self.scale, x)

        @staticmethod
        @four
        def static(x):
            return drjax.map_fn(lambda a: a * 3, x)

        @classmethod
        @four
        def of_class(cls, x):
            return drjax.map_fn(lambda a: a * cls.scale, x)

        @property
        @four
        def numbers(self):
            return drjax.partition_index()

    model, x = Model(), slices()
    np.testing.assert_array_equal(model.method(x), 2 * x)
    np.testing.assert_array_equal(model.static(x), 3 * x)
    np.testing.assert_array_equal(Model.of_class(x), 2 * x)
    np.testing.assert_array_equal(model.numbers, np.arange(N))


def test_partials_callables_jitted_functions_and_builtins():
    class Callable:
        def __call__(self, x):
            return drjax.reduce_sum(x)

    x = slices()
    for fn in (
        functools.partial(drjax.reduce_sum), Callable(), jax.jit(drjax.reduce_sum),
        drjax.reduce_sum,
    ):  # fmt: skip
        assert four(fn)(x) == x.sum()
    for fn in (jnp.sin, functools.partial(jnp.multiply, 2), abs, nnx.relu):
        y = four(lambda x, fn=fn: drjax.map_fn(fn, x))(jnp.asarray(x))
        np.testing.assert_allclose(y, fn(x), rtol=1e-6)


def test_recursion():
    @four
    def power(x, depth):
        if depth == 0:
            return drjax.reduce_sum(drjax.broadcast(x))
        return power(x, depth - 1) * drjax.partition_size()

    assert power(1.0, 3) == N**4

    sizes = []

    def tree(n):
        @drjax.program(clients=n)
        def nested(x):
            below = x if n == 1 else tree(n - 1)(x)
            sizes.append(drjax.partition_size())
            return drjax.reduce_sum(drjax.broadcast(below))

        return nested

    assert tree(4)(1.0) == 24.0 and sizes == [1, 2, 3, 4]


def test_an_error_inside_a_program_leaves_no_scope_behind():
    with pytest.raises(ZeroDivisionError):
        four(lambda: 1 / 0)()
    with pytest.raises(drjax.ScopeError):
        drjax.partition_size()


def test_names_imported_from_the_package():
    from drjax import broadcast, map_fn, reduce_sum

    assert four(lambda x: reduce_sum(map_fn(jnp.square, broadcast(x))))(3.0) == 36.0


@pytest.mark.sampled
@pytest.mark.parametrize("mesh", [None, {"clients": 3}])
def test_disable_jit(mesh):
    x = slices() + 0.5

    def program(x, w):
        return drjax.reduce_mean(drjax.map_fn(lambda a: jnp.sin(a) * w, x))

    with in_mesh_of(mesh), jax.disable_jit():
        value, grad = jax.value_and_grad(four(program))(jnp.asarray(x), 2.0)
    np.testing.assert_allclose(value, 2 * np.sin(x).mean(), rtol=1e-5)
    np.testing.assert_allclose(grad, 2 * np.cos(x) / N, rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_export(mesh):
    x = slices(3) + 0.5

    @four
    def program(x, w):
        y = drjax.map_fn(lambda a, w: jnp.sin(a * w).sum(), (x, drjax.broadcast(w)))
        return drjax.reduce_mean(y)

    devices = mesh and make_mesh(mesh)
    with in_mesh(devices):
        # The derivative needs shardings on a mesh, as for hand-written jax.shard_map.
        slices_on = devices and jax.NamedSharding(devices, P("clients"))
        args = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=slices_on),
            jax.ShapeDtypeStruct((), x.dtype),
        )
        data = jax.export.export(jax.jit(program))(*args).serialize(vjp_order=1)
        loaded = jax.export.deserialize(data)
        np.testing.assert_allclose(loaded.call(x, 2.0), np.sin(2 * x).sum(1).mean(),
                                   rtol=1e-5)  # fmt: skip
        grad = jax.jit(jax.grad(loaded.call))(jnp.asarray(x), jnp.float32(2))
    np.testing.assert_allclose(grad, 2 * np.cos(2 * x) / N, rtol=1e-5)
