"""What the blocks mean, in plain `jax.numpy`: an oracle that shares no code with drjax.

`blocks` is drjax, and within `plainly()` these functions: one program text has both
meanings.
"""

import contextlib
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import io_callback
from jax.sharding import AxisType

import drjax
from drjax._context import resolve_partition
from drjax._primitives.in_two_legs import complete, received_after
from drjax._sharding.layout import Placement, find_mesh
from drjax.plan import Wire

# Programs and mapped functions that are being traced, the innermost last: the names and
# sizes of partitions, and the index of the group in a mapped function.
_scopes: list[tuple[str, int, Any]] = []


@contextlib.contextmanager
def _in_scope(name: str, size: int, index=None):
    _scopes.append((name, size, index))
    try:
        yield
    finally:
        _scopes.pop()


def program(**partition):
    [(name, size)] = partition.items()

    def decorate(fn):
        @functools.wraps(fn)
        def call(*args):
            with _in_scope(name, size):
                return fn(*args)

        return call

    return decorate


def partition_size():
    return _scopes[-1][1]


def partition_index(partition=None):
    [expected] = [_scopes[-1][0]] if partition is None else partition
    _, size, index = [scope for scope in _scopes if scope[0] == expected][-1]
    return jnp.arange(size, dtype=jnp.int32) if index is None else index


def map_fn(fn, arg):
    name, size, _ = _scopes[-1]

    def one(index, *args):
        with _in_scope(name, size, index):
            return jax.tree.map(jnp.asarray, fn(*args))

    args = arg if type(arg) is tuple else (arg,)
    return jax.vmap(one)(jnp.arange(size, dtype=jnp.int32), *args)


def broadcast(x):
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * partition_size()), x)


def _each(fn):
    return lambda x, *args, **kwargs: jax.tree.map(
        lambda leaf: fn(leaf, *args, **kwargs), x
    )


def _columns(w, x):
    return w.reshape(w.shape + (1,) * (x.ndim - w.ndim))


def _sum(x, where=None):
    where = None if where is None else _columns(where, x)
    return jnp.sum(x, axis=0, where=where)


def _mean(x, where=None):
    where = None if where is None else _columns(where, x)
    return jnp.mean(x, axis=0, where=where)


def _by(reduce, empty):
    def of_segments(x, by, num):
        hit = [_columns(by == k, x) for k in range(num)]
        return jnp.stack([reduce(jnp.where(h, x, empty), axis=0) for h in hit])

    return of_segments


def _columns_of(x, fn, sum=False):
    flat = jax.vmap(fn, 1)(x.reshape(x.shape[0], -1))
    return flat.sum(0) if sum else flat.reshape(*x.shape[1:], *flat.shape[1:])


def _fold(combine, x, init):
    for i in range(partition_size()):
        init = combine(init, jax.tree.map(lambda x, i=i: x[i], x))
    return init


def _max(x, where=None, default: Any = None):
    if where is None:
        return jnp.max(x, axis=0)
    largest = jnp.max(jnp.where(_columns(where, x), x, -jnp.inf), axis=0)
    return jnp.where(jnp.any(where), largest, default)


def _weighted_mean(x, w):
    return jnp.sum(x * _columns(w, x), axis=0) / jnp.sum(w)


def _mean_by(x, by, num):
    means = []
    for k in range(num):
        count = jnp.sum(by == k)
        total = jnp.sum(jnp.where(_columns(by == k, x), x, 0), axis=0)
        means.append(jnp.where(count > 0, total / jnp.maximum(count, 1), 0.5))
    return jnp.stack(means)


def _of_finite(fn, x, g, how):
    """A reduction of fn(x_i, g) over the groups for which it is finite."""
    each = jax.vmap(fn, (0, None))
    ok = jnp.isfinite(each(x, g)).all(1)
    # At another argument, as NaN times the zeros of a mask's derivative is NaN.
    y = each(jnp.where(ok[:, None], x, 0.9), g)
    match how:
        case "mean":
            count = jnp.sum(ok)
            total = jnp.sum(jnp.where(ok[:, None], y, 0), axis=0)
            return jnp.where(count > 0, total / jnp.maximum(count, 1), 0.5)
        case "max":
            return _max(y, ok, 0.5)
        case _:
            y = jnp.where(ok[:, None], y, -50)
            return _fold(jnp.logaddexp, y, jnp.full_like(g, -50))


def _drjax_of_finite(fn, x, g, how):
    y = drjax.map_fn(fn, (x, drjax.broadcast(g)))
    ok = drjax.map_fn(lambda y: jnp.isfinite(y).all(), y)
    match how:
        case "mean":
            return drjax.reduce_mean(y, where=ok, default=0.5)
        case "max":
            return drjax.reduce_max(y, where=ok, default=0.5)
        case _:
            return drjax.reduce(jnp.logaddexp, y, jnp.full_like(g, -50), where=ok)


def _two_levels(x, g):
    y = x + jnp.sin(x * g)
    near = y.mean(1)
    z = jnp.cos(y - near[:, None])
    return z.sum((0, 1)), near.max(0), (near[0] * z[1, -1])


def _drjax_levels(x, g):
    pods, n = x.shape[:2]

    @drjax.program(pods=pods, peers=n)
    def program(x, g):
        y = drjax.map_fn(lambda x, g: x + jnp.sin(x * g), (x, drjax.broadcast(g)))
        near = drjax.reduce_mean(y, over="peers")
        back = drjax.broadcast(near, over="peers")
        z = drjax.map_fn(lambda y, m: jnp.cos(y - m), (y, back))
        last = drjax.select(drjax.select(z, -1, over="peers"), 1, over="pods")
        first = drjax.select(near, 0, over="pods")
        return drjax.reduce_sum(z), drjax.reduce_max(near, over="pods"), first * last

    return program(x, g)


def _drjax_in_two_legs(x, wire):
    """An encoded sum, and what groups compute while its two collectives run."""
    partition, mesh = resolve_partition("reduce_sum", None, None)
    on: Placement = {"partition": partition, "mesh": mesh or find_mesh(partition)}
    total = drjax.reduce_sum(x, wire=wire, result="sharded")
    work = drjax.map_fn(jnp.sin, x)
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return total, drjax.map_fn(jnp.cos, work)  # there, it is one exchange
    (total,) = received_after([total], work, on, sharded=True)
    if total.dtype == jnp.float32:
        total = complete(total, Wire(wire), partition)
    work = drjax.map_fn(jnp.cos, work)
    return received_after([total], work, on)[0], work


def _put(x, index, into=None, add=False):
    if into is None:
        into = jnp.zeros((partition_size(), *x.shape[1:]), x.dtype)
    into, slices = into.at[jnp.asarray(index)], x  # negative ones count from the end
    return into.add(slices, mode="drop") if add else into.set(slices, mode="drop")


def _select(x, i):
    return jnp.take(x, _from_end(i, len(x)), axis=0, mode="clip")


def _take(x, index):
    return jnp.take(x, _from_end(jnp.asarray(index), len(x)), axis=0, mode="clip")


def _from_end(index, n):
    return jnp.where(index < 0, index + n, index)


PLAIN = types.SimpleNamespace(
    take=_each(_take),
    put=_each(_put),
    shift=_each(lambda x, k: jnp.roll(x, k, axis=0)),
    program=program,
    partition_size=partition_size,
    partition_index=partition_index,
    map_fn=map_fn,
    broadcast=broadcast,
    gather=lambda x: x,
    scatter=lambda x: x,
    reduce_columns=lambda fn, x, **options: _columns_of(x, fn, **options),
    reduce=_fold,
    sum_by=_by(jnp.sum, 0),
    max_by=_by(jnp.max, -9),
    reduce_argmax=_each(lambda x: jnp.argmax(x, axis=0)),
    sharded_sum=_each(_sum),
    sharded_gather=lambda x: x,
    reduce_sum=_each(_sum),
    reduce_mean=_each(_mean),
    reduce_max=_each(_max),
    reduce_min=_each(lambda x: jnp.min(x, axis=0)),
    reduce_weighted_mean=_each(_weighted_mean),
    encoded_sum=lambda x, **_: _sum(x),
    encoded_mean=lambda x, **_: _mean(x),
    encoded_weighted_mean=lambda x, w, **_: _weighted_mean(x, w),
    in_two_legs=lambda x, wire: (_sum(x), jnp.cos(jnp.sin(x))),
    secure_sum=_each(_sum),
    mean_by=_mean_by,
    of_finite=_of_finite,
    two_levels=_two_levels,
    select=_each(_select),
    jit=lambda fn, **options: jax.jit(fn),
)


# Blocks with options whose plain meaning has another form.
OPTIONS = {
    "sum_by": lambda x, by, num: drjax.reduce_sum(x, by=by, num=num),
    "max_by": lambda x, by, num: drjax.reduce_max(x, by=by, num=num, default=-9.0),
    "mean_by": lambda x, by, num: drjax.reduce_mean(x, by=by, num=num, default=0.5),
    "secure_sum": lambda x: drjax.reduce_sum(x, secure=True),
    "encoded_sum": drjax.reduce_sum,
    "encoded_mean": drjax.reduce_mean,
    "encoded_weighted_mean": drjax.reduce_weighted_mean,
    "in_two_legs": _drjax_in_two_legs,
    "of_finite": _drjax_of_finite,
    "two_levels": _drjax_levels,
    "sharded_sum": lambda x: drjax.reduce_sum(x, result="sharded"),
    "sharded_gather": lambda x: drjax.gather(x, result="sharded"),
}


class _Blocks:
    """drjax or its plain meaning."""

    plain = False
    calls: list = []  # of host callbacks: group indices

    def __getattr__(self, name: str) -> Any:
        if self.plain:
            return getattr(PLAIN, name)
        return OPTIONS[name] if name in OPTIONS else getattr(drjax, name)

    def record(self, index, *args) -> None:
        """An effect, of which the plain meaning keeps nothing."""
        if not self.plain:
            jax.debug.callback(lambda i, *_: self.calls.append(int(i)), index, *args)

    def record_in_order(self, index) -> None:
        """The same, by an ordered effect, which has no derivative."""
        call = lambda i: self.calls.append(int(i))
        if not self.plain:
            io_callback(call, None, index, ordered=True)


blocks = _Blocks()


@contextlib.contextmanager
def plainly():
    blocks.plain = True
    try:
        yield
    finally:
        blocks.plain = False
