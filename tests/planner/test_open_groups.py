"""Plans for any number of groups, and what depends on that number.

Covers: drjax._planner.open_groups, drjax._compat.symbolic_size,
drjax.engines.core.number_of_groups.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import Groups, reference
from drjax.engines.core.number_of_groups import for_arguments
from tests.helpers.cases import checkerboard
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")
N, D = 4, 3


def arguments(n):
    return jnp.arange(D) / D, jnp.cos(jnp.arange(n * D * 1.0)).reshape(n, D)


def work(w, x):
    return jnp.sum((x @ w) ** 2)


def work_of_groups(w, x):
    return drjax.map_fn(work, (drjax.broadcast(w), x))


def federated(w, x):
    """Two rounds, with gradients in the groups and slices that a later round reads."""
    own = drjax.map_fn(jax.grad(work), (drjax.broadcast(w), x))
    mean = drjax.reduce_mean(own)
    far = drjax.map_fn(jnp.subtract, (own, drjax.broadcast(mean)))
    return mean, drjax.reduce_max(far), own


def rounds(w, x):
    step = lambda w, _: (w - drjax.reduce_mean(federated(w, x)[2]), jnp.sum(w))
    return jax.lax.scan(step, w, None, length=3)


OPEN = {
    "rounds": federated,
    "loop of rounds": rounds,
    "inner jit": lambda w, x: jax.jit(federated)(w, x),
    "inner drjax.jit": lambda w, x: drjax.jit(federated)(w, x),
    "masked mean": lambda w, x: drjax.reduce_mean(
        x, where=drjax.map_fn(lambda x: x[0] > 0, x)
    ),
    "gradient of a weighted mean": jax.grad(
        lambda w, x: drjax.reduce_weighted_mean(
            work_of_groups(w, x), drjax.map_fn(lambda x: 1 + x[0] ** 2, x)
        )
    ),
    "fold": lambda w, x: drjax.reduce(jnp.logaddexp, work_of_groups(w, x), -jnp.inf),
    "slice": lambda w, x: drjax.select(x, 2),
    "index": lambda w, x: drjax.reduce_max(
        drjax.map_fn(lambda i, x: i * x, (drjax.partition_index(), x))
    ),
    "inner program": lambda w, x: drjax.map_fn(
        lambda x: drjax.program(clients=N)(drjax.reduce_sum)(jnp.stack([x] * N)), x
    ),
    "count": lambda w, x: drjax.reduce_sum(x) / drjax.reduce_sum(drjax.broadcast(1.0)),
    "zeros like the groups' values": lambda w, x: jax.lax.scan(
        lambda c, _: (c + x, drjax.reduce_mean(c)), jnp.zeros_like(x), None, length=2
    )[1],
    "one level inside": lambda w, x: drjax.map_fn(
        lambda x: jax.lax.fori_loop(0, x.shape[0] // 2, lambda i, s: s + x[i], 0.0), x
    ),
}


@checkerboard(3, name=OPEN)
def test_the_plan_for_any_number_is_that_for_each(name):
    make = lambda n: drjax.program(clients=n)(OPEN[name])
    plan = drjax.make_plan(make(N), open_groups=True)(*arguments(N))
    assert plan.open_groups and "clients:4 (or any number of groups)" in str(plan)
    for n in (3, 7):
        args = arguments(n)
        other = for_arguments(plan, args, {})
        assert other.size == n and other.with_groups(N) == plan.with_groups(N)
        result = reference.compile(other)(*args)
        expected = jax.jit(make(n))(*args)
        near = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        jax.tree.map(near, result, expected)


@jax.jit
def times_groups(w):
    """Its arguments have the same types for any number of groups."""
    return w * drjax.partition_size()


def named(name):
    """A function of this name, which values of plans have from it."""
    fn = lambda x: jnp.sum(x)
    fn.__name__ = name
    return fn


DEPEND = {
    "division": (lambda w, x: drjax.reduce_sum(x) / x.shape[0], "div at .*test_open"),
    "jax.numpy's mean": (
        lambda w, x: jnp.mean(drjax.map_fn(jnp.sum, x)),
        "div at .*in server, differs between 4 and 5 groups. Only drjax.reduce_mean",
    ),
    "gradient": (
        jax.grad(lambda w, x: drjax.reduce_mean(work_of_groups(w, x))),
        "test_open.*differs between 4 and 5 groups.*gradients in the mapped function",
    ),
    "in the groups": (
        lambda w, x: drjax.map_fn(lambda s: s * len(x), x),
        "mul at .*in function, differs",
    ),
    "in a helper": (lambda w, x: drjax.reduce_sum(x) * times_groups(w), "mul at"),
    "random numbers": (
        lambda w, x: drjax.reduce_sum(x) * jax.random.normal(KEY, x.shape)[0, 0],
        "random_bits at",
    ),
    "steps": (
        lambda w, x: jax.lax.fori_loop(
            0, len(x), lambda i, w: drjax.reduce_mean(drjax.broadcast(w) + x), w
        ),
        "length of the loop scan differs",
    ),
    "gather": (lambda w, x: drjax.gather(x), r"it gathers .*has as many slices"),
    "scatter": (lambda w, x: drjax.scatter(jnp.arange(4.0)) + 1, "it scatters iota"),
    "move": (lambda w, x: drjax.shift(x, 1), r"it moves x: .*\(permute\)"),
    "constant": (
        lambda w, x: drjax.map_fn(jnp.add, (x, np.arange(4.0, dtype=np.float32))),
        "it scatters constant.0",
    ),
    "choice": (
        lambda w, x: drjax.map_fn(jnp.sin if len(x) < 5 else jnp.cos, x),
        "sin at .*differs between 4 and 5 groups",
    ),
    "name": (
        lambda w, x: drjax.reduce_sum(drjax.map_fn(named(f"of_{len(x)}"), x)),
        "the type of of_4.*, in of_4, differs between 4 and 5 groups",
    ),
    "no program": (lambda w, x: 2 * w, "it calls no building block"),
    # What is the same for 4 and 5 groups, but not for all numbers.
    "half": (
        lambda w, x: drjax.reduce_sum(x) / (drjax.partition_size() // 2),
        "dim_as_value at .*test_open_groups.* computes with the number of groups. A "
        "plan for any number of groups has a symbol .* write drjax.reduce_mean",
    ),
    "a share": (
        lambda w, x: drjax.reduce_sum(x) / max(1, x.shape[0] // 10),
        "the code at .*test_open_groups.* depends on the number of groups "
        r"\(InconclusiveDimensionOperation",
    ),
    "half, in the groups": (
        lambda w, x: drjax.map_fn(lambda s: s / (x.shape[0] // 2), x),
        "depends on the number of groups|computes with the number",
    ),
    "at most": (
        lambda w, x: drjax.reduce_sum(x) * min(x.shape[0], 3),
        "the code at .*test_open",
    ),
    "many": (
        lambda w, x: (drjax.reduce_sum if len(x) > 6 else drjax.reduce_mean)(x),
        "the code at .*test_open",
    ),
    "one": (
        lambda w, x: w if x.shape[0] == 1 else drjax.reduce_mean(x),
        "the code at .*test_open.*'groups' == '1' is inconclusive",
    ),
    "a shape": (
        lambda w, x: w if x.shape == (9, D) else drjax.reduce_mean(x),
        "the code at .*test_open.*'groups' == '9' is inconclusive",
    ),
    "half of the steps": (
        lambda w, x: jax.lax.scan(
            lambda w, _: (w * 0.5 + drjax.reduce_mean(x), None),
            w,
            None,
            length=x.shape[0] // 2,
        )[0],
        "the code at .*test_open",
    ),
    "a number of ones": (
        lambda w, x: drjax.reduce_sum(x) / (jnp.ones(x.shape[0] // 2).sum() + 1),
        "computes with the number of groups|the code at",
    ),
    "a sum of ones": (
        lambda w, x: drjax.reduce_sum(x) / (jnp.ones(x.shape[0], int).sum() // 2),
        "computes with the number of groups|differs between",
    ),
    "as an array": (
        lambda w, x: drjax.reduce_sum(x) * jnp.asarray(x.shape[0] > 6),
        "the code at .*test_open",
    ),
    "by NumPy": (
        lambda w, x: drjax.reduce_sum(x) * np.arange(x.shape[0] // 2 + 1)[0],
        "the code at .*test_open",
    ),
}
KEY = jax.random.key(0)


@pytest.mark.parametrize("name", DEPEND)
def test_what_depends_on_the_number(name):
    body, text = DEPEND[name]

    @drjax.program(clients=N)
    def fn(w, x):
        return body(w, x)

    drjax.make_plan(fn)(*arguments(N))
    begin = r"fn has no plan for any number of groups \(open_groups=True\): .*"
    with pytest.raises(drjax.PlanError, match=begin + f"({text})"):
        drjax.make_plan(fn, open_groups=True)(*arguments(N))


def test_other_numbers_are_refused_without_it(tmp_path):
    fn = drjax.program(clients=N)(federated)
    plan = drjax.make_plan(fn)(*arguments(N))
    text = "a plan for 4 groups, and may depend on that number. drjax.make_plan(..., op"
    raises(drjax.PlanError, text, plan.with_groups, 3)
    assert plan.with_groups(N) is plan
    text = "got (3, 3). Plan it again; or, for other numbers of groups, plan it with"
    raises(drjax.DrjaxValueError, text, reference.compile(plan), *arguments(3))
    opened = drjax.make_plan(fn, open_groups=True)(*arguments(N))
    text = "needs a size that is a positive integer, got 0"
    raises(drjax.DrjaxValueError, text, opened.with_groups, 0)
    opened.with_groups(6).save(tmp_path / "plan.drjax")
    loaded = drjax.load_plan(tmp_path / "plan.drjax")
    assert loaded.open_groups and loaded.size == 6
    result = reference.compile(loaded.with_groups(3))(*arguments(3))
    expected = drjax.program(clients=3)(federated)(*arguments(3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5), result, expected)


def test_the_number_that_arguments_tell():
    @drjax.program(clients=N)
    def mean(*, scale, x):
        return scale * drjax.reduce_mean(x)

    x = jax.ShapeDtypeStruct((N,), jnp.float32)
    plan = drjax.make_plan(mean, open_groups=True)(scale=jnp.float32(1), x=x)
    items = [np.float32(0)] * 6
    tells = {6: Groups(items), 4: Groups(lambda: iter(items)), 2: np.zeros(2)}
    for n, x in tells.items():
        assert for_arguments(plan, (), {"scale": 1.0, "x": x}).size == n
