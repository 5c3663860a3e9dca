"""Errors of wrong values: shapes, dtypes, leaves, weights and indices.

Covers: drjax._api.validate, drjax._api.resolve.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from tests.helpers.meshes import EXPLICIT, in_mesh, make_mesh
from tests.helpers.raising import KEYS3, X3, X8, eight, raises, three

TAKES_SLICES = {
    "reduce_sum": lambda x: drjax.reduce_sum(x),
    "reduce_mean": lambda x: drjax.reduce_mean(x),
    "reduce_mean(where)": lambda x: drjax.reduce_mean(x, where=X3 > 1),
    "reduce_weighted_mean": lambda x: drjax.reduce_weighted_mean(x, X3),
    "reduce_max": lambda x: drjax.reduce_max(x),
    "reduce_min": lambda x: drjax.reduce_min(x),
    "reduce_argmax": lambda x: drjax.reduce_argmax(x),
    "reduce_argmin": lambda x: drjax.reduce_argmin(x),
    "reduce_sum(by)": lambda x: drjax.reduce_sum(x, by=[0, 0, 1], num=2),
    "select": lambda x: drjax.select(x, 0),
    "gather": lambda x: drjax.gather(x),
    "reduce_columns": lambda x: drjax.reduce_columns(jnp.max, x),
    "reduce": lambda x: drjax.reduce(jnp.add, x, jax.tree.map(lambda _: 0, x)),
    "take": lambda x: drjax.take(x, [1, 1, 0]),
    "put": lambda x: drjax.put(x, [1, 1, 0]),
    "shift": lambda x: drjax.shift(x, 1),
    "map_fn": lambda x: drjax.map_fn(lambda x: x, x),
}


@pytest.mark.parametrize("block", TAKES_SLICES)
def test_another_leading_axis(block):
    x = {"ok": X3, "bad": [np.ones((4, 2)), 1.0]}
    text = f"drjax.{block.split('(')[0]} needs partitioned values over clients:3, with "
    result = raises(drjax.DrjaxValueError, text, three(TAKES_SLICES[block]), x)
    name = "args[0]" if block == "map_fn" else "x"
    assert f"{name}['bad'][0]: shape (4, 2)\n" in result
    assert f"{name}['bad'][1]: a scalar, shape ()\n" in result
    assert "ok" not in result
    assert "Use drjax.broadcast to give each group a copy" in result
    raises(drjax.DrjaxValueError, text, jax.jit(three(TAKES_SLICES[block])), x)


@pytest.mark.parametrize("block", ["scatter", "shard"])
def test_slices_that_do_not_fit_the_groups(block):
    text = (
        f"drjax.{block} needs arrays [3, ...], one slice for each group of clients:3, "
    )
    result = raises(
        drjax.DrjaxValueError, text, three(getattr(drjax, block)), {"a": np.ones(4)}
    )
    assert "['a']: shape (4,)\nGive each group exactly one slice" in result


def test_slices_inside_a_manual_shard_map():
    @jax.shard_map(in_specs=P("clients"), out_specs=P())
    def f(x):
        return eight(drjax.reduce_sum)(jnp.ones(8) + x.sum())

    with jax.set_mesh(make_mesh({"clients": 4})):
        text = "with leading axis [2, ...] (the 2 of 8 groups that one device holds)"
        raises(drjax.DrjaxValueError, text, f, X8)


NOT_ARRAYS = [
    ("text", "is str: 'text'."),
    (object, "is type: <class 'object'>."),
    (np.array(["a"]), "is ndarray of dtype <U1: array(['a'], dtype='<U1')."),
    (np.array([None]), "is ndarray of dtype object: array([None], dtype=object)."),
    (np.array(["2020-01-01"], "M8[D]"), "is ndarray of dtype datetime64[D]"),
    (jax.ShapeDtypeStruct((3,), "float32"), "is ShapeDtypeStruct: ShapeDtypeStruct("),
]


@pytest.mark.parametrize("leaf, text", NOT_ARRAYS)
def test_leaves_that_are_not_arrays(leaf, text):
    for block, name in (
        (drjax.broadcast, "broadcast"), (drjax.scatter, "scatter"),
        (drjax.reduce_sum, "reduce_sum"), (drjax.gather, "gather"),
    ):  # fmt: skip
        needs = f"drjax.{name} needs arrays as leaves, but x['a'][1] {text}"
        result = raises(drjax.DrjaxTypeError, needs, three(block), {"a": [X3, leaf]})
        assert "Close over values that are not arrays instead of passing them" in result
        assert "eqx.partition(module, eqx.is_array) separates those" in result
    raises(drjax.DrjaxTypeError, f"but args[1]['b'] {text}",
           three(lambda x: drjax.map_fn(max, (x, {"b": leaf}))), X3)  # fmt: skip
    raises(drjax.DrjaxTypeError, f"but the result of <lambda>['r'] {text}",
           three(lambda x: drjax.map_fn(lambda a: {"r": leaf}, x)), X3)  # fmt: skip
    raises(drjax.DrjaxTypeError, f"but w {text}",
           three(lambda x: drjax.reduce_weighted_mean(x, leaf)), X3)  # fmt: skip


def test_a_long_leaf_is_cut():
    result = raises(
        drjax.DrjaxTypeError, "is str: 'aaa", three(drjax.broadcast), "a" * 99
    )
    assert "aaa..." in result and "a" * 60 not in result


@pytest.mark.parametrize("block", [b for b in TAKES_SLICES if "reduce_" in b])
def test_keys_in_reductions(block):
    name = block.split("(")[0]
    text = f"drjax.{name} needs leaves that are numbers, got dtype key<fry>. To take"
    raises(drjax.DrjaxTypeError, text, three(TAKES_SLICES[block]), {"k": KEYS3()})


@pytest.mark.parametrize("block", ["reduce_max", "reduce_min"])
def test_extrema_of_complex_numbers(block):
    text = f"drjax.{block} needs leaves with an order, got dtype complex64. Reduce the"
    raises(drjax.DrjaxTypeError, text, three(getattr(drjax, block)), X3 + 1j * X3)


WHERE = [
    (X3, drjax.DrjaxTypeError, "needs where= as bool [3], got dtype float32. Write"),
    ("yes", drjax.DrjaxTypeError, "needs where= as bool [3], got str: 'yes'."),
    ({"a": X3 > 1}, drjax.DrjaxTypeError, "needs where= as bool [3], got dict: "),
    (X8 > 1, drjax.DrjaxValueError, "as bool [3], one for each group of clients:3, "),
    (True, drjax.DrjaxValueError, "one for each group of clients:3, got shape ()."),
]


@pytest.mark.parametrize("where, error, text", WHERE)
@pytest.mark.parametrize("block", ["reduce_sum", "reduce_mean"])
def test_where_of_another_dtype_or_shape(block, where, error, text):
    f = three(lambda x: getattr(drjax, block)(x, where=where))
    assert f"drjax.{block} " in raises(error, text, f, X3)


WEIGHTS = [
    ({"a": X3}, "needs as weights one array [n], or a tree with the structure of the "),
    ([1.0, 1.0, 1.0], "weights: PyTreeDef([*, *, *])\nPass one jax.Array if"),
    (1.0, "(3,) for one weight a group of clients:3, but w has shape () where x['a']"),
    (X8, "but w has shape (8,) where x['a'] has (3,)."),
    ({"a": X3, "b": np.ones((3, 3))}, "but w['b'] has shape (3, 3) where x['b'] has "),
]


@pytest.mark.parametrize("w, text", WEIGHTS)
def test_weights_that_do_not_match(w, text):
    x = {"a": X3, "b": np.ones((3, 2), np.float32)}
    raises(drjax.DrjaxValueError, text, three(drjax.reduce_weighted_mean), x, w)


@pytest.mark.parametrize("w, dtype", [(X3 * 1j, "complex64"), (None, "key<fry>")])
def test_weights_that_are_not_real(w, dtype):
    text = f"drjax.reduce_weighted_mean needs real weights, but w has dtype {dtype}."
    w = KEYS3() if w is None else w
    raises(drjax.DrjaxTypeError, text, three(drjax.reduce_weighted_mean), X3, w)


@pytest.mark.parametrize(
    "i", ["0", None, 1.0, True, np.True_, np.float32(1), X3, np.array([0, 1, 2])]
)
def test_select_of_what_is_no_number(i):
    text = "drjax.select needs the number of one group, an integer scalar, got "
    text += f"{type(i).__name__}: {i!r}."
    raises(drjax.DrjaxTypeError, text, three(lambda x: drjax.select(x, i)), X3)


@pytest.mark.parametrize("i", [3, -4, 2**40, np.int8(5), np.uint32(3)])
def test_select_out_of_bounds(i):
    text = f"drjax.select needs a group between -3 and 2, got {int(i)}. To have it cl"
    raises(drjax.DrjaxValueError, text, three(lambda x: drjax.select(x, i)), X3)


def test_map_fn_without_a_function():
    text = "drjax.map_fn needs a function and then its argument, drjax.map_fn(fn, arg),"
    raises(drjax.DrjaxTypeError, text, three(lambda x: drjax.map_fn(x, jnp.sin)), X3)


def test_map_fn_with_another_number_of_arguments():
    def f(a):
        return a

    text = "drjax.map_fn calls f with 2 positional argument(s), but its signature is "
    result = raises(
        drjax.DrjaxTypeError, text, three(lambda x: drjax.map_fn(f, (x, x))), X3
    )
    assert "f(a): too many positional arguments. A plain tuple is unpacked" in result


def test_errors_of_the_users_function_pass_through():
    def wrong(a):
        return jnp.ones(3) @ jnp.ones(4)

    def broken(a):
        raise KeyError("mine")

    for mesh in (None, make_mesh({"clients": 4}, EXPLICIT)):
        with in_mesh(mesh):
            with pytest.raises(TypeError, match="contracting dimensions") as caught:
                eight(lambda x: drjax.map_fn(wrong, x))(X8)
            assert not isinstance(caught.value, drjax.DrjaxError)
            with pytest.raises(KeyError, match="mine"):
                eight(lambda x: drjax.map_fn(broken, x))(X8)


def test_documented_values():
    zero, none = np.zeros(3, np.float32), np.zeros(3, bool)
    assert jnp.isnan(three(drjax.reduce_weighted_mean)(X3, zero))
    assert jnp.isnan(three(drjax.reduce_mean)(X3, none))
    assert three(drjax.reduce_sum)(X3, none) == 0
    assert three(drjax.reduce_sum)(np.arange(3), none).dtype == jnp.int32
    assert three(drjax.select)(X3, -1) == 2
    assert jax.jit(three(drjax.select))(X3, 7) == 2  # traced: clamped, as by indexing


def test_integers_that_overflow():
    text = "drjax.broadcast got x = 1099511627776, which does not fit JAX's default"
    raises(drjax.DrjaxValueError, text, three(drjax.broadcast), 2**40)


@pytest.mark.parametrize("block", ["reduce_sum", "reduce_mean", "reduce_max"])
def test_tangents_of_integers(block):
    x = np.zeros(3, jax.dtypes.float0)
    text = f"drjax.{block} needs leaves that are numbers, got dtype float0"
    raises(drjax.DrjaxTypeError, text, three(getattr(drjax, block)), x)


# ---------------------------------------------------------------------------------
# Keywords


BLOCKS = [block for block in TAKES_SLICES if "(" not in block]
OTHERS = ["broadcast", "scatter", "shard", "partition_index", "partition_size"]


@pytest.mark.parametrize("block", BLOCKS + OTHERS)
def test_unknown_keywords(block):
    fn = getattr(drjax, block)
    text = f"drjax.{block} takes {', '.join(inspect.signature(fn).parameters)}, got the"
    for around in ({}, {"partition": {"clients": 3}}):
        result = raises(drjax.DrjaxTypeError, text, fn, axis=0, **around)
        assert "got the keyword 'axis'. It acts on the axis of the groups" in result
        result = raises(drjax.DrjaxTypeError, text, fn, partitions=3, **around)
        assert result.endswith(
            "got the keyword 'partitions'. Did you mean 'partition'?"
        )
    result = raises(drjax.DrjaxTypeError, text, fn, unheard_of=0)
    assert result.endswith("got the keyword 'unheard_of'.")


def test_keywords_of_other_blocks():
    text = "got the keyword 'weights'. For weights, use drjax.reduce_weighted_mean"
    raises(drjax.DrjaxTypeError, text, three(drjax.reduce_mean), X3, weights=X3)
    text = "got the keyword 'where'. To choose groups, give where= to the reduction"
    raises(drjax.DrjaxTypeError, text, three(drjax.gather), X3, where=X3 > 1)


def test_a_mask_of_columns_as_the_error_proposes():
    options: Any = {"where": X3 > 0}
    call = three(lambda x: drjax.reduce_columns(jnp.median, x, **options))
    text = "taken = drjax.gather(where), and then drjax.reduce_columns(lambda column: "
    raises(drjax.DrjaxTypeError, text, call, X3)

    @three
    def median(x, where):
        taken = drjax.gather(where)
        fn = lambda column: jnp.nanmedian(jnp.where(taken, column, jnp.nan))
        return drjax.reduce_columns(fn, x)

    assert drjax.jit(median)(X3, X3 > 0) == median(X3, X3 > 0) == 1.5


def test_missing_arguments_with_a_partition():
    text = "drjax.select takes x, i, where, over, mesh, partition: missing a required "
    call = lambda: drjax.select(X3, partition={"clients": 3})  # pyright: ignore
    raises(drjax.DrjaxTypeError, text + "argument: 'i'.", call)


def test_small_integers():
    x = jnp.ones(3, jnp.int4)
    text = "drjax.reduce_sum needs numbers that jnp.sum adds up, got int4. Cast them"
    raises(drjax.DrjaxTypeError, text, three(drjax.reduce_sum), x)
    call = three(lambda x: drjax.reduce_columns(lambda c: c[0], x, sum=True))
    raises(drjax.DrjaxTypeError, text.replace("reduce_sum", "reduce_columns"), call, x)


# ---------------------------------------------------------------------------------
# Arguments of another kind


@pytest.mark.parametrize("add", [1, "yes", X3])
def test_flags_that_are_no_bools(add):
    call = three(lambda x: drjax.put(x, [1, 0, 0], add=add))
    raises(drjax.DrjaxTypeError, "drjax.put needs add= as True or False, got", call, X3)
    call = three(lambda x: drjax.reduce_columns(jnp.max, x, sum=add))
    text = "drjax.reduce_columns needs sum= as True or False, got"
    raises(drjax.DrjaxTypeError, text, call, X3)


def test_functions_of_another_number_of_arguments():
    call: Any = three(lambda x: drjax.reduce_columns(lambda a, b: a, x))  # pyright: ignore
    text = "drjax.reduce_columns calls <lambda> with 1 positional argument(s), but its "
    result = raises(drjax.DrjaxTypeError, text, call, X3)
    assert "It takes one array [n], the numbers of all groups at one" in result
    call = three(lambda x: drjax.reduce(lambda a: a, x, 0.0))  # pyright: ignore
    text = (
        "drjax.reduce calls <lambda> with 2 positional argument(s), but its signature"
    )
    result = raises(drjax.DrjaxTypeError, text, call, X3)
    assert "It takes the states of two groups, and returns one." in result
    call = three(lambda x: drjax.reduce_columns(x, jnp.max))  # pyright: ignore
    text = "drjax.reduce_columns needs a function and then its argument"
    raises(drjax.DrjaxTypeError, text, call, X3)


def test_an_error_of_type_inside_a_function_stays():
    call = three(lambda x: drjax.reduce_columns(lambda a: len(a.ndim), x))  # pyright: ignore
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        call(X3)


@pytest.mark.parametrize("program", [three, drjax.program(a=3, b=2)])
def test_weights_of_none(program):
    text = "drjax.reduce_weighted_mean needs weights, got None. Without them it is "
    x = jnp.ones((3, 2))
    call = program(lambda x: drjax.reduce_weighted_mean(x, None, where=x > 0))
    raises(drjax.DrjaxTypeError, text, call, x)


def test_an_array_as_the_partition():
    text = "partition= needs a drjax.Partition, a mapping"
    raises(drjax.DrjaxTypeError, text, drjax.shard, X3, partition=X3)


@pytest.mark.parametrize(
    "name", ["drjax.make_plan", "drjax.check", "drjax.collectives"]
)
def test_arguments_in_place_of_a_function(name):
    """`f(fn, x)` and `f(x)` where `f(fn)(x)` is due."""
    fn = getattr(drjax, name.removeprefix("drjax."))
    text = f"{name} needs a function"
    raises(drjax.DrjaxTypeError, text, fn, X3)
    result = raises(drjax.DrjaxError, f"{name} needs ", fn, three(drjax.reduce_sum), X3)
    assert f"go to what it returns: {name}(fn)(*args)." in result


def test_keywords_and_functions_of_jit():
    text = (
        "drjax.jit takes groups_per_step, residuals, memory_budget, checkpoints, "
        "out, progress, and the options of jax.jit, got the keyword "
    )
    result = raises(drjax.DrjaxTypeError, text, drjax.jit, jnp.sin, group_per_step=1)
    assert "'group_per_step'. Did you mean 'groups_per_step'?" in result
    result = raises(drjax.DrjaxTypeError, text, drjax.jit, jnp.sin, static_argnum=1)
    assert "'static_argnum'. Did you mean 'static_argnums'?" in result
    raises(drjax.DrjaxTypeError, "drjax.jit needs a function, got int.", drjax.jit, 3)
    with pytest.raises(
        TypeError, match=r"argument to drjax.jit\(mean\) as an abstract"
    ):
        mean = lambda x: x
        mean.__name__ = "mean"
        drjax.jit(mean)("text")


@pytest.mark.parametrize("backend", ["reference", "xla", "in_process"])
def test_backends_of_what_is_no_plan(backend):
    compile = getattr(drjax.backends, backend).compile
    for no_plan in (None, jnp.sin, drjax.make_plan(three(drjax.reduce_sum))):
        text = (
            "A backend compiles a plan, drjax.make_plan(fn)(*args) or drjax.load_plan"
        )
        raises(drjax.DrjaxTypeError, text, compile, no_plan)
