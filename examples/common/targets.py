"""Runs that end at an accuracy, and how many rounds they took."""

from collections.abc import Callable, Sequence
from typing import Any

Scores = list[tuple[float, float]]  # (accuracy, loss) after each round


def run_until(target: float, rounds: int, step: Callable, state: Any) -> Scores:
    """Runs rounds until an accuracy, at most so many.

    Args:
        step: `step(state, number)` returns the state, and (accuracy, loss).
    """
    scores: Scores = []
    for number in range(rounds):
        state, (accuracy, loss) = step(state, number)
        scores.append((float(accuracy), float(loss)))
        if scores[-1][0] >= target:
            break
    return scores


def rounds_to(target: float, scores: Scores) -> float:
    """The first round with that accuracy; infinite if there is none."""
    return next((i for i, (x, _) in enumerate(scores, 1) if x >= target), float("inf"))


def median_run(runs: Sequence[Scores]) -> Scores:
    """The run of which as many are shorter as longer; of an even number the shorter."""
    return sorted(runs, key=len)[(len(runs) - 1) // 2]
