"""Errors of declaring programs and of calling blocks in the wrong place.

Covers: drjax._api.program, drjax._api.resolve, drjax._errors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.raising import X3, raises, three


def test_the_family_of_errors():
    assert issubclass(drjax.DrjaxTypeError, TypeError)
    assert issubclass(drjax.DrjaxValueError, ValueError)
    assert issubclass(drjax.ScopeError, RuntimeError)
    assert issubclass(drjax.MeshError, ValueError)


# ---------------------------------------------------------------------------------
# Declaring a program


@pytest.mark.parametrize("size", [2.5, 3.0, True, "3", None, [3], np.array([3])])
def test_a_size_that_is_not_an_integer(size):
    text = "Partition 'clients' needs a size that is a positive integer, got "
    text += f"{type(size).__name__}: {size!r}. Write for instance @drjax.program("
    raises(drjax.DrjaxTypeError, text, lambda: drjax.program(clients=size))
    raises(drjax.DrjaxTypeError, text, lambda: drjax.Partition("clients", size))


def test_a_traced_size():
    def f(n):
        return drjax.program(clients=n)(drjax.partition_index)()

    raises(drjax.DrjaxTypeError, "got DynamicJaxprTracer", jax.jit(f), 3)


@pytest.mark.parametrize("size", [0, -1, np.int64(0)])
def test_a_size_below_one(size):
    text = f"needs a size that is a positive integer, got {size}: there is at least"
    raises(drjax.DrjaxValueError, text, lambda: drjax.program(clients=size))


@pytest.mark.parametrize("size", [3, np.int64(3), np.array(3), np.uint8(3)])
def test_sizes_that_are_integers(size):
    assert drjax.program(clients=size)(drjax.partition_size)() == 3


@pytest.mark.parametrize(
    "keywords, meant",
    [
        (dict(mesh_axis="data", clients=3), "'mesh_axis'; did you mean 'mesh_axes'?"),
        (dict(mesh_axis="data"), "'mesh_axis'; did you mean 'mesh_axes'?"),
        (dict(partition_sizes=3), "'partition_sizes'; did you mean 'partition_size'?"),
        (dict(partition=3), "'partition'; did you mean 'partition_size'?"),
        (dict(placement={"a": 3}), "'placement'; did you mean 'placements'?"),
        (dict(Mesh=None, clients=3), "'Mesh'; did you mean 'mesh'?"),
        (dict(use_abstract_meshes=1, a=3), "did you mean 'use_abstract_mesh'?"),
    ],
)
def test_misspelt_keywords(keywords, meant):
    text = f"drjax.program got the keyword {meant}" if meant[0] == "'" else meant
    raises(drjax.DrjaxTypeError, text, lambda: drjax.program(**keywords))


@pytest.mark.parametrize("keywords", [{}, dict(placements={}), dict(mesh=None)])
def test_a_program_without_a_partition(keywords):
    text = "drjax.program needs a partition, given as one keyword: "
    result = raises(drjax.DrjaxTypeError, text, lambda: drjax.program(**keywords))
    assert "Got none." in result


def test_placements_and_a_level():
    call = lambda: drjax.program(placements={"a": 1}, clients=2)
    text = "drjax.program(placements=) names all levels, got another keyword: clients=2"
    raises(drjax.DrjaxTypeError, text, call)


@pytest.mark.parametrize("partition", [{}, {"a": 1, "b": 2}])
def test_mappings_of_another_number(partition):
    text = f"partition= needs exactly one partition, got {len(partition)}: "
    result = raises(
        drjax.DrjaxValueError, text, lambda: drjax.broadcast(1.0, partition=partition)
    )
    assert "@drjax.program(pods=2, groups=4)" in result


def test_placements_that_are_no_mapping():
    text = "drjax.program(placements=) needs a mapping from the partition's name to "
    raises(drjax.DrjaxTypeError, text, lambda: drjax.program(placements=3))


@pytest.mark.parametrize("name", [3, "", None])
def test_a_name_that_is_no_string(name):
    text = f"A partition needs a name that is a non-empty string, got {name!r}."
    raises(drjax.DrjaxTypeError, text, lambda: drjax.program(placements={name: 3}))


@pytest.mark.parametrize("axes", [3, (3,), "", ("clients", None)])
def test_mesh_axes_that_are_no_names(axes):
    text = "mesh_axes of partition 'clients' needs the name of a mesh axis or a tuple"
    raises(drjax.DrjaxTypeError, text, lambda: drjax.program(clients=3, mesh_axes=axes))


def test_mesh_axes_that_repeat():
    text = "mesh_axes of partition 'clients' need to differ, got ('a', 'a')."
    raises(
        drjax.DrjaxValueError,
        text,
        lambda: drjax.program(clients=3, mesh_axes=("a", "a")),
    )


@pytest.mark.parametrize("first", [lambda x: x, 3, {"clients": 3}])
def test_a_program_without_keyword(first):
    text = "takes the partition as a keyword: write @drjax.program(partition_size=3). "
    raises(drjax.DrjaxTypeError, text, lambda: drjax.program(first))


async def coroutine(x):
    return x


async def async_generator(x):
    yield x


def generator(x):
    yield x


class Generating:
    def __call__(self, x):
        yield x


class Awaiting:
    async def __call__(self, x):
        return x


LATE = [
    (coroutine, "coroutine is an async function: its body would run after"),
    (async_generator, "async_generator is an async generator function: its body"),
    (generator, "generator is a generator function: its body would run after"),
    (functools.partial(generator), "partial is a generator function: its body"),
    (lambda x: (yield x), "<lambda> is a generator function: its body"),
    (Generating(), "Generating is a generator function: its body"),
    (Awaiting(), "Awaiting is an async function: its body"),
]


@pytest.mark.parametrize("fn, text", LATE)
def test_functions_that_run_later(fn, text):
    raises(drjax.DrjaxTypeError, f"@drjax.program needs a plain function, but {text}",
           lambda: three(fn))  # fmt: skip
    raises(drjax.DrjaxTypeError, f"drjax.map_fn needs a plain function, but {text}",
           three(lambda x: drjax.map_fn(fn, x)), X3)  # fmt: skip


@pytest.mark.parametrize(
    "thing, text",
    [
        (3, "got int: 3."),
        (classmethod(lambda cls: 0), "Write @classmethod above @drjax.program."),
        (property(lambda self: 0), "Write @property above @drjax.program."),
    ],
)
def test_decorating_what_is_no_function(thing, text):
    result = raises(drjax.DrjaxTypeError, "@drjax.program decorates a function, got",
                   lambda: three(thing))  # fmt: skip
    assert text in result


# ---------------------------------------------------------------------------------
# Scope


BLOCKS = {
    "broadcast": lambda **k: drjax.broadcast(1.0, **k),
    "map_fn": lambda **k: drjax.map_fn(jnp.sin, X3, **k),
    "reduce_sum": lambda **k: drjax.reduce_sum(X3, **k),
    "reduce_mean": lambda **k: drjax.reduce_mean(X3, **k),
    "reduce_weighted_mean": lambda **k: drjax.reduce_weighted_mean(X3, X3, **k),
    "reduce_max": lambda **k: drjax.reduce_max(X3, **k),
    "reduce_min": lambda **k: drjax.reduce_min(X3, **k),
    "reduce_argmax": lambda **k: drjax.reduce_argmax(X3, **k),
    "reduce_argmin": lambda **k: drjax.reduce_argmin(X3, **k),
    "select": lambda **k: drjax.select(X3, 0, **k),
    "gather": lambda **k: drjax.gather(X3, **k),
    "scatter": lambda **k: drjax.scatter(X3, **k),
    "reduce_columns": lambda **k: drjax.reduce_columns(jnp.median, X3, **k),
    "reduce": lambda **k: drjax.reduce(jnp.add, X3, 0, **k),
    "take": lambda **k: drjax.take(X3, [1, 1, 0], **k),
    "put": lambda **k: drjax.put(X3, [1, 1, 0], **k),
    "shift": lambda **k: drjax.shift(X3, 1, **k),
    "partition_index": lambda **k: drjax.partition_index(**k),
    "partition_size": lambda **k: drjax.partition_size(**k),
    "shard": lambda **k: drjax.shard(X3, **k),
}
POSITIONED = ("partition_index", "partition_size")


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_outside_a_program(block):
    text = f"drjax.{block} was called outside a program, so there is no partition. "
    result = raises(drjax.ScopeError, text, BLOCKS[block])
    assert "or pass partition={'clients': 100}" in result
    assert BLOCKS[block](partition={"clients": 3}) is not None  # the advice works


@pytest.mark.parametrize("block", [b for b in BLOCKS if b not in POSITIONED])
def test_blocks_inside_a_mapped_function(block):
    def call(**keywords):
        return three(lambda x: drjax.map_fn(lambda _: BLOCKS[block](**keywords), x))

    text = f"drjax.{block} was called inside the function given to drjax.map_fn over "
    result = raises(drjax.ScopeError, text + "partition clients:3", call(), X3)
    assert "call the block outside map_fn and pass the result in" in result.lower()
    text = f"drjax.{block}(partition=clients:3) was called inside the function given"
    raises(drjax.ScopeError, text, call(partition={"clients": 3}), X3)


@pytest.mark.parametrize("wrong", ["clients", 3, object(), lambda: 0])
def test_partition_arguments_that_are_none(wrong):
    text = "partition= needs a drjax.Partition, a mapping such as {'clients': 100}, or"
    raises(drjax.DrjaxTypeError, text, lambda: drjax.broadcast(1.0, partition=wrong))


def test_partition_index_of_a_partition_of_another_size_inside_map_fn():
    def f(x):
        return drjax.map_fn(
            lambda _: drjax.partition_index(partition={"clients": 4}), x
        )

    raises(drjax.ScopeError, "drjax.partition_index(partition=clients:4) was called",
           three(f), X3)  # fmt: skip


def test_a_backward_function_after_the_program_names_partition():
    @jax.custom_vjp
    def total(x):
        return drjax.reduce_sum(x)

    total.defvjp(lambda x: (total(x), None), lambda _, ct: (drjax.broadcast(ct),))
    text = "needed in code that runs after the program has returned, such as the "
    raises(drjax.ScopeError, text, jax.grad(three(total)), X3)

    total.defvjp(
        lambda x: (total(x), None),
        lambda _, ct: (drjax.broadcast(ct, partition={"clients": 3}),),
    )
    assert (jax.grad(three(total))(X3) == 1).all()
