"""The ambient partition: which program is running, and inside which mapped functions.

The scope lives in a `jax.make_user_context` value. It is therefore local to a thread
and part of the key of JAX's trace caches: an inner `jax.jit`, `scan` body or
`checkpoint` helper that is shared by programs of different sizes is traced once for
each of them. A plain `ContextVar` would silently reuse the first trace.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from drjax._compat.types import Mesh
from drjax._errors import ScopeError
from drjax._partition import Partition, as_partition, with_size


class Traits:
    """What the reductions of a program do, for equations elsewhere in it.

    It is known only when such a reduction is traced, often after the work of the groups
    that depends on it; so transposes and lowering rules, which run later, ask it. All
    programs of one code share it, so that it adds one trace for each code to JAX's
    caches.

    Attributes:
      leaves_out: Whether one leaves groups out, by `where=` or `by=`.
      shards: Whether the result of one is divided among the devices.
    """

    _of_code: ClassVar[Any] = weakref.WeakKeyDictionary()

    def __init__(self):
        self.leaves_out = self.shards = False

    @classmethod
    def of(cls, fn: Callable) -> "Traits":
        """Return the one that all programs of the code of `fn` share."""
        inner = inspect.unwrap(fn)
        code = getattr(getattr(inner, "__func__", inner), "__code__", None)
        return cls() if code is None else cls._of_code.setdefault(code, cls())


class NameInProgram(str):
    """The name of a mapped function, with what its program does elsewhere.

    It is the parameter `name` of equations, which all of their rules pass on.
    """

    traits: Traits


# Begins the names of the library's own functions of one group, after which stands the
# public function that maps them: `drjax.reduce_mean`.
OF_LIBRARY = "drjax."


def name_in_program(name: str) -> str:
    """Attach the traits of the current program to the name of a mapped function."""
    traits = current_scope().traits
    if traits is None:
        return name
    named = NameInProgram(name)
    named.traits = traits
    return named


def current_traits() -> Traits:
    """Return the traits of the current program; outside of programs, new ones."""
    return current_scope().traits or Traits()


def traits_of(name: str) -> Traits:
    """Return the traits of the program that has bound an equation of this name."""
    return name.traits if isinstance(name, NameInProgram) else Traits()


@dataclass(frozen=True, slots=True)
class Scope:
    """The ambient partition and mesh, on which building blocks act by default.

    Attributes:
      partition: The ambient partition: of the innermost program, the outermost level
        that no `map_fn` of the program maps over. None outside of programs; and in a
        mapped function, unless `enter_level` has entered a level inside, or a program
        is called in the function.
      mesh: The mesh given to that program; None for the mesh in context.
      mapped: The partitions whose mapped functions are being traced, outermost first.
      levels: If that program has several levels, all of them, outermost first, also
        while its mapped functions are traced; else ().
    """

    partition: Partition | None = None
    mesh: Any = None
    mapped: tuple[Partition, ...] = ()
    levels: tuple[Partition, ...] = ()
    traits: Traits | None = None

    @property
    def open_levels(self) -> tuple[Partition, ...]:
        """The levels on which building blocks may act now, outermost first.

        In a program with several levels they are `partition`, the outermost level that
        no enclosing `map_fn` maps over, and all levels inside it. () outside of
        programs, and in a mapped function in which no inner level is left to act on.
        """
        if self.partition is None:
            return ()
        if self.partition not in self.levels:
            return (self.partition,)
        return self.levels[self.levels.index(self.partition) :]

    @property
    def mapped_levels(self) -> tuple[Partition, ...]:
        """The partitions that `drjax.partition_index()` is about in a mapped function.

        They are all of `levels`, outermost first, if the program has levels and the
        innermost enclosing maps are over exactly these: the running code then sees one
        group of each. Otherwise they are one partition, that of the innermost enclosing
        `map_fn`. () outside of mapped functions.
        """
        all_mapped = self.levels and self.mapped[-len(self.levels) :] == self.levels
        return self.levels if all_mapped else self.mapped[-1:]


scope_context = jax.make_user_context(None)
# Whether programs are being planned under the mesh in context: their building blocks
# bind primitives without a mesh. See `_sharding/planning_context.py`.
planned = jax.make_user_context(False)
# Whether `drjax.jit` traces a program of which it runs a few groups at a time.
in_chunks = jax.make_user_context(False)
# The mesh of one group while programs are planned for it (`_sharding/group_mesh.py`).
group_mesh = jax.make_user_context(None)
# `(partition, n)` while programs over this partition are traced for n groups; n may be
# a symbol.
resized = jax.make_user_context(None)
_OUTSIDE = Scope()


def current_scope() -> Scope:
    """Return the `Scope` of the running code; outside of programs an empty one."""
    return scope_context.value or _OUTSIDE


def program_scope(
    levels: tuple[Partition, ...], mesh: Mesh | None, traits: Traits
) -> Callable[[], AbstractContextManager[Any]]:
    """Make the function that enters a program's scope, for each call of the program.

    The `Scope` is made once, when the program is decorated, so that a call costs
    little. It is made at each call in two cases. Inside a mapped function, the scope
    keeps the partitions that are mapped over; the program's own partition may have the
    name of one of these. And while `make_plan(open_groups=True)` traces a program a
    second time, with one more group, the scope has the partition of that size.

    The levels are outermost first; a program with one partition has one.
    """
    outermost, *below = levels
    several = levels if below else ()
    # Made once: entering a program must cost little.
    alone = Scope(outermost, mesh, (), several, traits)
    # A function of this module, by whose name cloudpickle finds the context: a nested
    # one would be pickled with it.
    return functools.partial(_enter, alone, levels)


def _enter(alone: Scope, levels: tuple[Partition, ...]) -> AbstractContextManager[Any]:
    """Enter a program's scope, `alone` outside of mapped functions."""
    outer = scope_context.value
    if outer is None or not outer.mapped:
        if resized.value is None:
            return scope_context(alone)
        first, *others = sized = tuple(map(_as_traced, levels))
        return scope_context(
            replace(alone, partition=first, levels=sized if others else ())
        )
    return scope_context(replace(alone, mapped=outer.mapped))


def _as_traced(partition: Partition) -> Partition:
    """Return a partition with the number of groups for which programs are now traced.

    `make_plan(open_groups=True)` traces a program again, with one more group and with a
    symbol for their number, to find what depends on n. During these traces, the plan's
    partition is returned with that number. Any other partition, and every partition at
    other times, is returned as it is.
    """
    if resized.value is None or partition != resized.value[0]:
        return partition
    return with_size(partition, resized.value[1])


def enter_mapped(partition: Partition) -> AbstractContextManager[Any]:
    """Return the context manager in which the function of a `map_fn` is traced.

    In it, `current_scope().partition` is None, so that a building block without
    `partition=` is an error (but for `partition_index` and `partition_size`); and
    `current_scope().mapped` ends with `partition`. If the program has several levels,
    its mesh and levels stay in the scope, as `enter_level` may enter an inner level in
    the function. Otherwise they are not in it.
    """
    scope = current_scope()
    mapped = (*scope.mapped, partition)
    if not scope.levels:
        return scope_context(Scope(None, None, mapped))
    # The levels below this one need the program's mesh.
    return scope_context(Scope(None, scope.mesh, mapped, scope.levels, scope.traits))


def enter_level(partition: Partition) -> AbstractContextManager[Any]:
    """Return the context manager in which building blocks act on an inner level.

    It is entered in a function that is mapped over the level around it.
    """
    scope = current_scope()
    return scope_context(replace(scope, partition=partition))


def resolve_partition(
    block: str, mesh: Mesh | None, partition: object
) -> tuple[Partition, Any]:
    """Resolve the partition, and the mesh, on which a building block acts.

    The arguments `mesh` and `partition` are those of the block; they may be None. Then
    the partition is the ambient one; and the mesh is the program's if the partition is
    the ambient one, else None. A mesh that is None stands for the one in context.
    """
    scope = current_scope()
    if partition is not None:
        named = as_partition(partition)
        # In a mapped function it is an inner partition, which may be equal by chance.
        named = named if scope.mapped else _as_traced(named)
        if named == scope.partition:
            return named, scope.mesh if mesh is None else mesh
        _check_not_mapped(block, named, scope)
        return named, mesh
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


def _check_not_mapped(block: str, partition: Partition, scope: Scope) -> None:
    """Check that no enclosing mapped function is over the partition that a block names.

    Inside a function mapped over clients, which sees one client, a reduction over
    `partition={"clients": n}` would have to combine all clients.
    """
    for outer in scope.mapped:
        if outer.name == partition.name:
            raise ScopeError(
                f"drjax.{block}(partition={partition}) was called inside the function "
                f"given to drjax.map_fn over partition {outer}; that function sees one "
                "group. Call the block outside map_fn, or call a program with a "
                "partition of its own, which may have the same name."
            )
