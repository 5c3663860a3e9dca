"""StableHLO's reference interpreter: what JAX lowers is run without being compiled.

It shares no code with XLA, and a small program that is run once takes a hundredth of
the time that compiling it takes.
"""

import functools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager

UNKNOWN = ["custom_call", "sdy."]
if jax.__version_info__ < (0, 12):  # wrong numbers for some scatters, and an abort
    UNKNOWN += ["stablehlo.scatter", "complex<f32>"]
LEGALIZE = "builtin.module(func.func(chlo-legalize-to-stablehlo))"


@functools.cache
def _register():
    stablehlo.register_stablehlo_passes()


def interpreted(fn, **options):
    """`jax.jit(fn)` on one device, run by the interpreter: for one set of shapes.

    What it cannot run is compiled with the options of `jax.jit`.
    """
    known, compiled = None, jax.jit(fn, **options)

    def run(*args):
        nonlocal known
        if known is None:
            known = _module(fn, args)
        module, out = known
        if module is None:
            return compiled(*args)
        with module.context:
            # With its dtype: a literal of a jaxpr is a Python number that has one.
            flat = [
                np.asarray(x, getattr(x, "dtype", None))
                for x in map(_raw, jax.tree.leaves(args))
            ]
            result = stablehlo.eval_module(
                module,
                [
                    ir.DenseElementsAttr.get(
                        np.ascontiguousarray(x),
                        type=mlir.dtype_to_ir_type(x.dtype),
                        shape=x.shape,
                    )
                    for x in _as_bytes(flat)
                ],
            )
            infos, tree = jax.tree.flatten(out)
            return tree.unflatten(
                _like(info, np.array(x)) for x, info in zip(result, infos, strict=True)
            )

    return run


def _module(fn, args):
    """The module of a function; None where XLA must run it, for a kernel of its own."""
    leaves, tree = jax.tree.flatten(args)
    kinds = [x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype for x in leaves]
    out = None

    def with_bytes(*flat):
        nonlocal out
        flat = [_typed(x, kind) for x, kind in zip(flat, kinds, strict=True)]
        result = jax.tree.map(jnp.asarray, fn(*tree.unflatten(flat)))
        out = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result)
        return _as_bytes(list(map(_raw, jax.tree.leaves(result))))

    flat = _as_bytes([np.asarray(x) for x in map(_raw, leaves)])
    lowered = jax.jit(with_bytes, keep_unused=True).lower(*flat)
    module: Any = lowered.compiler_ir("stablehlo")
    text = str(module)
    if any(word in text for word in UNKNOWN):
        return None, None
    with module.context:
        _register()
        PassManager.parse(LEGALIZE).run(module.operation)
    return module, out


def _is_key(dtype) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _raw(x):
    """An array without its keys' type."""
    return jax.random.key_data(x) if hasattr(x, "dtype") and _is_key(x.dtype) else x


def _typed(x, dtype):
    """The opposite of `_raw` and `_as_bytes`."""
    if _is_key(dtype):
        return jax.random.wrap_key_data(x)
    return x != 0 if dtype == np.bool_ else x.astype(dtype)


def _like(info, x):
    if _is_key(info.dtype):
        return jax.random.wrap_key_data(x.reshape(*info.shape, -1))
    return x.reshape(info.shape).astype(info.dtype)


def _as_bytes(values):
    """Booleans as bytes, bfloat16 as float32: numpy has neither single bits nor it."""
    wider = {np.dtype(bool): np.int8, jnp.dtype(jnp.bfloat16): np.float32}
    return [x.astype(wider[x.dtype]) if x.dtype in wider else x for x in values]


def stage_runner():
    """Runs stages of a plan as `drjax.backends.reference._call` does."""
    known: dict = {}

    def run(stage, args):
        if not stage.jaxpr.eqns:
            return jax.extend.core.jaxpr_as_fun(stage.jaxpr)(*args)
        if id(stage) not in known:
            known[id(stage)] = (
                stage,
                interpreted(jax.extend.core.jaxpr_as_fun(stage.jaxpr)),
            )
        return known[id(stage)][1](*args)

    return run
