"""Disks that are full, without filling one."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(size):
    """Writing more fails in the system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
