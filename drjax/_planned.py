"""`drjax.jit`: a program in normal form, compiled; and the primitive behind it.

`planned_p[jaxpr, options, types]` runs the plan of a jaxpr. Its rules transform the
jaxpr and bind the primitive again, so that a derivative is planned too, instead of
being taken through the loops of the plan:

    JVP        planned(f')(x, dx)
    linearize  planned(f)(x); the linear part takes x: it is planned(f')(x, .)
    transpose  planned(f'^T)(x, ct)
    batching   planned(batched f)

A linear part comes with the types of its results, as it is planned only where it runs:
in reverse mode it is just transposed, and that of a `custom_vjp` cannot be run.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from drjax import _compat, _rules
from drjax._errors import DrjaxValueError
from drjax._planning import axes_to_plan, may_shard_models, planning
from drjax.backends import chunks, xla
from drjax.backends.chunks import GroupsPerStep
from drjax.interpret.make import partition_of, plan_of_jaxpr
from drjax.interpret.names import argument_names, function_name


@dataclass(frozen=True)
class Options:
    """How a plan is made and runs.

    Attributes:
      name: That of the program.
      names: Those of the arguments.
      groups_per_step: How many of a device's groups work at once.
      recompute: Whether to compute again what a round needs of an earlier one.
      axes: The partition's mesh axes, if models are sharded over others.
    """

    name: str
    names: tuple[str, ...]
    groups_per_step: GroupsPerStep
    recompute: bool
    axes: tuple[str, ...] = ()

    def of(self, count: int) -> "Options":
        """The options of a derived program with so many arguments."""
        names = tuple(f"{self.name}.{i}" for i in range(count))
        return replace(self, names=names)


planned_p = _rules.new_primitive("jit", multiple_results=True)


def _cached(fn: Callable) -> Callable:
    """Cached by what is in context, in which no mesh has two forms."""
    cached = _compat.weakref_lru_cache(fn)

    @functools.wraps(fn)
    def call(*args):
        with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
            return cached(*args)

    return call


@_cached
def _plan(jaxpr, options: Options):
    given = [None] * len(jaxpr.in_avals)
    with planning(options.axes):
        return plan_of_jaxpr(
            jaxpr, options.name, options.names, given, recompute=options.recompute
        )


@_cached
def _traced(jaxpr, options: Options, avals: tuple):
    """What runs the plan, in the mesh in context."""

    def run(*args):
        plan, beside = _plan(jaxpr, options), bool(options.axes)
        step = options.groups_per_step
        return xla.run_flat(plan, list(args), step, beside=beside)

    return jax.make_jaxpr(run)(*avals)


def _execute(*args, jaxpr, options: Options, types):
    traced = _traced(jaxpr, options, tuple(map(_compat.typeof, args)))
    return _compat.jaxpr_as_fun(traced)(*args)


def _abstract_eval(*avals, jaxpr, options: Options, types):
    found = _traced(jaxpr, options, avals).out_avals if types is None else types
    return list(found), _compat.effects_of(jaxpr)


def _trace(fn: Callable, avals: Sequence[Any], name: str, axes: tuple[str, ...]):
    with planning(axes):
        return _compat.trace_to_jaxpr(fn, [_without_mesh(a) for a in avals], name)


def _without_mesh(aval):
    return _compat.ShapedArray(aval.shape, aval.dtype, aval.weak_type)


def _bind(fn: Callable, args: Sequence[Any], options: Options):
    """Bind the primitive for a flat function without closures."""
    avals = [_compat.typeof(x) for x in args]
    jaxpr, consts = _trace(fn, avals, options.name, options.axes)
    return _bind_jaxpr(jaxpr, [*consts, *args], options)


# ---------------------------------------------------------------------------------
# Rules


def _jvp(primals, tangents, *, jaxpr, options: Options, types):
    """Values and tangents apart, so that a checkpoint may know the values alone."""
    nonzeros = [type(t) is not _compat.Zero for t in tangents]
    outs, _, residuals, linear = _linearize(
        False, nonzeros, *primals, jaxpr=jaxpr, options=options, types=types
    )
    return outs, linear(residuals, *tangents)


def _linearize(is_vjp, nonzeros, *primals, jaxpr, options: Options, types):
    split = _keep if _compat.effects_of(jaxpr) else _repeat
    outs, nonzeros_out, residuals, on_dense = split(
        nonzeros, primals, jaxpr, options, types
    )

    def linear(residuals, *tangents):
        dense = _rules.instantiated(tangents, nonzeros)
        found = on_dense(residuals, dense)
        return _rules.fill_zeros(jaxpr.out_avals, nonzeros_out, found)

    return outs, nonzeros_out, residuals, linear


def _types_of_tangents(outs, nonzeros_out) -> tuple:
    return tuple(
        _compat.typeof(out).to_tangent_aval()
        for out, nonzero in zip(outs, nonzeros_out, strict=True)
        if nonzero
    )


def _repeat(nonzeros, primals, jaxpr, options: Options, types):
    """Linearise; the linear part computes again what it needs."""
    outs = _primal(nonzeros, primals, jaxpr, options, types)
    with planning(options.axes):
        both, nonzeros_out = _compat.jvp_jaxpr(jaxpr, nonzeros)
    both, consts = _compat.without_consts(both)
    wanted = [i >= len(outs) for i in range(len(both.out_avals))]
    tangent, used = _compat.dce_jaxpr(both, wanted)
    known = [*consts, *primals]
    n, of_tangents = len(known), _types_of_tangents(outs, nonzeros_out)
    residuals = [x for x, u in zip(known, used[:n], strict=True) if u]

    def linear(residuals, tangents):
        args = [*residuals, *(t for t, u in zip(tangents, used[n:], strict=True) if u)]
        return _bind_jaxpr(tangent, args, options, of_tangents)

    return outs, nonzeros_out, residuals, linear


def _keep(nonzeros, primals, jaxpr, options: Options, types):
    """Linearise; what has effects is not done again, and leaves rows for all groups."""
    with planning(options.axes):
        split = _compat.linearize_jaxpr(jaxpr, nonzeros, True)
    bind = functools.partial(_bind_jaxpr, options=options)
    outs, nonzeros_out, residuals, tangent = _rules.linearize_and_keep(
        bind, jaxpr, primals, split
    )
    of_tangents = _types_of_tangents(outs, nonzeros_out)

    def linear(residuals, tangents):
        operands = _rules.with_kept(residuals, tangents)
        return _bind_jaxpr(tangent, operands, options, of_tangents)

    return outs, nonzeros_out, residuals, linear


def _bind_jaxpr(jaxpr, args, options: Options, types=None):
    """Bind a derived jaxpr, whose rules may have closed over arrays."""
    jaxpr, consts = _compat.without_consts(jaxpr)
    args = [*consts, *args]
    options = options.of(len(args))
    return planned_p.bind(*args, jaxpr=jaxpr, options=options, types=types)


def _primal(nonzeros, primals, jaxpr, options: Options, types):
    """The results, of the forward rule of each `custom_vjp`: they have derivatives."""
    if not _holds(jaxpr, "custom_vjp_call"):
        return planned_p.bind(*primals, jaxpr=jaxpr, options=options, types=types)
    with planning(options.axes):
        forward, *_ = _compat.linearize_jaxpr(jaxpr, nonzeros, True)
    wanted = [i < len(jaxpr.out_avals) for i in range(len(forward.out_avals))]
    forward, consts = _compat.without_consts(forward)
    jaxpr, used = _compat.dce_jaxpr(forward, wanted)
    args = [x for x, u in zip((*consts, *primals), used, strict=True) if u]
    return _bind_jaxpr(jaxpr, args, options, types)


def _holds(jaxpr, name: str) -> bool:
    """Whether a jaxpr holds an equation of this primitive, at any depth."""
    return any(
        eqn.primitive.name == name
        or any(_holds(j, name) for j in _compat.jaxprs_in(eqn.params))
        for eqn in _compat.open_jaxpr(jaxpr).eqns
    )


def _transpose(cts, *args, jaxpr, options: Options, types):
    linear = [ad.is_undefined_primal(x) for x in args]
    known = [x for x, lin in zip(args, linear, strict=True) if not lin]
    nonzero = [type(ct) is not _compat.Zero for ct in cts]
    dense = [ct for ct, nz in zip(cts, nonzero, strict=True) if nz]
    fn = _compat.jaxpr_as_fun(jaxpr)
    avals = [a for a, lin in zip(jaxpr.in_avals, linear, strict=True) if lin]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

    def transposed(*values):
        known_values = values[: len(known)]
        given = iter(values[len(known) :])
        full = [
            next(given) if nz else jnp.zeros(aval.shape, aval.dtype)
            for aval, nz in zip(jaxpr.out_avals, nonzero, strict=True)
        ]

        def forward(*tangents):
            rest, tangents = iter(known_values), iter(tangents)
            return fn(*(next(tangents) if lin else next(rest) for lin in linear))

        return list(jax.linear_transpose(forward, *shapes)(full))

    outs = iter(_bind(transposed, [*known, *dense], options))
    return [next(outs) if lin else None for lin in linear]


def _batch(axis_data, args, dims, *, jaxpr, options: Options, types):
    with planning(options.axes):
        batched, out_axes = _compat.batch_jaxpr(jaxpr, axis_data, dims)
    return planned_p.bind(*args, jaxpr=batched, options=options, types=None), out_axes


planned_p.def_effectful_abstract_eval(_abstract_eval)
_rules.register_execution(planned_p, _execute)
_compat.register_jaxpr_lowering(
    planned_p, lambda *avals, jaxpr, options, types: _traced(jaxpr, options, avals)
)
ad.primitive_jvps[planned_p] = _jvp
ad.primitive_transposes[planned_p] = _transpose
_compat.register_linearization(planned_p, _linearize)
batching.fancy_primitive_batchers[planned_p] = _batch


# ---------------------------------------------------------------------------------
# The API


def jit(
    fn: Callable,
    groups_per_step: int | str | None = None,
    residuals: str = "recompute",
    memory_budget: int | None = None,
    **jit_kwargs: Any,
) -> Any:
    """`jax.jit` of a program in normal form, in memory that does not grow with n.

    Each round of communication becomes one loop over chunks of a device's groups with
    running accumulators, and one all-reduce. Broadcast values are not copied for each
    group. Derivatives of the result are planned too; `drjax.jit(jax.grad(f))` plans
    value and derivative together and is cheaper than `jax.grad(drjax.jit(f))`.

    Args:
      fn: A program, or a function that calls programs over one partition, such as
        `jax.value_and_grad(program)` or a loop over rounds.
      groups_per_step: How many of a device's groups work at once. `"auto"`: as many as
        fit in memory, found by compiling a few times; what was found is logged at INFO.
        Default: all.
      residuals: What a round needs of an earlier round's work in the groups:
        `"recompute"` it, or `"store"` it for all groups. Work with effects is stored.
      memory_budget: With `"auto"`, bytes of temporary memory for each device. Default:
        what the devices have left.
      **jit_kwargs: As for `jax.jit`: static_argnums, donate_argnums, in_shardings, ...

    Returns:
      What `jax.jit` returns: call it, `.lower()` it, take its `jax.grad` or `vmap`.

    Raises:
      PlanError: (when called) the program has no plan; `jax.jit` still runs it.
      DrjaxValueError, DrjaxTypeError: A wrong option.

    Example:
      >>> import drjax, jax, jax.numpy as jnp
      >>> @drjax.program(clients=1000)
      ... def mean_square(x):
      ...     return drjax.reduce_mean(drjax.map_fn(jnp.square, x))
      >>> step = drjax.jit(jax.grad(mean_square), groups_per_step=10)
      >>> print(step(jnp.ones(1000))[:2])
      [0.002 0.002]

    Source: Rush et al. 2024, sections 4 and 5.
    """
    groups = chunks.checked(groups_per_step, memory_budget)
    if residuals not in ("recompute", "store"):
        raise DrjaxValueError(
            f'drjax.jit needs residuals="recompute" or "store", got {residuals!r}.'
        )

    @functools.wraps(fn)
    def planned(*args, **kwargs):
        flat_args, tree = jax.tree_util.tree_flatten((args, kwargs))
        dynamic = [i for i, x in enumerate(flat_args) if _is_array(x)]
        out_tree: Any = None

        def flat(*arrays):
            nonlocal out_tree
            leaves = list(flat_args)
            for i, x in zip(dynamic, arrays, strict=True):
                leaves[i] = x
            inner_args, inner_kwargs = tree.unflatten(leaves)
            out = fn(*inner_args, **inner_kwargs)
            leaves, out_tree = jax.tree_util.tree_flatten(out)
            return list(map(jnp.asarray, leaves))

        arrays = [flat_args[i] for i in dynamic]
        name = function_name(getattr(fn, "__name__", "program"))
        avals = list(map(_compat.typeof, arrays))
        axes: tuple[str, ...] = ()
        if may_shard_models():  # which axes are the partition's?
            there, _ = _compat.trace_to_jaxpr(flat, avals, name)
            axes = axes_to_plan(partition_of(there))
        jaxpr, consts = _trace(flat, avals, name, axes)
        names = argument_names(fn, args, kwargs)
        given = tuple(
            [f"closure.{i}" for i in range(len(consts))] + [names[i] for i in dynamic]
        )
        options = Options(name, given, groups, residuals == "recompute", axes)
        plan = _plan(jaxpr, options)  # errors now, and not when it is lowered
        operands = xla.on_mesh(plan, [*consts, *arrays])
        outs = planned_p.bind(*operands, jaxpr=jaxpr, options=options, types=None)
        return out_tree.unflatten(outs)

    return jax.jit(planned, **jit_kwargs)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)
