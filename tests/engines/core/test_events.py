"""What is seen of a call from outside: events, logs, traces, metrics; and its end.

Covers: drjax.engines.core.events, drjax.engines.core.telemetry,
drjax.engines.core.retries, drjax.engines.core.progress.
"""

import logging
import threading
import time

import jax
import numpy as np
import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import drjax
from drjax.backends import Retry, in_process
from drjax.backends.engine import events
from drjax.engines.core import pool_scheduler, telemetry
from drjax.engines.core.driver import Runner
from drjax.engines.core.options import EngineOptions
from drjax.engines.core.protocols import Lost
from drjax.engines.in_process.adapter import InProcess
from tests.helpers.raising import raises

N, BLOCK = 6, 2

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


class Failing(InProcess):
    """A pool whose tasks fail as they are told to, by their first groups."""

    def __init__(self, errors):
        super().__init__()
        self.errors = {group: [*each] for group, each in errors.items()}

    def submit(self, task, file, shared):
        handle = super().submit(task, file, shared)
        if errors := self.errors.get(int(task.block.groups[0])):
            handle.error = errors.pop(0)
        return handle


@pytest.fixture(scope="module")
def plan():
    @drjax.program(clients=N)
    def mean(scale, x):
        args = drjax.broadcast(scale), x
        return drjax.reduce_mean(drjax.map_fn(lambda s, x: s * x, args))

    with jax.check_tracer_leaks(False):
        return drjax.make_plan(mean)(*args())


def runner(plan, errors=None, **options):
    checked = EngineOptions.checked(block_size=BLOCK, **options)
    return Runner(plan, Failing(errors or {}), checked)


def args(bad=()):
    x = np.arange(N, dtype=np.float32)
    x[list(bad)] = np.nan
    return np.float32(2), x


def kinds(seen):
    return [type(event).__name__ for event in seen]


def test_the_events_of_a_call(plan):
    seen = []
    errors = {2: [Lost("it was preempted")]}
    options = {"on_error": "drop", "check_nans": True, "observers": [seen.append]}
    run = runner(plan, errors, **options)
    run(*args(bad=[5]))
    first, begin, *rest, end, last = seen
    assert first == events.CallStarted(plan.name, N, 1, 0)
    assert (begin.round, begin.groups) == ("1", N)
    assert (end.groups, end.blocks, last.error) == (N - 1, 3, None)
    assert last.seconds >= end.seconds > 0
    (retried,) = [x for x in rest if isinstance(x, events.Retried)]
    assert (retried.kind, retried.wait) == ("worker", 0)
    assert retried.why == "groups 2 to 3: it was preempted"
    (failed,) = [x for x in rest if isinstance(x, events.GroupFailed)]
    assert failed.group == 5 and "NaN" in failed.why
    blocks = [x for x in rest if isinstance(x, events.BlockDone)]
    assert [x.groups for x in blocks] == [2, 2, 1] and all(x.process for x in blocks)
    # The report is of the same events.
    assert run.report.lost == [retried.why] and run.report.seconds == last.seconds
    assert run.report.stages[0].groups == N - 1


def test_a_call_that_fails_ends(plan):
    seen = []
    run = runner(plan, check_nans=True, observers=[seen.append])
    with pytest.raises(drjax.EngineError) as e:
        run(*args(bad=[0]))
    assert kinds(seen) == ["CallStarted", "StageStarted", "GroupFailed", "CallEnded"]
    assert seen[-1].error is e.value


def test_what_an_observer_raises_ends_the_call(plan):
    def stop(event):
        if isinstance(event, events.BlockDone):
            raise TimeoutError("enough")

    run = runner(plan, observers=[stop])
    with pytest.raises(drjax.EngineError, match="TimeoutError: enough"):
        run(*args())
    text = "observers must be functions of an event, got [3]."
    raises(drjax.DrjaxValueError, text, in_process.compile, plan, observers=[3])


def test_logs(plan, caplog):
    caplog.set_level(logging.DEBUG, "drjax.engines")
    errors = {0: [Lost("it was preempted")]}
    runner(plan, errors, on_error="drop", check_nans=True)(*args(bad=[5]))
    texts = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert {r.name for r in caplog.records} == {"drjax.engines.core.events"}
    warnings = [text for kind, text in texts if kind == "WARNING"]
    assert "groups 0 to 1: it was preempted; tried again in 0.0 s" in warnings[0]
    assert "group 5 failed: it yields NaN" in warnings[1] and len(warnings) == 2
    assert [kind for kind, _ in texts].count("DEBUG") == 3
    assert texts[0] == ("INFO", f"{plan.name}: 6 groups, 0 stages and steps resumed")


# ---------------------------------------------------------------------------------
# OpenTelemetry


@pytest.fixture
def exported(monkeypatch):
    """The spans, and a function that collects the metrics: `{name: points}`."""
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(trace, "get_tracer", tracers.get_tracer)
    monkeypatch.setattr(metrics, "get_meter", meters.get_meter)

    def collected():
        data = reader.get_metrics_data() or pytest.fail()
        return {
            metric.name: metric.data.data_points
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    yield spans, collected
    meters.shutdown()
    tracers.shutdown()


def test_traces_and_metrics(plan, exported):
    spans, collected = exported
    errors = {2: [Lost("it was preempted")]}
    run = runner(plan, errors, on_error="drop", check_nans=True)
    run(*args(bad=[5]))
    stage, call = spans.get_finished_spans()
    assert (stage.name, call.name) == ("drjax.stage", "drjax.call")
    assert stage.parent.span_id == call.context.span_id
    assert call.attributes["drjax.program"] == plan.name
    why = run.report.dropped[5].split(": ", 1)[1]
    assert [(e.name, dict(e.attributes)) for e in stage.events] == [
        ("retry", {"drjax.kind": "worker",
                   "drjax.why": "groups 2 to 3: it was preempted"}),
        ("failure", {"drjax.group": 5, "drjax.why": why}),
    ]  # fmt: skip
    points = collected()
    assert points["drjax.groups"][0].value == N - 1
    assert points["drjax.retries"][0].value == points["drjax.failures"][0].value == 1
    assert points["drjax.block.duration"][0].count == 3
    assert points["drjax.stage.duration"][0].count == 1
    assert dict(points["drjax.calls"][0].attributes)["drjax.ok"] is True


def test_the_trace_of_a_call_that_fails(plan, exported):
    spans, collected = exported
    with pytest.raises(drjax.EngineError):
        runner(plan, check_nans=True)(*args(bad=[0]))
    stage, call = spans.get_finished_spans()
    for span in (stage, call):
        assert span.status.status_code is trace.StatusCode.ERROR
        assert "Group 0 failed" in span.status.description
        assert span.events[-1].name == "exception"
    assert dict(collected()["drjax.calls"][0].attributes)["drjax.ok"] is False


def test_without_opentelemetry(plan, monkeypatch):
    monkeypatch.setattr(telemetry, "installed", lambda: False)
    monkeypatch.setattr(trace, "get_tracer", None)
    assert runner(plan)(*args()) == N - 1


# ---------------------------------------------------------------------------------
# Retries


def test_an_error_is_tried_again_after_a_wait(plan):
    seen = []
    errors = {0: [OSError("no answer")] * 2}
    retries = {"error": Retry(2, wait=0.05, factor=3.0)}
    run = runner(plan, errors, retries=retries, observers=[seen.append])
    begin = time.monotonic()
    assert run(*args()) == N - 1
    again = [x for x in seen if isinstance(x, events.Retried)]
    assert [(x.kind, round(x.wait, 3)) for x in again] == [
        ("error", 0.05), ("error", 0.15)
    ]  # fmt: skip
    assert again[0].why == "groups 0 to 1: OSError: no answer"
    assert time.monotonic() - begin >= 0.2
    # Without retries for it, and when none is left, the call fails.
    for options in ({}, {"retries": {"error": 1}}):
        run = runner(plan, errors, **options)
        with pytest.raises(drjax.EngineError, match="OSError: no answer"):
            run(*args())


def test_retries_by_kind(plan):
    for kind, count in (("worker", 4), ("memory", 2)):
        errors = {0: [Lost("it is gone", kind)] * count}
        seen = []
        retries = {"worker": 3, "memory": 0}
        run = runner(plan, errors, retries=retries, observers=[seen.append])
        assert run(*args()) == N - 1
        assert run.report.lost == ["groups 0 to 1: it is gone"] * count
        # The first loss costs no retry, as the worker had two blocks. Without a retry
        # the block is halved at once.
        blocks = [x.groups for x in seen if isinstance(x, events.BlockDone)]
        assert blocks == ([2, 2, 2] if kind == "worker" else [1, 1, 2, 2])


@pytest.mark.parametrize(
    "retries, text",
    [
        ({"disk": 1}, "retries takes the kinds worker, memory, timeout, error"),
        ({"worker": -1}, "retries must be an integer from 0, got -1."),
        ({"worker": Retry(True)}, "retries must be an integer from 0, got True."),
        (Retry(wait=-1), "Retry.wait must be a number from 0, got -1."),
    ],
)
def test_retries_that_are_none(plan, retries, text):
    raises(drjax.DrjaxValueError, text, in_process.compile, plan, retries=retries)


def test_waits_grow_to_a_limit():
    retry = Retry(wait=1.0, most=5.0)
    assert [retry.delay(i) for i in range(4)] == [1, 2, 4, 5]
    assert retry.delay(10**6) == 5


# ---------------------------------------------------------------------------------
# Cancellation


class Slow(InProcess):
    """A pool whose first task is never done, in another thread."""

    abandoned = False

    def wait(self, handles, timeout):
        time.sleep(0.05 if timeout is None else min(timeout, 0.05))
        return []

    def abandon(self, handle):
        self.abandoned = True


def test_a_call_is_canceled(plan, monkeypatch):
    monkeypatch.setattr(pool_scheduler, "_LOOK", 0.1)
    seen, pool = [], Slow()
    options = EngineOptions.checked(block_size=BLOCK, observers=[seen.append])
    run = Runner(plan, pool, options)
    threading.Timer(0.3, run.cancel).start()
    with pytest.raises(drjax.CanceledError, match="The call was canceled."):
        run(*args())
    assert pool.abandoned and isinstance(seen[-1].error, drjax.CanceledError)
    # What is canceled later is not the next call.
    run.cancel()
    run = runner(plan)
    run.cancel()
    assert run(*args()) == N - 1


def test_a_canceled_call_resumes(plan, tmp_path):
    def cancel(event):
        if isinstance(event, events.StageEnded) and event.round.endswith("2"):
            run.cancel()

    @drjax.program(clients=N)
    def rounds(model, x):
        for _ in range(4):
            slices = drjax.map_fn(lambda m, x: m + x, (drjax.broadcast(model), x))
            model = drjax.reduce_mean(slices)
        return model

    x = np.arange(N, dtype=np.float32)
    plan = drjax.make_plan(rounds)(np.float32(0), x)
    options = {"block_size": BLOCK, "checkpoint": tmp_path / "run"}
    run = in_process.compile(plan, observers=[cancel], **options)
    with pytest.raises(drjax.CanceledError):
        run(np.float32(0), x)
    run = in_process.compile(plan, **options)
    assert run(np.float32(0), x) == 10 and run.report.resumed == 2
