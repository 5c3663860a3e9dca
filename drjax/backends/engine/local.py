"""Engines' core without an engine: every block runs in this process, in turn.

For tests of the core, and for groups that come from an iterable or from files.
"""

from typing import Any

from drjax.backends.engine.driver import Runner
from drjax.backends.engine.options import Options
from drjax.backends.engine.pool import InProcess
from drjax.plan import Plan


def compile(plan: Plan, *, workers: int = 1, **options: Any) -> Runner:
    """A function that runs the plan block by block in this process.

    Args:
      plan: The plan.
      workers: How many workers to pretend; blocks are cut as for so many.
      **options: See `Options`. There is no `timeout` here.

    Returns:
      A `Runner` with the signature of the planned function.

    Raises:
      EngineError: (when called) a group failed, or too few survive.
      DrjaxTypeError, DrjaxValueError: A wrong option.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> from drjax.backends.engine import local
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
      >>> print(local.compile(plan, block_size=3)(jnp.arange(4.0)))
      1.5
    """
    return Runner(plan, InProcess(workers), Options.checked(**options))
