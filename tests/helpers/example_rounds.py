"""The rounds of the gallery's examples, from their plan files, on an engine."""

from pathlib import Path
from typing import Any

import jax

from examples import engines
from tests.helpers.cases import some

# Each example runs on one engine in each gate, and on the others in `.ci/run --full`.
CHOSEN = {
    "xla": ("analytics",),  # others compile for seconds
    "ray": ("diloco", "robust"),
    "beam": ("federated_sklearn", "scaffold"),
    "flower": ("fedavg", "personalization", "sweep"),
}


def names(engine: str) -> list[str]:
    """The examples whose round runs on the engine."""
    return [name for name, known in engines.EXAMPLES.items() if engine in known]


def parameters(engine: str, **options) -> list:
    """Their names, as parameters of a test."""
    return some(names(engine), *CHOSEN[engine], **options)


def check_round(engine: str, name: str, folder: Path, workers: Any = 1) -> None:
    """Two rounds of an example agree with the reference backend."""
    path = folder / f"{name}.drjax"
    with jax.numpy_rank_promotion("allow"), jax.check_tracer_leaks(False):
        one = engines.round_of(name)
        engines.save(one, path)
        expected, _ = engines.run(path, "reference", one, 2)
        result, _ = engines.run(path, engine, one, 2, workers)
    # The largest difference is that of a solution of linear equations.
    assert engines.difference(result, expected) < 2e-5
