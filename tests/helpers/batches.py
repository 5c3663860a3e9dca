"""Blocks of workers that run in batches of a few groups, however large these are."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from drjax.engines.core.job import Job


@contextlib.contextmanager
def batches_of(size: int) -> Iterator[None]:
    """Let workers run at most so many groups of a block at once."""
    task = Job.task

    def small(job: Job, *args, **kwargs):
        return replace(task(job, *args, **kwargs), size=min(size, job.size), full=0)

    with mock.patch.object(Job, "task", small):
        yield
