"""Random programs: a recipe is data that hypothesis draws, and `run` gives its meaning.

A recipe is a list of steps `(name, i, j, body)`. Each step takes values of the kinds
that it needs out of an environment, chosen by the numbers i and j, and puts its result
back. So every recipe is a valid program. The environment has global values ("g0" a
scalar, "g1" `[f]`, "gn" `[n, f]`) and partitioned ones ("p0" `[n]`, "p1" `[n, f]`).
All work is bounded and smooth, and extrema are taken where there are no ties.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import drjax
from tests.random_steps import GLOBAL, ROWS, STEPS, Env, N, bounded, four

# -------------------------------------------------------------------------------------
# Control flow around steps: `body` is a recipe

CONTROL = (
    "scan",
    "scan_rows",
    "cond",
    "switch",
    "while",
    "fori",
    "jit",
    "remat",
    "vmap",
)


def run(recipe, env: Env) -> Env:
    """Do the steps of a recipe."""
    for name, i, j, body in recipe:
        if name in CONTROL:
            _control(name, i, j, body, env)
            continue
        step = STEPS[name]
        operands = [env.pick(kind, i + k * j) for k, kind in enumerate(step.kinds)]
        env.add(step.result, step.fn(*operands, j))
    return env


def _control(name: str, i: int, j: int, body, env: Env) -> None:
    kind = ("g0", "g1", "p0", "p1", "gn")[j % 5]
    other = ("g1", "p1")[i % 2]
    x, y, s = env.pick(kind, i), env.pick(other, i + j), env.pick("g0", i)

    outside = env.values
    if name == "while":  # has no reverse mode
        x, y, s, outside = jax.tree.map(lax.stop_gradient, (x, y, s, outside))

    def act(x, y=y, s=s):
        inside = Env(outside)
        for k, value in ((kind, x), (other, y), ("g0", s)):
            inside.values[k] = [*inside.values[k], value]
        run(body, inside)
        last = inside.values
        return bounded(last[kind][-1] + x), last[other][-1] * 0.9

    if name == "jit":
        x, y = jax.jit(act)(x, y)
    elif name == "remat":
        x, y = jax.checkpoint(act)(x, y)
    elif name == "cond":
        x, y = lax.cond(s > 0.05, act, lambda x, y: (jnp.sin(x), y), x, y)
    elif name == "switch":
        branches = [act, lambda x, y: (jnp.cos(x), y), lambda x, y: (x, jnp.sin(y))]
        x, y = lax.switch(jnp.int32(jnp.floor(4 * s)), branches, x, y)
    elif name == "scan":  # rounds of communication
        xs = jnp.linspace(0.1, 0.9, 3) * s
        (x, y), ss = lax.scan(
            lambda c, t: (act(*c, t), t * 2), (x, y), xs, reverse=bool(i % 2)
        )
        env.add("g0", ss.sum())
    elif name == "scan_rows":  # each step has rows of its own, and leaves rows
        xs = jnp.stack([y, jnp.sin(y)])
        x, ys = lax.scan(lambda c, t: act(c, t), x, xs)
        y = ys[0] + ys[1]
    elif name == "while":
        x, y, _ = lax.while_loop(
            lambda c: c[2] < 2.5 + s, lambda c: (*act(*c[:2]), c[2] + 1), (x, y, 0.0)
        )
    elif name == "fori":
        x, y = lax.fori_loop(0, 2, lambda t, c: act(c[0], c[1], s * (0.5 + t)), (x, y))
    else:
        axis = i % 2 if x.ndim else 0
        scales = jnp.array([0.5, 1.0])
        x, y = jax.vmap(lambda t: act(x, y, s * t), out_axes=axis)(scales)
        x, y = x.mean(axis), y.mean(axis)
    env.add(kind, x)
    env.add(other, y)


# -------------------------------------------------------------------------------------
# Recipes and whole programs

_numbers = st.integers(0, 31)
_families: dict[str, list[str]] = {}
for name in STEPS:
    _families.setdefault(name.split("_")[0], []).append(name)
_name = st.sampled_from(sorted(_families)).flatmap(
    lambda family: st.sampled_from(_families[family])
)
_simple = st.tuples(_name, _numbers, _numbers, st.just(()))


def _nested(bodies):
    body = st.lists(bodies, min_size=1, max_size=2).map(tuple)
    return st.tuples(st.sampled_from(CONTROL), _numbers, _numbers, body)


_steps = st.recursive(_simple, lambda s: st.one_of(s, _nested(s)), max_leaves=3)
recipes = st.lists(st.one_of(_simple, _nested(_steps)), min_size=1, max_size=4).map(
    tuple
)


def covering() -> list[tuple]:
    """Recipes that hold every work of every step once, and all control flow.

    Pointwise work is the same to the plan, whatever it computes: one of each kind.
    """
    works = [
        (name, i, j, ())
        for i, (name, step) in enumerate(STEPS.items())
        if not name.startswith(("unary", "binary"))
        for j in range(step.variants)
    ]
    body = (
        ("mapped", 1, 3, ()),
        ("reduce_p1_mean", 2, 1, ()),
        ("by_row_mul", 1, 1, ()),
    )
    programs = [tuple(works[i : i + 6]) for i in range(0, len(works), 6)]
    return programs + [((name, 1, j, body),) for j, name in enumerate(CONTROL)]


def make(recipe) -> Callable:
    """The program of a recipe: `(scalar that depends on everything, rows)`."""

    @four
    def random_program(g0, g1, gn, p0, p1):
        values = {"g0": g0, "g1": g1, "gn": gn, "p0": p0, "p1": p1}
        values = {kind: [value] for kind, value in values.items()}
        # Where a value is used is how the plan learns its kind.
        values["p0"] += [drjax.map_fn(jnp.sin, p0)]
        values["p1"] += [drjax.map_fn(jnp.sin, p1)]
        env = run(recipe, Env(values))
        total = sum(bounded(x).sum() for kind in GLOBAL for x in env.values[kind])
        for kind in ROWS:
            for x in env.values[kind]:
                total += jnp.sum(drjax.reduce_mean(bounded(x)))
        return total, env.values["p1"][-1]

    return random_program


def arguments(f: int) -> tuple[np.ndarray, ...]:
    """Values for a program whose rows have f features."""
    data = np.random.RandomState(f)
    shapes = ((), (f,), (N, f), (N,), (N, f))
    return tuple(data.uniform(-0.9, 0.9, shape) for shape in shapes)
