"""What benchmarks of rounds on Ray measure: seconds, memory of workers, and bytes."""

import importlib
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from drjax.engines.core.messages import BlockResult

HAND_WRITTEN = "hand-written actor loop"  # what tables call the baseline


class Received:
    """Counts the bytes of arrays that come to the driver: all that it gets from Ray."""

    def __enter__(self) -> "Received":
        self._ray: Any = importlib.import_module("ray")
        self.bytes, self._get = 0, self._ray.get
        self._ray.get = self._counted
        return self

    def __exit__(self, *error: Any) -> None:
        self._ray.get = self._get

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        done = self._get(*args, **kwargs)
        self.bytes += sum(map(self._size, jax.tree.leaves(done)))
        return done

    def _size(self, x: Any) -> int:
        x = pickle.loads(x) if isinstance(x, bytes) else x
        x = (x.partials, x.slices) if isinstance(x, BlockResult) else x
        return sum(getattr(y, "nbytes", 0) for y in jax.tree.leaves(x))


class Serialized:
    """Counts the bytes that the driver serializes: objects and arguments of tasks."""

    def __enter__(self) -> "Serialized":
        module = importlib.import_module("ray._private.serialization")
        self._context: Any = module.SerializationContext
        self.bytes, self._serialize = 0, self._context.serialize
        self._context.serialize = lambda context, x: self._counted(context, x)
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.serialize = self._serialize

    def _counted(self, context: Any, x: Any) -> Any:
        result = self._serialize(context, x)
        self.bytes += result.total_bytes
        return result


def seconds_of(fn: Callable[[], Any], runs: int) -> list[float]:
    """Seconds of each run."""
    result = []
    for _ in range(runs):
        begin = time.perf_counter()
        jax.block_until_ready(fn())
        result.append(time.perf_counter() - begin)
    return result


class Watched:
    """A context in which a thread calls `look` every so many `seconds`."""

    seconds: float

    def __enter__(self) -> Self:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self.seconds):
            self.look()

    def look(self) -> None:
        raise NotImplementedError


class Own(Watched):
    """The most memory of one of some processes, without what it maps of files.

    A part of the object store that only this process has touched so far, as a result
    that nobody has read yet, is private by Linux's count, whoever runs first.
    """

    seconds = 0.01

    def __init__(self, pids: list[int]):
        self._pids, self.peak = pids, 0

    def look(self) -> None:
        for pid in self._pids:
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:  # it has ended
                continue
            own = [x.split()[1] for x in lines if x.startswith("Anonymous:")]
            self.peak = max(self.peak, 1024 * sum(map(int, own)))
