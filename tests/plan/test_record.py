"""Whatever enters a plan has the type that the plan says.

Covers: drjax._plan.record, drjax._plan.value, drjax._plan.steps.
"""

from dataclasses import fields, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import drjax
from drjax import Partition
from drjax.plan import Cond, Gather, Message, Permute, Reduce, Value
from tests.helpers.cases import N
from tests.helpers.plan_files import program, saved
from tests.helpers.raising import raises

X = Value("x", (2, 3), np.dtype("float32"), (Partition("clients", 2),), 24)


def test_a_value_has_its_groups_first_unless_it_says_where():
    assert X.axis == 0 and X.whole_shape(4) == (4, 2, 3)


def test_integers_are_those_of_python():
    value = replace(X, axis=np.int64(1), shape=(np.int32(2), 3), nbytes=np.uint8(24))
    assert value == replace(X, axis=1)
    assert {type(i) for i in (value.axis, value.nbytes, *value.shape)} == {int}
    assert type(replace(X, name=np.str_("y")).name) is str
    assert X.partitioned and not replace(X, over=()).partitioned
    move = new(Permute, X, X, (np.int64(1), 0))
    assert {type(i) for i in move.sources} == {int}
    assert X.shape is replace(X, name="y").shape, "what is right is not copied"


def test_symbolic_dimensions_stay():
    (b,) = export.symbolic_shape("b")
    assert replace(X, shape=(b, 3), nbytes=12 * b).shape == (b, 3)


def new(record: Any, *args, **fields):
    return record(*args, **fields)


def changed(**fields):
    return replace(X, **fields)


WRONG = {
    "Value.name needs str, got int: 1.": lambda: changed(name=1),
    "Value.axis needs int, got float: 0.0.": lambda: changed(axis=0.0),
    "Value.axis needs int, got bool: True.": lambda: changed(axis=True),
    "Value.axis needs int, got float64: np.": lambda: changed(axis=np.float64(0)),
    "Value.nbytes needs int, got ArrayImpl": lambda: changed(nbytes=jnp.ones(2)),
    "Value.shape needs tuple[int, ...], got list: [2": lambda: changed(shape=[2, 3]),
    "Value.shape needs tuple[int, ...], got tuple": lambda: changed(shape=(2, "3")),
    "Value.over needs tuple[Partition, ...], got int": lambda: changed(over=1),
    "Reduce.source needs Value, got str: 'x'.": lambda: new(Reduce, "sum", "x", X),
    "Reduce.wire needs Wire | NoneType, got str": lambda: new(
        Reduce, "sum", X, X, "int8"
    ),
    "Gather.sharded needs bool | str, got NoneType": lambda: new(
        Gather, X, X, sharded=None
    ),
    "Cond.bodies needs tuple[Plan, ...], got tuple": lambda: new(
        Cond, "cond", (), (), (X,)
    ),
    "Message.times needs tuple[int | str, ...]": lambda: new(
        Message, "1", Reduce("sum", X, X), X, 4, (None,)
    ),
}


@pytest.mark.parametrize("text", WRONG)
def test_other_types_are_refused(text):
    error = raises(drjax.DrjaxTypeError, text, WRONG[text])
    assert len(error) < 250


def test_steps_that_are_made_of_anything_else():
    plan = drjax.make_plan(program(drjax.reduce_sum))(jnp.ones(N))
    text = "Plan.steps needs tuple[Step, ...]"
    raises(drjax.DrjaxTypeError, text, replace, plan, steps=(X,))
    for step in plan.steps:
        for field in fields(cast(Any, step)):
            # Their default, or anything.
            if field.name in ("jaxpr", "exported", "inner", "wire", "bound", "work"):
                continue
            text = f"{type(step).__name__}.{field.name} needs "
            raises(drjax.DrjaxTypeError, text, replace, step, **{field.name: None})
    text = "Stage.inputs needs tuple[Value, ...]"
    raises(drjax.DrjaxTypeError, text, replace, plan.server, inputs=("x",))


def test_a_partitioned_result_that_a_vmap_does_not_batch(tmp_path):
    def mean_and_sine(w, x):
        products = drjax.map_fn(jnp.multiply, (drjax.broadcast(w), x))
        return drjax.reduce_mean(products), drjax.map_fn(jnp.sin, x)

    fn, args = jax.vmap(program(mean_and_sine), (0, None)), (jnp.ones(2), jnp.ones(N))
    plan = saved(drjax.make_plan(fn)(*args), tmp_path / "plan.drjax")
    run = drjax.backends.reference.compile(plan)
    for got, want in zip(run(*args), fn(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
