"""The steps of a plan: computation, exchanges between groups and the server, loops.

A plan is a list of steps, each of which reads values and gives values. A `Stage`
computes, without communication; an `Exchange` communicates, and computes at most the
combination of what it communicates; a `Loop` runs plans of its own.

Input: values, and for loops plans. Output: records. Invariants: `inputs`, `outputs` and
`bodies` of a step are all that it reads, gives and runs: order, liveness and rewriting
need nothing else. Sharp edges: a consumer has a rule for each class of step, in a table
(`rules.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from drjax._errors import PlanError
from drjax._partition import Partition
from drjax._plan.exported import Exported
from drjax._plan.record import Record
from drjax._plan.value import Value

if TYPE_CHECKING:
    from drjax._plan.normal_form import Plan


class Step(Record):
    """One step of a plan. The base of all of them; a subclass is a frozen dataclass.

    Attributes:
      inputs: The values that it reads.
      outputs: The values that it gives; no other step gives them.
      bodies: The plans that it runs.
    """

    # Annotations alone, as a default here would be one of the subclass's fields.
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    bodies: tuple["Plan", ...]

    def stages(self) -> Iterator[tuple[str, "Stage"]]:
        """The computation in the step, as `(location in its round, stage)` pairs."""
        return iter(())


@dataclass(frozen=True)
class Stage(Step):
    """Computation without communication.

    Attributes:
      name: For people: the functions that it fuses.
      inputs: The values that it takes. A local stage takes global values whole, and of
        partitioned values the group's slice.
      outputs: The values that it returns: global values on the server, slices in a
        group.
      jaxpr: A `jax.extend.core.ClosedJaxpr` from inputs to outputs. That of a local
        stage takes the group index, int32 `[]`, as its first argument.
      exported: Its functions as a plan file has them, if it was exported or loaded from
        a file; else None.
      inner: Of a local stage that runs building blocks over an inner level, in each
        group, the plan of that work: from the group index and the inputs to the
        outputs. None: it has no such blocks, or what it does with them has no plan.
      over: The partition whose groups it runs in, each with its slices; () of a stage
        of the server.
      work: Of a stage that was loaded from a file, what it computes, in floating-point
        operations as estimated, and what of it is rematerialized; else None, as the
        jaxpr says it.
      after: Of a stage of the server, partitioned values that are computed before what
        it takes of reductions counts as received: while groups compute these, what was
        sent may be under way. A plan file has them not.
      mesh: Names and sizes of the axes of the mesh that one group's work needs, as
        `(("model", 4),)`; () if one device runs it.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    jaxpr: Any
    exported: Exported | None = None
    inner: Union["Plan", None] = None
    over: tuple[Partition, ...] = ()
    work: tuple[int, int] | None = None
    after: tuple[Value, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()

    bodies = ()

    def stages(self) -> Iterator[tuple[str, "Stage"]]:
        where = "groups" if self.local else "server"
        yield where, self
        if self.inner is not None:
            yield from ((f"{where}, {x}", stage) for x, stage in self.inner.stages())

    @property
    def empty(self) -> bool:
        """Whether the stage has no outputs, so that backends skip it."""
        return not self.outputs

    @property
    def local(self) -> bool:
        """Whether it runs in the groups, not on the server."""
        return bool(self.over)


class Exchange(Step):
    """Communication. The base of all kinds of it; a subclass is a frozen dataclass.

    Attributes:
      op: The name of what it does, as messages of the ledger have it.
      phrase: What it does, in a printed plan; "" if that depends on its fields.
      direction: `down` from the server to the groups, `up` from the groups to the
        server, or `between` groups.
      combines: Whether it combines the groups' slices, so that what computes a slice
        need not keep it: backends combine slices while a stage runs.
    """

    op: str
    phrase: ClassVar[str] = ""
    direction: ClassVar[Literal["down", "up", "between"]]
    combines: ClassVar[bool] = False
    bodies = ()

    def messages(self) -> Iterator[tuple[Value, int]]:
        """The values that are communicated, with the bytes of each for one group."""
        return ((v, v.nbytes) for v in self.inputs)

    @property
    def nbytes(self) -> int:
        """The bytes of one group, of all values together."""
        return sum(nbytes for _, nbytes in self.messages())

    def slices_per_device(self, size: int, devices: int) -> int:
        """Count the slices of a value that one device puts into a collective.

        The `size` groups are divided over the `devices`, which are at least 2.
        """
        if self.direction == "down":
            return 0  # each device has the server's value
        raise PlanError(f"Plan.communication has no count for {type(self).__name__}.")


@dataclass(frozen=True)
class Loop(Step):
    """Steps that run plans of their own: a loop, a branch, or another partition.

    The base of all kinds of it; a subclass is a frozen dataclass.

    Attributes:
      op: `scan`, `while`, `cond`; `program`: a plan over another partition, whose
        inputs and outputs are global values here; or `columns`: of `reduce_columns`,
        one round whose groups are the coordinates of gathered slices. Its inputs and
        outputs are global values, too. It is work of the server, which may share it.
      name: Unique in the plan.
      inputs: Of a scan constants, carried values and stacks (`xs`); of a while the
        constants of its condition and of its body, and carried values; of a cond the
        index of the branch and the operands of every branch.
      outputs: Of a scan the carried values and stacks (`ys`); of a while the carried
        values; of a cond the results of the branch. In a stack of partitioned values
        each slice has the steps along its axis 0.
      bodies: A plan for each body: (body,) of a scan, (condition, body) of a while, the
        branches of a cond.
      consts: The number of constants: (of the body,) of a scan, (of the condition, of
        the body) of a while, () of others.
      carry: The number of carried values; 0 of others than a scan or while.
      length: The number of steps of a scan; None of others.
      reverse: Whether a scan runs from its last step to its first.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    bodies: tuple["Plan", ...]

    op: ClassVar[str]
    # Fields of some subclasses, and constants of the others.
    consts: ClassVar[tuple[int, ...]]
    carry: ClassVar[int]
    length: ClassVar[int | None]
    reverse: ClassVar[bool]

    @property
    def times(self) -> tuple[int | str, ...]:
        """How often the bodies run, a number, or the loop's name if a run tells it.

        () if that is once, or a branch.
        """
        return ()

    def stages(self) -> Iterator[tuple[str, Stage]]:
        for body in self.bodies:
            yield from ((f"{self.name}, {x}", stage) for x, stage in body.stages())
