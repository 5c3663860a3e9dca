"""Texts of errors: they end, whatever the pytree, and say what goes where.

Covers: drjax._error_texts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax import _error_texts
from drjax.backends import Groups, in_process, reference, xla
from tests.helpers.raising import raises

MANY = 50
LONGEST = 2000


def mean(n, block=drjax.reduce_mean):
    return drjax.program(clients=n)(lambda x: block(x))


def params(*leading, without=None):
    return {
        f"layer{i}": {"w": jnp.zeros((*leading, 3)), "b": jnp.zeros(leading)}
        for i in range(MANY)
        if i != without
    }


def on_groups(example, data):
    """A call with one pytree for each group, of a plan for another structure."""
    plan = drjax.make_plan(mean(2))(example)
    return lambda: in_process.compile(plan)(Groups([data] * 2))


IMAGES = np.zeros((40, 50))
CLIENTS = [np.zeros(3, np.float32)] * 400
both = drjax.program(clients=400)(lambda x: drjax.map_fn(lambda x: x, x))
forgotten = drjax.program(clients=4)(lambda p, x: drjax.map_fn(lambda p, x: x, (p, x)))
pair = drjax.program(clients=4)(
    lambda p, x: drjax.map_fn(lambda p, x: x, (drjax.broadcast(p), x))
)
SLIPS = {
    "a client as lists": (
        on_groups({"x": jnp.zeros((2, 40, 50))}, {"x": IMAGES.tolist()}),
        "['x'] is a list of 40, where the plan has an array: numpy.asarray makes one",
    ),
    "a layer that is missing": (
        on_groups(params(2), params(without=7)), "add 'layer7'",
    ),
    "all layers are missing": (
        on_groups(params(2), {"x": np.zeros(1, np.float32)}), "and 40 more keys",
    ),
    "other names in each layer": (
        on_groups(params(2), jax.tree.map(lambda x: {"y": x}, params())),
        "(100 leaves)",
    ),
    "lists in a program": (
        lambda: mean(3)({"x": np.zeros((7, 5)).tolist()}),
        "x['x'] is a list of numbers",
    ),
    "a list of clients": (
        lambda: mean(400)(CLIENTS), "x is a list of 400 items, one for each group: st",
    ),
    "a list of clients' dicts": (
        lambda: drjax.jit(both)([{"x": x, "y": x} for x in CLIENTS]),
        "jax.tree.map(lambda *slices: jax.numpy.stack(slices), *",
    ),
    "a list of clients to shard": (
        lambda: drjax.shard(CLIENTS, partition=mean(400)), "is a list of 400 items",
    ),
    "a model, not broadcast": (
        lambda: forgotten(params(), jnp.zeros(4)), "and 90 more leaves\n",
    ),
    "scatter": (
        lambda: mean(4, drjax.scatter)(params()), "and 90 more leaves\n",
    ),
    "weights": (
        lambda: drjax.program(clients=4)(drjax.reduce_weighted_mean)(
            params(4), {"a": params(4)}
        ),
        "Pass one jax.Array if all leaves",
    ),
    "a state": (
        lambda: drjax.program(clients=4)(
            lambda x: drjax.reduce(lambda a, b: a, x, {"a": x})
        )(params(4)),
        "Pass one array or number for each leaf of x",
    ),
    "a put into another structure": (
        lambda: drjax.program(clients=4)(
            lambda x: drjax.put(x, jnp.arange(4), into={"a": x})
        )(params(4)),
        "(100 leaves)",
    ),
    "another structure for xla": (
        lambda: xla.compile(drjax.make_plan(pair)(params(), jnp.zeros(4)))(
            {"a": params()}, jnp.zeros(4)
        ),
        "Plan it again",
    ),
    "another structure for the reference": (
        lambda: reference.compile(drjax.make_plan(pair)(params(), jnp.zeros(4)))(
            {"a": params()}, jnp.zeros(4)
        ),
        "Plan it again",
    ),
    "another structure for an engine": (
        lambda: in_process.compile(drjax.make_plan(pair)(params(), jnp.zeros(4)))(
            {"a": params()}, jnp.zeros(4)
        ),
        "Plan it again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_errors_about_large_pytrees_are_short(slip):
    call, text = SLIPS[slip]
    message = raises(drjax.DrjaxError, text, call)
    assert len(message) < LONGEST


def test_ten_leaves_and_how_many_more():
    lines = [str(i) for i in range(13)]
    assert _error_texts.listed(lines[:11]) == "\n".join(lines[:11])
    expected = "\n".join([*lines[:10], "and 3 more leaves"])
    assert _error_texts.listed(lines) == expected


# ---------------------------------------------------------------------------------
# What goes where


weighted = drjax.program(clients=3)(
    lambda w, d: drjax.reduce_mean(
        drjax.map_fn(lambda w, d: w * d["x"], (drjax.broadcast(w), d))
    )
)
DATA = [{"x": np.ones(2, np.float32)}] * 3


def plan_of_weighted():
    return drjax.make_plan(weighted)(1.0, {"x": jnp.zeros((3, 2))})


PLACES = {
    "jax.jit": lambda x: jax.jit(weighted)(1.0, x),
    "the program": lambda x: weighted(1.0, x),
    "xla": lambda x: xla.compile(plan_of_weighted())(1.0, x),
    "reference": lambda x: reference.compile(plan_of_weighted())(1.0, x),
    "make_plan": lambda x: drjax.make_plan(weighted)(1.0, x),
    "check": lambda x: drjax.check(weighted)(1.0, x),
}


@pytest.mark.parametrize("place", PLACES)
def test_groups_are_for_engines(place):
    message = raises(
        drjax.DrjaxError, "Groups and Parquet are arguments of what drjax.jit and an",
        PLACES[place], Groups(DATA),
    )  # fmt: skip
    assert "stack the groups' arrays" in message


def fake(module, name, *bases):
    """A class as another library has it."""
    return type(name, bases, {"__module__": module})


TABLES = {
    "A DataFrame is no array: pass": fake("pandas.core.frame", "DataFrame"),
    "A groupby is no array: give": fake("pandas.core.groupby", "DataFrameGroupBy"),
    "An h5py object is no array: read": fake("h5py._hl.group", "Group"),
    "A dataset of Ray Data is an argument of what": fake("ray.data.dataset", "Dataset"),
}  # fmt: skip


@pytest.mark.parametrize("text", TABLES)
def test_tables_of_other_libraries(text):
    table = TABLES[text]()
    for place in ("the program", "xla", "reference", "make_plan", "check"):
        raises(drjax.DrjaxTypeError, text, PLACES[place], table)
    if "h5py" not in text:
        raises(drjax.DrjaxTypeError, text, Groups, table)


def test_groups_take_no_dict():
    text = "The keys of a dict are not the groups: pass Groups([*clients.values()])"
    clients = dict(enumerate(DATA))
    raises(drjax.DrjaxTypeError, text, Groups, clients)
    run = in_process.compile(plan_of_weighted())
    np.testing.assert_array_equal(run(1.0, Groups([*clients.values()])), np.ones(2))
    np.testing.assert_array_equal(run(1.0, Groups(clients.values())), np.ones(2))
    file = fake("h5py._hl.files", "File", dict)({"a": 1})
    raises(drjax.DrjaxTypeError, text, Groups, file)
