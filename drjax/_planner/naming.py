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
from drjax._compat.jax_types import Literal, Primitive
from drjax._compat.types import Atom, Eqn, PyTree, PyTreeDef, Var
from drjax._context import OF_LIBRARY
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._planner.gathered_columns import columns_p
from drjax._planner.inline import CONTROL
from drjax._primitives.reduce_ops import of_primitive


def argument_names(
    fn: Callable[..., Any], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> list[str]:
    """Return a name for each leaf of `(args, kwargs)`, such as `model['w']`, in order.

    It is the name of the parameter of `fn` and the path of the leaf in the argument.
    Positional arguments that the signature of `fn` does not name are `arg0`, `arg1`,
    ...; those of a `*xs` are `xs[0]`, `xs[1]`, ...
    """
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
    # Sorted, as tree_flatten visits the keys of a dict in sorted order.
    for name, value in (*zip(positional, args, strict=True), *sorted(kwargs.items())):
        for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
            names.append(name + jax.tree_util.keystr(path))
    return names


def result_names(tree: PyTreeDef) -> list[str]:
    """Return a name for each leaf of a result, such as `result['w']`, in order."""
    # The paths of a tree are known of its leaves only, so it is filled with some.
    leaves = tree.unflatten(range(tree.num_leaves))
    paths = jax.tree_util.tree_flatten_with_path(leaves)[0]
    return ["result" + jax.tree_util.keystr(path) for path, _ in paths]


# Equations whose results are their operands, in another form.
_SAME_VALUE = {"convert_element_type", "copy", "optimization_barrier", "stop_gradient"}

# Names of the library's functions of one group whose last operand is a slice of the
# user's, and whose result is this slice, or what stands for it in a reduction.
_CHOOSING = {
    OF_LIBRARY + block
    for block in (
        "reduce",
        "reduce_max",
        "reduce_mean",
        "reduce_min",
        "reduce_sum",
        "reduce_weighted_mean",
        "select",
    )
}


def _reduction(primitive: Primitive) -> str | None:
    """The name, in plans, of a reduction or a gather, as "sum"; else None."""
    if primitive is primitives.gather_p:
        return "gather"
    op = of_primitive(primitive)
    return op and op.name


class Names:
    """A unique name for each variable of a plan, and for other values that it needs.

    If a name of an argument is not unique, later ones get a suffix, such as `x_2`.
    """

    def __init__(self, invars: list[Var], argument_names: list[str]):
        self._names: dict[Any, str] = {}
        self._bases: dict[Any, str] = {}  # of a form of a value, the name of that
        self._used: dict[str, int] = {}
        for var, name in zip(invars, argument_names, strict=True):
            self._set_unique_name(var, name)

    def _unique(self, name: str) -> str:
        """Reserve and return `name`, with a suffix if it is taken, such as `name_2`."""
        used = self._used
        # A suffix may itself be taken, by an argument named x_2.
        while count := used.get(name, 0):
            used[name] = count + 1
            name = f"{name}_{count + 1}"
        used[name] = 1
        return name

    def of(self, var: Atom) -> str:
        """Return the name of a variable, which must have been named."""
        return self._names[var]

    def _set_unique_name(self, var: Var, name: str) -> None:
        """Name a variable by `name`, with a suffix if that is taken, such as `name_2`.

        It replaces any earlier name of the variable, which stays reserved.
        """
        self._names[var] = self._bases[var] = self._unique(name)

    def add(self, eqn: Eqn) -> None:
        """Name the results of an equation, whose operands have been named.

        The name depends on the equation:

        * a `map_fn`: the name of its function; of one of the library's own, which
          chooses, weights or casts slices of the user's, the name of these;
        * a cast, or another equation that does not change a value: that of its operand;
        * a reduction or gather: its name and that of its operand, such as `sum(x)`;
        * a fold, a reduction by a function of two states: that of the function, such as
          `fold(add)`;
        * work on each coordinate: that of the function, such as `columns(median)`;
        * a `partition_index`: `group`;
        * any other: the name of its primitive.

        The results of a `scan`, `while` or `cond`, and of a `map_fn`, a fold or
        `columns` with several results, are numbered from 0: `scan.0`. A name that is
        taken gets a suffix.
        """
        name = eqn.primitive.name
        if name in ELEMENTWISE and name not in _SAME_VALUE:  # most equations
            for var in eqn.outvars:
                self._set_unique_name(var, name)
            return
        for i, var in enumerate(eqn.outvars):
            source = self._same_value(eqn, i)
            if source is not None:
                name = source
            elif eqn.primitive is primitives.map_fn_p:
                name = function_name(eqn.params["name"])
                name += f".{i}" if len(eqn.outvars) > 1 else ""
            elif op := _reduction(eqn.primitive):
                name = f"{op}({self.of(eqn.invars[0])})"
            elif eqn.primitive is primitives.reduce_fold_p:
                name = f"fold({function_name(eqn.params['name'])})"
                name += f".{i}" if len(eqn.outvars) > 1 else ""
            elif eqn.primitive is columns_p:
                name = f"columns({function_name(eqn.params['name'])})"
                name += f".{i}" if len(eqn.outvars) > 1 else ""
            elif eqn.primitive is primitives.partition_index_p:
                name = "group"
            elif eqn.primitive.name in CONTROL:
                name = f"{eqn.primitive.name}.{i}"
            else:
                name = eqn.primitive.name.removeprefix("drjax_")
            self._set_unique_name(var, name)
            if source is not None:
                self._bases[var] = source

    def _same_value(self, eqn: Eqn, i: int) -> str | None:
        """Return the name of the value of which result i is a form, or None."""
        if eqn.primitive.name in _SAME_VALUE:
            operand = eqn.invars[i]
        elif eqn.primitive is primitives.map_fn_p and eqn.params["name"] in _CHOOSING:
            if not eqn.invars:  # a constant, as a segment that all groups share
                return None
            operand = eqn.invars[-1]
        else:
            return None
        return None if isinstance(operand, Literal) else self._bases[operand]

    def constant(self, var: Var, index: int) -> None:
        """Name a constant of the program by its index among the constants, from 0."""
        self._set_unique_name(var, f"constant.{index}")

    def rename(self, var: Var, name: str) -> None:
        """Replace the name of a variable by `name`, with a suffix if that is taken.

        For example, a result of the program is renamed to `result['w']`. The earlier
        name stays reserved.
        """
        self._set_unique_name(var, name)

    def fresh(self, name: str) -> str:
        """Reserve and return a unique name for a value that is no variable.

        That is a loop, for instance, or an operand of a fold.
        """
        return self._unique(name)

    def again(self, var: Atom) -> str:
        """Reserve and return a name for a second value of a variable, as its slices."""
        return self._unique(self._bases[var])


def function_name(name: str) -> str:
    """Return the name that plans show for a function with this `__name__`.

    It is `name` without leading and trailing underscores; for `<lambda>`, which says
    nothing, it is "function". Of the library's own it is the public function.
    """
    return (
        "function" if name == "<lambda>" else name.removeprefix(OF_LIBRARY).strip("_")
    )
