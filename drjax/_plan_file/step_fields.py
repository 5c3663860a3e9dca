"""The fields of steps, as a plan file has them: a kind for each type of a field.

Input: a class of steps, a dataclass. Output: its fields with their kinds, by which
`encode` writes and `decode` reads them. Invariant: a field of a type that has a kind
needs no code in the codec.
"""

import functools
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from drjax._plan.record import Record
from drjax.plan import Plan, Stage, Step, Value, Wire

# The kinds: the name of a value, names of values, a stage, plans, an encoding of
# numbers, and JSON data: numbers, texts, bools and lists of them.
VALUE, VALUES, STAGE, PLANS, WIRE, PLAIN = (
    "value",
    "values",
    "stage",
    "plans",
    "wire",
    "plain",
)
_KINDS: dict[Any, str] = {
    Value: VALUE,
    tuple[Value, ...]: VALUES,
    Stage: STAGE,
    tuple[Plan, ...]: PLANS,
    Wire | None: WIRE,
}


@functools.cache
def fields_of(cls: type[Step]) -> list[tuple[str, str, Any]]:
    """List the fields of a class of steps: name, kind, and default or `MISSING`."""
    hints = typing.get_type_hints(cls, localns=Record.records)
    return [
        (f.name, _KINDS.get(hints[f.name], PLAIN), f.default)
        for f in fields(typing.cast(Any, cls))
    ]


def step_class(name: str) -> type[Step]:
    """Return the class of steps of a name; `ValueError`: there is none."""
    cls = Record.records.get(name, Record)
    # Bases of several classes are no dataclasses, or no rule checks them.
    if not (issubclass(cls, Step) and is_dataclass(cls)):
        raise ValueError(f"{name[:60]} is no step of a plan")
    return cls


def has_default(default: object) -> bool:
    """Whether a default of `fields_of` is one."""
    return default is not MISSING
