"""`groups_per_step="auto"` where all groups fit: the program is compiled once.

Input: a function that plans with all groups of a device at once, and a budget. Output:
whether the program that `jax.jit` compiles of it needs no more temporary memory.

What is compiled to ask for its memory is what runs then: JAX keeps it. Only where it
needs too much is the number of groups searched for (`backends/xla/step_size.py`).

Sharp edges: `jax.jit` cannot be asked whether a call would compile. So the types of
arguments are looked up at each call, which takes some microseconds.
"""

import logging
from collections.abc import Callable
from typing import Any

import jax

from drjax import _compat
from drjax._jit.tune import arguments_key, planned_call
from drjax.backends import xla
from drjax.backends.xla import step_size

_logger = logging.getLogger("drjax")


class AtOnce:
    """A `jax.jit` of a function, and by the types of arguments whether it fits.

    `budget` is in bytes of temporary memory for each device; None: what it has left.
    `asked` has what was asked of the same function and options before.
    """

    def __init__(
        self, fn: Callable, budget: int | None, options: dict[str, Any], asked: dict
    ) -> None:
        self.call, self._budget = jax.jit(fn, **options), budget
        self._asked: dict[Any, bool] = asked
        self._parts = fn, budget, options

    def __reduce__(self) -> tuple[Callable, tuple]:
        # An unpickled `jax.jit` has no `trace`; another machine asks by itself.
        return AtOnce, (*self._parts, {})

    def fits(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether it fits for these arguments; if it was not asked, it is compiled.

        False where it cannot be asked: while tracing, or if no device is known.
        """
        if _compat.under_trace() or jax.config.jax_disable_jit:
            return False
        key = arguments_key(args, kwargs)
        if key not in self._asked:
            mesh = _compat.concrete_mesh()
            if mesh.empty and not jax.sharding.get_abstract_mesh().empty:
                return False
            devices = jax.local_devices()[:1] if mesh.empty else mesh.local_devices
            self._asked[key] = self._ask(args, kwargs, devices)
        return self._asked[key]

    def _ask(self, args: tuple, kwargs: dict[str, Any], devices: Any) -> bool:
        traced = self.call.trace(*args, **kwargs)
        memory: Any = traced.lower().compile().memory_analysis()
        budget = self._budget or step_size.free_bytes(devices)
        fits, call = memory.temp_size_in_bytes <= budget, planned_call(traced)
        if fits and call is not None:
            text = step_size.memory_text(memory.temp_size_in_bytes, budget)
            _logger.info("%s", xla.Choice(call[0], "store", None, text))
        return fits
