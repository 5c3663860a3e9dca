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
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat.types import Array
from drjax._plan import uses
from drjax._sharding.execute import full_of_type, shard_map, vary
from drjax._sharding.layout import Layout
from drjax.backends.xla.chunked_stage import finish, result_specs, sum_dtype
from drjax.backends.xla.folds_around import has_folds
from drjax.backends.xla.idle_chunks import indices_of_round
from drjax.plan import Plan, Reduce, Stage, Value

# Bytes of results from which on a loop more is worth the memory.
LARGE = 2**24


class AccumulatorReuse:
    """Which results of a round's end take the buffers of which running sums.

    The end of a round is its reductions and the server stage after it. A running sum is
    the accumulator of a reduction on a device.

    Attributes:
      server: The server stage after the round.
      outputs: The values that the end of the round computes and that are read later:
        results of reductions, and outputs of the server stage.
      reduces: The round's reductions, without gathers.
      aliases: From the index of a reduction in `reduces` to that in `outputs` of the
        value that reuses the buffer of its running sum.
      rest: The indices of the other outputs.
    """

    def __init__(self, plan: Plan, index: int):
        a_round = plan.rounds[index]
        self.server = _server_after(plan, index)
        # Results that nothing reads again need no buffer at all.
        later = _needed_after(plan, self.server)
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
        """The size in bytes of all outputs that reuse the buffers of running sums.

        It is a symbolic size, not an int, if they have symbolic dimensions.
        """
        return sum(self.outputs[i].nbytes for i in self.aliases.values())

    @property
    def possible(self) -> bool:
        """Whether the end of the round can be the step of a loop, as `run` needs it.

        It cannot if the server stage after the round has effects, or if one of
        `outputs` is a random key.
        """
        keys = [jnp.issubdtype(v.dtype, jax.dtypes.extended) for v in self.outputs]
        return not self.server.jaxpr.effects and not any(keys)

    def run(
        self,
        layout: Layout,
        totals: Sequence[Array],
        server: Callable[[dict[str, Array]], dict[str, Array]],
    ) -> dict[str, Array]:
        """Run the end of the round as one step of a loop, so that results alias sums.

        The step combines the devices' partial reductions, and runs the server stage.
        `totals` has for each of `reduces`, in order, the partial reductions of the m
        devices, `[m, *s]`. Those in `aliases` give their buffers to results. `server`
        runs the server stage, from the reductions' results to the stage's outputs. The
        result has the arrays of `outputs`; all three dicts are by the names of values.
        """
        aliases, names = self.aliases, [r.result.name for r in self.reduces]

        def stack(*values: Array) -> list[Array]:
            return [vary(x, layout.axes)[None] for x in values]

        def step(
            carry: tuple[Array, list[Array], Any],
        ) -> tuple[Array, list[Array], list[Array]]:
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
            (zero, aliased, [full_of_type(x, 0) for x in rest]),
        )
        # Unchecked, as every device has put the same there.
        first = lambda *xs: [x[0] for x in xs]
        aliased = _on_each(layout, first, True, False, check_vma=False)(*aliased)
        outputs = zip([*aliases.values(), *self.rest], [*aliased, *rest], strict=True)
        return {self.outputs[i].name: x for i, x in outputs}


def find_reuse(plan: Plan, index: int) -> AccumulatorReuse | None:
    """Decide whether the end of a round reuses accumulator buffers, and which.

    The end of a round is its reductions and the server stage after it. A result reuses
    the buffer of a device's running sum if both have one shape and dtype. Nothing is
    run. The result is None in these cases:

    * The results that could reuse buffers have less than `LARGE` bytes together, or
      have symbolic dimensions, or there are none.
    * The round has loops, folds, sharded reductions, or a `put_add` move whose result
      is a population, a global value `[N, *s]` of more slices than there are groups.
    * One group runs, known by its index, without a loop over groups.
    * The server stage has `fold_of_all_p` equations, folds around each group.
    * The server stage has effects, or a result is a random key.
    """
    a_round = plan.rounds[index]
    # A loop that starts with the round's results needs them before the next stage.
    if a_round.loops:
        return None
    # The server stage may take what a move gives to a population, after the sums.
    if any(not move.result.partitioned for move in a_round.moves):
        return None
    # A part of a sum cannot take the buffer of the whole sum.
    if any(reduce.sharded for reduce in a_round.reduces):
        return None
    # A fold of the devices' states is no reduction of sums.
    if a_round.folds or has_folds(_server_after(plan, index)):
        return None
    reuse = AccumulatorReuse(plan, index)
    size = reuse.reused_bytes  # unknown with symbolic dimensions
    worth = reuse.aliases and isinstance(size, int) and size >= LARGE
    if not worth or not reuse.possible:
        return None
    chosen = indices_of_round(a_round, plan.kept())
    return None if chosen is not None and chosen.count == 1 else reuse


def finish_stacked(
    layout: Layout, reduces: Sequence[Reduce], totals: list[Array]
) -> list[Array]:
    """Combine the devices' partial reductions, and finish each reduction.

    It is called for all devices, outside of a `shard_map`. `totals` are the partial
    reductions of the m devices, `[m, *s]`, in the accumulator dtype, of all reductions
    but gathers. The results are the global values, `[*s]`, in the dtype of the slices
    that are reduced; a mean is divided by n.
    """

    def reduced(*sums: Array) -> list[Array]:
        return finish(layout, reduces, [x[0] for x in sums])

    if not layout.sharded:
        return reduced(*totals)
    specs = [spec or P() for spec in result_specs(layout, reduces)]
    check_vma = _compat.check_vma()
    return shard_map(layout, reduced, P(layout.axes), specs, check_vma)(*totals)


def _server_after(plan: Plan, index: int) -> Stage:
    """Return the server stage after a round: of the next round, or the plan's last."""
    after = index + 1
    return plan.rounds[after].server if after < len(plan.rounds) else plan.server


def _needed_after(plan: Plan, server: Stage) -> set[str]:
    """Return the names of the values that are read after a server stage, not by it."""
    # The stage runs in the step of the loop itself: what only it reads needs no buffer
    # after the step.
    after = next(i for i, step in enumerate(plan.steps) if step is server)
    return {name for name, last in uses.last_reads(plan).items() if last > after}


def _fits(reduce: Reduce, value: Value) -> bool:
    """Return whether a value has the shape and dtype of a device's sum of a reduction.

    If so, the value can reuse the buffer of that running sum.
    """
    return (reduce.source.shape, sum_dtype(reduce)) == (value.shape, value.dtype)


def _on_each(
    layout: Layout,
    fn: Callable[..., list[Array]],
    stacked: bool,
    stack: bool,
    check_vma: bool = True,
) -> Callable[..., list[Array]]:
    """Map `fn` over the m devices by a `shard_map`; `fn` itself if nothing is sharded.

    `stacked`: each device takes its part `[1, ...]` of arguments `[m, ...]`; else each
    takes the whole arguments. `stack`: each device returns `[1, ...]`, and together
    they are `[m, ...]`; else results are the same on each device. Varying manual axes
    are checked if `check_vma` and the code that is being traced is in a
    `shard_map(check_vma=True)`.
    """
    # One device: its `[1, ...]` is already the stack over all devices.
    if not layout.sharded:
        return fn
    spec = {True: P(layout.axes), False: P()}
    check_vma = check_vma and _compat.check_vma()
    return shard_map(layout, fn, spec[stacked], spec[stack], check_vma)
