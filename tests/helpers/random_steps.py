"""The steps of random programs: see `random_programs.py`.

A recipe is a list of steps `(name, i, j, body)`. Each step takes values of the kinds
that it needs out of an environment, chosen by the numbers i and j, and puts its result
back. So every recipe is a valid program. The environment has global values ("g0" a
scalar, "g1" `[f]`, "gn" `[n, f]`) and partitioned ones ("p0" `[n]`, "p1" `[n, f]`).
All work is bounded and smooth, and extrema are taken where there are no ties, but for
folds and for groups that are left out.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from drjax.plan import Wire
from tests.helpers.plain_blocks import blocks

GLOBAL, SLICES = ("g0", "g1", "gn"), ("p0", "p1")


class Env:
    """The values that a program has so far, by kind."""

    def __init__(self, values: dict[str, list]):
        self.values = {
            kind: list(values_of_kind) for kind, values_of_kind in values.items()
        }

    def pick(self, kind: str, i: int):
        return self.values[kind][i % len(self.values[kind])]

    def add(self, kind: str, value) -> None:
        self.values[kind].append(value)


def bounded(x):
    return x / jnp.sqrt(1 + x * x)


# -------------------------------------------------------------------------------------
# Steps


class Step(NamedTuple):
    """Work on values of these kinds.

    Attributes:
      kinds: The kinds of its operands.
      result: The kind of its result.
      fn: From the operands and a number to the result.
      variants: How many different works the number chooses from.
    """

    kinds: tuple[str, ...]
    result: str
    fn: Callable
    variants: int = 1


STEPS: dict[str, Step] = {}


def step(kinds: str, result: str, variants: int = 1):
    def register(fn):
        STEPS[fn.__name__] = Step(tuple(kinds.split()), result, fn, variants)
        return fn

    return register


def _add_table(prefix: str, kinds: str, result: str, fns: dict[str, Callable]) -> None:
    for name, fn in fns.items():
        function = lambda *args, fn=fn: fn(*args[:-1])
        STEPS[f"{prefix}_{name}"] = Step(tuple(kinds.split()), result, function)


# Not float64: where x64 is switched after a use, JAX goes on with the constant of the
# other dtype, also in `jax.jit(lambda x: x * jnp.asarray(TABLE).sum())`.
# Its sum is exact.
TABLE = np.array([0.25, 0.3125, 0.375], np.float32)
scale = lambda: jnp.asarray(TABLE).sum()  # an array that derivative rules close over


@jax.custom_vjp
def scaled_sin(x):
    return jnp.sin(x) * scale()


scaled_sin.defvjp(
    lambda x: (jnp.sin(x) * scale(), x), lambda x, ct: (ct * jnp.cos(x) * scale(),)
)


@jax.custom_jvp
def scaled_cos(x):
    return jnp.cos(x) * scale()


scaled_cos.defjvp(
    lambda p, t: (jnp.cos(p[0]) * scale(), -jnp.sin(p[0]) * scale() * t[0])
)

UNARY = {
    "customvjp": scaled_sin,
    "customjvp": scaled_cos,
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "exp": lambda x: jnp.exp(bounded(x)),
    "logistic": jax.nn.sigmoid,
    "log1p": lambda x: jnp.log1p(x * x),
    "cube": lambda x: bounded(x) ** 3,
    "sqrt": lambda x: jnp.sqrt(1 + jnp.square(x)),
    "power": lambda x: (2 + jnp.cos(x)) ** 1.5,
    "erf": jax.scipy.special.erf,
    "checkpoint": lambda x: jax.checkpoint(lambda y: jnp.sin(jnp.cos(y)))(x),
    "jit": lambda x: jax.jit(lambda y: 1 - jnp.cos(y))(x),
    "softplus": jax.nn.softplus,
    "stopped": lambda x: x * lax.stop_gradient(jnp.cos(x)),
    "cast": lambda x: bounded(x) * x.astype(jnp.float32).astype(x.dtype),
    "clamped": lambda x: jnp.clip(x, -0.7654, 0.8765),
    "relu": lambda x: jnp.where(x > 0.1234, x, 0.1 * jnp.sin(x)),
}
BINARY = {
    "add": lambda a, b: bounded(a + b),
    "mul": lambda a, b: a * bounded(b),
    "sub": lambda a, b: bounded(a - b),
    "div": lambda a, b: a / (2 + jnp.cos(b)),
    "atan2": lambda a, b: jnp.arctan2(a, 2 + jnp.sin(b)),
    "where": lambda a, b: jnp.where(jnp.sin(a) > 0.0321, a, jnp.tanh(b)),
    "maximum": lambda a, b: jnp.maximum(jnp.sin(a) + 0.3217, jnp.sin(2 * b)),
}
for kind in (*SLICES, "g0", "g1", "gn"):
    _add_table(f"unary_{kind}", kind, kind, UNARY)
    _add_table(f"binary_{kind}", f"{kind} {kind}", kind, BINARY)

# Global operands that JAX itself broadcasts; the derivative sums over the groups.


def _with_global(spread: Callable) -> dict[str, Callable]:
    return {name: lambda a, b, f=f: f(a, spread(b)) for name, f in BINARY.items()}


_add_table("scalar1", "p1 g0", "p1", BINARY)
_add_table("scalar0", "p0 g0", "p0", BINARY)
_add_table("by_global", "p1 g1", "p1", _with_global(lambda b: b[None]))
_add_table("global_slices", "gn p1", "p1", BINARY)  # an implicit scatter
_add_table("by_slice", "p1 p0", "p1", {k: lambda a, b, f=f: f(a, b[:, None])
                                    for k, f in BINARY.items()})  # fmt: skip
_add_table("globals", "g1 g0", "g1", BINARY)


def _squares(x):
    """A positive definite matrix for each slice."""
    return jnp.einsum("ni,nj->nij", x, x) + 2 * jnp.eye(x.shape[1])[None]


@step("p1", "p1", variants=40)
def along_features(x, j):
    """Work along the features: nothing here touches the axis of the groups."""
    f = x.shape[1]
    works = (
        lambda: x[:, ::-1],
        lambda: bounded(jnp.cumsum(x, axis=1)),
        lambda: x * bounded(jnp.cumprod(lax.stop_gradient(x), axis=1)),
        lambda: x * lax.cumlogsumexp(lax.stop_gradient(x), axis=1),
        lambda: x * lax.cummax(lax.stop_gradient(x), axis=1),
        lambda: x * lax.cummin(lax.stop_gradient(x), axis=1, reverse=True),
        lambda: jnp.sin(x.T).T,
        lambda: jnp.cos(x.reshape(-1, f, 1))[..., 0],
        lambda: jnp.pad(x, ((0, 0), (1, 2)), constant_values=0.5)[:, 1 : f + 1],
        lambda: jnp.concatenate([x[:, 1:], jnp.sin(x[:, :1])], axis=1),
        lambda: jnp.roll(x, 1, axis=1),
        lambda: jnp.concatenate(jnp.split(x, [1], axis=1)[::-1], axis=1),
        lambda: jnp.tile(x, (1, 2))[:, 1 : f + 1],
        lambda: bounded(x - x.mean(axis=1, keepdims=True)),
        lambda: jax.nn.softmax(x, axis=1),
        lambda: jnp.sort(x, axis=1),
        lambda: x[:, np.array([*range(1, f), 0])],
        lambda: lax.dynamic_slice_in_dim(jnp.tile(x, (1, 2)), 1, f, axis=1),
        lambda: lax.dynamic_update_slice_in_dim(x, jnp.sin(x[:, :1]), 1, axis=1),
        lambda: x.at[:, 1].set(0.25),
        lambda: x.at[:, 0].multiply(0.5),
        lambda: jnp.stack([x, jnp.sin(x)], axis=1).sum(1),
        lambda: jnp.moveaxis(jnp.stack([x, x * x]), 1, 0)[:, 0],
        lambda: x.reshape(-1, 1, f).repeat(2, axis=1).mean(1),
        lambda: x.at[:, 1].add(jnp.sin(x[:, 0])),
        lambda: jnp.sin(x).at[:, 0].max(0.2345 + x[:, 1]),
        lambda: jnp.sin(x).at[:, 0].min(0.2345 + x[:, 1]),
        lambda: x.at[:, 0].subtract(jnp.cos(x[:, 1])),
        lambda: (
            lax.bitcast_convert_type(jnp.round(8 * x), f"int{8 * x.dtype.itemsize}")
            % 3
            * x
        ),
        lambda: x * lax.stop_gradient(jnp.linalg.cholesky(_squares(x))[:, 0]),
        lambda: x * lax.stop_gradient(lax.linalg.svd(_squares(x))[1]),
        lambda: x * lax.stop_gradient(lax.linalg.eigh(_squares(x))[1]),
        lambda: x * lax.stop_gradient(lax.linalg.lu(_squares(x))[0][:, 0]),
        lambda: x * lax.stop_gradient(jnp.linalg.inv(_squares(x))[:, 0]),
        lambda: lax.top_k(x + jnp.arange(f)[None] * 0.0137, 2)[0][:, :1] * jnp.cos(x),
        lambda: lax.conv(x[:, None], jnp.full((1, 1, 2), 0.5), (1,), "SAME")[:, 0],
        lambda: jnp.fft.rfft(lax.stop_gradient(x), axis=1).real[:, :1] * jnp.cos(x),
        lambda: _pooled(lax.add, 0.0, x),
        lambda: (
            x[jnp.arange(len(x)), (1 + jnp.arange(len(x))) % 2][:, None] * jnp.cos(x)
        ),
        lambda: x * lax.stop_gradient(abs(jnp.linalg.qr(_squares(x))[1]).sum(1)),
    )
    return works[j % len(works)]()


@step("p1 g1", "p1", variants=5)
def times_matrix(x, g, j):
    matrix = jnp.outer(jnp.sin(g), jnp.cos(g))
    works = (
        lambda: x @ matrix,
        lambda: (matrix @ x.T).T,
        lambda: jnp.einsum("ni,ij,nj->nj", x, matrix, jnp.cos(x)),
        lambda: jnp.einsum("ni,nj,j->ni", x, jnp.sin(x), g),
        lambda: bounded(jnp.einsum("in,ij->jn", x.T, matrix).T),
    )
    return bounded(works[j % len(works)]())


def _keys(x):
    """A random key for each slice, from its sign."""
    data = jnp.uint32(x[:, :1] > 0) * jnp.ones(2, jnp.uint32)
    wrapped = jax.random.wrap_key_data(data)
    return jax.random.wrap_key_data(jax.random.key_data(wrapped))


def _computed_once(x):
    """XLA may compute a sum twice, and round it in two ways: no maximum is found."""
    return lax.optimization_barrier(x)


@step("p1 g1", "p0", variants=19)
def over_features(x, g, j):
    works = (
        lambda: x @ bounded(g),
        lambda: x.sum(1),
        lambda: x.mean(axis=1),
        lambda: _computed_once(x + jnp.arange(x.shape[1])[None] * 0.0137).max(1),
        lambda: x[:, 0] * jnp.prod(lax.stop_gradient(x), axis=1),
        lambda: x[:, 1],
        lambda: jax.nn.logsumexp(x, axis=1),
        lambda: jnp.argmax(x + jnp.arange(x.shape[1])[None] * 0.0137, axis=1) * 0.1,
        lambda: jnp.any(x > 0.4321, axis=1) * x[:, 0],
        lambda: jnp.einsum("ni,ni->n", x, jnp.sin(x)),
        lambda: jnp.linalg.norm(x + 0.1, axis=1),
        lambda: x[:, -1:].squeeze(1),
        lambda: lax.dynamic_index_in_dim(x, 1, axis=1, keepdims=False),
        lambda: x.var(1),
        lambda: jnp.argmin(x - jnp.arange(x.shape[1])[None] * 0.0137, axis=1) * 0.1,
        lambda: _computed_once(x - jnp.arange(x.shape[1])[None] * 0.0137).min(1),
        lambda: jnp.all(x > -0.4321, axis=1) * x[:, 0],
        lambda: lax.reduce_xor(jnp.int32(100 * x), (1,)) % 7 * 0.1,
        lambda: jax.vmap(jax.random.uniform)(_keys(x)),
    )
    return bounded(works[j % len(works)]())


def _pooled(combine, start, x):
    """Over windows of two features, the first with itself."""
    padded = jnp.concatenate([x[:, :1], x], axis=1)
    ones = (1,) * x.ndim
    return bounded(lax.reduce_window(padded, start, combine, (1, 2), ones, "VALID"))


@step("p1 g1", "p1", variants=6)
def windows(x, g, j):
    """Pooling and convolutions, with derivatives in their kernel."""
    x = _apart_features(x)
    works = (
        lambda: _pooled(lax.max, -jnp.inf, x),
        lambda: -_pooled(lax.min, jnp.inf, x),
        lambda: jax.jvp(lambda x: _pooled(lax.max, -jnp.inf, x), (x,), (jnp.sin(x),))[
            1
        ],
        lambda: lax.conv(x[:, None], jnp.sin(g)[None, None, :2], (1,), "SAME")[:, 0],
        lambda: lax.conv(x[:, :, None], jnp.outer(g, g)[..., None], (1,), "SAME")[
            ..., 0
        ],
        lambda: lax.map(lambda slice_: jnp.sin(slice_ * g), x),
    )
    return bounded(works[j % len(works)]())


def _apart_features(x):
    """Bounded slices, partitioned, without ties between neighbors."""
    apart = jnp.sqrt(2.0 + jnp.arange(x.shape[1]))
    return blocks.map_fn(lambda slice_: bounded(slice_) + 0.37 * apart, x)


@step("p1 g1", "g1", variants=11)
def written(x, g, j):
    """Reductions over the groups that are written as such of any array."""
    x, n = _apart(blocks.map_fn(jnp.cos, x)), len(x)
    some = jnp.array([1, 7])[: max(n - 1, 1)]  # more would be a shuffle, as is x[1:]
    works = (
        lambda: x.sum(0),
        lambda: g * jnp.mean(x),
        lambda: x.max(0),
        lambda: g * x.min(),
        lambda: g @ (x.T @ jnp.sin(x)),
        lambda: jnp.any(x > 0.4321, axis=0) * g,
        lambda: jnp.all(x > 0.4321, axis=0) * g,
        lambda: jax.nn.logsumexp(x, axis=0),
        lambda: jnp.take(x, some, 0, mode="fill", fill_value=0.5).sum(0),
        lambda: x[: max(n // 2, 1)].sum(0) * g,
        lambda: lax.scan(lambda c, slice_: (c + slice_ * g, None), g, x)[0],
    )
    return bounded(works[j % len(works)]())


@step("p1 g0 g1", "p1", variants=3)
def changed(x, g, h, j):
    """Some of the groups get other values."""
    x, n = blocks.map_fn(jnp.cos, x), len(x)
    works = (
        lambda: x.at[1 % n].set(h),
        lambda: x.at[jnp.int32(n * g)].add(h * g),
        lambda: lax.dynamic_update_slice_in_dim(x, jnp.stack([h, h])[:n], 1, 0),
    )
    return works[j % len(works)]()


@step("p1 g0 g1", "g1", variants=11)
def combined(x, g, h, j):
    """Other ways to combine groups than their plain sum."""
    x, n = blocks.map_fn(jnp.sin, x), len(x)
    ids = blocks.map_fn(lambda x: (8 * x[0]).astype(jnp.int32) % 3, x)
    works = (
        lambda: blocks.reduce_columns(lambda c: jnp.sort(c)[n // 2] * g, x),
        lambda: (
            blocks.reduce_columns(lambda c: jnp.outer(c, c), x, sum=True)[0, -1] * h
        ),
        lambda: blocks.reduce_columns(lambda c: jnp.tanh(c).prod(), x) + h,
        lambda: blocks.sum_by(x, ids, 3)[1],
        lambda: blocks.max_by(x, ids, 2).sum(0) * g,
        lambda: h * blocks.reduce_argmax(x)[0].astype(x.dtype),
        lambda: blocks.sharded_sum(x) * h,
        lambda: blocks.reduce_mean(blocks.scatter(h * blocks.sharded_gather(x))),
        lambda: blocks.reduce_max(_apart(x), where=ids > 0, default=0.5) * g,
        lambda: blocks.mean_by(x, ids, 2).sum(0) + h,
        lambda: blocks.secure_sum(x) * g if n > 1 else h,
    )
    return bounded(works[j % len(works)]())


@step("p1 g0 g1", "g1", variants=10)
def folded(x, g, h, j):
    """Associative folds; the second and sixth one are not commutative.

    Of the others, two have ties at which the derivative is that of any one order, and
    the first state of two is not neutral. The states of the last ones are too large to
    be gathered: devices exchange their columns, or swap them.
    """

    def composed(a, b):  # affine maps
        return {"m": a["m"] @ b["m"], "v": a["m"] @ b["v"] + a["v"]}

    def first(a, b):
        keep = a["key"] >= b["key"]
        return jax.tree.map(lambda x, y: jnp.where(keep, x, y), a, b)

    def affine(scale=1.0, v=None):
        eye = jnp.eye(len(h), dtype=x.dtype)
        maps = blocks.map_fn(
            lambda x: {"m": eye + 0.2 * jnp.outer(x, h), "v": x * g}, bounded(x)
        )
        v = jnp.zeros_like(h) if v is None else v
        return blocks.reduce(composed, maps, {"m": scale * eye, "v": v})["v"]

    def wide(x):
        return jnp.tile(bounded(x), 40)

    def wide_affine():
        eye = jnp.eye(len(h), dtype=x.dtype)
        maps = blocks.map_fn(
            lambda x: {
                "m": eye + 0.2 * jnp.outer(bounded(x), h),
                "v": wide(x).reshape(40, -1).T * g,
            },
            x,
        )
        zeros = jnp.zeros((len(h), 40), x.dtype)
        return blocks.reduce(composed, maps, {"m": eye, "v": zeros})["v"][:, 0]

    tied = lax.stop_gradient(jnp.round(2 * bounded(x)))
    none = {"key": jnp.full_like(g, -50), "v": jnp.zeros_like(h)}
    y, k = blocks.map_fn(bounded, x), 0.5 * bounded(h)
    pairs = {"key": tied[:, 0], "v": blocks.map_fn(wide, x)}
    works = (
        lambda: blocks.reduce(lambda a, b: a + b + k * a * b, y, jnp.zeros_like(h)),
        affine,
        lambda: blocks.reduce(jnp.logaddexp, y, jnp.full_like(h, -50)) * g,
        # The slices that tie have one tangent, so that parts of it add up to it.
        lambda: blocks.reduce(jnp.maximum, tied + h * g, jnp.full_like(h, -50)),
        lambda: blocks.reduce(first, {"key": tied[:, 0], "v": y}, none)["v"] * g,
        lambda: affine(0.7, bounded(h)),
        lambda: blocks.reduce(jnp.logaddexp, y, bounded(h) * g),
        lambda: blocks.reduce(jnp.logaddexp, pairs["v"], wide(h) * g)[: len(h)],
        lambda: blocks.reduce(first, pairs, none | {"v": wide(h)})["v"][: len(h)],
        wide_affine,
    )
    return bounded(works[j % len(works)]())


@step("p1 g0 g1", "g1", variants=5)
def diverged(x, g, h, j):
    """Groups that are left out, as their work has infinities or NaNs."""

    def root(x, h):
        return jnp.sqrt(jnp.where(x[0] > 0.0321, 1.5 + bounded(x), -1.0) * (1 + h * h))

    def log(x, h):
        return jnp.log(jnp.where(x[0] > 0.0321, 1.5 + bounded(x), 0.0) * (1 + h * h))

    def ratio(x, h):
        return h / jnp.where(x[0] > 0.0321, 1.5 + bounded(x), 0.0)

    works = (
        (root, "mean"),
        (log, "mean"),
        (ratio, "mean"),
        (root, "max"),
        (log, "fold"),
    )
    fn, how = works[j % len(works)]
    return bounded(blocks.of_finite(fn, blocks.map_fn(jnp.sin, x), h, how) * g)


@step("p1 g0 g1", "g1", variants=9)
def encoded(x, g, h, j):
    """Sums in few bits, of small integers: rounding the sums gives their values."""

    def whole(x):
        return x + lax.stop_gradient(jnp.round(x) - x)

    def exchanged(wire):
        total, work = blocks.in_two_legs(x, wire)
        return total + blocks.reduce_sum(whole(work))

    x, n = whole(3 * bounded(x)), len(x)
    ones = blocks.map_fn(lambda x: jnp.ones((), x.dtype), x)
    works = (
        lambda: blocks.encoded_sum(x, wire="bfloat16"),
        lambda: blocks.encoded_sum(x, wire="int8"),
        lambda: blocks.encoded_sum(x, wire=("int8", 2)),
        lambda: blocks.encoded_sum(x, wire="int8", result="sharded"),
        lambda: n * blocks.encoded_mean(x, wire="int8"),
        lambda: n * blocks.encoded_weighted_mean(x, ones, wire="bfloat16"),
        lambda: exchanged("int8"),
        lambda: exchanged("bfloat16"),
        lambda: blocks.encoded_sum(x, wire=Wire("int8", collectives=1)),
    )
    return bounded(whole(works[j % len(works)]()) * g + h)


@step("gn g1", "g1", variants=3)
def levels(x, g, j):
    """A program of two levels, side by side with the random one."""
    return bounded(blocks.two_levels(jnp.stack([x, 1 + jnp.sin(x)]), g)[j % 3])


@step("p1 g0", "g1", variants=3)
def one_slice(x, g, j):
    n, x = (
        len(x),
        blocks.map_fn(jnp.cos, x),
    )  # which is partitioned, whoever else uses x
    works = (
        lambda: x[1 % n],
        lambda: x[-1] * g,
        lambda: lax.dynamic_index_in_dim(x, jnp.int32(n * g), 0, keepdims=False),
    )
    return works[j % len(works)]()


@step("gn g0", "g1", variants=4)
def square(x, g, j):
    """Arrays of n by n: more than one axis could be that of the groups."""
    f, x = x.shape[1], lax.stop_gradient(jnp.sin(x[:, :1] + jnp.cos(x[:, 1:2]).T))
    v = jnp.sin(x[:, 0] * g)
    works = (
        lambda: blocks.reduce_mean(x * x.T),
        lambda: blocks.reduce_mean(blocks.map_fn(jnp.square, x.T) + x),
        lambda: blocks.reduce_mean(blocks.map_fn(jnp.square, x) + v),
        lambda: blocks.reduce_sum(blocks.map_fn(jnp.square, x) * v[:, None] + v),
    )
    return jnp.tile(works[j % len(works)](), f)[:f]


@step("p0 g1", "p1", variants=5)
def outer(x, g, j):
    works = (
        lambda: x[:, None] * g[None],
        lambda: jnp.outer(x, g),
        lambda: jnp.stack([x] * g.shape[0], axis=1) * 0.5,
        lambda: jnp.broadcast_to(x[:, None], (len(x), len(g))),
        lambda: x[:, None] + jnp.arange(g.shape[0])[None] * 0.1,
    )
    return works[j % len(works)]()


# Building blocks


@step("g0", "p0")
def broadcast0(x, j):
    return blocks.broadcast(x)


@step("g1", "p1")
def broadcast1(x, j):
    return blocks.broadcast(x)


@step("gn", "p1")
def scatter(x, j):
    return blocks.scatter(x)


@step("p1", "gn")
def gather(x, j):
    return blocks.gather(x)


@step("p1 p1 g1", "p1", variants=9)
def mapped(x, y, g, j):
    def recurrent(a, b):
        return lax.scan(lambda c, t: (bounded(c + t * b), c.sum()), a, a)[0]

    def numbered(a, b):
        return a * jnp.cos(1.0 * blocks.partition_index()) + b

    def chosen(a, b):
        return lax.cond(a.sum() > 0.0123, jnp.sin, jnp.cos, a * b)

    def adapted(a, b):
        return b - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(w * a) ** 2))(b)

    works = (
        lambda a, b: jnp.sin(a * b),
        lambda a, b: a * bounded(g) - b,
        recurrent,
        numbered,
        chosen,
        adapted,
        jax.checkpoint(lambda a, b: jnp.tanh(a @ jnp.outer(b, g))),
        jax.jit(lambda a, b: jnp.sort(a) * b[::-1]),
        lambda a, b: scaled_sin(a * scaled_cos(b)),
    )
    return bounded(blocks.map_fn(works[j % len(works)], (x, y)))


def _cube_root(x):
    """The real y with y**3 + y = x, by Newton's method; its derivative is implicit."""
    newton = lambda f, y: lax.fori_loop(
        0, 25, lambda _, y: y - f(y) / (3 * jnp.square(y) + 1), y
    )
    solve = lambda tangent, y: y / tangent(jnp.ones_like(y))
    residual = lambda y: y**3 + y - x
    return lax.custom_root(residual, jnp.zeros_like(x), newton, solve)


@step("p1 g1", "p1", variants=4)
def mapped_types(x, g, j):
    """Functions of a group that JAX writes as equations that store types."""
    grid = np.arange(-2.03, 2.5, 0.5)
    works = (
        lambda x, g: x.at[jnp.nonzero(x > 0.0123, size=2, fill_value=0)[0]].set(g[0]),
        lambda x, g: x * g + jnp.searchsorted(grid.astype(x.dtype), x),
        lambda x, g: jnp.insert(x * g, 1, g[0])[1:],
        lambda x, g: _cube_root(x) * g,
    )
    return bounded(blocks.map_fn(works[j % len(works)], (x, blocks.broadcast(g))))


@step("p1 p0", "p0")
def mapped_mixed(x, y, j):
    return blocks.map_fn(lambda a, b: bounded(jnp.dot(a, a) * b), (x, y))


@step("p0", "p0")
def index(x, j):
    number = blocks.partition_index()
    return jnp.where(number % 2 == j % 2, x, 0.1 * number)


def _apart(x):
    """Bounded slices without ties between groups."""
    number = jnp.sqrt(2.0 + blocks.partition_index())
    return bounded(x) + 0.37 * number.reshape(-1, *(1,) * (x.ndim - 1))


def _reductions(slices: str, result: str) -> None:
    def where(x):
        return blocks.reduce_mean(x, where=blocks.partition_index() != 1)

    def select(x, w):
        known = 2 % len(x)
        if slices == "p0":
            return blocks.select(x, known)
        # A batch of two, which may be the same group.
        chosen = jnp.stack([known, blocks.reduce_argmax(_apart(w))])
        return jax.vmap(lambda i: blocks.select(x, i))(chosen).mean(0)

    works = {
        "sum": lambda x, w: bounded(blocks.reduce_sum(x)),
        "mean": lambda x, w: blocks.reduce_mean(x),
        "max": lambda x, w: blocks.reduce_max(_apart(x)) - 1,
        "min": lambda x, w: blocks.reduce_min(_apart(x)),
        "weighted": lambda x, w: blocks.reduce_weighted_mean(x, 1.2 + jnp.sin(w)),
        "select": select,
        "where": lambda x, w: where(x),
    }
    _add_table(f"reduce_{slices}", f"{slices} p0", result, works)


_reductions("p0", "g0")
_reductions("p1", "g1")


@step("gn g1", "g1", variants=7)
def over_slices(x, g, j):
    works = (
        lambda: x.mean(0),
        lambda: jnp.sort(x[:, 0]).sum() * g,
        lambda: jnp.cumsum(x, axis=0)[-1] * 0.25,
        lambda: (x.T @ x @ g) * 0.1,
        lambda: x[1 % len(x)] - x[-1],
        lambda: x.reshape(-1)[: len(g)],
        lambda: jnp.linalg.norm(x[:, 0]) * g,
    )
    return bounded(works[j % len(works)]())


@step("g1 g1", "g0")
def inner(a, b, j):
    return bounded(a @ b)


@step("g1", "gn")
def to_slices(g, j):
    return jnp.outer(jnp.arange(1.0, blocks.partition_size() + 1) * 0.3, g)
