"""From a stage to its exported forms, and what of a stage cannot be exported."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from drjax import _compat
from drjax._errors import PlanFileError
from drjax._partials import identity, partial
from drjax.interpret.files.forms import (
    PLATFORMS,
    Form,
    Forms,
    from_raw,
    is_key,
    key_impl,
    raw_type,
    to_raw,
)
from drjax.plan import Reduce, Stage, Value

_HOISTED = 1024  # constants of so many bytes are members of the file
_GROUP = jax.ShapeDtypeStruct((), np.int32)


class Exporter:
    """Exports the forms of one stage.

    Args:
      stage: The stage.
      where: Where it is in the plan, for errors.
    """

    def __init__(self, stage: Stage, where: str):
        self.stage, self.where = stage, where
        self._values = list(_compat.jaxpr_consts(stage.jaxpr))
        self._hoisted = [
            i for i, x in enumerate(self._values)
            if is_key(x.dtype) or x.nbytes >= _HOISTED
        ]  # fmt: skip
        self.consts = [np.asarray(to_raw(self._values[i])) for i in self._hoisted]

    def server(self, origin: dict[str, Any]) -> Forms:
        """The form of a stage of the server."""
        one, calls = self._export("one", self._one, self._types())
        return self._forms(one, None, calls, origin)

    def local(
        self, reduces: Sequence[Reduce], rows: Sequence[Value], origin: dict[str, Any]
    ) -> Forms:
        """The forms of a stage of the groups.

        Args:
          reduces: What of its outputs is reduced in a batch.
          rows: The outputs that a batch gives as rows.
          origin: Where and how it is exported.
        """
        one, calls = self._export("one", self._one, [_GROUP, *self._types()])
        (b,) = export.symbolic_shape("b")
        many = lambda t: jax.ShapeDtypeStruct((b, *t.shape), t.dtype)
        mask = jax.ShapeDtypeStruct((), np.bool_)
        types = [
            many(t) if value.partitioned else t
            for value, t in zip(self.stage.inputs, self._types(), strict=True)
        ]
        batch = self._batch(reduces, rows)
        form, more = self._export("batch", batch, [many(mask), many(_GROUP), *types])
        return self._forms(one, form, sorted({*calls, *more}), origin)

    def _forms(self, one, batch, calls, origin) -> Forms:
        text = re.sub(r" at 0x[0-9a-f]+", "", str(self.stage.jaxpr))
        return Forms(one, batch, text, tuple(self.consts), tuple(calls), origin)

    def _types(self) -> list:
        return [raw_type(v) for v in self.stage.inputs]

    def _one(self, *args):
        count = len(self._hoisted)
        values, args = list(self._values), list(args)
        for i, x in zip(self._hoisted, args[:count], strict=True):
            values[i] = from_raw(x, values[i].dtype)
        inputs, first = args[count:], len(args) - count - len(self.stage.inputs)
        for i, value in enumerate(self.stage.inputs, first):
            inputs[i] = from_raw(inputs[i], value.dtype)
        outs = _compat.evaluate(self.stage.jaxpr, inputs, lambda *_: None, values)
        return list(map(to_raw, outs))

    def _batch(self, reduces: Sequence[Reduce], rows: Sequence[Value]) -> Callable:
        names = [v.name for v in self.stage.outputs]
        sources = [names.index(r.source.name) for r in reduces]
        kept = [names.index(v.name) for v in rows]
        count = len(self._hoisted)
        axes = [0 if v.partitioned else None for v in self.stage.inputs]

        def batch(*args):
            mask, others = args[count], [*args[:count], *args[count + 1 :]]
            outs = jax.vmap(self._one, [*[None] * count, 0, *axes])(*others)
            partials = []
            for reduce, i in zip(reduces, sources, strict=True):
                if reduce.op in ("max", "min") and i in kept:
                    # To be compared with their extremum: computed once.
                    outs[i] = lax.optimization_barrier(outs[i])
                partials.append(partial(reduce.op, _masked(reduce.op, outs[i], mask)))
            return [*partials, *(outs[i] for i in kept)]

        return batch

    def _export(self, name: str, fn: Callable, types: list) -> tuple[Form, list[str]]:
        def run(*args):
            return fn(*args)

        run.__name__ = name
        consts = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.consts]
        try:
            jitted = jax.jit(run, keep_unused=True)
            with _compat.frames_in_locations(0):  # of nobody's file system
                found = export.export(jitted, platforms=PLATFORMS)(*consts, *types)
            data = bytes(found.serialize()), bytes(found.mlir_module_serialized)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise PlanFileError(
                f"{self.where} ({self.stage.name}) has no form for "
                f"{', '.join(PLATFORMS)} that other versions of JAX can read: {error}"
            ) from error
        return Form(*data, self.where), _custom_calls(found.mlir_module())


def _masked(op: str, x, mask):
    chosen = lax.broadcast_in_dim(mask, x.shape, (0,))
    return jnp.where(chosen, x, jnp.asarray(identity(op, x.dtype), x.dtype))


_CUSTOM_CALL = re.compile(r'custom_call @(?:"([^"]+)"|([\w.$]+))')
_OF_JAX = {"shape_assertion"}  # checked when shapes become known


def _custom_calls(text: str) -> list[str]:
    found = {quoted or plain for quoted, plain in _CUSTOM_CALL.findall(text)}
    return sorted(found - _OF_JAX)


# ---------------------------------------------------------------------------------
# What is in a stage

_WIDE = {np.dtype(t) for t in ("int64", "uint64", "float64", "complex128")}


def survey(stages: Sequence[tuple[str, Stage]]) -> tuple[bool, list[str]]:
    """`(whether there are 64-bit values, the implementations of random keys)`.

    Raises:
      PlanFileError: A stage calls back into Python.
    """
    wide, keys = False, set()
    for where, stage in stages:
        for var in _variables(stage.jaxpr, where):
            dtype = getattr(var.aval, "dtype", None)
            wide = wide or dtype in _WIDE
            if dtype is not None and is_key(dtype):
                keys.add(key_impl(dtype))
    return wide, sorted(keys)


def _variables(jaxpr: Any, where: str) -> Iterator[Any]:
    raw = _compat.open_jaxpr(jaxpr)
    yield from (*raw.constvars, *raw.invars)
    for eqn in raw.eqns:
        name = eqn.primitive.name
        if "callback" in name or name == "debug_print":
            raise PlanFileError(
                f"{where} calls back into Python: {name} at "
                f"{_compat.source_line(eqn)}. A plan file runs without its source: "
                "take the call out, or return what it needs as a result."
            )
        yield from eqn.outvars
        for inner in _compat.jaxprs_in(eqn.params):
            yield from _variables(inner, where)
