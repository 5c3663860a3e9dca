"""Count the rounds of communication of a program, and the bytes of each.

A small interpreter, written against the documentation of `drjax.primitives` only. It
walks the jaxpr of a program once and gives each variable a *level*: the number of
reductions on the longest path to it. Reductions of one level do not depend on each
other and can travel together, so the number of levels is the number of rounds
(Rush et al. 2024, section 5).

Run it with `python -m examples.count_rounds`.
"""

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
    found = Communication()
    closed = jax.make_jaxpr(fn)(*args)
    _count(_live(closed.jaxpr), [0] * len(closed.in_avals), found)
    return found


def _live(jaxpr):
    """The equations whose results reach an output, and the outputs."""
    needed, eqns = set(map(id, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in needed for v in eqn.outvars) or eqn.effects:
            eqns.append(eqn)
            needed |= set(map(id, eqn.invars))
    return jaxpr.invars, eqns[::-1], jaxpr.outvars


def _count(program, levels_in, found: Communication) -> list[int]:
    invars, eqns, outvars = program
    level = dict(zip(invars, levels_in, strict=True))

    def read(v) -> int:
        return 0 if isinstance(v, core.Literal) else level.get(v, 0)

    for eqn in eqns:
        here = max(map(read, eqn.invars), default=0)
        after = here
        if eqn.primitive is primitives.broadcast_p:
            found.down[here + 1] += sum(_bytes(v.aval) for v in eqn.invars)
        elif eqn.primitive in REDUCTIONS:
            after = here + 1
            n = eqn.params["partition"].size
            found.up[after] += sum(_bytes(v.aval) // n for v in eqn.invars)
        elif eqn.primitive.name == "jit":
            inner = _live(eqn.params["jaxpr"].jaxpr)
            levels = _count(inner, [read(v) for v in eqn.invars], found)
            level.update(zip(eqn.outvars, levels, strict=True))
            continue
        elif eqn.primitive.name in ("scan", "while", "cond"):
            raise NotImplementedError(f"rounds in {eqn.primitive.name} are not counted")
        level.update(dict.fromkeys(eqn.outvars, after))
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
        found = count(fn, model, data)
        print(f"{name}: {found.rounds} rounds; bytes for each group:")
        for i in range(1, found.rounds + 1):
            print(f"  round {i}: {found.down[i]:4d} down, {found.up[i]:4d} up")


if __name__ == "__main__":
    main()
