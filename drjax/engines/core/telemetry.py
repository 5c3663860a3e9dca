"""Traces and metrics of calls, by OpenTelemetry, if its API is installed.

Input: the events of a call. Output: a span `drjax.call`, whose children `drjax.stage`
are its stages, with the failures in them as events; and metrics whose names begin with
`drjax.`. They go where the program's own do; without an SDK they go nowhere.

Invariants: only `opentelemetry-api` is needed. Sharp edges: a span of a call is the
child of the one that is current where the call is made.
"""

import importlib.util
from typing import Any

from drjax._extras import needed
from drjax.engines.core.events import (
    BlockDone,
    CallEnded,
    CallStarted,
    Event,
    GroupFailed,
    Retried,
    StageEnded,
    StageStarted,
    WorkersChanged,
)

_NAME = "drjax"


def installed() -> bool:
    """Return whether there is a package `opentelemetry`, the API."""
    return importlib.util.find_spec("opentelemetry") is not None


class Telemetry:
    """Makes spans and metrics of the events of calls, one call at a time."""

    def __init__(self) -> None:
        self._trace = needed("opentelemetry.trace", "telemetry", "OpenTelemetry")
        metrics = needed("opentelemetry.metrics", "telemetry", "OpenTelemetry")
        self._tracer, meter = self._trace.get_tracer(_NAME), metrics.get_meter(_NAME)
        counter = lambda what: meter.create_counter(f"drjax.{what}", f"{{{what}}}")
        self._groups, self._retries = counter("groups"), counter("retries")
        self._failures, self._calls = counter("failures"), counter("calls")
        self._blocks = meter.create_histogram("drjax.block.duration", "s")
        self._stages = meter.create_histogram("drjax.stage.duration", "s")
        self._workers = meter.create_gauge("drjax.workers", "{workers}")
        self._call: Any = None
        self._stage: Any = None
        self._program: dict[str, str] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case CallStarted():
                self._program = {"drjax.program": event.program}
                about = {**self._program, "drjax.groups": event.groups}
                self._call = self._tracer.start_span("drjax.call", attributes=about)
            case StageStarted():
                about = {"drjax.round": event.round, "drjax.stage": event.stage}
                parent = self._trace.set_span_in_context(self._call)
                self._stage = self._tracer.start_span(
                    "drjax.stage", context=parent, attributes=about
                )
            case BlockDone():
                self._groups.add(event.groups, self._program)
                if event.process:
                    self._blocks.record(event.seconds, self._program)
            case Retried():
                about = {"drjax.kind": event.kind}
                self._stage.add_event("retry", {**about, "drjax.why": event.why})
                self._retries.add(1, {**self._program, **about})
            case GroupFailed():
                about = {"drjax.group": event.group, "drjax.why": event.why}
                self._stage.add_event("failure", about)
                self._failures.add(1, self._program)
            case WorkersChanged():
                self._workers.set(event.workers)
            case StageEnded():
                self._stages.record(event.seconds, self._program)
                self._stage.end()
                self._stage = None
            case CallEnded():
                self._calls.add(1, {**self._program, "drjax.ok": event.error is None})
                for span in filter(None, (self._stage, self._call)):
                    if event.error is not None:
                        span.record_exception(event.error)
                        status = self._trace.StatusCode.ERROR, str(event.error)
                        span.set_status(*status)
                    span.end()
                self._stage = self._call = None
