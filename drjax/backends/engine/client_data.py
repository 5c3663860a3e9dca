"""Blocks of groups whose data is with the workers, and stays there."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from drjax._errors import DrjaxTypeError
from drjax._jaxprs.prng_keys import to_raw
from drjax._plan_file import pytrees
from drjax.backends.engine import wire_format
from drjax.backends.engine.messages import Block, File, Work
from drjax.backends.engine.protocols import Call
from drjax.backends.engine.wire_format import Job
from drjax.backends.groups import Lazy, as_array


class Requests:
    """What is asked of the workers in one run of a stage."""

    def __init__(self, call: Call):
        self._call = call
        lazy = [x for x in call.rows if isinstance(x, Lazy)]
        values, tree = [], None
        if lazy:
            values, tree = lazy[0].source.values, lazy[0].source.node
        if any(x.source is not lazy[0].source for x in lazy):
            raise DrjaxTypeError(
                "The groups' own data can be one argument of the plan: put it into one "
                "tuple."
            )
        self._about = {
            "tree": tree,
            "wide": bool(lazy) and lazy[0].source.wide,
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
        return wire_format.packed(self._about, [code, block.groups, block.valid, *rows])


def answer(request: bytes, load: Callable[[], Any]) -> bytes:
    """What a worker answers; `load` gives the group's row of the argument."""
    about, (code, groups, valid, *rows) = wire_format.unpacked(request)
    block, failed, given = Block(groups, valid, rows), {}, iter(rows)
    try:
        own = _own(load(), about) if about["tree"] is not None else []
        block = replace(block, rows=[
            next(given) if at is None else own[at[0]][tuple(at[1])][None]
            for at in about["rows"]
        ])  # fmt: skip
    except Exception as error:
        failed = {int(groups[0]): f"{type(error).__name__}: {error}"}
        block = block.without(valid)
    job = Job.unpacked(code.tobytes())
    # The server does not decide what code a client's process may call.
    job = replace(job, file=replace(job.file, custom_calls=()))
    done = job.run(block, failed)
    if done.rows:
        raise ValueError("The stage would give away the rows of a group.")
    return wire_format.packed_done(block, done)


def _own(data: Any, about: dict[str, Any]) -> list[np.ndarray]:
    """A group's data as raw arrays of the planned types."""
    leaves, tree = jax.tree.flatten(data)
    if json.loads(json.dumps(pytrees.describe(tree))) != about["tree"]:
        raise ValueError(
            f"its data has the structure {tree}, not {pytrees.Tree(about['tree'])}"
        )
    with jax.enable_x64(about["wide"]):
        arrays = [as_array(x) for x in leaves]
        found = [f"{x.dtype}{[*x.shape]}" for x in arrays]
        if found != about["types"]:
            pairs = zip(about["names"], about["types"], strict=True)
            told = [f"{name} {kind}" for name, kind in pairs]
            raise ValueError(
                f"its data is {', '.join(found)}, but the plan is for {', '.join(told)}"
            )
        return [np.asarray(to_raw(x)) for x in arrays]
