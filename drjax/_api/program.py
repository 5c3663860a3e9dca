"""The decorator that declares a program and its partition.

Input: keywords, then a function. Output: the function, which runs with its partition in
scope. Invariants: nothing is traced or patched, and keywords are checked when the
decorator is made. Sharp edge: the scope ends when the function returns.
"""

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import jax

from drjax._api.validate import check_plain_function
from drjax._context import Traits, program_scope
from drjax._errors import DrjaxTypeError, DrjaxValueError, MeshError
from drjax._partition import Partition

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")


# The axes of the only level, or a mapping from names of levels to their axes.
MeshAxes: TypeAlias = str | tuple[str, ...] | Mapping[str, Any] | None


class Decorated(Protocol[P, R_co]):
    """For type checkers: the type of a decorated function, with its own signature.

    It can be a method of a class, as the function that was decorated. Only type
    checkers see `__get__`; its overloads are for access on the class, and for methods,
    class methods and static methods of an instance.
    """

    __name__: str

    @property
    def __wrapped__(self) -> Callable[P, R_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type | None, /) -> Callable[P, R_co]: ...
    @overload
    def __get__(
        self: "Decorated[Concatenate[S, Q], R_co]",
        instance: S,
        owner: type | None = None,
        /,
    ) -> Callable[Q, R_co]: ...
    @overload
    def __get__(
        self: "Decorated[Concatenate[type[S], Q], R_co]",
        instance: S,
        owner: type | None = None,
        /,
    ) -> Callable[Q, R_co]: ...
    @overload
    def __get__(
        self, instance: object, owner: type | None = None, /
    ) -> Callable[P, R_co]: ...


_KEYWORDS = ("partition_size", "placements", "mesh", "mesh_axes", "use_abstract_mesh")


def program(
    *args: Any,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    mesh_axes: MeshAxes = None,
    use_abstract_mesh: bool | None = None,
    **partition: Any,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare that a function is a MapReduce program over a partition of n groups.

    One keyword names the partition and gives its size: `partition_size=3`,
    `clients=100`. On a mesh with an axis of that name the groups are divided over
    the devices along it; on any other mesh, and with none, the program runs locally.

    Several keywords are levels, outermost first: `pods=2, groups=4` are two pods of
    four groups each. Partitioned values have the leading axes `[pods, groups]`, and
    each building block takes `over=`, the levels on which it acts.

    Args:
      mesh: The mesh to run on. Default: the mesh in context (`jax.set_mesh`).
      mesh_axes: The mesh axis or axes to shard the partition over, major first; with
        several levels, a mapping from their names to these. Default: the axis with the
        partition's name.
      use_abstract_mesh: Accepted for code written for google/drjax; no effect.
      **partition: A `name=size` for each level, or `placements={name: size}`.

    Returns:
      A decorator. The program is an ordinary function with the same signature,
      name and docstring; its attribute `partition` is the `Partition`, or with several
      levels the tuple of these.

    Raises:
      DrjaxTypeError: No partition, a misspelt keyword, a size that is not an integer,
        or an async or generator function.
      DrjaxValueError: A size below one, or `mesh_axes` that do not fit the levels.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> @drjax.program(partition_size=3)
      ... def broadcast_double_and_sum(x):
      ...     y = drjax.broadcast(x)
      ...     z = drjax.map_fn(lambda a: 2 * a, y)
      ...     return drjax.reduce_sum(z)
      >>> print(broadcast_double_and_sum(jnp.float32(1.0)))
      6.0
      >>> @drjax.program(pods=2, groups=3)
      ... def largest_sum_of_a_pod(x):
      ...     sums = drjax.reduce_sum(x, over="groups")
      ...     return drjax.reduce_max(sums, over="pods")
      >>> print(largest_sum_of_a_pod(jnp.arange(6.0).reshape(2, 3)))
      12.0

    Source: Rush et al. 2024, "DrJAX", section 3.
    """
    del use_abstract_mesh
    levels = _declared_levels(args, partition, mesh_axes)
    attribute = levels[0] if len(levels) == 1 else levels
    _check_mesh(mesh)

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        _check_plain_function(fn)
        enter = program_scope(levels, mesh, Traits.of(fn))

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with enter():
                return fn(*args, **kwargs)

        setattr(call, "partition", attribute)  # noqa: B010  (a wrapper has no such field)
        return call

    return decorate


def _declared_levels(
    args: tuple[Any, ...], keywords: dict[str, Any], mesh_axes: MeshAxes
) -> tuple[Partition, ...]:
    """Make the partitions that arguments of `drjax.program` declare, outermost first.

    Any positional argument is an error. The keywords are those that are no parameters:
    `{name: size, ...}`, or `{"placements": {name: size, ...}}`.
    """
    if args:
        raise DrjaxTypeError(
            "drjax.program takes the partition as a keyword: write "
            "@drjax.program(partition_size=3). Got without a keyword: "
            + ", ".join(map(repr, args))
            + "."
        )
    for key in keywords:
        close = difflib.get_close_matches(key, _KEYWORDS, n=1, cutoff=0.75)
        if close and close[0] != key:
            raise DrjaxTypeError(
                f"drjax.program got the keyword {key!r}; did you mean {close[0]!r}?"
            )
    sizes = keywords
    if "placements" in keywords:
        sizes = keywords["placements"]
        others = {k: v for k, v in keywords.items() if k != "placements"}
        if others:
            raise DrjaxTypeError(
                "drjax.program(placements=) names all levels, got another keyword: "
                + ", ".join(f"{k}={v!r}" for k, v in others.items())
                + ". Write @drjax.program(pods=2, groups=4)."
            )
        if not isinstance(sizes, Mapping):
            raise DrjaxTypeError(
                "drjax.program(placements=) needs a mapping from the partition's name "
                "to its size, such as {'clients': 100}, got "
                f"{type(sizes).__name__}: {sizes!r}."
            )
    if not sizes:
        raise DrjaxTypeError(
            "drjax.program needs a partition, given as one keyword: "
            "@drjax.program(clients=100). Got none. Further keywords are mesh=, "
            "mesh_axes=."
        )
    axes = _axes_of_levels(sizes, mesh_axes)
    return tuple(Partition(k, n, axes.get(k, ())) for k, n in sizes.items())


def _axes_of_levels(sizes: Mapping[str, Any], mesh_axes: MeshAxes) -> Mapping[str, Any]:
    """Read the argument `mesh_axes` of `drjax.program`: for each level its mesh axes.

    It has the axes of the only level, or is a mapping from names of levels to axes. A
    level that the result lacks has the axis of its own name.
    """
    if mesh_axes is None:
        return {}
    if not isinstance(mesh_axes, Mapping) and len(sizes) == 1:
        return dict.fromkeys(sizes, mesh_axes)
    if not isinstance(mesh_axes, Mapping) or set(mesh_axes) - set(sizes):
        example = {name: f"{name}_axis" for name in sizes}
        raise DrjaxValueError(
            "mesh_axes= of a program with several levels needs a mapping from their "
            f"names to mesh axes, such as {example!r}, got {mesh_axes!r}."
        )
    return mesh_axes


def _check_mesh(mesh: object) -> None:
    """Raise `MeshError` unless `mesh`, an argument of a program, is a mesh or None.

    The axes of the mesh are not checked: building blocks do that when they are called.
    """
    if mesh is not None and not hasattr(mesh, "axis_names"):
        raise MeshError(
            "drjax.program(mesh=) needs a jax.sharding.Mesh or AbstractMesh, got "
            f"{type(mesh).__name__}: {mesh!r}."
        )


def _check_plain_function(fn: object) -> None:
    """Raise `DrjaxTypeError` if `drjax.program` cannot decorate `fn`.

    It cannot decorate objects that are not callable; the error has a hint for class
    methods and properties. It cannot decorate async functions and generator functions
    either, as their bodies run after the call has returned.
    """
    if not callable(fn):
        hint = ""
        if isinstance(fn, classmethod | property):
            hint = f" Write @{type(fn).__name__} above @drjax.program."
        raise DrjaxTypeError(
            f"@drjax.program decorates a function, got {type(fn).__name__}: {fn!r}."
            + hint
        )
    check_plain_function("@drjax.program", fn)
