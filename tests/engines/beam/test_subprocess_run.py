"""A function in a process or thread of its own: how it ends, and why it failed.

Covers: drjax.engines.beam.subprocess_run.
"""

import os
import threading

from drjax.engines.beam.subprocess_run import SubprocessRun, ThreadRun


def test_how_functions_in_processes_end(tmp_path):
    def works():
        print("done")

    def raises():
        raise ValueError("no data")

    def leaves():
        print("last words", flush=True)
        os._exit(3)

    runs = []
    for fn in (works, raises, leaves):
        (folder := tmp_path / fn.__name__).mkdir()
        runs.append(SubprocessRun(fn, folder))
    try:
        assert all(run.wait(100) for run in runs)
        errors = [run.error() for run in runs]
    finally:
        for run in runs:
            run.end()
    assert errors == [None, "ValueError: no data", "exit status 3: last words\n"]


def test_a_process_that_hangs_is_ended(tmp_path):
    def hangs():
        threading.Event().wait()

    run = SubprocessRun(hangs, tmp_path)
    assert not run.wait(0)
    run.end()
    assert run.wait(0) and "exit status -9" in str(run.error())


def test_how_functions_in_threads_end(tmp_path):
    may_end = threading.Event()

    def raises():
        may_end.wait()
        raise ValueError("no data")

    run = ThreadRun(raises, tmp_path)
    assert not run.wait(0)
    may_end.set()
    assert run.wait(100) and run.error() == "no data"
    run = ThreadRun(may_end.set, tmp_path)
    run.end()
    assert run.wait(0) and run.error() is None
