"""Adjoints of the linear blocks, exactly, for all small cases.

A block is integer-linear in its operands, so that <A x, y> = <x, A' y> can be checked
exactly: it is applied to the unit vectors, forward and backward, and both results are
compared with the matrix by definition. All entries are integers that float32 holds.
Masks, segments and indices are data of a compiled function, which runs for all of them.

Covers: drjax._primitives.moves, drjax._primitives.collectives,
drjax._primitives.reduce_ops, drjax._primitives.select_slice, drjax._api.reductions,
drjax._api.moves, drjax._api.select, drjax._api.levels, drjax._api.participation.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

# 1 to 12 divide it, so that means of unit vectors have integers; and XLA, which may
# multiply by 1 / 7 to divide by 7, rounds to these.
UNIT = 138600.0
COMPILER = {"xla_backend_optimization_level": 0}  # most of the time is compilation


@dataclass(frozen=True)
class Block:
    """A linear function of arrays, and its matrix.

    `sizes(n)` are the leading axes of the operands; None: it is global, and has none.
    `matrix(d, n)` is `[cases, slices of the result, slices of operands]` for data
    `[cases, length]`. `result` is "groups" if it is partitioned, "pods" if it is over
    these, "several" if it is global, and "one" if it also lacks their axis.
    """

    fn: Callable[..., Any]  # `(n, data, *operands)`
    matrix: Callable[[np.ndarray, int], np.ndarray]
    sizes: Callable[[int], tuple[int | None, ...]] = lambda n: (n,)
    result: str = "groups"


def one_hot(index: np.ndarray, size: int) -> np.ndarray:
    """`[..., k]` to `[..., k, size]`; zeros for an index out of bounds."""
    return (index[..., None] == np.arange(size)).astype(np.int64)


def from_end(index: np.ndarray, size: int) -> np.ndarray:
    return np.where(index < 0, index + size, index)


def clamped(index: np.ndarray, size: int) -> np.ndarray:
    return from_end(index, size).clip(0, size - 1)


def added(index: np.ndarray, size: int) -> np.ndarray:
    return one_hot(from_end(index, size), size).swapaxes(-1, -2)


def last_of(index: np.ndarray, size: int) -> np.ndarray:
    """Like `added`, but of the slices for one group the last one alone."""
    each = added(index, size)
    behind = np.flip(np.cumsum(np.flip(each, -1), -1), -1)
    return each * (behind == 1)


def into(written: np.ndarray, add: bool) -> np.ndarray:
    """The matrix of slices, and of those to which they are written."""
    kept = np.ones_like(written[..., 0]) if add else 1 - written.sum(-1)
    old = np.eye(written.shape[-2], dtype=np.int64) * kept[..., None]
    return np.concatenate([written, old], -1)


def mean_of(weights: np.ndarray) -> np.ndarray:
    """Weights over their sums; zeros if that is zero."""
    total = weights.sum(-1, keepdims=True)
    return weights / np.maximum(total, 1)


def same(matrix: Callable[[int], np.ndarray]):
    """A matrix that does not depend on data."""
    return lambda d, n: np.broadcast_to(matrix(n), (len(d), *matrix(n).shape))


def in_population(d: Any, n: int, where=np.where):
    """From indices of n groups to ones of 2 n groups, those out of bounds included."""
    return where(d >= n, d + n, where(d < -n, d - n, (3 * d) % (2 * n) - n * (d < 0)))


def twice(d: Any, xp: Any = np):
    return xp.concatenate([d, xp.roll(d, 1, -1)], -1)


def masked(d):
    return drjax.map_fn(lambda d: d > 0, d)


only = lambda x: np.asarray(x)[:, None]

# Of which groups: 0 is not, 1 and 2 are, with that weight.
MASKS = {
    "sum": Block(
        lambda n, d, x: drjax.reduce_sum(x, where=masked(d)),
        lambda d, n: only(d > 0), result="one",
    ),
    "mean": Block(
        lambda n, d, x: drjax.reduce_mean(x, where=masked(d), default=0),
        lambda d, n: only(mean_of(1 * (d > 0))), result="one",
    ),
    "weighted mean": Block(
        lambda n, d, x: drjax.reduce_weighted_mean(
            x, drjax.map_fn(jnp.float32, d), default=0
        ),
        lambda d, n: only(mean_of(d)), result="one",
    ),
    "map": Block(
        lambda n, d, x: drjax.map_fn(lambda x, d: jnp.where(d > 0, 3 * x, -x), (x, d)),
        lambda d, n: np.eye(n) * np.where(d > 0, 3, -1)[:, None],
    ),
    "away from the sum": Block(
        lambda n, d, x: drjax.map_fn(
            lambda x, s: 2 * x - s,
            (x, drjax.broadcast(drjax.reduce_sum(x, where=masked(d)))),
        ),
        lambda d, n: 2 * np.eye(n) - 1 * (d > 0)[:, None],
    ),
    "broadcast to some": Block(
        lambda n, d, x: drjax.map_fn(lambda d, x: d * x, (d, drjax.broadcast(x))),
        lambda d, n: d[..., None], lambda n: (None,),
    ),
    "columns": Block(
        lambda n, d, x: drjax.reduce_columns(
            lambda c: c @ jnp.arange(1.0, n + 1),
            drjax.map_fn(lambda d, x: d * x, (d, x)),
        ),
        lambda d, n: only(d * np.arange(1, n + 1)), result="one",
    ),
}  # fmt: skip
SEGMENTS = {
    "sum": Block(
        lambda n, d, x: drjax.reduce_sum(x, by=d, num=2),
        lambda d, n: one_hot(d, 2).swapaxes(-1, -2), result="several",
    ),
    "mean": Block(
        lambda n, d, x: drjax.reduce_mean(x, by=d, num=2, default=0),
        lambda d, n: mean_of(one_hot(d, 2).swapaxes(-1, -2)), result="several",
    ),
    "sum of some": Block(
        lambda n, d, x: drjax.reduce_sum(x, where=np.arange(n) % 2 > 0, by=d, num=2),
        lambda d, n: one_hot(d, 2).swapaxes(-1, -2) * (np.arange(n) % 2),
        result="several",
    ),
}  # fmt: skip
INDICES = {
    "take": Block(
        lambda n, d, x: drjax.take(x, d), lambda d, n: one_hot(clamped(d, n), n)
    ),
    "take of a population": Block(
        lambda n, d, x: drjax.take(x, in_population(d, n, jnp.where)),
        lambda d, n: one_hot(clamped(in_population(d, n), 2 * n), 2 * n),
        lambda n: (2 * n,),
    ),
    "take of many": Block(
        lambda n, d, x: drjax.take(x, twice(d, jnp)),
        lambda d, n: one_hot(clamped(twice(d), n), n),
    ),
    "put added": Block(
        lambda n, d, x: drjax.put(x, d, add=True), lambda d, n: added(d, n)
    ),
    "put": Block(lambda n, d, x: drjax.put(x, d), lambda d, n: last_of(d, n)),
    "put into, added": Block(
        lambda n, d, x, y: drjax.put(x, d, into=y, add=True),
        lambda d, n: into(added(d, n), True), lambda n: (n, n),
    ),
    "put into": Block(
        lambda n, d, x, y: drjax.put(x, d, into=y),
        lambda d, n: into(last_of(d, n), False), lambda n: (n, n),
    ),
    "put into a population": Block(
        lambda n, d, x, y: drjax.put(x, in_population(d, n, jnp.where), into=y),
        lambda d, n: into(last_of(in_population(d, n), 2 * n), False),
        lambda n: (n, 2 * n),
    ),
    "put into a population, added": Block(
        lambda n, d, x, y: drjax.put(
            x, in_population(d, n, jnp.where), into=y, add=True
        ),
        lambda d, n: into(added(in_population(d, n), 2 * n), True),
        lambda n: (n, 2 * n),
    ),
    "put of many, added": Block(
        lambda n, d, x: drjax.put(x, twice(d, jnp), add=True),
        lambda d, n: added(twice(d), n), lambda n: (2 * n,),
    ),
    "select": Block(
        lambda n, d, x: drjax.select(x, d[0]),
        lambda d, n: only(one_hot(clamped(d[:, 0], n), n)), result="one",
    ),
    "select of some": Block(
        lambda n, d, x: drjax.select(x, d[-1], where=drjax.map_fn(lambda d: d > 0, d)),
        lambda d, n: only([selected_of(index > 0, index[-1]) for index in d]),
        result="one",
    ),
}  # fmt: skip


def selected_of(taken: np.ndarray, i: int) -> np.ndarray:
    groups = np.flatnonzero(taken)
    if not groups.size:
        return np.zeros(len(taken))
    return np.eye(len(taken))[groups[clamped(np.asarray(i), groups.size)]]


def moves(n: int) -> list[np.ndarray]:
    """All permutations of few groups; of more, those that a shift gives."""
    if n <= 4:
        return [np.array(p) for p in itertools.permutations(range(n))]
    return [np.roll(np.arange(n), k) for k in range(n)]


FIXED = {
    "gather": Block(
        lambda n, d, x: drjax.gather(x), same(np.eye), result="several"
    ),
    "scatter": Block(lambda n, d, x: drjax.scatter(x), same(np.eye)),
    "broadcast": Block(
        lambda n, d, x: drjax.broadcast(x), same(lambda n: np.ones((n, 1))),
        lambda n: (None,),
    ),
    "sum": Block(
        lambda n, d, x: drjax.reduce_sum(x), same(lambda n: np.ones((1, n))),
        result="one",
    ),
    "mean": Block(
        lambda n, d, x: drjax.reduce_mean(x), same(lambda n: np.ones((1, n)) / n),
        result="one",
    ),
    "fold": Block(
        lambda n, d, x: drjax.reduce(jnp.add, x, 0.0),
        same(lambda n: np.ones((1, n))), result="one",
    ),
}  # fmt: skip


def fixed_blocks(n: int) -> dict[str, Block]:
    """Moves are no data: each is a block of its own."""
    shifts = {
        f"shift by {k}": Block(
            lambda n, d, x, k=k: drjax.shift(x, k),
            same(lambda n, k=k: np.roll(np.eye(n), k, 0)),
        )
        for k in range(-n - 1, n + 2)
    }
    takes = {
        f"take of {index}": Block(
            lambda n, d, x, index=index: drjax.take(x, index),
            same(lambda n, index=index: np.eye(n)[index]),
        )
        for index in moves(n)
    }
    puts = {
        f"put by {index}": Block(
            lambda n, d, x, index=index: drjax.put(x, index, add=True),
            same(lambda n, index=index: np.eye(n)[index].T),
        )
        for index in moves(n)
    }
    return FIXED | shifts | takes | puts


# Two levels: data `[2 n]` for 2 pods of n groups, operands `[2, n]`.


def in_groups(d: Any, n: int, xp: Any = np):
    """Indices of n groups, of which two are in bounds, and two are not."""
    return xp.asarray([-n - 1, 0, n - 1, n])[d[..., :n] + 2 * d[..., n:]]


def each_pod(matrix: np.ndarray) -> np.ndarray:
    return np.kron(np.eye(2, dtype=np.int64), matrix)


def taken_of(d, n):
    return drjax.map_fn(lambda d: d > 0, d.reshape(2, n))


def sums_of_pods(d: np.ndarray, n: int) -> np.ndarray:
    return d[:, None] * np.kron(np.eye(2, dtype=np.int64), np.ones(n, np.int64))


LEVELS = {
    "sum": Block(
        lambda n, d, x: drjax.reduce_sum(x, where=taken_of(d, n)),
        lambda d, n: only(d), result="one",
    ),
    "mean": Block(
        lambda n, d, x: drjax.reduce_mean(x, where=taken_of(d, n), default=0),
        lambda d, n: only(mean_of(d)), result="one",
    ),
    "sum of pods": Block(
        lambda n, d, x: drjax.reduce_sum(x, where=taken_of(d, n), over="groups"),
        lambda d, n: sums_of_pods(d, n),
        result="pods",
    ),
    "broadcast of sums": Block(
        lambda n, d, x: drjax.broadcast(
            drjax.reduce_sum(x, where=taken_of(d, n), over="groups"), over="groups"
        ),
        lambda d, n: np.repeat(sums_of_pods(d, n), n, 1),
    ),
    "take": Block(
        lambda n, d, x: drjax.take(x, in_groups(d, n, jnp), over="groups"),
        lambda d, n: each_pod(one_hot(clamped(in_groups(d, n), n), n)),
    ),
    "put added": Block(
        lambda n, d, x: drjax.put(x, in_groups(d, n, jnp), add=True, over="groups"),
        lambda d, n: each_pod(added(in_groups(d, n), n)),
    ),
    "shift": Block(
        lambda n, d, x: drjax.shift(x, 1, over="pods"),
        same(lambda n: np.roll(np.eye(2 * n), n, 0)),
    ),
    "select": Block(
        lambda n, d, x: drjax.select(x, in_groups(d, n, jnp)[0], over="groups"),
        lambda d, n: each_pod(one_hot(clamped(in_groups(d, n)[:, :1], n), n)),
        result="pods",
    ),
}  # fmt: skip


LEVEL_AXES = ("pods", "groups")

# ---------------------------------------------------------------------------------
# Data: all of them, or letters from which all words are made


def all_words(letters, length: int) -> np.ndarray:
    return np.array([*itertools.product(letters, repeat=length)], np.int32)


def indices(n: int, all_of: int) -> np.ndarray:
    """All indices from -n - 1 to n; of more than `all_of` groups all of three numbers.

    These are of the first group, of the last one, and out of bounds.
    """
    return all_words(range(-n - 1, n + 1) if n <= all_of else (0, -1, n), n)


FAMILIES: dict[str, tuple[Callable[[int], dict[str, Block]], Callable]] = {
    "masks": (lambda n: MASKS, lambda n, _: all_words(range(3), n)),
    "segments": (lambda n: SEGMENTS, lambda n, _: all_words(range(-1, 3), n)),
    "indices": (lambda n: INDICES, indices),
    "fixed": (fixed_blocks, lambda n, _: np.zeros((1, n), np.int32)),
    "levels": (lambda n: LEVELS, lambda n, _: all_words(range(2), 2 * n)),
}


def program_of(family: str, n: int):
    if family == "levels":
        return drjax.program(pods=2, groups=n)
    return drjax.program(groups=n)


def shaped(family: str, x, n: int):
    """Slices of both levels, by level."""
    return x.reshape(2, n, -1) if family == "levels" else x


def check(family: str, n: int, mode: str, mesh=None, all_of: int = 4, some=None) -> int:
    """Compare both matrices of each block with the one by definition; return how many.

    `some`: of the data that many.
    """
    table, data_of = FAMILIES[family]
    blocks, data = table(n), data_of(n, all_of)
    if some is not None:
        data = data[np.linspace(0, len(data) - 1, min(some, len(data))).astype(int)]
    matrices = [block.matrix(data, n) for block in blocks.values()]
    width = max(max(a.shape[1:]) for a in matrices)
    units = lambda k: np.float32(UNIT) * np.eye(k, width, dtype=np.float32)
    operands, cotangents = [], []
    for block, a in zip(blocks.values(), matrices, strict=True):
        sizes = (2 * n,) if family == "levels" else block.sizes(n)
        ends = np.cumsum([1 if size is None else size for size in sizes])
        slices = np.split(units(ends[-1]), ends[:-1])
        operands.append([
            x[0] if size is None else shaped(family, x, n)
            for x, size in zip(slices, sizes, strict=True)
        ])  # fmt: skip
        ct = units(a.shape[1])
        ct = shaped(family, ct, n) if block.result == "groups" else ct
        cotangents.append(ct[0] if block.result == "one" else ct)
    if mesh is not None and EXPLICIT in mesh.axis_types:
        place = functools.partial(placed, mesh=mesh, levels=family == "levels")
        operands = [[*map(place, xs)] for xs in operands]
        cotangents = [
            place(ct) if block.result in LEVEL_AXES else ct
            for block, ct in zip(blocks.values(), cotangents, strict=True)
        ]

    def both(operands, cotangents, d):
        results = []
        for block, xs, ct in zip(blocks.values(), operands, cotangents, strict=True):
            y, transposed = jax.vjp(lambda *xs, b=block: b.fn(n, d, *xs), *xs)
            results.append((y, transposed(ct)))
        return results

    fn: Any = program_of(family, n)(both)
    with in_mesh(mesh):
        if mode == "drjax":
            fn = drjax.jit(fn, groups_per_step=1)
        elif mode in ("xla", "reference"):
            plan = drjax.make_plan(fn)(operands, cotangents, data[0])
            fn = getattr(drjax.backends, mode).compile(plan)
        if mode in ("eager", "reference"):
            results = [fn(operands, cotangents, jnp.asarray(d)) for d in data]
            results = jax.tree.map(
                lambda *xs: np.stack([*map(np.asarray, xs)]), *results
            )
        else:
            run = lambda a, b, d: jax.lax.map(lambda d: fn(a, b, d), d)
            compiled = jax.jit(run, compiler_options=COMPILER)
            results = jax.device_get(compiled(operands, cotangents, data))
    for name, a, (y, xs) in zip(blocks, matrices, results, strict=True):
        flat = lambda x: np.reshape(x, (len(data), -1, width))
        forward = flat(y)
        backward = np.concatenate([*map(flat, xs)], 1)
        q, p = a.shape[1:]
        what = f"{name} of {n} groups by {mode} on {mesh}"
        wrong = f"{what}: a wrong matrix for the data "
        for got, want, k in ((forward, a, p), (backward, a.swapaxes(1, 2), q)):
            differs = (got[..., :k] != np.rint(UNIT * want)).any((1, 2))
            assert not differs.any(), wrong + str(data[differs][:5])
            assert not got[..., k:].any(), wrong
    return len(data) * len(blocks)


def placed(x, mesh, levels: bool):
    """An operand or cotangent, with an axis of groups or of pods, on Explicit axes."""
    axes = LEVEL_AXES if levels else LEVEL_AXES[1:]
    spec = [axis if axis in mesh.axis_names else None for axis in axes]
    spec = jax.P(*spec[: np.ndim(x) - 1])
    return jax.device_put(x, jax.NamedSharding(mesh, spec))


# ---------------------------------------------------------------------------------
# Tests


def meshes_of(m: int, kind: Any, n: int, levels: bool = False) -> list:
    """Meshes of m devices; 0: none. On Explicit axes, they divide the groups."""
    if not m:
        return [None]
    shapes = [{"groups": m}]
    if levels:
        shapes = [{"pods": 2, "groups": m // 2}] if m == 4 else [*shapes, {"pods": m}]
    fits = lambda shape: not n % shape.get("groups", 1) and shape.get("pods", 1) <= 2
    return [make_mesh(shape, kind) for shape in shapes if kind is AUTO or fits(shape)]


# How it runs, on how many devices, of which kind of axes; and `all_of` of `indices`.
ON_MESHES = [
    (mode, m, kind, 3)
    for mode in ("jit", "drjax")
    for m, kind in [(0, AUTO), *itertools.product((1, 2, 3, 4), (AUTO, EXPLICIT))]
]
PLANS = [("jit", 0, AUTO, 4), ("xla", 0, AUTO, 4)]
ALL = [*ON_MESHES[1:], *PLANS]


def runs(mode: str, m: int, kind: Any, all_of: int) -> list[tuple]:
    """The arguments of `check` for one of `ALL`."""
    return [
        (family, n, mode, mesh, all_of)
        for n in range(1, 7)
        for family in FAMILIES
        if family != "levels" or n in (2, 3)
        for mesh in meshes_of(m, kind, n, family == "levels")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode, m, kind, all_of", ALL)
def test_adjoints_are_exact_in_all_small_cases(mode, m, kind, all_of, capsys):
    with jax.check_tracer_leaks(False):
        count = sum(check(*run) for run in runs(mode, m, kind, all_of))
    with capsys.disabled():
        print(f"\n{count:,} exact pairs of a block and its adjoint")


def test_the_page_has_their_number():
    total = 0
    for family, n, _, _, all_of in itertools.chain(*(runs(*each) for each in ALL)):
        table, data_of = FAMILIES[family]
        total += len(data_of(n, all_of)) * len(table(n))
    assert total > 1e5
    page = Path(__file__).parents[2] / "docs" / "explanation" / "transposition.md"
    assert f"{total:,} cases" in page.read_text()


@checkerboard(3, family=FAMILIES, mode=["eager", "reference", "xla", "jit", "drjax"])
def test_adjoints_are_exact_in_some_cases(family, mode):
    m, some = (2, 8) if mode in ("jit", "drjax") else (0, 3)
    for mesh in meshes_of(m, EXPLICIT if mode == "jit" else AUTO, 2):
        assert check(family, 2, mode, mesh, some=some)
