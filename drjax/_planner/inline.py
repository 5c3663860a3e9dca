"""Inline the calls of a jaxpr: inner jits, checkpoints and custom derivative rules.

Input: a closed jaxpr. Output: an `InlinedJaxpr` with the same arguments and results,
without calls, dead equations (liveness), or equations on scalar constants only.

`map_columns` (of `reduce_columns`) and `fold_tree` (of derivatives of `reduce`) need
the slices of all groups at once: they become a gather, work of the server, a scatter.

A call's equations stay; its derivative rules are dropped, as plans are made of programs
that are already differentiated. Loops and branches stay equations; `bodies` inlines
their jaxprs. To prepare unbatching, pointwise equations broadcast explicitly, `while`
has a scalar condition, a `jnp.roll` is one equation, and indices that count the groups
become batch dimensions.

Invariants: each variable is defined once, by an equation that precedes its uses;
results, and operands of loops, folds and `columns`, are variables, not literals;
equations keep their source lines. Sharp edges: `InlinedJaxpr` memoizes analyses of
later passes, so a pass that changes equations returns a new one.
"""

import functools
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jax.sharding import AxisType

from drjax import _compat, primitives
from drjax._compat.jax_types import Literal
from drjax._compat.retype_mesh import without_high_level
from drjax._compat.types import (
    Array,
    Atom,
    ClosedJaxpr,
    Eqn,
    OpenJaxpr,
    SourceInfo,
    Var,
)
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._jaxprs.eval_jaxpr import literal_value
from drjax._jaxprs.provenance import called_by
from drjax._jaxprs.walk import (
    CALLS,
    live_equations,
    split_scan,
    split_while,
    substitute,
)
from drjax._partition import Partition
from drjax._planner.fences import as_fence
from drjax._planner.gathered_columns import columns_by_gather, columns_p
from drjax._planner.rotations import JOINS, recognize_rotations
from drjax._planner.unbatching.own_index import (
    INDEXING,
    KnownIntegers,
    share_batch_dimensions,
)
from drjax._primitives.fold_groups import folds_by_gather
from drjax._primitives.moves import partitions_of
from drjax._primitives.registration import BLOCKS

P = ParamSpec("P")
T = TypeVar("T")

# Equations that run jaxprs in a loop or choose among them: their parameters.
CONTROL = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "program": (),  # of `side_by_side`
}

# Equations whose operands have to be variables, by primitive.
_OF_VARIABLES = {*CONTROL, primitives.reduce_fold_p.name, columns_p.name}

_MISSING: Any = object()

# The most elements of an index that a loop's body knows.
_SMALL = 2**16


class InlinedJaxpr:
    """A jaxpr without calls: the planner's intermediate form, which passes rewrite.

    Attributes:
      invars: The variables that are its arguments.
      eqns: Its equations, definitions before uses.
      outvars: The variables that are its results.
      consts: For each variable that is a constant its value.
      known_bodies: For each `scan`, `while` or `cond` equation its inlined jaxprs, if
        `bodies` has inlined them or a pass has rewritten them.
      names: For each argument its name, if it is a whole program; {} for a body.
      known_arguments: For each argument of a body whose value is known, that value.
      replaced: For each loop that a pass has written, the one that it has replaced.
    """

    def __init__(
        self,
        invars: list[Var],
        eqns: list[Eqn],
        outvars: list[Atom],
        consts: dict[Var, Any],
        known_bodies: "dict[Eqn, tuple[InlinedJaxpr, ...]] | None" = None,
    ):
        self.invars, self.eqns, self.outvars = invars, eqns, outvars
        self.consts: dict[Any, Any] = consts
        self.known_bodies: dict[Any, tuple[InlinedJaxpr, ...]] = known_bodies or {}
        self.names: dict[Any, str] = {}
        self.known_arguments: dict[Any, np.ndarray] = {}
        self.replaced: dict[Any, Eqn] = {}
        self._memoized: dict[Any, Any] = {}

    @functools.cached_property
    def known_integers(self) -> KnownIntegers:
        """The look-up of integer variables whose values are known while planning.

        `known_integers.value(var)` is the value; None unless `var` is computed from
        `consts` and `known_arguments` alone, as an index of `jnp.arange` is.
        """
        return KnownIntegers(self.eqns, ChainMap(self.consts, self.known_arguments))

    def memoize(self, analysis: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `analysis(*args, **kwargs)`, computed once in the life of this jaxpr.

        The analysis must have no side effects, and its arguments must be hashable.
        Passes that infer partitioning again, after a rewrite, ask the same of equations
        and bodies that were not rewritten.
        """
        key = (analysis, args, *kwargs.items()) if kwargs else (analysis, args)
        result = self._memoized.get(key, _MISSING)
        if result is _MISSING:
            result = self._memoized[key] = analysis(*args, **kwargs)
        return result

    def bodies(self, eqn: Eqn) -> tuple["InlinedJaxpr", ...]:
        """Return the bodies of a `scan`, `while` or `cond` of this jaxpr, inlined.

        These are `(body,)` of a scan, `(condition, body)` of a while, the branches of a
        cond. The first call for `eqn` inlines and records them; later ones return the
        same.
        """
        if eqn not in self.known_bodies:
            params = [eqn.params[name] for name in CONTROL[eqn.primitive.name]]
            closed = params[0] if eqn.primitive.name == "cond" else params
            self.known_bodies[eqn] = tuple(
                inline_calls(body, eqn, self._known_indices(constants))
                for body, constants in zip(closed, _loop_constants(eqn), strict=True)
            )
        return self.known_bodies[eqn]

    def replaced_bodies(
        self, eqn: Eqn, new: "Sequence[InlinedJaxpr | None]"
    ) -> "tuple[InlinedJaxpr, ...] | None":
        """Return the bodies of a loop with new ones among them; None if all stay."""
        if all(body is None for body in new):
            return None
        pairs = zip(self.bodies(eqn), new, strict=True)
        return tuple(old if body is None else body for old, body in pairs)

    def rewritten(
        self, eqns: list[Eqn], bodies: "dict[Eqn, tuple[InlinedJaxpr, ...]]"
    ) -> "InlinedJaxpr":
        """Return the same jaxpr with other equations, and bodies of loops."""
        new = InlinedJaxpr(self.invars, eqns, self.outvars, self.consts, bodies)
        new.names, new.known_arguments = self.names, self.known_arguments
        return new

    def _known_indices(self, operands: Sequence[Atom]) -> dict[int, np.ndarray]:
        """Find the constants of a loop's body that are small, known integer arrays.

        The result maps the position of an argument of the body to its value, for arrays
        of 2 to `_SMALL` elements. A derivative computes the indices of a loop's body
        once, outside of the loop, and passes them in. Unbatching a gather in the body
        needs their values.
        """
        values = {}
        for i, atom in enumerate(operands):
            aval = atom.aval
            if (
                getattr(aval.dtype, "kind", "") in ("i", "u")
                and 1 < aval.size <= _SMALL
            ):
                value = self.known_integers.value(atom)
                if value is not None:
                    values[i] = value
        return values


def operands_of_bodies(
    program: InlinedJaxpr, eqn: Eqn
) -> Iterator[tuple[InlinedJaxpr, Sequence[Atom]]]:
    """Yield each body of a loop or branch, with the operands for its arguments.

    Of a scan's stacks, the body has one step.
    """
    bodies, operands = program.bodies(eqn), [eqn.invars]
    if eqn.primitive.name == "cond":
        operands = [eqn.invars[1:]] * len(bodies)
    elif eqn.primitive.name == "while":
        cond_consts, body_consts, carry = split_while(eqn, eqn.invars)
        operands = [[*cond_consts, *carry], [*body_consts, *carry]]
    yield from zip(bodies, operands, strict=True)


def _loop_constants(eqn: Eqn) -> Sequence[Sequence[Atom]]:
    """List, for each body of a loop, the operands that it takes unchanged in each step.

    They are for its first arguments: the constants of a scan's step, those of a while's
    condition and of its step, and all operands of a cond's branches.
    """
    match eqn.primitive.name:
        case "scan":
            return [split_scan(eqn, eqn.invars)[0]]
        case "while":
            return split_while(eqn, eqn.invars)[:2]
        case _:
            return [eqn.invars[1:]] * len(eqn.params["branches"])


def inline_calls(
    closed: ClosedJaxpr,
    call: Eqn | None = None,
    known: dict[int, np.ndarray] | None = None,
) -> InlinedJaxpr:
    """Inline all calls of a jaxpr, remove dead equations, and prepare unbatching.

    If `closed` is a body of a `scan`, `while` or `cond`, `call` is that equation:
    equations without a source line of their own get its line. `known` has, by position,
    the values of those arguments of the body that are known while planning.
    """
    closed = without_high_level(closed)
    jaxpr = _compat.open_jaxpr(closed)
    consts = dict(zip(jaxpr.constvars, _compat.jaxpr_consts(closed), strict=True))
    eqns: list[Any] = []
    outvars = _inline(jaxpr, jaxpr.invars, eqns, consts, call)
    eqns = live_equations(eqns, outvars)
    # Most programs have few primitives, and passes are for a few of all.
    names = {eqn.primitive.name for eqn in eqns}
    if "stop_gradient" in names:
        eqns, outvars = _without_equal_cases(eqns, outvars)
    if primitives.gather_p.name in names:
        eqns, outvars = _share_gathers(eqns, outvars)
    moves = not names.isdisjoint(JOINS)
    if moves:
        eqns = recognize_rotations(eqns)
    eqns = _fold_constants(eqns, consts)
    arguments = {jaxpr.invars[i]: value for i, value in (known or {}).items()}
    indexes = not names.isdisjoint(INDEXING)
    if indexes:
        # After folding: it evaluates the indices that depend on constants only.
        eqns = share_batch_dimensions(eqns, ChainMap(consts, arguments))
    # Inference raises variables only, and a plan has values for variables only.
    if not names.isdisjoint(_OF_VARIABLES):
        for i, eqn in enumerate(eqns):
            if eqn.primitive.name in _OF_VARIABLES:
                eqns[i] = eqn.replace(invars=[_variable(v, consts) for v in eqn.invars])
    outvars = [_variable(v, consts) for v in outvars]
    if moves or indexes:
        # Parts of a roll are dead now, and columns that batch dimensions replace.
        eqns = live_equations(eqns, outvars)
    inlined = InlinedJaxpr(list(jaxpr.invars), eqns, outvars, consts)
    inlined.known_arguments = arguments
    return inlined


def _without(
    eqns: list[Eqn], outvars: Sequence[Atom], same_as: Callable[[Eqn], Atom | None]
) -> tuple[list[Eqn], list[Atom]]:
    """Remove equations whose result is another value, which `same_as` tells of each.

    The new equations and results are returned.
    """
    names: dict[Any, Any] = {}
    kept = []
    for eqn in eqns:
        if names:
            eqn = eqn.replace(invars=substitute(eqn.invars, names))
        value = same_as(eqn)
        if value is None:
            kept.append(eqn)
        else:
            names[eqn.outvars[0]] = value
    return kept, substitute(outvars, names)


def _without_equal_cases(
    eqns: list[Eqn], outvars: Sequence[Atom]
) -> tuple[list[Eqn], list[Atom]]:
    """Remove what selects a value or the same without a gradient, as in `map_fn.py`.

    The program is differentiated already. So what it is selected by may be dead.
    """
    stopped: dict[Any, Any] = {}

    def same_as(eqn: Eqn) -> Atom | None:
        name, operands = eqn.primitive.name, eqn.invars
        if name == "stop_gradient":
            stopped[eqn.outvars[0]] = operands[0]
        if name != "select_n" or any(isinstance(v, Literal) for v in operands):
            return None
        value, *others = (stopped.get(v, v) for v in operands[1:])
        return value if all(v is value for v in others) else None

    kept, outvars = _without(eqns, outvars, same_as)
    return live_equations(kept, outvars), outvars


def _share_gathers(
    eqns: list[Eqn], outvars: Sequence[Atom]
) -> tuple[list[Eqn], list[Atom]]:
    """Merge equations that gather the slices of the same variable into one.

    Without this, a value would be communicated several times: `inline_calls` replaces
    `reduce_columns`, and derivatives of `reduce`, by a gather and work of the server.
    """
    known: dict[Any, Atom] = {}

    def same_as(eqn: Eqn) -> Atom | None:
        if eqn.primitive is not primitives.gather_p:
            return None
        first = known.setdefault((eqn.invars[0], *eqn.params.values()), eqn.outvars[0])
        return None if first is eqn.outvars[0] else first

    return _without(eqns, outvars, same_as)


def is_rewritten(eqn: Eqn) -> bool:
    """Whether rematerialization of residuals has rewritten a `scan` or `cond`.

    Such an equation has no parameter `jaxpr` or `branches`. Its bodies are
    `InlinedJaxpr`s: for the jaxpr `program` that contains it, they are in
    `program.bodies(eqn)`.
    """
    name = eqn.primitive.name
    return name in ("scan", "cond") and CONTROL[name][0] not in eqn.params


def uses_blocks(
    jaxpr: ClosedJaxpr | OpenJaxpr, partition: Partition | None = None
) -> bool:
    """Whether a jaxpr binds a building block at any depth outside of mapped functions.

    With a partition, only blocks over this one count.
    """
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in ELEMENTWISE:  # most equations
            continue
        # The jaxpr of a map_fn is work of one group: its blocks are an inner program's.
        if eqn.primitive in BLOCKS:
            own = partition is None or partition in partitions_of(eqn)
            if own and not eqn.params.get("per_group"):
                return True
        elif any(uses_blocks(j, partition) for j in _compat.jaxprs_in(eqn.params)):
            return True
    return False


def _variable(atom: Atom, consts: dict[Var, Any]) -> Var:
    """Return a variable for an operand: a literal becomes a new constant in `consts`.

    Later passes look up operands of loops and folds, and results, as variables.
    """
    if not isinstance(atom, Literal):
        return atom
    var = _compat.new_var(atom.aval)
    consts[var] = literal_value(atom)
    return var


def _inline(
    jaxpr: OpenJaxpr,
    args: Sequence[Atom],
    eqns: list[Eqn],
    consts: dict[Var, Any],
    call: Eqn | None = None,
) -> list[Atom]:
    """Append the equations of a jaxpr to `eqns`, and return what its results are there.

    They are prepared for unbatching: calls are replaced by their equations, identities
    dropped, broadcasts made explicit, and the conditions of `while` loops made scalar.
    `args` are what the arguments of `jaxpr` stand for. Constants of inlined calls are
    added to `consts`. `call` is the equation that has `jaxpr` as a parameter: a call,
    or a `scan`, `while` or `cond`. The appended equations then define new variables, as
    `jaxpr` may be inlined twice, and those without a source line get that of `call`.
    """
    names = dict(zip(jaxpr.invars, args, strict=True))

    for eqn in jaxpr.eqns:
        ins = substitute(eqn.invars, names)
        # Most equations, which are none of what follows.
        pointwise = eqn.primitive.name in ELEMENTWISE
        callee = None if pointwise else _callee(eqn, ins)
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
        if not pointwise:
            if _is_identity(eqn):
                names.update(zip(eqn.outvars, ins, strict=True))
                continue
            eqn = as_fence(eqn) or eqn
        outs = eqn.outvars
        if call is not None:
            # The same jaxpr may be called twice: each call has variables of its own.
            eqn = called_by(call, eqn)
            outs = [_compat.new_var(var.aval) for var in outs]
            names.update(zip(eqn.outvars, outs, strict=True))
        if call is not None or ins != eqn.invars:
            eqn = eqn.replace(invars=ins, outvars=outs)
        if pointwise:
            eqns += _with_explicit_broadcasts(eqn)
        else:
            eqns.append(_with_scalar_condition(eqn))
    return substitute(jaxpr.outvars, names)


def _callee(eqn: Eqn, ins: Sequence[Atom]) -> tuple[ClosedJaxpr, list[Atom]] | None:
    """Return the jaxpr that an equation only calls, and those of `ins` that it takes.

    None if the equation is no call. The jaxpr computes the results of the equation; of
    a `custom_linear_solve`, it is its function `solve`.
    """
    name = eqn.primitive.name
    # Derivative rules are dropped: the program is differentiated already.
    if name in CALLS:
        return without_high_level(eqn.params[CALLS[name]]), list(ins)
    if eqn.primitive is primitives.map_columns_p:
        # Outside of mapped functions, so that its groups are those of the program.
        return columns_by_gather(eqn), list(ins)
    if eqn.primitive is primitives.fold_tree_p:
        return folds_by_gather(eqn), list(ins)
    if name == "custom_linear_solve":
        # Of its four functions the value needs `solve` only; derivatives need others.
        sizes = eqn.params["const_lengths"]
        first = sizes.matvec + sizes.vecmat
        consts = ins[first : first + sizes.solve]
        right = ins[first + sizes.solve + sizes.transpose_solve :]
        return eqn.params["jaxprs"].solve, [*consts, *right]
    return None


def _is_identity(eqn: Eqn) -> bool:
    """Whether an equation returns its operands unchanged, so that inlining removes it.

    It does if it is an `optimization_barrier` of one operand, a `device_put` without a
    device, or a `reshard` to a type without Explicit axes.
    """
    if eqn.primitive.name == "device_put":
        # Without a device it moves nothing.
        return all(device is None for device in eqn.params["devices"])
    if eqn.primitive.name == "reshard":
        # Derivatives on a mesh in context write it, to a type without Explicit axes.
        return AxisType.Explicit not in eqn.params["dst_sharding"].mesh.axis_types
    # One operand is in no order with others.
    return eqn.primitive is lax.optimization_barrier_p and len(eqn.invars) == 1


def _with_scalar_condition(eqn: Eqn) -> Eqn:
    """Rewrite a `while` with a batch of conditions to one with a scalar condition.

    Batching a `while` gives it a condition for each element of the batch. The new loop
    runs as long as any element continues, and its step leaves the others unchanged. Any
    other equation is returned as it is.
    """
    if eqn.primitive.name != "while":
        return eqn
    params = eqn.params
    condition, body = (params[f"{name}_jaxpr"] for name in ("cond", "body"))
    # A loop of rounds needs one global condition, as all groups leave it together.
    if condition.out_avals[0].shape == ():
        return eqn
    cond_consts, body_consts, _ = split_while(eqn, eqn.invars)
    n_cond = len(cond_consts)
    n = n_cond + len(body_consts)
    continues, step = map(_compat.jaxpr_as_fun, (condition, body))

    def any_continues(*args: Array) -> list[Array]:
        return [any_of_batch(lambda *xs: continues(*xs)[0])(*args)]

    def masked_step(*args: Array) -> list[Array]:
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


def any_of_batch(condition: Callable[..., Array]) -> Callable[..., Array]:
    """Reduce a batch of conditions to whether any element continues, a bool `[]`."""
    return lambda *carry: jnp.any(condition(*carry))


def step_where(
    condition: Callable[..., Array], step: Callable[..., Sequence[Array]]
) -> Callable[..., list[Array]]:
    """Restrict a step to the elements of a batch that continue; others stay unchanged.

    The leading axes of each carried value are those of the condition, the batch.
    """

    def masked_step(*carry: Array) -> list[Array]:
        mask = condition(*carry)
        dims = range(mask.ndim)
        return [
            # Elements that have ended compute a step too, as under jax.vmap; its
            # result is dropped.
            lax.select(lax.broadcast_in_dim(mask, new.shape, dims), new, old)
            for old, new in zip(carry, step(*carry), strict=True)
        ]

    return masked_step


def _with_explicit_broadcasts(eqn: Eqn) -> list[Eqn]:
    """Broadcast the operands of a pointwise equation explicitly to the result's shape.

    The equations that broadcast come first. A pointwise primitive broadcasts dimensions
    of size one implicitly. Such a dimension may be the group axis of a single group,
    which unbatching must see.
    """
    shape, broadcasts = eqn.outvars[0].aval.shape, []
    ins = eqn.invars
    for i, var in enumerate(ins):
        small = var.aval.shape
        # Scalar operands stay scalars: each group takes them whole.
        if small != shape and len(small) == len(shape):
            equations, new = _broadcast(var, shape, eqn.source_info)
            broadcasts += equations
            ins = [*ins[:i], new, *ins[i + 1 :]]
    return [*broadcasts, eqn.replace(invars=ins)] if broadcasts else [eqn]


def _broadcast(
    var: Atom, shape: tuple[int, ...], source_info: SourceInfo
) -> tuple[list[Eqn], Var]:
    """Write equations that broadcast a variable's dimensions of size one.

    They are returned with the variable that is their result. `shape` has as many
    dimensions as `var`.
    """
    small = var.aval.shape
    kept = [d for d in range(len(shape)) if small[d] == shape[d]]
    unit = [d for d in range(len(shape)) if small[d] != shape[d]]
    # Squeezed first, so that the broadcast adds these axes instead of stretching them:
    # if one is the group axis, each group can expand a copy (`ExpandedOperand`).
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


def _fold_constants(eqns: list[Eqn], consts: dict[Var, Any]) -> list[Eqn]:
    """Evaluate pointwise equations on scalar constants, such as 1/n in a gradient.

    The results are added to `consts`, as NumPy arrays, and the other equations
    returned. A folded scalar is part of a stage's code, instead of a broadcast in each
    round.
    """
    kept = []
    for eqn in eqns:
        operands = _constant_operands(eqn, consts)
        foldable = (
            operands
            # Under a jax.jit, what the program closes over may be a tracer.
            and not any(isinstance(x, core.Tracer) for x in operands)
            and all(np.ndim(x) == 0 for x in operands)
            and all(v.aval.shape == () for v in eqn.outvars)
            # NumPy holds the folded values and has no random keys.
            and not any(
                jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
                for v in eqn.outvars
            )
        )
        if foldable:
            # The planner itself may run under a jax.jit, as drjax.jit does.
            with _compat.computing_constants():
                outs = _compat.bind_equation(eqn, operands)
            consts.update(zip(eqn.outvars, map(np.asarray, outs), strict=True))
        else:
            kept.append(eqn)
    return kept


def _constant_operands(eqn: Eqn, consts: dict[Var, Any]) -> list[Any]:
    """List the values of the operands of a pointwise equation if all are constants."""
    operands = []
    if eqn.primitive.name in ELEMENTWISE:
        for v in eqn.invars:
            if type(v) is not Literal and v not in consts:
                return []
            operands.append(v.val if type(v) is Literal else consts[v])
    return operands
