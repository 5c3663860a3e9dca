"""The argument `over=` of the building blocks: the levels on which they act.

Input: a building block for one partition. Output: the building block for programs with
levels, `@drjax.program(pods=2, groups=4)`, whose partitioned values are
`[pods, groups, *s]`.

A level inside another one is a map over the outer one, in which the building block acts
on the inner one. With P the groups of pod p:

    over="pods"      the building block itself, on axis 0
    over="groups"    map_fn over pods of (the building block over groups)
    over both        sum_p sum_{i in P} x_pi: over groups in each pod, then over pods

So each rule is that of the primitives. On a mesh with the axes of both levels, the
lowering merges the two sums (`_primitives/partial_reduction.py`) to one collective.

Invariants: in a program with one partition, a building block costs one lookup more.
Sharp edge: a level below another one is mapped over even where `over=` names it alone:
its values have the leading axes of all levels above.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from drjax._api.trace_map import call_mapped
from drjax._api.validate import check_keywords, flatten_partitioned
from drjax._compat.types import Mesh, PyTree
from drjax._context import Scope, current_scope, enter_level, scope_context
from drjax._error_texts import listed
from drjax._errors import DrjaxTypeError, DrjaxValueError, ScopeError
from drjax._partition import Partition, attached_levels, show_levels
from drjax._sharding.layout import find_mesh, make_layout

Over = str | Sequence[str] | None
# `outer(arguments, inner, over)`, as `over_levels` takes it.
Outer: TypeAlias = Callable[
    [dict[str, Any], Callable[..., PyTree], tuple[str, ...]], PyTree
]
F = TypeVar("F", bound=Callable[..., Any])


def over_levels(
    *partitioned: str, outer: Outer | None = None, own_axes: bool = False
) -> Callable[[F], F]:
    """Make the decorator by which a building block acts on the levels of a program.

    `@drjax.program(pods=2, groups=4)` has the levels pods and groups. The building
    block itself acts on one partition, the ambient one: `current_scope().partition`.
    The decorated one acts on the levels that its argument `over` names; None: on all
    levels that no enclosing function is mapped over. To act on a level inside another
    one, it maps the building block over the outer level: over the arguments whose names
    are `partitioned`, trees of arrays, and it closes over the others.

    `outer(arguments, inner, over)` runs the building block over several levels, whose
    names are `over`, outermost first. `arguments` are its arguments, by name, in a dict
    that it may change; `inner(**arguments)` runs it over all of these levels but the
    first, in each group of that one. It returns the result of the building block. None:
    to act on several levels is an error.

    The partitioned arguments have the leading axes of all levels down to the innermost
    one in `over`; with `own_axes`, those of the levels in `over` are left to the
    building block, which adds them, or takes axes of other sizes.

    The signature of the building block has the parameter `over`, too, but no call of it
    passes `over`.
    """

    def decorate(block: F) -> F:
        name, signature = block.__name__, inspect.signature(block)
        parameters = signature.parameters

        @functools.wraps(block)
        def call(*args: Any, **kwargs: Any) -> PyTree:
            if kwargs:
                check_keywords(name, parameters, kwargs)
            scope, explicit = current_scope(), kwargs.get("partition")
            if not (scope.levels or explicit is not None or "over" in kwargs):
                return block(*args, **kwargs)  # a program with one partition
            arguments = _bound(name, signature, args, kwargs)
            over = arguments.pop("over", None)
            with _explicit_levels(name, arguments, scope):
                levels = current_scope().open_levels
                if not levels or "partition" in arguments:
                    check_alone(name, over)
                    return block(**arguments)
                acted_on = select_levels(name, over, levels)
                around = levels[: levels.index(acted_on[-1]) + 1]
                if outer is None and len(acted_on) > 1:
                    raise _one_level_error(name, acted_on)
                if own_axes:
                    around = tuple(p for p in around if p not in acted_on)
                if len(levels) > 1:
                    chosen = {k: arguments[k] for k in partitioned if k in arguments}
                    check_axes(name, chosen, around, arguments.get("mesh"))
                return run(levels, acted_on, arguments)

        def run(
            levels: tuple[Partition, ...],
            acted_on: tuple[Partition, ...],
            arguments: dict[str, Any],
        ) -> PyTree:
            first = levels[0]
            if acted_on == (first,):
                return block(**arguments)
            rest = tuple(p for p in acted_on if p != first)

            def inner(**arguments: Any) -> PyTree:
                work = functools.partial(run, levels[1:], rest)
                return map_over(name, first, work, partitioned, arguments)

            if first not in acted_on:
                return inner(**arguments)
            assert outer is not None
            return outer(arguments, inner, tuple(p.name for p in acted_on))

        return call  # pyright: ignore[reportReturnType]  (functools.wraps)

    return decorate


def _bound(
    name: str, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, without those that it leaves out."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise DrjaxTypeError(
            f"drjax.{name} takes {', '.join(signature.parameters)}: {error}."
        ) from None


def reduce_parts(
    name: str,
    over: Sequence[str],
    partitioned: Sequence[str],
    arguments: dict[str, Any],
    parts: Callable[..., PyTree],
    combine: Callable[[PyTree], PyTree],
) -> PyTree:
    """Reduce over several levels: over the innermost of them, and then outwards.

    It maps `parts` over all levels outside the innermost one in `over`, the names of
    the levels, outermost first: each group of these reduces its own inner groups. Then,
    from the inside out, it calls `combine` for each of the other levels in `over`: from
    leaves `[n, *t]` to leaves `[*t]`. Both act on the ambient partition,
    `current_scope().partition`, which is the level in question.

    Those of `arguments` that are named in `partitioned` have the leading axes of all
    levels down to the innermost one in `over`. `parts(**arguments)` gets none of the
    axes of the levels outside. The result has a leading axis for each level that is not
    in `over` and lies outside the innermost one in `over`.
    """
    first = current_scope().open_levels[0]
    if tuple(over) == (first.name,):
        return parts(**arguments)
    rest = [each for each in over if each != first.name]
    work = lambda args: reduce_parts(name, rest, partitioned, args, parts, combine)
    mapped = map_over(name, first, work, partitioned, arguments)
    return combine(mapped) if first.name in over else mapped


def mesh_argument(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the argument `mesh=` of a building block, as keywords for another one."""
    return {"mesh": arguments.get("mesh")}


def map_over(
    name: str,
    partition: Partition,
    work: Callable[[dict[str, Any]], PyTree],
    partitioned: Sequence[str],
    arguments: dict[str, Any],
) -> PyTree:
    """Map a building block over a level, to run it on the levels inside.

    It binds one `map_fn` over `partition`, which is not the innermost level. In the
    mapped function, building blocks act on the next level inside: it is
    `current_scope().partition`.

    `work(arguments)` runs the building block on the arguments of one group: slices
    `[*s]` of those named in `partitioned` that are not None, and all others unchanged.
    An argument `mesh` is also the mesh of the map.
    """
    names = [key for key in partitioned if arguments.get(key) is not None]
    others = {k: v for k, v in arguments.items() if k not in names}
    mesh = arguments.get("mesh")
    mesh = find_mesh(partition, current_scope().mesh if mesh is None else mesh)
    size = make_layout(partition, mesh).group_axis_size
    flat = [
        flatten_partitioned(
            name, _mask_as_array(key, arguments[key]), partition, size, key
        )
        for key in names
    ]
    leaves = [leaf for some, _ in flat for leaf in some]
    tree = jax.tree_util.treedef_tuple([structure for _, structure in flat])

    def one(*args: PyTree) -> PyTree:
        with enter_level(_next_level(partition)):
            return work({**others, **dict(zip(names, args, strict=True))})

    one.__name__ = name
    return call_mapped(one, leaves, tree, partition=partition, mesh=mesh)


def in_next_level(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wrap a mapped function so that building blocks in it act on the next inner level.

    It is called before the map, when `current_scope().open_levels` are the levels that
    are not mapped over yet, outermost first; `fn` is mapped over the first of them, and
    returned itself if it is the only one.
    """
    below = current_scope().open_levels[1:]
    if not below:
        return fn

    @functools.wraps(fn)
    def in_level(*args: PyTree) -> PyTree:
        with enter_level(below[0]):
            return fn(*args)

    return in_level


def select_levels(
    name: str, over: Over, levels: Sequence[Partition]
) -> tuple[Partition, ...]:
    """Return those of some levels that the argument `over=` names, in their order.

    None: all of them. They are the levels on which the building block may act,
    outermost first.
    """
    if over is None:
        return tuple(levels)
    names = (over,) if isinstance(over, str) else over
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise DrjaxTypeError(
            f"drjax.{name}(over=) needs the name of a level, or a tuple of names, got "
            f"{type(over).__name__}: {over!r}."
        )
    known = [p.name for p in levels]
    if not names or set(names) - set(known) or len(set(names)) != len(names):
        raise DrjaxValueError(
            f"drjax.{name}(over=) needs one or more of {known}, the levels on which it "
            f"may act here, each at most once, got {over!r}."
        )
    return tuple(p for p in levels if p.name in names)


def check_axes(
    name: str,
    arguments: dict[str, Any],
    levels: Sequence[Partition],
    mesh: Mesh | None = None,
) -> None:
    """Check that values have the leading axes of some levels, outermost first.

    It is called with what the user passed, before any level is mapped over, so that the
    error names the called block, and shows whole shapes. Leaves that are no arrays are
    left to the checks of the block.
    """
    mesh = current_scope().mesh if mesh is None else mesh
    layouts = [make_layout(p, find_mesh(p, mesh)) for p in levels]
    lead = tuple(layout.group_axis_size for layout in layouts)
    wrong: list[tuple[str, tuple[int, ...]]] = []
    for key, tree in arguments.items():
        tree = _mask_as_array(key, tree)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, _ARRAYS) and jnp.shape(leaf)[: len(lead)] != lead:
                wrong.append((key + jax.tree_util.keystr(path), jnp.shape(leaf)))
    if wrong:
        shown = show_levels(levels) if len(levels) > 1 else f"level {levels[0]}"
        raise DrjaxValueError(
            f"drjax.{name} needs values with the leading axes "
            f"[{', '.join(map(str, lead))}, ...] of {shown}, but got:\n"
            + listed([f"  {key}: shape {shape}" for key, shape in wrong])
            + f"\n{_fix_of_axes(name, *wrong[0], lead, levels)}"
        )


_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def _fix_of_axes(
    name: str,
    key: str,
    shape: tuple[int, ...],
    lead: tuple[int, ...],
    levels: Sequence[Partition],
) -> str:
    """Say how to fix a value `key` whose leading axes are not `lead`, of the levels."""
    if len(lead) > 1 and shape[:1] == (math.prod(lead),):
        sizes = ", ".join(map(str, lead))
        return f"Divide its first axis: {key}.reshape({sizes}, *{key}.shape[1:])."
    if name == "shard":
        return "Give each group one slice, or pass partition= with one of the levels."
    if len(lead) > 1 and shape[:1] == lead[:1]:
        first = levels[0]
        return f"If it has one slice for each of {first}, pass over={first.name!r}."
    return (
        "A value of a level has the axes of all levels around it, too. Pass over= to "
        "act on others, or use drjax.broadcast to give each group a copy of a global "
        "value."
    )


def _next_level(partition: Partition) -> Partition:
    """Return the level just inside `partition`, which is a level of the current scope.

    `partition` must not be the innermost level.
    """
    levels = current_scope().levels
    return levels[levels.index(partition) + 1]


def _mask_as_array(name: str, value: object) -> Any:
    """Convert an argument to a JAX array, if it is a list for `where=` or `by=`.

    As a list, or tuple, it would be a pytree of numbers, which cannot be mapped over.
    """
    if name in ("where", "by") and isinstance(value, list | tuple):
        return jax.numpy.asarray(value)
    return value


def _explicit_levels(
    name: str, arguments: dict[str, Any], scope: Scope
) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager that enters the levels of a program in `partition=`.

    If the argument `partition` is a program with several levels, these are the levels
    on which building blocks act in the context manager, with the mesh in context.
    Otherwise it does nothing. The argument is removed from the dict if it is None, or
    such a program.
    """
    levels = attached_levels(arguments.get("partition"))
    if len(levels) < 2:
        if arguments.get("partition") is None:
            arguments.pop("partition", None)
        return contextlib.nullcontext()
    # By name, as for one partition: of another size it would be the same groups' axis.
    if {p.name for p in levels} & {p.name for p in scope.mapped}:
        raise ScopeError(
            f"drjax.{name}(partition=) names a program with {show_levels(levels)} "
            "inside a function mapped over them; that function sees one group. Call "
            "the block outside map_fn."
        )
    del arguments["partition"]
    return scope_context(Scope(levels[0], None, scope.mapped, levels))


def check_alone(name: str, over: Over) -> None:
    """Raise `DrjaxValueError` unless `over` is None.

    It is called where there are no levels that `over` could name: outside of programs,
    in a mapped function in which no inner level is left to act on, and in a call whose
    `partition=` is one partition.
    """
    if over is not None:
        raise DrjaxValueError(
            f"drjax.{name}(over={over!r}) names levels of a program, but it is called "
            "with partition=, or where no program is running. Leave out over=."
        )


def _one_level_error(name: str, levels: Sequence[Partition]) -> DrjaxValueError:
    """Make the error for a building block that was called for several levels at once.

    It proposes `over=` with each of the levels.
    """
    options = " or ".join(f"over={p.name!r}" for p in levels)
    return DrjaxValueError(
        f"drjax.{name} acts on one level at a time, but the program has "
        f"{show_levels(levels)}. Pass {options}."
    )
