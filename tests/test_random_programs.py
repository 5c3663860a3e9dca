"""Random programs: value and gradient of every way to run a program agree.

A long run is `DRJAX_RANDOM_PROGRAMS=20000 DRJAX_RANDOM_SEED=7 python -m pytest -m slow
-n 0 -s tests/test_random_programs.py`; it prints its count, its seed, and which rules
it has reached.
"""

import collections
import functools
import os

import hypothesis
import jax
import jax.extend
import numpy as np
import pytest
from hypothesis import strategies

import drjax
from drjax.interpret import rows
from drjax.interpret.kinds import SIGNATURES, Kinds
from tests.random_programs import CONTROL, arguments, make, recipes

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

STEPS = (1, 3, None)  # groups_per_step
COUNT = int(os.environ.get("DRJAX_RANDOM_PROGRAMS", "30"))
SEED = int(os.environ.get("DRJAX_RANDOM_SEED", "0"))


def check(recipe, f: int, outside: bool) -> None:
    """Run one program in every way; `outside`: differentiate what was planned."""
    argnums, args = tuple(range(5)), arguments(f)

    def derivative(fn):
        return jax.value_and_grad(fn, argnums, has_aux=True)

    fn = _traced_once(make(recipe), args)
    both = _traced_once(derivative(fn), args)

    def planned(step):
        if outside and step == 3:  # dear: the derivative is planned in three parts
            return derivative(drjax.jit(fn, groups_per_step=step))
        return drjax.jit(both, groups_per_step=step)

    options = {"xla_backend_optimization_level": 0}
    want = jax.jit(both, compiler_options=options)(*args)
    ways = jax.jit(lambda *x: [planned(s)(*x) for s in STEPS], compiler_options=options)
    found = dict(zip(map(str, STEPS), ways(*args), strict=True))
    plan = drjax.make_plan(both)(*args)
    found["reference"] = drjax.backends.reference.compile(plan)(*args)
    for way, got in found.items():
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert x.dtype == y.dtype
            scale = max(1.0, float(np.max(np.abs(y))))
            np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10 * scale, err_msg=way)


def _traced_once(fn, args):
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    tree = jax.tree.structure(out)
    run = jax.extend.core.jaxpr_as_fun(jaxpr)
    return lambda *xs: tree.unflatten(run(*xs))


def random_run(count: int, seed: int) -> None:
    done = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
        ],
    )
    @hypothesis.given(recipes, strategies.sampled_from((3, 4)),
                      strategies.booleans())  # fmt: skip
    def run(recipe, f, outside):
        nonlocal done
        check(recipe, f, outside)
        done += 1
        if done % 50 == 0:
            jax.clear_caches()

    with (
        jax.enable_x64(True),
        jax.check_tracer_leaks(False),
        jax.numpy_rank_promotion("allow"),
    ):
        run()
    print(f"\n{done} random programs, seed {seed}")


@pytest.fixture
def reached(monkeypatch):
    """How often each row rule gave a form, and each kind of equation was checked."""
    rules, kinds = collections.Counter(), collections.Counter()

    def counted(name, rule):
        @functools.wraps(rule)
        def run(eqn, axes):
            found = rule(eqn, axes)
            if found is not None:
                rules[name] += 1
            return found

        return run

    for name, rule in rows.ROW_RULES.items():
        monkeypatch.setitem(rows.ROW_RULES, name, counted(name, rule))
    check_equation = Kinds._check

    def check_counted(self, eqn):
        operands = ", ".join(str(self[v]) for v in eqn.invars)
        if eqn.primitive in SIGNATURES:
            kinds[f"{eqn.primitive.name}({operands})"] += 1
        elif self.is_loop(eqn):
            kinds[eqn.primitive.name] += 1
        return check_equation(self, eqn)

    monkeypatch.setattr(Kinds, "_check", check_counted)
    return rules, kinds


def report(reached) -> None:
    rules, kinds = reached
    print("row rules:", dict(rules.most_common()))
    print("not reached:", sorted(set(rows.ROW_RULES) - set(rules)))
    print("kinds:", dict(kinds.most_common()))


@pytest.mark.parametrize("seed", range(2))
def test_ways_agree(seed, reached):
    random_run(3, seed)
    report(reached)


@pytest.mark.slow
def test_ways_agree_in_many_programs(reached):
    random_run(COUNT, SEED)
    report(reached)
    found = {name.split("(")[0] for name in reached[1]}
    assert found >= {p.name for p in SIGNATURES}
    assert found >= {"scan", "while", "cond"}


@pytest.mark.parametrize(("j", "name"), list(enumerate(CONTROL)))
def test_control_flow(name, j):
    body = (
        ("mapped", 1, 3, ()),
        ("reduce_p1_mean", 2, 1, ()),
        ("broadcast1", 1, 1, ()),
    )
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        check(((name, 1, j, body),), 3, False)
