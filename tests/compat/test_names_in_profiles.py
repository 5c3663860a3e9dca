"""Names of blocks in compiled code, which profilers show, and lines of NaNs.

Covers: drjax._compat.rule_registries, drjax._compat.jaxprs.
"""

import re

import jax
import jax.numpy as jnp
import pytest

import drjax
from tests.helpers.compiled import hlo_text
from tests.helpers.meshes import in_mesh, make_mesh


def layer(x):
    with jax.named_scope("inner"):
        return jnp.sin(x) * 2


@drjax.program(clients=4)
def step(x):
    return drjax.reduce_mean(drjax.map_fn(layer, drjax.broadcast(x)))


def names(fn, *args) -> set[str]:
    """The names of operations in compiled code, with the scopes around them."""
    return set(re.findall(r'op_name="([^"]*)"', hlo_text(fn, *args)))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_blocks_have_names(sharded, gradient):
    f = jax.grad(lambda x: step(x).sum()) if gradient else step
    with in_mesh(make_mesh({"clients": 4}) if sharded else None):
        compiled = names(f, jnp.ones(3))
    assert any(re.search(r"drjax\.map_fn\(layer\).*inner", x) for x in compiled)
    expected = "drjax.reduce_sum" if gradient else "drjax.reduce_mean"
    assert any(expected in x for x in compiled)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("k", [None, 1])
def test_rounds_and_blocks_of_a_plan_have_names(sharded, k):
    with in_mesh(make_mesh({"clients": 2}) if sharded else None):
        compiled = names(drjax.jit(step, groups_per_step=k), jnp.ones(3))
    inner = r"drjax\.round_1/.*drjax\.map_fn\(layer\).*inner.*/sin"
    assert any(re.search(inner, x) for x in compiled)
    assert any("drjax.round_1/" in x and "drjax.reduce_mean" in x for x in compiled)


# ---------------------------------------------------------------------------------
# NaNs


def logarithm(x):
    y = x - 1
    return jnp.log(y)


LINE = logarithm.__code__.co_firstlineno + 2


@drjax.program(clients=4)
def mean_of_logarithms(x):
    return drjax.reduce_mean(drjax.map_fn(logarithm, x))


@pytest.mark.parametrize(
    "run",
    [
        mean_of_logarithms,
        jax.jit(mean_of_logarithms),
        drjax.jit(mean_of_logarithms),
        drjax.jit(mean_of_logarithms, groups_per_step=1),
        drjax.jit(mean_of_logarithms, groups_per_step=2),
    ],
    ids=["eager", "jax.jit", "drjax.jit", "one by one", "two by two"],
)
def test_a_nan_is_found_at_the_line_of_the_user(run, capsys):
    where = re.escape(f"test_names_in_profiles.py:{LINE} (logarithm)")
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=rf"\(nan\).* in log at .*{where}"):
            run(jnp.zeros(4))
    assert not jnp.isnan(run(jnp.full(4, 3.0)))


@pytest.mark.parametrize("k", [None, 1])
def test_a_nan_on_a_mesh_is_found_too(k, capsys):
    """But not in a loop over the groups of a device, which JAX runs compiled."""
    line = re.escape(f"test_names_in_profiles.py:{LINE} (logarithm)")
    where = "nan" if k else rf"\(nan\).* at .*{line}"
    with in_mesh(make_mesh({"clients": 2})), jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=where):
            drjax.jit(mean_of_logarithms, groups_per_step=k)(jnp.zeros(4))
