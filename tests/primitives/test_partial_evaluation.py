"""What a derivative computes and what it keeps: partial evaluation, DCE, policies.

Covers: drjax._primitives.map_fn, drjax._compat.jaxprs.
"""

import functools

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax import core
from jax.interpreters import partial_eval

import drjax
from drjax import primitives
from tests.helpers.cases import checkerboard
from tests.helpers.jaxprs import BY_OBJECT

N = 4
program = drjax.program(clients=N)
M = jnp.arange(1.0, 4.0)
XS = jnp.cos(jnp.arange(N * 5 * 3.0)).reshape(N, 5, 3)


def layer(m, x):
    return jnp.sum(jnp.tanh(x @ m) ** 2)


@program
def loss(m, xs):
    return drjax.reduce_mean(drjax.map_fn(layer, (drjax.broadcast(m), xs)))


def count(fn, *args) -> dict[str, int]:
    """How often each primitive stands in the program, mapped functions included."""
    result: dict[str, int] = {}

    def visit(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name = BY_OBJECT.get(eqn.primitive) or eqn.primitive.name
            result[name] = result.get(name, 0) + 1
            for value in eqn.params.values():
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    visit(value)

    visit(jax.make_jaxpr(fn)(*args))
    return result


def test_forward_pass_is_never_recomputed():
    result = count(jax.grad(loss), M, XS)
    assert result["tanh"] == 1
    assert result["dot_general"] == 2  # one forward, one for the gradient
    assert result["map_fn"] == 2


def test_checkpoint_recomputes_once():
    result = count(jax.grad(jax.checkpoint(loss)), M, XS)
    assert result["tanh"] == 2
    assert result["dot_general"] == 3


def test_policies_see_inside_the_mapped_function(capsys):
    policy = jax.checkpoint_policies.dots_saveable
    result = count(jax.grad(jax.checkpoint(loss, policy=policy)), M, XS)
    assert result["tanh"] == 2
    assert result["dot_general"] == 2
    jax.ad_checkpoint.print_saved_residuals(jax.checkpoint(loss, policy=policy), M, XS)
    saved = [line for line in capsys.readouterr().out.splitlines() if "drjax" in line]
    assert len(saved) == 1 and saved[0].startswith(f"f32[{N},5]"), saved


@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("hidden"),
        jax.checkpoint_policies.save_anything_except_these_names("hidden"),
    ],
)
def test_policies_act_as_on_plain_vmap(policy):
    def fn(m, x):
        hidden = jax.ad_checkpoint.checkpoint_name(jnp.exp(x @ m), "hidden")
        return jnp.sum(jnp.sin(hidden) ** 2)

    @program
    def ours(m, xs):
        return drjax.reduce_mean(drjax.map_fn(fn, (drjax.broadcast(m), xs)))

    def plain(m, xs):
        return jnp.mean(jax.vmap(fn, (None, 0))(m, xs))

    counts = []
    for loss in (ours, plain):
        result = count(jax.grad(jax.checkpoint(loss, policy=policy)), M, XS)
        counts.append([result[name] for name in ("exp", "sin", "cos", "dot_general")])
    assert counts[0] == counts[1]


def test_linearized_program_holds_only_linear_work():
    _, linear = jax.linearize(lambda m: loss(m, XS), M)
    result = count(linear, M)
    assert "tanh" not in result
    assert result["map_fn"] == 1 and result["reduce_mean"] == 1


def test_only_what_is_differentiated_is_linearized():
    assert "drjax_reduce_sum" in str(jax.make_jaxpr(jax.grad(loss, 0))(M, XS))
    assert "drjax_reduce_sum" not in str(jax.make_jaxpr(jax.grad(loss, 1))(M, XS))


def test_dead_results_operands_and_effects():
    @program
    def two_results(m, xs):
        def fn(m, x):
            return jnp.sin(x), jnp.cos(m)

        used, _unused = drjax.map_fn(fn, (drjax.broadcast(m), xs))
        return used

    jaxpr = jax.make_jaxpr(two_results)(M, XS)
    live, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True])
    assert list(used) == [False, True]
    (eqn,) = live.eqns
    assert eqn.primitive is primitives.map_fn_p and len(eqn.invars) == 1

    @program
    def printing(xs):
        drjax.map_fn(lambda x: jax.debug.print("{}", x[0, 0]), xs)
        return xs

    jaxpr = jax.make_jaxpr(printing)(XS)
    live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True])
    assert [e.primitive for e in live.eqns] == [primitives.map_fn_p]


def test_map_without_operands_survives_dead_code_removal():
    @program
    def ones(xs):
        return drjax.reduce_sum(drjax.map_fn(lambda x: jnp.float32(1.0), xs))

    jaxpr = jax.make_jaxpr(ones)(XS)
    live, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True])
    assert list(used) == [False]
    assert jax.jit(ones)(XS) == core.eval_jaxpr(live, ())[0] == N


@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap of grad", "hessian"])
def test_custom_jvp_around_a_program(transform):
    """custom_jvp partially evaluates its rule by tracers, not by our linearization."""

    @jax.custom_jvp
    def f(m):
        return loss(m, XS)

    @f.defjvp
    def _(primals, tangents):
        (m,), (dm,) = primals, tangents
        return jax.jvp(lambda m: loss(m, XS), (m,), (dm,))

    transformed = {
        "jvp": lambda f: lambda m: jax.jvp(f, (m,), (m,))[1],
        "grad": jax.grad,
        "vmap of grad": lambda f: lambda m: jax.vmap(jax.grad(f))(jnp.stack([m, -m])),
        "hessian": jax.hessian,
    }[transform]
    want = transformed(lambda m: loss(m, XS))(M)
    np.testing.assert_allclose(jax.jit(transformed(f))(M), want, rtol=1e-5, atol=1e-6)


def test_custom_vjp_around_a_program():
    @jax.custom_vjp
    def f(m):
        return loss(m, XS)

    def forward(m):
        return f(m), m

    def backward(m, ct):
        def pull(x):
            return drjax.map_fn(jax.grad(layer), (drjax.broadcast(m), x))

        return (
            ct * drjax.reduce_mean(drjax.program(clients=N)(pull)(XS), partition=loss),
        )

    f.defvjp(forward, backward)
    want = jax.grad(loss)(M, XS)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(M), want, rtol=1e-5)


def mean_of_sines(rule: str, decorate=lambda fn: fn):
    """A program with a custom_vjp around its blocks, and its plain twin."""

    def mean(m, xs):
        fn = lambda m, x: jnp.sin(jnp.sum(m * x))
        return drjax.reduce_mean(drjax.map_fn(fn, (drjax.broadcast(m), xs)))

    def forward(m, xs):
        if rule == "in forward":
            return jax.vjp(mean, m, xs)
        return mean(m, xs), (m, xs)

    def backward(residuals, ct):
        return (
            residuals(ct) if rule == "in forward" else jax.vjp(mean, *residuals)[1](ct)
        )

    custom = jax.custom_vjp(mean)
    custom.defvjp(decorate(forward), decorate(backward))
    return program(lambda m, xs: custom(m, xs)), program(mean)


def in_scan(f):
    body = lambda m, x: (m * f(m, x), None)
    return lambda m, xs: jnp.sum(jax.lax.scan(body, m, jnp.stack([xs, 2 * xs]))[0])


AROUND = {
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "drjax.jit of grad": lambda f: drjax.jit(jax.grad(f), groups_per_step=1),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "grad of drjax.jit": lambda f: jax.grad(drjax.jit(f)),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "grad of scan": lambda f: jax.grad(in_scan(f)),
    "grad of vmap": lambda f: jax.grad(
        lambda m, xs: jnp.sum(jax.vmap(f, (None, 0))(m, jnp.stack([xs, 2 * xs])))
    ),
    "hessian": lambda f: jax.jacfwd(jax.grad(f)),
}


@pytest.mark.sampled
@checkerboard(3, rule=["in forward", "in backward"], transform=AROUND)
def test_custom_vjp_around_blocks(rule, transform):
    xs = XS[:, 0]
    custom, plain = mean_of_sines(rule, program)
    result, expected = (AROUND[transform](f)(M, xs) for f in (custom, plain))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("leaks_unchecked")
@pytest.mark.parametrize("rule", ["in forward", "in backward"])
def test_rules_of_a_custom_vjp_say_what_to_write(rule):
    custom, _ = mean_of_sines(rule)
    for transform in ("grad of jit", "grad of drjax.jit", "grad of checkpoint"):
        with pytest.raises(drjax.ScopeError, match=r"f\.defvjp\(drjax\.program\("):
            AROUND[transform](custom)(M, XS[:, 0])


def test_integers_have_no_tangents():
    @program
    def f(m, counts):
        def fn(m, count):
            return m * count, count + 1

        scaled, counts = drjax.map_fn(fn, (drjax.broadcast(m), counts))
        return drjax.reduce_sum(scaled), drjax.reduce_max(counts)

    grads, largest = jax.grad(lambda m, c: f(m, c), has_aux=True)(2.0, jnp.arange(N))
    assert grads == 6.0 and largest == N


def test_rules_hold_under_internal_checks():
    with jax.enable_checks(True):
        for transform in (lambda f: f, jax.grad, jax.hessian, jax.checkpoint):
            jax.jit(transform(loss))(M, XS)
        jax.vmap(jax.grad(loss), (0, None))(jnp.stack([M, M]), XS)
        jax.linearize(lambda m: loss(m, XS), M)[1](M)


SCALED = {
    "constant": lambda x: drjax.map_fn(lambda a: 2 * a, drjax.broadcast(x)),
    "data": lambda x: drjax.map_fn(jnp.multiply, (drjax.broadcast(x), XS)),
    "closure": lambda x: drjax.map_fn(lambda d: x * d, XS),
}


@pytest.mark.parametrize("name", SCALED)
def test_transposing_again_and_again_adds_no_maps(name):
    scaled = program(lambda x: drjax.reduce_sum(SCALED[name](x)))
    x, transposed = XS[0], scaled
    count = lambda f: str(jax.make_jaxpr(f)(x)).count("drjax_map_fn")
    for _ in range(4):
        transpose = lambda f, ct: jax.linear_transpose(f, x)(ct)[0]
        transposed = functools.partial(transpose, transposed)
        assert count(transposed) == count(scaled) == 1
    np.testing.assert_allclose(transposed(x), scaled(x))
