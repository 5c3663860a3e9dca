"""Partitions: the named logical axes that programs map over. Pure data."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drjax._errors import DrjaxTypeError, DrjaxValueError


@dataclass(frozen=True, slots=True)
class Partition:
    """A named logical axis of `size` groups.

    The size is independent of the number of devices. On a mesh that has all of
    `mesh_axes`, the groups are divided over the devices along those axes; anywhere
    else the program runs locally.

    Args:
      name: The name of the partition, for instance `"clients"`.
      size: The number of groups, a positive integer.
      mesh_axes: The mesh axis or axes to shard the partition over, major first.
        Default: the axis that has the partition's name.

    Raises:
      DrjaxTypeError: `name` or an axis is not a string, or `size` not an integer.
      DrjaxValueError: `size` is below one, or an axis is named twice.

    Example:
      >>> import drjax
      >>> print(drjax.Partition("clients", 100))
      clients:100
    """

    name: str
    size: int
    mesh_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise DrjaxTypeError(
                "A partition needs a name that is a non-empty string, got "
                f"{self.name!r}. Write for instance @drjax.program(clients=100)."
            )
        object.__setattr__(self, "size", _check_size(self.name, self.size))
        object.__setattr__(self, "mesh_axes", _check_axes(self.name, self.mesh_axes))

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


def with_size(partition: Partition, size: int) -> Partition:
    """Copy a partition with another number of groups, which may be a symbol."""
    sized = replace(partition, size=1)
    object.__setattr__(sized, "size", size)
    return sized


def as_partition(value: object) -> Partition:
    """Convert what `partition=` takes to a `Partition`.

    That is a `Partition`, a mapping such as `{"clients": 100}`, or a program.
    """
    if isinstance(value, Partition):
        return value
    if isinstance(value, Mapping):
        if len(value) != 1:
            raise DrjaxValueError(
                f"partition= needs exactly one partition, got {len(value)}: "
                f"{dict(value)!r}. To declare several levels, write "
                "@drjax.program(pods=2, groups=4)."
            )
        [(name, size)] = value.items()
        return Partition(name, size)
    levels = attached_levels(value)
    if len(levels) == 1:
        return levels[0]
    if levels:
        raise DrjaxValueError(
            f"partition= needs one partition, got a program with {show_levels(levels)}."
            f" Name one of them, as partition={{'{levels[-1].name}': "
            f"{levels[-1].size}}}."
        )
    raise DrjaxTypeError(
        "partition= needs a drjax.Partition, a mapping such as {'clients': 100}, or a "
        "function decorated with @drjax.program, got "
        f"{type(value).__name__}: {value!r}."
    )


def attached_levels(value: object) -> tuple[Partition, ...]:
    """Return the partitions of a program, outermost first; () of any other object.

    The attribute `partition` of a program is a `Partition`, or the tuple of its levels.
    """
    attached = getattr(value, "partition", None)
    levels: Any = attached if isinstance(attached, tuple) else (attached,)
    return levels if all(isinstance(p, Partition) for p in levels) else ()


def show_levels(levels: Sequence[Partition]) -> str:
    """The levels of a program as text for an error: `levels pods:2 and groups:4`."""
    return "levels " + " and ".join(map(str, levels))


def integer_of(value: Any) -> int | None:
    """Return the `int` that a value stands for; None if it is no integer, or a bool.

    An object with `__index__`, such as a NumPy integer, stands for one.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_size(name: str, size: object) -> int:
    """Check that a partition's size is a positive integer, and return the `int`."""
    number = integer_of(size)
    if number is None and isinstance(size, Mapping):
        levels = ", ".join(f"{key}={n!r}" for key, n in size.items())
        raise DrjaxTypeError(
            f"Partition {name!r} needs a size that is a positive integer, got the "
            f"mapping {dict(size)!r}. Levels are keywords of their own: "
            f"@drjax.program({levels}), or placements={dict(size)!r}."
        )
    if number is None:
        raise DrjaxTypeError(
            f"Partition {name!r} needs a size that is a positive integer, got "
            f"{type(size).__name__}: {size!r}. Write for instance "
            f"@drjax.program({name if name.isidentifier() else 'clients'}=100)."
        )
    if number < 1:
        raise DrjaxValueError(
            f"Partition {name!r} needs a size that is a positive integer, got "
            f"{number}: there is at least one group."
        )
    return number


def _check_axes(name: str, axes: str | Sequence[str]) -> tuple[str, ...]:
    """Check the mesh axes of a partition, and return them as a tuple of names.

    The argument is a name, or a sequence of names. An empty one stands for the axis
    that has the partition's name.
    """
    if isinstance(axes, str):
        axes = (axes,)
    if not isinstance(axes, Sequence):
        axes = (axes,)
    axes = tuple(axes) or (name,)
    for axis in axes:
        if not isinstance(axis, str) or not axis:
            raise DrjaxTypeError(
                f"mesh_axes of partition {name!r} needs the name of a mesh axis or a "
                f"tuple of names, got {type(axis).__name__}: {axis!r}."
            )
    if len(set(axes)) != len(axes):
        raise DrjaxValueError(
            f"mesh_axes of partition {name!r} need to differ, got {axes!r}."
        )
    return axes
