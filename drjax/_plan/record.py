"""Records of a plan: dataclasses whose fields have the types of their annotations.

Input: the fields of a dataclass. Output: the same record, in which integers are plain
`int`s, texts `str`s, and sequences tuples; anything else is a `DrjaxTypeError`. So what
a plan holds can be compared, hashed, printed and written to a file, whoever made it.

Sharp edges: `jax.export` makes dimensions symbolic, so an `int` may be one of these.
Types that are `Any` or a `Protocol` are not checked.
"""

import functools
import types
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, Union

import numpy as np

from drjax._errors import DrjaxTypeError
from drjax._partition import integer_of


class Record:
    """Base of the dataclasses of a plan, which checks their fields when one is made."""

    # By name, as records of different modules have each other in their annotations.
    records: ClassVar[dict[str, type["Record"]]] = {}
    __dataclass_fields__: ClassVar[dict[str, Any]]  # of the subclass

    def __init_subclass__(cls) -> None:
        Record.records[cls.__name__] = cls

    def __post_init__(self) -> None:
        for name, expected, convert, exact in _checks(type(self)):
            old = getattr(self, name)
            if type(old) is exact:
                continue
            try:
                new = convert(old)
            except TypeError:
                raise DrjaxTypeError(
                    f"{type(self).__name__}.{name} needs {expected}, got "
                    f"{type(old).__name__}: {repr(old)[:100]}."
                ) from None
            if new is not old:
                object.__setattr__(self, name, new)


Converter = Callable[[Any], Any]


@functools.cache
def _checks(cls: type) -> list[tuple[str, str, Converter, Any]]:
    """List of each field its name, its type, also as text, and its converter."""
    hints = typing.get_type_hints(cls, localns=Record.records)
    return [
        (f.name, _text(hints[f.name]), converter, hints[f.name])
        for f in fields(cls)
        if (converter := _converter(hints[f.name])) is not None
    ]


def _text(hint: object) -> str:
    """Write a type as its annotation has it, without the names of modules."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    if _is_union(hint):
        return " | ".join(map(_text, typing.get_args(hint)))
    args = ("..." if a is ... else _text(a) for a in typing.get_args(hint))
    return f"tuple[{', '.join(args)}]"


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _converter(hint: Any) -> Converter | None:
    """The function that checks a value of a type and returns it; None: any value."""
    if hint is Any or getattr(hint, "_is_protocol", False):
        return None
    if hint in _PLAIN:
        return _PLAIN[hint]
    if _is_union(hint):
        # Before int, as a bool is an integer for Python.
        parts = sorted(typing.get_args(hint), key=lambda part: part is int)
        converters = [_converter(part) for part in parts]
        return None if None in converters else _first_of(converters)
    if typing.get_origin(hint) is tuple:
        return _tuple_of(typing.get_args(hint))
    return _instance_of(hint)


def _int(x: object) -> Any:
    if type(x) is int:
        return x
    # A symbolic dimension has the arithmetic of integers, and no value.
    symbolic = hasattr(x, "__floordiv__") and not hasattr(x, "__index__")
    if symbolic and not isinstance(x, float | complex | np.generic):
        return x
    number = integer_of(x)
    if number is None or isinstance(x, np.bool_):
        raise TypeError
    return number


def _bool(x: object) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError
    return bool(x)


def _str(x: object) -> str:
    if not isinstance(x, str):
        raise TypeError
    return x if type(x) is str else str(x)


_PLAIN: dict[Any, Converter] = {int: _int, bool: _bool, str: _str}


def _first_of(converters: list) -> Converter:
    def convert(x: object) -> Any:
        for one in converters:
            try:
                return one(x)
            except TypeError:
                continue
        raise TypeError

    return convert


def _tuple_of(parts: tuple[Any, ...]) -> Converter:
    """The converter of `tuple[part, ...]`, or of a tuple with one part for each."""
    exact: object = ()
    if len(parts) == 2 and parts[1] is ...:
        one, exact = _converter(parts[0]), parts[0]
        of_items = lambda xs: xs if one is None else tuple(map(one, xs))
    else:
        each = list(map(_converter, parts))

        def of_items(xs: tuple) -> tuple:
            if len(xs) != len(each):
                raise TypeError
            pairs = zip(each, xs, strict=True)
            return tuple(x if one is None else one(x) for one, x in pairs)

    def convert(x: object) -> tuple:
        if not isinstance(x, tuple):
            raise TypeError
        if {*map(type, x)} <= {exact}:  # nothing to convert, as mostly
            return x
        new = of_items(x)
        # The same object, if it may be: large tuples are shared.
        return x if all(a is b for a, b in zip(new, x, strict=True)) else new

    return convert


def _instance_of(cls: type) -> Converter:
    def convert(x: object) -> Any:
        if not isinstance(x, cls):
            raise TypeError
        return x

    return convert
