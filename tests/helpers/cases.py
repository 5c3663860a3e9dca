"""The shared table of programs, each with its meaning in plain numpy.

A test file per transformation runs every row of the table; `grid` spreads the rows
over meshes so that each case and each transformation meets each mesh (the full
product is marked a grid). Everything runs in float64: numpy is the oracle for values,
and differences of the numpy function are the oracle for derivatives.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

GRID = (pytest.mark.slow, pytest.mark.grid)
N = 8  # groups: divisible by 1, 2, 4 and 8 devices

MESHES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    **{
        f"{kind.name.lower()}-{m}": lambda m=m, kind=kind: make_mesh(
            {"clients": m}, kind
        )
        for kind in (AUTO, EXPLICIT)
        for m in (1, 2, 4, 8)
    },
}

program = drjax.program(clients=N)


@dataclass(frozen=True)
class Case:
    """A program and its meaning; `fn` and `numpy` return a float scalar or array."""

    fn: Callable
    numpy: Callable
    args: tuple[np.ndarray, ...]
    on_explicit: bool = True  # JAX cannot close over arrays on Explicit axes

    @property
    def name(self) -> str:
        return self.fn.__name__


def _data(*shape: int) -> np.ndarray:
    size = int(np.prod(shape))
    return (np.cos(np.arange(size) * 1.7 + len(shape)) + 0.1).reshape(shape)


X, M, XS, W = _data(), _data(3), _data(N, 3), np.abs(_data(N)) + 0.1


@program
def broadcast_double_and_sum(x):
    return drjax.reduce_sum(drjax.map_fn(lambda a: 2 * a, drjax.broadcast(x)))


@program
def mean_loss(m, xs):
    def loss(m, x):
        return jnp.sum(jnp.sin(m * x)) ** 2

    return drjax.reduce_mean(drjax.map_fn(loss, (drjax.broadcast(m), xs)))


def np_mean_loss(m, xs):
    return np.mean(np.sin(m * xs).sum(1) ** 2)


@program
def weighted_tree(m, xs, weights):
    def outputs(m, x):
        return {"a": jnp.exp(m * x), "b": (jnp.sum(x), None)}

    tree = drjax.map_fn(outputs, (drjax.broadcast(m), xs))
    mean = drjax.reduce_weighted_mean(tree, weights)
    return mean["a"] * mean["b"][0]


def np_weighted_tree(m, xs, w):
    a = (w[:, None] * np.exp(m * xs)).sum(0) / w.sum()
    return a * (w * xs.sum(1)).sum() / w.sum()


@program
def largest(m, xs):
    cubes = drjax.map_fn(lambda m, x: jnp.sin(m) * x**3, (drjax.broadcast(m), xs))
    return drjax.reduce_max(cubes, where=drjax.partition_index() != 3, default=0)


def np_largest(m, xs):
    return (np.sin(m) * np.delete(xs, 3, axis=0) ** 3).max(0)


@program
def smallest(m, xs):
    scaled = drjax.map_fn(jnp.multiply, (drjax.broadcast(m), xs))
    return jnp.prod(drjax.reduce_min(scaled))


@program
def gathered_prefix_sums(m, xs):
    slices = drjax.map_fn(lambda m, x: m * x**2, (drjax.broadcast(m), xs))
    slices = drjax.gather(slices)
    return jnp.cumsum(slices, axis=0)[::2]


@program
def scattered_squares(x):
    return drjax.reduce_sum(drjax.map_fn(lambda r: r**3, drjax.scatter(x * 2)))


@program
def moved_slices(m, xs):
    slices = drjax.map_fn(lambda m, x: m * x**2, (drjax.broadcast(m), xs))
    index = jnp.arange(N)[::-1] // 2
    moved = (
        drjax.shift(slices, 1),
        drjax.take(slices, [*range(2, N), 1, 0]),
        drjax.take(slices, index),
        drjax.put(slices, index, add=True),
    )
    product = drjax.map_fn(lambda x, a, b, c, d: x * a + b * c + d, (xs, *moved))
    return drjax.reduce_sum(product)


def np_moved_slices(m, xs):
    slices, index = m * xs**2, np.arange(N)[::-1] // 2
    other = slices[[*range(2, N), 1, 0]]
    return (xs * np.roll(slices, 1, 0) + other * slices[index] + slices).sum(0)


@program
def middle_of_columns(m, xs):
    slices = drjax.map_fn(lambda m, x: m * x**2, (drjax.broadcast(m), xs))
    middle = lambda c: jnp.sort(c)[2:-2].mean() * (1 + m[0])
    gram = drjax.reduce_columns(lambda c: jnp.outer(c, c), xs, sum=True)
    return drjax.reduce_columns(middle, slices) * jnp.sum(jnp.sin(gram))


def np_middle_of_columns(m, xs):
    middle = np.sort(m * xs**2, axis=0)[2:-2].mean(0)
    return middle * (1 + m[0]) * np.sin(xs @ xs.T).sum()


@program
def folded_states(m, xs):
    def compose(a, b):  # affine maps, which do not commute
        shift = a["scale"] * b["shift"] + a["shift"]
        return {"scale": a["scale"] * b["scale"], "shift": shift}

    states = drjax.map_fn(
        lambda m, x: {"scale": jnp.sin(m * x) + 1, "shift": x}, (drjax.broadcast(m), xs)
    )
    total = drjax.reduce(compose, states, {"scale": 1, "shift": 0})
    return total["scale"] + total["shift"] ** 2


def np_folded_states(m, xs):
    scale, shift = np.ones(3), np.zeros(3)
    for x in xs:
        scale, shift = scale * (np.sin(m * x) + 1), scale * x + shift
    return scale + shift**2


@program
def selected_slice(m, xs):
    slices = drjax.map_fn(lambda m, x: jnp.exp(m) * x, (drjax.broadcast(m), xs))
    first = drjax.reduce_argmin(drjax.map_fn(jnp.sum, xs))
    odd = drjax.partition_index() % 2 == 1
    return drjax.select(slices, first) * drjax.select(slices, jnp.int32(2), where=odd)


def np_selected_slice(m, xs):
    return np.exp(2 * m) * xs[xs.sum(1).argmin()] * xs[5]


@program
def two_rounds(m, xs):
    mean = drjax.reduce_mean(xs)

    def distance(mean, m, x):
        return jnp.sum(m * (x - mean) ** 2)

    spread = drjax.map_fn(distance, (*drjax.broadcast((mean, m)), xs))
    return drjax.reduce_mean(spread) * jnp.sum(mean)


def np_two_rounds(m, xs):
    mean = xs.mean(0)
    return (m * (xs - mean) ** 2).sum(1).mean() * mean.sum()


@program
def closed_over(m, xs):
    scale = jnp.exp(m)
    return drjax.reduce_sum(drjax.map_fn(lambda x: jnp.tanh(x @ scale), xs))


@program
def numbered(m):
    def power(m):
        return m ** (1 + drjax.partition_index() % 3)

    inside = drjax.reduce_sum(drjax.map_fn(power, drjax.broadcast(m)))
    outside = drjax.map_fn(
        lambda i, m: i * m, (drjax.partition_index(), drjax.broadcast(m))
    )
    return inside + drjax.reduce_mean(outside)


def np_numbered(m):
    i = np.arange(N)[:, None]
    return (m ** (1 + i % 3)).sum(0) + (i * m).mean(0)


@program
def pointwise_between(x, xs):
    y = drjax.broadcast(x)[:, None] * xs + 1.0
    return drjax.reduce_sum(jnp.square(y)) - 3 * drjax.reduce_mean(-y)


# Segment 2 has no group. JAX caches arrays of NumPy with the dtype of their first use.
SEGMENTS = np.array([1, 0, 1, -1, 3, 0, 4, 3], np.int32)


@program
def chosen_groups(m, xs):
    odd = drjax.partition_index() % 2 == 1
    mean = drjax.reduce_mean(drjax.map_fn(lambda x: x**2, xs), where=odd)
    by = drjax.reduce_mean(xs, by=SEGMENTS, num=4, default=2)
    return mean * m + drjax.reduce_sum(xs, where=~odd) * by.sum(0)


def np_chosen_groups(m, xs):
    chosen = [xs[SEGMENTS == k] for k in range(4)]
    by = np.array([s.mean(0) if len(s) else [2.0] * 3 for s in chosen])
    return (xs[1::2] ** 2).mean(0) * m + xs[::2].sum(0) * by.sum(0)


@program
def maml(w, lr, xs):
    def loss(w, x):
        return 0.5 * jnp.sum((w * x - 1.0) ** 2)

    def adapted(w, lr, x):
        return loss(w - lr * jax.grad(loss)(w, x), x)

    return drjax.reduce_mean(drjax.map_fn(adapted, (*drjax.broadcast((w, lr)), xs)))


def np_maml(w, lr, xs):
    adapted = w - lr * (w * xs - 1) * xs
    return 0.5 * ((adapted * xs - 1) ** 2).sum(1).mean()


@program
def local_sgd(w, xs):
    def train(w, x):
        def step(w, _):
            return w - 0.1 * x * (w * x - 1.0), jnp.sum(w)

        return jax.lax.scan(step, w, None, length=3)

    trained, sums = drjax.map_fn(train, (drjax.broadcast(w), xs))
    return drjax.reduce_mean(trained) * drjax.reduce_sum(sums)


def np_local_sgd(w, xs):
    w, sums = np.broadcast_to(w, xs.shape), []
    for _ in range(3):
        sums.append(w.sum())
        w = w - 0.1 * xs * (w * xs - 1.0)
    return w.mean(0) * np.array(sums)


@program
def partitioned_result(m, xs):
    def fn(m, x):
        return jnp.where(x > 0, jnp.log1p(x * x), m * x)

    return drjax.map_fn(fn, (drjax.broadcast(m), xs))


@program
def branches(m, xs):
    def branch(m, x):
        return jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, m * x)

    return drjax.reduce_sum(drjax.map_fn(branch, (drjax.broadcast(m), xs)))


@drjax.program(clients=N, parts=3)
def levels(m, xs):
    waves = drjax.map_fn(lambda m, x: jnp.sin(m * x).sum(), (drjax.broadcast(m), xs))
    means = drjax.reduce_mean(waves, over="parts")
    centered = (waves, drjax.broadcast(means, over="parts"))
    squares = drjax.map_fn(lambda a, b: (a - b) ** 2, centered)
    of_clients = drjax.reduce_sum(squares, over="parts")
    roots = drjax.map_fn(lambda a: jnp.sqrt(1 + a), of_clients, over="clients")
    return drjax.reduce_mean(roots, over="clients")


def np_levels(m, xs):
    waves = np.sin(m * xs[..., None]).sum(-1)
    squares = (waves - waves.mean(1, keepdims=True)) ** 2
    return np.sqrt(1 + squares.sum(1)).mean()


CASES = (
    Case(broadcast_double_and_sum, lambda x: 2 * N * x, (X,)),
    Case(mean_loss, np_mean_loss, (M, XS)),
    Case(weighted_tree, np_weighted_tree, (M, XS, W)),
    Case(largest, np_largest, (M, XS)),
    Case(smallest, lambda m, xs: np.prod((m * xs).min(0)), (M, XS)),
    Case(
        gathered_prefix_sums, lambda m, xs: (m * xs**2).cumsum(0)[::2], (M, XS)
    ),
    Case(scattered_squares, lambda x: ((2 * x) ** 3).sum(0), (XS,)),
    Case(moved_slices, np_moved_slices, (M, XS)),
    Case(selected_slice, np_selected_slice, (M, XS)),
    Case(middle_of_columns, np_middle_of_columns, (M, XS), False),
    Case(folded_states, np_folded_states, (M, XS)),
    Case(two_rounds, np_two_rounds, (M, XS)),
    Case(closed_over, lambda m, xs: np.tanh(xs @ np.exp(m)).sum(), (M, XS), False),
    Case(numbered, np_numbered, (M,)),
    Case(
        pointwise_between,
        lambda x, xs: ((x * xs + 1) ** 2).sum(0) + 3 * (x * xs + 1).mean(0),
        (X, XS),
    ),
    Case(
        chosen_groups, np_chosen_groups, (M, XS),
    ),
    Case(maml, np_maml, (M, np.array(0.1), XS)),
    Case(local_sgd, np_local_sgd, (M, XS)),
    Case(
        partitioned_result,
        lambda m, xs: np.where(xs > 0, np.log1p(xs * xs), m * xs),
        (M, XS),
    ),
    Case(
        branches,
        lambda m, xs: np.where(
            xs.sum(1, keepdims=True) > 0, np.sin(m * xs), np.cos(m * xs)
        ).sum(0),
        (M, XS),
    ),
    Case(levels, np_levels, (M, XS)),
)  # fmt: skip


def grid(shift: int = 0, every: int = 1):
    """Parametrize a test over cases and meshes: each case on one mesh, or on all.

    Only each `every`-th case is not slow, from case number `shift` on.
    """
    params = []
    for (i, case), (j, mesh) in itertools.product(enumerate(CASES), enumerate(MESHES)):
        if mesh.startswith("explicit") and not case.on_explicit:
            continue
        default = (i + shift) % len(MESHES) == j
        slow = pytest.mark.slow if (i - shift) % every else ()
        marks = slow if default else GRID
        params.append(pytest.param(case, mesh, marks=marks, id=f"{case.name}-{mesh}"))
    return pytest.mark.parametrize(("case", "mesh_name"), params)


def some(names, *chosen, marks=GRID):
    """Parameters of a test: those that are not chosen have the marks."""
    return [x if x in chosen else pytest.param(x, marks=marks) for x in names]


def marks_of(rest: int) -> tuple:
    """Marks of one of several parameters: 0 is a default test, the others are slow.

    Every second one of these is left to the grids.
    """
    return () if rest == 0 else GRID if rest % 2 == 0 else (pytest.mark.slow,)


# Ways to run a program.
MODES = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "drjax.jit": drjax.jit,
    "by chunks": lambda f: drjax.jit(f, groups_per_step=1),
    "reference": lambda f: (
        lambda *xs: drjax.backends.reference.compile(drjax.make_plan(f)(*xs))(*xs)
    ),
}


def checkerboard(every: int = 2, /, **axes):
    """Parametrize a test over all combinations; only each `every`-th is not slow.

    By default each value of an axis meets each `every`-th value of the next one.
    """
    params = []
    for positions in itertools.product(*map(range, map(len, axes.values()))):
        values = [[*axis][i] for axis, i in zip(axes.values(), positions, strict=True)]
        marks = marks_of(sum(positions) % every)
        # Two processes print a set in two orders, and must collect the same tests.
        assert not any(isinstance(x, set) for x in values)
        name = "-".join(getattr(x, "__name__", str(x)) for x in values)
        params.append(pytest.param(*values, marks=marks, id=name))
    return pytest.mark.parametrize(",".join(axes), params)


class on_mesh:
    """The context of a named mesh, in float64; yields the case's arguments on it."""

    def __init__(self, case: Case, mesh_name: str):
        self.case, self.mesh = case, MESHES[mesh_name]()

    def __enter__(self):
        self.contexts = (jax.enable_x64(True), in_mesh(self.mesh))
        for context in self.contexts:
            context.__enter__()
        return tuple(map(jnp.asarray, self.case.args))

    def __exit__(self, *error):
        for context in reversed(self.contexts):
            context.__exit__(*error)


def assert_close(got, want, rtol=1e-10):
    scale = max(1.0, float(np.max(np.abs(want), initial=0.0)))
    np.testing.assert_allclose(np.asarray(got), want, rtol=rtol, atol=rtol * scale)


def directions(args) -> tuple[np.ndarray, ...]:
    """A fixed direction to differentiate in, one array for each argument."""
    return tuple(np.sin(3.0 * a + 1.0) for a in args)


def difference(fn: Callable, args, step: float = 1e-4):
    """Central difference of `fn` along `directions(args)`, fourth order."""
    d = directions(args)

    def along(t):
        return np.asarray(fn(*(a + t * s for a, s in zip(args, d, strict=True))))

    near = (along(step) - along(-step)) / (2 * step)
    far = (along(2 * step) - along(-2 * step)) / (4 * step)
    return (4 * near - far) / 3


def second_difference(fn: Callable, args, step: float = 1e-3):
    """Second central difference of `fn` along `directions(args)`, fourth order."""
    d = directions(args)

    def along(t):
        return np.asarray(fn(*(a + t * s for a, s in zip(args, d, strict=True))))

    def second(h):
        return (along(h) - 2 * along(0.0) + along(-h)) / h**2

    return (4 * second(step) - second(2 * step)) / 3
