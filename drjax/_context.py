"""The ambient partition: which program is running, and inside which mapped functions.

The scope lives in a `jax.make_user_context` value. It is therefore local to a thread
and part of the key of JAX's trace caches: an inner `jax.jit`, `scan` body or
`checkpoint` helper that is shared by programs of different sizes is traced once for
each of them. A plain `ContextVar` would silently reuse the first trace.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from drjax._errors import ScopeError
from drjax._partition import Partition, as_partition


@dataclass(frozen=True, slots=True)
class Scope:
    """The ambient partition and mesh, on which building blocks act by default.

    Attributes:
      partition: The partition of the innermost program; None outside of programs and
        directly inside a mapped function.
      mesh: The mesh given to that program; None for the mesh in context.
      mapped: The partitions whose mapped functions are being traced, outermost first.
    """

    partition: Partition | None = None
    mesh: Any = None
    mapped: tuple[Partition, ...] = ()


scope_context = jax.make_user_context(None)
# Whether programs are being planned under the mesh in context: their building blocks
# bind primitives without a mesh. See `_sharding/planning_context.py`.
planned = jax.make_user_context(False)
_OUTSIDE = Scope()


def current_scope() -> Scope:
    """The `Scope` of the code that is running; an empty one outside of programs."""
    return scope_context.value or _OUTSIDE


def program_scope(partition: Partition, mesh: Any) -> Callable[[], Any]:
    """Make the function that enters a program's scope, for each call of the program.

    Args:
      partition: The partition of the program.
      mesh: The mesh of the program, or None for the mesh in context.

    Returns:
      `enter`, which takes no arguments and returns a context manager for the program's
      body. It raises `ScopeError` inside a mapped function over a partition with the
      same name or one of the same mesh axes.
    """
    alone = Scope(partition, mesh)  # made once: entering a program must cost little

    def enter():
        outer = scope_context.value
        if outer is None or not outer.mapped:
            return scope_context(alone)
        _check_not_mapped(f"A program over partition {partition}", partition, outer)
        return scope_context(Scope(partition, mesh, outer.mapped))

    return enter


def enter_mapped(partition: Partition):
    """The context manager for tracing the function of a `map_fn` over `partition`.

    Inside it, `current_scope()` has no partition, and its `mapped` ends with this one.
    """
    return scope_context(Scope(None, None, (*current_scope().mapped, partition)))


def resolve_partition(block: str, mesh: Any, partition: Any) -> tuple[Partition, Any]:
    """Resolve the partition, and the mesh, on which a building block acts.

    Args:
      block: The name of the building block, for errors.
      mesh: Its argument `mesh=`, a `jax.sharding.Mesh` or `AbstractMesh`; None: that of
        the program.
      partition: Its argument `partition=`, a `Partition`, a mapping such as
        `{"clients": 100}`, or a program; None: that of the program.

    Returns:
      `(partition, mesh)`. The mesh is the argument of the block; by default that of the
      program, if the program is over this partition; else None, for the mesh in
      context.

    Raises:
      ScopeError: No partition is passed, outside of a program or directly inside a
        mapped function; or the one passed has the same name, or one of the same mesh
        axes, as the partition of an enclosing mapped function.
    """
    scope = current_scope()
    if partition is not None:
        named = as_partition(partition)
        _check_not_mapped(f"drjax.{block}(partition={named})", named, scope)
        same = named == scope.partition
        return named, mesh if mesh is not None or not same else scope.mesh
    if scope.partition is not None:
        return scope.partition, scope.mesh if mesh is None else mesh
    if scope.mapped:
        raise ScopeError(
            f"drjax.{block} was called inside the function given to drjax.map_fn over "
            f"partition {scope.mapped[-1]}; that function sees one group and works on "
            "that group's values only. Call the block outside map_fn and pass the "
            "result in, or call a program with a partition of its own."
        )
    raise ScopeError(
        f"drjax.{block} was called outside a program, so there is no partition. "
        "Decorate the calling function with @drjax.program(clients=100), or pass "
        "partition={'clients': 100} (needed in code that runs after the program has "
        "returned, such as the backward function of a jax.custom_vjp and, under jit, "
        "checkpoint or scan, the forward one: f.defvjp(drjax.program(clients=100)"
        "(forward), drjax.program(clients=100)(backward)))."
    )


def _check_not_mapped(what: str, partition: Partition, scope: Scope) -> None:
    """Check that no enclosing mapped function uses a partition's name or mesh axes.

    Args:
      what: The program or building block that needs the partition: the first words of
        the error.
      partition: The partition that the program or block is over.
      scope: The current scope; `scope.mapped` has the partitions of the enclosing
        mapped functions.

    Raises:
      ScopeError: An enclosing mapped function is over a partition with the same name,
        or with one of the same mesh axes.
    """
    for outer in scope.mapped:
        if outer.name == partition.name or set(outer.mesh_axes) & set(
            partition.mesh_axes
        ):
            raise ScopeError(
                f"{what} was called inside the function given to drjax.map_fn over "
                f"partition {outer}. A nested partition needs another name and other "
                "mesh axes, for instance @drjax.program(pods=4) around "
                "@drjax.program(clients=100)."
            )
