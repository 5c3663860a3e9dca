"""A jaxpr without calls: inner jits, checkpoints and custom rules are inlined.

What a call computes stays; what it says about derivatives is dropped, as plans are
made of programs that are already differentiated. Equations keep their source lines.
Loops and branches stay equations; `bodies` flattens what they hold.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType

from drjax import _compat, primitives
from drjax._jaxprs.provenance import called_by
from drjax._partition import Partition
from drjax._planner.unbatching.own_index import share_rows
from drjax._planner.unbatching.rules import ELEMENTWISE

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


class Flat:
    """Straight-line code: `invars`, `eqns`, `outvars`, and values of constants.

    Attributes:
      names: Names of its arguments, if it is a whole program.
      inferred: What is known of it as the body of a loop; see `LoopKinds`.
      forms: The row-by-row forms of its equations; see `Kinds.rows`.
    """

    def __init__(self, invars, eqns, outvars, consts: dict, known_bodies=None):
        self.invars, self.eqns, self.outvars = invars, eqns, outvars
        self.consts: dict[Any, Any] = consts
        self.known_bodies: dict[Any, tuple[Flat, ...]] = known_bodies or {}
        self.names: dict[Any, str] = {}
        self.inferred: dict[Any, Any] = {}
        self.forms: dict[Any, Any] = {}

    @functools.cached_property
    def around(self) -> dict[Any, list[int]]:
        """For each variable the numbers of the equations that make or take it."""
        found: dict[Any, list[int]] = {v: [] for v in (*self.invars, *self.consts)}
        for i, eqn in enumerate(self.eqns):
            for var in eqn.outvars:
                found[var] = [i]
        for i, eqn in enumerate(self.eqns):
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    found[atom].append(i)
        return found

    def bodies(self, eqn) -> tuple["Flat", ...]:
        """The flat jaxprs of a loop or branch: (body,), (condition, body), branches."""
        if eqn not in self.known_bodies:
            found = [eqn.params[name] for name in CONTROL[eqn.primitive.name]]
            closed = found[0] if eqn.primitive.name == "cond" else found
            self.known_bodies[eqn] = tuple(flatten(body, eqn) for body in closed)
        return self.known_bodies[eqn]


def flatten(closed, call=None) -> Flat:
    """Inline all calls of a closed jaxpr, which `call` calls; remove dead equations."""
    jaxpr = _compat.open_jaxpr(closed)
    consts = dict(zip(jaxpr.constvars, _compat.jaxpr_consts(closed), strict=True))
    eqns: list[Any] = []
    outvars = _inline(jaxpr, jaxpr.invars, eqns, consts, call)
    eqns = _fold_constants(live_equations(eqns, outvars), consts)
    eqns = share_rows(eqns, consts)
    for i, eqn in enumerate(eqns):  # what a loop takes is always a variable
        if eqn.primitive.name in CONTROL:
            eqns[i] = eqn.replace(invars=[_variable(v, consts) for v in eqn.invars])
    outvars = [_variable(v, consts) for v in outvars]
    return Flat(list(jaxpr.invars), live_equations(eqns, outvars), outvars, consts)


def uses_blocks(jaxpr, partition: Partition | None = None) -> bool:
    """Whether a jaxpr holds a building block (of this partition) at any depth."""
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive in BLOCKS and not eqn.params.get("per_group"):
            if partition is None or eqn.params["partition"] == partition:
                return True
        if eqn.primitive in BLOCKS:
            continue  # what stands inside a map_fn is the work of one group
        if any(uses_blocks(j, partition) for j in _compat.jaxprs_in(eqn.params)):
            return True
    return False


def _variable(atom, consts: dict):
    """`atom`, or a new constant that holds a literal."""
    if not isinstance(atom, Literal):
        return atom
    var = _compat.new_var(atom.aval)
    consts[var] = atom.val
    return var


def _inline(jaxpr, args: Sequence[Any], eqns: list, consts: dict, call=None) -> list:
    """Append the equations of `jaxpr` that `call` applies to `args`; its results."""
    names = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom if isinstance(atom, Literal) else names.get(atom, atom)

    for eqn in jaxpr.eqns:
        ins = [read(atom) for atom in eqn.invars]
        called = _called(eqn, ins)
        if called is not None:
            inner, operands = called
            inner_jaxpr = _compat.open_jaxpr(inner)
            for var, value in zip(
                inner_jaxpr.constvars, _compat.jaxpr_consts(inner), strict=True
            ):
                consts[var] = value
            outer = eqn if call is None else called_by(call, eqn)
            outs = _inline(inner_jaxpr, operands, eqns, consts, outer)
            names.update(zip(eqn.outvars, outs, strict=True))
            continue
        if _changes_nothing(eqn):
            names.update(zip(eqn.outvars, ins, strict=True))
            continue
        outs = eqn.outvars
        if call is not None:  # the same jaxpr may be called twice
            eqn = called_by(call, eqn)
            outs = [_compat.new_var(var.aval) for var in outs]
            names.update(zip(eqn.outvars, outs, strict=True))
        if call is not None or ins != eqn.invars:
            eqn = eqn.replace(invars=ins, outvars=outs)
        eqns += _spelled_out(_with_one_condition(eqn))
    return [read(atom) for atom in jaxpr.outvars]


def _called(eqn, ins: Sequence[Any]) -> tuple[Any, list] | None:
    """The jaxpr that an equation only calls, and its operands; None for any other."""
    name = eqn.primitive.name
    if name in CALLS:
        return eqn.params[CALLS[name]], list(ins)
    if name == "custom_linear_solve":  # of four functions, only one is called
        sizes = eqn.params["const_lengths"]
        first = sizes.matvec + sizes.vecmat
        consts = ins[first : first + sizes.solve]
        right = ins[first + sizes.solve + sizes.transpose_solve :]
        return eqn.params["jaxprs"].solve, [*consts, *right]
    return None


def _changes_nothing(eqn) -> bool:
    """Whether the results of an equation are its operands, one by one."""
    if eqn.primitive.name == "device_put":
        return all(device is None for device in eqn.params["devices"])
    if eqn.primitive.name == "reshard":
        # As derivatives do on a mesh in context, to a type without any Explicit axis.
        return AxisType.Explicit not in eqn.params["dst_sharding"].mesh.axis_types
    return eqn.primitive.name == "optimization_barrier"


def _with_one_condition(eqn):
    """For a `while` with a condition for each element of a batch, one with a scalar."""
    if eqn.primitive.name != "while":
        return eqn
    params = eqn.params
    condition, body = (params[f"{name}_jaxpr"] for name in ("cond", "body"))
    if condition.out_avals[0].shape == ():
        return eqn
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    n = n_cond + n_body
    goes_on, step = map(_compat.jaxpr_as_fun, (condition, body))

    def any_goes_on(*args):
        return [any_of_batch(lambda *xs: goes_on(*xs)[0])(*args)]

    def step_of_some(*args):
        some = lambda *carry: goes_on(*args[:n_cond], *carry)[0]
        step_of = lambda *carry: step(*args[n_cond:n], *carry)
        return step_where(some, step_of)(*args[n:])

    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    changed = {
        "cond_jaxpr": jax.make_jaxpr(any_goes_on)(*types[:n_cond], *types[n:]),
        "body_jaxpr": jax.make_jaxpr(step_of_some)(*types),
        "body_nconsts": n,
    }
    ins = [*eqn.invars[:n_cond], *eqn.invars]
    return eqn.replace(invars=ins, params={**params, **changed})


# What `while` means for a batch: it goes on as long as any element does, and changes
# only those that do. Conditions and steps are functions of what is carried.


def any_of_batch(condition: Callable) -> Callable:
    return lambda *carry: jnp.any(condition(*carry))


def step_where(condition: Callable, step: Callable) -> Callable:
    def step_of_some(*carry):
        some = condition(*carry)
        dims = range(some.ndim)
        return [
            lax.select(lax.broadcast_in_dim(some, new.shape, dims), new, old)
            for old, new in zip(carry, step(*carry), strict=True)
        ]

    return step_of_some


def _spelled_out(eqn) -> list:
    """A pointwise equation whose operands all have the shape of the result.

    By itself it broadcasts dimensions of size one, and these could be the groups'.
    """
    if eqn.primitive.name not in ELEMENTWISE:
        return [eqn]
    shape, found, ins = eqn.outvars[0].aval.shape, [], list(eqn.invars)
    for i, var in enumerate(ins):
        small = var.aval.shape
        if len(small) == len(shape) and small != shape:
            equations, ins[i] = _spread(var, shape, eqn.source_info)
            found += equations
    return [*found, eqn.replace(invars=ins)] if found else [eqn]


def _spread(var, shape, source_info) -> tuple[list, Any]:
    """Equations that broadcast dimensions of size one, and their result."""
    small = var.aval.shape
    kept = [d for d in range(len(shape)) if small[d] == shape[d]]
    gone = [d for d in range(len(shape)) if small[d] != shape[d]]
    spread = lambda x: lax.broadcast_in_dim(lax.squeeze(x, gone), shape, kept)
    jaxpr = jax.make_jaxpr(spread)(jax.ShapeDtypeStruct(small, var.aval.dtype))
    raw = _compat.open_jaxpr(jaxpr)
    names: dict[Any, Any] = {raw.invars[0]: var}
    found = []
    for eqn in raw.eqns:
        outs = [_compat.new_var(v.aval) for v in eqn.outvars]
        ins = [names[v] for v in eqn.invars]
        names.update(zip(eqn.outvars, outs, strict=True))
        new = eqn.replace(invars=ins, outvars=outs, source_info=source_info)
        found.append(new)
    return found, names[raw.outvars[0]]


def _fold_constants(eqns: list, consts: dict) -> list:
    """Compute now what depends on scalar constants only, such as 1/n in a gradient."""
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
            and not any(
                jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
                for v in eqn.outvars
            )
        )
        if foldable:
            with jax.ensure_compile_time_eval():
                outs = _compat.bind_equation(eqn, operands)
            consts.update(zip(eqn.outvars, map(np.asarray, outs), strict=True))
        else:
            kept.append(eqn)
    return kept


def live_equations(eqns: list, outvars: list) -> list:
    """The equations that the results need, and those with effects."""
    needed = {v for v in outvars if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return kept[::-1]
