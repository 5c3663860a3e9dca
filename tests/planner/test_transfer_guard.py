"""Planning and compiling move none of the users' data, so that a guard allows them.

Covers: drjax._planner.make_plan.
"""

import jax
import jax.numpy as jnp
import pytest

import drjax
from tests.helpers import each_block
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import in_mesh_of


def test_the_table_has_each_block():
    assert {name.split(",")[0] for name in each_block.BLOCKS} == each_block.names()


@checkerboard(
    3,
    name=each_block.BLOCKS,
    of=[each_block.value, each_block.gradient],
    shape=["none", "clients"],
)
def test_a_block_is_planned_under_a_transfer_guard(name, of, shape):
    args = jnp.asarray(each_block.X), jnp.asarray(each_block.W)
    with in_mesh_of(None if shape == "none" else {"clients": 4}):
        with jax.transfer_guard("disallow"):
            drjax.jit(of(name), groups_per_step=1).lower(*args)


@pytest.mark.parametrize("name", each_block.BLOCKS)
def test_make_plan_needs_no_transfer(name):
    args = jnp.asarray(each_block.X), jnp.asarray(each_block.W)
    with jax.transfer_guard("disallow"):
        drjax.make_plan(each_block.value(name))(*args)
