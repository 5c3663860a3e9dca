"""`groups_per_step="tune"`: the number of groups at once that is fastest, by measuring.

Input: how `drjax.jit` compiles a function for a number of groups at once; then the
arguments of a call. Output: the results, by the number that was the fastest for
arguments of these types.

Invariants: numbers are measured once for each signature of arguments, and on copies of
no argument: those that are donated are not while measuring.

Sharp edges: the first call runs the function many times, with all of its effects. Times
on a machine that does other work are noisy, and so is what is chosen by them.
"""

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from drjax import _compat
from drjax._errors import DrjaxValueError
from drjax._jit.jit_primitive import plan_of, planned_p
from drjax._planner.cost import costs
from drjax.backends import xla
from drjax.backends.xla import step_size
from drjax.plan import Plan

_logger = logging.getLogger("drjax")
_RUNS, _SECONDS = 10, 0.5  # the most runs to measure, and seconds after which to stop


P = ParamSpec("P")
R = TypeVar("R")


class Tuned(Generic[P, R]):
    """A function that `drjax.jit` compiles for the number of groups that is fastest.

    The number is measured at the first call with arguments of new types.

    Args:
      fn: The function, for its name and documentation.
      compiled: `compiled(number, residuals, donate)` returns the `jax.jit` of the
        function for a number of groups at once, with an option `residuals` unless it is
        None; `donate`: whether its arguments may be donated.
      budget: Bytes of temporary memory for each device; None: what the devices have
        left.
    """

    __name__: str

    def __init__(
        self,
        fn: Callable[P, R],
        compiled: Callable[[int, str | None, bool], Any],
        budget: int | None,
    ) -> None:
        self._compiled, self._budget = compiled, budget
        self._runs: dict[Any, Any] = {}  # by the signature of the arguments
        functools.update_wrapper(self, fn, updated=())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_runs": {}}  # another machine measures by itself

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._fastest_run(args, kwargs)(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the function, as a `jax.jit` does, with the fastest groups per step.

        With arguments of new types, shardings or mesh in context, it first measures how
        many groups of a device run fastest at once, which needs arrays as arguments.

        Args:
          *args: The positional arguments of the function.
          **kwargs: Its keyword arguments.

        Returns:
          What `.lower()` of a `jax.jit` returns, to `.compile()`.
        """
        return self._fastest_run(args, kwargs).lower(*args, **kwargs)

    def _fastest_run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the `jax.jit` that is the fastest for arguments of these types.

        The first call for a combination of types, shardings and mesh in context
        measures, and records the `jax.jit`; later calls return the same one.
        """
        key = arguments_key(args, kwargs)
        if key not in self._runs:
            self._runs[key] = self._compiled(*self._fastest(args, kwargs), True)
        return self._runs[key]

    def _fastest(self, args: tuple, kwargs: dict[str, Any]) -> tuple[int, str | None]:
        """Measure how many groups of a device should run at once, and what to save.

        It compiles the function for several numbers, and runs it for each that fits in
        memory; and for the fastest once more, with what later rounds need saved. Raises
        `DrjaxValueError` if the arguments are traced or have no values, or if one group
        does not fit.
        """
        leaves = jax.tree.leaves((args, kwargs))
        types = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        if types or _compat.under_trace():
            raise DrjaxValueError(
                'groups_per_step="tune" measures with the arguments of the first call, '
                "which must be arrays. Call it outside of jax.jit, jax.grad and other "
                "transformations, which may be inside of it; or give a number."
            )
        budget = self._budget
        if budget is None:
            budget = step_size.free_bytes(jax.local_devices())
        fits, times = False, dict[int, float]()

        def seconds(size: int, residuals: str | None = None) -> float:
            nonlocal fits
            run = self._compiled(size, residuals, False)
            if residuals or not fits:
                # Once a number fits, smaller ones do, and are compiled once.
                compiled = run.lower(*args, **kwargs).compile()
                fits = compiled.memory_analysis().temp_size_in_bytes <= budget
            times[size] = _least_seconds(run, args, kwargs) if fits else math.inf
            return times[size]

        call = planned_call(self._compiled(1, None, False).trace(*args, **kwargs))
        if call is None:
            return 1, None
        plan, chooses = call
        count = xla.groups_of_device(plan)
        size = fastest(count, seconds)
        # All groups at once save it anyway.
        if size == count or not chooses or not costs(plan)[1].rematerializes:
            return size, None
        again, saving = times[size], seconds(size, "store")
        _logger.info("residuals: recompute: %.3g s, store: %.3g s", again, saving)
        return size, "store" if saving < again else None


def planned_call(traced: jax.stages.Traced) -> tuple[Plan, bool] | None:
    """Return the plan that a call runs, and whether no option says what it saves.

    None if the function has no plan with groups. The traced function is planned for it,
    not compiled.
    """
    for eqn in traced.jaxpr.eqns:
        if eqn.primitive is planned_p:
            options = eqn.params["options"]
            plan = plan_of(eqn.params["jaxpr"], options)
            return plan, options.rematerialize is None
    return None


def _least_seconds(
    run: jax.stages.Wrapped, args: tuple, kwargs: dict[str, Any]
) -> float:
    """Measure the least time of several calls in seconds, without that of compiling.

    A first call, which is not timed, compiles. At most `_RUNS` calls are timed, and no
    more once they have taken `_SECONDS` in total.
    """
    jax.block_until_ready(run(*args, **kwargs))
    times: list[float] = []
    while len(times) < _RUNS and sum(times) < _SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(run(*args, **kwargs))
        times.append(time.perf_counter() - start)
    return min(times)


def arguments_key(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return a hashable key of a call's arguments: one measurement serves equal keys.

    It has the tree structure, the shapes, dtypes and shardings of arrays, the classes
    of other leaves, and the mesh in context.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    kinds = [
        (x.shape, x.dtype, getattr(x, "sharding", None))
        if hasattr(x, "shape")
        else type(x)
        for x in leaves
    ]
    return tree, tuple(kinds), jax.sharding.get_abstract_mesh()


def fastest(count: int, seconds: Callable[[int], float]) -> int:
    """Find the number of groups at once, up to `count`, that takes the least time.

    All at once, a fourth of them, a sixteenth, ..., are measured, until two, one after
    the other, take more than 1.5 times as long as the best; then half and twice the
    best number. The search assumes that time grows away from the best number. The
    result is logged. At most `4 + log(count) / log(4)` numbers are measured. It is a
    `DrjaxValueError` if one group does not fit.

    `count` is the number of slots of a device: places for one group each. `seconds`
    compiles the program for a number of groups at once, and returns its time; infinity
    if it does not fit in memory.
    """
    known: dict[int, float] = {}
    size, slow = count, 0
    while slow < 2:
        known[size] = seconds(size)
        best = min(known.values())
        slow = slow + 1 if best < math.inf and known[size] > 1.5 * best else 0
        if size == 1:
            break
        size = -(-size // 4)
    best = min(known, key=known.__getitem__)
    if known[best] == math.inf:
        raise DrjaxValueError(
            "Not even one group at a time fits in memory. Raise memory_budget=, or "
            "make the work of a group smaller."
        )
    for size in (-(-best // 2), min(2 * best, count)):
        if size not in known:
            known[size] = seconds(size)
    best = min(known, key=known.__getitem__)
    times = ", ".join(f"{size}: {known[size]:.3g} s" for size in sorted(known))
    _logger.info("groups_per_step=%d of %d is the fastest: %s", best, count, times)
    return best
