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
    """Calls by key; each is waited for a while, and then goes on in its thread.

    Args:
      patience: For how many seconds to wait when a call is new.

    Example:
      >>> from drjax.backends.engine.background import Background
      >>> Background(patience=10.0).result("key", lambda: 5)
      5
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._running: dict[str, futures.Future] = {}

    def result(self, key: str, fn: Callable[[], Any]) -> Any:
        """The result of a call; None while it runs: then ask again, by the same key.

        Args:
          key: Text that identifies the call.
          fn: The function to call, in a thread; used only if no call of this key runs.

        Raises:
          BaseException: Whatever `fn` raised.
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
        """Release the call of this key, whose result will not be asked for."""
        self._running.pop(key, None)


def _resolve(future: futures.Future, fn: Callable[[], Any]) -> None:
    """Call `fn`, and set the result of a future to its result or to what it raises.

    It is what a thread of `Background` runs.
    """
    try:
        future.set_result(fn())
    # Also SystemExit: it would end this thread without a result for the caller.
    except BaseException as error:
        future.set_exception(error)
