"""The loops of a plan: steps that run plans of their own.

Input: plans, and the values that they read and give. Output: records.

Another partition than the plan's own is told in two ways: by a `Program`, in a round of
the plan, and by `Stage.inner`, in each of its groups. Both are plans, as each partition
has rounds of its own. In one flat plan with both, a round would be one of several
partitions, and each consumer would ask of each step whose round it is in. Sharp edges:
inputs and outputs of a `Program` are global, so that what one partition has for another
one passes through the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from drjax._plan.steps import Loop
from drjax._plan.value import Value

if TYPE_CHECKING:
    from drjax._plan.normal_form import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class Scan(Loop):
    """A loop of a known number of steps, as `jax.lax.scan`. See `Loop`.

    Of a stack a step takes, or gives, one entry; or, where the value of its body has as
    many axes as the stack, a block of them (see `takes_blocks`), as `drjax.jit` runs it
    with checkpoints.

    Attributes:
      consts: The number of constants of the body, as a tuple of one.
      carry: The number of carried values.
      length: The number of steps.
      reverse: Whether it runs from its last step to its first.
    """

    consts: tuple[int, ...]
    carry: int
    length: int
    reverse: bool = False

    op = "scan"

    @property
    def times(self) -> tuple[int, ...]:
        return (self.length,)

    def split(self, xs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split a list in the order of its inputs: constants, carried values, stacks.

        Each step takes one entry of every stack, the `xs` of `lax.scan`.
        """
        first = sum(self.consts)
        second = first + self.carry
        return [*xs[:first]], [*xs[first:second]], [*xs[second:]]


def takes_blocks(stack: Value, entry: Value) -> bool:
    """Whether a step of a scan has a block of entries of a stack, not one of them."""
    return len(stack.shape) == len(entry.shape)


@dataclass(frozen=True)
class While(Loop):
    """A loop that runs while its condition holds, as `jax.lax.while_loop`. See `Loop`.

    Attributes:
      consts: The numbers of constants of the condition, and of the body.
      carry: The number of carried values.
    """

    consts: tuple[int, ...]
    carry: int

    op = "while"
    length, reverse = None, False

    @property
    def times(self) -> tuple[str, ...]:
        return (self.name,)

    def split(self, xs: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Split a list in the order of its inputs.

        They are constants of the condition, constants of the body, and carried values.
        """
        first, second = self.consts[0], sum(self.consts)
        return [*xs[:first]], [*xs[first:second]], [*xs[second:]]


class _Once(Loop):
    """A step that runs one body, once: it has no constants and carries nothing."""

    # Not in `Loop`, where they would be defaults of the fields of scans.
    consts, carry, length, reverse = (), 0, None, False


@dataclass(frozen=True)
class Cond(_Once):
    """One of several branches, as `jax.lax.switch`. See `Loop`."""

    op = "cond"


@dataclass(frozen=True)
class Program(_Once):
    """A plan over another partition, whose inputs and outputs are global values here.

    See `Loop`. It is the one step that has values over another partition inside.
    """

    op = "program"

    @property
    def body(self) -> "Plan":
        """The plan over the other partition."""
        return self.bodies[0]


@dataclass(frozen=True)
class Columns(Program):
    """A plan over the coordinates of gathered slices, with one stage for each of them.

    See `Loop`. An input of its body is that of the loop in another shape, with the
    coordinates as one axis. Its groups are no clients, but parts of the server's work:
    backends run it for all of them at once, and no ledger has what they communicate.
    """

    op = "columns"
