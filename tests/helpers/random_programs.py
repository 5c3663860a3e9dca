"""Random programs: what is drawn is data, and `make` gives its meaning.

A recipe is a list of steps `(name, i, j, body)`. Each step takes values of the kinds
that it needs out of an environment, chosen by the numbers i and j, and puts its result
back. So every recipe is a valid program. The environment has global values ("g0" a
scalar, "g1" `[f]`, "gn" `[n, f]`) and partitioned ones ("p0" `[n]`, "p1" `[n, f]`), and
those of `random_kinds.py`. All work is bounded and smooth, and extrema are taken where
there are no ties.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from tests.helpers import random_kinds
from tests.helpers.meshes import make_mesh
from tests.helpers.plain_blocks import blocks
from tests.helpers.random_steps import GLOBAL, SLICES, STEPS, Env, bounded

# -------------------------------------------------------------------------------------
# Control flow around steps: `body` is a recipe

CONTROL = (
    "scan",
    "scan_slices",
    "cond",
    "switch",
    "while",
    "fori",
    "jit",
    "remat",
    "vmap",
    "scan_short",
    "while_counted",
    "becomes",
    "lax_map",
    "vmap_axes",
    "planned",
    "custom_vjp",
)
CARRIED = ("g0", "g1", "p0", "p1", "gn")
FLOATS = (*CARRIED, "p2")
ALL = (*FLOATS, *random_kinds.OTHER[1:])


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


def _joined(kind: str, new, old):
    """Of a carry: depends on both, and has the same type."""
    if kind in FLOATS:
        return bounded(new + old)
    if kind in ("pi", "gi"):
        return (new + old) % 11
    return new ^ old if kind == "pb" else new


def _control(name: str, i: int, j: int, body, env: Env) -> None:
    kind = CARRIED[j % 5] if j < 32 else ALL[j % len(ALL)]
    other = ("g1", "p1")[i % 2]
    if name == "becomes":
        kind = "p1"
    x, y, s = env.pick(kind, i), env.pick(other, i + j), env.pick("g0", i)
    if name == "becomes":  # a carry that starts as a global value
        x = env.pick("gn", i) if j % 2 else jnp.zeros_like(x)

    outside = env.values
    if name.startswith("while"):  # has no reverse mode
        x, y, s, outside = jax.tree.map(lax.stop_gradient, (x, y, s, outside))

    def act(x, y=y, s=s, outside=outside):
        inside = Env(outside)
        for k, value in ((kind, x), (other, y), ("g0", s)):
            inside.values[k] = [*inside.values[k], value]
        run(body, inside)
        last = inside.values
        return _joined(kind, last[kind][-1], x), last[other][-1] * 0.9

    changed = lambda f: lambda x, y: (f(x) if kind in FLOATS else x, y)
    if name == "jit":
        x, y = jax.jit(act)(x, y)
    elif name == "planned":
        x, y = blocks.jit(act, groups_per_step=(None, 1, 2)[i % 3])(x, y)
    elif name == "remat":
        x, y = jax.checkpoint(act)(x, y)
    elif name == "cond":
        x, y = lax.cond(s > 0.05, act, changed(jnp.sin), x, y)
    elif name == "switch":
        branches = [act, changed(jnp.cos), lambda x, y: (x, jnp.sin(y))]
        x, y = lax.switch(jnp.int32(jnp.floor(4 * s)), branches, x, y)
    elif name in ("scan", "scan_short"):  # rounds of communication
        rounds = 3 + ((i + j) % 4 == 3)
        xs = jnp.linspace(0.1, 0.9, rounds if name == "scan" else j % 2) * s
        (x, y), ss = lax.scan(
            lambda c, t: (act(*c, t), t * 2), (x, y), xs, reverse=bool(i % 2)
        )
        env.add("g0", ss.sum())
    elif name == "scan_slices":  # each step has slices of its own, and leaves slices
        xs = jnp.stack([y, jnp.sin(y)])
        x, ys = lax.scan(lambda c, t: act(c, t), x, xs)
        y = ys[0] + ys[1]
    elif name == "while":
        x, y, _ = lax.while_loop(
            lambda c: c[2] < 2.5 + s, lambda c: (*act(*c[:2]), c[2] + 1), (x, y, 0.0)
        )
    elif name == "while_counted":  # as often as the groups say, perhaps never
        last = blocks.reduce_max(env.pick("pi", i)) % 4
        x, y, _ = lax.while_loop(
            lambda c: c[2] < last, lambda c: (*act(*c[:2]), c[2] + 1), (x, y, 0)
        )
    elif name in ("fori", "becomes"):
        x, y = lax.fori_loop(0, 2, lambda t, c: act(c[0], c[1], s * (0.5 + t)), (x, y))
    elif name == "custom_vjp":
        x, y = _custom_vjp(act, x, y, s, outside)
    else:
        scales = jnp.array([0.5, 1.0], s.dtype)
        axis = i % 2 if x.ndim and kind in FLOATS else 0
        one = lambda t: act(x, y, s * t)
        if name == "vmap":
            xs, ys = jax.vmap(one, out_axes=axis)(scales)
            y = ys.mean(axis)
        elif name == "vmap_axes":  # of operands: the last one, say
            y_axis = j % (y.ndim + 1)
            axes = (axis - 1 if kind in FLOATS else 0, y_axis)
            mapped = jax.vmap(act, in_axes=(*axes, 0), out_axes=(axis, 0))
            twice = jnp.stack([x, x], axes[0]), jnp.stack([y, 0.5 * y], y_axis)
            xs, ys = mapped(*twice, scales)
            y = ys.mean(0)
        else:
            axis = 0
            xs, ys = lax.map(one, scales)
            y = ys.mean(0)
        x = xs.mean(axis) if kind in FLOATS else xs[1]
    env.add(kind, x)
    env.add(other, y)


def _custom_vjp(act, x, y, s, outside):
    """The derivative that it has anyhow, taken by functions of one's own."""
    n = len(outside["pi"][0])
    values = {
        kind: values_of_kind
        for kind, values_of_kind in outside.items()
        if kind in FLOATS
    }
    half = outside["gh"][0].dtype

    def full(x, y, s, values):
        number = blocks.partition_index()
        constants = {
            "pi": number, "pb": number % 2 == 0, "gi": jnp.int32(1),
            "gk": jax.random.key(1), "pk": blocks.broadcast(jax.random.key(2)),
            "gh": jnp.ones(values["g1"][0].shape, half),
        }  # fmt: skip
        constants["ph"] = blocks.broadcast(constants["gh"])
        return act(x, y, s, values | {k: [v] for k, v in constants.items()})

    fn = jax.custom_vjp(full)
    clients = blocks.program(clients=n)
    fn.defvjp(
        clients(lambda *args: jax.vjp(full, *args)),
        clients(lambda pull_back, cts: pull_back(cts)),
        # Else newer versions refuse a vmap in which some results are not batched.
        **({"generic_batching": True} if jax.__version_info__ >= (0, 12) else {}),
    )
    return fn(x, y, s, values)


# -------------------------------------------------------------------------------------
# Programs: a recipe, and how it is used

MODES = ("value", "grad", "jvp", "hvp", "vmap")
# Axes, and which of them are Explicit: the partition's axis is "clients".
MESHES: tuple[tuple[dict[str, int], tuple[str, ...]], ...] = (
    ({"clients": 2}, ()),
    ({"clients": 3}, ()),
    ({"clients": 4}, ()),
    ({"clients": 8}, ()),
    ({"clients": 2, "model": 2}, ()),
    ({"model": 2, "clients": 3}, ()),
    ({"clients": 2, "parts": 2}, ()),
    ({"clients": 1, "model": 2}, ()),
    ({"data": 2, "clients": 2, "model": 2}, ()),
    ({"clients": 4, "data": 1, "model": 2}, ()),
    ({"model": 2}, ()),
    ({"clients": 1}, ("clients",)),
    ({"clients": 2}, ("clients",)),
    ({"clients": 3}, ("clients",)),
    ({"clients": 5}, ("clients",)),
    ({"clients": 2, "model": 2}, ("clients",)),
    ({"clients": 2, "model": 2}, ("clients", "model")),
    ({"model": 2, "clients": 3}, ("model",)),
)


@dataclass(frozen=True)
class Program:
    """A random program, and how it is used.

    Attributes:
      recipe: Its steps.
      n: Groups.
      f: Features.
      dtype: That of floats.
      half: That of 16-bit floats.
      mode: The value or a derivative.
      closed: Which arguments it closes over.
      mesh: A number in `MESHES`; None: no mesh.
      runner: "jax" or "drjax": what compiles it; "inner": jax.jit, of the derivative of
        drjax.jit.
      step: Groups a step of drjax.jit.
      seed: That of its arguments.
      residuals: What drjax.jit saves.
      checkpoints: Whether drjax.jit checkpoints scans, with segments of two rounds, of
        which one may remain, or of one.
    """

    recipe: tuple
    n: int = 4
    f: int = 3
    dtype: str = "float64"
    half: str = "bfloat16"
    mode: str = "grad"
    closed: tuple[int, ...] = ()
    mesh: int | None = None
    runner: str = "drjax"
    step: int | None = None
    seed: int = 0
    residuals: str | None = None
    checkpoints: bool = False

    def make_mesh(self):
        if self.mesh is None:
            return None
        shape, explicit = MESHES[self.mesh]
        kinds = [AxisType.Explicit if a in explicit else AxisType.Auto for a in shape]
        return make_mesh(shape, tuple(kinds))


_families: dict[str, list[str]] = {}
for name in STEPS:
    _families.setdefault(name.split("_")[0], []).append(name)
_families["of"] += _families.pop("to")
_names = sorted(_families)
DEPTH = 2  # of control flow
AT_TOP = ("effect", "kernel")  # not in control flow


def _draw_steps(rng: random.Random, most: int, depth: int) -> tuple:
    steps = []
    for _ in range(rng.randint(1, most)):
        i, j = rng.randrange(64), rng.randrange(64)
        if depth and rng.random() < 0.35:
            body = _draw_steps(rng, 2, depth - 1)
            steps.append((rng.choice(CONTROL), i, j, body))
        else:
            new = rng.random() < 0.4
            names = random_kinds.NEW if new else _families[rng.choice(_names)]
            name = rng.choice(names)
            if name not in AT_TOP or depth == DEPTH:
                steps.append((name, i, j, ()))
    return tuple(steps)


def draw(seed: int, number: int) -> Program:
    """Program so-and-so of a seed."""
    rng = random.Random(f"{seed} {number}")
    n = rng.choice((1, 2, 3, 4, 5, 7))
    on_mesh = number % 2 == 1
    meshes = [k for k in range(len(MESHES)) if fits(n, *MESHES[k])]
    mode = rng.choices(MODES, (3, 4, 1, 1, 1))[0]
    return valid(
        Program(
            recipe=_draw_steps(rng, 4, DEPTH),
            n=n,
            f=rng.choice((2, 3, n if n > 1 else 2)),
            dtype=rng.choice(("float64", "float32")),
            half=rng.choice(("bfloat16", "float16")),
            mode=mode,
            closed=tuple(k for k in range(12) if rng.random() < 0.15),
            mesh=rng.choice(meshes) if on_mesh else None,
            runner=rng.choice(("jax", "drjax", "drjax", "inner")),
            step=rng.choice((None, 1, 2)),
            seed=rng.randrange(1000),
            residuals=rng.choice((None, None, "store", "recompute")),
            checkpoints=rng.random() < 0.5,
        )
    )


def fits(n: int, shape: dict[str, int], explicit: tuple[str, ...]) -> bool:
    return "clients" not in explicit or n % shape["clients"] == 0


def valid(program: Program) -> Program:
    """The program, less what JAX or the documentation rules out."""
    names = list(walk(program.recipe))
    if program.mode == "jvp" and any(map(_has_custom_vjp, names)):
        program = replace(program, mode="hvp")  # its jvp is that of the gradient
    shape = {} if program.mesh is None else MESHES[program.mesh][0]
    recipe = program.recipe
    if len(shape) > 1 or program.mode == "vmap":  # host callbacks: see sharp_edges.md
        recipe = tuple(s for s in recipe if s[0] != "effect")
    if math.prod(shape.values()) > 1:  # JAX orders effects of one device only
        recipe = tuple(
            (name, i, j - j % 2 if name == "effect" else j, body)
            for name, i, j, body in recipe
        )
    if not runs_alone(program):
        recipe = tuple(s for s in recipe if s[0] != "kernel")
    return replace(program, recipe=recipe)


def runs_alone(program: Program) -> bool:
    """Whether nothing batches the work of a group, in the program or around it."""
    shape = {} if program.mesh is None else MESHES[program.mesh][0]
    alone = program.n <= shape.get("clients", 1)
    in_turn = program.runner == "drjax" and program.step == 1
    return program.mode != "vmap" and len(shape) < 3 and (alone or in_turn)


def walk(recipe) -> Iterator[tuple]:
    """All steps, at any depth."""
    for step in recipe:
        yield step
        yield from walk(step[3])


def _has_custom_vjp(step) -> bool:
    name, _, j, _ = step
    mapped = name == "mapped" and j % STEPS["mapped"].variants == 8
    return mapped or "custom" in name.replace("customjvp", "") or "hal" in name


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
        ("by_slice_mul", 1, 1, ()),
    )
    programs = [tuple(works[i : i + 6]) for i in range(0, len(works), 6)]
    return programs + [((name, 1, j, body),) for j, name in enumerate(CONTROL)]


def make(program: Program) -> Callable:
    """`(scalar that depends on everything, slices)` of `arguments`."""
    recipe = program.recipe

    def random_program(*args):
        kinds = ("g0", "g1", "gn", "p0", "p1", "p2", "gi", "pi", "pb", "gk", "pk")
        values = dict(zip(kinds, args, strict=True))
        for kind in ("gk", "pk"):
            values[kind] = jax.random.wrap_key_data(values[kind])
        values = {kind: [value] for kind, value in values.items()}
        # Where a value is used is how the plan learns its kind.
        for kind in ("p0", "p1", "p2"):
            values[kind] += [blocks.map_fn(jnp.sin, values[kind][0])]
        values["pi"] += [blocks.map_fn(lambda i: (3 * i) % 11, values["pi"][0])]
        values["pb"] += [blocks.map_fn(lambda b: b ^ True, values["pb"][0])]
        values["pk"] += [
            blocks.map_fn(lambda k: jax.random.fold_in(k, 3), values["pk"][0])
        ]
        eighths = lambda x: jnp.round(8 * x).astype(program.half) / 8
        stopped = lax.stop_gradient
        values["gh"] = [eighths(stopped(values["g1"][0]))]
        values["ph"] = [blocks.map_fn(eighths, stopped(values["p1"][0]))]
        env = run(recipe, Env(values))
        total = sum(bounded(x).sum() for kind in GLOBAL for x in env.values[kind])
        for kind in (*SLICES, "p2"):
            for x in env.values[kind]:
                total += jnp.sum(blocks.reduce_mean(bounded(x)))
        last = {kind: env.values[kind][-1] for kind in random_kinds.OTHER}
        last["gk"] = jax.random.key_data(last["gk"])
        last["pk"] = jax.vmap(jax.random.key_data)(last["pk"])
        return total, (env.values["p1"][-1], last)

    return blocks.program(clients=program.n)(random_program)


DIFFERENTIATED = 6


def arguments(program: Program) -> tuple[Any, ...]:
    """Values for a program."""
    n, f, data = program.n, program.f, np.random.RandomState(program.seed)
    shapes = ((), (f,), (n, f), (n,), (n, f), (n, f, f))
    floats = [data.uniform(-0.9, 0.9, shape).astype(program.dtype) for shape in shapes]
    return (
        *floats,
        np.int32(data.randint(0, 11)),
        data.randint(0, 11, n).astype(np.int32),
        data.randint(0, 2, n) > 0,
        data.randint(0, 99, 2).astype(np.uint32),
        data.randint(0, 99, (n, 2)).astype(np.uint32),
    )


def used(program: Program, fn: Callable, args) -> tuple[Callable, tuple]:
    """The function that a program's mode asks for, and its arguments."""
    known = {k: jnp.asarray(args[k]) for k in program.closed if k < len(args)}
    free = [k for k in range(len(args)) if k not in known]
    inputs = tuple(args[k] for k in free)

    def closed(*inputs):
        full = [known.get(k) for k in range(len(args))]
        for k, x in zip(free, inputs, strict=True):
            full[k] = x
        return fn(*full)

    floats = tuple(i for i, k in enumerate(free) if k < DIFFERENTIATED)
    mode = program.mode if floats else "value"
    if mode == "value":
        return closed, inputs
    if mode == "grad":
        return jax.value_and_grad(closed, floats, has_aux=True), inputs
    if mode == "vmap":
        axes: list[Any] = [None] * len(inputs)
        for count, i in enumerate(floats):
            axis = (0, None, -1, 1, 0)[(count + program.seed) % 5]
            axes[i] = axis if axis != 1 or inputs[i].ndim else 0
        if all(a is None for a in axes):
            axes[floats[0]] = 0
        batched = [
            x if a is None else np.stack([x, x * 0.7], a)
            for x, a in zip(inputs, axes, strict=True)
        ]
        return jax.vmap(closed, tuple(axes)), tuple(batched)

    def of_floats(inputs):
        def fn(*xs):
            full = list(inputs)
            for i, x in zip(floats, xs, strict=True):
                full[i] = x
            return closed(*full)[0]

        return fn

    def directional(*inputs):
        point = tuple(inputs[i] for i in floats)
        tangent = tuple(jnp.cos(3 * x) for x in point)
        fn = of_floats(inputs)
        if mode == "hvp":
            fn = jax.grad(fn, tuple(range(len(floats))))
        return jax.jvp(fn, point, tangent)

    return directional, inputs


# -------------------------------------------------------------------------------------
# Smaller programs


def smaller(program: Program) -> Iterator[Program]:
    """Programs that are simpler in one way, the simplest first."""
    for recipe in _smaller_recipes(program.recipe):
        yield replace(program, recipe=recipe)
    simplest = Program((), n=1, f=2, mode="value", runner="jax")
    for field in (
        "mode",
        "closed",
        "runner",
        "step",
        "dtype",
        "half",
        "n",
        "f",
        "residuals",
        "checkpoints",
    ):
        if getattr(program, field) != getattr(simplest, field):
            smaller = replace(program, **{field: getattr(simplest, field)})
            if smaller.mesh is None or fits(smaller.n, *MESHES[smaller.mesh]):
                yield smaller
    if program.mode != "grad":
        yield replace(program, mode="grad")
    if program.mesh is not None:
        yield replace(program, mesh=None)
        if program.mesh > 0 and program.n % 2 == 0:
            yield replace(program, mesh=0)
    for k in program.closed:
        yield replace(program, closed=tuple(x for x in program.closed if x != k))


def _smaller_recipes(recipe) -> Iterator[tuple]:
    for k, (name, i, j, body) in enumerate(recipe):
        yield recipe[:k] + recipe[k + 1 :]
        if body:
            yield recipe[:k] + body + recipe[k + 1 :]
            for less in _smaller_recipes(body):
                if less:
                    yield (*recipe[:k], (name, i, j, less), *recipe[k + 1 :])


def smallest(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that still fails."""
    for candidate in itertools.islice(smaller(program), 200):
        candidate = valid(candidate)
        if candidate != program and fails(candidate):
            return smallest(candidate, fails)
    return program
