"""The primitive behind `drjax.jit`: a program in normal form, compiled.

Input: a closed jaxpr and options. Output: `planned_p[jaxpr, options, types]`, which
runs the plan of the jaxpr. Its rules transform the jaxpr and bind the primitive again,
so that a derivative is planned too, instead of being taken through the loops of the
plan:

    JVP        planned(f')(x, dx)
    linearize  planned(f)(x); the linear part takes x: it is planned(f')(x, .)
    transpose  planned(f'^T)(x, ct)
    batching   planned(batched f)

Invariants: symbolic zeros are no operands. A linear part comes with the types of its
results, as it is planned only where it runs: in reverse mode it is just transposed, and
that of a `custom_vjp` cannot be run. Sharp edges: reverse mode rematerializes the
forward values, but for programs with effects.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._compat import UndefinedPrimal, checkify_rules
from drjax._compat.types import Array, Aval, ClosedJaxpr, Flags, PyTree
from drjax._planner.make_plan import plan_of_jaxpr
from drjax._primitives import registration
from drjax._primitives.read_groups import raise_unread, readers_among_arguments
from drjax._primitives.registration import AxisData, Residuals, Tangent
from drjax._sharding.execute import vary, with_sharding_of
from drjax._sharding.planning_context import planning, trace_without_mesh
from drjax.backends import xla
from drjax.backends.xla import step_size
from drjax.backends.xla.step_size import GroupsPerStep
from drjax.plan import Plan

Types: TypeAlias = Sequence[Aval] | None
# The results, the flags of their tangents, the residuals, and the linear function.
Linearized: TypeAlias = tuple[Sequence[Array], Flags, PyTree, Callable]


@dataclass(frozen=True)
class Options:
    """How the plan of a jaxpr is built and run.

    Attributes:
      name: The name of the program.
      names: A name for each input of the jaxpr, for the plan.
      groups_per_step: How many of a device's groups run at once: a number, None for
        all, or a `Fit` for as many as fit in memory.
      rematerialize: Whether a round rematerializes what it needs of an earlier round's
        results in the groups, instead of saving it. None: it does unless all groups of
        a device run at once, where saving needs no more memory than their work.
      bound: Whether the program is traced under the mesh in context; else under none.
      checkpoints: Whether a gradient through a loop over rounds saves the state of some
        rounds only, and runs the others again.
    """

    name: str
    names: tuple[str, ...]
    groups_per_step: GroupsPerStep
    rematerialize: bool | None
    bound: bool = False
    checkpoints: bool = False

    def of(self, count: int) -> "Options":
        """Return the options of a program derived from this one, as its derivative is.

        They are equal but for `names`: the inputs of its jaxpr, such as residuals and
        tangents, are named by position: `step.0`, `step.1`, if `step` is the name of
        the program. `count` is their number.
        """
        names = tuple(f"{self.name}.{i}" for i in range(count))
        return replace(self, names=names)


# Its parameters are `jaxpr`, the closed jaxpr of a program; `options`, how its plan is
# made and run; and `types`, those of the results, None if the plan has to say.
planned_p = registration.new_primitive("jit", multiple_results=True)


def _cached(fn: Callable) -> Callable:
    """Cache the results of a function by its arguments and JAX's trace context.

    JAX represents a context without a mesh in two ways, which would be two keys of its
    cache, so the cached function is always called in the same one. The cache holds the
    first argument, a jaxpr, weakly; the others must be hashable.
    """
    cached = _compat.weakref_lru_cache(fn)

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
            return cached(*args)

    return call


def plan_of(jaxpr: ClosedJaxpr, options: Options) -> Plan:
    """Make the plan of a jaxpr, with flat arguments and results; cached.

    Raises `PlanError` if the jaxpr has no plan.
    """
    if options.rematerialize is None:
        rematerialize = options.groups_per_step is not None
        options = replace(options, rematerialize=rematerialize)
    return _plan_of(jaxpr, options)


@_cached
def _plan_of(jaxpr: ClosedJaxpr, options: Options) -> Plan:
    undeclared = [None] * len(jaxpr.in_avals)
    with planning(options.bound):
        return plan_of_jaxpr(
            jaxpr,
            options.name,
            options.names,
            undeclared,
            rematerialize=bool(options.rematerialize),
            checkpoints=options.checkpoints,
            # Chunk by chunk.
            skips=bool(options.rematerialize),
        )


@_cached
def plan_to_run(jaxpr: ClosedJaxpr, options: Options) -> xla.Choice:
    """Choose the plan that saves what a later round needs, if all groups run at once.

    Else the plan that rematerializes it; and how many groups of a device run at once.
    As many as fit in memory: what of both fits and takes less time (see `xla.fitted`).
    Where an index chooses a group, the plan in which only this one does it again.
    """
    step, of = options.groups_per_step, {"store": False, "recompute": True}
    # Made when it is asked for: most chunks are smaller, and need one plan.
    make = lambda name: plan_of(jaxpr, replace(options, rematerialize=of[name]))
    names = [x for x in of if options.rematerialize in (None, of[x])]
    if isinstance(step, step_size.Fit):
        return xla.fitted({name: make(name) for name in names}, step.budget)
    if step is not None and len(names) > 1:
        plan = make("recompute")
        if step < xla.groups_of_device(plan):
            return xla.Choice(plan, "recompute", step)
    plan = make(names[0])
    if len(names) > 1 and xla.may_choose_a_group(plan):
        again = make("recompute")
        if xla.average_work(again) < xla.average_work(plan):
            return xla.Choice(again, "recompute", None)
    return xla.Choice(plan, names[0], step)


@_cached
def _traced(
    jaxpr: ClosedJaxpr, options: Options, avals: tuple[Aval, ...]
) -> tuple[ClosedJaxpr, list[Array]]:
    """Trace the execution of a jaxpr's plan, on the mesh in context; cached.

    The closed jaxpr has the inputs and results of `jaxpr`, and runs the plan: loops
    over groups, and collectives. It first takes the constants that are returned, too.
    `avals` are the types of the arguments, with shardings.
    """

    def run(*args: Array) -> Sequence[Array]:
        chosen = plan_to_run(jaxpr, options)
        outs = xla.run_flat(chosen.plan, list(args), chosen.step)
        numbers = [args[i] for i in readers_among_arguments(jaxpr)]
        if numbers and not any(v.partitioned for v in chosen.plan.outputs):
            return raise_unread(numbers, outs)
        return outs

    # As in `_execute`.
    with _compat.without_vma():
        return _compat.trace_to_jaxpr(run, avals, options.name)


def _execute(
    *args: Array, jaxpr: ClosedJaxpr, options: Options, types: Types
) -> list[Array]:
    """Run the plan of the jaxpr.

    In a user's `shard_map`, the results vary over all Manual mesh axes over which an
    operand does.
    """
    avals = tuple(map(_compat.typeof, args))
    traced, consts = _traced(jaxpr, options, avals)
    # The plan was traced outside the user's shard_map: its types say nothing of VMA.
    with _compat.without_vma():
        outs = _compat.jaxpr_as_checked_fun(traced)(*consts, *args)
    axes = varying_axes(avals)
    return [vary(y, axes) for y in outs]


def varying_axes(avals: Sequence[Aval]) -> frozenset[str]:
    """Return the Manual mesh axes over which a value of any of these types varies.

    In a user's `shard_map(check_vma=True)`, all results of `planned_p`, the primitive
    behind `drjax.jit`, vary over those of its operands. Outside of one there are none.
    """
    return frozenset().union(*map(_compat.varying, avals))


def _abstract_eval(
    *avals: Aval, jaxpr: ClosedJaxpr, options: Options, types: Types
) -> tuple[list[Aval], frozenset]:
    """Return the types of the results, and the effects of the jaxpr.

    If the types are not known, the jaxpr is planned and traced for them.
    """
    if types is None:
        axes = varying_axes(avals)
        types = [
            t
            if _compat.varying(t) == axes
            else _compat.replace_aval(t, t.shape, t.sharding, axes)
            for t in _traced(jaxpr, options, avals)[0].out_avals
        ]
    return list(types), _compat.effects_of(jaxpr)


def trace(
    fn: Callable[..., Sequence[Array]], avals: Sequence[Aval], name: str, bound: bool
) -> tuple[ClosedJaxpr, list[Array]]:
    """Trace a flat function to a jaxpr whose types have no mesh, as a plan needs it.

    If `bound`, it is traced under the mesh in context. If not, it is traced under none;
    if JAX refuses that, under the mesh in context, which is then removed from the
    types. `avals` are the types of its arguments. Returns the closed jaxpr, and the
    arrays and tracers that `fn` closes over, which are the first inputs of the jaxpr.
    """
    if bound:
        with planning(True):
            return _compat.trace_to_jaxpr(fn, list(map(_without_sharding, avals)), name)

    def traced() -> tuple[ClosedJaxpr, list[Array]]:
        free = jax.sharding.get_abstract_mesh().empty
        in_avals = map(_without_sharding, avals) if free else avals
        return _compat.trace_to_jaxpr(fn, list(in_avals), name)

    return trace_without_mesh(traced)


def _without_sharding(aval: Aval) -> Aval:
    """Copy the type of an array as a `ShapedArray` without sharding, on no mesh."""
    return _compat.ShapedArray(aval.shape, aval.dtype, aval.weak_type)


def _bind(
    fn: Callable[..., Sequence[Array]], args: Sequence, options: Options
) -> list[Array]:
    """Trace a flat function, and bind `planned_p`, which plans and runs it.

    What `fn` closes over becomes the first operands. `options` are those of the program
    that it is derived from: the inputs get names by position. Returns the results.
    """
    avals = [_compat.typeof(x) for x in args]
    jaxpr, consts = trace(fn, avals, options.name, options.bound)
    return _bind_jaxpr(jaxpr, [*consts, *args], options)


# ---------------------------------------------------------------------------------
# Rules, with the arguments and results that JAX's registries require


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Tangent],
    *,
    jaxpr: ClosedJaxpr,
    options: Options,
    types: Types,
) -> tuple[Sequence[Array], Sequence[Tangent]]:
    """Compute the results and their tangents, by two equations.

    One of them computes the results alone, so that partial evaluation, as in a
    checkpoint, can evaluate it without the tangents.
    """
    nonzeros = [type(t) is not _compat.Zero for t in tangents]
    outs, _, residuals, linear = _linearize(
        False, nonzeros, *primals, jaxpr=jaxpr, options=options, types=types
    )
    return outs, linear(residuals, *tangents)


def _linearize(
    is_vjp: bool,
    nonzeros: Flags,
    *primals: Array,
    jaxpr: ClosedJaxpr,
    options: Options,
    types: Types,
) -> Linearized:
    """Compute the results, and the linear part.

    The linear part is the function from tangents of the operands to those of the
    results. It binds `planned_p` again. It rematerializes the values that it needs of
    the forward computation; of a program with effects, which must run once, they are
    saved.
    """
    # Effects must run once, so their results are saved and not rematerialized.
    saving = functools.partial(_linearize_saving_residuals, is_vjp)
    split = saving if _compat.effects_of(jaxpr) else _linearize_rematerializing
    outs, nonzeros_out, residuals, linear_of_dense = split(
        nonzeros, primals, jaxpr, options, types
    )

    def linear(residuals: PyTree, *tangents: Tangent) -> Sequence[Tangent]:
        dense = registration.instantiate_nonzeros(tangents, nonzeros)
        out_tangents = linear_of_dense(residuals, dense)
        return registration.fill_zeros(jaxpr.out_avals, nonzeros_out, out_tangents)

    return outs, nonzeros_out, residuals, linear


def _tangent_types(outs: Sequence[Array], nonzeros_out: Flags) -> tuple[Aval, ...]:
    """Return the types of those tangents of results that are no symbolic zeros."""
    return tuple(
        _compat.typeof(out).to_tangent_aval()
        for out, nonzero in zip(outs, nonzeros_out, strict=True)
        if nonzero
    )


# Two ways to linearize. Both take the operands that have nonzero tangents, the primals
# and the parameters of the equation, and return `(results, which of their tangents are
# nonzero, residuals, linear)`. `linear(residuals, tangents)` takes and returns the
# nonzero tangents only.


def _linearize_rematerializing(
    nonzeros: Flags,
    primals: Sequence[Array],
    jaxpr: ClosedJaxpr,
    options: Options,
    types: Types,
) -> Linearized:
    """Linearize a program; its linear part rematerializes the residuals that it needs.

    The linear part, from tangents of the operands to those of the results, is the JVP
    without its primal results. Dead-code elimination leaves of the primal computation
    what the tangents depend on. The residuals are constants and operands.
    """
    outs = _primal(nonzeros, primals, jaxpr, options, types)
    with planning(options.bound):
        both, nonzeros_out = _compat.jvp_jaxpr(jaxpr, nonzeros)
    both, consts = _compat.without_consts(both)
    is_tangent = [i >= len(outs) for i in range(len(both.out_avals))]
    tangent, used = _compat.dce_jaxpr(both, is_tangent)
    known = [*consts, *primals]
    n, tangent_types = len(known), _tangent_types(outs, nonzeros_out)
    residuals = [x for x, u in zip(known, used[:n], strict=True) if u]

    def linear(
        residuals: Sequence[Array], tangents: Sequence[Array]
    ) -> Sequence[Array]:
        args = [*residuals, *(t for t, u in zip(tangents, used[n:], strict=True) if u)]
        return _bind_jaxpr(tangent, args, options, tangent_types)

    return outs, nonzeros_out, residuals, linear


def _linearize_saving_residuals(
    is_vjp: bool,
    nonzeros: Flags,
    primals: Sequence[Array],
    jaxpr: ClosedJaxpr,
    options: Options,
    types: Types,
) -> Linearized:
    """Linearize a program, and save the residuals for all groups: effects run once.

    If the linear part will be transposed (`is_vjp`), it can only be transposed, and not
    run: JAX may put the backward rule of a `custom_vjp` in it.
    """
    with planning(options.bound):
        split = _compat.linearize_jaxpr(jaxpr, nonzeros, is_vjp)
    bind = functools.partial(_bind_jaxpr, options=options)
    outs, nonzeros_out, residuals, tangent = registration.linearize_saving_residuals(
        bind, jaxpr, primals, split
    )
    tangent_types = _tangent_types(outs, nonzeros_out)

    def linear(residuals: Residuals, tangents: Sequence[Array]) -> Sequence[Array]:
        operands = registration.linear_operands(residuals, tangents)
        return _bind_jaxpr(tangent, operands, options, tangent_types)

    return outs, nonzeros_out, residuals, linear


def _bind_jaxpr(
    jaxpr: ClosedJaxpr, args: Sequence[Array], options: Options, types: Types = None
) -> list[Array]:
    """Bind `planned_p` for a derived jaxpr; its constants become the first operands.

    It may have constants, as users' derivative rules close over arrays. `options` are
    those of the program that it is derived from: the inputs get names by position.
    """
    jaxpr, consts = _compat.without_consts(jaxpr)
    args = [*consts, *args]
    options = options.of(len(args))
    return planned_p.bind(*args, jaxpr=jaxpr, options=options, types=types)


def _primal(
    nonzeros: Flags,
    primals: Sequence[Array],
    jaxpr: ClosedJaxpr,
    options: Options,
    types: Types,
) -> list[Array]:
    """Compute the results of a program whose derivatives will be taken.

    If its jaxpr has a `custom_vjp`, they are computed by its forward rule. That rule
    may compute otherwise than the function, and derivatives must be taken of the same
    values. `nonzeros` says for each operand whether its tangent is no symbolic zero.
    """
    # With `generic_batching=True`, a `custom_vjp` is a high-level equation.
    if not _compat.has_primitive(jaxpr, ("custom_vjp_call", "call_hi_primitive")):
        return planned_p.bind(*primals, jaxpr=jaxpr, options=options, types=types)
    with planning(options.bound):
        forward, *_ = _compat.linearize_jaxpr(jaxpr, nonzeros, True)
    is_result = [i < len(jaxpr.out_avals) for i in range(len(forward.out_avals))]
    forward, consts = _compat.without_consts(forward)
    jaxpr, used = _compat.dce_jaxpr(forward, is_result)
    args = [x for x, u in zip((*consts, *primals), used, strict=True) if u]
    return _bind_jaxpr(jaxpr, args, options, types)


def _transpose(
    cts: Sequence[Tangent],
    *args: Array | UndefinedPrimal,
    jaxpr: Any,
    options: Options,
    types: Types,
) -> list[Array | None]:
    """Bind the primitive for the transposed jaxpr; all cotangents are arrays."""
    linear = [ad.is_undefined_primal(x) for x in args]
    known = [x for x, lin in zip(args, linear, strict=True) if not lin]
    # Symbolic zeros stay out of the operands; the transposed program makes them dense.
    nonzero = [type(ct) is not _compat.Zero for ct in cts]
    dense = [ct for ct, nz in zip(cts, nonzero, strict=True) if nz]
    fn = _compat.jaxpr_as_checked_fun(jaxpr)
    avals = [a for a, lin in zip(jaxpr.in_avals, linear, strict=True) if lin]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

    def transposed(*values: Array) -> list[Array]:
        known_values = values[: len(known)]
        dense_cts = iter(values[len(known) :])
        full = [
            next(dense_cts) if nz else jnp.zeros(aval.shape, aval.dtype)
            for aval, nz in zip(jaxpr.out_avals, nonzero, strict=True)
        ]

        def forward(*tangents) -> Sequence[Array]:
            rest, tangents = iter(known_values), iter(tangents)
            return fn(*(next(tangents) if lin else next(rest) for lin in linear))

        return list(jax.linear_transpose(forward, *shapes)(full))

    outs = iter(_bind(transposed, [*known, *dense], options))
    # The plan shards partitioned results, whatever the operand was.
    return [
        with_sharding_of(next(outs), x.aval) if lin else None
        for x, lin in zip(args, linear, strict=True)
    ]


def _batch(
    axis_data: AxisData,
    args: Sequence[Array],
    dims: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    options: Options,
    types: Types,
) -> tuple[list[Array], Sequence[int | None]]:
    with planning(options.bound):
        batched, out_axes = _compat.batch_jaxpr(jaxpr, axis_data, dims)
    # The batched results have other types than `types`, which the plan has to say.
    return planned_p.bind(*args, jaxpr=batched, options=options, types=None), out_axes


def _check(
    enabled: frozenset, *args: Array, jaxpr: ClosedJaxpr, options: Options, types: Types
) -> tuple[checkify.Error, list[Array]]:
    """Checkify rule: bind the primitive for the jaxpr with the `enabled` checks."""
    tree: Any = None

    def checked(*args: Array) -> list[Array]:
        nonlocal tree
        fn = checkify.checkify(_compat.jaxpr_as_checked_fun(jaxpr), enabled)
        leaves, tree = jax.tree.flatten(fn(*args))
        return list(map(jnp.asarray, leaves))

    outs = _bind(checked, args, options)
    return tree.unflatten(outs)


planned_p.def_effectful_abstract_eval(_abstract_eval)
registration.register_execution(planned_p, _execute)
_compat.register_jaxpr_lowering(
    planned_p, lambda *avals, jaxpr, options, types: _traced(jaxpr, options, avals)
)
ad.primitive_jvps[planned_p] = _jvp
ad.primitive_transposes[planned_p] = _transpose
_compat.register_linearization(planned_p, _linearize)
batching.fancy_primitive_batchers[planned_p] = _batch
checkify_rules.register_error_check(planned_p, _check)
