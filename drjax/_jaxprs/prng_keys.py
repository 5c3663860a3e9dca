"""Random keys as raw data, uint32: as stages exchange them.

Input and output: arrays, or their types. Other dtypes than keys pass unchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from drjax._compat.types import Array
from drjax._plan.value import Value


def is_key(dtype: DTypeLike) -> bool:
    """Whether a dtype is that of typed keys, such as `jax.random.key` returns."""
    # First what is quick: no dtype of numpy is one of keys.
    numpys = isinstance(dtype, np.dtype)
    return not numpys and jnp.issubdtype(dtype, jax.dtypes.prng_key)


@functools.lru_cache(maxsize=64)
def key_impl(dtype: DTypeLike) -> str:
    """Return the name of the implementation of keys of a dtype, such as "rbg"."""
    impls: list[str] = []
    # JAX names the implementation of a key, not of a dtype: trace with an abstract key.
    record = lambda key: impls.append(str(jax.random.key_impl(key)))
    jax.eval_shape(record, jax.ShapeDtypeStruct((), dtype))
    return impls[0]


def key_dtype(impl: str) -> Any:
    """Return the dtype of typed keys of the implementation with the name `impl`."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


def to_raw(x: Any) -> Any:
    """Convert an array of typed keys `[*s]` to raw data, uint32 `[*s, k]`.

    An array of another dtype is returned unchanged.
    """
    return jax.random.key_data(x) if is_key(x.dtype) else x


def from_raw(x: Any, dtype: DTypeLike) -> Any:
    """Convert raw data, uint32 `[*s, k]`, back to keys, if `dtype` is one of keys.

    With another dtype, `x` is returned unchanged.
    """
    if is_key(dtype):
        return jax.random.wrap_key_data(x, impl=key_impl(dtype))
    return x


def on_raw(fn: Callable[[Any], Any], x: Array | np.ndarray) -> Any:
    """Apply a function of arrays to `x`; of typed keys, to their raw data.

    The implementation of the keys may be any, also one that JAX knows by no name. The
    function keeps the dtype. Of keys `[*s]` it takes uint32 `[*s, k]`, and may change
    any axis but the last one.
    """
    if not is_key(x.dtype):
        return fn(x)
    return jax.random.wrap_key_data(
        fn(jax.random.key_data(x)), impl=jax.random.key_impl(x)
    )


def raw_type(value: Value) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype in which stages exchange a value.

    Random keys are exchanged as raw data: uint32, with one more dimension at the end.
    Of a partitioned value, the type is that of one group's slice.
    """
    typed = jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.eval_shape(to_raw, typed) if is_key(value.dtype) else typed
