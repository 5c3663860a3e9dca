"""Random keys as raw data, uint32: as stages exchange them.

Input and output: arrays, or their types. Other dtypes than keys pass unchanged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from drjax.plan import Value


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed keys, as `jax.random.key` makes them."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=64)
def key_impl(dtype: Any) -> str:
    """The name of the implementation of random keys of a dtype, as "threefry2x32"."""
    impls: list[str] = []
    # JAX names the implementation of a key, not of a dtype: trace with an abstract key.
    record = lambda key: impls.append(str(jax.random.key_impl(key)))
    jax.eval_shape(record, jax.ShapeDtypeStruct((), dtype))
    return impls[0]


def key_dtype(impl: str) -> Any:
    """The dtype of random keys of the implementation with the name `impl`."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def to_raw(x: Any) -> Any:
    """Convert random keys to their raw data, uint32; return other arrays unchanged."""
    return jax.random.key_data(x) if is_key(x.dtype) else x


def from_raw(x: Any, dtype: Any) -> Any:
    """Convert raw data to random keys if `dtype` is one of keys; else return `x`."""
    if is_key(dtype):
        return jax.random.wrap_key_data(x, impl=key_impl(dtype))
    return x


def raw_type(value: Value) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a plan's value, as raw data if it is random keys."""
    typed = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.eval_shape(to_raw, typed) if is_key(value.dtype) else typed
