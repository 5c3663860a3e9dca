"""A table of rules: what one consumer of plans does with each class of step.

    line = Rules("print(plan)")

    @line.rule(Broadcast)
    def _broadcast(step: Broadcast) -> str: ...

    line(step)

Input: a step. Output: what the rule of its class gives. Invariants: a class without a
rule of its own has that of its nearest base; if there is none, the consumer raises
`PlanError`, which names the step and the consumer. So a new class of step needs rules,
and a consumer that has none cannot pass over it.
"""

from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from drjax._errors import PlanError
from drjax._plan.steps import Step

R = TypeVar("R")


class Rules(Generic[R]):
    """The rules of one consumer, a callable: `rules(step, *args)`.

    `consumer` is the subject of the error for a step without a rule, such as
    `print(plan)`. With a `base`, another table has the rules that this one lacks.
    """

    def __init__(self, consumer: str, base: "Rules[R] | None" = None):
        self.consumer = consumer
        # Its own, then those of its bases.
        self._tables: tuple[dict[type[Step], Callable[..., R]], ...] = ({},)
        if base is not None:
            self._tables += base._tables

    def rule(self, *classes: type[Step]) -> Callable[[Callable], Callable]:
        """Decorate the function of the steps of these classes and their subclasses."""

        def register(function: Callable) -> Callable:
            self._tables[0].update(dict.fromkeys(classes, function))
            return function

        return register

    def __call__(self, step: Step, *args: Any) -> R:
        return self._rule_of(type(step))(step, *args)

    def _rule_of(self, cls: type[Step]) -> Callable[..., R]:
        for base in cls.__mro__:
            for table in self._tables:
                if base in table:
                    return table[base]

        def missing(step: Step, *_: Any) -> NoReturn:
            raise PlanError(f"{self.consumer} has no rule for {_named(step)}.")

        return missing


def _named(step: Step) -> str:
    """Name a step in an error: its class, and the values that it gives."""
    results = ", ".join(v.name for v in step.outputs) or "nothing"
    return f"{type(step).__name__}, which gives {results}"
