"""`groups_per_step="auto"` where all groups fit: the program is compiled once.

Input: a function that plans with all groups of a device at once, and a budget. Output:
a `jax.jit` of it, if the program that it compiles needs no more temporary memory.

What is compiled to ask for its memory is what runs then: JAX keeps it. Only where it
needs too much is the number of groups searched for (`backends/xla/step_size.py`).

Invariants: nothing is compiled by a call, so that no program runs that was not asked.
Sharp edges: once some arguments need too much memory, all later calls search.
"""

import contextvars
from collections.abc import Callable
from typing import Any

import jax

from drjax import _compat
from drjax._jit.tune import groups_of_device
from drjax.backends.xla import step_size

_compiling: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "compiling", default=False
)


class NotAsked(Exception):
    """Raised by a call that would compile: the program's memory is not known yet."""


class Guarded:
    """A function to be compiled only by `AtOnce.lower`; `jax.jit` caches by it."""

    def __init__(self, fn: Callable) -> None:
        self._fn, self.__name__ = fn, fn.__name__

    @property
    def __wrapped__(self) -> Callable:
        return self._fn.__wrapped__

    def __repr__(self) -> str:
        return repr(self._fn)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return Guarded, (self._fn,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _compiling.get():
            raise NotAsked
        return self._fn(*args, **kwargs)


class AtOnce:
    """A `jax.jit` of a guarded function, and the bytes that each device has for it."""

    def __init__(self, fn: Guarded, budget: int | None, options: dict[str, Any]):
        self.call, self._budget = jax.jit(fn, **options), budget
        self._parts = fn, budget, options

    def __reduce__(self) -> tuple[Callable, tuple]:
        return AtOnce, self._parts  # an unpickled `jax.jit` has no `trace`

    def lower(self, args: tuple, kwargs: dict[str, Any]) -> jax.stages.Lowered | None:
        """Lower and compile it; None if what is compiled needs too much memory."""
        token = _compiling.set(True)
        try:
            traced = self.call.trace(*args, **kwargs)
            lowered = traced.lower()
        finally:
            _compiling.reset(token)
        memory: Any = lowered.compile().memory_analysis()
        mesh = _compat.concrete_mesh()
        devices = jax.local_devices()[:1] if mesh.empty else mesh.local_devices
        budget = self._budget or step_size.free_bytes(devices)
        count, used = groups_of_device(traced), memory.temp_size_in_bytes
        return lowered if step_size.all_fit(count, lambda _: used, budget) else None


def may_be_asked() -> bool:
    """Whether a program can be compiled here: its devices are known, nothing traces."""
    abstract = jax.sharding.get_abstract_mesh()
    known = abstract.empty or not _compat.concrete_mesh().empty
    return known and not _compat.under_trace() and not jax.config.jax_disable_jit
