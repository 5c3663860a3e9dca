"""Registration of a primitive's rules in JAX's registries.

Input: a primitive, and a rule with the signature that its function documents. Output:
an entry in JAX's registry, with the signature of the installed version.
Sharp edges: registries are global.
"""

from collections.abc import Callable
from typing import Any

from jax._src import core, source_info_util
from jax._src.effects import partial_eval_kept_effects
from jax._src.interpreters import ad, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lib.mlir import ir

from drjax._compat.jax_types import MERGED, jaxpr_as_fun
from drjax._compat.jaxprs import jaxpr_consts, open_jaxpr


def register_linearization(primitive, rule: Callable) -> None:
    """Register how `jax.linearize` and `jax.grad` linearize equations of `primitive`.

    Args:
      primitive: The primitive.
      rule: `rule(is_vjp, nonzeros, *primals, **params)`, where `nonzeros` says for each
        operand whether its tangent is not a symbolic zero. It returns `(results, which
        of their tangents are nonzero, residuals, linear)`, where `linear(residuals,
        *tangents)` returns the tangents of the results.
    """
    if not MERGED:
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
    """Register the dead-code elimination of equations of `primitive`.

    Args:
      primitive: The primitive.
      rule: `rule(used_outputs, eqn)`, with a bool for each result, returns `(for each
        operand whether it is used, new equation)`; None as equation: it is dead.
    """
    pe.dce_rules[primitive] = lambda used, *rest: rule(list(used), rest[-1])


def register_partial_eval(primitive, rule: Callable) -> None:
    """Register the partial evaluation of equations with some unknown operands.

    Args:
      primitive: The primitive.
      rule: `rule(trace, *tracers, **params)`, with JAX's `JaxprTrace` and the operands,
        returns the results: known values, or tracers. `partial_eval_by_tracers` can
        compute them.
    """
    pe.custom_partial_eval_rules[primitive] = rule


def register_remat_policy(primitive, jaxpr_param, res_aval: Callable) -> None:
    """Let the policies of `jax.checkpoint` apply inside the jaxpr of a primitive.

    Args:
      primitive: The primitive.
      jaxpr_param: The name of its parameter that holds the jaxpr.
      res_aval: From the equation's parameters and the type of a residual in the jaxpr
        to the type of this residual outside, as a result of the equation.
    """

    def update(unks_in, inst_in, kept_known, kept_staged, n_out, n_in, known, staged):
        return known, staged

    def rule(saveable, unks_in, inst_in, eqn):
        return pe.closed_call_partial_eval_custom_rule(
            jaxpr_param, update, saveable, unks_in, inst_in, eqn, res_aval=res_aval
        )

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def partial_eval_by_tracers(
    primitive, trace, tracers, unknown_in, params, split, to_outer
):
    """Run the known part of an equation, and stage the unknown part as one equation.

    The unknown part takes the residuals of the known one.

    Args:
      primitive: The primitive of the equation.
      trace: JAX's `JaxprTrace`, which the partial evaluation rule gets.
      tracers: The operands.
      unknown_in: For each operand whether it is unknown.
      params: The parameters, of which `params["jaxpr"]` is the closed jaxpr.
      split: What `partial_eval_jaxpr` returned for `params["jaxpr"]`.
      to_outer: Turns a type inside the jaxpr into the type of the value outside.

    Returns:
      The results: values, or tracers if they are unknown.
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
    """Print equations of `primitive` without some of their parameters.

    Args:
      primitive: The primitive.
      hidden: From the name and the value of a parameter to whether it is left out.
    """

    def rule(eqn, context, settings):
        shown = [k for k, v in eqn.params.items() if not hidden(k, v)]
        return core._pp_eqn(eqn, context, settings, params=sorted(shown))

    core.pp_eqn_rules[primitive] = rule


def register_lowering(primitive, fn: Callable) -> None:
    """Lower `primitive` as JAX would lower the function `fn(*args, **params)`.

    `fn` has to be traceable; `args` and `params` are those of the equation.
    """
    rule = mlir.lower_fun(fn, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, rule)


def register_jaxpr_lowering(primitive, jaxpr_of: Callable) -> None:
    """Lower `primitive` as the closed jaxpr `jaxpr_of(*avals, **params)`.

    `avals` are the types of the operands, and `params` the parameters of the equation.
    """

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
    """Lower `primitive` by a rule that JAX calls for each equation, without a cache.

    Args:
      primitive: The primitive.
      rule: `rule(ctx, *values, **params)`, from the context of the lowering and the
        MLIR values of the operands to those of the results, in a list.
    """
    mlir.register_lowering(primitive, rule, cacheable=False)


def lower_function(ctx, fn: Callable, operands, multiple_results: bool, **params):
    """Lower a traceable function; returns the MLIR values of its results, in a list.

    Args:
      ctx: The context that JAX gave to the calling lowering rule.
      fn: The function, `fn(*operands, **params)`.
      operands: Pairs of an MLIR value and its type.
      multiple_results: Whether `fn` returns a sequence.
      **params: Keywords of `fn`.
    """
    lower: Any = mlir.lower_fun(fn, multiple_results=multiple_results)
    avals = [aval for _, aval in operands]
    return lower(ctx.replace(avals_in=avals), *(x for x, _ in operands), **params)


def module_token(ctx):
    """An object that stands for the module that is being lowered.

    It is the same one for all equations of the module, and JAX deletes it with the
    module: a key for a `WeakKeyDictionary`. JAX's `ModuleContext` cannot be that key,
    as it is copied for inner code, and has no weak references. `ctx` is the context
    that JAX gave to a lowering rule.
    """
    return ctx.module_context.shape_poly_state


def current_block():
    """The MLIR block (of a function, a branch) into which JAX now lowers equations."""
    point: Any = ir.InsertionPoint.current
    return point.block
