"""Under `jax.disable_jit`, each block and its gradient give the same numbers.

Covers: drjax._primitives.registration.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers import each_block
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

MESHES = {
    "auto": ({"clients": 4}, AUTO),
    "uneven": ({"clients": 3}, AUTO),
    "explicit": ({"clients": 4}, EXPLICIT),
}
# Before, JAX refuses a hand-written shard_map that has a `jnp.where`, too.
if jax.__version_info__ >= (0, 11):
    MESHES["auto model"] = ({"clients": 2, "model": 2}, AUTO)


@checkerboard(
    16,
    name=each_block.BLOCKS,
    of=[each_block.value, each_block.gradient],
    mesh=MESHES,
)
def test_a_block_without_jit(name, of, mesh):
    f, args = of(name), (jnp.asarray(each_block.X), jnp.asarray(each_block.W))
    with in_mesh(make_mesh(*MESHES[mesh])):
        want = jax.jit(f)(*args)
        with jax.disable_jit():
            got = f(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
