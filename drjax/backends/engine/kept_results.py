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
    """A kept result that the driver has as an array, as its workers have nothing.

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
    """What stays between the calls of a `Runner`, and how calls take and return it.

    Args:
      plan: The plan.
      keep: Which partitioned results are arguments of the next call: the argument
        `keep` of an engine's `compile`, a dict or None.
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
        self.initial = _description_for_workers(plan, pairs) if pairs else None
        if self._keep and engine.stays and options.checkpoint is not None:
            raise DrjaxValueError(
                "keep= and checkpoint= cannot be combined here: the slices that stay "
                "are with the workers, and no folder has them. Leave out one of the "
                "two; what .fetch() of a handle returns can be saved."
            )

    def open(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, list[Kept]]:
        """Replace the handles among the arguments of a call by their slices.

        Args:
          args: The positional arguments.
          kwargs: The keyword arguments.

        Returns:
          `(args, kwargs, handles)`: the arguments, with `WorkerSlices` or `HostSlices`
          in the places of handles; and the handles, which the caller uses up once it
          has results.
        """
        return self._keep.open(args, kwargs, self._start)

    def _start(self, pair: KeptPair, x: Any) -> list[WorkerSlices] | None:
        """The leaves of a kept argument in the first call, if workers have its data.

        Args:
          pair: The result and the argument.
          x: What the caller passed as the argument.

        Returns:
          A `WorkerSlices` for each leaf, if `x` is a `Remote` and workers keep all
          slices; else None: `x` is passed on as it is.
        """
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
        """The inputs of the plan as stages take them: arrays, `Lazy` or `WorkerSlices`.

        Args:
          inputs: The flat inputs of the plan; `HostSlices` are replaced by their
            arrays.

        Raises:
          EngineError: The workers that had slices have ended.
        """
        for x in inputs:
            if isinstance(x, WorkerSlices):
                self._check_workers_live(x)
        return [x.slices if isinstance(x, HostSlices) else x for x in inputs]

    def _check_workers_live(self, x: WorkerSlices) -> None:
        """Raise `EngineError` if the workers that had these slices have ended."""
        if x.generation != self._engine.generation:
            raise EngineError(
                f"The workers that had the slices of {x.value.name} have ended, by "
                "close() or with their engine. Start again from arrays, such as those "
                "that .fetch() returned before."
            )

    def staying(self, values: Sequence[Value]) -> tuple[bool, ...]:
        """Which outputs of a stage stay with the workers.

        Args:
          values: The outputs of the stage that are read later.

        Returns:
          A bool for each; () if none stays.
        """
        if self._engine.stays == "all":
            return (True,) * len(values)
        stay = tuple(v.name in self._names for v in values)
        return stay if self._engine.stays and any(stay) else ()

    def split(self, outputs: list[Any], inputs: list[Any], alive: np.ndarray) -> list:
        """Take the kept results out of the outputs of a call, for their handles.

        Args:
          outputs: The outputs of the plan; those that stay are set to None.
          inputs: The inputs of the call: dropped groups keep their slices of these.
          alive: Which groups take part, bool `[n]`; the others were dropped.

        Returns:
          For each output a `WorkerSlices` or `HostSlices`; None if it does not stay.
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
        """Put handles in the places of kept results.

        Args:
          tree: The result of the planned function; what stays may be anything.
          leaves: What `split` returned for each output.

        Returns:
          The result, with a `Kept` for each kept result.
        """
        return self._keep.results(tree, leaves, self._fetch)

    def _fetch(self, _: KeptPair, leaves: Sequence[Any]) -> list[jax.Array]:
        """Copy the slices of a handle to the caller, for `Kept.fetch`.

        Args:
          _: The kept pair, not used.
          leaves: The `WorkerSlices` or `HostSlices` of the result.

        Returns:
          For each an array with the group axis where the plan has it.
        """
        arrays = []
        for x in leaves:
            if isinstance(x, WorkerSlices):
                self._check_workers_live(x)
            # Without x64 in the plan's precision, 64-bit values would be cast.
            with jax.enable_x64(
                bool(jax.config.read("jax_enable_x64")) or x.dtype in WIDE
            ):
                whole = np.moveaxis(np.array(read_if_lazy(x)), 0, x.value.axis)
                arrays.append(from_raw(jax.numpy.asarray(whole), x.dtype))
        return arrays


def _description_for_workers(plan: Plan, pairs: Sequence[KeptPair]) -> dict[str, Any]:
    """Describe one group's slice of the kept arguments, as JSON data for workers.

    Workers check the slices that they load themselves before the first call against it.
    Of several kept arguments, the slice is a tuple.

    Returns:
      A dict: `tree`, the structure of the slice; `wide`, whether it has 64-bit values;
      for each leaf, `names` and `types` for errors and checks; and `raw`, its dtype and
      shape as numpy has it, with random keys as integers.
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
