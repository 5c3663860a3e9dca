"""The results of a call that stay for the next one, on the driver of an engine.

Input: handles among the arguments of a call, and its results. Output: what the stages
take in the place of these handles, and handles of the results that stay.

Invariants: what an engine's workers have stays with them (`WorkerSlices`); of an engine
whose workers have nothing between stages, the handle has the arrays. A dropped group
keeps the slice that it had before the call.

Sharp edges: slices end with the workers that have them, which their `generation` tells.
A kept result of a loop is with the workers only if all slices are (Flower).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from drjax._errors import DrjaxValueError, EngineError
from drjax._jaxprs.prng_keys import from_raw, raw_type
from drjax._plan_file import pytrees
from drjax._plan_file.stage_features import WIDE
from drjax.backends.engine.options import EngineOptions
from drjax.backends.engine.worker_slices import INITIAL, WorkerSlices, keep_dropped
from drjax.backends.groups import Remote, Unread, read_if_lazy
from drjax.backends.kept import Keep, Kept, KeptPair
from drjax.plan import Plan, Value


class HostSlices(Unread):
    """Slices that a handle has, in place of workers.

    Args:
      value: The value in the plan.
      slices: The slices of all groups, `[n, ...]`.
    """

    def __init__(self, value: Value, slices: np.ndarray):
        self.value, self.slices = value, slices
        n, axis = len(slices), value.axis
        self.shape = (*value.shape[:axis], n, *value.shape[axis:])
        self.dtype = value.dtype

    def whole(self) -> np.ndarray:
        return self.slices


class KeptResults:
    """What stays between the calls of a `Runner`.

    Args:
      plan: The plan.
      keep: The argument `keep` of `compile`.
      engine: The engine. Its attribute `stays` says which slices its workers have
        between stages: `"all"`, `"kept"` (those of kept results), or `""`.
      options: The engine's options.

    Attributes:
      initial: What workers need to know of the kept arguments, of which they may have
        the first slices themselves: the structure, types and names, as JSON data; None
        if nothing is kept.

    Raises:
      DrjaxTypeError, DrjaxValueError: `keep` does not fit the plan; or there is a
        checkpoint, which cannot have the slices of workers.
    """

    def __init__(self, plan: Plan, keep: Any, engine: Any, options: EngineOptions):
        self._keep, self._plan, self._engine = Keep(plan, keep), plan, engine
        pairs = self._keep.pairs
        self._names = {plan.outputs[i].name for pair in pairs for i in pair.outputs}
        self._inputs = [i for pair in pairs for i in pair.inputs]
        self.initial = _described(plan, pairs) if pairs else None
        if self._keep and engine.stays and options.checkpoint is not None:
            raise DrjaxValueError(
                "keep= and checkpoint= cannot be combined here: the slices that stay "
                "are with the workers, and no folder has them. Leave out one of the "
                "two; what .fetch() of a handle returns can be saved."
            )

    def open(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, list[Kept]]:
        """Put slices in the places of handles: see `Keep.open`."""
        return self._keep.open(args, kwargs, self._start)

    def _start(self, pair: KeptPair, x: Any) -> list[WorkerSlices] | None:
        """The slices that workers have before the first call, if `x` is a `Remote`."""
        if not isinstance(x, Remote) or self._engine.stays != "all":
            return None
        zeros, leaves = np.zeros(self._plan.size, int), []
        for i in pair.inputs:
            # Among all kept arguments: workers have the slices of all of them.
            piece = INITIAL, self._inputs.index(i)
            value = self._plan.inputs[i]
            leaves.append(WorkerSlices(value, [piece], zeros, zeros, self._engine))
            leaves[-1].held = True  # by this call, which begins after this
        return leaves

    def inputs(self, inputs: list[Any]) -> list[Any]:
        """The inputs of the plan, with arrays for slices that handles have.

        Raises:
          EngineError: The workers that had slices have ended.
        """
        for x in inputs:
            if isinstance(x, WorkerSlices):
                self._check_current(x)
        return [x.slices if isinstance(x, HostSlices) else x for x in inputs]

    def _check_current(self, x: WorkerSlices) -> None:
        """Raise an error if the workers that had these slices have ended."""
        if x.generation != self._engine.generation:
            raise EngineError(
                f"The workers that had the slices of {x.value.name} have ended, by "
                "close() or with their engine. Start again from arrays, such as those "
                "that .fetch() returned before."
            )

    def staying(self, values: Sequence[Value]) -> tuple[bool, ...]:
        """For outputs of a stage whether workers keep their slices; () if none do."""
        if self._engine.stays == "all":
            return (True,) * len(values)
        stay = tuple(v.name in self._names for v in values)
        return stay if self._engine.stays and any(stay) else ()

    def split(self, outputs: list[Any], inputs: list[Any], alive: np.ndarray) -> list:
        """Take what stays out of the outputs of a call.

        Args:
          outputs: The outputs of the plan; those that stay are set to None.
          inputs: The inputs of the call.
          alive: Which groups take part, bool `[n]`; the others were dropped.

        Returns:
          For each output what a handle has of it; None if it does not stay.
        """
        leaves: list[Any] = [None] * len(outputs)
        for pair in self._keep.pairs:
            for out, i in zip(pair.outputs, pair.inputs, strict=True):
                value = self._plan.outputs[out]
                x = keep_dropped(value, outputs[out], inputs[i], alive)
                if isinstance(x, WorkerSlices):
                    x.held = True
                else:
                    x = HostSlices(value, x)
                leaves[out], outputs[out] = x, None
        return leaves

    def results(self, tree: Any, leaves: list[Any]) -> Any:
        """Put handles in the places of what stays; `leaves` are those of `split`."""
        return self._keep.results(tree, leaves, self._fetch)

    def _fetch(self, _: KeptPair, leaves: Sequence[Any]) -> list[jax.Array]:
        """Copy slices to the caller: arrays with the group axis."""
        arrays = []
        for x in leaves:
            if isinstance(x, WorkerSlices):
                self._check_current(x)
            # Without x64 in the plan's precision, 64-bit values would be cast.
            with jax.enable_x64(
                bool(jax.config.read("jax_enable_x64")) or x.dtype in WIDE
            ):
                whole = np.moveaxis(np.array(read_if_lazy(x)), 0, x.value.axis)
                arrays.append(from_raw(jax.numpy.asarray(whole), x.dtype))
        return arrays


def _described(plan: Plan, pairs: Sequence[KeptPair]) -> dict[str, Any]:
    """The structure and the types of one group's slice of the kept arguments.

    Of several kept arguments, the slice is a tuple.
    """
    count = iter(range(len(plan.inputs)))
    trees = [pair.tree.unflatten([next(count) for _ in pair.inputs]) for pair in pairs]
    tree = jax.tree.structure(tuple(trees) if len(trees) > 1 else trees[0])
    values = [plan.inputs[i] for pair in pairs for i in pair.inputs]
    return {
        "tree": pytrees.describe(tree),
        "wide": any(v.dtype in WIDE for v in values),
        "names": [v.name for v in values],
        "types": [f"{v.dtype}{[*v.shape]}" for v in values],
        "raw": [[str(raw_type(v).dtype), [*raw_type(v).shape]] for v in values],
    }
