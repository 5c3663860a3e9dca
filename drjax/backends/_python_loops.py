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
from drjax.plan import Loop, Value


class Steps:
    """What a loop has done so far. This one forgets; others may save it.

    Both functions speak of the number of finished steps, the carried values after
    them, and what each step gave besides.
    """

    def load(self) -> tuple[int, list, list] | None:
        """Where to go on; None: from the start."""

    def save(self, done: int, carry: list, outs: list) -> None:
        """Called after each step."""


def run(
    loop: Loop,
    bodies: Sequence[Callable[[list], list]],
    inputs: list,
    size: int,
    numpy: Any,
    steps: Steps | None = None,
) -> list:
    """The outputs of a loop. Partitioned values are stacks of rows along axis 0.

    Args:
      loop: The loop.
      bodies: What runs its bodies.
      inputs: Its inputs.
      size: n, the number of groups.
      numpy: The module that stacks arrays: `jax.numpy`, or `numpy` for raw values.
      steps: What it has done already.
    """
    steps = Steps() if steps is None else steps
    if loop.op == "cond":
        # As lax.switch: an index that is out of range takes the nearest branch.
        index = int(np.clip(int(inputs[0]), 0, len(bodies) - 1))
        return bodies[index](inputs[1:])
    if loop.op == "while":
        # The inputs are the condition's constants, the body's, and the carry.
        first, second = loop.consts[0], sum(loop.consts)
        done, carry, _ = steps.load() or (0, inputs[second:], [])
        # A resumed loop starts with its condition, which the saved carry decides.
        while bool(bodies[0]([*inputs[:first], *carry])[0]):
            carry, done = bodies[1]([*inputs[first:second], *carry]), done + 1
            steps.save(done, carry, [])
        return carry
    return _scan(loop, bodies[0], inputs, size, numpy, steps)


def _scan(loop: Loop, body: Callable, inputs, size: int, numpy: Any, steps) -> list:
    first, length = sum(loop.consts), loop.length or 0
    split = first + loop.carry
    consts, stacks = inputs[:first], inputs[split:]
    done, carry, past = steps.load() or (0, inputs[first:split], [])
    outs, order = [*past], [*range(length)]
    if loop.reverse:
        order.reverse()
    # `done` counts steps in the order in which they run.
    for t in order[done:]:
        xs = [
            # The groups are axis 0 of partitioned stacks, so that steps are axis 1.
            x[:, t] if v.partitioned else x[t]
            for v, x in zip(loop.inputs[split:], stacks, strict=True)
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
            ys.append(_nothing(value, size, numpy))
    return [*carry, *ys]


def _nothing(value: Value, size: int, numpy: Any):
    rows, raw = (size,) * value.partitioned, raw_type(value)
    zeros = numpy.zeros((*rows, *raw.shape), raw.dtype)
    return zeros if numpy is np else from_raw(zeros, value.dtype)
