"""Registration of a primitive's rules in JAX's registries.

Input: a primitive, and a rule with the signature that its function documents. Output:
an entry in JAX's registry, with the signature of the installed version.
Sharp edges: registries are global.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import callback, core, source_info_util
from jax._src.effects import partial_eval_kept_effects
from jax._src.interpreters import ad, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lib.mlir import ir

from drjax._compat.jax_types import MERGED, cache, jaxpr_as_fun
from drjax._compat.jaxprs import jaxpr_consts, open_jaxpr
from drjax._compat.types import Array, Aval, ClosedJaxpr, Eqn, Flags, Params


def register_linearization(primitive: core.Primitive, rule: Callable) -> None:
    """Register how `jax.linearize` and `jax.grad` linearize equations of `primitive`.

    `rule(is_vjp, nonzeros, *primals, **params)` returns
    `(results, nonzeros_out, residuals, linear)`. `is_vjp` says whether the linear part
    will be transposed. `primals` are the operands and `params` the parameters of the
    equation. `nonzeros` and `nonzeros_out` say for each operand and for each result
    whether its tangent is not a symbolic zero. `residuals` is a pytree of arrays.
    `linear(residuals, *tangents)` takes the tangents of all operands, and returns those
    of all results; either may be symbolic zeros.
    """
    if not MERGED:
        ad.primitive_linearizations[primitive] = rule
        return

    def with_structured_residuals(
        is_vjp: bool, nonzeros: Flags, *primals: Array, **params: Any
    ) -> tuple[Any, ...]:
        outs, nzs_out, residuals, linear = rule(is_vjp, nonzeros, *primals, **params)
        return (
            outs, nzs_out, residuals, None,
            lambda residuals, _, *tangents: linear(residuals, *tangents),
        )  # fmt: skip

    ad.primitive_linearizations[primitive] = with_structured_residuals


def register_dce(
    primitive: core.Primitive,
    rule: Callable[[list[bool], Eqn], tuple[list[bool], Any]],
) -> None:
    """Register the dead-code elimination of equations of `primitive`.

    `rule(used_outputs, eqn)` returns `(used_inputs, new_eqn)`. `used_outputs` says for
    each result whether it is used, and `used_inputs` for each operand whether `new_eqn`
    takes it. `new_eqn` is the equation with only the used operands and results; None if
    it is dead.
    """
    pe.dce_rules[primitive] = lambda used, *rest: rule(list(used), rest[-1])


def register_partial_eval(
    primitive: core.Primitive, rule: Callable[..., Sequence[Any]]
) -> None:
    """Register the partial evaluation of equations with some unknown operands.

    `rule(trace, *tracers, **params)` takes JAX's `JaxprTrace`, the operands as
    `JaxprTracer`s, known or unknown, and the parameters of the equation. It returns the
    list of results: values if they are known, else tracers, whose equation is recorded
    in the trace. `partial_eval_by_tracers` is the usual way to do that.
    """
    pe.custom_partial_eval_rules[primitive] = rule


def register_remat_policy(
    primitive: core.Primitive,
    jaxpr_param: str,
    res_aval: Callable[[Params, Aval], Aval],
) -> None:
    """Let the policies of `jax.checkpoint` apply inside the jaxpr of a primitive.

    Equations of the primitive evaluate the closed jaxpr in the parameter `jaxpr_param`
    in some way, for instance for each group. `res_aval(params, aval)` returns the type
    that a residual has as a result of the equation, given its type inside the jaxpr.
    """

    def update(
        unks_in: Flags,
        inst_in: Flags,
        kept_known: Flags,
        kept_staged: Flags,
        n_out: int,
        n_in: int,
        known: Params,
        staged: Params,
    ) -> tuple[Params, Params]:
        return known, staged

    def rule(
        saveable: Callable[..., Any],
        unks_in: Flags,
        inst_in: Flags,
        eqn: core.JaxprEqn,
    ) -> Any:
        return pe.closed_call_partial_eval_custom_rule(
            jaxpr_param,
            update,
            saveable,
            [*unks_in],
            [*inst_in],
            eqn,
            res_aval=res_aval,
        )

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def partial_eval_by_tracers(
    primitive: core.Primitive,
    trace: pe.JaxprTrace,
    tracers: Sequence[pe.JaxprTracer],
    unknown_in: Flags,
    params: Params,
    split: tuple[
        ClosedJaxpr,
        ClosedJaxpr,
        Flags,
        Sequence[Aval],
        Sequence[int | None],
    ],
    to_outer: Callable[[Aval], Aval],
) -> list[Any]:
    """Run the known part of an equation, and stage the unknown part as one equation.

    The known part is bound now, and computes the results that do not depend on unknown
    operands, and residuals. The unknown part is recorded in `trace`, JAX's
    `JaxprTrace`: it takes the residuals and the unknown operands. Results are values,
    or tracers if unknown.

    `split` is what `partial_eval_jaxpr` returned for `params["jaxpr"]`, which the
    equation evaluates. `to_outer` maps the type of a value inside this jaxpr to its
    type as a result of the equation, such as `[*s]` to `[n, *s]`.
    """
    known_jaxpr, unknown_jaxpr, unknown_out, res_avals, forwarded = split
    known_in = [t.pval.get_known() for t in tracers if t.pval.is_known()]
    known_outs = []
    if known_jaxpr.out_avals or known_jaxpr.effects:  # else it would bind no work
        known_outs = primitive.bind(*known_in, **{**params, "jaxpr": known_jaxpr})
    n_known = len(known_outs) - len(res_avals)
    known_iter, computed = iter(known_outs[:n_known]), iter(known_outs[n_known:])
    # Operands that are residuals do not pass through the known part: transposing again
    # and again would otherwise add a known part each time.
    residuals = [next(computed) if i is None else known_in[i] for i in forwarded]
    in_tracers: list[Any] = [
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


def register_printing(
    primitive: core.Primitive, hidden: Callable[[str, Any], bool]
) -> None:
    """Print equations of `primitive` without some of their parameters.

    Those for which `hidden(name, value)` is True are left out. The others are printed
    in the order of their names.
    """

    def rule(
        eqn: core.JaxprEqn, context: core.JaxprPpContext, settings: core.JaxprPpSettings
    ) -> Any:
        shown = [k for k, v in eqn.params.items() if not hidden(k, v)]
        return core._pp_eqn(eqn, context, settings, params=sorted(shown))

    core.pp_eqn_rules[primitive] = rule


def register_lowering(primitive: core.Primitive, fn: Callable[..., Any]) -> None:
    """Register that equations of `primitive` are lowered as a traced function.

    `fn(*args, **params)` takes the operands and the parameters of the equation. It
    returns a sequence of results, or a single result if the primitive has one.
    """

    def named(*args: Array, **params: Any) -> Any:
        with jax.named_scope(scope_of(primitive, params)):
            return fn(*args, **params)

    rule = mlir.lower_fun(named, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, rule)


def scope_of(primitive: core.Primitive, params: Params) -> str:
    """Return the name that profilers show around the work of an equation.

    It is that of the primitive, `drjax.reduce_sum`, with that of a mapped function if
    it has one, `drjax.map_fn(work)`.
    """
    name = primitive.name.replace("drjax_", "drjax.", 1)
    return f"{name}({params['name']})" if "name" in params else name


def register_jaxpr_lowering(
    primitive: core.Primitive,
    jaxpr_of: Callable[..., tuple[ClosedJaxpr, Sequence[Array]]],
) -> None:
    """Register that equations of `primitive` are lowered as a jaxpr.

    `jaxpr_of(*avals, **params)` takes the types of the operands and the parameters of
    the equation. It returns a jaxpr from constants and the operands to the results,
    and these constants.
    """

    def rule(ctx: mlir.LoweringRuleContext, *args: ir.Value, **params: Any) -> Any:
        closed, arrays = jaxpr_of(*ctx.avals_in, **params)
        raw = open_jaxpr(closed)
        if raw.is_high or raw.effects:  # needs more than its equations lowered
            fn = functools.partial(jaxpr_as_fun(closed), *arrays)
            return mlir.lower_fun(fn)(ctx, *args)
        module = ctx.module_context
        if ctx.platforms is not None:
            module = module.replace(platforms=ctx.platforms)
        avals = [v.aval for v in raw.invars[: len(arrays)]]
        consts = mlir.ir_consts(arrays, avals)
        outs, _ = mlir.jaxpr_subcomp(
            module, raw, ctx.name_stack, ctx.tokens_in, (), *consts, *args,
            dim_var_values=ctx.dim_var_values, const_lowering=ctx.const_lowering,
            outer_traceback=None,
        )  # fmt: skip
        return outs

    # Each function that runs a plan is lowered once, as that of a jit.
    mlir.register_lowering(primitive, rule, cacheable=False)


def register_lowering_rule(
    primitive: core.Primitive, rule: Callable[..., Sequence[Any]]
) -> None:
    """Register a lowering rule that JAX calls for each equation of `primitive`.

    `rule(ctx, *values, **params)` takes the MLIR values of the operands and the
    parameters of the equation, and returns the MLIR values of the results. JAX does not
    cache what it returns, so it may return different code for equal equations.
    """

    def named(
        ctx: mlir.LoweringRuleContext, *values: ir.Value, **params: Any
    ) -> Sequence[Any]:
        names = ctx.name_stack.extend(scope_of(primitive, params))
        inside = ctx.replace(name_stack=names)
        outs = rule(inside, *values, **params)
        if inside.tokens_out is not None:
            ctx.set_tokens_out(inside.tokens_out)
        return outs

    mlir.register_lowering(primitive, named, cacheable=False)


def call_host(
    ctx: mlir.LoweringRuleContext,
    fn: Callable[..., tuple[Any, ...]],
    operands: Sequence[Any],
) -> Sequence[Any]:
    """Emit a call of the host inside a lowering rule: numpy arrays in and out.

    On a mesh, all axes are Manual or none is: then each device calls, or the first one.
    Not `jax.pure_callback`, which copies the operands to a device of the CPU: where all
    threads of the CPU's devices wait for each other, that waits forever.
    """
    in_avals: Any = ctx.avals_in
    outs, *_ = callback.emit_python_callback(
        ctx,
        fn,
        None,
        list(operands),
        in_avals,
        ctx.avals_out,
        has_side_effect=False,
        returns_token=False,
        sharding=callback._callback_op_sharding(
            ctx.module_context.axis_context, None, ctx.avals_out
        ),
    )
    return outs


def lower_function(
    ctx: mlir.LoweringRuleContext,
    fn: Callable[..., Any],
    operands: Sequence[Any],
    multiple_results: bool,
    **params: Any,
) -> list[Any]:
    """Trace a function inside a lowering rule, and emit its code there.

    Of each operand, `operands` has a pair: its MLIR value, and the type with which `fn`
    is traced. `ctx` is that of the calling rule, whose own types of operands are not
    used. `fn` returns a sequence of results, or a single one if `multiple_results` is
    False; their MLIR values are a list in either case.
    """
    lower: Any = mlir.lower_fun(fn, multiple_results=multiple_results)
    inner = ctx.replace(avals_in=[aval for _, aval in operands], tokens_out=None)
    outs = lower(inner, *(x for x, _ in operands), **params)
    if inner.tokens_out:  # of ordered effects, which are set on the copy only
        ctx.set_tokens_out(inner.tokens_out)
    return outs


def is_computed_from_results(value: Any) -> bool:
    """Whether an MLIR value is computed from results of a `shard_map`, or of loops.

    If not, it is computed from arguments of the function alone.
    """
    stack, seen = [value], set[Any]()
    while stack:
        owner = stack.pop().owner
        if isinstance(owner, ir.Block):
            # Of a loop's body: what the loop carries.
            if owner.owner.name != "func.func":
                return True
        elif owner not in seen:
            seen.add(owner)
            if owner.name in ("sdy.manual_computation", "stablehlo.while"):
                return True
            stack += owner.operands
    return False


def lower_cached_function(
    ctx: mlir.LoweringRuleContext,
    fn: Callable[..., Array],
    operand: tuple[Any, Aval],
    **params: Any,
) -> Sequence[Any]:
    """Emit the code of a function of one array, of which JAX traces one for each type.

    It is `lower_function` for a function of a module with hashable parameters and no
    jaxpr, as a program may have thousands of equal equations. Its result is one array.
    """
    value, aval = operand
    jaxpr = _trace_once(fn, aval, tuple(sorted(params.items())))
    if jaxpr_consts(jaxpr) or jaxpr.effects:
        return lower_function(ctx, jaxpr_as_fun(jaxpr), [operand], True)
    return emit_jaxpr(ctx, jaxpr, [value])


def emit_jaxpr(
    ctx: mlir.LoweringRuleContext, jaxpr: ClosedJaxpr, values: Sequence[Any]
) -> Sequence[Any]:
    """Emit the code of a jaxpr without constants and ordered effects."""
    module = ctx.module_context
    if ctx.platforms is not None:
        module = module.replace(platforms=ctx.platforms)
    outs, _ = mlir.jaxpr_subcomp(
        module, open_jaxpr(jaxpr), ctx.name_stack, ctx.tokens_in, [], *values,
        dim_var_values=ctx.dim_var_values, const_lowering=ctx.const_lowering,
        outer_traceback=None,
    )  # fmt: skip
    return outs


@cache()
def _trace_once(
    fn: Callable[..., Array], aval: Aval, params: tuple[tuple[str, Any], ...]
) -> ClosedJaxpr:
    """Trace a function of one array and of parameters; cached."""
    return jax.make_jaxpr(lambda x: fn(x, **dict(params)))(aval)


def module_token(ctx: mlir.LoweringRuleContext) -> Any:
    """Return an object that identifies the MLIR module that is being lowered.

    It is the same object for all equations of the module, and is deleted with the
    module, so it can be a key of a `WeakKeyDictionary`. JAX's `ModuleContext` cannot:
    it is copied for inner code, and has no weak references.
    """
    return ctx.module_context.shape_poly_state


def current_block() -> Any:
    """Return the MLIR block into which JAX now lowers equations.

    It is that of a function, or of a branch or loop in one.
    """
    point: Any = ir.InsertionPoint.current
    return point.block
