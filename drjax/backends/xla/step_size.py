"""How many groups of a device run at once: the option, or what fits in memory.

Input: the options `groups_per_step` and `memory_budget`; for `"auto"` functions that
compile a program that saves, or one that rematerializes, and return its temporary
memory. Output: which of both, and a number, or None for all. What is fastest, for
`"tune"`, is searched for in `_jit/tune.py`.

Invariants: the number that `largest` returns was compiled and seen to fit.

Sharp edges: temporary memory is the compiler's own estimate, without arguments and
results; each number that is tried costs a compilation.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._partition import integer_of

_COMPILATIONS = 8


@dataclass(frozen=True)
class Fit:
    """The option `groups_per_step="auto"`: as many groups at once as fit in memory.

    `budget` is in bytes of temporary memory for each device; None: what the device has
    left.
    """

    budget: int | None


GroupsPerStep = int | None | Fit


def checked(
    caller: str,
    groups_per_step: Any,
    memory_budget: Any,
    words: Sequence[str] = ("auto",),
) -> GroupsPerStep:
    """Validate the options `groups_per_step` and `memory_budget`, and return one value.

    `caller` is the public name of what takes them, for errors, and `words` are the
    strings that it takes as `groups_per_step`. `memory_budget` is in bytes of temporary
    memory for each device, and goes only with these, for which the result is a `Fit`.
    """
    quoted = [f'"{word}"' for word in words]
    if memory_budget is not None:
        with_words = f"bytes with {' or '.join(quoted)}"
        memory_budget = _positive(caller, "memory_budget", memory_budget, with_words)
        if not isinstance(groups_per_step, str):
            raise DrjaxValueError(
                f"{caller} takes memory_budget= with groups_per_step="
                f"{' or '.join(quoted)}, got groups_per_step={groups_per_step!r}."
            )
    if groups_per_step is None:
        return None
    otherwise = f"{', '.join(quoted)} or None"
    if isinstance(groups_per_step, str):
        if groups_per_step not in words:
            raise DrjaxValueError(
                f"{caller} needs groups_per_step as a positive int, {otherwise}, got "
                f"{groups_per_step!r}."
            )
        return Fit(memory_budget)
    return _positive(caller, "groups_per_step", groups_per_step, otherwise)


def _positive(caller: str, name: str, value: object, otherwise: str) -> int:
    """Check that an option is a positive integer, and return it as an int.

    `otherwise` is for errors: the other values that the option may have.
    """
    number = integer_of(value)
    if number is None:
        raise DrjaxTypeError(
            f"{caller} needs {name} as a positive int, {otherwise}, got {value!r}."
        )
    if number < 1:
        raise DrjaxValueError(
            f"{caller} needs at least one in {name}, got {name}={value}. "
            "groups_per_step=None works on all of a device's groups at once."
        )
    return number


def largest(
    count: int, temp_bytes: Callable[[int], int], budget: int, least: int = 1
) -> int:
    """Find the largest number of groups at once, up to `count`, that fits in memory.

    The search assumes that memory grows with the number of groups, guesses that it does
    so linearly, and compiles at most eight times. So of a great many groups it may miss
    the largest number by a little, but the number that it returns was compiled and seen
    to fit. It is a `DrjaxValueError` if one group does not fit.

    `count` is the number of slots of a device: places for one group each. `temp_bytes`
    compiles the program for a number of groups at once, and returns its temporary
    memory, of which it may have `budget` bytes. `least` groups fit, or are one.
    """
    # All at once first: the fastest, and most often it fits.
    known = {count: temp_bytes(count)}
    low, high = least, count
    if known[count] <= budget:
        low = count
    elif count > least:
        known[least] = temp_bytes(least)
    if known[low] > budget:
        raise DrjaxValueError(
            f"Not even one group at a time fits: it needs {known[low]:,} bytes of "
            f"temporary memory, and the budget is {budget:,}. Raise memory_budget=, or "
            "make the work of a group smaller."
        )
    while high - low > 1 and len(known) < _COMPILATIONS:
        # Linear interpolation finds the number in two or three compilations; bisection
        # would need one for each bit.
        # As known[low] <= budget < known[high], the share is in [0, 1).
        share = (budget - known[low]) / (known[high] - known[low])
        # Strictly between both, so that every compilation shortens the interval.
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        known[guess] = temp_bytes(guess)
        if known[guess] <= budget:
            low = guess
        else:
            high = guess
    return low


@dataclass(frozen=True)
class Way:
    """A program that saves or rematerializes what later rounds need, to be compiled.

    Attributes:
      temp_bytes: Compiles it for a number of groups at once, and returns its temporary
        memory in bytes; cached.
      saved: The bytes of a device that wait from one round to another.
      operations: What one group computes, as estimated, on average of all.
    """

    temp_bytes: Callable[[int], int]
    saved: int
    operations: float

    @property
    def cost(self) -> tuple[int, float]:
        """What tells whether two programs are the same."""
        return self.saved, self.operations


def best(
    count: int, saving: Way, repeating: Way | None, budget: int
) -> tuple[Way, int]:
    """Choose how much to save, and how many groups run at once, by bytes and work.

    To save is best where all `count` groups of a device then fit in memory at once.
    Else the largest number that fits is sought for the program that rematerializes; and
    also where this one does less work, as only a chosen group rematerializes. To
    save is still better if more, smaller steps take no more time in all, should each
    step take as long as its work, or all steps equally long. `repeating` None: no round
    needs what an earlier one computes. Arguments and errors are those of `largest`.
    """
    # So that a chosen group does again what it needs, all others need not save it.
    if repeating is not None and repeating.operations < saving.operations:
        return repeating, largest(count, repeating.temp_bytes, budget)
    # What waits is in memory at once, however few groups work.
    may_save = repeating is None or saving.saved <= budget
    if may_save and saving.temp_bytes(count) <= budget:
        return saving, count
    if repeating is None:
        return saving, largest(count, saving.temp_bytes, budget)
    size = largest(count, repeating.temp_bytes, budget)
    steps = -(-count // size) * repeating.operations / max(1, saving.operations)
    least = -(-count // max(1, int(steps)))
    if may_save and least < count and saving.temp_bytes(least) <= budget:
        return saving, largest(count, saving.temp_bytes, budget, least)
    return repeating, size


def memory_text(used: int, budget: int) -> str:
    """Write what a program takes, for logs and `drjax.check`."""
    return f"{used:,} of {budget:,} bytes of temporary memory"


def free_bytes(devices: Sequence[Any]) -> int:
    """Return the bytes of free memory of the device that has the least.

    For a CPU, or a device that does not report its limit, it is the host's free memory
    divided by the number of local devices.
    """
    free = []
    for device in devices:
        # None on CPUs, and on some accelerators without the limit.
        stats = device.memory_stats()
        if stats and "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
        else:
            pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            free.append(pages // jax.local_device_count())
    # All devices run one program: the fullest device decides.
    return min(free)
