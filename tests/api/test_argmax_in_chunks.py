"""The group of a maximum, where a few groups run at a time: one pass, no slice saved.

Covers: drjax._api.max_and_min.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import Groups
from tests.helpers.cases import checkerboard
from tests.helpers.compiled import temp_bytes
from tests.helpers.meshes import in_mesh_of

D = 500
BLOCKS = {drjax.reduce_argmax: jnp.argmax, drjax.reduce_argmin: jnp.argmin}


def of_work(block):
    def fn(w, x):
        y = drjax.map_fn(lambda x, w: jnp.sin(x * w), (x, drjax.broadcast(w)))
        return jnp.sum(drjax.reduce_mean(y) * (block(y) % 3))

    return fn


@checkerboard(2, block=BLOCKS, gradient=[False, True])
def test_memory_does_not_grow_with_the_number_of_groups(block, gradient):
    sizes = []
    for n in (16, 128):
        fn = drjax.program(clients=n)(of_work(block))
        inside = drjax.jit(jax.grad(fn) if gradient else fn, groups_per_step=1)
        x = jax.ShapeDtypeStruct((n, D), jnp.float32)
        sizes.append(temp_bytes(inside, x.update(shape=(D,)), x))
    assert sizes[0] == sizes[1] < 12 * 4 * D


@checkerboard(3, block=BLOCKS, outside=[False, True], step=[1, 3, "auto"])
def test_gradients_are_those_of_all_groups_at_once(block, outside, step):
    n = 7
    fn = drjax.program(clients=n)(of_work(block))
    w, x = jnp.arange(1.0, 6), jnp.asarray(np.random.RandomState(0).randn(n, 5))
    jit = lambda f: drjax.jit(f, groups_per_step=step)
    run = jax.grad(jit(fn)) if outside else jit(jax.grad(fn))
    np.testing.assert_allclose(run(w, x), jax.grad(fn)(w, x), rtol=1e-5, atol=1e-6)


DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.uint32, jnp.bool_]


@checkerboard(7, block=BLOCKS, dtype=DTYPES, mesh=[None, {"clients": 4}])
def test_ties_nans_and_left_out_groups(block, dtype, mesh):
    n, random = 7, np.random.RandomState(0)
    x = random.randint(0, 4, (n, 40)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        x[random.rand(n, 40) < 0.1] = np.nan
        x[random.rand(n, 40) < 0.3] = np.inf
        x[random.rand(n, 40) < 0.3] = -np.inf
        x[:, :2] = [-np.inf, np.inf]
    fn = drjax.program(clients=n)(lambda x, taken: (block(x), block(x, where=taken)))
    with in_mesh_of(mesh):
        run = drjax.jit(fn, groups_per_step=1)
        for taken in (random.rand(n) < 0.5, np.zeros(n, bool)):
            of_all, of_some = run(jnp.asarray(x), jnp.asarray(taken))
            np.testing.assert_array_equal(of_all, BLOCKS[block](jnp.asarray(x), axis=0))
            assert of_all.dtype == jnp.int32
            np.testing.assert_array_equal(of_some, jax.jit(fn)(x, taken)[1])


@pytest.mark.parametrize("block", BLOCKS)
def test_data_are_read_once(block):
    n, reads = 12, []

    class Data:
        def __len__(self):
            return n

        def __getitem__(self, i):
            reads.append(i)
            return np.array([i % 5, -i], np.float32)

    best = drjax.jit(drjax.program(clients=n)(block))
    expected = BLOCKS[block](
        jnp.stack([jnp.asarray(x) for x in map(Data().__getitem__, range(n))]), axis=0
    )
    reads.clear()
    np.testing.assert_array_equal(best(Groups(Data())), expected)
    assert sorted(reads) == sorted([0, *range(n)])  # group 0 also for its types
