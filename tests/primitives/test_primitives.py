"""`drjax.primitives` as others see them: printed, matched by object, interpreted.

Covers: drjax._primitives.registration, drjax.primitives, drjax._compat.rule_registries.
"""

import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec as P

import drjax
from drjax import _compat
from drjax._primitives import registration
from drjax._primitives.reduce_ops import REDUCE_OPS
from examples import count_rounds
from tests.helpers.jaxprs import BY_OBJECT, blocks
from tests.helpers.meshes import make_mesh

program = drjax.program(clients=100)


def test_there_is_one_object_for_each():
    documented = re.findall(r"^\| `(\w+)_p` ", drjax.primitives.__doc__ or "", re.M)
    assert sorted(documented) == sorted(BY_OBJECT.values())
    assert BY_OBJECT.keys() == registration.BLOCKS
    assert BY_OBJECT.keys() >= {op.primitive for op in REDUCE_OPS.values()}
    assert all(isinstance(p, core.Primitive) for p in BY_OBJECT)
    assert {p.name for p in BY_OBJECT} == {f"drjax_{n}" for n in BY_OBJECT.values()}


def test_decorating_registers_nothing():
    def sizes():
        return len(ad.primitive_jvps), len(batching.fancy_primitive_batchers)

    before = sizes()
    for n in range(1, 50):
        drjax.program(placements={f"clients{n}": n})(lambda x: drjax.broadcast(x))(1.0)
    assert sizes() == before


def test_jaxpr_prints_the_partition_and_nothing_that_says_nothing():
    @program
    def f(x):
        return drjax.reduce_sum(drjax.map_fn(jnp.sin, drjax.broadcast(x)))

    text = str(jax.make_jaxpr(f)(1.0))
    assert "drjax_broadcast[partition=clients:100] a" in text
    assert "drjax_reduce_sum[partition=clients:100]" in text
    assert "name=sin" in text and "mesh" not in text


def test_parameters_are_as_documented():
    @program
    def f(x):
        def fn(x):
            return jax.lax.cond(x > 0, lambda: drjax.partition_index(), lambda: 0)

        return drjax.map_fn(fn, drjax.broadcast(x)) + drjax.partition_index()

    jaxpr = jax.make_jaxpr(f)(1.0)
    ours = [e for e in jaxpr.jaxpr.eqns if e.primitive in BY_OBJECT]
    assert [BY_OBJECT[e.primitive] for e in ours] == [
        "broadcast", "map_fn", "partition_index",
    ]  # fmt: skip
    for eqn in ours:
        assert eqn.params["partition"] == drjax.Partition("clients", 100)
        assert eqn.params["mesh"] is None
    assert ours[2].params["per_group"] is False
    inner = ours[1].params["jaxpr"]
    assert isinstance(inner, core.ClosedJaxpr) and not inner.consts
    assert [str(v) for v in inner.in_avals] == ["~float32[]"]  # weakly typed
    assert "per_group=True" in str(inner)


def test_a_jaxpr_evaluates_to_the_program():
    @program
    def f(x, xs):
        y = drjax.map_fn(
            lambda a, b: a * b + drjax.partition_index(), (drjax.broadcast(x), xs)
        )
        return drjax.reduce_max(y), drjax.gather(y)

    args = 2.0, jnp.arange(100.0)
    got = core.jaxpr_as_fun(jax.make_jaxpr(f)(*args))(*args)
    for g, w in zip(got, f(*args), strict=True):
        np.testing.assert_array_equal(g, w)


def test_a_module_has_one_token_that_dies_with_it():
    tokens = []
    token_p = registration.new_primitive("test_token")

    def rule(ctx, x):
        tokens.append(weakref.ref(_compat.module_token(ctx)))
        return [x]

    _compat.register_lowering_rule(token_p, rule)
    token_p.def_abstract_eval(lambda x: x)

    def f(x):
        manual = jax.shard_map(
            token_p.bind, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False
        )
        return jax.jit(token_p.bind)(manual(token_p.bind(x)))

    mesh = make_mesh({"a": 2})
    lowered = [jax.jit(f).lower(jnp.ones(n)) for n in (2, 4)]
    first, second = set(tokens[:3]), set(tokens[3:])
    assert len(first) == len(second) == 1 and first != second
    assert all(token() is not None for token in tokens)
    del lowered
    jax.clear_caches()
    gc.collect()
    assert all(token() is None for token in tokens)


# ---------------------------------------------------------------------------------
# The interpreter of the example


def _chain(k):
    @program
    def f(x, xs):
        for _ in range(k):
            y = drjax.map_fn(lambda a, b: jnp.sum(a * b), (drjax.broadcast(x), xs))
            x = x + drjax.reduce_mean(y)
        return x

    return f


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_dependent_reductions_are_rounds(k):
    result = count_rounds.count(jax.jit(_chain(k)), jnp.ones(3), jnp.ones((100, 3)))
    assert result.rounds == k
    for i in range(1, k + 1):
        assert result.down[i] == 12 and result.up[i] == 4


def test_independent_reductions_share_a_round_and_dead_ones_do_not_count():
    @program
    def f(xs):
        drjax.reduce_max(drjax.broadcast(drjax.reduce_sum(xs)))
        return drjax.reduce_sum(xs), drjax.reduce_mean(xs), drjax.gather(xs)

    result = count_rounds.count(f, jnp.ones((100, 3), jnp.bfloat16))
    assert result.rounds == 1
    assert result.up[1] == 3 * 6 and not result.down


def test_gradient_of_a_mean_loss_needs_no_round_more():
    def loss(model, x):
        return jnp.mean((x @ model) ** 2)

    @program
    def mean_loss(model, data):
        return drjax.reduce_mean(drjax.map_fn(loss, (drjax.broadcast(model), data)))

    args = jnp.ones(10), jnp.ones((100, 20, 10))
    assert count_rounds.count(mean_loss, *args).rounds == 1
    gradient = count_rounds.count(jax.grad(mean_loss), *args)
    assert gradient.rounds == 1 and gradient.up[1] == 40


def test_loops_are_refused_not_miscounted():
    @program
    def f(x):
        step = lambda x, _: (drjax.reduce_sum(drjax.broadcast(x)), None)
        return jax.lax.scan(step, x, None, length=2)[0]

    with pytest.raises(NotImplementedError, match="rounds in scan are not counted"):
        count_rounds.count(f, 1.0)


def test_example_prints_rounds_and_bytes(capsys):
    count_rounds.main()
    printed = capsys.readouterr().out
    assert "variance: 2 rounds" in printed and "its gradient: 3 rounds" in printed
    assert "round 1:   40 down,    4 up" in printed


def test_program_is_made_of_documented_blocks():
    args = jnp.ones(10), jnp.ones((100, 20, 10))
    names = ["broadcast", "map_fn", "reduce_mean", "broadcast", "map_fn", "reduce_mean"]
    assert blocks(count_rounds.variance, *args) == names
