"""Fragments of `drjax.contrib.diloco`: every parameter once, and balanced.

Covers: drjax.contrib.diloco.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drjax import DrjaxValueError
from drjax.contrib import diloco

BLOCK = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
PARAMS = {
    "embed": {"table": jnp.ones((20, 4))},
    "layers": [BLOCK] * 5,
    "scanned": {"w": jnp.ones((6, 4, 4)), "b": jnp.ones((6, 4)), "scale": jnp.ones(())},
    "calls": jnp.arange(3),
    "key": jax.random.key(0),
    "none": jnp.ones((0, 3)),
}
PATTERNS: dict[str, dict] = {
    "leaves": {},
    "layers": dict(layers=r"layers/\d+"),
    "slices": dict(scanned="scanned"),
    "all": dict(layers=r"layers/\d+", scanned="^scanned", apart="embed"),
    "leaves and apart": dict(apart="table"),
}


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("patterns", PATTERNS)
def test_each_number_is_in_one_fragment(patterns, count):
    apart = "apart" in PATTERNS[patterns]
    if apart and count == 1:
        return
    fragments = diloco.fragments(PARAMS, count, **PATTERNS[patterns])
    draw = np.random.default_rng(0).normal
    leaves = jax.tree.leaves(PARAMS)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    leaves = [
        jnp.asarray(draw(size=x.shape)) if yes else x
        for x, yes in zip(leaves, is_float, strict=True)
    ]
    floats = lambda x: [y for y, yes in zip(x, is_float, strict=True) if yes]
    zeros = [
        jnp.zeros_like(x) if yes else x for x, yes in zip(leaves, is_float, strict=True)
    ]
    joined, times = zeros, [0.0 * x for x in floats(leaves)]
    for part in fragments.parts:
        taken = part.take(leaves)
        assert sum(x.nbytes for x in jax.tree.leaves(taken)) == part.bytes
        joined = part.put(joined, taken)
        ones = floats(part.put(zeros, jax.tree.map(jnp.ones_like, taken)))
        times = jax.tree.map(jnp.add, times, ones)
    assert len(fragments.parts) == count
    jax.tree.map(np.testing.assert_array_equal, floats(joined), floats(leaves))
    assert all((x == 1).all() for x in times)
    # What is dealt differs by no more than the largest part that is never divided.
    dealt = [part.bytes for part in fragments.parts][: count - apart]
    assert max(dealt) - min(dealt) <= 4 * 96


def test_layers_of_one_size_are_dealt_in_turn():
    names = lambda x: [part.names for part in x.parts]
    stacked = {"w": jnp.ones((6, 2)), "b": jnp.ones((6, 1))}
    fragments = diloco.fragments(stacked, 2, scanned="[wb]")
    assert [len(part.leaves) for part in fragments.parts] == [2, 2]
    in_turn = diloco.fragments({"x": stacked}, 3, scanned="x")
    expected = [("x[0]", "x[3]"), ("x[1]", "x[4]"), ("x[2]", "x[5]")]
    assert names(in_turn) == expected
    # Slices at one distance are a slice, without a gather.
    jaxpr = jax.make_jaxpr(in_turn.parts[1].take)([jnp.ones((6, 1)), jnp.ones((6, 2))])
    assert "gather" not in str(jaxpr) and "stride" in str(jaxpr)
    whole = diloco.fragments({"x": stacked}, 1, scanned="x")
    assert set(whole.parts[0].leaves.values()) == {None}


def test_uneven_slices_are_gathered():
    sizes = jnp.ones((1, 7)), jnp.ones((3, 2)), jnp.ones((2, 2))
    tree = [{"w": x} for x in sizes]
    fragments = diloco.fragments(tree, 2, scanned=r"\d/w")
    leaves = [jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape) for x in sizes]
    joined = [jnp.zeros_like(x) for x in leaves]
    for part in fragments.parts:
        joined = part.put(joined, part.take(leaves))
    jax.tree.map(np.testing.assert_array_equal, joined, leaves)


def test_a_report_has_bytes_and_names():
    text = str(
        diloco.fragments(
            PARAMS, 3, layers=r"layers/\d", scanned="scanned/[wb]", apart="embed"
        )
    )
    assert text.splitlines()[0].split() == ["fragment", "bytes", "share", "parameters"]
    assert "layers/0, layers/2" in text and text.endswith("embed/table")
    many = str(diloco.fragments(PARAMS, 1))
    assert "[...]" in many and "100.0%" in many


def test_types_are_enough():
    types = jax.eval_shape(lambda: PARAMS)
    assert str(diloco.fragments(types, 4)) == str(diloco.fragments(PARAMS, 4))


@pytest.mark.parametrize("count", [0, -1, 99, 2.0, True, None])
def test_a_count_that_cannot_be(count):
    with pytest.raises(DrjaxValueError, match=f"at least 1.* 14, .* got {count}"):
        diloco.fragments(PARAMS, count)


def test_one_apart_needs_one_more():
    assert len(diloco.fragments([jnp.ones(2)], 1, apart="0").parts) == 1
    with pytest.raises(DrjaxValueError, match="one more for apart="):
        diloco.fragments([jnp.ones(2), jnp.ones(3)], 1, apart="0")


@pytest.mark.parametrize("tree", [{}, [jnp.arange(3)], {"key": jax.random.key(0)}])
def test_no_floats(tree):
    with pytest.raises(DrjaxValueError, match="at most 0"):
        diloco.fragments(tree)


@pytest.mark.parametrize("name", ["layers", "scanned", "apart"])
def test_a_pattern_that_finds_nothing(name):
    text = f"{name}='heads'.* finds none of the parameters embed/table, layers/0/b"
    with pytest.raises(DrjaxValueError, match=text):
        diloco.fragments(PARAMS, 2, **{name: "heads"})
