"""Blocks of groups whose data is with the workers, and stays there.

Input: a `StageCall` in whose arguments the groups' own data is `Remote`; at the worker,
the data itself. Output: a request for each group, and the answer to it.

Invariants: a request names the slices that the worker has, and holds those that come
from earlier stages. An answer holds partial reductions only: a stage that would return
slices is refused. The data must have the planned structure, shapes and dtypes, else the
group has failed.

Sharp edges: the server does not decide what code a client's process may call: custom
calls are those of drjax's own list, whatever the request allows.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from drjax._errors import DrjaxTypeError
from drjax._jaxprs.prng_keys import to_raw
from drjax._plan_file import pytrees
from drjax.backends.engine import wire_format, worker
from drjax.backends.engine.job import Job
from drjax.backends.engine.messages import Block, BlockResult, Task
from drjax.backends.engine.protocols import StageCall
from drjax.backends.groups import Lazy, as_array


class Requests:
    """Makes the requests, as bytes, to workers that have the groups' data themselves.

    In one run of a stage there is one request for each group, to its worker.

    Args:
      call: The run of the stage. Among its partitioned inputs, each `Lazy` is data that
        the workers have; arrays are slices that the server sends.

    Raises:
      DrjaxTypeError: The data of the workers is in more than one argument of the plan.
    """

    def __init__(self, call: StageCall):
        # A worker has one group, and the driver combines their partial reductions.
        job = replace(call.job, ops=(), size=1)
        # Once for all requests. Each has the whole plan file: Flower may start a new
        # process for each message, which has no file yet.
        self._job = np.frombuffer(job.to_bytes(), np.uint8)
        lazy = [x for x in call.slices if isinstance(x, Lazy)]
        values, tree = [], None
        if lazy:
            values, tree = lazy[0].source.values, lazy[0].source.node
        # A client loads one pytree; two would need a way to tell them apart.
        if any(x.source is not lazy[0].source for x in lazy):
            raise DrjaxTypeError(
                "The groups' own data can be one argument of the plan: put it into one "
                "tuple."
            )
        self._header = {
            "tree": tree,
            "wide": bool(lazy) and lazy[0].source.wide,
            "slices": [
                (x.leaf, list(x.steps)) if isinstance(x, Lazy) else None
                for x in call.slices
            ],
            "names": [v.name for v in values],
            "types": [f"{v.dtype}{[*v.shape]}" for v in values],
        }

    def to_bytes(self, task: Task) -> bytes:
        """Make the request for one group, which the worker passes to `answer`.

        Args:
          task: A task whose block has one group. From its slices, the request includes
            those that the worker does not have.

        Returns:
          The stage with its global inputs, the group index, the mask, the slices, and
          the planned structure and types of the worker's data, as bytes.
        """
        block = task.block
        pairs = zip(self._header["slices"], block.slices, strict=True)
        # The worker has the others.
        slices = [x for origin, x in pairs if origin is None]
        return wire_format.to_bytes(
            self._header, [self._job, block.groups, block.valid, *slices]
        )


def answer(request: bytes, load: Callable[[], Any]) -> bytes:
    """Run the stage of a request on the worker's own data, for one group.

    Args:
      request: The bytes that `Requests.to_bytes` returned.
      load: A function without arguments that returns the group's slice of the argument
        that the workers have, a pytree of arrays. If it raises, or the data does not
        fit the plan, the group has failed. It is not called if the stage needs none of
        this data.

    Returns:
      The group's partial reductions, or the reason why the group failed, as bytes of
      `wire_format.result_to_bytes`.

    Raises:
      RuntimeError: The stage failed, and no single group causes it.
      ValueError: The stage would return slices of the group, or has a secure sum.
    """
    block, done, demands = _run(request, load)
    # The server asks for such sums by another protocol; the client does not rely on it.
    if any(demands):
        raise ValueError("The stage has a secure sum, which is to be masked.")
    return wire_format.result_to_bytes(block, done)


@dataclass(frozen=True)
class SecureAnswer:
    """What a stage with secure sums returns for one group.

    Attributes:
      block: The group, with the mask that says whether it has failed.
      result: Its `BlockResult`, without the secure sums.
      slices: The group's slices of the secure sums, in order: to be masked.
      min_groups: The largest demand of the secure sums.
    """

    block: Block
    result: BlockResult
    slices: list[np.ndarray]
    min_groups: int


def answer_secure(request: bytes, load: Callable[[], Any]) -> SecureAnswer:
    """Run a stage with secure sums on the worker's own data: as `answer` otherwise."""
    block, done, demands = _run(request, load)
    pairs = [*zip(done.partials, demands, strict=True)] if done.partials else []
    plain = [x for x, secure in pairs if not secure]
    slices = [np.asarray(x) for x, secure in pairs if secure]
    result = replace(done, partials=plain)
    return SecureAnswer(block, result, slices, max(demands))


def _run(
    request: bytes, load: Callable[[], Any]
) -> tuple[Block, BlockResult, list[int]]:
    """Run the stage of a request: `answer` and `answer_secure`, of the same arguments.

    Returns:
      `(block, result, demands)`: the block of the group, its `BlockResult`, and for
      each of its partial reductions the `Reduce.secure`.
    """
    header, (job_bytes, groups, valid, *slices) = wire_format.from_bytes(request)
    block, failed, sent = Block(groups, valid, slices), {}, iter(slices)
    try:
        # A stage may need none of the client's data: then it is not even loaded.
        own = _checked_leaves(load(), header) if header["tree"] is not None else []
        block = replace(
            block,
            slices=[
                next(sent) if origin is None else own[origin[0]][tuple(origin[1])][None]
                for origin in header["slices"]
            ],
        )
    # Loading is user code: its failure is the group's, and the server gets the text.
    except Exception as error:
        failed = {int(groups[0]): f"{type(error).__name__}: {error}"}
        block = block.without(valid)
    job = Job.from_bytes(job_bytes.tobytes())
    # The server does not decide what code a client's process may call.
    job = replace(job, file=replace(job.file, custom_calls=()))
    # With the group masked out it does not run, and only the failure is answered.
    done = job.run(block, failed)
    # The server refuses such plans as well; the client does not rely on that.
    if done.slices:
        raise ValueError(
            "The stage would return a group's own slices, which stay with their client."
        )
    return block, done, worker.demands(job.file, job.stage)


def _checked_leaves(data: Any, header: dict[str, Any]) -> list[np.ndarray]:
    """Check that a group's data has the planned structure and types; return its leaves.

    Args:
      data: The group's data, a pytree of arrays.
      header: The header of the request, from JSON. Its fields are `tree`, the planned
        structure; `types` and `names`, a text for each leaf; and `wide`, whether the
        plan has 64-bit values.

    Returns:
      For each leaf a numpy array; random keys as raw data.

    Raises:
      ValueError: The data has another structure, or other shapes or dtypes.
    """
    leaves, tree = jax.tree.flatten(data)
    # Through JSON, as the header was: tuples become lists.
    if json.loads(json.dumps(pytrees.describe(tree))) != header["tree"]:
        raise ValueError(
            f"its data has the structure {tree}, not {pytrees.Tree(header['tree'])}"
        )
    # The plan's precision, not that of the client's process, decides dtypes.
    with jax.enable_x64(header["wide"]):
        arrays = [as_array(x) for x in leaves]
        types = [f"{x.dtype}{[*x.shape]}" for x in arrays]
        if types != header["types"]:
            pairs = zip(header["names"], header["types"], strict=True)
            planned = ", ".join(f"{name} {kind}" for name, kind in pairs)
            raise ValueError(
                f"its data is {', '.join(types)}, but the plan is for {planned}"
            )
        return [np.asarray(to_raw(x)) for x in arrays]
