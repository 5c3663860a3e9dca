"""Metrics of calls on Ray's own dashboard, by `ray.util.metrics`.

Input: the events of calls. Output: metrics whose names begin with `drjax_`, which Ray
exports with its own.

Sharp edges: the metrics are made with the first call, when this process is connected.
"""

import importlib
from typing import Any

from drjax.engines.core.events import (
    BlockDone,
    CallStarted,
    Event,
    GroupFailed,
    Retried,
    WorkersChanged,
)

_SECONDS = [0.01, 0.1, 1.0, 10.0, 100.0]  # between the bins of a histogram


class Metrics:
    """An observer that counts in Ray's metrics."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._program: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case CallStarted():
                self._program = {"program": event.program}
                if not self._metrics:
                    self._metrics = _create()
            case BlockDone():
                if event.groups:  # Ray refuses zero
                    self._metrics["groups"].inc(event.groups, self._program)
                if event.process:
                    self._metrics["blocks"].observe(event.seconds, self._program)
            case Retried():
                kind = {**self._program, "kind": event.kind}
                self._metrics["retries"].inc(1, kind)
            case GroupFailed():
                self._metrics["failures"].inc(1, self._program)
            case WorkersChanged():
                self._metrics["workers"].set(event.workers)


def _create() -> dict[str, Any]:
    metrics = importlib.import_module("ray.util.metrics")
    tags = {"tag_keys": ("program",)}
    return {
        "groups": metrics.Counter("drjax_groups", "Groups done", **tags),
        "blocks": metrics.Histogram(
            "drjax_block_seconds", "Time of blocks", boundaries=_SECONDS, **tags
        ),
        "retries": metrics.Counter(
            "drjax_retries", "Blocks tried again", tag_keys=("program", "kind")
        ),
        "failures": metrics.Counter("drjax_failures", "Groups that failed", **tags),
        "workers": metrics.Gauge("drjax_workers", "Workers that run"),
    }
