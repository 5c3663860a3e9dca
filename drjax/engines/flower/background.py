"""Calls that may take long, each in its thread, so that none holds up the others.

Input: a key and a function. Output: its result, or None while it runs.

Invariants: a key has at most one call at a time, and its result is returned once.

Sharp edges: a thread cannot be ended. One that never returns lives as long as the
process, which does not wait for it.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any


class Background:
    """Runs functions in threads, so that the caller can poll for slow results.

    At most one call with a key runs at a time. A call that is not done within
    `patience` seconds continues in its thread.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._running: dict[str, futures.Future] = {}

    def result(self, key: str, fn: Callable[[], Any]) -> Any:
        """Start the call with this key, unless it runs; return its result if done.

        A result is returned, or what the function raised is raised, once, and then
        forgotten. None if the call still runs: then call `result` again with the same
        key; `fn` is not used then. Only a call that was just started is waited for.
        """
        # A call that runs already was waited for: now it is only looked at.
        patience, future = 0.0, self._running.pop(key, None)
        if future is None:
            patience, future = self._patience, futures.Future()
            # A thread that ends with the process, as those of an executor do not.
            threading.Thread(target=_resolve, args=(future, fn), daemon=True).start()
        futures.wait([future], patience)
        if future.done():
            return future.result()
        self._running[key] = future
        return None

    def forget(self, key: str) -> None:
        """Discard the call with this key, if any.

        Its thread runs until the function returns.
        """
        self._running.pop(key, None)


def _resolve(future: futures.Future, fn: Callable[[], Any]) -> None:
    """Set the result of a future to `fn()`, or its exception to what `fn()` raises."""
    try:
        future.set_result(fn())
    # Also SystemExit: it would end this thread without a result for the caller.
    except BaseException as error:
        future.set_exception(error)
