"""`reduce_sum(secure=True)`: values, derivatives, plans, refusals, errors.

What Flower makes of it is tested in `tests/engines/flower/`.

Covers: drjax._api.collective_options, drjax._plan_file.check_plan.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._plan_file.check_plan import check_step
from drjax.backends import in_process
from drjax.plan import Reduce, Value
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import in_mesh, make_mesh
from tests.helpers.plan_files import forge, read_members, sgd_plan, steps_of
from tests.helpers.raising import X3, raises, three

N = 6
X = np.random.RandomState(0).randn(N, 4).astype(np.float32)


@drjax.program(clients=N)
def step(model, x, **options):
    y = drjax.map_fn(lambda m, x: jnp.sin(m * x), (drjax.broadcast(model), x))
    return drjax.reduce_sum({"y": y, "count": y > 0}, **options)


plain = lambda m, x: step(m, x)["y"].sum()
secure = lambda m, x: step(m, x, secure=True, min_groups=3)["y"].sum()
M = jnp.arange(1, 5.0)


def same(x, y):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), x, y)


@pytest.mark.slow
@checkerboard(3, devices=[4, 3, 0])
def test_devices_compute_as_ever(devices):
    with in_mesh(make_mesh({"clients": devices}) if devices else None):
        for transform, data in (
            (lambda f: f, X),
            (lambda f: jax.grad(f, argnums=(0, 1)), X),
            (lambda f: lambda m, x: jax.jvp(f, (m, x), (m, x)), X),
            (lambda f: jax.vmap(f, in_axes=(None, 0)), np.stack([X, 2 * X])),
            (jax.hessian, X),
        ):
            for run in (jax.jit, functools.partial(drjax.jit, groups_per_step=1)):
                same(run(transform(secure))(M, data), transform(plain)(M, data))


def equations(fn, *args):
    jaxpr = jax.make_jaxpr(drjax.program(clients=N)(fn))(*args)
    return [eqn for eqn in jaxpr.eqns if eqn.primitive is drjax.primitives.reduce_sum_p]


def test_the_demand_is_in_the_equation_and_in_that_of_the_tangent():
    total = lambda x: drjax.reduce_sum(x, secure=True)
    assert [e.params["secure"] for e in equations(total, X)] == [2]
    assert "secure" not in equations(drjax.reduce_sum, X)[0].params
    tangents = equations(lambda x: jax.jvp(total, (x,), (x,)), X)
    assert [e.params["secure"] for e in tangents] == [2, 2]
    batched = equations(jax.vmap(total, in_axes=1), X)
    assert [e.params["secure"] for e in batched] == [2]


def test_plans(tmp_path):
    plan = drjax.make_plan(lambda m, x: step(m, x, secure=True, min_groups=3))(M, X)
    assert [r.secure for r in plan.rounds[0].reduces] == [3, 3]
    assert "16 B a group, secure, of 3 groups at least" in str(plan)
    assert [m.secure for m in plan.communication().messages] == [0, 3, 3]
    assert ": float32[4], secure" in str(plan.communication())
    path = tmp_path / "plan.drjax"
    plan.save(path)
    loaded = drjax.load_plan(path)
    assert loaded.rounds[0].reduces == plan.rounds[0].reduces
    for each in (plan, loaded):
        same(drjax.backends.reference.compile(each)(M, X), step(M, X))
        same(drjax.backends.xla.compile(each)(M, X), step(M, X))


def test_a_bound_is_of_the_sum_alone(tmp_path):
    """Its tangents and cotangents may be of any magnitude."""
    total = lambda x: drjax.reduce_sum(x, secure=True, bound=3)
    tangents = equations(lambda x: jax.jvp(total, (x,), (x,)), X)
    assert [e.params.get("bound") for e in tangents] == [3.0, None]
    plan = drjax.make_plan(lambda m, x: step(m, x, secure=True, bound=2.5))(M, X)
    path = tmp_path / "plan.drjax"
    plan.save(path)
    for each in (plan, drjax.load_plan(path)):
        assert [r.bound for r in each.rounds[0].reduces] == [2.5, 2.5]
        assert "of 2 groups at least, numbers up to 2.5" in str(each)
    gradient = jax.grad(lambda m: step(m, X, secure=True, bound=2.5)["y"].sum())
    (a_round,) = drjax.make_plan(gradient)(M).rounds
    assert [(r.secure, r.bound) for r in a_round.reduces] == [(2, None)]


def test_plans_of_gradients_and_loops():
    loops = lambda m, x: jax.lax.scan(
        lambda m, _: (m + step(m, x, secure=True)["y"], None), m, length=2
    )[0]
    (a_round,) = drjax.make_plan(drjax.program(clients=N)(loops))(M, X).rounds[:1]
    body = a_round.loops[0].bodies[0]
    assert [r.secure for r in body.rounds[0].reduces] == [2]
    # A slice of the gradient tells as much of a group as its summand.
    plan = drjax.make_plan(jax.value_and_grad(secure))(M, X)
    reduces = [r for a_round in plan.rounds for r in a_round.reduces]
    assert sorted(r.secure for r in reduces) == [3, 3]


def test_engines_that_see_slices_refuse():
    plan = drjax.make_plan(lambda m, x: step(m, x, secure=True))(M, X)
    text = "no process but a group's own may see its slice. This engine's processes"
    raises(drjax.DrjaxValueError, text, in_process.compile, plan)

    def loop(m, x):
        add = lambda m, _: (m + step(m, x, secure=True)["y"], None)
        return jax.lax.scan(add, m, length=2)[0]

    looped = drjax.make_plan(drjax.program(clients=N)(loop))(M, X)
    raises(drjax.DrjaxValueError, text, in_process.compile, looped)


def test_forged_demands_are_refused():
    x = Value("x", (), np.dtype("float32"), (drjax.Partition("clients", 4),), 4)
    y = Value("y", (), np.dtype("float32"), (), 4)
    for op, demand in (("max", 3), ("mean", 1), ("sum", 1), ("sum", -2)):
        with pytest.raises(ValueError, match="cannot be secure"):
            check_step(Reduce(op, x, y, secure=demand), None, None)
    for demand, bound in ((0, 2.0), *((3, b) for b in (0.0, -1.0, float("nan")))):
        with pytest.raises(ValueError, match="is no bound of a secure sum"):
            check_step(Reduce("sum", x, y, secure=demand, bound=bound), None, None)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"secure": True}, "Reduce.secure needs int, got bool"),
        ({"secure": -2}, "-2 is not a count"),
        ({"step": "Gather", "secure": 3}, "a Gather has no ['op', 'secure']"),
        ({"secure": 3, "bound": "8"}, "Reduce.bound needs float | NoneType, got str"),
        ({"secure": 3, "bound": [1.0]}, "Reduce.bound needs float | NoneType"),
    ],
)
def test_forged_files_with_demands_are_refused(change, text, tmp_path):
    path = tmp_path / "plan.drjax"
    sgd_plan().save(path)
    forged = lambda m: steps_of(m["plan"], "Reduce")[0].update(change)
    forge(path, read_members(path), change=forged)
    raises(drjax.PlanFileError, text, drjax.load_plan, path)


@pytest.mark.parametrize(
    "error, text, options",
    [
        (TypeError, "secure= as True or False, got 2", {"secure": 2}),
        (ValueError, "min_groups= with secure=True only", {"min_groups": 2}),
        (TypeError, "as an integer, got float", {"secure": True, "min_groups": 2.0}),
        (ValueError, "from 2 to 3", {"secure": True, "min_groups": 1}),
        (ValueError, "got 4. The sum", {"secure": True, "min_groups": 4}),
        (ValueError, "bound= with secure=True only", {"bound": 2.0}),
        (TypeError, "bound= as a Python number", {"secure": True, "bound": "8"}),
        (TypeError, "bound= as a Python number", {"secure": True, "bound": True}),
        (ValueError, "bound= as a positive number", {"secure": True, "bound": 0}),
        (ValueError, "a positive number, got inf", {"secure": True, "bound": np.inf}),
        (ValueError, "no where= or by=", {"secure": True, "where": [True] * 3}),
        (ValueError, "no where= or by=", {"secure": True, "by": [0] * 3, "num": 1}),
    ],
)
def test_errors(error, text, options):
    raises(error, text, three(functools.partial(drjax.reduce_sum, **options)), X3)


def test_sums_within_a_group_are_not_secure():
    """Its process would see all summands."""
    x = np.zeros((2, 3), np.float32)
    inner = drjax.program(groups=3)(lambda x: drjax.reduce_sum(x, secure=True))
    nested = drjax.program(pods=2)(lambda x: drjax.map_fn(inner, x))
    levels = drjax.program(pods=2, groups=3)
    over = lambda over: levels(lambda x: drjax.reduce_sum(x, secure=True, over=over))
    for fn in (nested, over("groups"), over(None)):
        raises(drjax.DrjaxValueError, "Sum over the outermost level", fn, x)
    np.testing.assert_array_equal(over("pods")(x), np.zeros(3))
