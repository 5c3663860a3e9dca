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
from types import ModuleType
from typing import TypeAlias

import numpy as np

from drjax._errors import DrjaxError
from drjax._jaxprs.prng_keys import from_raw, raw_type
from drjax.backends._interpret_plan import BackendArray
from drjax.plan import Cond, Loop, Scan, Value, While

# Runs one plan of a loop: from the arrays of its inputs to those of its outputs.
Body: TypeAlias = Callable[[list[BackendArray]], list[BackendArray]]


class Steps:
    """Saves and loads the progress of a loop, so that a later run can resume it.

    This class saves nothing; the subclass of an engine's driver writes checkpoints.
    """

    def load(self) -> tuple[int, list[BackendArray], list[list[BackendArray]]] | None:
        """Load the progress that was saved last; return None if nothing is saved.

        It is `(done, carry, outs)`. `done` is the number of finished steps, and `carry`
        has the carried arrays after them. `outs` has for each finished step, in the
        order in which the steps ran (the last index first if a scan is reversed), the
        arrays that the scan stacks; it is [] for a while loop.
        """

    def save(
        self, done: int, carry: list[BackendArray], outs: list[list[BackendArray]]
    ) -> None:
        """Save the progress of the loop after a step; it replaces what was saved.

        See `load` for what the arguments are.
        """


def run(
    loop: Loop,
    bodies: Sequence[Body],
    inputs: list[BackendArray],
    size: int,
    numpy: ModuleType,
    steps: Steps | None = None,
) -> list[BackendArray]:
    """Run a scan, while loop or cond of a plan step by step, in Python.

    Partitioned inputs and outputs are arrays `[n, ...]`, with the slices along axis 0;
    a partitioned stack of a scan is `[n, steps, ...]`.

    `bodies` has for each plan in `loop.bodies` a function that runs it. `size` is n.
    `numpy` is the module that stacks arrays: `jax.numpy`; or `numpy`, if the arrays are
    numpy's, with random keys as key data. Without `steps`, a scan or while loop starts
    from the beginning, and nothing is saved.
    """
    steps = Steps() if steps is None else steps
    if isinstance(loop, Cond):
        # As lax.switch: an index that is out of range takes the nearest branch.
        index = int(np.clip(int(inputs[0]), 0, len(bodies) - 1))
        return bodies[index](inputs[1:])
    if isinstance(loop, While):
        condition_consts, body_consts, init = loop.split(inputs)
        done, carry, _ = steps.load() or (0, init, [])
        # A resumed loop starts with its condition, which the saved carry decides.
        while bool(bodies[0]([*condition_consts, *carry])[0]):
            with _in_step(loop, done):
                carry = bodies[1]([*body_consts, *carry])
            done += 1
            steps.save(done, carry, [])
        return carry
    assert isinstance(loop, Scan), loop.op
    return _scan(loop, bodies[0], inputs, size, numpy, steps)


def _scan(
    loop: Scan,
    body: Body,
    inputs: list[BackendArray],
    size: int,
    numpy: ModuleType,
    steps: Steps,
) -> list[BackendArray]:
    """Run a scan step by step, from the progress that `steps` loads if there is some.

    `body` runs one step: from the constants, the carried values and this step's entry
    of each stack to the new carried values and the step's outputs to stack. Stacked
    outputs are `[steps, ...]`, or if partitioned `[n, steps, ...]`, with n = `size`.
    """
    consts, init, stacks = loop.split(inputs)
    _, _, stacked_values = loop.split(loop.inputs)
    done, carry, past = steps.load() or (0, init, [])
    outs, order = [*past], [*range(loop.length)]
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

    `step` counts from 0; of a scan it is the index of the step's slices.
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


def _empty_stack(value: Value, size: int, numpy: ModuleType) -> BackendArray:
    """Return a stacked output without steps: `[0, ...]`, or partitioned `[n, 0, ...]`.

    The shape of `value`, an output of a scan, has the steps, so that it begins with 0.
    `size` is n. `numpy` is numpy, in which random keys are raw data, or `jax.numpy`.
    """
    groups, raw = (size,) * value.partitioned, raw_type(value)
    zeros = numpy.zeros((*groups, *raw.shape), raw.dtype)
    return zeros if numpy is np else from_raw(zeros, value.dtype)
