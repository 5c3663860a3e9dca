"""The rules that all primitives share: execution, lowering, batching, printing.

Input: a primitive, and its execution function `fn(*args, **params)`, which is traceable
and has the mesh as a parameter. Output: entries in JAX's registries; and, for the
derivative rules of higher-order primitives, helpers on tangents and residuals.

All rules of a primitive take its parameters as keywords, and may ignore some of them.
`drjax/primitives.py` says what operands, results and parameters are. Of these rules
xs are the operands, and ys the results: a sequence, but one result stands alone.

    execute(*xs, **params)                      ys, by traceable code
    abstract_eval(*avals, **params)             the types of ys, from those of xs
    jvp(primals, tangents, **params)            (ys, the tangents of ys)
    transpose(cts, *xs, **params)               for each x in a list: its cotangent if
                                                the equation is linear in it, else None
    batch([axis_data,] xs, dims, **params)      (ys, dims of ys)
    lowering_rule(ctx, *values, **params)       the list of MLIR values of ys

In `transpose`, cts are the cotangents of ys, and an x is an `UndefinedPrimal` if the
equation is linear in it. In `batch`, a batched x has one more dimension, of which dims
has the position, None for an x without one. The rules of linearization, of partial
evaluation and of dead-code elimination are described in `_compat/rule_registries.py`.

Invariants: eager and staged calls run the same function; a batch dimension never stands
before the group axis of a partitioned operand.
Sharp edges: JAX's registries are global, so a rule is registered once, on import.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._compat import Zero
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, Aval, ClosedJaxpr, Flags
from drjax._primitives.dispatch_cache import cache_by_params

Tangent: TypeAlias = Array | Zero  # or a cotangent; Zero is a symbolic zero
Residuals: TypeAlias = tuple[Sequence[Array], Sequence[Array]]  # flat, structured
# Of the slots (places for one group) of a device, in its code: int32 [k], the group
# index of each, n or more for padding; None if no slot is padding.
SlotIndices: TypeAlias = Array | None
AxisData: TypeAlias = Any  # JAX's, of a vmap: the size and the name of its axis


def new_primitive(name: str, multiple_results: bool = False) -> Primitive:
    """Make a JAX primitive without any rules, whose printed name is `drjax_<name>`."""
    primitive = Primitive(f"drjax_{name}")
    primitive.multiple_results = multiple_results
    # High-level types in its jaxprs are lowered when these run, in that context.
    setattr(primitive, "is_high", lambda *_, **__: False)  # noqa: B010
    return primitive


# The building blocks, which `drjax.primitives` documents: plans make steps of them.
BLOCKS: set[Primitive] = set()


def new_block(name: str, multiple_results: bool = False) -> Primitive:
    """Make the JAX primitive of a building block, which the planner looks for."""
    primitive = new_primitive(name, multiple_results)
    BLOCKS.add(primitive)
    return primitive


def register_execution(
    primitive: Primitive, fn: Callable, lowering_rule: Callable | None = None
) -> None:
    """Register how `primitive` runs and is lowered, by a traceable function.

    Eager calls go through one jitted function for each set of parameters, so that a
    second call with the same shapes compiles nothing. Under `jax.disable_jit` the
    function is called directly. If `lowering_rule` is None, `fn` is lowered. Parameters
    with the value None are left out of printed equations.
    """

    @cache_by_params
    def compiled(**params: Any) -> Callable:
        def run(*args: Array) -> Any:  # fn itself, in which jit finds a concrete mesh
            if _compat.finds_nans(args) and jax.sharding.get_abstract_mesh().empty:
                # Loops step by step, so that the equation is found.
                with jax.disable_jit():
                    return fn(*args, **params)
            return fn(*args, **params)

        run.__name__ = primitive.name
        return jax.jit(run)

    def impl(*args: Array, **params: Any) -> Any:
        if _compat.disable_jit():
            return fn(*args, **params)
        return compiled(**params)(*args)

    primitive.def_impl(impl)
    if lowering_rule is None:
        _compat.register_lowering(primitive, fn)
    else:
        _compat.register_lowering_rule(primitive, lowering_rule)
    # Without a mesh, `mesh=None` in each printed equation would be noise.
    _compat.register_printing(primitive, lambda key, value: value is None)


def group_axis_first(x: Array, dim: int) -> tuple[Array, int]:
    """Move the group axis of a batch of partitioned values to axis 0.

    `x` is `[n, *s]` with the batch dimension inserted at `dim`. If that is 0, it
    changes places with the group axis, which is axis 1; else `x` stays as it is.
    Returns the array and the position of its batch dimension, at least 1.
    """
    return (x, dim) if dim != 0 else (_compat.moveaxis(x, 0, 1), 1)


def register_batching(
    primitive: Primitive, out_shift: int, group_axis_in: bool
) -> None:
    """Register the batching rule of a primitive with one operand and one result.

    The rule binds the primitive once for the whole batch. The primitive may add or
    remove the group axis, axis 0, before the batch dimension: `out_shift` is 1 if it
    adds it, -1 if it removes it, else 0. So if the operand has its batch dimension at
    d, the result has it at d + `out_shift`. An operand with a group axis
    (`group_axis_in`) gets it to axis 0 first.
    """

    def rule(
        args: Sequence[Array], dims: Sequence[int], **params: Any
    ) -> tuple[Array, int]:
        x, dim = (
            group_axis_first(args[0], dims[0]) if group_axis_in else (args[0], dims[0])
        )
        return primitive.bind(x, **params), dim + out_shift

    batching.primitive_batchers[primitive] = rule


def linearize_saving_residuals(
    bind: Callable[[ClosedJaxpr, Sequence[Array]], list[Array]],
    jaxpr: ClosedJaxpr,
    primals: Sequence[Array],
    split: tuple[ClosedJaxpr, int, Flags, Sequence[int | None], ClosedJaxpr],
) -> tuple[list[Array], Flags, Residuals, ClosedJaxpr]:
    """Linearize a higher-order primitive, and save the residuals of its primal part.

    Residuals are the values of the forward computation that the linear part needs. JAX
    has two sorts: flat ones are arrays; structured ones, from JAX 0.11 on, are the
    leaves of pytrees that some linearization rules return.

    `bind(jaxpr, operands)` applies a jaxpr; it is called once, for the primal jaxpr.
    `split` is what `_compat.linearize_jaxpr(jaxpr, ...)` returns: the primal jaxpr,
    whose results are those of `jaxpr` and then residuals; how many of these are flat;
    for each result of `jaxpr` whether its tangent is nonzero; for each flat residual
    the position of the primal that it is, None if the primal jaxpr returns it; and the
    tangent jaxpr.

    Returns the results of `jaxpr`, the flags of their tangents, the residuals, and the
    tangent jaxpr. That one is linear: it takes `linear_operands(residuals, tangents)`,
    for the nonzero tangents of `primals`, and returns the nonzero tangents of results.
    """
    primal, n_flat, nonzeros_out, forwarded, tangent = split
    outs = bind(primal, primals)
    n = len(jaxpr.out_avals)
    new = iter(outs[n : n + n_flat])
    # A residual that is an operand is not saved twice: `forwarded` has its position.
    flat = [next(new) if i is None else primals[i] for i in forwarded]
    return outs[:n], nonzeros_out, (flat, outs[n + n_flat :]), tangent


def linear_operands(residuals: Residuals, tangents: Iterable[Array]) -> list[Array]:
    """List the operands of the linear jaxpr that `linearize_saving_residuals` returns.

    The order is JAX's: flat residuals, the nonzero tangents of the primals, structured
    residuals.
    """
    flat, structured = residuals
    return [*flat, *tangents, *structured]


def instantiate_nonzeros(tangents: Sequence[Tangent], nonzeros: Flags) -> list[Array]:
    """Select the tangents marked in `nonzeros`, with arrays for symbolic zeros."""
    pairs = zip(tangents, nonzeros, strict=True)
    return [ad.instantiate_zeros(t) for t, nonzero in pairs if nonzero]


def fill_zeros(
    avals: Sequence[Aval], nonzeros: Flags, values: Iterable[Array]
) -> list[Tangent]:
    """List the tangents of all results: nonzero ones, and symbolic zeros for the rest.

    `values` are the nonzero tangents, in order; `avals` are the types of all results.
    """
    values = iter(values)
    return [
        next(values) if nz else _compat.Zero(aval.to_tangent_aval())
        for aval, nz in zip(avals, nonzeros, strict=True)
    ]


def backward_function(
    jaxpr: ClosedJaxpr, linear: Flags, nonzero: Flags
) -> tuple[Callable[..., list[Array]], list[bool]]:
    """Make the function that computes the cotangents of a jaxpr's linear inputs.

    `linear` says for each input whether the jaxpr is linear in it; the others are
    residuals. `nonzero` says for each result whether its cotangent is no symbolic zero.

    Returns `(fn, nonzero_in)`. `fn(*residuals, *cotangents)` takes the nonzero
    cotangents of results, and returns the list of nonzero cotangents of linear inputs.
    `nonzero_in` is empty now; each call of `fn` sets it to one bool for each linear
    input: whether its cotangent is nonzero.
    """
    nonzero_in: list[bool] = []

    def transposed(*residuals_and_cts: Array) -> list:
        values = iter(residuals_and_cts)
        args = [
            _compat.UndefinedPrimal(aval) if lin else next(values)
            for aval, lin in zip(jaxpr.in_avals, linear, strict=True)
        ]
        cts = [
            next(values) if nz else _compat.Zero(aval.to_tangent_aval())
            for aval, nz in zip(jaxpr.out_avals, nonzero, strict=True)
        ]
        cts_in = _compat.backward_pass(jaxpr, args, cts)
        cts_in = [ct for ct, lin in zip(cts_in, linear, strict=True) if lin]
        # Which cotangents are symbolic zeros is known only after the backward pass.
        nonzero_in[:] = [type(ct) is not _compat.Zero for ct in cts_in]
        return [ct for ct, nz in zip(cts_in, nonzero_in, strict=True) if nz]

    return transposed, nonzero_in
