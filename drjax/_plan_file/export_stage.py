"""From a stage to its exported functions.

Input: a stage of a plan, and of a local stage what its batched function reduces and
which slices it returns. Output: an `ExportedStage`, or an error if the stage cannot be
exported.

Invariants: equal stages give equal bytes, for all platforms at once; no code of users,
no file names and no mesh is in them. Random bits of a group are the same in every
batch.

Sharp edges: the batched function is exported for a symbolic number of groups. Where JAX
cannot batch the work for that, its groups run one after another (`sequential`).
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from drjax import _compat
from drjax._compat.types import Array
from drjax._errors import PlanFileError
from drjax._jaxprs.eval_jaxpr import evaluate
from drjax._jaxprs.prng_keys import from_raw, is_key, raw_type, to_raw
from drjax._plan_file.batches import OverGroups, combined, over_groups, sequential
from drjax._plan_file.custom_calls import custom_calls_in
from drjax._plan_file.exported_stage import PLATFORMS, ExportedFunction, ExportedStage
from drjax._plan_file.stage_features import features_of
from drjax._sharding.group_mesh import lowering_for
from drjax.plan import Fold, Reduce, Stage, Value

_HOISTED = 1024  # constants of so many bytes are members of the file
_GROUP = jax.ShapeDtypeStruct((), np.int32)
_MASK = jax.ShapeDtypeStruct((), np.bool_)


class Exporter:
    """The export of one stage by `jax.export`, as one function or two.

    Constants of the stage that are random keys, or arrays of 1 kB or more, are hoisted:
    the exported functions take them as their first arguments, so that the code does not
    hold them. Smaller constants are part of the code.

    The stage has outputs. `location` is its round and kind, for errors:
    `round 1, groups`. `origin` is the dict that `origin_of` returns.
    """

    def __init__(self, stage: Stage, location: str, origin: dict[str, Any]):
        self.stage, self.location, self.origin = stage, location, origin
        self._values = list(_compat.jaxpr_consts(stage.jaxpr))
        # In the code, a constant would be in up to four members: of two functions, as
        # .jexp and as .mlirbc.
        self._hoisted = [
            i
            for i, x in enumerate(self._values)
            if is_key(x.dtype) or x.nbytes >= _HOISTED
        ]
        self._consts = [np.asarray(to_raw(self._values[i])) for i in self._hoisted]
        self._types = [raw_type(v) for v in stage.inputs]

    def server(self) -> ExportedStage:
        """Export the stage, a server stage, as one StableHLO function."""
        return self._exported_stage(*self._export("one", self._per_group, self._types))

    def local(
        self,
        reduces: Sequence[Reduce],
        kept: Sequence[Value],
        folds: Sequence[Fold] = (),
    ) -> ExportedStage:
        """Export the stage, a local stage, as two functions: per group, and batched.

        The batched function works on b groups at once, for any number b. It returns
        partial reductions of `reduces` over its groups, and states of `folds`, each
        folded over its groups, and `kept`, outputs of the stage, as slices. If JAX
        cannot batch the work for an unknown b, or if random bits would depend on the
        batch, the groups of a batch run one after another in it.
        """
        one, calls = self._export("one", self._per_group, [_GROUP, *self._types])
        # JAX infers no shapes in code for several devices: of one group they are known.
        b = 1 if self.stage.mesh else export.symbolic_shape("b")[0]
        many = lambda t: jax.ShapeDtypeStruct((b, *t.shape), t.dtype)
        types = [many(_MASK), many(_GROUP)] + [
            many(t) if value.partitioned else t
            for value, t in zip(self.stage.inputs, self._types, strict=True)
        ]

        def batch(over_groups: OverGroups) -> tuple[ExportedFunction, set[str]]:
            fn = self._batched(reduces, kept, folds, over_groups)
            return self._export("batch", fn, types)

        # vmap of a draw from an rbg key raises nothing, but yields other bits.
        in_turn = features_of(self.stage.jaxpr, self.location).sequential
        if self.stage.mesh:
            over_one = functools.partial(over_groups, self.stage, count=1)
            batched, more = batch(lambda fn, axes: over_one(fn, axes=axes))
        elif not in_turn:
            try:
                batched, more = batch(jax.vmap)
            # An error with another cause is raised again by the sequential export.
            except PlanFileError:  # what JAX cannot batch for an unknown b
                in_turn = True
        if in_turn:
            batched, more = batch(sequential)
        return self._exported_stage(one, calls | more, batched, in_turn)

    def _exported_stage(
        self,
        one: ExportedFunction,
        calls: set[str],
        batch: ExportedFunction | None = None,
        sequential: bool = False,
    ) -> ExportedStage:
        """Make the `ExportedStage` from exported functions, with jaxpr and constants.

        `one` is the function of the server or of one group, and `batch` that of a batch
        of groups. `calls` are the names of the custom calls in the code of both.
        `sequential`: the groups of a batch run one after another.
        """
        # Addresses of functions differ between processes; equal plans have equal files.
        text = re.sub(r" at 0x[0-9a-f]+", "", str(self.stage.jaxpr))
        consts, calls_ = tuple(self._consts), tuple(sorted(calls))
        return ExportedStage(one, batch, sequential, text, consts, calls_, self.origin)

    def _per_group(self, *args: Array) -> list[Array]:
        """Run the stage: the function that is exported, of the server or of one group.

        It takes first the hoisted constants; then, for a local stage, the group index,
        int32 `[]`; then the inputs of the stage, one slice of each partitioned value.
        Random keys are raw key data, also in the outputs.
        """
        count, values = len(self._hoisted), list(self._values)
        for i, x in zip(self._hoisted, args[:count], strict=True):
            values[i] = from_raw(x, values[i].dtype)
        inputs = list(args[count:])  # the group index first, if it takes that
        first = len(inputs) - len(self.stage.inputs)
        for i, value in enumerate(self.stage.inputs, first):
            inputs[i] = from_raw(inputs[i], value.dtype)
        outs = evaluate(self.stage.jaxpr, inputs, consts=values)
        return list(map(to_raw, outs))

    def _batched(
        self,
        reduces: Sequence[Reduce],
        kept: Sequence[Value],
        folds: Sequence[Fold],
        over_groups: OverGroups,
    ) -> Callable[..., list[Array]]:
        """Make the function of b groups that is to be exported, for any b.

        `over_groups(fn, in_axes)` maps `fn` over the groups, that is, over axis 0 of
        those arguments whose entry of `in_axes` is 0: `jax.vmap`, or `sequential`.

        The function goes from `(*consts, mask, groups, *inputs)` to the list
        `[*partials, *states, *slices]`. It takes:

        * `consts`: The hoisted constants of the stage.
        * `mask`: Bool `[b]`, which of the groups take part in reductions and folds.
        * `groups`: The group indices, int32 `[b]`.
        * `inputs`: The inputs of the stage: slices `[b, *s]` of partitioned values, and
          global values.

        It returns:

        * `partials`: For each of `reduces` the partial reduction over those groups
          whose mask is true.
        * `states`: For each of `folds` the leaves of the state of those groups, folded
          in the order of the batch; without meaning if no mask is true.
        * `slices`: Of each of `kept` the slices of all b groups, `[b, *s]`. Also groups
          whose mask is false are computed, from their indices and inputs, and have
          their slices.
        """
        count = len(self._hoisted)
        axes = [None] * count + [0]
        axes += [0 if v.partitioned else None for v in self.stage.inputs]

        def batch(*args: Array) -> list[Array]:
            mask, others = args[count], [*args[:count], *args[count + 1 :]]
            outs = over_groups(self._per_group, axes)(*others)
            partials, slices = combined(
                self.stage, reduces, folds, kept, outs, mask, args[count + 2 :]
            )
            return [*partials, *slices]

        return batch

    def _export(
        self,
        name: str,
        fn: Callable[..., list[Array]],
        types: Sequence[jax.ShapeDtypeStruct],
    ) -> tuple[ExportedFunction, set[str]]:
        """Export a function for all of `PLATFORMS`.

        `name` is the name of the function in the StableHLO. It takes the hoisted
        constants first, and then arguments of these types; random keys have the type of
        raw key data. The second result is the names of the custom calls in its code.
        """

        def run(*args: Array) -> list[Array]:
            return fn(*args)

        # jit names the exported function by it; all would be called `run` otherwise.
        run.__name__ = name
        consts = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._consts]
        try:
            # Other runtimes pass all inputs: jit would remove unused parameters.
            jitted = jax.jit(run, keep_unused=True)
            with (
                _compat.frames_in_locations(0),  # file names of this machine stay out
                lowering_for(self.stage.mesh, self.stage.jaxpr),
            ):
                exported = export.export(jitted, platforms=PLATFORMS)(*consts, *types)
            data = bytes(exported.serialize()), bytes(exported.mlir_module_serialized)
        except (KeyError, NotImplementedError, TypeError, ValueError) as error:
            why = str(error)
            # JAX looks dtypes up in a table, which lacks some, such as uint2.
            if isinstance(error, KeyError):
                why = f"JAX's format has no {why}. Convert it to another dtype."
            raise PlanFileError(
                f"{self.location} ({self.stage.name}) cannot be exported for "
                f"{', '.join(PLATFORMS)} such that other versions of JAX can read it: "
                f"{why}"
            ) from error
        return ExportedFunction(*data, self.location), custom_calls_in(data[1])
