"""What all primitives of drjax share: how they run eagerly, lower, batch and print."""

from collections.abc import Callable

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching

from drjax import _compat
from drjax._structure import cache_by_params


def new_primitive(name: str, multiple_results: bool = False) -> Primitive:
    """A primitive whose printed name carries the prefix `drjax_`."""
    primitive = Primitive(f"drjax_{name}")
    primitive.multiple_results = multiple_results
    # What its jaxprs hold is lowered when they are run, in that context.
    setattr(primitive, "is_high", lambda *_, **__: False)  # noqa: B010
    return primitive


def register_execution(primitive: Primitive, fn: Callable) -> None:
    """Run and lower `primitive` as the traceable function `fn(*args, **params)`.

    Eager calls go through one jitted function for each set of parameters, so that a
    second call with the same shapes compiles nothing. Under `jax.disable_jit` the
    function is called as it is.
    """

    @cache_by_params
    def compiled(**params):
        def run(*args):  # fn itself, in which jit finds a concrete mesh
            return fn(*args, **params)

        run.__name__ = primitive.name
        return jax.jit(run)

    def impl(*args, **params):
        if _compat.disable_jit():
            return fn(*args, **params)
        return compiled(**params)(*args)

    primitive.def_impl(impl)
    _compat.register_lowering(primitive, fn)
    _compat.register_printing(primitive, lambda key, value: value is None)


def rows_first(x, dim: int):
    """Move a batch dimension that stands at the group axis behind it."""
    return (x, dim) if dim != 0 else (_compat.moveaxis(x, 0, 1), 1)


def register_batching(primitive: Primitive, out_shift: int, rows_in: bool) -> None:
    """Batch a one-operand primitive whose result has `out_shift` more dimensions.

    The batch dimension stays where it is, relative to the dimensions of one group.
    """

    def rule(args, dims, **params):
        x, dim = rows_first(args[0], dims[0]) if rows_in else (args[0], dims[0])
        return primitive.bind(x, **params), dim + out_shift

    batching.primitive_batchers[primitive] = rule
