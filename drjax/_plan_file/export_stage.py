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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from drjax import _compat
from drjax._compat.types import Array
from drjax._errors import PlanFileError
from drjax._jaxprs.eval_jaxpr import evaluate
from drjax._jaxprs.prng_keys import from_raw, is_key, raw_type, to_raw
from drjax._plan_file.custom_calls import custom_calls_in
from drjax._plan_file.exported_stage import PLATFORMS, ExportedFunction, ExportedStage
from drjax._plan_file.stage_features import features_of
from drjax._primitives.reduce_ops import REDUCE_OPS, ReduceOp
from drjax.plan import Fold, Reduce, Stage, Value

_HOISTED = 1024  # constants of so many bytes are members of the file
_GROUP = jax.ShapeDtypeStruct((), np.int32)
_MASK = jax.ShapeDtypeStruct((), np.bool_)

# `jax.vmap` or `_sequential`: from a function of one group, and the axes of its
# arguments, to a function of a batch.
OverGroups: TypeAlias = Callable[..., Callable[..., list[Array]]]


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
        (b,) = export.symbolic_shape("b")
        many = lambda t: jax.ShapeDtypeStruct((b, *t.shape), t.dtype)
        types = [many(_MASK), many(_GROUP)] + [
            many(t) if value.partitioned else t
            for value, t in zip(self.stage.inputs, self._types, strict=True)
        ]

        def batch(over_groups: OverGroups) -> tuple[ExportedFunction, set[str]]:
            fn = self._batched(reduces, kept, folds, over_groups)
            return self._export("batch", fn, types)

        # vmap of a draw from an rbg key raises nothing, but yields other bits.
        sequential = features_of(self.stage.jaxpr, self.location).sequential
        if not sequential:
            try:
                batched, more = batch(jax.vmap)
            # An error with another cause is raised again by the sequential export.
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
        those arguments whose entry of `in_axes` is 0: `jax.vmap`, or `_sequential`.

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
        names = [v.name for v in self.stage.outputs]
        sources = [names.index(r.source.name) for r in reduces]
        stacked = [names.index(v.name) for v in kept]
        count = len(self._hoisted)
        positions = {v.name: i for i, v in enumerate(self.stage.inputs, count + 1)}
        axes = [None] * count + [0]
        axes += [0 if v.partitioned else None for v in self.stage.inputs]

        def batch(*args: Array) -> list[Array]:
            mask, others = args[count], [*args[:count], *args[count + 1 :]]
            outs = over_groups(self._per_group, axes)(*others)
            partials = []
            for reduce, i in zip(reduces, sources, strict=True):
                op = REDUCE_OPS[reduce.op]
                partials.append(op.local(_masked(op, outs[i], mask)))
            for fold in folds:
                consts = [others[positions[v.name]] for v in fold.consts]
                states = [outs[names.index(v.name)] for v in fold.sources]
                partials += _folded(fold, consts, states, mask)
            return [*partials, *(outs[i] for i in stacked)]

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
            with _compat.frames_in_locations(0):  # file names of this machine stay out
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


def _sequential(
    fn: Callable[..., list[Array]], axes: list[int | None]
) -> Callable[..., list[Array]]:
    """Map `fn` over groups one after another, by `lax.map`, in place of `jax.vmap`.

    `axes` has for each argument of `fn`, a function of one group, 0 if each group has
    its own, or None if it is global. The result takes arrays `[b, *s]` in place of
    those with axis 0, and stacks each of its results to `[b, *s]`.
    """

    def run(*args: Array) -> list[Array]:
        def one(slices: Iterable[Array]) -> list[Array]:
            slices = iter(slices)
            return fn(
                *(
                    x if axis is None else next(slices)
                    for x, axis in zip(args, axes, strict=True)
                )
            )

        # Never empty, as lax.map needs a length: the group index is one of them.
        slices = [x for x, axis in zip(args, axes, strict=True) if axis is not None]
        return lax.map(one, slices)

    return run


def _folded(
    fold: Fold, consts: list[Array], states: list[Array], mask: Array
) -> list[Array]:
    """Fold the states of a batch of groups one after another, without masked ones.

    `consts` are the arrays that the function closes over. `states` are the leaves of
    the b groups' states, `[b, *s]`, and the result is those of the combined state,
    `[*s]`; in both, random keys are raw key data. `mask` is bool `[b]`: if none is
    true, the result has no meaning.
    """
    stage = fold.combine

    def combine(left: list[Array], right: list[Array]) -> list[Array]:
        args = [*consts, *left, *right]
        args = [from_raw(x, v.dtype) for x, v in zip(args, stage.inputs, strict=True)]
        return list(map(to_raw, evaluate(stage.jaxpr, args)))

    def step(
        carry: tuple[list[Array], Array], x: Sequence[Array]
    ) -> tuple[tuple[list[Array], Array], None]:
        total, started = carry
        *new, real = x
        # Masked slots hold copies of states, so that no other ones are combined.
        both = combine(total, new)
        chosen = zip(both, new, total, strict=True)
        select = lambda b, n, t: jnp.where(real, jnp.where(started, b, n), t)
        return ([select(*xs) for xs in chosen], started | real), None

    first = [x[0] for x in states]
    (total, _), _ = lax.scan(step, (first, jnp.bool_(False)), (*states, mask))
    return total


def _masked(op: ReduceOp, x: Array, mask: Array) -> Array:
    """Replace the slices of masked groups, so that they do not change a reduction.

    Of the slices `x`, `[b, *s]`, those for which `mask`, bool `[b]`, is false become
    the identity of the reduction, such as 0 for a sum.
    """
    chosen = lax.broadcast_in_dim(mask, x.shape, (0,))
    # Not a product with the mask: 0 * NaN is NaN.
    return jnp.where(chosen, x, jnp.asarray(op.identity(x.dtype), x.dtype))
