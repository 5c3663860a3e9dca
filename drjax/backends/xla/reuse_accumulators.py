"""The end of a round in place: the sums over devices, and the server's work on them.

A device's running sums live as long as its groups work, beside all that a group needs.
Large ones should be in the memory that the results will take. But the compiler gives
memory of its own to what an all-reduce gives, and to pointwise work on it; only a loop
leaves its results where its operands were. So the all-reduce and the server's next
stage become the one step of a loop from sums to results, of which the compiler must
not know that it is one step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._sharding.execute import shard_map, vary
from drjax._sharding.layout import Layout
from drjax.backends.xla.chunked_stage import finish, sum_dtype
from drjax.plan import Plan, Reduce, Value

# Bytes of results from which on a loop more is worth the memory.
LARGE = 2**24


class Ending:
    """The end of a round of a plan, and the server's stage after it.

    Args:
      plan: The plan.
      number: The round, from 0.

    Attributes:
      outputs: The values that it gives: results of reductions and of the server, as far
        as they are needed later.
      reduces: The reductions.
      places: From a reduction to the output that takes the memory of its sums.
      rest: The other outputs.
    """

    def __init__(self, plan: Plan, number: int):
        a_round = plan.rounds[number]
        self.server = _server_after(plan, number)
        later = _needed_after(plan, number)
        self.reduces = a_round.partials
        results = [r.result for r in self.reduces]
        made = [*results, *self.server.outputs]
        self.outputs: list[Value] = [v for v in made if v.name in later]
        self.rest = list(range(len(self.outputs)))
        self.places: dict[int, int] = {}
        for number, reduce in enumerate(self.reduces):
            for i in self.rest:
                if _fits(reduce, self.outputs[i]):
                    self.places[number] = i
                    self.rest.remove(i)
                    break

    @property
    def in_place(self) -> int:
        """Bytes of results that take the memory of sums."""
        return sum(self.outputs[i].nbytes for i in self.places.values())

    @property
    def possible(self) -> bool:
        """Whether it can be a loop's step: effects and random keys cannot."""
        keys = [jnp.issubdtype(v.dtype, jax.dtypes.extended) for v in self.outputs]
        return not self.server.jaxpr.effects and not any(keys)

    def run(
        self, where: Layout, totals: Sequence[Any], server: Callable[[dict], dict]
    ) -> dict[str, Any]:
        """The outputs by name.

        Args:
          where: Where the partition lies.
          totals: The sums of each device, `[m, *s]`.
          server: From results of reductions by name to outputs of the server's stage.
        """
        places, names = self.places, [r.result.name for r in self.reduces]

        def stack(*values):
            return [vary(x, where.axes)[None] for x in values]

        def step(carry):
            number, placed, _ = carry
            sums = dict(enumerate(totals)) | dict(zip(places, placed, strict=True))
            results = finish_stacked(where, self.reduces, list(sums.values()))
            values = dict(zip(names, results, strict=True))
            values |= server(values)
            found = [values[v.name] for v in self.outputs]
            placed = [found[i] for i in places.values()]
            placed = _on_each(where, stack, False, True)(*placed)
            return number + 1, placed, [found[i] for i in self.rest]

        once, zero = lax.optimization_barrier(jnp.int32(1)), jnp.int32(0)
        placed = [totals[i] for i in places]
        rest = jax.eval_shape(lambda: step((zero, placed, None))[-1])
        _, placed, rest = lax.while_loop(
            lambda carry: carry[0] < once, step, (zero, placed, list(map(_zeros, rest)))
        )
        # Unchecked, as every device has put the same there.
        first = lambda *xs: [x[0] for x in xs]
        placed = _on_each(where, first, True, False, check_vma=False)(*placed)
        found = zip([*places.values(), *self.rest], [*placed, *rest], strict=True)
        return {self.outputs[i].name: x for i, x in found}


def ending(plan: Plan, number: int, where: Layout) -> Ending | None:
    """The end of a round, where it should be in place."""
    if plan.rounds[number].loops or where.manual:
        return None
    found = Ending(plan, number)
    size = found.in_place  # unknown with symbolic dimensions
    worth = found.places and isinstance(size, int) and size >= LARGE
    return found if worth and found.possible else None


def finish_stacked(where: Layout, reduces: list[Reduce], totals: list) -> list:
    """From the sums of each device, `[m, *s]`, to those of all."""

    def reduced(*sums):
        return finish(where, reduces, [x[0] for x in sums])

    return _on_each(where, reduced, True, False)(*totals)


def _zeros(like):
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    sharding = like.sharding if explicit else None
    return lax.full(like.shape, 0, like.dtype, sharding=sharding)


def _server_after(plan: Plan, number: int):
    after = number + 1
    return plan.rounds[after].server if after < len(plan.rounds) else plan.server


def _needed_after(plan: Plan, number: int) -> set[str]:
    """Names of the values needed once a round and the server's next stage are done."""
    needed = {v.name for v in plan.outputs}
    for i, a_round in enumerate(plan.rounds[number + 1 :]):
        needed |= {v.name for v in a_round.server.inputs if i}
        needed |= {v.name for v in a_round.local.inputs}
        needed |= {whole.name for whole, _ in a_round.scatter}
        needed |= {v.name for loop in a_round.loops for v in loop.inputs}
    if number + 1 < len(plan.rounds):
        needed |= {v.name for v in plan.server.inputs}
    return needed


def _fits(reduce: Reduce, value: Value) -> bool:
    """Whether a running sum has the type of a value."""
    return (reduce.source.shape, sum_dtype(reduce)) == (value.shape, value.dtype)


def _on_each(
    where: Layout, fn: Callable, stacked: bool, stack: bool, check_vma: bool = True
) -> Callable:
    """`fn` on each device: of what is stacked by device, or the same everywhere."""
    if not where.sharded:
        return fn
    spec = {True: P(where.axes), False: P()}
    check_vma = check_vma and _compat.check_vma()
    return shard_map(where, fn, spec[stacked], spec[stack], check_vma)
