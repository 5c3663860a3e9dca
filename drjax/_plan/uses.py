"""Where the steps of a plan define and read its values.

Input: a plan, or the body of a loop. Output: positions of steps, and names of values.
Positions are indices in `plan.steps`; the plan's outputs are read at the end, at
position `len(plan.steps)`. Bodies are plans with values of their own: of a loop only
its inputs and outputs count.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Set
from typing import TYPE_CHECKING, Any

from drjax._plan.steps import Exchange, Stage, Step
from drjax._plan.value import Value

if TYPE_CHECKING:
    from drjax._plan.normal_form import Plan


def reads(plan: "Plan") -> Iterator[tuple[int, Value]]:
    """All reads of values, as `(position, value)` pairs in the order of the steps."""
    for position, step in enumerate(plan.steps):
        yield from ((position, value) for value in step.inputs)
    yield from ((len(plan.steps), value) for value in plan.outputs)


def readers(plan: "Plan", value: Value) -> list[Step | None]:
    """The steps that read a value, in their order; None: the plan returns it."""
    steps = [*plan.steps, None]
    return [steps[position] for position, read in reads(plan) if read == value]


def last_reads(plan: "Plan") -> dict[str, int]:
    """The position of the last read of each value that is read, by name."""
    return {value.name: position for position, value in reads(plan)}


def read_last(plan: "Plan") -> list[list[str]]:
    """For each step the names of the values that it reads last, to be dropped then.

    Outputs of the plan are in no list, and neither is a value that nothing reads.
    """
    names: list[list[str]] = [[] for _ in range(len(plan.steps) + 1)]
    for name, position in last_reads(plan).items():
        names[position].append(name)
    return names[:-1]


def replaced(plan: "Plan", lasting: Set[str]) -> list[dict[str, str]]:
    """For each local stage, by output the input whose memory it may take.

    Both are partitioned and of one type, and nothing reads the input later. Inputs of
    the plan are the last choice, as their memory may be the caller's. `lasting` are
    those of them that are read after the plan, or again when it runs again.
    """
    slices, result = kept(plan), list[dict[str, str]]()
    of_caller = {v.name for v in plan.inputs}
    for step, read in zip(plan.steps, read_last(plan), strict=True):
        if not isinstance(step, Stage) or not step.local:
            continue
        names = {*read} - lasting
        free: dict[Any, deque[str]] = defaultdict(deque)
        inputs = (v for v in step.inputs if v.partitioned and v.name in names)
        for v in sorted(inputs, key=lambda v: v.name in of_caller):
            free[v.shape, v.dtype].append(v.name)
        result.append(
            {
                v.name: free[v.shape, v.dtype].popleft()
                for v in step.outputs
                if v.name in slices and free[v.shape, v.dtype]
            }
        )
    return result


def kept(plan: "Plan") -> frozenset[str]:
    """The names of the values of which slices are needed, not only combinations.

    Of these a local stage returns the groups' slices; of its other outputs backends
    need partial reductions only.
    """
    names = {value.name for value in plan.outputs}
    for step in plan.steps:
        of_server = isinstance(step, Stage) and not step.local
        if not of_server and not (isinstance(step, Exchange) and step.combines):
            names |= {value.name for value in step.inputs}
    return frozenset(names)


def check_order(plan: "Plan") -> None:
    """Raise `ValueError` unless each value is defined before it is read.

    Bodies of loops and inner levels are left out, as they are plans of their own.
    """
    defined = {v.name for v in plan.inputs}
    for step in plan.steps:
        check_defined((v.name for v in step.inputs), defined)
        defined |= {v.name for v in step.outputs}
    check_defined((v.name for v in plan.outputs), defined)


def check_defined(names: Iterable[str], defined: Set[str]) -> None:
    """Raise `ValueError` if one of `names` is not among those `defined`."""
    if unknown := {*names} - defined:
        shown = [name[:60] for name in sorted(unknown)[:5]]
        raise ValueError(f"{shown} are used before they are made")
