"""The results of a call that stay for the next one, on the driver of an engine.

Input: handles among the arguments of a call, and its results. Output: what the stages
take in the place of these handles, and handles of the results that stay.

Invariants: what an engine's workers have stays with them (`WorkerSlices`); of an engine
whose workers have nothing between stages, the handle has the arrays. A dropped group
keeps the slice that it had before the call.

Sharp edges: slices end with the workers that have them, which their `generation` tells.
A kept result of a loop is with the workers only if all slices are (Flower).
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from drjax._errors import DrjaxValueError
from drjax._jaxprs.prng_keys import from_raw, raw_type
from drjax._plan_file import pytrees
from drjax._plan_file.stage_features import WIDE
from drjax.engines.core.options import EngineOptions
from drjax.engines.slices.groups import Remote
from drjax.engines.slices.kept import Keep, Kept, KeptPair
from drjax.engines.slices.slices import Slices, as_slices, read_if_lazy
from drjax.engines.slices.worker_slices import INITIAL, Pieces, WorkerSlices
from drjax.plan import Plan, Value


class KeptResults:
    """What stays between the calls of a `Runner`, and how calls take and return it.

    A kept result is one that is an argument of the next call, a kept argument. The
    caller has a handle for it, a `Kept`. `keep` is the argument `keep` of an engine's
    `compile`. It is an error if it does not fit the plan, or if there is a checkpoint
    and the workers give no slices away. The engine's `stays` says which slices its
    workers have between stages.

    Attributes:
      stays: For each of `plan.outputs` whether it stays.
      staying_values: Those that stay, in their order.
      initial: A description, as JSON data, of one group's slice of the kept arguments:
        structure, names and types. Workers that load these slices themselves before the
        first call check them against it. None if nothing is kept.
    """

    def __init__(
        self,
        plan: Plan,
        keep: dict[Any, Any] | None,
        engine: Any,
        options: EngineOptions,
    ):
        self._keep, self._plan, self._engine = Keep(plan, keep), plan, engine
        self._options = options
        pairs = self._keep.pairs
        self._names = {plan.outputs[i].name for pair in pairs for i in pair.outputs}
        self._inputs = [i for pair in pairs for i in pair.inputs]
        self.initial = _description_for_workers(plan, pairs) if pairs else None
        stays = {i for pair in pairs for i in pair.outputs}
        self.stays = [i in stays for i in range(len(plan.outputs))]
        self.staying_values = [plan.outputs[i] for i in sorted(stays)]
        if self._keep and engine.stays == "all" and options.checkpoint is not None:
            raise DrjaxValueError(
                "keep= and checkpoint= cannot be combined here: the slices that stay "
                "are with the clients, and no folder has them. Leave out one of the "
                "two."
            )

    def open(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Kept]]:
        """Replace each `Kept` among a call's arguments by the slices it stands for.

        The copies of the arguments have in its place a pytree of `Slices`. The list is
        of these `Kept`s, which are still valid: the caller calls their `use_up` once it
        has results. A `Kept` of another `compile`, one that was used up, or one that is
        passed as another argument is a `DrjaxValueError`.
        """
        return self._keep.open(args, kwargs, self._start)

    def _start(self, pair: KeptPair, x: object) -> list[WorkerSlices] | None:
        """Make the leaves of a kept argument that each worker loads itself, if it does.

        In the first call there is no `Kept` yet, and `x` is what the caller passed.
        Workers load their slices if it is a `Remote`, a placeholder for data that only
        workers have, and the engine's `stays` is `"all"`, as Flower's; the result has a
        `WorkerSlices` for each leaf. Nothing is loaded yet. Else the result is None:
        `x`, such as a pytree of arrays, is passed on as it is.
        """
        if not isinstance(x, Remote) or self._engine.stays != "all":
            return None
        zeros, leaves = np.zeros(self._plan.size, int), []
        for i in pair.inputs:
            # Among all kept arguments: workers have the slices of all of them.
            piece = INITIAL, self._inputs.index(i)
            value = self._plan.inputs[i]
            table = Pieces([piece], zeros, zeros)
            leaves.append(WorkerSlices(value, table, self._engine))
            leaves[-1].held = True  # by this call, which begins after this
        return leaves

    def inputs(self, inputs: list[Any]) -> list[Any]:
        """Return the plan's inputs as stages take them.

        It is an `EngineError` if the workers that had the slices of one have ended.
        """
        return [x.opened() if isinstance(x, Slices) else x for x in inputs]

    def staying(
        self, values: Sequence[Value], read: Collection[str] = ()
    ) -> tuple[bool, ...]:
        """Return for each output of a stage whether its slices stay with the workers.

        `values` are the outputs that are read later, and `read` are the names of those
        that workers read from each other. If the engine's `stays` is `"all"`, the
        slices of all of `values` stay; if it is `"kept"`, those of results that the
        argument `keep` names, and those in `read`. A checkpoint cannot have slices of
        workers: with it, workers read none from each other. () if none stays.
        """
        if self._engine.stays == "all":
            return (True,) * len(values)
        names = self._names
        if self._options.checkpoint is None:
            names = names.union(read)
        stay = tuple(v.name in names for v in values)
        return stay if self._engine.stays and any(stay) else ()

    def split(
        self, outputs: list[Any], inputs: list[Any], alive: np.ndarray
    ) -> list[Any]:
        """Take the results that the argument `keep` names out of the outputs of a call.

        Each of them is the argument of the next call in place of one of this call; a
        group that was dropped (`alive`, bool `[n]`, is false) gets its slice of that
        one. The result has `Slices` for each output that is taken out, else None; in
        `outputs`, which is changed, these are None.
        """
        leaves: list[Any] = [None] * len(outputs)
        for pair in self._keep.pairs:
            for out, i in zip(pair.outputs, pair.inputs, strict=True):
                value = self._plan.outputs[out]
                new = as_slices(value, outputs[out])
                x = leaves[out] = new.replacing(value, inputs[i], alive)
                x.held, outputs[out] = True, None
        return leaves

    def results(self, tree: Any, leaves: list[Any]) -> Any:
        """Put a new handle, a `Kept`, in the place of each kept result.

        `tree` is the result of the planned function, with anything in the places of
        kept results, and `leaves` what `split` returned.
        """
        return self._keep.results(tree, leaves, self._fetch)

    def _fetch(self, _: KeptPair, leaves: Sequence[Slices]) -> list[jax.Array]:
        """Copy the slices that a `Kept` stands for to the caller, for `Kept.fetch`.

        The arrays are new, `[..., n, ...]`, with the group axis where the plan has it.
        It is an `EngineError` if the workers that had the slices have ended, and a
        `DrjaxTypeError` if they give none away, as Flower's.
        """
        arrays = []
        for x in leaves:
            taken = x.opened()
            # Without x64 in the plan's precision, 64-bit values would be cast.
            with jax.enable_x64(
                bool(jax.config.read("jax_enable_x64")) or x.dtype in WIDE
            ):
                whole = np.moveaxis(np.array(read_if_lazy(taken)), 0, x.value.axis)
                arrays.append(from_raw(jax.numpy.asarray(whole), x.dtype))
        return arrays


def _description_for_workers(plan: Plan, pairs: Sequence[KeptPair]) -> dict[str, Any]:
    """Describe one group's slice of the kept arguments, as JSON data for workers.

    Before the first call workers may load these slices themselves, and check them
    against the description. Of several kept arguments, the slice is a tuple, in the
    order of `pairs`, of which there is one at least.

    It has `tree`, the structure of the slice; `wide`, whether it has 64-bit values; for
    each leaf, `names` and `types` for errors and checks; and `raw`, its dtype and shape
    as numpy has it, with random keys as integers.
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
