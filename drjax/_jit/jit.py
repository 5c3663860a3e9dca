"""`drjax.jit`: a program in normal form, compiled.

Input: a function and options. Output: a `jax.jit` of a function that binds `planned_p`.

Invariants: the same function and options give the same object to `jax.jit`, which
caches by it. Sharp edges: the cache holds functions weakly, so that it keeps none of
them alive.
"""

import difflib
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp

from drjax import _compat
from drjax._api.program import Decorated
from drjax._compat.types import Array, PyTree
from drjax._context import in_chunks, resized
from drjax._errors import DrjaxError, DrjaxTypeError, DrjaxValueError
from drjax._jaxprs.walk import deep_equations
from drjax._jit import lazy_arguments
from drjax._jit.fitting import Fitted, Fitting
from drjax._jit.jit_primitive import (
    Options,
    plan_of,
    plan_to_run,
    planned_p,
    trace,
    varying_axes,
)
from drjax._jit.lazy_arguments import Leaf
from drjax._jit.tune import Tuned
from drjax._jit.written_results import Out, Written
from drjax._planner.naming import argument_names, function_name
from drjax._pytree_paths import KeyPath
from drjax._sharding.execute import vary
from drjax._sharding.planning_context import is_bound
from drjax.backends import xla
from drjax.backends.xla import step_size
from drjax.backends.xla.step_size import GroupsPerStep

_OPTIONS_OF_JIT = inspect.signature(jax.jit).parameters.keys() - {"fun"}

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Jitted(Decorated[P, R_co], Protocol[P, R_co]):
    """For type checkers: what `drjax.jit` returns, the result of a `jax.jit`.

    Its methods also take `jax.ShapeDtypeStruct`s in place of arrays.
    """

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced: ...
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...
    def clear_cache(self) -> None: ...


@overload
def jit(
    fn: Callable[P, R],
    groups_per_step: Literal["tune"],
    residuals: str | None = None,
    memory_budget: int | None = None,
    *,
    checkpoints: Literal["sqrt"] | None = None,
    out: Any = None,
    progress: bool = False,
    **jit_kwargs: Any,
) -> Tuned[P, R]: ...
@overload
def jit(
    fn: Callable[P, R],
    groups_per_step: int | str | None = None,
    residuals: str | None = None,
    memory_budget: int | None = None,
    *,
    checkpoints: Literal["sqrt"] | None = None,
    out: Any = None,
    progress: bool = False,
    **jit_kwargs: Any,
) -> Jitted[P, R]: ...
def jit(
    fn: Callable,
    groups_per_step: int | str | None = None,
    residuals: str | None = None,
    memory_budget: int | None = None,
    *,
    checkpoints: Literal["sqrt"] | None = None,
    out: Any = None,
    progress: bool = False,
    **jit_kwargs: Any,
) -> Any:
    """`jax.jit` of a program in normal form, in memory that does not grow with n.

    Each round of communication becomes one loop over chunks of a device's groups with
    running accumulators, and one all-reduce. Broadcast values are not copied for each
    group. Derivatives of the result are planned too; `drjax.jit(jax.grad(f))` plans
    value and derivative together and is cheaper than `jax.grad(drjax.jit(f))`.

    Data larger than memory: an argument whose values are all partitioned may be a
    `drjax.backends.Groups` or `Parquet`, or have some in its pytree. Each chunk of
    groups, on each device, reads its data when it runs, and a thread reads the next
    one meanwhile; gradients read them again. The call then waits for its results.

    Args:
      fn: A program, or a function that calls programs over one partition, such as
        `jax.value_and_grad(program)` or a loop over rounds.
      groups_per_step: How many of a device's groups run at once. `"auto"`: all if they
        fit in memory, else as many as fit, searched by compiling a few times; the
        result is logged at INFO.
        `"tune"`: as many as are fastest. The first call with arguments of new shapes,
        dtypes or shardings measures about six numbers for n = 100, ten for n = 10,000:
        each compiles the function, and runs it up to eleven times, with its effects.
        Keep the result of `drjax.jit`, which remembers. Default: all; of `Groups`, as
        many as have 16 MB of data.
      residuals: What a round needs of an earlier round's results in the groups:
        `"recompute"` (rematerialize) it, or `"store"` it for all groups. Results of
        equations with effects are stored, and states, from which a round's work starts:
        no work is repeated through two rounds. Default: `"store"` where all groups of a
        device run at once, as `jax.jit` does, and `"recompute"` where they do not.
        `"auto"` stores if all groups fit so, or if fewer at once take no more time, by
        their work and by the number of steps; `"tune"` measures both for the fastest
        number of groups. `drjax.check` of the result says what runs, and what it saves.
      memory_budget: With `"auto"` and `"tune"`, bytes of temporary memory for each
        device. Default: what the devices have left.
      checkpoints: `"sqrt"`: a gradient through a `lax.scan` over T rounds saves what it
        carries at about √T of them, and runs the rounds between two of these again, for
        one more forward pass (revolve; sublinear memory): at as many as take the fewest
        bytes. Default: it saves what each round carries.
      out: What to write partitioned results to while the program runs, chunk by chunk,
        so that they are never in memory for all groups: a dict `{result: target}`, or
        the target of all that the function returns. A result is an index or key of
        what it returns, or a tuple of these, a path, as for `keep=` of backends. A
        target has the `shape`, `[n, ...]`, and `dtype` of the result, and takes slices,
        `target[i:j] = x`, as a `numpy.memmap` or an array of h5py; of a tree of
        results, it is a tree. The call returns the target in the place of the result.
      progress: Whether to show a bar of the groups read, of `Groups` and `Parquet`, for
        each pass over the data; needs tqdm.
      **jit_kwargs: As for `jax.jit`: static_argnums, donate_argnums, in_shardings, ...

    Returns:
      As what `jax.jit` returns: call it, `.lower()` it, take its `jax.grad` or `vmap`.
      With `"tune"`, a function of arrays that has `.lower`, and no derivatives.
      As with `jax.jit`, compiled programs are cached by function and options, as long
      as the function lives: `drjax.jit(f)(x)` in a loop compiles once.

    Raises:
      PlanError: (when called) the program has no plan; `jax.jit` still runs it.
      MeshError: (when called) the partition does not fit the mesh; or the call is
        inside a `jax.shard_map` over the partition's axes, where `jax.jit` runs it.
      DrjaxValueError, DrjaxTypeError: A wrong option; or the data of one of `Groups`
        cannot be read, or do not have the types of group 0; or one of `out` is not of
        the type of its result, or cannot be written.

    Example:
      >>> import drjax, jax, jax.numpy as jnp, numpy as np
      >>> @drjax.program(clients=1000)
      ... def mean_square(x):
      ...     return drjax.reduce_mean(drjax.map_fn(jnp.square, x))
      >>> step = drjax.jit(jax.grad(mean_square), groups_per_step=10)
      >>> print(step(jnp.ones(1000))[:2])
      [0.002 0.002]
      >>> data = drjax.backends.Groups([jnp.float32(i % 2) for i in range(1000)])
      >>> print(drjax.jit(mean_square)(data))
      0.5
      >>> gradients = np.zeros(1000, np.float32)  # or a file, a numpy.memmap
      >>> step = drjax.jit(jax.grad(mean_square), groups_per_step=10, out=gradients)
      >>> print(step(jnp.ones(1000)) is gradients, gradients[:2])
      True [0.002 0.002]

    Source: Rush et al. 2024, sections 4 and 5. Of checkpoints: Griewank and Walther
    2000, "Algorithm 799: revolve"; Chen, Xu, Zhang and Guestrin 2016, "Training deep
    nets with sublinear memory cost".
    """
    if not callable(fn):
        raise DrjaxTypeError(
            f"drjax.jit needs a function, got {type(fn).__name__}. With options, write "
            "functools.partial(drjax.jit, groups_per_step=8) as a decorator."
        )
    if unknown := sorted(jit_kwargs.keys() - _OPTIONS_OF_JIT):
        own = ["groups_per_step", "residuals", "memory_budget"]
        own += ["checkpoints", "out", "progress"]
        options = [*own, *sorted(_OPTIONS_OF_JIT)]
        close = difflib.get_close_matches(unknown[0], options, n=1)
        raise DrjaxTypeError(
            f"drjax.jit takes {', '.join(own)}, and the options of jax.jit, got the "
            f"keyword {unknown[0]!r}."
            + (f" Did you mean {close[0]!r}?" if close else "")
        )
    groups = step_size.checked(
        "drjax.jit", groups_per_step, memory_budget, ("auto", "tune")
    )
    tune = isinstance(groups_per_step, str) and groups_per_step == "tune"
    if residuals not in (None, "recompute", "store"):
        raise DrjaxValueError(
            f'drjax.jit needs residuals="recompute" or "store", got {residuals!r}.'
        )
    if checkpoints not in (None, "sqrt"):
        raise DrjaxValueError(
            f'drjax.jit needs checkpoints="sqrt" or None, got {checkpoints!r}.'
        )
    written = None if out is None else Out.checked(out)
    if tune:
        assert isinstance(groups, step_size.Fit)
        if written is not None:
            raise DrjaxValueError(
                'drjax.jit(groups_per_step="tune") runs a function several times to '
                'measure it, so it cannot write out=. Give a number, or "auto".'
            )
        own = {"checkpoints": checkpoints, **jit_kwargs}
        compiled = functools.partial(_compiled, fn, residuals, own)
        return Tuned(fn, compiled, groups.budget)
    rematerialize = None if residuals is None else residuals == "recompute"
    paths = None if written is None else tuple(written.targets)
    options = rematerialize, checkpoints is not None, paths
    planned, fitting = _planned(fn, (groups, *options)), None
    if isinstance(groups, step_size.Fit):
        own = functools.partial(_fixed, planned, jit_kwargs)
        asked = _asked(fn, groups, *options, *sorted(jit_kwargs.items()))
        fitting = Fitting(own, residuals, groups.budget, asked)
    jitted = _Jit(fn, jax.jit(planned, **jit_kwargs), fitting, progress)
    if written is None:
        return jitted
    assert planned.written is not None
    return _Writing(jitted, written, planned.written)


class _Wrapper:
    """A function in the place of a `jax.jit`, whose other attributes it has."""

    __wrapped__: Callable

    def __init__(self, fn: Callable, jitted: Any) -> None:
        self._jitted = jitted
        # Without its attributes: those of a `jax.jit` say what is traced and lowered.
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return repr(self._jitted)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_jitted":  # as while it is unpickled
            raise AttributeError(name)
        return getattr(self._jitted, name)


class _Jit(_Wrapper):
    """A `jax.jit` that also takes `Groups` as arguments.

    `fitting` has those of fixed numbers of groups at once, of which one fits in memory.
    """

    def __init__(
        self, fn: Callable, jitted: Any, fitting: Fitting | None, progress: bool = False
    ) -> None:
        super().__init__(fn, jitted)
        self._fitting, self._progress = fitting, progress

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._chosen(args, kwargs)(*args, **kwargs)
        except DrjaxError:
            # Raised by `Groups` where they are in the place of an array.
            if not lazy_arguments.has_groups(args, kwargs):
                raise
        return lazy_arguments.run(
            self.__wrapped__, self._jitted, args, kwargs, self._progress
        )

    def _chosen(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The `jax.jit` of as many groups at once as fit, if that is asked for."""
        chosen = self._fitting and self._fitting.chosen(args, kwargs)
        return chosen or self._jitted

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        def lower(*args: Any, **kwargs: Any) -> jax.stages.Lowered:
            return self._chosen(args, kwargs).lower(*args, **kwargs)

        return self._on_types(lower, args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self._on_types(self._jitted.trace, args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_types(self._jitted.eval_shape, args, kwargs)

    def chosen(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """Write how many groups run at once and what is saved, for `drjax.check`."""
        if self._fitting is not None and not lazy_arguments.has_groups(args, kwargs):
            fitted = self._fitting.asked(args, kwargs)
            if fitted is not None:
                return fitted.text
        jaxpr = self.trace(*args, **kwargs).jaxpr
        calls = [eqn for eqn in deep_equations(jaxpr) if eqn.primitive is planned_p]
        choices = (plan_to_run(e.params["jaxpr"], e.params["options"]) for e in calls)
        return "; ".join(map(str, choices))

    def _on_types(self, method: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if lazy_arguments.has_groups(args, kwargs):
            args, kwargs = lazy_arguments.closed(self.__wrapped__, args, kwargs)
        return method(*args, **kwargs)


class _Writing(_Wrapper):
    """A `_Jit` that writes results, as `out` says."""

    def __init__(self, jitted: _Jit, out: Out, written: Written) -> None:
        super().__init__(jitted.__wrapped__, jitted)
        self._out, self._written = out, written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._out.call(self._written, lambda: self._jitted(*args, **kwargs))


def _fixed(
    planned: "_Planned",
    jit_kwargs: dict[str, Any],
    size: int | None,
    residuals: str | None,
) -> Any:
    """The `jax.jit` of `size` groups at once; None: of all."""
    rematerialize = None if residuals is None else residuals == "recompute"
    return jax.jit(planned.with_options(size, rematerialize), **jit_kwargs)


def _compiled(
    fn: Callable,
    residuals: str | None,
    jit_kwargs: dict[str, Any],
    size: int,
    measured: str | None,
    donate: bool,
) -> Jitted:
    """Compile `fn` for `size` groups at once; donate arguments only if `donate`.

    `residuals` is the user's option. None: it may be `measured`.
    """
    kept = {k: v for k, v in jit_kwargs.items() if donate or "donate" not in k}
    return jit(fn, size, residuals or measured, **kept)


# Those of `jit_primitive.Options` that users give: `groups_per_step`, `rematerialize`
# and `checkpoints`; and which results are written, if any.
_OfPlan: TypeAlias = tuple[GroupsPerStep, bool | None, bool, tuple[KeyPath, ...] | None]


class _Planned:
    """A function and its options, as the callable that `drjax.jit` passes to `jax.jit`.

    `jax.jit` caches what it compiles by the identity of this object. `fn()` returns the
    function. It is a weak reference if this object is cached: then the function is kept
    alive by the result of `drjax.jit`. The options are those of
    `jit_primitive.Options`. `written` has the results to write, if any: the same for
    all numbers of groups at once, of which a call runs one.
    """

    __slots__ = ("__name__", "__weakref__", "_fn", "_options", "written")

    def __init__(
        self, fn: Callable[[], Callable], options: _OfPlan, written: Written | None
    ) -> None:
        self._fn, self._options, self.written = fn, options, written
        self.__name__ = function_name(getattr(fn(), "__name__", "program"))

    @property
    def __wrapped__(self) -> Callable:
        return self._fn()

    def __repr__(self) -> str:  # as JAX's errors about arguments show it
        return f"drjax.jit({self.__name__})"

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _unpickled, (self._fn(), self._options, self.written)

    def with_options(self, size: int | None, rematerialize: bool | None) -> "_Planned":
        """Return that of the same function for another number of groups at once."""
        options = size, rematerialize, *self._options[2:]
        return _planned(self._fn(), options, self.written)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Trace and plan the function for these arguments, and bind `planned_p`.

        Leaves of arguments that are not JAX arrays are static. Raises `PlanError` if
        the function has no plan.
        """
        if resized.value is not None:  # traced for a plan: only its equations matter
            return self._fn()(*args, **kwargs)
        args, kwargs = lazy_arguments.leaves_of((args, kwargs))
        flat_args, tree = jax.tree_util.tree_flatten((args, kwargs))
        # Other leaves are static: jax.jit has them in its key.
        dynamic = [
            i for i, x in enumerate(flat_args) if isinstance(x, jax.Array | Leaf)
        ]
        fn, name = self._fn(), self.__name__
        out_tree: Any = None

        def flat(*arrays: Array) -> list[Array]:
            nonlocal out_tree
            leaves = list(flat_args)
            for i, x in zip(dynamic, arrays, strict=True):
                leaves[i] = x
            inner_args, inner_kwargs = tree.unflatten(leaves)
            out = fn(*inner_args, **inner_kwargs)
            leaves, out_tree = jax.tree_util.tree_flatten(out)
            return list(map(jnp.asarray, leaves))

        arrays = [flat_args[i] for i in dynamic]
        avals = [x.aval if isinstance(x, Leaf) else _compat.typeof(x) for x in arrays]
        bound = is_bound()
        groups, rematerialize, checkpoints, _ = self._options
        reads = any(isinstance(x, Leaf) for x in arrays)
        with in_chunks(reads or groups is not None):
            jaxpr, consts = trace(flat, avals, name, bound)
        names = argument_names(fn, args, kwargs)
        operands: list[Any] = [*consts, *arrays]
        operand_names = [f"closure.{i}" for i in range(len(consts))]
        operand_names += [names[i] for i in dynamic]
        run = None
        if reads:
            read = lazy_arguments.read_in(fn, jaxpr, operands, operand_names)
            operands, operand_names, run = read.operands, read.names, read.fn
            groups = read.groups_per_step() if groups is None else groups
        if self.written is not None:
            run = self.written.write(fn, jaxpr, out_tree, run)
        if run is not None:
            jaxpr, _ = trace(run, list(map(_compat.typeof, operands)), name, bound)
        options = Options(
            name, tuple(operand_names), groups, rematerialize, bound, checkpoints
        )
        plan = plan_of(jaxpr, options)  # raises PlanError here, not when it is lowered
        operands = xla.on_mesh(plan, operands)
        # Outside the primitive, so that JAX sums the cotangents of what did not vary.
        axes = varying_axes([_compat.typeof(x) for x in operands])
        if axes:
            operands = [vary(x, axes) for x in operands]
        outs = planned_p.bind(*operands, jaxpr=jaxpr, options=options, types=None)
        return out_tree.unflatten(outs)


# Weak in the function, as the caches of jax.jit are.
_cache: Any = weakref.WeakKeyDictionary()


def _planned(
    fn: Callable, options: _OfPlan, written: Written | None = None
) -> _Planned:
    """Return the `_Planned` of a function and its options; cached while `fn` lives.

    `jax.jit` caches what it compiles by the identity of this object. The first call for
    a function and options makes and records it. Functions that are compared by value
    (methods, some callable objects) get a new one at each call, as an equal function
    may outlive the first. `written` None: what other options of the function write, or
    new.
    """
    *_, paths = options
    if written is None and paths is not None:
        written = Written(paths)
    try:
        if type(fn).__hash__ is not object.__hash__:
            raise TypeError
        by_options = _cache.setdefault(fn, {})
        reference: Any = weakref.ref(fn)
    except TypeError:
        return _Planned(lambda: fn, options, written)
    if paths is not None:
        written = by_options.setdefault(("written", paths), written)
    return by_options.setdefault(options, _Planned(reference, options, written))


def _asked(fn: Callable, *options: Any) -> dict[Any, Fitted]:
    """Return what `Fitting` was told of a function and options, as long as it lives."""
    try:
        by_options = _cache[fn]  # of `_planned`
        return by_options.setdefault(("asked", *options), {})
    except (KeyError, TypeError):
        return {}


def _unpickled(fn: Callable, options: _OfPlan, written: Written | None) -> _Planned:
    """Make a `_Planned` that keeps its function alive, as nothing else does."""
    return _Planned(lambda: fn, options, written)
