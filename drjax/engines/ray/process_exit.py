"""Whether the process that listens at a local socket, such as Ray's, has ended.

Input: the path of a Unix socket. Output: `ListeningProcess.ended()`.

Ray's client ends its own process without a word when it finds that the raylet, Ray's
process on this machine, is gone, most often for lack of memory. A driver that looks
first can raise an error instead.

Invariants: a file descriptor of the process (pidfd) is held, so that another process
with the same id is never taken for it.

Sharp edges: Linux only, and not across containers: elsewhere the process never seems to
have ended.
"""

import os
import select
import socket
import struct


class ListeningProcess:
    """Watches the process that listens at the Unix socket `path`, to notice its end."""

    def __init__(self, path: str):
        self._descriptor: int | None = None
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(path)
                size = struct.calcsize("3i")
                credentials = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, size
                )
            # struct ucred: process, user, group.
            pid, _, _ = struct.unpack("3i", credentials)
            self._poll = select.poll()
            self._descriptor = os.pidfd_open(pid)
            # A pidfd is readable once its process has ended.
            self._poll.register(self._descriptor, select.POLLIN)
        # AttributeError: not on Linux. OSError: nothing listens, or the process is in
        # another container, so that it has no id in this one.
        except (OSError, AttributeError):
            return

    def ended(self) -> bool:
        """Return, without waiting, whether the process has ended; a zombie has.

        False also if the process cannot be watched, or after `close`.
        """
        # A timeout of 0 never waits.
        return self._descriptor is not None and bool(self._poll.poll(0))

    def close(self) -> None:
        """Stop watching the process: `ended` returns False from now on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
