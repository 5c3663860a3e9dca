"""The rules that all primitives share: execution, lowering, batching, printing.

Input: a primitive, and its execution function `fn(*args, **params)`, which is traceable
and has the mesh as a parameter. Output: entries in JAX's registries; and, for the
derivative rules of higher-order primitives, helpers on tangents and residuals.

Invariants: eager and staged calls run the same function; a batch dimension never stands
before the group axis of a partitioned operand.
Sharp edges: JAX's registries are global, so a rule is registered once, on import.
"""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from drjax import _compat
from drjax._primitives.dispatch_cache import cache_by_params


def new_primitive(name: str, multiple_results: bool = False) -> Primitive:
    """Make a JAX primitive without any rules, whose printed name is `drjax_<name>`.

    Args:
      name: The name without the prefix, such as "broadcast".
      multiple_results: Whether `bind` returns a list of results, not one result.

    Returns:
      The `jax.extend.core.Primitive`.
    """
    primitive = Primitive(f"drjax_{name}")
    primitive.multiple_results = multiple_results
    # High-level types in its jaxprs are lowered when these run, in that context.
    setattr(primitive, "is_high", lambda *_, **__: False)  # noqa: B010
    return primitive


def register_execution(
    primitive: Primitive, fn: Callable, lowering_rule: Callable | None = None
) -> None:
    """Register how `primitive` runs and is lowered, by a traceable function.

    Eager calls go through one jitted function for each set of parameters, so that a
    second call with the same shapes compiles nothing. Under `jax.disable_jit` the
    function is called directly. Parameters with the value None are left out of printed
    equations.

    Args:
      primitive: The primitive.
      fn: Its execution function, `fn(*args, **params)`, from operands and parameters of
        an equation to the result, or to a sequence of results if the primitive has
        `multiple_results`.
      lowering_rule: `lowering_rule(ctx, *values, **params)`, from the MLIR values of
        the operands to the list of MLIR values of the results. None: `fn` is lowered.
    """

    @cache_by_params
    def compiled(**params):
        def run(*args):  # fn itself, in which jit finds a concrete mesh
            if _compat.finds_nans(args) and jax.sharding.get_abstract_mesh().empty:
                # Loops step by step, so that the equation is found.
                with jax.disable_jit():
                    return fn(*args, **params)
            return fn(*args, **params)

        run.__name__ = primitive.name
        return jax.jit(run)

    def impl(*args, **params):
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


def group_axis_first(x, dim: int):
    """Move the group axis of a batch of partitioned values to axis 0.

    Args:
      x: The batch: a partitioned value `[n, *s]` with one more dimension, of size b, at
        the position `dim`.
      dim: The position of the batch dimension. If it is 0, the group axis is axis 1,
        and the two change places; else the group axis is first, and `x` stays as it is.

    Returns:
      `(x, dim)`: the batch with the group axis first, and the new position of its batch
      dimension, at least 1.
    """
    return (x, dim) if dim != 0 else (_compat.moveaxis(x, 0, 1), 1)


def register_batching(
    primitive: Primitive, out_shift: int, group_axis_in: bool
) -> None:
    """Register the batching rule of a primitive with one operand and one result.

    The rule binds the primitive once for the whole batch. The primitive may add or
    remove the group axis, axis 0, before the batch dimension. So if the operand has its
    batch dimension at d, the result has it at d + `out_shift`.

    Args:
      primitive: The primitive.
      out_shift: 1 if the primitive adds the group axis, -1 if it removes it, else 0.
      group_axis_in: Whether the operand has a group axis. If so, and its batch
        dimension is 0, the rule moves the group axis before it first.
    """

    def rule(args, dims, **params):
        x, dim = (
            group_axis_first(args[0], dims[0]) if group_axis_in else (args[0], dims[0])
        )
        return primitive.bind(x, **params), dim + out_shift

    batching.primitive_batchers[primitive] = rule


def linearize_saving_residuals(bind: Callable, jaxpr, primals, split):
    """Linearize a higher-order primitive, and save the residuals of its primal part.

    Residuals are the values of the forward computation that the linear part needs. JAX
    has two sorts: flat ones are arrays; structured ones, from JAX 0.11 on, are the
    leaves of pytrees that some linearization rules return.

    Args:
      bind: `bind(jaxpr, operands)` applies a jaxpr, and returns the list of results. It
        is called once, for the primal jaxpr.
      jaxpr: The closed jaxpr to linearize.
      primals: Its operands, a sequence of arrays.
      split: The result of `_compat.linearize_jaxpr(jaxpr, ...)`, a tuple of five: the
        primal jaxpr, which returns the results of `jaxpr`, and then residuals; how many
        of these residuals are flat; for each result whether its tangent is nonzero; for
        each flat residual the position of the operand that it is, or None if the primal
        jaxpr returns it; and the tangent jaxpr.

    Returns:
      `(results, nonzeros_out, residuals, tangent)`:

      * `results`: The list of results of `jaxpr`.
      * `nonzeros_out`: For each of them whether its tangent is nonzero.
      * `residuals`: `(flat residuals, structured residuals)`, two lists of arrays. A
        flat residual that is an operand is that operand, not a copy.
      * `tangent`: The tangent jaxpr of `split`, which is linear. It takes the operands
        that `linear_operands(residuals, tangents)` lists, for the nonzero tangents of
        `primals`; it returns the nonzero tangents of the results.
    """
    primal, n_flat, nonzeros_out, forwarded, tangent = split
    outs = bind(primal, primals)
    n = len(jaxpr.out_avals)
    new = iter(outs[n : n + n_flat])
    # A residual that is an operand is not saved twice: `forwarded` has its position.
    flat = [next(new) if i is None else primals[i] for i in forwarded]
    return outs[:n], nonzeros_out, (flat, outs[n + n_flat :]), tangent


def linear_operands(residuals, tangents) -> list:
    """List the operands of the linear jaxpr that `linearize_saving_residuals` returns.

    Args:
      residuals: A pair of lists, the flat and the structured residuals, which
        `linearize_saving_residuals` returns. The second list is empty before JAX 0.11.
      tangents: The nonzero tangents of the primals, arrays.

    Returns:
      A list in the order that JAX needs: flat residuals, tangents, structured
      residuals.
    """
    flat, structured = residuals
    return [*flat, *tangents, *structured]


def instantiate_nonzeros(tangents, nonzeros) -> list:
    """Select the tangents marked in `nonzeros`, as arrays: symbolic zeros become zeros.

    Args:
      tangents: The tangents of all primals, arrays or symbolic zeros.
      nonzeros: For each tangent whether to return it, a sequence of bools.

    Returns:
      The list of these tangents, in order.
    """
    pairs = zip(tangents, nonzeros, strict=True)
    return [ad.instantiate_zeros(t) for t, nonzero in pairs if nonzero]


def fill_zeros(avals, nonzeros, values) -> list:
    """List the tangents of all results: nonzero ones, and symbolic zeros for the rest.

    Args:
      avals: Types of all results.
      nonzeros: For each result whether its tangent is nonzero, a sequence of bools.
      values: The nonzero tangents, arrays, in order.

    Returns:
      The list of tangents, one for each result: an array or a symbolic zero.
    """
    values = iter(values)
    return [
        next(values) if nz else _compat.Zero(aval.to_tangent_aval())
        for aval, nz in zip(avals, nonzeros, strict=True)
    ]


def backward_function(jaxpr, linear: Sequence[bool], nonzero: Sequence[bool]):
    """Make the function that computes the cotangents of a jaxpr's linear inputs.

    Args:
      jaxpr: The closed jaxpr.
      linear: For each input whether the jaxpr is linear in it; the other inputs are
        residuals, values that the linear computation reads.
      nonzero: For each result whether its cotangent is not a symbolic zero.

    Returns:
      `(fn, nonzero_in)`. `fn(*residuals, *cotangents)` takes the residuals, and the
      nonzero cotangents of results, and returns the list of nonzero cotangents of
      linear inputs. `nonzero_in` is a list that is empty now; each call of `fn` sets it
      to one bool for each linear input: whether its cotangent is nonzero.
    """
    nonzero_in: list[bool] = []

    def transposed(*residuals_and_cts):
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
