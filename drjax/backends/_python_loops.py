"""The loops of a plan, run by Python: for backends whose driver is a Python process.

Input: a `Loop`, a callable for each of its bodies, and its inputs. Output: its outputs.

Invariants: as `lax.scan`, `while_loop` and `switch`: a branch index is clamped, a
reversed scan stacks its outputs in the order of its inputs, and a scan of length zero
gives empty stacks. Partitioned values are stacks of slices along axis 0, so that the
steps of a partitioned stack lie along axis 1.

Sharp edges: the condition of a while loop is read on the host in each step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drjax._jaxprs.prng_keys import from_raw, raw_type
from drjax.backends._interpret_plan import split_scan, split_while
from drjax.plan import Loop, Value


class Steps:
    """The progress of a loop. This class saves nothing; an engine's subclass does."""

    def load(self) -> tuple[int, list, list] | None:
        """The saved progress as `(done, carry, outs)`; None if the loop has not begun.

        `done` counts the finished steps, `carry` are the carried values after them, and
        `outs` has for each finished step the list of values that a scan stacks.
        """

    def save(self, done: int, carry: list, outs: list) -> None:
        """Save the progress, in the terms of `load`; called after each step."""


def run(
    loop: Loop,
    bodies: Sequence[Callable[[list], list]],
    inputs: list,
    size: int,
    numpy: Any,
    steps: Steps | None = None,
) -> list:
    """Run a loop; returns the arrays of its outputs.

    Partitioned values are stacks of slices along axis 0, in inputs and in outputs.

    Args:
      loop: The loop.
      bodies: For each of its bodies a function from the list of its inputs to the list
        of its outputs.
      inputs: The arrays of the loop's inputs.
      size: n, the number of groups.
      numpy: The module that stacks arrays: `jax.numpy`, or `numpy` for raw values.
      steps: Its progress. Default: it starts from the beginning, and saves nothing.
    """
    steps = Steps() if steps is None else steps
    if loop.op == "cond":
        # As lax.switch: an index that is out of range takes the nearest branch.
        index = int(np.clip(int(inputs[0]), 0, len(bodies) - 1))
        return bodies[index](inputs[1:])
    if loop.op == "while":
        condition_consts, body_consts, init = split_while(loop, inputs)
        done, carry, _ = steps.load() or (0, init, [])
        # A resumed loop starts with its condition, which the saved carry decides.
        while bool(bodies[0]([*condition_consts, *carry])[0]):
            carry, done = bodies[1]([*body_consts, *carry]), done + 1
            steps.save(done, carry, [])
        return carry
    return _scan(loop, bodies[0], inputs, size, numpy, steps)


def _scan(loop: Loop, body: Callable, inputs, size: int, numpy: Any, steps) -> list:
    """Run a scan; returns its carried values, then its stacked outputs.

    Args:
      loop: The scan.
      body: A function from the list of a step's inputs to the list of its outputs.
      inputs: The arrays of the scan's inputs.
      size: n, the number of groups.
      numpy: The module that stacks arrays: `jax.numpy`, or `numpy` for raw values.
      steps: The progress, a `Steps`.
    """
    consts, init, stacks = split_scan(loop, inputs)
    _, _, stacked_values = split_scan(loop, loop.inputs)
    done, carry, past = steps.load() or (0, init, [])
    outs, order = [*past], [*range(loop.length or 0)]
    if loop.reverse:
        order.reverse()
    # `done` counts steps in the order in which they run.
    for t in order[done:]:
        xs = [
            # The groups are axis 0 of partitioned stacks, so that steps are axis 1.
            x[:, t] if v.partitioned else x[t]
            for v, x in zip(stacked_values, stacks, strict=True)
        ]
        results = body([*consts, *carry, *xs])
        carry, done = results[: loop.carry], done + 1
        outs.append(results[loop.carry :])
        steps.save(done, carry, outs)
    # Outputs stand where their inputs stood, as in lax.scan.
    columns = outs[::-1] if loop.reverse else outs
    ys = []
    for i, value in enumerate(loop.outputs[loop.carry :]):
        if columns:
            column = [out[i] for out in columns]
            ys.append(numpy.stack(column, axis=int(value.partitioned)))
        else:
            # No step ran, so there is nothing to stack; the shape is known from the
            # plan.
            ys.append(_empty_stack(value, size, numpy))
    return [*carry, *ys]


def _empty_stack(value: Value, size: int, numpy: Any):
    """The stack of an output of a scan without steps: zeros of size 0.

    Args:
      value: The stacked output.
      size: n, the number of groups.
      numpy: The module that makes arrays: `jax.numpy`, or `numpy` for raw values.

    Returns:
      `[n, 0, ...]` for a partitioned value, `[0, ...]` for a global one.
    """
    groups, raw = (size,) * value.partitioned, raw_type(value)
    zeros = numpy.zeros((*groups, *raw.shape), raw.dtype)
    return zeros if numpy is np else from_raw(zeros, value.dtype)
