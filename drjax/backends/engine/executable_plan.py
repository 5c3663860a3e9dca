"""A plan as the driver of an engine runs it: its server stages, and its file.

Input: a plan. Output: results of its server stages, as raw numpy arrays; and for the
stages of the groups a `Job`, which workers run from the plan file.

Invariants: server stages are the exported ones, so that they compute the same on every
engine, after a resumption, and whether the plan was made here or loaded.

Sharp edges: arrays are converted by JAX in the precision of the plan, so that callers
enter `precision()` first.
"""

import hashlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from drjax._jaxprs.prng_keys import from_raw
from drjax._plan_file.custom_calls import ALLOWED
from drjax._plan_file.export_plan import export_plan
from drjax._plan_file.load import plan_from_bytes
from drjax._plan_file.save import plan_to_bytes
from drjax.backends._interpret_plan import Environment
from drjax.backends.engine.job import Job
from drjax.backends.engine.messages import File, rounds_of
from drjax.backends.engine.options import EngineOptions
from drjax.backends.groups import Lazy
from drjax.plan import Plan, Round, Stage, Value


class ExecutablePlan:
    """A plan with compiled server stages and a file for workers.

    Args:
      plan: The plan; its stages need not be exported yet.

    Attributes:
      plan: The plan, with exported stages.
      file: The file for workers.
    """

    def __init__(self, plan: Plan):
        self.plan = export_plan(plan)
        data = plan_to_bytes(self.plan)
        exported = [s.exported for _, s in self.plan.stages() if s.exported is not None]
        x64 = any(stage.origin["x64"] for stage in exported)
        # Workers trust the driver: its plan may make these custom calls there.
        calls = {name for stage in exported for name in stage.custom_calls} - ALLOWED
        key = hashlib.sha256(data).hexdigest()
        self.file = File(data, key, x64, tuple(sorted(calls)))
        # By identity: stages live as long as the plan, and hashing a jaxpr is slow.
        self._compiled: dict[int, Any] = {}
        self._indices = {id(r): i for i, (_, r) in enumerate(rounds_of(self.plan))}

    @classmethod
    def from_file(cls, file: File) -> "ExecutablePlan":
        """The plan of a file that another process has written.

        It may make the custom calls that the record `file` names.
        """
        path = Path(f"{file.key[:12]}.drjax")  # for errors
        with jax.enable_x64(file.x64):
            return cls(plan_from_bytes(path, file.data, custom_calls=file.custom_calls))

    def precision(self) -> AbstractContextManager:
        """A context in which JAX has 64-bit values, if the plan or the process does."""
        return jax.enable_x64(self.file.x64 or bool(jax.config.read("jax_enable_x64")))

    def stage_index(self, a_round: Round) -> int:
        """The index of a round in `rounds_of`, by which workers know its stage."""
        return self._indices[id(a_round)]

    def run_server(self, stage: Stage, env: Environment) -> None:
        """Run a server stage: read its inputs from `env`, write raw outputs there."""
        if stage.exported is None:
            return
        if id(stage) not in self._compiled:
            self._compiled[id(stage)] = jax.jit(stage.exported.per_group.function.call)
        # A server stage takes partitioned values whole, as after a gather.
        args = [x.whole() if isinstance(x, Lazy) else x for x in env.read(stage.inputs)]
        outs = self._compiled[id(stage)](*stage.exported.consts, *args)
        env.write(stage.outputs, map(np.asarray, outs))

    def job(
        self,
        a_round: Round,
        env: Environment,
        location: str,
        size: int,
        options: EngineOptions,
    ) -> Job:
        """A `Job` for workers: the stage of a round's groups, with its global inputs.

        Args:
          a_round: The round.
          env: The arrays so far.
          location: The round, as in `StageReport`.
          size: How many groups a worker works on at once.
          options: How groups that fail are treated.
        """
        stage = a_round.local
        return Job(
            file=self.file,
            stage=self.stage_index(a_round),
            location=f"round {location}, {stage.name}",
            ops=tuple(reduce.op for reduce in a_round.partials),
            size=min(size, self.plan.size),
            check_nans=options.check_nans,
            drop=options.on_error == "drop",
            shared=env.read(v for v in stage.inputs if not v.partitioned),
        )

    def results(self, outputs: list[np.ndarray]) -> Any:
        """The planned function's results, a pytree, from raw arrays of its leaves.

        Partitioned ones have the groups along `Value.axis`.
        """
        arrays = [
            from_raw(jax.numpy.asarray(x), value.dtype)
            for value, x in zip(self.plan.outputs, outputs, strict=True)
        ]
        return self.plan.out_tree.unflatten(arrays)


def scatter(slices: Value, whole: np.ndarray) -> np.ndarray:
    """The slices `[n, *s]` of a scattered value, from its global array.

    It is a view: each block is sent its slices in any case.

    Args:
      slices: The partitioned value.
      whole: The global array; the slices lie along axis `slices.axis`.
    """
    return np.moveaxis(whole, slices.axis, 0)
