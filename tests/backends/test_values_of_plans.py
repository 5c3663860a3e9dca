"""Plans compute what programs compute: `drjax.jit`, and one group at a time.

Every program of the table, its derivatives and a loop over rounds of it, against
`jax.jit` of the same function. Each pair meets one mesh and chunk size by default.

Covers: drjax.backends.reference, drjax.backends, drjax.backends.xla.compile_plan,
drjax.backends.xla.mesh_interpreter, drjax.backends._python_loops,
drjax._jaxprs.eval_jaxpr, drjax._jit.jit.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import reference
from drjax.backends.xla import reuse_accumulators
from tests.helpers.cases import CASES, GRID, MESHES, N, checkerboard, on_mesh, some
from tests.helpers.plan_transforms import (
    TRANSFORMS,
    argnums,
    assert_same,
    expected,
    total,
)

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


slowly = functools.partial(some, marks=pytest.mark.slow)


def case_of(name: str):
    return next(case for case in CASES if case.name == name)


STEPS = (1, 3, None)  # groups per step


def pairs():
    """Each case and transform on all meshes, with all steps.

    Each runs on one mesh in the slow tests, every seventeenth by default.
    """
    for (i, case), (j, name) in itertools.product(
        enumerate(CASES), enumerate(TRANSFORMS)
    ):
        meshes = [m for m in MESHES if case.on_explicit or "explicit" not in m]
        for k, mesh in enumerate(meshes):
            default = k == 3 * (i + 2 * j) % len(meshes)
            slow = pytest.mark.slow if (i + j) % 17 else ()
            yield pytest.param(
                case, name, mesh, STEPS[(i + k) % 3], marks=slow if default else GRID,
                id=f"{case.name}-{name}-{mesh}-{STEPS[(i + k) % 3]}",
            )  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "name", "mesh", "step"), [*pairs()])
def test_jit(case, name, mesh, step, monkeypatch):
    if step == 1:
        monkeypatch.setattr(reuse_accumulators, "LARGE", 0)
    with on_mesh(case, mesh) as args:
        result = drjax.jit(TRANSFORMS[name](case), groups_per_step=step)(*args)
    assert_same(result, expected(case, name))


@pytest.mark.sampled
@checkerboard(4 * len(TRANSFORMS) - 1, case=[c.name for c in CASES], name=TRANSFORMS)
def test_one_group_at_a_time(case, name):
    case = case_of(case)
    with on_mesh(case, "none") as args:
        plan = drjax.make_plan(TRANSFORMS[name](case))(*args)
        result = reference.compile(plan)(*args)
    assert_same(result, expected(case, name))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", slowly([c.name for c in CASES], *[c.name for c in CASES[::11]])
)
def test_derivatives_of_the_jitted_function(name):
    case = case_of(name)
    with on_mesh(case, "auto-4") as args:
        scalar = drjax.jit(total(case.fn), groups_per_step=1)
        result = jax.value_and_grad(scalar, argnums(case))(*args)
        tangent = jax.jvp(scalar, args, args)[1]
        twice = jax.vmap(scalar, 0)(*(jnp.stack([a, 2 * a]) for a in args))
    value, grads = expected(case, "value_and_grad")
    assert_same(result, (value, grads))
    slopes = [np.vdot(g, a) for g, a in zip(grads, case.args, strict=True)]
    assert_same(tangent, sum(slopes))
    assert_same(twice[0], value)


@checkerboard(5, mesh=["none", "auto-2", "auto-8", "explicit-8"], step=[1, 3, None])
def test_constant_results_of_a_mapped_function(mesh, step):
    def one(x):
        return jnp.sum(x), 1.0, True, np.arange(2.0), jax.random.key(7)

    @drjax.program(clients=N)
    def constants(x):
        total, count, flag, slices, keys = drjax.map_fn(one, x)
        return (
            drjax.reduce_sum((total, count)), drjax.reduce_max(flag),
            drjax.reduce_mean(slices), count, drjax.gather(flag),
            jax.random.key_data(drjax.gather(keys)),
        )  # fmt: skip

    case = next(case for case in CASES if case.name == "scattered_squares")
    with on_mesh(case, mesh) as (x,):
        result = drjax.jit(constants, groups_per_step=step)(x)
        compiled = jax.jit(constants)(x)
    assert_same(result, compiled)
    assert jax.tree.map(lambda a: a.dtype, result) == jax.tree.map(
        lambda a: a.dtype, compiled
    )


def test_constant_results_one_group_at_a_time():
    @drjax.program(clients=N)
    def constants(x):
        return drjax.map_fn(lambda a: (True, 1, 1.0), x), drjax.reduce_sum(x), False

    x = jnp.arange(float(N))
    result = reference.compile(drjax.make_plan(constants)(x))(x)
    compiled = jax.jit(constants)(x)
    assert_same(result, compiled)
    assert jax.tree.map(jnp.result_type, result) == jax.tree.map(
        jnp.result_type, compiled
    )


def test_the_reference_uses_neither_vmap_nor_a_lowering_of_ours(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("forbidden")

    case = next(case for case in CASES if case.name == "maml")
    value_and_grad = expected(case, "value_and_grad")
    with on_mesh(case, "none") as args:
        plan = drjax.make_plan(TRANSFORMS["value_and_grad"](case))(*args)
        for name in ("execute_map", "execute_reduce_sum", "shard_map_over_devices"):
            for module in _modules():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, forbidden)
        monkeypatch.setattr(jax, "vmap", forbidden)
        result = reference.compile(plan)(*args)
    assert_same(result, value_and_grad)


def _modules():
    import sys

    return [m for name, m in sys.modules.items() if name.startswith("drjax.")]
