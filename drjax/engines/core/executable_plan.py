"""A plan as the driver of an engine runs it: its server stages, and its file.

Input: a plan. Output: results of its server stages, as raw numpy arrays; and for the
stages of the groups a `Job`, which workers run from the plan file.

Invariants: server stages are the exported ones, so that they compute the same on every
engine, after a resumption, and whether the plan was made here or loaded.

Sharp edges: arrays are converted by JAX in the precision of the plan, so that callers
enter `precision()` first.
"""

import functools
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drjax._jaxprs.prng_keys import from_raw
from drjax._plan.map_stages import without_inner
from drjax._plan.normal_form import exported_stages, rounds_of
from drjax._plan_file.custom_calls import ALLOWED
from drjax._plan_file.export_plan import export_plan
from drjax._plan_file.exported_stage import exported_of
from drjax._plan_file.load import plan_from_bytes
from drjax._plan_file.save import plan_to_bytes
from drjax.backends._interpret_plan import Environment
from drjax.engines.core.combine import ops_of
from drjax.engines.core.job import Job
from drjax.engines.core.messages import File
from drjax.engines.core.options import EngineOptions
from drjax.engines.slices.slices import read_if_lazy
from drjax.plan import Fold, Plan, Round, Stage, Value

_SMALL = 64 << 10  # bytes, of which a copy costs less than what else `device_put` does


class ExecutablePlan:
    """A plan with server stages to run in this process, and a plan file for workers.

    Attributes:
      plan: The plan that was passed, whose stages need not be exported, with exported
        stages.
    """

    def __init__(self, plan: Plan):
        # Workers run the stage of a group as it is: they need no code of inner levels.
        self.plan = export_plan(without_inner(plan))
        self._exported = [exported for _, _, exported in exported_stages(self.plan)]
        self._x64 = any(exported.origin["x64"] for exported in self._exported)
        # By identity: stages live as long as the plan, and hashing a jaxpr is slow.
        self._compiled: dict[int, Any] = {}
        self._indices = {
            id(r.local): i for i, (_, r) in enumerate(rounds_of(self.plan))
        }

    @functools.cached_property
    def file(self) -> File:
        """The plan file for workers, written when it is first asked for."""
        data = plan_to_bytes(self.plan)
        # Workers trust the driver: its plan may make these custom calls there.
        calls = {name for stage in self._exported for name in stage.custom_calls}
        # By content, so that it is the same in another process: workers identify their
        # compiled stages by it, and a resumed call its checkpoint.
        key = hashlib.sha256(data).hexdigest()
        return File(data, key, self._x64, tuple(sorted(calls - ALLOWED)))

    @classmethod
    def from_file(cls, file: File) -> "ExecutablePlan":
        """Load the plan from a plan file that another process has written.

        Its stages may make the custom calls that `file.custom_calls` names.
        """
        path = Path(f"{file.key[:12]}.drjax")  # for errors
        # Without x64 the loader refuses a file that has 64-bit values.
        with jax.enable_x64(file.x64):
            return cls(plan_from_bytes(path, file.data, custom_calls=file.custom_calls))

    def precision(self) -> AbstractContextManager[Any]:
        """Return a context manager for the plan's precision, `jax_enable_x64`.

        64-bit values are enabled in it if the plan has such values, or if
        `jax_enable_x64` is set.
        """
        return jax.enable_x64(self._x64 or bool(jax.config.read("jax_enable_x64")))

    def stage_index(self, a_round: Round) -> int:
        """Return the index of a round, from 0, among all rounds of the plan and loops.

        By this index, workers find the round's local stage in the plan file. The stage
        must be the same object as in `self.plan` or in the body of a loop, not an equal
        one.
        """
        return self._indices[id(a_round.local)]

    def run_server(self, stage: Stage, env: Environment) -> None:
        """Run a server stage of `self.plan` in this process, unless it is empty.

        Its inputs are read from `env`, and its outputs are added as numpy arrays;
        random keys are raw data. It is compiled on first use.
        """
        if stage.empty:
            return
        # A server stage takes partitioned values whole, as after a gather.
        args = [read_if_lazy(x) for x in env.read(stage.inputs)]
        env.write(stage.outputs, map(np.asarray, self._run(stage, args)))

    def run_fold(
        self, env: Environment, fold: Fold, states: list[list[np.ndarray]]
    ) -> list[np.ndarray]:
        """Fold states in this process, in their order, from the neutral state on.

        The neutral state, and what the function of the fold closes over, are read from
        `env`. A state is a list of leaves `[*s]`, and so is the result: the neutral
        state if there are no states.
        """
        total, consts = env.read(fold.init), env.read(fold.consts)
        for state in states:
            total = self._run(fold.combine, [*consts, *total, *state])
        return list(map(np.asarray, total))

    def _run(self, stage: Stage, args: list[Any]) -> list[jax.Array]:
        """Run a stage of the server or the function of a fold, compiled on first use.

        Random keys are raw data. The arguments of the function of a fold are what it
        closes over, the leaves of the left state, and of the right one.
        """
        if id(stage) not in self._compiled:
            self._compiled[id(stage)] = jax.jit(
                exported_of(stage).per_group.function.call
            )
        return self._compiled[id(stage)](*exported_of(stage).consts, *args)

    def job(
        self,
        a_round: Round,
        env: Environment,
        location: str,
        size: int,
        options: EngineOptions,
        **more: Any,
    ) -> Job:
        """Make the `Job` for workers: a round's local stage with its global inputs.

        These are read from `env`. `location` is that of the round, for errors: `2`, or
        `2.scan.0.1` for round 1 in body 0 of the loop `scan` in round 2. `size` is the
        number of groups that run at once. Of the options `check_nans` and `on_error`
        are used. `more` are other fields of the job.
        """
        stage = a_round.local
        return Job(
            file=self.file,
            stage=self.stage_index(a_round),
            location=f"round {location}, {stage.name}",
            ops=ops_of(a_round),
            size=size,
            check_nans=options.check_nans,
            drop=options.on_error == "drop",
            shared=env.read(v for v in stage.inputs if not v.partitioned),
            **more,
        )

    def results(self, outputs: Sequence[np.ndarray | None]) -> Any:
        """Convert the plan's outputs to what the planned function returns, a pytree.

        Outputs are numpy arrays in the order of the plan, with random keys as raw data
        and the groups of a partitioned value along its `Value.axis`. None, for one that
        the caller replaces afterwards, becomes 0.
        """
        pairs = zip(self.plan.outputs, _on_device([*outputs]), strict=True)
        arrays = [0 if x is None else from_raw(x, v.dtype) for v, x in pairs]
        return self.plan.out_tree.unflatten(arrays)


# Arrays of JAX also where `jit` is disabled.
_copied = jax.jit(lambda arrays: jax.tree.map(jax.numpy.asarray, arrays))


def _on_device(arrays: list[np.ndarray | None]) -> list[Any]:
    """Convert arrays to those of JAX, all at once; `jnp.asarray` copies twice."""
    large = sum(x.nbytes for x in arrays if x is not None) > _SMALL
    # Of large ones it makes no copy. Results of `jit` are on the mesh of a context.
    if large or not jax.sharding.get_abstract_mesh().empty:
        return jax.device_put(arrays)
    with jax.transfer_guard_host_to_device("allow"):
        return _copied(arrays)


def scatter(slices: Value, whole: np.ndarray) -> np.ndarray:
    """Return the slices of a global array `[..., n, ...]`: a view `[n, ...]` of it."""
    return np.moveaxis(whole, slices.axis, 0)
