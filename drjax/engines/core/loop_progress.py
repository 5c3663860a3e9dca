"""The progress of a loop of rounds, in the checkpoint of a call.

Input: after each step of a loop the carried values and what a scan stacks. Output: an
entry of the checkpoint, from which the loop goes on after a crash.

Invariants: an entry is a list of numpy arrays, with the slices that workers have
by their files. Sharp edges: carried slices that are read later are saved as where they
come from, without the slices.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from drjax.backends import _python_loops
from drjax.engines.core import checkpoint
from drjax.engines.slices.groups import Lazy
from drjax.plan import Value


class CheckpointedSteps(_python_loops.Steps):
    """Loads and saves the progress of a loop as one entry of the checkpoint of a call.

    The entry is an int array `[done, k, m, *lazy]`, then the k carried values, then for
    each of the `done` steps the m values that a scan stacks. A carried `Lazy`, a value
    whose slices are read later, is saved without its slices, as what `_origin` returns;
    `lazy` has the positions of these among the carried values.

    `key` is the location of the loop, such as `2.scan` for the loop `scan` in round 2.
    A carried `Lazy` must be one of `inputs`, or a step of one.
    """

    def __init__(
        self,
        saved: checkpoint.Checkpoint,
        key: str,
        inputs: list[Any],
        carried: Sequence[Value],
    ):
        self.checkpoint, self.key, self._carried = saved, key, carried
        self._lazy = [x for x in inputs if isinstance(x, Lazy)]

    def load(self) -> tuple[int, list[Any], list[list[Any]]] | None:
        entry = self.checkpoint.get(self.key, [None, *self._carried])
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

    def save(self, done: int, carry: list[Any], outs: list[list[Any]]) -> None:
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

        Its first element is the position among those inputs of the loop that are `Lazy`
        of the one that `x` is a step of. The others are `x.steps`: the current step of
        each of the k scans over it, from the outermost to the innermost.
        """
        same = [y.source is x.source and y.leaf == x.leaf for y in self._lazy]
        return np.array([same.index(True), *x.steps])
