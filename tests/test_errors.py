"""Every error of the library, reached through the public API, by its text."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import drjax
from tests.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

three = drjax.program(clients=3)
eight = drjax.program(clients=8)
X3, X8 = np.arange(3.0, dtype=np.float32), np.arange(8.0, dtype=np.float32)
KEYS3 = lambda: jax.random.split(jax.random.key(0), 3)


def raises(error, text, fn, *args):
    """`fn(*args)` raises `error`, whose message contains `text` and is one message."""
    with pytest.raises(error, match=re.escape(text)) as caught:
        fn(*args)
    assert isinstance(caught.value, drjax.DrjaxError)
    return str(caught.value)


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


@pytest.mark.parametrize(
    "keywords, got",
    [
        ({}, "Got none."),
        (dict(pods=1, clients=2), "Got pods=1, clients=2."),
        (dict(placements={"a": 1}, clients=2), "Got placements={'a': 1}, clients=2."),
    ],
)
def test_not_exactly_one_partition(keywords, got):
    text = "drjax.program needs exactly one partition, given as one keyword: "
    found = raises(drjax.DrjaxTypeError, text, lambda: drjax.program(**keywords))
    assert got in found


@pytest.mark.parametrize("placements", [{}, {"a": 1, "b": 2}])
def test_placements_of_another_number(placements):
    text = f"A program has exactly one partition, got {len(placements)}: "
    found = raises(
        drjax.DrjaxValueError, text, lambda: drjax.program(placements=placements)
    )
    assert "inside the function given to drjax.map_fn" in found


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
    found = raises(drjax.DrjaxTypeError, "@drjax.program decorates a function, got",
                   lambda: three(thing))  # fmt: skip
    assert text in found


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
    "select": lambda **k: drjax.select(X3, 0, **k),
    "gather": lambda **k: drjax.gather(X3, **k),
    "scatter": lambda **k: drjax.scatter(X3, **k),
    "partition_index": lambda **k: drjax.partition_index(**k),
    "partition_size": lambda **k: drjax.partition_size(**k),
    "shard": lambda **k: drjax.shard(X3, **k),
}
POSITIONED = ("partition_index", "partition_size")


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_outside_a_program(block):
    text = f"drjax.{block} was called outside a program, so there is no partition. "
    found = raises(drjax.ScopeError, text, BLOCKS[block])
    assert "or pass partition={'clients': 100}" in found
    assert BLOCKS[block](partition={"clients": 3}) is not None  # the advice works


@pytest.mark.parametrize("block", [b for b in BLOCKS if b not in POSITIONED])
def test_blocks_inside_a_mapped_function(block):
    def call(**keywords):
        return three(lambda x: drjax.map_fn(lambda _: BLOCKS[block](**keywords), x))

    text = f"drjax.{block} was called inside the function given to drjax.map_fn over "
    found = raises(drjax.ScopeError, text + "partition clients:3", call(), X3)
    assert "call the block outside map_fn and pass the result in" in found.lower()
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


@pytest.mark.parametrize(
    "inner",
    [
        drjax.program(clients=2),
        drjax.program(clients=3),
        drjax.program(pods=2, mesh_axes="clients"),
        drjax.program(pods=2, mesh_axes=("data", "clients")),
    ],
)
def test_nested_programs_on_the_same_name_or_axes(inner):
    @three
    def outer(x):
        return drjax.map_fn(lambda a: inner(drjax.broadcast)(a), x)

    text = "was called inside the function given to drjax.map_fn over partition "
    found = raises(drjax.ScopeError, text + "clients:3", outer, X3)
    assert "A nested partition needs another name and other mesh axes" in found


# ---------------------------------------------------------------------------------
# Values


TAKES_ROWS = {
    "reduce_sum": lambda x: drjax.reduce_sum(x),
    "reduce_mean": lambda x: drjax.reduce_mean(x),
    "reduce_mean(where)": lambda x: drjax.reduce_mean(x, where=X3 > 1),
    "reduce_weighted_mean": lambda x: drjax.reduce_weighted_mean(x, X3),
    "reduce_max": lambda x: drjax.reduce_max(x),
    "reduce_min": lambda x: drjax.reduce_min(x),
    "select": lambda x: drjax.select(x, 0),
    "gather": lambda x: drjax.gather(x),
    "map_fn": lambda x: drjax.map_fn(lambda x: x, x),
}


@pytest.mark.parametrize("block", TAKES_ROWS)
def test_another_leading_axis(block):
    x = {"ok": X3, "bad": [np.ones((4, 2)), 1.0]}
    text = f"drjax.{block.split('(')[0]} needs partitioned values over clients:3, with "
    found = raises(drjax.DrjaxValueError, text, three(TAKES_ROWS[block]), x)
    name = "args[0]" if block == "map_fn" else "x"
    assert f"{name}['bad'][0]: shape (4, 2)\n" in found
    assert f"{name}['bad'][1]: a scalar, shape ()\n" in found
    assert "ok" not in found
    assert "Use drjax.broadcast to give each group a copy" in found
    raises(drjax.DrjaxValueError, text, jax.jit(three(TAKES_ROWS[block])), x)


@pytest.mark.parametrize("block", ["scatter", "shard"])
def test_rows_that_do_not_fit_the_groups(block):
    text = f"drjax.{block} needs arrays [3, ...], one row for each group of clients:3, "
    found = raises(
        drjax.DrjaxValueError, text, three(getattr(drjax, block)), {"a": np.ones(4)}
    )
    assert "['a']: shape (4,)\nGive each group exactly one row" in found


def test_rows_inside_a_manual_shard_map():
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
    (2**70, "is int: 1180591620717411303424."),
    (jax.ShapeDtypeStruct((3,), "float32"), "is ShapeDtypeStruct: ShapeDtypeStruct("),
]


@pytest.mark.parametrize("leaf, text", NOT_ARRAYS)
def test_leaves_that_are_not_arrays(leaf, text):
    for block, name in (
        (drjax.broadcast, "broadcast"), (drjax.scatter, "scatter"),
        (drjax.reduce_sum, "reduce_sum"), (drjax.gather, "gather"),
    ):  # fmt: skip
        needs = f"drjax.{name} needs arrays as leaves, but x['a'][1] {text}"
        found = raises(drjax.DrjaxTypeError, needs, three(block), {"a": [X3, leaf]})
        assert "Close over values that are not arrays instead of passing them" in found
    raises(drjax.DrjaxTypeError, f"but args[1]['b'] {text}",
           three(lambda x: drjax.map_fn(max, (x, {"b": leaf}))), X3)  # fmt: skip
    raises(drjax.DrjaxTypeError, f"but the result of <lambda>['r'] {text}",
           three(lambda x: drjax.map_fn(lambda a: {"r": leaf}, x)), X3)  # fmt: skip
    raises(drjax.DrjaxTypeError, f"but w {text}",
           three(lambda x: drjax.reduce_weighted_mean(x, leaf)), X3)  # fmt: skip


def test_a_long_leaf_is_cut():
    found = raises(
        drjax.DrjaxTypeError, "is str: 'aaa", three(drjax.broadcast), "a" * 99
    )
    assert "aaa..." in found and "a" * 60 not in found


@pytest.mark.parametrize("block", [b for b in TAKES_ROWS if "reduce" in b])
def test_keys_in_reductions(block):
    name = block.split("(")[0]
    text = f"drjax.{name} needs leaves that are numbers, got dtype key<fry>. To take"
    raises(drjax.DrjaxTypeError, text, three(TAKES_ROWS[block]), {"k": KEYS3()})


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
    text = f"drjax.select needs a group between -3 and 2, got {int(i)}."
    raises(drjax.DrjaxValueError, text, three(lambda x: drjax.select(x, i)), X3)


def test_map_fn_without_a_function():
    text = "drjax.map_fn needs a function and then its argument, drjax.map_fn(fn, arg),"
    raises(drjax.DrjaxTypeError, text, three(lambda x: drjax.map_fn(x, jnp.sin)), X3)


def test_map_fn_with_another_number_of_arguments():
    def f(a):
        return a

    text = "drjax.map_fn calls f with 2 positional argument(s), but its signature is "
    found = raises(
        drjax.DrjaxTypeError, text, three(lambda x: drjax.map_fn(f, (x, x))), X3
    )
    assert "f(a): too many positional arguments. A plain tuple is unpacked" in found


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


# ---------------------------------------------------------------------------------
# Meshes


COLLECTIVES = {
    "psum": lambda a: lax.psum(a, "clients"),
    "pmean": lambda a: lax.pmean(a, "clients"),
    "pmax": lambda a: lax.pmax(a, "clients"),
    "axis_index": lambda a: a + lax.axis_index("clients"),
    "axis_size": lambda a: a * lax.axis_size("clients"),
    "all_gather": lambda a: lax.all_gather(a, "clients"),
    "ppermute": lambda a: lax.ppermute(a, "clients", [(0, 1)]),
    "in scan": lambda a: lax.scan(
        lambda c, _: (lax.psum(c, "clients"), None), a, length=2
    )[0],
    "in jit": jax.jit(lambda a: lax.psum(a, "clients")),
}
MESHES = [None, ({"clients": 4}, AUTO), ({"clients": 4}, EXPLICIT),
          ({"clients": 4, "model": 2}, AUTO)]  # fmt: skip
OWN_AXIS = "uses a collective over the axis of partition clients:8 itself, ('clients',)"


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_over_the_partitions_own_axis(collective, mesh):
    fn = COLLECTIVES[collective]
    with in_mesh(mesh and make_mesh(*mesh)):
        for f in (eight(lambda x: drjax.map_fn(fn, x)),) * 2:
            found = raises(drjax.MeshError, OWN_AXIS, f, X8)
    assert "with drjax.reduce_sum, drjax.reduce_max or drjax.gather" in found


def test_collectives_over_the_own_axis_where_it_is_bound():
    nested = jax.shard_map(
        lambda a: lax.psum(a, "clients"), in_specs=P(), out_specs=P(),
        axis_names={"clients"}, check_vma=False,
    )  # fmt: skip
    with jax.set_mesh(make_mesh({"clients": 4})):
        raises(drjax.MeshError, OWN_AXIS, eight(lambda x: drjax.map_fn(nested, x)), X8)
        manual = jax.shard_map(
            eight(lambda x: drjax.map_fn(COLLECTIVES["psum"], x)),
            in_specs=P("clients"), out_specs=P("clients"),
        )  # fmt: skip
        raises(drjax.MeshError, OWN_AXIS, manual, X8)


def test_unbound_axes_that_are_not_the_partitions_stay_jaxs_error():
    for name in ("a", "axis", "unbound"):
        f = drjax.program(placements={name: 3})(
            lambda x: drjax.map_fn(lambda a: lax.psum(a, "model"), x)
        )
        with pytest.raises(NameError, match="unbound axis name: model"):
            f(X3)


@pytest.mark.parametrize(
    "kind", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)]
)
@pytest.mark.parametrize("what", ["array", "tracer", "key"])
def test_closures_on_explicit_meshes(kind, what):
    mesh = make_mesh({"clients": 4, "model": 2}, kind)
    with jax.set_mesh(mesh):
        w = jax.random.key(1) if what == "key" else jnp.ones((2, 2)) * 2
        use = jax.random.normal if what == "key" else lambda w: (w @ w).sum()

        def closing(w, x):
            return drjax.map_fn(lambda a: a * use(w), x)

        f = jax.jit(eight(closing)) if what == "tracer" else eight(closing)
        text = "The function <lambda> given to drjax.map_fn closes over an array of a "
        found = raises(drjax.MeshError, text, f, w, X8)
        assert "drjax.map_fn(<lambda>, (drjax.broadcast(params), x))" in found

        @eight
        def advised(w, x):
            return drjax.map_fn(lambda w, a: a * use(w), (drjax.broadcast(w), x))

        expected = X8 * np.asarray(use(w))
        np.testing.assert_allclose(jax.jit(advised)(w, X8), expected, rtol=1e-6)


def test_closures_that_explicit_meshes_allow():
    host, device = np.ones(3, np.float32), jnp.ones(3)  # not arrays of the mesh
    f = eight(lambda x: drjax.map_fn(lambda a: (a * host * device).sum(), x))
    with jax.set_mesh(make_mesh({"clients": 4}, EXPLICIT)):
        np.testing.assert_allclose(f(X8), 3 * X8)
        np.testing.assert_allclose(jax.jit(f)(X8), 3 * X8)


def test_uneven_groups_on_explicit_axes():
    ten = drjax.program(clients=10)(drjax.broadcast)
    with jax.set_mesh(make_mesh({"clients": 4}, EXPLICIT)):
        text = "Partition clients:10 does not divide evenly over the 4 devices of mesh "
        found = raises(drjax.MeshError, text, ten, 1.0)
    assert "make the axes Auto" in found and "or use 12 groups" in found


def test_uneven_groups_inside_a_manual_shard_map():
    ten = drjax.program(clients=10)(drjax.broadcast)
    f = jax.shard_map(ten, in_specs=P(), out_specs=P("clients"))
    with jax.set_mesh(make_mesh({"clients": 4})):
        text = "each of the 4 devices needs the same number of groups, but 10 groups"
        raises(drjax.MeshError, text, f, 1.0)


def test_partly_manual_axes():
    f = drjax.program(clients=8, mesh_axes=("dcn", "ici"))(drjax.broadcast)
    f = jax.shard_map(f, in_specs=P(), out_specs=P("dcn"), axis_names={"dcn"})
    with jax.set_mesh(make_mesh({"dcn": 2, "ici": 2})):
        text = "lies on mesh axes ('dcn', 'ici'), of which only ['dcn'] are Manual here"
        raises(drjax.MeshError, text, jax.jit(f), 1.0)


def test_a_mesh_with_only_some_of_the_axes():
    f = drjax.program(clients=8, mesh_axes=("dcn", "ici"))(drjax.broadcast)
    with jax.set_mesh(make_mesh({"dcn": 2, "model": 2})):
        text = "needs mesh axes ('dcn', 'ici'), but the mesh (dcn: 2, model: 2) lacks "
        assert "['ici']. Name only axes of" in raises(drjax.MeshError, text, f, 1.0)


def test_a_mesh_argument_that_contradicts_the_context():
    f = drjax.program(clients=8, mesh=make_mesh({"clients": 4}))(drjax.broadcast)
    with jax.set_mesh(make_mesh({"clients": 8})):
        text = "mesh= is (clients: 4), but the mesh in context is (clients: 8); JAX "
        raises(drjax.MeshError, text, f, 1.0)


def test_an_abstract_mesh_without_devices():
    mesh = make_mesh({"clients": 4})
    f = drjax.program(clients=8, mesh=mesh.abstract_mesh)(drjax.broadcast)
    text = "mesh= is the AbstractMesh (clients: 4), which names no devices, and no mesh"
    raises(drjax.MeshError, text, f, 1.0)
    with jax.set_mesh(mesh):
        assert f(1.0).sharding.num_devices == 4  # as the message advises


def test_shard_without_devices():
    with jax.sharding.use_abstract_mesh(make_mesh({"clients": 4}).abstract_mesh):
        text = "drjax.shard needs devices, but the mesh in context, (clients: 4), is"
        raises(drjax.MeshError, text, eight(drjax.shard), X8)


@pytest.mark.parametrize("mesh", ["clients", 8, {"clients": 8}])
def test_mesh_arguments_that_are_no_mesh(mesh):
    text = f"mesh= needs a jax.sharding.Mesh or AbstractMesh, got {type(mesh).__name__}"
    raises(drjax.MeshError, text, eight(lambda x: drjax.broadcast(x, mesh=mesh)), 1.0)
    text = "drjax.program(mesh=) needs a jax.sharding.Mesh or AbstractMesh, got "
    raises(drjax.MeshError, text, lambda: drjax.program(clients=8, mesh=mesh))
