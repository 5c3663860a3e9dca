"""What touches JAX's internals; each difference between JAX versions is here.

Only this file, `_compat_checks` and `_compat_meshes` import `jax._src`.

Supported: JAX 0.10.2 to 0.12.0.1. What changed between them:

* `Jaxpr` and `ClosedJaxpr` are one class from 0.11 on (`.jaxpr` returns self).
* Rules for linearisation return and receive structured residuals from 0.11 on.
* DCE rules receive the live inputs from 0.11 on.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import api_util, config, core, mesh, source_info_util, util
from jax._src import linear_util as lu
from jax._src.effects import partial_eval_kept_effects
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lib.mlir import ir

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
_MERGED = not hasattr(core, "ClosedJaxpr")  # Jaxpr and ClosedJaxpr are one class

Jaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)
JAXPR_TYPES = (core.Jaxpr, Jaxpr)
ShapedArray = core.ShapedArray
UndefinedPrimal = ad.UndefinedPrimal
Zero = ad.Zero
cache = util.cache  # an LRU cache whose key includes JAX's whole trace context
weakref_lru_cache = util.weakref_lru_cache
jaxpr_as_fun = core.jaxpr_as_fun
frames_in_locations = config.traceback_in_locations_limit  # a context of so many
moveaxis = batching.moveaxis
typeof = core.typeof


def check_vma() -> bool:
    """Whether the code being traced stands in a `shard_map(check_vma=True)`."""
    return config._check_vma.value


def disable_jit() -> bool:
    return config.disable_jit.value


def is_concrete(x: Any) -> bool:
    return core.is_concrete(x)


def under_trace() -> bool:
    """Whether a transformation or jit is active, so that binds are not eager."""
    return not isinstance(core.trace_ctx.trace, core.EvalTrace)


def legacy_mesh() -> jax.sharding.Mesh | None:
    """The mesh of a surrounding `with mesh:` block, if any."""
    physical = mesh.thread_resources.env.physical_mesh
    return None if physical.empty else physical


def concrete_mesh() -> jax.sharding.Mesh:
    """The mesh that `jax.set_mesh` set, with its devices, also while tracing."""
    return mesh.get_concrete_mesh()


def group_aval(aval, shape, sharding, varying):
    """`aval` with another shape, sharding, and set of varying manual axes."""
    mat = aval.manual_axis_type.update(varying=frozenset(varying))
    return aval.update(shape=shape, sharding=sharding, manual_axis_type=mat)


def varying(aval) -> frozenset[str]:
    """The manual mesh axes over which a value of this type differs."""
    return aval.manual_axis_type.varying


# ---------------------------------------------------------------------------------
# Tracing


def trace_to_jaxpr(fn: Callable, avals: Sequence[Any], name: str):
    """Trace `fn(*avals)`; returns a closed jaxpr with the constants as first inputs.

    Returns:
      `(jaxpr, consts)`: `jaxpr` has no constants of its own; `consts` holds the
      arrays and tracers that `fn` closed over, in the order of its first inputs.
    """
    # Without the names of the arguments: finding them costs as much as a small trace.
    source = api_util.fun_sourceinfo(fn)
    debug_info = core.DebugInfo(name, source, None, core.initial_result_paths)
    fun = lu.wrap_init(fn, debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(fun, avals)
    if not _MERGED:
        jaxpr = Jaxpr(pe.convert_constvars_jaxpr(jaxpr), ())
    return jaxpr, consts


def open_jaxpr(jaxpr):
    """The object that holds `.invars`, `.outvars` and `.eqns`."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr) -> Sequence[Any]:
    """The arrays that a jaxpr holds."""
    return getattr(jaxpr, "consts", ())


@weakref_lru_cache
def without_consts(jaxpr):
    """`(jaxpr that takes its constants as first inputs, constants)`."""
    consts = jaxpr_consts(jaxpr)
    if not consts:
        return jaxpr, ()
    lifted = pe.convert_constvars_jaxpr(open_jaxpr(jaxpr))
    return closed(lifted), tuple(consts)


def dce_jaxpr(jaxpr, used_outputs: Sequence[bool]):
    """`(smaller jaxpr, which inputs it still uses)`, cached."""
    new, used = pe.dce_jaxpr(jaxpr.jaxpr, list(used_outputs))
    return (new if _MERGED else pe.close_jaxpr(new)), used


def without_dead_code(jaxpr):
    """The jaxpr with the same inputs and results, and only the work they need."""
    new, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.out_avals), instantiate=True)
    return new if _MERGED else Jaxpr(new, jaxpr.consts)


def backward_pass(jaxpr, args, cts):
    """Cotangents of the inputs of a linear jaxpr that are `UndefinedPrimal`."""
    return ad.backward_pass(jaxpr.jaxpr, False, jaxpr.consts, args, cts)


def jvp_jaxpr(jaxpr, nonzeros: Sequence[bool]):
    """`(jaxpr of primals and nonzero tangents, which output tangents are nonzero)`."""
    return ad.jvp_jaxpr(jaxpr, list(nonzeros), False)


def linearize_jaxpr(jaxpr, nonzeros: Sequence[bool], is_vjp: bool):
    """Split a jaxpr into a part that computes and a part that is linear.

    Returns:
      `(primal jaxpr, number of flat residuals, which output tangents are nonzero, for
      each residual of the tangent jaxpr the input that it is or None, tangent jaxpr)`.
      The primal jaxpr returns its results, the flat residuals that are not inputs,
      and (from 0.11 on) the structured residuals. The tangent jaxpr takes all flat
      residuals, the nonzero tangents, and the structured residuals.
    """
    split: Any = ad.linearize_jaxpr(jaxpr, tuple(nonzeros), is_vjp=is_vjp)
    primal, out, nzs_out, forwarded, tangent = split
    n_flat = len(out.unpack()[1]) if _MERGED else out
    return primal, n_flat, nzs_out, forwarded, tangent


def batch_jaxpr(jaxpr, axis_data, in_axes):
    return batching.batch_jaxpr2(jaxpr, axis_data, tuple(in_axes))


@contextlib.contextmanager
def without_mesh():
    """A context with no mesh at all, neither set nor of a `with mesh:` block."""
    resources, legacy = mesh.thread_resources, config.mesh_context_manager
    env, entered = resources.env, legacy.swap_local(())
    resources.env = env.with_mesh(mesh.Mesh(np.empty((), object), ()))
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            yield
    finally:
        resources.env = env
        legacy.set_local(entered)


# ---------------------------------------------------------------------------------
# Registering rules


def register_linearization(primitive, rule: Callable) -> None:
    """Register `rule(is_vjp, nonzeros, *primals, **params)`.

    `rule` returns `(outs, nonzeros_out, residuals, fn(residuals, *tangents))`.
    """
    if not _MERGED:
        ad.primitive_linearizations[primitive] = rule
        return

    def with_structured_residuals(is_vjp, nonzeros, *primals, **params):
        outs, nzs_out, residuals, linear = rule(is_vjp, nonzeros, *primals, **params)
        return (
            outs, nzs_out, residuals, None,
            lambda residuals, _, *tangents: linear(residuals, *tangents),
        )  # fmt: skip

    ad.primitive_linearizations[primitive] = with_structured_residuals


def register_dce(primitive, rule: Callable) -> None:
    """Register `rule(used_outputs, eqn)` -> `(used_inputs, new eqn or None)`."""
    pe.dce_rules[primitive] = lambda used, *rest: rule(list(used), rest[-1])


def register_partial_eval(primitive, rule: Callable) -> None:
    """Register `rule(trace, *tracers, **params)` of partial evaluation by tracers."""
    pe.custom_partial_eval_rules[primitive] = rule


def register_remat_policy(primitive, jaxpr_param, res_aval: Callable) -> None:
    """Let checkpoint policies see into the jaxpr that `primitive` maps over rows."""

    def update(unks_in, inst_in, kept_known, kept_staged, n_out, n_in, known, staged):
        return known, staged

    def rule(saveable, unks_in, inst_in, eqn):
        return pe.closed_call_partial_eval_custom_rule(
            jaxpr_param, update, saveable, unks_in, inst_in, eqn, res_aval=res_aval
        )

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def effects_of(jaxpr) -> frozenset:
    """What a jaxpr does to others, which mutable arrays of its own are not."""
    return frozenset(jaxpr.effects) - {core.internal_mutable_array_effect}


def new_eqn(eqn, invars, outvars, params, effects):
    return eqn.replace(invars=invars, outvars=outvars, params=params, effects=effects)


def partial_eval_jaxpr(jaxpr, unknown_in: Sequence[bool]):
    """`(known jaxpr, unknown jaxpr, which outputs are unknown, residual types)`.

    The known jaxpr returns its outputs and then the residuals; the unknown jaxpr
    takes the residuals and then the unknown inputs.
    """
    return pe.partial_eval_jaxpr_nounits(jaxpr, list(unknown_in), instantiate=False)


def partial_eval_by_tracers(
    primitive, trace, tracers, unknown_in, params, split, to_outer
):
    """Known work now, unknown work as one equation with the residuals as inputs.

    Args:
      split: What `partial_eval_jaxpr` returned for `params["jaxpr"]`.
      to_outer: Turns a type inside the jaxpr into the type of the value outside.
    """
    known_jaxpr, unknown_jaxpr, unknown_out, res_avals = split
    known_in = [t.pval.get_known() for t in tracers if t.pval.is_known()]
    known_outs = []
    if known_jaxpr.out_avals or known_jaxpr.effects:  # else it would bind no work
        known_outs = primitive.bind(*known_in, **{**params, "jaxpr": known_jaxpr})
    n_known = len(known_outs) - len(res_avals)
    known_iter, residuals = iter(known_outs[:n_known]), known_outs[n_known:]
    in_tracers = [
        *map(trace.new_instantiated_const, residuals),
        *(t for t, unknown in zip(tracers, unknown_in, strict=True) if unknown),
    ]
    out_tracers = [
        pe.JaxprTracer(trace, pe.PartialVal.unknown(to_outer(aval)), None)
        for aval in unknown_jaxpr.out_avals
    ]
    recipe = pe.new_eqn_recipe(
        trace, in_tracers, out_tracers, primitive,
        {**params, "jaxpr": unknown_jaxpr}, unknown_jaxpr.effects,
        source_info_util.current(),
    )  # fmt: skip
    for tracer in out_tracers:
        tracer.recipe = recipe
    if partial_eval_kept_effects.filter_in(unknown_jaxpr.effects):
        # Else it would be dead code where no result is used, as in the body of a scan.
        trace.effect_handles.append(pe.EffectHandle(in_tracers, recipe))
    unknown_iter = iter(out_tracers)
    return [next(unknown_iter if u else known_iter) for u in unknown_out]


def register_printing(primitive, hidden: Callable[[str, Any], bool]) -> None:
    """Print equations of `primitive` without the parameters that say nothing."""

    def rule(eqn, context, settings):
        shown = [k for k, v in eqn.params.items() if not hidden(k, v)]
        return core._pp_eqn(eqn, context, settings, params=sorted(shown))

    core.pp_eqn_rules[primitive] = rule


def register_lowering(primitive, fn: Callable) -> None:
    """Lower `primitive` as the traceable function `fn(*args, **params)`."""
    rule = mlir.lower_fun(fn, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, rule)


def register_jaxpr_lowering(primitive, jaxpr_of: Callable) -> None:
    """Lower `primitive` as the closed jaxpr `jaxpr_of(*avals, **params)`."""

    def rule(ctx, *args, **params):
        closed = jaxpr_of(*ctx.avals_in, **params)
        raw = open_jaxpr(closed)
        if raw.is_high or raw.effects:  # needs more than its equations lowered
            return mlir.lower_fun(jaxpr_as_fun(closed))(ctx, *args)
        module = ctx.module_context
        if ctx.platforms is not None:
            module = module.replace(platforms=ctx.platforms)
        consts = mlir.ir_consts(jaxpr_consts(closed), [v.aval for v in raw.constvars])
        outs, _ = mlir.jaxpr_subcomp(
            module, raw, ctx.name_stack, ctx.tokens_in, consts, *args,
            dim_var_values=ctx.dim_var_values, const_lowering=ctx.const_lowering,
            outer_traceback=None,
        )  # fmt: skip
        return outs

    mlir.register_lowering(primitive, rule)


def register_lowering_rule(primitive, rule: Callable) -> None:
    """Lower `primitive` by `rule(ctx, *values, **params)`, called for each equation."""
    mlir.register_lowering(primitive, rule, cacheable=False)


def lower_function(ctx, fn: Callable, operands, multiple_results: bool, **params):
    """Lower `fn(*operands, **params)`; `operands` are pairs of a value and its type."""
    lower: Any = mlir.lower_fun(fn, multiple_results=multiple_results)
    avals = [aval for _, aval in operands]
    return lower(ctx.replace(avals_in=avals), *(x for x, _ in operands), **params)


def lowered_values(ctx) -> dict:
    """A table that lives as long as the module that is being lowered."""
    return ctx.module_context.cached_primitive_lowerings


def current_block():
    """The block of code into which equations are being lowered."""
    point: Any = ir.InsertionPoint.current
    return point.block


def jaxprs_in(params) -> list:
    """The jaxprs among an equation's parameters."""
    return list(core.jaxprs_in_params(params))


@weakref_lru_cache
def is_bound_to_devices(jaxpr) -> bool:
    """Whether a jaxpr names devices or a layout on them, at any depth."""
    return holds(jaxpr, ("sharding_constraint", "shard_map"))


def holds(jaxpr, names: tuple[str, ...]) -> bool:
    """Whether a jaxpr holds an equation of one of these primitives, at any depth."""
    return any(
        eqn.primitive.name in names
        or any(holds(inner, names) for inner in jaxprs_in(eqn.params))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def bind_equation(eqn, operands, **params) -> list:
    """Bind an equation again, from the same source line; `params` replace its own."""
    bind_params = eqn.primitive.get_bind_params({**eqn.params, **params})
    with source_info_util.user_context(eqn.source_info.traceback):
        outs = eqn.primitive.bind(*operands, **bind_params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def select_outputs(jaxpr, outvars: list):
    """`(function that returns these variables of a closed jaxpr, inputs it takes)`."""
    raw = open_jaxpr(jaxpr)
    debug_info = raw.debug_info.with_unknown_names()
    changed = raw.replace(outvars=outvars, debug_info=debug_info)
    changed = changed if _MERGED else pe.close_jaxpr(changed)
    live, used = dce_jaxpr(changed, [True] * len(outvars))
    return jaxpr_as_fun(live), used


def new_var(aval):
    """A fresh variable for a jaxpr."""
    return core.Var(aval)


def stacked_aval(aval, length: int):
    """The type of a stack of so many values."""
    return ShapedArray((length, *aval.shape), aval.dtype, aval.weak_type)


def user_frames(eqn):
    """The user's lines of which an equation is a part, from the innermost."""
    return source_info_util.user_frames(eqn.source_info.traceback)


def closed(jaxpr):
    """`jaxpr` as a closed jaxpr."""
    return jaxpr if isinstance(jaxpr, Jaxpr) else Jaxpr(jaxpr, ())


def scan_sizes(eqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    if "sizes" in eqn.params:  # rewritten by the interpreter
        return eqn.params["sizes"]
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    groups = eqn.params["ft_in"].update([0] * len(eqn.invars)).unpack()
    consts, carry, _ = map(list, groups)
    return len(consts), len(carry)


def with_equations(jaxpr, eqns: list):
    """A jaxpr with other equations."""
    raw = open_jaxpr(jaxpr)
    changed = raw.replace(eqns=eqns, debug_info=raw.debug_info)
    if _MERGED:
        return changed.with_consts(consts) if (consts := jaxpr.consts) else changed
    return changed if jaxpr is raw else Jaxpr(changed, jaxpr.consts)
