"""From a plan to the same plan with exported stages.

Input: a plan, made here or loaded. Output: the plan, in which each stage that has
results has an `ExportedStage`. `encode` writes it; an engine's driver runs its server
stages.

Invariants: a stage that is exported already, as in a loaded plan, stays the same
object, and all stages have one origin. So to export twice costs nothing and changes no
byte.

Sharp edges: whether values are wide is a property of the whole plan, so that all of its
stages are looked at before the first is exported.
"""

import functools
import platform
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax import export

from drjax._plan_file.export_stage import Exporter
from drjax._plan_file.exported_stage import PLATFORMS
from drjax._plan_file.stage_features import StageFeatures, features_of, merge
from drjax._sharding.planning_context import planning
from drjax.plan import Loop, Plan, Round, Stage, check_known_shapes


def export_plan(plan: Plan) -> Plan:
    """Export a plan: a copy in which all stages with results have `exported`.

    Raises:
      PlanError: The plan has symbolic dimensions.
      PlanFileError: A stage cannot be exported.
    """
    check_known_shapes(plan, "saved")
    origin = origin_of(plan)
    nowhere = jax.sharding.Mesh(np.empty((), object), ())
    # A file holds no mesh and no number of devices, whatever is in context here.
    with jax.set_mesh(nowhere), planning(False), jax.enable_x64(origin["x64"]):
        return _Export(origin).plan(plan, "")


def origin_of(plan: Plan) -> dict[str, Any]:
    """The origin of a plan's stages, as JSON data for the manifest.

    It has the versions of the producer, platforms, precision, and implementations of
    random keys. If a stage is exported already, its origin is that of the plan.

    Raises:
      PlanFileError: A stage that is not exported calls back into Python.
    """
    stages = [*plan.stages()]
    for _, stage in stages:
        if stage.exported is not None:
            return stage.exported.origin
    return _origin(merge(features_of(s.jaxpr, location) for location, s in stages))


@functools.cache
def _producer() -> dict[str, str]:
    """The versions of drjax, JAX, jaxlib and Python in this process, by name."""
    names = ("drjax", "jax", "jaxlib")
    versions = {name: version(name) for name in names}
    return {**versions, "python": platform.python_version()}


def _origin(features: StageFeatures) -> dict[str, Any]:
    """The origin of stages that are exported now, as JSON data for the manifest.

    `features` are those of all stages of the plan together.
    """
    return {
        "producer": _producer(),
        "calling_convention": export.maximum_supported_calling_convention_version,
        "platforms": list(PLATFORMS),
        "x64": features.wide,
        "prng": sorted(features.keys),
    }


class _Export:
    """Exports the stages of plans.

    In all methods `location` says for errors which stage it is, as `round 1, groups`;
    for a plan, a round or a loop it is what the locations of their stages begin with.

    Args:
      origin: The origin of the stages, from `origin_of`.
    """

    def __init__(self, origin: dict[str, Any]):
        self.origin = origin

    def plan(self, plan: Plan, location: str) -> Plan:
        """A copy of a plan, or of the body of a loop, with exported stages."""
        kept = plan.kept()
        rounds = tuple(
            self._round(a_round, kept, f"{location}round {number}, ")
            for number, a_round in enumerate(plan.rounds, 1)
        )
        server = self._server(plan.server, f"{location}server")
        return replace(plan, rounds=rounds, server=server)

    def _round(self, a_round: Round, kept: frozenset[str], location: str) -> Round:
        """A copy of a round with exported stages; `kept` is `kept()` of its plan."""
        return replace(
            a_round,
            server=self._server(a_round.server, f"{location}server"),
            local=self._local(a_round, kept, f"{location}groups"),
            loops=tuple(self._loop(loop, location) for loop in a_round.loops),
        )

    def _loop(self, loop: Loop, location: str) -> Loop:
        """A copy of a loop with exported stages in its bodies."""
        location = f"{location}{loop.name}, "
        bodies = tuple(self.plan(body, location) for body in loop.bodies)
        return replace(loop, bodies=bodies)

    def _server(self, stage: Stage, location: str) -> Stage:
        """A copy of a server stage with `exported`.

        The stage itself, if it has no results or is exported already.
        """
        # A stage without results has no member in the file.
        if stage.empty or stage.exported is not None:
            return stage
        return replace(stage, exported=Exporter(stage, location, self.origin).server())

    def _local(self, a_round: Round, kept: frozenset[str], location: str) -> Stage:
        """A copy of a round's local stage with `exported`.

        The stage itself, if it has no results or is exported already. `kept` is
        `Plan.kept()` of its plan.
        """
        stage = a_round.local
        if stage.empty or stage.exported is not None:
            return stage
        values = [v for v in stage.outputs if v.name in kept]
        exporter = Exporter(stage, location, self.origin)
        return replace(stage, exported=exporter.local(a_round.partials, values))
