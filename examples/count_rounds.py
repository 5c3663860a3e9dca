"""Count the rounds of communication of a program, and the bytes of each.

A small interpreter, written against the documentation of `drjax.primitives` only. It
visits the equations of a jaxpr once and assigns each variable a *round*: the number of
reductions on the longest path to it. Reductions of one round do not depend on each
other, so they can be communicated together (Rush et al. 2024, section 5).

Run it with `python -m examples.count_rounds`.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.extend import core

import drjax
from drjax import primitives

REDUCTIONS = (
    primitives.reduce_sum_p,
    primitives.reduce_mean_p,
    primitives.reduce_max_p,
    primitives.reduce_min_p,
    primitives.gather_p,
)


@dataclass
class Communication:
    """Bytes for each group, by round (from 1): `down` broadcast, `up` reduced."""

    down: Counter = field(default_factory=Counter)
    up: Counter = field(default_factory=Counter)

    @property
    def rounds(self) -> int:
        return max(self.up, default=0)


def _bytes(aval) -> int:
    return aval.size * aval.dtype.itemsize


def count(fn: Callable, *args) -> Communication:
    """Interpret the jaxpr of `fn(*args)`; inner jits are followed, loops refused."""
    counts = Communication()
    closed = jax.make_jaxpr(fn)(*args)
    _count(_live(closed.jaxpr), [0] * len(closed.in_avals), counts)
    return counts


def _live(jaxpr):
    """The equations whose results reach an output, and the outputs."""
    needed, eqns = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in eqn.outvars) or eqn.effects:
            eqns.append(eqn)
            needed |= set(map(id, eqn.invars))
    return jaxpr.invars, eqns[::-1], jaxpr.outvars


def _count(program, rounds_in, counts: Communication) -> list[int]:
    invars, eqns, outvars = program
    rounds = dict(zip(invars, rounds_in, strict=True))

    def read(v) -> int:
        return 0 if isinstance(v, core.Literal) else rounds.get(v, 0)

    for eqn in eqns:
        before = max(map(read, eqn.invars), default=0)
        after = before
        if eqn.primitive is primitives.broadcast_p:
            counts.down[before + 1] += sum(_bytes(v.aval) for v in eqn.invars)
        elif eqn.primitive in REDUCTIONS:
            after = before + 1
            n = eqn.params["partition"].size
            counts.up[after] += sum(_bytes(v.aval) // n for v in eqn.invars)
        elif eqn.primitive.name == "jit":
            inner = _live(eqn.params["jaxpr"].jaxpr)
            rounds_out = _count(inner, [read(v) for v in eqn.invars], counts)
            rounds.update(zip(eqn.outvars, rounds_out, strict=True))
            continue
        elif eqn.primitive.name in ("scan", "while", "cond"):
            raise NotImplementedError(f"rounds in {eqn.primitive.name} are not counted")
        rounds.update(dict.fromkeys(eqn.outvars, after))
    return [read(v) for v in outvars]


@drjax.program(clients=100)
def variance(model: jax.Array, data: jax.Array) -> jax.Array:
    """Variance of the groups' losses: the second round needs the first one's mean."""

    def loss(model, x):
        return jnp.mean((x @ model) ** 2)

    losses = drjax.map_fn(loss, (drjax.broadcast(model), data))
    mean = drjax.broadcast(drjax.reduce_mean(losses))
    return drjax.reduce_mean(drjax.map_fn(lambda a, b: (a - b) ** 2, (losses, mean)))


def main() -> None:
    model, data = jnp.ones(10), jnp.ones((100, 20, 10))
    for name, fn in (("variance", variance), ("its gradient", jax.grad(variance))):
        counts = count(fn, model, data)
        print(f"{name}: {counts.rounds} rounds; bytes for each group:")
        for i in range(1, counts.rounds + 1):
            print(f"  round {i}: {counts.down[i]:4d} down, {counts.up[i]:4d} up")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
