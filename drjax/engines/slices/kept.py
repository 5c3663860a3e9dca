"""Slices that stay where they are between calls: `compile(plan, keep=...)`.

Input: a plan, and which of its partitioned results are arguments of the next call.
Output: a `Keep`, which puts a handle (`Kept`) in the place of each such result, and the
slices in the place of a handle among the arguments.

Invariants: a handle is valid until a call that took it has returned; after a call that
raised it is still valid. What a handle refers to is the backend's own: this module
never looks into arrays. A group that was dropped keeps the slice that it had.

Sharp edges: a handle belongs to the `compile` that returned it, as its slices are with
the workers of that one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from drjax._compat.types import PyTree
from drjax._error_texts import brief
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._pytree_paths import (
    KeyPath,
    as_path,
    path_text,
    replaced,
    subtree,
)
from drjax.plan import Plan, Value


@dataclass(frozen=True, eq=False)
class KeptPair:
    """A result that stays with the groups, and the argument it is in the next call.

    Attributes:
      result: The path of the result in what the planned function returns: a tuple of
        indices, keys or names.
      argument: The path of the argument in the pair `(args, kwargs)`: `(0, 2)` is the
        third positional argument, `(1, "x")` the keyword argument x.
      outputs: The indices in `plan.outputs` of the leaves of the result, in order.
      inputs: The indices in `plan.inputs` of the leaves of the argument, in order.
      tree: The pytree structure of both.
    """

    result: tuple
    argument: tuple
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    tree: Any

    def __str__(self) -> str:
        return "argument " + path_text(self.argument[1:])


class Kept:
    """A handle of slices that stay with their groups: a result of a call.

    The function that a backend's `compile(plan, keep=...)` returns gives it in the
    place of a result, and takes it in the place of the argument that the result is in
    the next call. The call that takes it replaces the slices: then the handle is used
    up. If that call raises, the handle is still valid. A group that was dropped in a
    call (`on_error="drop"`) keeps the slice that it had before.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> @drjax.program(clients=3)
      ... def count(total, x):
      ...     total = drjax.map_fn(jnp.add, (total, x))
      ...     return total, drjax.reduce_sum(total)
      >>> plan = drjax.make_plan(count)(jnp.zeros(3), jnp.ones(3))
      >>> run = drjax.backends.reference.compile(plan, keep={0: 0})
      >>> total, _ = run(jnp.zeros(3), jnp.ones(3))
      >>> total, sum_ = run(total, jnp.ones(3))
      >>> print(total, sum_, total.fetch())
      Kept(argument 0) 6.0 [2. 2. 2.]
    """

    def __init__(
        self,
        keep: "Keep",
        pair: KeptPair,
        leaves: Sequence[Any],
        fetch: Callable[[Sequence[Any]], Iterable[Any]],
    ):
        self._keep, self._pair, self._leaves, self._fetch = keep, pair, leaves, fetch

    def fetch(self) -> Any:
        """Copy the slices of all groups to the caller.

        This handle stays valid: it can still be passed to the next call.

        Returns:
          The result as it would be without `keep=`: a pytree of arrays with the group
          axis.

        Raises:
          DrjaxValueError: A later call took this handle, and replaced its slices.
          DrjaxTypeError: The backend never gives slices away, as Flower.
        """
        return self._pair.tree.unflatten(self._fetch(self.leaves()))

    def leaves(self) -> Sequence[Any]:
        """Return the backend's objects for the slices, one for each leaf of the result.

        They are arrays, or objects for slices that workers have. This handle stays
        valid: it can still be passed to the next call.

        Raises:
          DrjaxValueError: A later call took this handle, and replaced its slices.
        """
        if self._leaves is None:
            raise DrjaxValueError(
                f"{self} was passed to an earlier call, which replaced its slices. "
                f"Pass the handle that the latest call of "
                f"{self._keep.plan.name} returned."
            )
        return self._leaves

    def use_up(self) -> None:
        """Release the slices of this handle, because a call has replaced them.

        The method `release` of each of the backend's objects is called, if it has one.
        From then on this handle has no slices: `fetch`, `leaves`, and calls that get it
        raise `DrjaxValueError`.
        """
        for x in self._leaves or ():
            if hasattr(x, "release"):
                x.release()
        self._leaves = None

    def belongs_to(self, keep: "Keep") -> bool:
        """Return whether this handle is a result of the function that `keep` is of.

        Args:
          keep: The `Keep` of a compiled function. Each compiled function has its own.
        """
        return self._keep is keep

    @property
    def pair(self) -> KeptPair:
        """The result whose slices these are, and the argument that takes them."""
        return self._pair

    def _refuse(self, *_: object, **__: object) -> Any:
        raise DrjaxTypeError(
            f"{self} is a handle of slices that stay with their groups, not an array. "
            "Pass it in that place to the function that returned it, or use .fetch()."
        )

    # JAX and numpy ask for these when they convert an object to an array.
    __jax_array__ = __array__ = _refuse

    def __repr__(self) -> str:
        return f"Kept({self._pair})"


def check_plan(plan: Any) -> None:
    """Raise `DrjaxTypeError` if what a backend was given is no plan."""
    if not isinstance(plan, Plan):
        raise DrjaxTypeError(
            "A backend compiles a plan, drjax.make_plan(fn)(*args) or "
            f"drjax.load_plan(path), got {type(plan).__name__}."
        )


class Keep:
    """The results of a plan that stay with their groups until the next call.

    `keep` is a dict from results to arguments, or None. A result is an index or key of
    what the planned function returns, or a tuple of these, a path; `()` is all of it.
    An argument is a position, or the name of a keyword argument, or a path that begins
    so. Both are pytrees of the same structure, of partitioned values of the same types.
    Indices and positions count from 0. `pairs` has a `KeptPair` for each item of
    `keep`, in its order.
    """

    def __init__(self, plan: Plan, keep: dict[Any, Any] | None = None):
        check_plan(plan)
        if not isinstance(keep, dict | None):
            raise DrjaxTypeError(
                "keep= needs a dict from results to arguments, as {1: 0} for result 1 "
                f"that is argument 0 of the next call; got {keep!r}."
            )
        self.plan, self.pairs = plan, []
        for result, argument in (keep or {}).items():
            self.pairs.append(self._pair(as_path(result), as_path(argument)))
        for what in ("outputs", "inputs"):
            leaves = [i for pair in self.pairs for i in getattr(pair, what)]
            if len(set(leaves)) < len(leaves):
                raise DrjaxValueError(
                    f"keep= needs different results and different arguments, got "
                    f"{keep!r}, in which some are part of two."
                )

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def _pair(self, result: KeyPath, argument: KeyPath) -> KeptPair:
        """Return the pair of a result and an argument, and check that they are alike.

        `argument` is a position or the name of a keyword argument, then the path in it.
        Nothing is recorded.
        """
        plan = self.plan
        results = plan.out_tree.unflatten(range(len(plan.outputs)))
        arguments = plan.in_tree.unflatten(range(len(plan.inputs)))
        # A name is that of a keyword argument; positions come first in `in_tree`.
        where = (int(bool(argument) and isinstance(argument[0], str)), *argument)
        own = f"keep= has result {path_text(result)} of {plan.name}"
        outs = subtree(results, result, own)
        own = f"keep= has argument {path_text(argument)} of {plan.name}"
        ins = subtree(arguments, where, own)
        outputs, tree = jax.tree.flatten(outs)
        inputs, in_tree = jax.tree.flatten(ins)
        pair = KeptPair(result, where, tuple(outputs), tuple(inputs), in_tree)
        if tree != in_tree:
            raise DrjaxValueError(
                f"keep= needs a result and an argument of the same structure, but "
                f"result {path_text(result)} of {plan.name} is {brief(tree)}, and "
                f"{pair} is {brief(in_tree)}."
            )
        for i, j in zip(outputs, inputs, strict=True):
            _check_alike(plan.outputs[i], plan.inputs[j])
        return pair

    def open(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        start: Callable[[KeptPair, PyTree], Sequence[Any] | None] = lambda *_: None,
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree], list[Kept]]:
        """Replace each handle among the arguments of a call by what it stands for.

        The result is `(args, kwargs, handles)`: copies of the arguments, in which each
        handle is replaced by a pytree of the backend's objects for its leaves; and the
        handles. They are still valid: the caller is to call their `use_up` when it has
        the results.

        `start(pair, x)` is called for each argument x that `keep` names and that is no
        handle, as in the first call. It returns what the backend takes for each leaf of
        the argument; or None if x is to be passed on as it is. Default: all are passed
        on.

        A handle is refused if it is a result of another compiled function, or was
        passed to an earlier call, or is passed as another argument than its own.
        """
        handles: list[Kept] = []
        opened: Any = (args, kwargs)
        for pair in self.pairs:
            try:
                x = subtree(opened, pair.argument, "")
            # Another structure: what compares it with that of the plan refuses it.
            except DrjaxValueError:
                continue
            leaves = None
            if not isinstance(x, Kept):
                leaves = start(pair, x)
            elif x.belongs_to(self) and x.pair is pair:
                leaves, handles = x.leaves(), [*handles, x]
            if leaves is not None:
                new = pair.tree.unflatten(leaves)
                opened = replaced(opened, pair.argument, new)
        # Those that are left are in a wrong place.
        for x in jax.tree.leaves(opened):
            if isinstance(x, Kept):
                self._misplaced(x)
        args, kwargs = opened
        return args, kwargs, handles

    def _misplaced(self, handle: Kept) -> NoReturn:
        """Raise `DrjaxValueError` for a handle that this `Keep` cannot take.

        The error says which of two reasons holds: the handle is in another place of the
        arguments than its own, or it is a result of another compiled function.
        """
        name = self.plan.name
        if handle.belongs_to(self):
            raise DrjaxValueError(
                f"{handle} was passed to {name} in another place. Pass it as "
                f"{handle.pair}."
            )
        raise DrjaxValueError(
            f"{handle} is of another compile() than this one of {name}, and its slices "
            "are with the workers of that one. Pass it to the function that returned "
            "it; or pass arrays here, as of its .fetch()."
        )

    def results(
        self,
        tree: PyTree,
        leaves: Sequence[Any],
        fetch: Callable[[KeptPair, Sequence[Any]], Iterable[Any]],
    ) -> PyTree:
        """Replace each kept result of a call by a new handle, in a copy of `tree`.

        `tree` is the result of the planned function; in the places of kept results it
        may have anything. `leaves` has for each of `plan.outputs`, in order, what the
        backend has for it: arrays, or objects for slices that workers have. Only those
        of kept results are used. `fetch(pair, xs)` copies a kept result to the caller:
        from its elements of `leaves` to arrays with the group axis. A handle's `fetch`
        calls it.
        """
        for pair in self.pairs:
            mine = [leaves[i] for i in pair.outputs]
            copy = lambda xs, pair=pair: fetch(pair, xs)
            tree = replaced(tree, pair.result, Kept(self, pair, mine, copy))
        return tree


def _check_alike(result: Value, argument: Value) -> None:
    """Raise `DrjaxValueError` unless a result can be an argument of the next call.

    Both must be partitioned, with the same shape, dtype and group axis.
    """
    for value, what in ((result, "result"), (argument, "argument")):
        if not value.partitioned:
            raise DrjaxValueError(
                f"keep= needs partitioned values, but the {what} {value} is a global "
                "value, which the server has: pass it from call to call as it is."
            )
    # Compared as texts, names aside: a dtype of random keys equals only itself.
    kinds = [(v.shape, v.dtype, v.axis) for v in (result, argument)]
    if kinds[0] != kinds[1]:
        raise DrjaxValueError(
            f"keep= needs a result of the type of its argument, but the result "
            f"{result} with its groups along axis {result.axis} is not of the type of "
            f"the argument {argument} with its groups along axis {argument.axis}."
        )
