"""The progress of a loop of rounds, in the checkpoint of a call.

Input: after each step of a loop the carried values and what a scan stacks. Output: an
entry of the checkpoint, from which the loop goes on after a crash.

Invariants: an entry is a list of numpy arrays. Sharp edges: carried slices that are
read later are saved as where they come from, without the slices.
"""

from typing import Any

import numpy as np

from drjax.backends import _python_loops
from drjax.backends.engine import checkpoint
from drjax.backends.groups import Lazy


class CheckpointedSteps(_python_loops.Steps):
    """Loads and saves the progress of a loop as an entry of the checkpoint.

    The progress is the number of steps done, the carried values, and the values that a
    scan stacks. A carried `Lazy`, a value whose slices are read later, is saved without
    its slices: as the input of the loop that it is a step of, and its current steps.

    Args:
      saved: The checkpoint of the call.
      key: The key of the entry: the location of the loop, such as `2.scan` for the loop
        `scan` in round 2.
      inputs: The inputs of the loop, arrays or `Lazy`. A carried `Lazy` is one of them,
        or a step of one.
    """

    def __init__(self, saved: checkpoint.Checkpoint, key: str, inputs: list):
        self.checkpoint, self.key = saved, key
        self._lazy = [x for x in inputs if isinstance(x, Lazy)]

    def load(self):
        entry = self.checkpoint.get(self.key)
        if entry is None:
            return None
        (done, carried, each, *lazy), arrays = map(int, entry[0]), entry[1:]
        carry: list[Any] = arrays[:carried]
        rest = arrays[carried:]
        for i in lazy:
            origin, *steps = map(int, carry[i])
            carry[i] = self._lazy[origin].at_steps(tuple(steps))
        outs = [rest[i * each : (i + 1) * each] for i in range(done)] if each else []
        return done, carry, outs or [[] for _ in range(done)]

    def save(self, done: int, carry: list, outs: list) -> None:
        each = len(outs[0]) if outs else 0
        lazy = [i for i, x in enumerate(carry) if isinstance(x, Lazy)]
        # Entries are lists of arrays, so the counts are an array too.
        sizes = np.array([done, len(carry), each, *lazy])
        carry = [self._origin(x) if isinstance(x, Lazy) else x for x in carry]
        flat = [x for out in outs for x in out]
        # The entries of the rounds in the loop go: the next step has the same keys, and
        # would take them for its own results.
        self.checkpoint.put(self.key, [sizes, *carry, *flat], over=f"{self.key}.")

    def _origin(self, x: Lazy) -> np.ndarray:
        """Describe a carried `Lazy` by an int array `[1 + k]`, which is saved instead.

        A `Lazy` stands for slices that are read later. Scans over it index its slices:
        its `steps` has the current step of each of these k scans.

        Args:
          x: The `Lazy`: one of the loop's inputs, or a step of one.

        Returns:
          First the position of that input among those inputs of the loop that are
          `Lazy`; then `x.steps`, from the outermost scan to the innermost.
        """
        same = [y.source is x.source and y.leaf == x.leaf for y in self._lazy]
        return np.array([same.index(True), *x.steps])
