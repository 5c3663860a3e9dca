"""Blocks of groups whose data is with the workers, and stays there."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from drjax.backends.engine import spool
from drjax.backends.engine.groups import Lazy, as_array
from drjax.backends.engine.pool import Call
from drjax.backends.engine.spool import Job
from drjax.backends.engine.work import Block, File, Work
from drjax.interpret.files.keys import to_raw


class Requests:
    """What is asked of the workers in one run of a stage."""

    def __init__(self, call: Call):
        self._call = call
        lazy = [x for x in call.rows if isinstance(x, Lazy)]
        values = lazy[0].source.values if lazy else []
        self._about = {
            "rows": [
                (x.leaf, list(x.steps)) if isinstance(x, Lazy) else None
                for x in call.rows
            ],
            "names": [v.name for v in values],
            "types": [f"{v.dtype}{[*v.shape]}" for v in values],
        }

    def packed(self, work: Work, file: File, shared: list[np.ndarray]) -> bytes:
        """A block of one group, for `answer`."""
        call, block = self._call, work.block
        job = Job(
            file, work.stage, call.where, (), 1, work.check_nans, work.drop, shared
        )
        given = zip(self._about["rows"], block.rows, strict=True)
        rows = [x for at, x in given if at is None]
        code = np.frombuffer(job.packed(), np.uint8)
        return spool.packed(self._about, [code, block.groups, block.valid, *rows])


def answer(request: bytes, load: Callable[[], Any]) -> bytes:
    """What a worker answers; `load` gives the group's row of the argument."""
    about, (code, groups, valid, *rows) = spool.unpacked(request)
    block, failed, given = Block(groups, valid, rows), {}, iter(rows)
    try:
        own = _own(load(), about["names"], about["types"])
        block = replace(block, rows=[
            next(given) if at is None else own[at[0]][tuple(at[1])][None]
            for at in about["rows"]
        ])  # fmt: skip
    except Exception as error:
        failed = {int(groups[0]): f"{type(error).__name__}: {error}"}
        block = block.without(valid)
    done = Job.unpacked(code.tobytes()).run(block, failed)
    return spool.packed_done(block, done)


def _own(data: Any, names: list[str], types: list[str]) -> list[np.ndarray]:
    """A group's data as raw arrays of the planned types."""
    leaves = [as_array(x) for x in jax.tree.leaves(data)]
    found = [f"{x.dtype}{[*x.shape]}" for x in leaves]
    if found != types:
        told = [f"{name} {kind}" for name, kind in zip(names, types, strict=True)]
        raise ValueError(
            f"its data is {', '.join(found)}, but the plan is for {', '.join(told)}"
        )
    return [np.asarray(to_raw(x)) for x in leaves]
