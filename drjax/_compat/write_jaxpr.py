"""Writing a jaxpr: of equations that exist already, without tracing them again.

Input: equations, and what stands for their operands. Output: a closed jaxpr, which has
the equations that a trace of their primitives would have. Where a trace could have
others, `NotWritten` is raised, and the caller traces.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax._src import config, core, dtypes, source_info_util
from jax._src.interpreters import partial_eval as pe

from drjax._compat.jax_types import ShapedArray
from drjax._compat.jaxprs import (
    closed,
    is_plain,
    is_staged_as_it_is,
    jaxpr_consts,
    open_jaxpr,
    pointwise_result,
)
from drjax._compat.types import Atom, Aval, ClosedJaxpr, Eqn, Params, Var


class NotWritten(Exception):
    """The equations have to be traced: JAX decides what they, or their types, are."""


def jaxpr_of_equations(
    eqns: Sequence[Eqn],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    consts: Mapping[Var, Any],
) -> ClosedJaxpr:
    """Make a closed jaxpr of equations as they are.

    `consts` are the values of variables that the equations do not define, scalars.
    """
    checked = _Checked()
    if not all(checked.is_plain(v.aval) for v in invars):
        raise NotWritten
    new = []
    literals: dict[Any, Any] = {}
    for eqn in eqns:
        for v in eqn.outvars:
            if not checked.is_plain(v.aval):
                raise NotWritten
        used = False
        for v in eqn.invars:
            if type(v) is not core.Literal and v in consts:
                used = True
                if v not in literals:
                    literals[v] = literal_of(consts[v])
        if used:
            ins = [
                v if type(v) is core.Literal else literals.get(v, v) for v in eqn.invars
            ]
            eqn = eqn.replace(invars=ins)
        checked.check(eqn, eqn.invars)
        new.append(eqn)
    if any(v in consts for v in outvars):
        raise NotWritten
    return _jaxpr(invars, outvars, new)


class Writer:
    """A jaxpr to which copies of equations are written, for other operands.

    `args` are its arguments, of types that say no more than a shape and a dtype. What
    is written has no effects, and no constants but literals.
    """

    def __init__(self, types: Sequence[tuple[tuple[int, ...], Any]]) -> None:
        self._checked, self._eqns = _Checked(), list[Eqn]()
        if config.eager_constant_folding.value:
            raise NotWritten
        # By shape and dtype one object, as equal types are then the same.
        self._types = {t: ShapedArray(*t) for t in dict.fromkeys(types)}
        if not all(map(self._checked.is_plain, self._types.values())):
            raise NotWritten
        self.args = [core.Var(self._types[t]) for t in types]
        self._slices = dict[tuple[int, int | None], tuple[Aval, Aval]]()

    def jaxpr(self, jaxpr: ClosedJaxpr, operands: Sequence[Atom]) -> list[Atom]:
        """Write the equations of a jaxpr, and return what its results are here."""
        if jaxpr_consts(jaxpr):
            raise NotWritten
        raw = open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(raw.invars, operands, strict=True))
        for v, x in env.items():
            if x.aval is not v.aval and x.aval != v.aval:
                raise NotWritten
        read = lambda v: v if type(v) is core.Literal else env[v]
        for eqn in raw.eqns:
            avals = [v.aval for v in eqn.outvars]
            outs = self._write(eqn, [*map(read, eqn.invars)], avals, eqn.params)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [*map(read, raw.outvars)]

    def pointwise(
        self, eqn: Eqn, operands: Sequence[Atom], axis: int | None, params: Params
    ) -> list[Atom]:
        """Write a pointwise equation of one result, of slices along an axis or scalars.

        Dtypes are those of its operands; they decide that of the result.
        """
        whole: Any = eqn.outvars[0].aval
        out = self._slice(whole, axis)
        for x in operands:
            if x.aval is not out:
                break
        else:
            return self._write(eqn, operands, [out], params)
        shape = out.shape
        avals: list[Any] = []
        for x, v in zip(operands, eqn.invars, strict=True):
            constant = type(x) is core.Literal
            if constant and x is not v and x.aval != v.aval:
                raise NotWritten
            avals.append(None if constant else x.aval)
        if pointwise_result(eqn, avals, shape, self._checked.is_plain) is None:
            raise NotWritten
        return self._write(eqn, operands, [out], params)

    def _slice(self, whole: Aval, axis: int | None) -> Aval:
        """Return the type of a slice along an axis, one object for equal types."""
        key = id(whole), axis
        if key not in self._slices:
            if whole.weak_type:
                raise NotWritten
            shape = tuple(n for i, n in enumerate(whole.shape) if i != axis)
            kind = shape, whole.dtype
            aval = self._types.get(kind) or ShapedArray(*kind)
            # The whole is kept, so that no other has its id.
            self._slices[key] = self._types.setdefault(kind, aval), whole
        return self._slices[key][0]

    def closed(self, results: Sequence[Atom]) -> ClosedJaxpr:
        """Return the jaxpr that computes these results."""
        return _jaxpr(self.args, results, self._eqns)

    def _write(
        self, eqn: Eqn, operands: Sequence[Atom], avals: Sequence[Aval], params: Params
    ) -> list[Any]:
        self._checked.check(eqn, operands)
        if eqn.effects:
            raise NotWritten
        source, names = eqn.source_info, source_info_util.current_name_stack()
        if names.stack:
            source = source.replace(name_stack=names + source.name_stack)
        outs: Any = [core.Var(aval) for aval in avals]
        new: Any = core.JaxprEqn(
            list(operands), outs, eqn.primitive, params, eqn.effects, source, eqn.ctx
        )
        self._eqns.append(new)
        return outs


class _Checked:
    """Whether equations may be written, with what was asked about them before."""

    def __init__(self) -> None:
        self._ctx = core.current_jaxpr_eqn_context()
        self._avals = dict[int, Aval]()

    def check(self, eqn: Eqn, operands: Sequence[Atom]) -> None:
        """Raise if the context is not the one that traces, or JAX stages by a rule."""
        if eqn.ctx is not self._ctx or not is_staged_as_it_is(eqn, operands):
            raise NotWritten

    def is_plain(self, aval: Aval) -> bool:
        if id(aval) not in self._avals:
            if not is_plain(aval):
                return False
            # It is kept, so that no other has its id.
            self._avals[id(aval)] = aval
        return True


def literal_of(x: Any) -> core.Literal:
    """Make a literal of a scalar, as tracing does."""
    if isinstance(x, core.Tracer) or np.ndim(x):
        raise NotWritten
    x = dtypes.canonicalize_value(x)
    if not core.is_literalable(x):
        raise NotWritten
    return core.Literal(x, core.typeof(x))


def _jaxpr(
    invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]
) -> ClosedJaxpr:
    effects = core.no_effects
    if any(eqn.effects for eqn in eqns):
        effects = pe.make_jaxpr_effects((), invars, outvars, eqns)
    info: Any = core.DebugInfo("stage", "", None, None)
    raw = core.Jaxpr((), list(invars), list(outvars), list(eqns), effects, info)
    return closed(raw)
