"""The end of a round that reuses accumulator buffers: results alias the running sums.

Input: a plan, a round, and the running sums of each device. Output: the round's reduced
values and the results of the server's next stage, in the buffers of the sums.

A device's running sums live as long as its groups run, together with all that a group
needs. Large ones should be in the memory that the results will take. Buffer donation
cannot do that: sums are no arguments of the compiled function, and the compiler gives
memory of its own to the result of an all-reduce and to pointwise work on it. Only a
loop aliases its results with its operands. So the all-reduce and the server's next
stage become the one step of a loop from sums to results, of which the compiler must not
know that it is one step.

Invariants: an output aliases a sum of the same shape and dtype, and each sum has at
most one such output.

Sharp edges: a loop costs more than it saves for small results (`LARGE`), and stages
with effects or random keys cannot be a loop's step.
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
from drjax.backends._interpret_plan import reads_after_server
from drjax.backends.xla.chunked_stage import finish, sum_dtype
from drjax.plan import Plan, Reduce, Value

# Bytes of results from which on a loop more is worth the memory.
LARGE = 2**24


class AccumulatorReuse:
    """Which results of a round's end take the buffers of which running sums.

    The end of a round is its reductions and the server stage after it.

    Args:
      plan: The plan.
      index: The index of the round, from 0.

    Attributes:
      server: The server stage after the round.
      outputs: The values that the end of the round computes: results of reductions and
        of the server stage, as far as they are needed later.
      reduces: The round's reductions but gathers.
      aliases: From the index of a reduction to that of the output that reuses the
        buffer of its running sum.
      rest: The indices of the other outputs.
    """

    def __init__(self, plan: Plan, index: int):
        a_round = plan.rounds[index]
        self.server = _server_after(plan, index)
        # Results that nothing reads again need no buffer at all.
        later = _needed_after(plan, index)
        self.reduces = a_round.partials
        results = [r.result for r in self.reduces]
        candidates = [*results, *self.server.outputs]
        self.outputs: list[Value] = [v for v in candidates if v.name in later]
        self.rest = list(range(len(self.outputs)))
        self.aliases: dict[int, int] = {}
        for j, reduce in enumerate(self.reduces):
            for i in self.rest:
                # The first that fits: which one it is makes no difference to memory.
                if _fits(reduce, self.outputs[i]):
                    self.aliases[j] = i
                    self.rest.remove(i)
                    break

    @property
    def reused_bytes(self) -> int:
        """Bytes of results that reuse the buffers of running sums.

        No int if they have symbolic dimensions.
        """
        return sum(self.outputs[i].nbytes for i in self.aliases.values())

    @property
    def possible(self) -> bool:
        """Whether a loop's step can compute the outputs.

        It cannot if the server stage has effects or an output is a random key.
        """
        keys = [jnp.issubdtype(v.dtype, jax.dtypes.extended) for v in self.outputs]
        return not self.server.jaxpr.effects and not any(keys)

    def run(
        self, layout: Layout, totals: Sequence[Any], server: Callable[[dict], dict]
    ) -> dict[str, Any]:
        """Run the end of the round; returns the arrays of the outputs by name.

        Args:
          layout: How the partition is laid out on the mesh.
          totals: The partial reductions `[m, *s]` of the m devices, one for each
            reduction.
          server: Runs the server stage: from results of reductions by name to its
            outputs by name.
        """
        aliases, names = self.aliases, [r.result.name for r in self.reduces]

        def stack(*values):
            return [vary(x, layout.axes)[None] for x in values]

        def step(carry):
            step_index, aliased, _ = carry
            # Aliased sums must come from the carry: reading the closed-over ones would
            # keep their buffers alive.
            sums = dict(enumerate(totals)) | dict(zip(aliases, aliased, strict=True))
            results = finish_stacked(layout, self.reduces, list(sums.values()))
            values = dict(zip(names, results, strict=True))
            values |= server(values)
            outputs = [values[v.name] for v in self.outputs]
            aliased = [outputs[i] for i in aliases.values()]
            # A carry keeps its type: stacked by device, though every part is now the
            # same.
            aliased = _on_each(layout, stack, False, True)(*aliased)
            return step_index + 1, aliased, [outputs[i] for i in self.rest]

        # Behind the barrier the compiler does not see a trip count of 1, for which it
        # would remove the loop.
        once, zero = lax.optimization_barrier(jnp.int32(1)), jnp.int32(0)
        aliased = [totals[i] for i in aliases]
        # Outputs without a buffer to reuse start as zeros of their types.
        rest = jax.eval_shape(lambda: step((zero, aliased, None))[-1])
        _, aliased, rest = lax.while_loop(
            lambda carry: carry[0] < once,
            step,
            (zero, aliased, list(map(_zeros, rest))),
        )
        # Unchecked, as every device has put the same there.
        first = lambda *xs: [x[0] for x in xs]
        aliased = _on_each(layout, first, True, False, check_vma=False)(*aliased)
        outputs = zip([*aliases.values(), *self.rest], [*aliased, *rest], strict=True)
        return {self.outputs[i].name: x for i, x in outputs}


def find_reuse(plan: Plan, index: int, layout: Layout) -> AccumulatorReuse | None:
    """The reuse of accumulator buffers at the end of a round; None if it does not pay.

    Args:
      plan: The plan.
      index: The index of the round, from 0.
      layout: How the partition is laid out on the mesh.
    """
    # A loop that starts with the round's results needs them before the next stage. In a
    # user's shard_map (`manual`) sums cannot be stacked over devices.
    if plan.rounds[index].loops or layout.manual:
        return None
    reuse = AccumulatorReuse(plan, index)
    size = reuse.reused_bytes  # unknown with symbolic dimensions
    worth = reuse.aliases and isinstance(size, int) and size >= LARGE
    return reuse if worth and reuse.possible else None


def finish_stacked(layout: Layout, reduces: list[Reduce], totals: list) -> list:
    """Combine the devices' partial reductions outside of a `shard_map`.

    Args:
      layout: How the partition is laid out on the mesh.
      reduces: The reductions.
      totals: For each of them the partial reductions `[m, *s]` of the m devices.

    Returns:
      The global value of each reduction, `[*s]`.
    """

    def reduced(*sums):
        return finish(layout, reduces, [x[0] for x in sums])

    return _on_each(layout, reduced, True, False)(*totals)


def _zeros(like):
    """Zeros of the shape, dtype and sharding of `like`, an abstract array."""
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    sharding = like.sharding if explicit else None
    return lax.full(like.shape, 0, like.dtype, sharding=sharding)


def _server_after(plan: Plan, index: int):
    """The server stage that follows a round: of the next round, or of the plan's end.

    `index` is the index of the round, from 0.
    """
    after = index + 1
    return plan.rounds[after].server if after < len(plan.rounds) else plan.server


def _needed_after(plan: Plan, index: int) -> set[str]:
    """Names of the values needed once a round and the server stage after it are done.

    `index` is the index of the round, from 0.
    """
    needed = {v.name for v in plan.outputs}
    for i, a_round in enumerate(plan.rounds[index + 1 :]):
        needed |= {v.name for v in a_round.server.inputs if i}
        needed |= {v.name for v in reads_after_server(a_round)}
    if index + 1 < len(plan.rounds):
        needed |= {v.name for v in plan.server.inputs}
    return needed


def _fits(reduce: Reduce, value: Value) -> bool:
    """Whether the running sum of a reduction has the shape and dtype of a value.

    Then the value can take its buffer.
    """
    return (reduce.source.shape, sum_dtype(reduce)) == (value.shape, value.dtype)


def _on_each(
    layout: Layout, fn: Callable, stacked: bool, stack: bool, check_vma: bool = True
) -> Callable:
    """`fn` on each device, in a `shard_map` if the partition is sharded over a mesh.

    Args:
      layout: How the partition is laid out on the mesh.
      fn: The function; it takes arrays, and returns a list of arrays.
      stacked: Whether each device takes its part of arguments `[m, ...]`, of m devices;
        else each takes the whole.
      stack: Whether results of devices are stacked to `[m, ...]`; else they are the
        same on each device.
      check_vma: Whether JAX checks over which mesh axes values vary.
    """
    if not layout.sharded:
        return fn
    spec = {True: P(layout.axes), False: P()}
    check_vma = check_vma and _compat.check_vma()
    return shard_map(layout, fn, spec[stacked], spec[stack], check_vma)
