"""Names for the values of a plan, from the user's arguments and functions.

Input: functions, arguments, variables. Output: names that are unique in a plan.

Invariants: a name identifies a value in its plan; the body of a loop is a plan of its
own. Names depend on the program alone, never on object identities, so that the same
program gives the same plan file.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax

from drjax import primitives
from drjax._planner.inline import CONTROL
from drjax._planner.rounds import reduction


def argument_names(fn: Callable, args: tuple, kwargs: dict) -> list[str]:
    """One name for each leaf of `(args, kwargs)`: `model['w']`, `tasks.x`."""
    # Builtins and some callables have no signature; their arguments get numbers.
    positional = [f"arg{i}" for i in range(len(args))]
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    for i, parameter in enumerate(parameters):
        if parameter.kind == parameter.VAR_POSITIONAL:
            for j in range(i, len(args)):
                positional[j] = f"{parameter.name}[{j - i}]"
            break
        if i < len(args) and parameter.kind != parameter.KEYWORD_ONLY:
            positional[i] = parameter.name
    names = []
    for name, value in (*zip(positional, args, strict=True), *sorted(kwargs.items())):
        for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
            names.append(name + jax.tree_util.keystr(path))
    return names


def result_names(tree) -> list[str]:
    """One name for each leaf of a result: `result['w']`."""
    # The paths of a tree are known of its leaves only, so it is filled with some.
    leaves = tree.unflatten(range(tree.num_leaves))
    paths = jax.tree_util.tree_flatten_with_path(leaves)[0]
    return ["result" + jax.tree_util.keystr(path) for path, _ in paths]


class Names:
    """A name for each variable, no two of them the same."""

    def __init__(self, invars: list, argument_names: list[str]):
        self._names: dict[Any, str] = {}
        self._used: dict[str, int] = {}
        for var, name in zip(invars, argument_names, strict=True):
            self._names[var] = self._unique(name)

    def _unique(self, name: str) -> str:
        """The name, or the first of name_2, name_3, ... that is not in use."""
        count = self._used[name] = self._used.get(name, 0) + 1
        # A suffix may itself be taken, by an argument named x_2.
        return name if count == 1 else self._unique(f"{name}_{count}")

    def of(self, var) -> str:
        """The name of a variable, which has one."""
        return self._names[var]

    def _unique_for(self, var, name: str) -> None:
        self._names[var] = self._unique(name)

    def add(self, eqn) -> None:
        """Name the results of an equation."""
        for i, var in enumerate(eqn.outvars):
            if eqn.primitive is primitives.map_fn_p:
                name = function_name(eqn.params["name"])
                name += f".{i}" if len(eqn.outvars) > 1 else ""
            elif op := reduction(eqn.primitive):
                name = f"{op}({self.of(eqn.invars[0])})"
            elif eqn.primitive is primitives.partition_index_p:
                name = "group"
            elif eqn.primitive.name in CONTROL:
                name = f"{eqn.primitive.name}.{i}"
            else:
                name = eqn.primitive.name
            self._unique_for(var, name)

    def constant(self, var, index: int) -> None:
        """Name the constant of this position."""
        self._unique_for(var, f"constant.{index}")

    def rename(self, var, name: str) -> None:
        """Give a variable another name than that of its equation."""
        self._unique_for(var, name)

    def fresh(self, name: str) -> str:
        """A name for something that is not a variable of the program."""
        return self._unique(name)


def function_name(name: str) -> str:
    """The name of a function as plans show it: a lambda has none of its own."""
    return "function" if name == "<lambda>" else name.strip("_")
