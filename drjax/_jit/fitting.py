"""`groups_per_step="auto"`: what is compiled to ask for its memory is what runs.

Input: a function from options to the `jax.jit` of a program, and a budget. Output: the
`jax.jit` of as many groups at once as fit in it.

All groups of a device at once are compiled first. Only where these need too much is a
smaller number searched for (`backends/xla/step_size.py`). JAX keeps each program that
was compiled, so that the one that is chosen is not compiled again.

Sharp edges: `jax.jit` cannot be asked whether a call would compile. So the types of
arguments are looked up at each call, which takes some microseconds.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from drjax import _compat
from drjax._jit.tune import arguments_key, planned_call
from drjax.backends import xla
from drjax.backends.xla import step_size

_logger = logging.getLogger("drjax")


@dataclass(frozen=True)
class Fitted:
    """What fits: a number of groups at once, None for all, and what they save.

    Attributes:
      size: The number.
      residuals: The option of `drjax.jit`.
      text: Both, and the memory, for `drjax.check`; "": the program has no groups.
    """

    size: int | None
    residuals: str | None
    text: str = ""


# From `size` and `residuals`.
Compiled: TypeAlias = Callable[[int | None, str | None], Any]


class Fitting:
    """The `jax.jit`s of a function, of which the types of arguments choose one.

    `residuals` is the user's option. `budget` is in bytes of temporary memory for each
    device; None: what it has left. `asked` has what was asked of the same function and
    options before.
    """

    def __init__(
        self,
        compiled: Compiled,
        residuals: str | None,
        budget: int | None,
        asked: dict[Any, Fitted],
    ) -> None:
        self._compiled, self._residuals, self._budget = compiled, residuals, budget
        self._asked = asked
        self._known: dict[tuple[int | None, str | None], Any] = {}

    def __reduce__(self) -> tuple[Callable, tuple]:
        # Another machine asks by itself.
        return Fitting, (self._compiled, self._residuals, self._budget, {})

    def asked(self, args: tuple, kwargs: dict[str, Any]) -> Fitted | None:
        """Say what fits for these arguments; if it was not asked, some are compiled.

        None where it cannot be asked: while tracing, or if no device is known.
        """
        if _compat.under_trace() or jax.config.jax_disable_jit:
            return None
        key = arguments_key(args, kwargs)
        if key not in self._asked:
            mesh = _compat.concrete_mesh()
            if mesh.empty and not jax.sharding.get_abstract_mesh().empty:
                return None
            devices = jax.local_devices()[:1] if mesh.empty else mesh.local_devices
            self._asked[key] = self._fitted(args, kwargs, devices)
        return self._asked[key]

    def chosen(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the `jax.jit` of what fits; None where it cannot be asked."""
        fitted = self.asked(args, kwargs)
        return None if fitted is None else self._of(fitted.size, fitted.residuals)

    def _of(self, size: int | None, residuals: str | None) -> Any:
        if (size, residuals) not in self._known:
            self._known[size, residuals] = self._compiled(size, residuals)
        return self._known[size, residuals]

    def _fitted(self, args: tuple, kwargs: dict[str, Any], devices: Any) -> Fitted:
        """Search for how many groups at once fit, and what they save."""
        traced = self._of(None, self._residuals).trace(*args, **kwargs)
        used, call = _temp_bytes(traced), planned_call(traced)
        if call is None:  # it has no groups
            return Fitted(None, self._residuals)
        budget = self._budget
        if budget is None:
            budget = step_size.free_bytes(devices)
        plan, chooses = call
        first = self._residuals or "store"
        if used <= budget:
            text = step_size.memory_text(used, budget)
            choice = xla.Choice(plan, first, None, text)
            _logger.info("%s", choice)
            return Fitted(None, self._residuals, str(choice))
        plans, count = {first: plan}, xla.groups_of_device(plan)
        if chooses:
            other = planned_call(self._of(1, "recompute").trace(*args, **kwargs))
            assert other is not None
            plans["recompute"] = other[0]

        def temp_bytes(residuals: str, step: int) -> int:
            if residuals == first and step == count:
                return used
            size = None if step == count else step
            return _temp_bytes(self._of(size, residuals).trace(*args, **kwargs))

        choice = xla.fitted(plans, budget, None, temp_bytes)
        return Fitted(choice.step, choice.residuals, str(choice))


def _temp_bytes(traced: jax.stages.Traced) -> int:
    memory: Any = traced.lower().compile().memory_analysis()
    return memory.temp_size_in_bytes
