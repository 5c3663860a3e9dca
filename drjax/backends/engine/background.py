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

    Each call has a key, and at most one call with a key runs at a time. A call that is
    not done within `patience` seconds continues in its thread.

    Args:
      patience: How many seconds `result` waits for a call that it has just started. It
        does not wait for a call that was running before.

    Example:
      >>> from drjax.backends.engine.background import Background
      >>> Background(patience=10.0).result("key", lambda: 5)
      5
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._running: dict[str, futures.Future] = {}

    def result(self, key: str, fn: Callable[[], Any]) -> Any:
        """Start the call with this key, unless it runs; return its result if done.

        Args:
          key: Text that identifies the call.
          fn: A function without arguments, to call in a thread. It is not used if the
            call with this key was started before and its result was not returned yet.

        Returns:
          What the function returned, which is then forgotten; None if it is still
          running. In that case call `result` again with the same key.

        Raises:
          BaseException: Whatever the function raised.
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
        """Discard the call with this key, if there is one: its result is not needed.

        Its thread runs until the function returns.
        """
        self._running.pop(key, None)


def _resolve(future: futures.Future, fn: Callable[[], Any]) -> None:
    """Set the result of a future to `fn()`, or its exception to what `fn()` raises.

    Args:
      future: A future that is not done.
      fn: A function without arguments.
    """
    try:
        future.set_result(fn())
    # Also SystemExit: it would end this thread without a result for the caller.
    except BaseException as error:
        future.set_exception(error)
