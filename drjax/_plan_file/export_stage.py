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

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from drjax import _compat
from drjax._errors import PlanFileError
from drjax._jaxprs.eval_jaxpr import evaluate
from drjax._jaxprs.prng_keys import from_raw, is_key, raw_type, to_raw
from drjax._plan_file.custom_calls import custom_calls_in
from drjax._plan_file.exported_stage import PLATFORMS, ExportedFunction, ExportedStage
from drjax._plan_file.stage_features import features_of
from drjax._primitives.reduce_ops import REDUCE_OPS, ReduceOp
from drjax.plan import Reduce, Stage, Value

_HOISTED = 1024  # constants of so many bytes are members of the file
_GROUP = jax.ShapeDtypeStruct((), np.int32)
_MASK = jax.ShapeDtypeStruct((), np.bool_)


class Exporter:
    """Exports the functions of one stage.

    Args:
      stage: The stage.
      location: Round and stage in the plan, for errors.
      origin: The versions and platforms of the export, from `origin_of`.
    """

    def __init__(self, stage: Stage, location: str, origin: dict[str, Any]):
        self.stage, self.location, self.origin = stage, location, origin
        self._values = list(_compat.jaxpr_consts(stage.jaxpr))
        self._hoisted = [
            i
            for i, x in enumerate(self._values)
            if is_key(x.dtype) or x.nbytes >= _HOISTED
        ]
        self._consts = [np.asarray(to_raw(self._values[i])) for i in self._hoisted]
        self._types = [raw_type(v) for v in stage.inputs]

    def server(self) -> ExportedStage:
        """This stage, a server stage, exported as one StableHLO function.

        Without groups, it needs no function for a batch.
        """
        return self._exported_stage(*self._export("one", self._per_group, self._types))

    def local(self, reduces: Sequence[Reduce], kept: Sequence[Value]) -> ExportedStage:
        """This stage, a local stage, exported as two functions: per group, and batched.

        Args:
          reduces: The reductions that the batched function computes over its groups.
          kept: The outputs that the batched function returns as slices.

        Raises:
          PlanFileError: JAX cannot export the stage, or it calls back into Python.
        """
        one, calls = self._export("one", self._per_group, [_GROUP, *self._types])
        (b,) = export.symbolic_shape("b")
        many = lambda t: jax.ShapeDtypeStruct((b, *t.shape), t.dtype)
        types = [many(_MASK), many(_GROUP)] + [
            many(t) if value.partitioned else t
            for value, t in zip(self.stage.inputs, self._types, strict=True)
        ]

        def batch(over_groups: Callable):
            fn = self._batched(reduces, kept, over_groups)
            return self._export("batch", fn, types)

        sequential = features_of(self.stage.jaxpr, self.location).sequential
        if not sequential:
            try:
                batched, more = batch(jax.vmap)
            except PlanFileError:  # what JAX cannot batch for an unknown b
                sequential = True
        if sequential:
            batched, more = batch(_sequential)
        return self._exported_stage(one, calls | more, batched, sequential)

    def _exported_stage(
        self,
        one: ExportedFunction,
        calls: set[str],
        batch: ExportedFunction | None = None,
        sequential=False,
    ) -> ExportedStage:
        """An `ExportedStage`: these functions, the text and constants of the stage.

        Args:
          one: The function of the server or of one group.
          calls: The names of the custom calls in both functions.
          batch: The function of a batch of groups; None for a server stage.
          sequential: Whether the groups of a batch run one after another.
        """
        text = re.sub(r" at 0x[0-9a-f]+", "", str(self.stage.jaxpr))
        consts, calls_ = tuple(self._consts), tuple(sorted(calls))
        return ExportedStage(one, batch, sequential, text, consts, calls_, self.origin)

    def _per_group(self, *args):
        """Evaluate the stage for the server or one group; this function is exported.

        `args` are the hoisted constants, for a local stage the group index, int32 `[]`,
        and the inputs. All of them and the outputs are raw: random keys are their key
        data.
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
        over_groups: Callable,
    ) -> Callable:
        """The function of b groups to export, for any b.

        It maps `(*consts, mask, groups, *inputs)` to `[*partials, *slices]`: `mask` is
        bool `[b]`, `groups` are the group indices, int32 `[b]`, and partitioned inputs
        are slices `[b, ...]`.

        Args:
          reduces: The reductions to compute over the groups whose mask is true.
          kept: The outputs to return as slices `[b, ...]`.
          over_groups: Maps the per-group function: `jax.vmap`, or `_sequential`.
        """
        names = [v.name for v in self.stage.outputs]
        sources = [names.index(r.source.name) for r in reduces]
        stacked = [names.index(v.name) for v in kept]
        count = len(self._hoisted)
        axes = [None] * count + [0]
        axes += [0 if v.partitioned else None for v in self.stage.inputs]

        def batch(*args):
            mask, others = args[count], [*args[:count], *args[count + 1 :]]
            outs = over_groups(self._per_group, axes)(*others)
            partials = []
            for reduce, i in zip(reduces, sources, strict=True):
                op = REDUCE_OPS[reduce.op]
                partials.append(op.local(_masked(op, outs[i], mask)))
            return [*partials, *(outs[i] for i in stacked)]

        return batch

    def _export(
        self, name: str, fn: Callable, types: list
    ) -> tuple[ExportedFunction, set[str]]:
        """Export a function: `(exported function, names of the custom calls in it)`.

        Args:
          name: The name of the function in the StableHLO.
          fn: The function, which takes the constants first.
          types: The types of its other arguments.

        Raises:
          PlanFileError: JAX cannot export it for all of `PLATFORMS`.
        """

        def run(*args):
            return fn(*args)

        run.__name__ = name
        consts = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._consts]
        try:
            jitted = jax.jit(run, keep_unused=True)
            with _compat.frames_in_locations(0):  # file names of this machine stay out
                exported = export.export(jitted, platforms=PLATFORMS)(*consts, *types)
            data = bytes(exported.serialize()), bytes(exported.mlir_module_serialized)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise PlanFileError(
                f"{self.location} ({self.stage.name}) cannot be exported for "
                f"{', '.join(PLATFORMS)} such that other versions of JAX can read it: "
                f"{error}"
            ) from error
        return ExportedFunction(*data, self.location), custom_calls_in(data[1])


def _sequential(fn: Callable, axes: list) -> Callable:
    """Map `fn` over groups, as `jax.vmap` would, but one after another, by `lax.map`.

    `axes` has 0 for arguments with a slice for each group, and None for global ones.
    """

    def run(*args):
        def one(slices):
            slices = iter(slices)
            return fn(
                *(
                    x if axis is None else next(slices)
                    for x, axis in zip(args, axes, strict=True)
                )
            )

        slices = [x for x, axis in zip(args, axes, strict=True) if axis is not None]
        return lax.map(one, slices)

    return run


def _masked(op: ReduceOp, x, mask):
    """Replace slices of `x`, `[b, *s]`, by the identity of `op`.

    These are the slices whose `mask`, bool `[b]`, is false: they then do not change the
    reduction.
    """
    chosen = lax.broadcast_in_dim(mask, x.shape, (0,))
    return jnp.where(chosen, x, jnp.asarray(op.identity(x.dtype), x.dtype))
