"""Inline the calls of a jaxpr: inner jits, checkpoints and custom derivative rules.

Input: a closed jaxpr. Output: an `InlinedJaxpr` with the same arguments and results,
without calls, dead equations (liveness), or equations on scalar constants only.

A call's equations stay; its derivative rules are dropped, as plans are made of programs
that are already differentiated. Loops and branches stay equations; `bodies` inlines
their jaxprs. To prepare unbatching, pointwise equations broadcast explicitly, `while`
has a scalar condition, and indices that count the groups become batch dimensions.

Invariants: each variable is defined once, by an equation that precedes its uses;
results and operands of loops are variables, not literals; equations keep their source
lines. Sharp edges: `InlinedJaxpr` memoizes analyses of later passes, so a pass that
changes equations returns a new one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType

from drjax import _compat, primitives
from drjax._jaxprs.provenance import called_by
from drjax._jaxprs.walk import (
    deep_equations,
    live_equations,
    split_while,
    substitute,
    variables,
)
from drjax._partition import Partition
from drjax._planner.unbatching.own_index import share_batch_dimensions
from drjax._planner.unbatching.rules import ELEMENTWISE

P = ParamSpec("P")
T = TypeVar("T")

BLOCKS = {p for name, p in vars(primitives).items() if name.endswith("_p")}

# Equations that only call the jaxpr in this parameter.
CALLS = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_vmap_call": "call",
    "drjax_jit": "jaxpr",
}
# Equations that run jaxprs in a loop or choose among them: their parameters.
CONTROL = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}


class InlinedJaxpr:
    """A jaxpr without calls: the planner's intermediate form, which passes rewrite.

    Attributes:
      invars: The variables that are its arguments.
      eqns: Its equations, definitions before uses.
      outvars: The variables that are its results.
      consts: For each variable that is a constant its value.
      known_bodies: The inlined jaxprs of loops and branches, by equation: those that
        `bodies` has inlined or a pass has rewritten.
      names: For each argument its name, if it is a whole program; {} for a body.
    """

    def __init__(self, invars, eqns, outvars, consts: dict, known_bodies=None):
        self.invars, self.eqns, self.outvars = invars, eqns, outvars
        self.consts: dict[Any, Any] = consts
        self.known_bodies: dict[Any, tuple[InlinedJaxpr, ...]] = known_bodies or {}
        self.names: dict[Any, str] = {}
        self._memoized: dict[Any, Any] = {}

    @functools.cached_property
    def defs_and_uses(self) -> dict[Any, list[int]]:
        """For each variable the indices of the equations that define and use it."""
        indices: dict[Any, list[int]] = {v: [] for v in (*self.invars, *self.consts)}
        for i, eqn in enumerate(self.eqns):
            for var in eqn.outvars:
                indices[var] = [i]
        for i, eqn in enumerate(self.eqns):
            for var in variables(eqn.invars):
                indices[var].append(i)
        return indices

    def memoize(self, analysis: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`analysis(*args, **kwargs)`, computed once in the life of this jaxpr.

        Passes that infer partitioning again, after a rewrite, ask the same of equations
        and bodies that were not rewritten. The arguments must be hashable.
        """
        key = analysis, args, *kwargs.items()
        if key not in self._memoized:
            self._memoized[key] = analysis(*args, **kwargs)
        return self._memoized[key]

    def bodies(self, eqn) -> tuple["InlinedJaxpr", ...]:
        """The inlined jaxprs of a loop or branch, an equation of this jaxpr.

        (body,) of a scan, (condition, body) of a while, the branches of a cond.
        """
        if eqn not in self.known_bodies:
            params = [eqn.params[name] for name in CONTROL[eqn.primitive.name]]
            closed = params[0] if eqn.primitive.name == "cond" else params
            self.known_bodies[eqn] = tuple(inline_calls(body, eqn) for body in closed)
        return self.known_bodies[eqn]


def inline_calls(closed, call=None) -> InlinedJaxpr:
    """Inline all calls of a closed jaxpr, and remove dead equations.

    Args:
      closed: The closed jaxpr.
      call: The loop or branch equation if `closed` is a body of one: equations without
        a source line of their own get its line. None for a whole program.
    """
    jaxpr = _compat.open_jaxpr(closed)
    consts = dict(zip(jaxpr.constvars, _compat.jaxpr_consts(closed), strict=True))
    eqns: list[Any] = []
    outvars = _inline(jaxpr, jaxpr.invars, eqns, consts, call)
    eqns = _fold_constants(live_equations(eqns, outvars), consts)
    # After folding: it evaluates the indices that depend on constants only.
    eqns = share_batch_dimensions(eqns, consts)
    # Inference raises variables only, so operands of loops and results are variables.
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name in CONTROL:
            eqns[i] = eqn.replace(invars=[_variable(v, consts) for v in eqn.invars])
    outvars = [_variable(v, consts) for v in outvars]
    return InlinedJaxpr(
        list(jaxpr.invars), live_equations(eqns, outvars), outvars, consts
    )


def is_rewritten_scan(eqn) -> bool:
    """Whether an equation is a scan that rematerialization has rewritten.

    Its parameters have JAX's names, but hold no jaxpr: its body is known to the program
    that contains it, which rewrites it further.
    """
    return eqn.primitive.name == "scan" and "jaxpr" not in eqn.params


def uses_blocks(jaxpr, partition: Partition | None = None) -> bool:
    """Whether a jaxpr binds a building block at any depth outside of mapped functions.

    Args:
      jaxpr: The jaxpr, open or closed.
      partition: The partition of the building block; None: any partition.
    """
    # The jaxpr of a map_fn is work of one group: its blocks are an inner program's.
    return any(
        eqn.primitive in BLOCKS
        and not eqn.params.get("per_group")
        and partition in (None, eqn.params["partition"])
        for eqn in deep_equations(jaxpr, lambda eqn: eqn.primitive not in BLOCKS)
    )


def _variable(atom, consts: dict):
    """`atom` if it is a variable; of a literal, a new constant, added to `consts`."""
    if not isinstance(atom, Literal):
        return atom
    var = _compat.new_var(atom.aval)
    consts[var] = atom.val
    return var


def _inline(jaxpr, args: Sequence[Any], eqns: list, consts: dict, call=None) -> list:
    """Append the equations of a jaxpr to `eqns`, and those of its calls in their place.

    Args:
      jaxpr: The open jaxpr.
      args: What it is applied to: variables, or literals.
      eqns: The list to which equations are appended.
      consts: The values of constants, to which those of inlined calls are added.
      call: The equation that calls it, None at the top. Its equations then get fresh
        variables, as another equation may call the same jaxpr.

    Returns:
      The variables, or literals, that are its results.
    """
    names = dict(zip(jaxpr.invars, args, strict=True))

    for eqn in jaxpr.eqns:
        ins = substitute(eqn.invars, names)
        callee = _callee(eqn, ins)
        if callee is not None:
            inner, operands = callee
            inner_jaxpr = _compat.open_jaxpr(inner)
            for var, value in zip(
                inner_jaxpr.constvars, _compat.jaxpr_consts(inner), strict=True
            ):
                consts[var] = value
            # Equations of library code show the line of the user's call.
            outer = eqn if call is None else called_by(call, eqn)
            outs = _inline(inner_jaxpr, operands, eqns, consts, outer)
            names.update(zip(eqn.outvars, outs, strict=True))
            continue
        if _is_identity(eqn):
            names.update(zip(eqn.outvars, ins, strict=True))
            continue
        outs = eqn.outvars
        if call is not None:
            # The same jaxpr may be called twice: each call has variables of its own.
            eqn = called_by(call, eqn)
            outs = [_compat.new_var(var.aval) for var in outs]
            names.update(zip(eqn.outvars, outs, strict=True))
        if call is not None or ins != eqn.invars:
            eqn = eqn.replace(invars=ins, outvars=outs)
        eqns += _with_explicit_broadcasts(_with_scalar_condition(eqn))
    return substitute(jaxpr.outvars, names)


def _callee(eqn, ins: Sequence[Any]) -> tuple[Any, list] | None:
    """`(jaxpr, operands)` of an equation that only calls a jaxpr; None for any other.

    Args:
      eqn: The equation.
      ins: Its operands, in the variables of the inlined jaxpr.
    """
    name = eqn.primitive.name
    # Derivative rules are dropped: the program is differentiated already.
    if name in CALLS:
        return eqn.params[CALLS[name]], list(ins)
    if name == "custom_linear_solve":
        # Of its four functions the value needs `solve` only; derivatives need others.
        sizes = eqn.params["const_lengths"]
        first = sizes.matvec + sizes.vecmat
        consts = ins[first : first + sizes.solve]
        right = ins[first + sizes.solve + sizes.transpose_solve :]
        return eqn.params["jaxprs"].solve, [*consts, *right]
    return None


def _is_identity(eqn) -> bool:
    """Whether the results of an equation are its operands: inlining removes it."""
    if eqn.primitive.name == "device_put":
        # Without a device it moves nothing.
        return all(device is None for device in eqn.params["devices"])
    if eqn.primitive.name == "reshard":
        # Derivatives on a mesh in context write it, to a type without Explicit axes.
        return AxisType.Explicit not in eqn.params["dst_sharding"].mesh.axis_types
    # Checkpoints write barriers, against common-subexpression elimination.
    return eqn.primitive.name == "optimization_barrier"


def _with_scalar_condition(eqn):
    """Rewrite a `while` with a batch of conditions to one with a scalar condition.

    Batching a `while` gives it a condition for each element. Any other equation is
    returned as it is.
    """
    if eqn.primitive.name != "while":
        return eqn
    params = eqn.params
    condition, body = (params[f"{name}_jaxpr"] for name in ("cond", "body"))
    if condition.out_avals[0].shape == ():
        return eqn
    cond_consts, body_consts, _ = split_while(eqn, eqn.invars)
    n_cond = len(cond_consts)
    n = n_cond + len(body_consts)
    continues, step = map(_compat.jaxpr_as_fun, (condition, body))

    def any_continues(*args):
        return [any_of_batch(lambda *xs: continues(*xs)[0])(*args)]

    def masked_step(*args):
        mask = lambda *carry: continues(*args[:n_cond], *carry)[0]
        unmasked = lambda *carry: step(*args[n_cond:n], *carry)
        return step_where(mask, unmasked)(*args[n:])

    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    changed = {
        "cond_jaxpr": jax.make_jaxpr(any_continues)(*types[:n_cond], *types[n:]),
        "body_jaxpr": jax.make_jaxpr(masked_step)(*types),
        "body_nconsts": n,
    }
    # The step evaluates the condition too, so it takes the constants of both.
    ins = [*cond_consts, *eqn.invars]
    return eqn.replace(invars=ins, params={**params, **changed})


# The semantics of a batched `while`: it continues as long as any element does, and
# updates only those that do. Conditions and steps are functions of the carry.


def any_of_batch(condition: Callable) -> Callable:
    """Reduce a batch of conditions to whether any element of the batch continues.

    Args:
      condition: `condition(*carry)`, which returns a bool for each element.

    Returns:
      A function of the carry that returns a bool `[]`.
    """
    return lambda *carry: jnp.any(condition(*carry))


def step_where(condition: Callable, step: Callable) -> Callable:
    """Restrict a step to the elements of a batch that continue; others stay unchanged.

    Args:
      condition: `condition(*carry)`, which returns a bool for each element.
      step: `step(*carry)`, which returns the new carried values.

    Returns:
      A function of the carry that returns the list of new carried values.
    """

    def masked_step(*carry):
        mask = condition(*carry)
        dims = range(mask.ndim)
        return [
            lax.select(lax.broadcast_in_dim(mask, new.shape, dims), new, old)
            for old, new in zip(carry, step(*carry), strict=True)
        ]

    return masked_step


def _with_explicit_broadcasts(eqn) -> list:
    """Broadcast the operands of a pointwise equation explicitly to the result's shape.

    A pointwise primitive broadcasts dimensions of size one implicitly. Such a dimension
    may be the group axis of a single group, which unbatching must see.

    Returns:
      The equations of the broadcasts and the pointwise one; `[eqn]` if there is nothing
      to broadcast, or if it is not pointwise.
    """
    if eqn.primitive.name not in ELEMENTWISE:
        return [eqn]
    shape, broadcasts, ins = eqn.outvars[0].aval.shape, [], list(eqn.invars)
    for i, var in enumerate(ins):
        small = var.aval.shape
        if len(small) == len(shape) and small != shape:
            equations, ins[i] = _broadcast(var, shape, eqn.source_info)
            broadcasts += equations
    return [*broadcasts, eqn.replace(invars=ins)] if broadcasts else [eqn]


def _broadcast(var, shape, source_info) -> tuple[list, Any]:
    """Write equations that broadcast a variable's dimensions of size one.

    Args:
      var: The variable.
      shape: The shape of the result, with as many dimensions.
      source_info: The source line for the equations.

    Returns:
      `(equations, variable that is their result)`.
    """
    small = var.aval.shape
    kept = [d for d in range(len(shape)) if small[d] == shape[d]]
    unit = [d for d in range(len(shape)) if small[d] != shape[d]]
    broadcast = lambda x: lax.broadcast_in_dim(lax.squeeze(x, unit), shape, kept)
    jaxpr = jax.make_jaxpr(broadcast)(jax.ShapeDtypeStruct(small, var.aval.dtype))
    raw = _compat.open_jaxpr(jaxpr)
    names: dict[Any, Any] = {raw.invars[0]: var}
    eqns = []
    for eqn in raw.eqns:
        outs = [_compat.new_var(v.aval) for v in eqn.outvars]
        ins = [names[v] for v in eqn.invars]
        names.update(zip(eqn.outvars, outs, strict=True))
        new = eqn.replace(invars=ins, outvars=outs, source_info=source_info)
        eqns.append(new)
    return eqns, names[raw.outvars[0]]


def _fold_constants(eqns: list, consts: dict) -> list:
    """Evaluate pointwise equations on scalar constants, such as 1/n in a gradient.

    A folded scalar is part of a stage's code, instead of a broadcast in each round.

    Args:
      eqns: The equations, definitions before uses.
      consts: The values of constants, to which the results are added.

    Returns:
      The equations that remain.
    """
    kept = []
    for eqn in eqns:
        operands = [
            v.val if isinstance(v, Literal) else consts.get(v) for v in eqn.invars
        ]
        foldable = (
            eqn.primitive.name in ELEMENTWISE
            and operands
            and all(x is not None and np.ndim(x) == 0 for x in operands)
            and all(v.aval.shape == () for v in eqn.outvars)
            # NumPy holds the folded values and has no random keys.
            and not any(
                jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
                for v in eqn.outvars
            )
        )
        if foldable:
            # The planner itself may run under a jax.jit, as drjax.jit does.
            with jax.ensure_compile_time_eval():
                outs = _compat.bind_equation(eqn, operands)
            consts.update(zip(eqn.outvars, map(np.asarray, outs), strict=True))
        else:
            kept.append(eqn)
    return kept
