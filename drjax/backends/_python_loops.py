"""The loops of a plan, run by Python: for backends whose driver is a Python process.

Input: a `Loop`, a callable for each of its bodies, and its inputs. Output: its outputs.

Invariants: as `lax.scan`, `while_loop` and `switch`: a branch index is clamped, a
reversed scan stacks its outputs in the order of its inputs, and a scan of length zero
gives empty stacks. Partitioned values are stacks of slices along axis 0, so that the
steps of a partitioned stack lie along axis 1.

Sharp edges: the condition of a while loop is read on the host in each step.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from drjax._errors import DrjaxError
from drjax._jaxprs.prng_keys import from_raw, raw_type
from drjax.backends._interpret_plan import split_scan, split_while
from drjax.plan import Loop, Value


class Steps:
    """Saves and loads the progress of a loop, so that a later run can resume it.

    This class saves nothing; the subclass of an engine's driver writes checkpoints.
    """

    def load(self) -> tuple[int, list, list] | None:
        """Load the progress that was saved last; return None if nothing is saved.

        Returns:
          `(done, carry, outs)`. `done` is the number of finished steps, and `carry` the
          list of the carried arrays after them. `outs` has for each finished step, in
          the order in which the steps ran, the list of the arrays that a scan stacks;
          [] for a while loop.
        """

    def save(self, done: int, carry: list, outs: list) -> None:
        """Save the progress of the loop after a step; it replaces what was saved.

        Args:
          done: The number of finished steps.
          carry: The carried arrays after these steps.
          outs: For each finished step of a scan, in the order in which the steps ran
            (the last index first if the scan is reversed), the list of arrays to stack;
            [] for a while loop.
        """


def run(
    loop: Loop,
    bodies: Sequence[Callable[[list], list]],
    inputs: list,
    size: int,
    numpy: Any,
    steps: Steps | None = None,
) -> list:
    """Run a scan, while loop or cond of a plan step by step, in Python.

    Partitioned inputs and outputs are arrays `[n, ...]`, with the slices along axis 0;
    a partitioned stack of a scan is `[n, steps, ...]`.

    Args:
      loop: The loop.
      bodies: For each plan in `loop.bodies` a function that runs it: from the list of
        its input arrays to the list of its output arrays.
      inputs: The arrays of `loop.inputs`, in order.
      size: n, the number of groups.
      numpy: The module that stacks arrays: `jax.numpy`; or `numpy`, if the arrays are
        numpy's, with random keys as key data.
      steps: Loads and saves the progress of a scan or while loop. Default: the loop
        starts from the beginning, and nothing is saved.

    Returns:
      The list of the arrays of `loop.outputs`, in order.
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
            with _in_step(loop, done):
                carry = bodies[1]([*body_consts, *carry])
            done += 1
            steps.save(done, carry, [])
        return carry
    return _scan(loop, bodies[0], inputs, size, numpy, steps)


def _scan(loop: Loop, body: Callable, inputs, size: int, numpy: Any, steps) -> list:
    """Run a scan step by step, from the progress that `steps` loads if there is some.

    Args:
      loop: The scan.
      body: Runs one step: from one list, of the arrays of the constants, the carried
        values and this step's entry of each stack, to one list, of the new carried
        arrays and the step's outputs to stack.
      inputs: The arrays of `loop.inputs`, in order: constants, initial carried values,
        and stacks, `[steps, ...]` or if partitioned `[n, steps, ...]`.
      size: n, the number of groups.
      numpy: The module that stacks arrays: `jax.numpy`; or `numpy`, if the arrays are
        numpy's, with random keys as key data.
      steps: A `Steps`; its `save` is called after each step.

    Returns:
      The list of the carried arrays after the last step, then of the stacked outputs,
      `[steps, ...]` or if partitioned `[n, steps, ...]`.
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
        with _in_step(loop, t):
            results = body([*consts, *carry, *xs])
        carry, done = results[: loop.carry], done + 1
        outs.append(results[loop.carry :])
        # With all outputs so far: a resumed scan stacks those of earlier steps, too.
        steps.save(done, carry, outs)
    # Outputs stand where their inputs stood, as in lax.scan.
    columns = outs[::-1] if loop.reverse else outs
    ys = []
    for i, value in enumerate(loop.outputs[loop.carry :]):
        if columns:
            column = [out[i] for out in columns]
            # As in the inputs, steps are behind the group axis of a partitioned stack.
            ys.append(numpy.stack(column, axis=int(value.partitioned)))
        else:
            # No step ran, so there is nothing to stack; the shape is known from the
            # plan.
            ys.append(_empty_stack(value, size, numpy))
    return [*carry, *ys]


@contextlib.contextmanager
def _in_step(loop: Loop, step: int) -> Iterator[None]:
    """Say in errors of a loop's body which step it was.

    Args:
      loop: The loop.
      step: The index of the step, from 0; of a scan that of its slices.
    """
    try:
        yield
    except DrjaxError as error:
        text, *rest = error.args
        error.args = (
            f"{text.rstrip('.')}. This was step {step} of {loop.name}, from 0.",
            *rest,
        )
        raise


def _empty_stack(value: Value, size: int, numpy: Any):
    """Return the stacked output of a scan that has no steps: an array of size 0.

    Args:
      value: The output of the scan; its shape is that of the whole stack, `[0, ...]`,
        or of one group's slice of it if it is partitioned.
      size: n, the number of groups.
      numpy: The module that creates the array: `jax.numpy`; or `numpy`, which
        represents random keys by key data.

    Returns:
      `[n, 0, ...]` for a partitioned value, `[0, ...]` for a global one.
    """
    groups, raw = (size,) * value.partitioned, raw_type(value)
    zeros = numpy.zeros((*groups, *raw.shape), raw.dtype)
    return zeros if numpy is np else from_raw(zeros, value.dtype)
