"""Steps of random programs on other kinds of values: see `random_programs.py`.

Slices of matrices ("p2" `[n, f, f]`), integers ("pi" `[n]`, "gi"), bools ("pb" `[n]`),
keys ("pk" `[n]`, "gk") and 16-bit floats ("ph" `[n, f]`, "gh" `[f]`). Those hold
multiples of 1/8 below 32, as do their cotangents, so that every order of additions
gives the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.helpers.plain_blocks import blocks
from tests.helpers.random_steps import STEPS, _apart, bounded, step

OTHER = ("p2", "pi", "pb", "pk", "ph", "gi", "gk", "gh")


def _choose(works, j: int):
    return works[j % len(works)]()


# -------------------------------------------------------------------------------------
# Matrices


@step("p2 p1 g1", "p2", variants=11)
def matrices(x, y, g, j):
    works = (
        lambda: blocks.map_fn(lambda a, b: a @ a.T + jnp.outer(b, g), (x, y)),
        lambda: x.transpose(0, 2, 1),
        lambda: jnp.einsum("nij,njk->nik", x, jnp.sin(x)),
        lambda: x * y[:, None, :],
        lambda: jnp.sin(x) + y[:, :, None],
        lambda: x[:, ::-1, :] * g,
        lambda: jnp.moveaxis(jnp.cos(jnp.moveaxis(x, 0, 1)), 1, 0),
        lambda: blocks.broadcast(jnp.outer(g, g)),
        lambda: jnp.moveaxis(x, 0, -1)[::-1].transpose(2, 0, 1),
        lambda: jnp.cumsum(x, axis=2) * 0.3,
        lambda: blocks.scatter(jnp.sin(blocks.gather(x))),
    )
    return bounded(_choose(works, j))


@step("p2 g1", "p1", variants=7)
def of_matrices(x, g, j):
    works = (
        lambda: x @ g,
        lambda: x.sum(2),
        lambda: x[:, 0],
        lambda: blocks.map_fn(lambda a: jnp.diag(a) * g, x),
        lambda: jnp.einsum("nij,nij->nj", x, jnp.cos(x)),
        lambda: blocks.map_fn(lambda a: lax.map(lambda r: r @ g, a), x),
        lambda: jnp.linalg.norm(x + 0.1, axis=(1, 2))[:, None] * g,
    )
    return bounded(_choose(works, j))


@step("p1 g1", "p2", variants=3)
def to_matrices(x, g, j):
    works = (
        lambda: x[:, :, None] * g,
        lambda: jnp.einsum("ni,nj->nij", x, x),
        lambda: blocks.map_fn(jnp.outer, (x, blocks.broadcast(g))),
    )
    return _choose(works, j)


@step("p2 p1 p0", "g1", variants=9)
def reduce_p2(x, y, w, j):
    works = (
        lambda: blocks.reduce_sum(x)[0],
        lambda: blocks.reduce_mean(x).sum(1),
        lambda: blocks.reduce_max(_apart(x))[-1] - 1,
        lambda: blocks.reduce_min(_apart(x))[:, 0],
        lambda: blocks.reduce_weighted_mean(x, 1.2 + jnp.sin(w))[0],
        lambda: jnp.einsum("nij,ni->j", blocks.map_fn(jnp.sin, x), y),
        lambda: blocks.map_fn(jnp.sin, x).sum((0, 1)),
        lambda: jnp.mean(blocks.map_fn(jnp.sin, x), axis=(0, 2)),
        lambda: blocks.select(x, -1)[0],
    )
    return bounded(_choose(works, j))


# -------------------------------------------------------------------------------------
# Integers, bools and keys


@step("pi pi pb p0 gi", "pi", variants=13)
def integers(x, y, b, r, g, j):
    works = (
        lambda: x + y,
        lambda: x * 3 - y,
        lambda: x ^ y,
        lambda: jnp.where(b, x, -y),
        lambda: blocks.map_fn(lambda i: 2 * i + blocks.partition_index(), x),
        lambda: blocks.broadcast(g) + x,
        lambda: lax.population_count(x & 7),
        lambda: jnp.int32(jnp.floor(5 * jnp.sin(r))),
        lambda: blocks.map_fn(lambda i: 3, x),
        lambda: x + g,
        lambda: blocks.scatter(blocks.gather(x) * 2),
        lambda: blocks.map_fn(lambda i, c: lax.cond(c, lambda: i, lambda: -i), (x, b)),
        lambda: jnp.maximum(x, y) + jnp.minimum(x, g),
    )
    return jnp.int32(_choose(works, j) % 11)


@step("pb pb pi p0 gi", "pb", variants=8)
def bools(x, y, i, r, g, j):
    works = (
        lambda: ~x,
        lambda: x & y,
        lambda: x ^ y,
        lambda: i % 2 == 0,
        lambda: r > 0.0123,
        lambda: blocks.map_fn(lambda a: blocks.partition_index() % 2 == 0, x),
        lambda: blocks.broadcast(g > 2),
        lambda: blocks.map_fn(lambda a: True, x),
    )
    return _choose(works, j)


@step("pi pb p0 gi", "gi", variants=15)
def reduce_pi(x, b, r, g, j):
    y, c = blocks.map_fn(lambda i: i * i, x), blocks.map_fn(jnp.logical_not, b)
    works = (
        lambda: blocks.reduce_sum(x),
        lambda: blocks.reduce_max(x),
        lambda: blocks.reduce_min(x) * g,
        lambda: blocks.reduce_sum(b),
        lambda: blocks.reduce_max(b),
        lambda: blocks.reduce_min(b) + g,
        lambda: blocks.select(x, g % len(x)),
        lambda: blocks.select(b, g % len(x)),
        lambda: y.sum(),
        lambda: jnp.max(y),
        lambda: c.sum(),
        lambda: y[g % len(x)],
        lambda: blocks.reduce_sum(x, where=b),
        lambda: blocks.gather(x)[::-1][0],
        lambda: jnp.where(jnp.any(c), g, 3),
    )
    return jnp.int32(_choose(works, j) % 11)


@step("gi g0", "gi", variants=3)
def number(x, g, j):
    works = (lambda: x + 1, lambda: x * x, lambda: jnp.int32(7 * jnp.sin(g)))
    return jnp.int32(_choose(works, j) % 11)


@step("pi pb p0", "p0", variants=4)
def as_floats(x, b, r, j):
    works = (
        lambda: r + 0.1 * x,
        lambda: jnp.where(b, r, jnp.sin(r)),
        lambda: blocks.map_fn(lambda i, b, r: r * (i + b) * 0.1, (x, b, r)),
        lambda: r * x / 7.0,
    )
    return bounded(_choose(works, j))


@step("pk gk pi", "pk", variants=6)
def keys(x, g, i, j):
    fold = jax.random.fold_in
    works = (
        lambda: blocks.map_fn(lambda k: fold(k, blocks.partition_index()), x),
        lambda: blocks.map_fn(lambda k: jax.random.split(k)[1], x),
        lambda: blocks.broadcast(g),
        lambda: jax.vmap(fold)(x, i),
        lambda: blocks.map_fn(fold, (blocks.broadcast(g), i)),
        lambda: blocks.scatter(blocks.gather(x)),
    )
    return _choose(works, j)


@step("pk gk gi", "gk", variants=4)
def chosen_key(x, g, i, j):
    works = (
        lambda: blocks.select(x, i % len(x)),
        lambda: jax.random.fold_in(g, i),
        lambda: blocks.gather(x)[0],
        lambda: jax.random.split(g, 3)[1],
    )
    return _choose(works, j)


@step("pk p1", "p1", variants=3)
def noise(k, x, j):
    def one(k, r):
        return r + 0.1 * jax.random.uniform(k, r.shape, r.dtype)

    works = (
        lambda: blocks.map_fn(one, (k, x)),
        lambda: jax.vmap(one)(k, x),
        lambda: blocks.map_fn(
            lambda k, r: r * jax.random.bernoulli(k, 0.4, r.shape), (k, x)
        ),
    )
    return bounded(_choose(works, j))


# -------------------------------------------------------------------------------------
# 16-bit floats


def _eighths(x):
    return jnp.round(8 * bounded(x)) / 8


@jax.custom_vjp
def _to_half(x, half):
    return _eighths(x).astype(half.dtype)


_to_half.defvjp(
    lambda x, half: (_eighths(x).astype(half.dtype), (x, half)),
    lambda kept, ct: (0.3 * ct.astype(kept[0].dtype), jnp.zeros_like(kept[1])),
)


@jax.custom_vjp
def _from_half(x, wide):
    return x.astype(wide.dtype)


_from_half.defvjp(
    lambda x, wide: (x.astype(wide.dtype), (x, wide)),
    lambda kept, ct: (_eighths(ct).astype(kept[0].dtype), jnp.zeros_like(kept[1])),
)


@step("p1 ph", "ph")
def to_halves(x, h, j):
    return _to_half(x, h[0, 0] if j % 2 else jnp.zeros((), h.dtype))


@step("ph p1", "p1")
def from_halves(h, x, j):
    return x * jnp.cos(_from_half(h, jnp.zeros((), x.dtype)))


@step("gh g1", "g1")
def from_half(h, x, j):
    return x * jnp.cos(_from_half(h, jnp.zeros((), x.dtype)))


@step("g1 gh", "gh")
def to_half(x, h, j):
    return _to_half(x, jnp.zeros((), h.dtype))


@step("ph gh pb", "ph", variants=6)
def halves(x, g, b, j):
    works = (
        lambda: -x,
        lambda: blocks.map_fn(lambda a: a[::-1], x),
        lambda: blocks.broadcast(g),
        lambda: jnp.where(b[:, None], x, -x),
        lambda: jnp.clip(x + g[None], -0.875, 0.875),
        lambda: blocks.map_fn(lambda a: jnp.maximum(a, 0.125 - g), x),
    )
    return jnp.clip(_choose(works, j), -1, 1)


@step("ph pb gi", "gh", variants=8)
def reduce_ph(x, b, i, j):
    works = (
        lambda: blocks.reduce_sum(x),
        lambda: lax.stop_gradient(blocks.reduce_max(x)),
        lambda: lax.stop_gradient(blocks.reduce_min(x)),
        lambda: blocks.select(x, i % len(x)),
        lambda: blocks.reduce_sum(x, where=b),
        lambda: blocks.gather(x)[0],
        lambda: jnp.sum(blocks.map_fn(jnp.negative, x), axis=0),
        lambda: lax.stop_gradient(_eighths(jnp.floor(8 * blocks.reduce_mean(x)) / 8)),
    )
    return jnp.clip(_choose(works[: 7 if len(x) & (len(x) - 1) else 8], j), -1, 1)


# -------------------------------------------------------------------------------------
# What the blocks are given: trees, masks and chosen groups that are computed, constants


@step("p1 p0 pi g1", "p1", variants=4)
def trees(x, y, i, g, j):
    def work(tree):
        a, (b, none) = tree["a"], tree["b"]
        return {"c": a * b, "d": [tree["i"], None, a + g], "none": none}

    tree = {"a": x, "b": (y, None), "i": i}
    result = blocks.map_fn(work, tree)
    totals = blocks.reduce_mean({"c": result["c"], "d": (result["d"][2], ())})
    works = (
        lambda: result["c"] + totals["c"],
        lambda: blocks.broadcast({"e": [totals["c"]]})["e"][0] * result["d"][2],
        lambda: blocks.map_fn(lambda a, t: a * t["c"], (x, result)),
        lambda: blocks.scatter(blocks.gather(result))["c"] * result["d"][0][:, None],
    )
    return bounded(_choose(works, j))


@step("p1 pb pi gi g1", "g1", variants=8)
def some(x, b, i, g, h, j):
    """Some of the groups, and one group: which ones is computed."""
    n = len(x)
    anyone = b | (blocks.partition_index() == 0)
    works = (
        lambda: blocks.reduce_mean(x, where=anyone),
        lambda: blocks.reduce_sum(x, where=i % 2 == 0),
        lambda: blocks.reduce_mean(x, where=np.arange(n) != n // 2) if n > 1 else h,
        lambda: blocks.select(x, g % n),
        lambda: blocks.select(x, -1 - g % n),
        lambda: blocks.map_fn(jnp.cos, x)[g % n],
        lambda: blocks.reduce_weighted_mean(x, 1.0 * anyone),
        lambda: blocks.reduce_sum(x, where=b) * blocks.reduce_sum(b),
    )
    return bounded(_choose(works, j))


@step("p1 g1", "p1", variants=5)
def constant(x, g, j):
    """Results that do not depend on the group, or on nothing at all."""
    f = len(g)
    works = (
        lambda: blocks.map_fn(lambda a: jnp.full(f, 0.5), x),
        lambda: blocks.map_fn(lambda a: (a, 0.25), x)[1][:, None] * x,
        lambda: blocks.map_fn(lambda a: jnp.zeros_like(a), x) + g,
        lambda: blocks.map_fn(lambda a: (np.linspace(0.1, 0.3, f), 1, True), x)[0] + x,
        lambda: blocks.map_fn(lambda a: g, x),
    )
    return bounded(_choose(works, j))


# -------------------------------------------------------------------------------------
# Loops in groups, and programs in groups


@step("p1 pi", "p1", variants=6)
def loops(x, i, j):
    """The groups decide how often a loop runs; some would not end for zeros."""

    def doubled(a):
        start = jnp.abs(lax.stop_gradient(a[0])) + 1e-3
        more = lambda c: c[0] < 1.0
        return (
            a
            * 0.1
            * lax.while_loop(more, lambda c: (c[0] * 2, c[1] + 1), (start, 0))[1]
        )

    def counted(a, i):
        step = lambda _, a: bounded(a + 0.3)
        return lax.fori_loop(0, i % 4, step, lax.stop_gradient(a))

    def until(a, i):
        last = jnp.where(
            blocks.partition_index() < blocks.partition_size(), i % 5, 2**30
        )
        a = lax.stop_gradient(a)
        return lax.while_loop(
            lambda c: c[0] < last, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, a)
        )[1]

    def scanned(a, i):
        step = lambda c, t: (jnp.where(t < i % 4, jnp.sin(c), c), c.sum())
        return lax.scan(step, a, jnp.arange(4))[0]

    works = (
        lambda: blocks.map_fn(doubled, x),
        lambda: blocks.map_fn(counted, (x, i)),
        lambda: blocks.map_fn(until, (x, i)),
        lambda: blocks.map_fn(scanned, (x, i)),
        lambda: jax.vmap(counted)(blocks.map_fn(jnp.sin, x), i),
        lambda: lax.map(lambda ai: counted(*ai), (blocks.map_fn(jnp.sin, x), i)),
    )  # fmt: skip
    return bounded(_choose(works, j))


@step("p1 p0 g1", "p1", variants=7)
def nested(x, y, g, j):
    """A program with a partition of its own in each group."""
    m = 2 + j % 2

    @blocks.program(parts=m)
    def inner(a, b, outer):
        def one(a, i):
            own = blocks.partition_index()
            return jnp.sin(a * (1 + own)) * bounded(g) + 0.1 * outer + i * b

        slices = blocks.map_fn(one, (blocks.broadcast(a), blocks.partition_index()))

        def two_rounds():
            mean = blocks.reduce_mean(slices)
            spread = blocks.map_fn(lambda s: jnp.sin(s - mean) * bounded(g), slices)
            return blocks.reduce_weighted_mean(spread, 1.0 + blocks.partition_index())

        works = (
            lambda: blocks.reduce_mean(slices),
            lambda: blocks.reduce_sum(slices, where=blocks.partition_index() > 0),
            lambda: blocks.reduce_max(_apart(slices)),
            lambda: blocks.select(slices, 1) + blocks.gather(slices)[0],
            lambda: lax.scan(
                lambda c, t: (blocks.reduce_mean(slices * t) + 0.5 * c, None),
                a, jnp.linspace(0.5, 1.0, 3)
            )[0],
            two_rounds,
            lambda: blocks.reduce_sum(blocks.shift(bounded(slices), 1)) * a,
        )  # fmt: skip
        return _choose(works, j // 2)

    return bounded(blocks.map_fn(inner, (x, y, blocks.partition_index())))


@step("p1 g1", "g1", variants=3)
def custom(x, g, j):
    """A derivative of one's own, around blocks."""
    clients = blocks.program(clients=len(x))

    def value(x, g):
        slices = blocks.map_fn(lambda a, b: jnp.sin(a * b), (x, blocks.broadcast(g)))
        return blocks.reduce_mean(slices) + (
            0 if j % 3 else blocks.reduce_max(_apart(slices))
        )

    def forward(x, g):
        return jax.vjp(value, x, g)

    def backward(pull_back, ct):
        x, g = pull_back(ct)
        return 0.5 * x, blocks.reduce_sum(blocks.broadcast(g)) if j % 2 else g

    fn = jax.custom_vjp(value)
    fn.defvjp(clients(forward), clients(backward))
    return bounded(fn(x, g))


@step("p0", "p0", variants=2)
def effect(x, j):
    """At the top of a program only: there, each group does it once."""

    def work(a):
        if j % 2:
            blocks.record_in_order(blocks.partition_index())
        else:
            blocks.record(blocks.partition_index(), a)
        return jnp.sin(a)

    return blocks.map_fn(work, x)


@step("p1 g1", "p1")
def kernel(x, g, j):
    """Work without a batching rule, where each group is alone: see `runs_alone`."""
    sin = jnp.sin if blocks.plain else kernel_of_group
    return blocks.map_fn(
        lambda x, g: sin(x) * g * (1 + blocks.partition_index() % 2),
        (x, blocks.broadcast(g)),
    )


@jax.custom_batching.custom_vmap
def _without_vmap(x):
    return jnp.sin(x)


@_without_vmap.def_vmap
def _(*_):
    raise NotImplementedError("the kernel has no batching rule")


@jax.custom_jvp
def kernel_of_group(x):
    return _without_vmap(x)


kernel_of_group.defjvp(
    lambda p, t: (kernel_of_group(p[0]), kernel_of_group(p[0] + np.pi / 2) * t[0])
)


@step("p1", "p1", variants=6)
def moved(x, j):
    n = blocks.partition_size()
    index, draw = (3 * jnp.arange(n) + j) // 2 % n, np.random.RandomState(j)
    works = (
        lambda: blocks.take(x, index),
        lambda: bounded(blocks.put(x, index, add=True)),
        lambda: blocks.shift(x, 1),
        lambda: blocks.take(x, [*range(n)][::-1]),
        lambda: blocks.take(x, draw.permutation(n)),
        lambda: bounded(blocks.put(x, draw.randint(0, n, n), add=True)),
    )
    return works[j % len(works)]()


@step("p1 gi", "p1", variants=6)
def moved_anywhere(x, i, j):
    """Indices that are computed, of any small dtype, some of them out of bounds."""
    n = blocks.partition_size()
    index = (5 * jnp.arange(n) + i + j) % (2 * n + 5) - (n + 2)
    index = index.astype(("int32", "int8", "int16")[j % 3])
    alone = index.at[:].set(n + i.astype(index.dtype) % 3)  # none is written
    works = (
        lambda: blocks.take(x, index),
        lambda: bounded(blocks.put(x, index, add=True)),
        lambda: bounded(blocks.put(x, index, into=jnp.sin(x), add=True)),
        lambda: blocks.put(x, alone, into=jnp.cos(x)),
        lambda: x + blocks.put(x, alone, add=True),
        lambda: blocks.take(x, np.arange(n).astype("uint8") // 2),
    )
    return works[j % len(works)]()


@step("p1 pi gi g1", "g1", variants=4)
def out_of_bounds(x, i, g, h, j):
    """Segments and groups that do not exist, and which are computed."""
    n, by = len(x), i % 6 - 2
    works = (
        lambda: blocks.sum_by(x, by, 2)[j % 2],
        lambda: blocks.mean_by(x, by, 3).sum(0) + h,
        lambda: blocks.select(x, g - 5),
        lambda: blocks.select(x, n + g) * h,
    )
    return bounded(_choose(works, j))


@step("p1 gn", "p1", variants=5)
def cohort(x, population, j):
    """Slices that move between the groups and a population of twice as many."""
    n, population = len(x), jnp.concatenate([population, 0.5 * population])
    index, twice = (jnp.arange(n) + j) % (2 * n), jnp.arange(2 * n)
    some = jnp.where(index % 3 == 0, index + 2 * n, index)  # the others are no client
    works = (
        lambda: blocks.take(population, index),
        lambda: blocks.take(blocks.put(x, index, into=population), index // 2),
        lambda: bounded(blocks.put(blocks.take(x, twice // 2), twice % n, add=True)),
        lambda: blocks.take(blocks.put(x, some, into=population, add=True), some - 1),
        lambda: bounded(blocks.put(blocks.take(x, twice - n), twice - 1, add=True)),
    )
    return works[j % len(works)]()


@step("gn g1", "g1")
def side_by_side(x, g, j):
    """A program over another partition, side by side with the random one."""

    @blocks.program(others=len(x) + 1)
    def other(x, g):
        # The gradient of a concatenation would be server work on slices.
        x = blocks.take(x, [*range(len(x)), 0])
        y = blocks.map_fn(lambda a, g: jnp.sin(a * g), (x, blocks.broadcast(g)))
        return blocks.reduce_mean(y)

    return other(x, g)


NEW = [name for name in STEPS if STEPS[name].fn.__module__ == __name__]
