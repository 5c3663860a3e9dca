"""Rules of `jax.experimental.checkify`: the errors of groups, combined.

Input: an equation that calls a user's function, and the enabled checks. Output: one
global error, and the results of the equation.

Checkify turns a function with checks into one that returns an error, too. A mapped
function returns one for each group. They are gathered. For each kind of error, that of
the first group that has one is the error of the program; its message names the group.
So a program with checks has a plan, and no additional round.

A function of one coordinate (`map_columns`) returns an error for each; that of the
first coordinate that has one stays. In a fold, the error becomes a part of the state:
of two states and their combination, the first error stays.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from drjax import _compat
from drjax._api.trace_map import call_mapped
from drjax._compat import checkify_rules
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Array, ClosedJaxpr, Mesh, PartitionedArray, PyTreeDef
from drjax._partition import Partition
from drjax._primitives.collectives import (
    broadcast_p,
    gather_p,
    reduce_mean_p,
    reduce_sum_p,
)
from drjax._primitives.fold_groups import FoldMode, fold_tree_p, reduce_fold_p
from drjax._primitives.map_columns import (
    COORDINATES,
    WHOLE,
    map_columns_p,
    trace_column,
)
from drjax._primitives.map_fn import group_context, map_fn_p
from drjax._sharding.layout import Placement, make_layout

# The classes of errors that checkify looks for.
Enabled: TypeAlias = frozenset[type[checkify_rules.CheckError]]


class GroupCheckError(checkify_rules.CheckError):
    """An error of checkify for a check that failed in one group.

    It is a pytree, like all errors of checkify. Its leaves are those of `error`, the
    error of checkify in that group, and `group`, the group index.
    """

    def __init__(
        self, error: checkify_rules.CheckError, group: Array | int, partition: Partition
    ):
        super().__init__(error.traceback_info)
        self.error, self.group, self.partition = error, group, partition

    def __str__(self) -> str:
        return f"in group {self.group} of {self.partition}: {self.error}"

    def tree_flatten(self) -> tuple[tuple[Any, Array | int], Partition]:
        return (self.error, self.group), self.partition

    @classmethod
    def tree_unflatten(
        cls, metadata: Partition, payload: tuple[Any, Array | int]
    ) -> "GroupCheckError":
        error, group = payload
        return cls(error, group, metadata)

    def get_effect_type(self) -> Any:
        return _in_group(self.error.get_effect_type())


def _in_group(effect: checkify_rules.CheckEffect) -> Any:
    """Convert the `CheckEffect` of an error to that of a `GroupCheckError` around it.

    A `CheckEffect` is the key by which checkify tells kinds of errors apart: the class
    of the error, and the shapes and dtypes of its leaves. The group index is one more.
    """
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return checkify_rules.CheckEffect(effect.error_type, (*effect.shape_dtypes, number))


def _check_map(
    enabled: Enabled,
    *args: PartitionedArray,
    jaxpr: ClosedJaxpr,
    partition: Partition,
    mesh: Mesh | None,
    name: str,
) -> tuple[checkify.Error, list[PartitionedArray]]:
    """Checkify rule of `map_fn`: run the equation, and check its mapped function.

    The mapped function becomes one that also returns an error. The rule binds a map of
    that function, and gathers the errors of all groups into one.
    """
    run: Any = _compat.jaxpr_as_fun(jaxpr)
    checked: Any = checkify.checkify(run, enabled)

    def fn(*args: Array) -> Any:
        return checked(*args)

    fn.__name__ = name
    tree = jax.tree.structure((0,) * len(args))
    params = {"partition": partition, "mesh": mesh}
    errors, outs = call_mapped(fn, [*args], tree, **params)
    return _first_error(errors, **params), outs


def _first_error(
    errors: checkify.Error, partition: Partition, mesh: Mesh | None
) -> checkify.Error:
    """Combine the errors of all groups, leaves `[n, ...]`, into one global error.

    They are gathered. For each kind of error, the result has that of the group with the
    lowest index in which one happened, as a `GroupCheckError`.
    """
    gathered = jax.tree.map(
        lambda x: gather_p.bind(x, partition=partition, mesh=mesh), errors
    )
    first, of_first = _first_along_axis(gathered)
    happened, codes, trees, leaves = checkify_rules.error_parts(of_first)
    named = lambda table: {_in_group(effect): x for effect, x in table.items()}
    leaves = {effect: [*xs, first[effect]] for effect, xs in leaves.items()}
    trees = {code: _name_group(tree, partition) for code, tree in trees.items()}
    return type(errors)(named(happened), named(codes), trees, named(leaves))


def _first_along_axis(
    errors: checkify.Error,
) -> tuple[dict[Any, Array], checkify.Error]:
    """Return where along axis 0 the first error of each kind is, and these errors."""
    happened, codes, trees, leaves = checkify_rules.error_parts(errors)
    first = {e: jnp.argmax(x).astype(jnp.int32) for e, x in happened.items()}
    at_first = lambda table: {effect: x[first[effect]] for effect, x in table.items()}
    payload = {effect: [x[first[effect]] for x in xs] for effect, xs in leaves.items()}
    return first, type(errors)(at_first(happened), at_first(codes), trees, payload)


def _name_group(tree: PyTreeDef, partition: Partition) -> PyTreeDef:
    """Convert the tree structure of an error to that of its `GroupCheckError`."""
    error = tree.unflatten([0] * tree.num_leaves)
    return jax.tree.structure(GroupCheckError(error, 0, partition))


def _checked(
    jaxpr: ClosedJaxpr, enabled: Enabled
) -> tuple[Callable[..., list[Array]], Callable[[], PyTreeDef]]:
    """Return a function that also returns the leaves of its error, before its results.

    And a function without arguments, which returns the error's `PyTreeDef` once the
    other one was traced.
    """
    tree: Any = None
    run: Any = checkify.checkify(_compat.jaxpr_as_fun(jaxpr), enabled)

    def fn(*args: Array) -> list[Array]:
        nonlocal tree
        error, outs = run(*args)
        leaves, tree = jax.tree.flatten(error)
        return [*map(jnp.asarray, leaves), *outs]

    return fn, lambda: tree


def _check_columns(
    enabled: Enabled,
    *args: Array,
    jaxpr: ClosedJaxpr,
    kinds_in: tuple[str, ...],
    kinds_out: tuple[str, ...],
    coordinates: tuple[int, ...],
    name: str,
    **params: Unpack[Placement],
) -> tuple[checkify.Error, list[Array]]:
    """Checkify rule of `map_columns`: the first coordinate's error stays."""
    fn, tree = _checked(jaxpr, enabled)
    avals = list(map(_compat.typeof, args))
    layout = make_layout(**params)
    checked, consts = trace_column(fn, avals, kinds_in, coordinates, layout, name)
    n_errors = tree().num_leaves
    outs = map_columns_p.bind(
        *consts,
        *args,
        jaxpr=checked,
        kinds_in=(*[WHOLE] * len(consts), *kinds_in),
        kinds_out=(*[COORDINATES] * n_errors, *kinds_out),
        coordinates=coordinates,
        name=name,
        **params,
    )
    flat = [
        x.reshape(-1, *x.shape[len(coordinates) :]) for x in outs[:n_errors]
    ]  # one axis of coordinates
    errors = tree().unflatten(flat)
    if 0 in coordinates:  # no column, no error
        return _no_error(), outs[n_errors:]
    return _first_along_axis(errors)[1], outs[n_errors:]


def _check_fold(
    primitive: Primitive,
    enabled: Enabled,
    *args: Array,
    jaxpr: ClosedJaxpr,
    n_states: int,
    **params: Any,
) -> tuple[checkify.Error, list[Array]]:
    """Checkify rule of a fold: its states get the leaves of an error, as further parts.

    The derivatives of the fold are those of its states, as errors have none.
    """
    fn, tree = _checked(jaxpr, enabled)
    n_consts = len(args) - 2 * n_states
    placement = {key: params[key] for key in ("partition", "mesh")}
    with group_context(make_layout(**placement)):
        # Once: each trace gives the errors other codes.
        checked, closed = _compat.trace_to_jaxpr(fn, jaxpr.in_avals, params["name"])
        n_errors = tree().num_leaves
        error_avals = checked.out_avals[:n_errors]
        run = _compat.jaxpr_as_fun(checked)

        def combine(*operands: Array) -> list[Array]:
            consts, states = operands[: -2 * size], operands[-2 * size :]
            (a, of_a), (b, of_b) = (
                (state[:n_states], state[n_states:])
                for state in (states[:size], states[size:])
            )
            outs = run(*consts, *a, *b)
            new, state = outs[:n_errors], outs[n_errors:]
            unflatten = tree().unflatten
            first = _first_of(*map(unflatten, (of_a, of_b, new)))
            return [*state, *jax.tree.leaves(first)]

        size = n_states + n_errors
        consts_in = checked.in_avals[: len(closed) + n_consts]
        states_in = jaxpr.in_avals[n_consts:]
        avals = [
            *consts_in,
            *states_in[:n_states], *error_avals,
            *states_in[n_states:], *error_avals,
        ]  # fmt: skip
        extended, more = _compat.trace_to_jaxpr(combine, avals, params["name"])
    none = [jnp.zeros(aval.shape, aval.dtype) for aval in error_avals]
    consts, init, states = (
        args[:n_consts],
        args[n_consts : n_consts + n_states],
        args[n_consts + n_states :],
    )
    operands = [
        *more, *closed, *consts, *init, *none, *states,
        *(broadcast_p.bind(x, **placement) for x in none),
    ]  # fmt: skip
    outs = primitive.bind(*operands, jaxpr=extended, n_states=size, **params)
    parts = [outs[i : i + size] for i in range(0, len(outs), size)]
    error = tree().unflatten(parts[0][n_states:])  # of the fold of all groups
    return error, [x for part in parts for x in part[:n_states]]


def _check_tree(
    enabled: Enabled, *args: Array, mode: FoldMode, **params: Any
) -> tuple[checkify.Error, list[Array]]:
    """Checkify rule of `fold_tree`: the value has the errors, and no derivative has."""
    error, outs = _no_error(), fold_tree_p.bind(*args, mode=mode, **params)
    if mode.what == "value":
        # What is saved for derivatives is that of the function without its errors.
        only = ("jaxpr", "n_states", "name", "commutative", "partition", "mesh")
        of_fold = {key: params[key] for key in only if key in params}
        error, _ = _check_fold(reduce_fold_p, enabled, *args, **of_fold)
    return error, outs


def _no_error() -> checkify.Error:
    return checkify.checkify(lambda: None)()[0]


def _first_of(*errors: checkify.Error) -> checkify.Error:
    """Combine errors of one structure: of each kind, the first that happened."""
    parts = list(map(checkify_rules.error_parts, errors))
    *_, (happened, codes, trees, leaves) = parts
    for others, other_codes, _, other_leaves in parts[-2::-1]:
        for effect, failed in others.items():
            select = lambda x, y, failed=failed: jnp.where(failed, x, y)
            codes[effect] = select(other_codes[effect], codes[effect])
            pairs = zip(other_leaves[effect], leaves[effect], strict=True)
            leaves[effect] = [select(x, y) for x, y in pairs]
            happened[effect] = failed | happened[effect]
    return type(errors[0])(happened, codes, trees, leaves)


checkify_rules.register_error_check(map_fn_p, _check_map)
checkify_rules.register_error_check(map_columns_p, _check_columns)
checkify_rules.register_error_check(
    reduce_fold_p, functools.partial(_check_fold, reduce_fold_p)
)
checkify_rules.register_error_check(fold_tree_p, _check_tree)
checkify_rules.register_nan_check(reduce_sum_p)
checkify_rules.register_nan_check(reduce_mean_p)
