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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax import export

from drjax._plan.normal_form import exported_stages
from drjax._plan_file.check_plan import check_plan
from drjax._plan_file.export_stage import Exporter
from drjax._plan_file.exported_stage import PLATFORMS, ExportedStage
from drjax._plan_file.stage_features import StageFeatures, features_of, merge
from drjax._planner.arguments import check_known_shapes
from drjax._primitives.dispatch_cache import code_key
from drjax._sharding.planning_context import planning
from drjax.plan import (
    Broadcast,
    Fold,
    Gather,
    Loop,
    Move,
    Plan,
    Reduce,
    Round,
    Rules,
    Scatter,
    Stage,
    Step,
    Value,
)


def export_plan(plan: Plan) -> Plan:
    """Copy a plan so that every stage with outputs has exported functions.

    They are in `stage.exported`, an `ExportedStage`. Stages that are exported already
    stay the same objects. `PlanError`: the plan has symbolic dimensions.
    """
    check_known_shapes(plan, "saved")
    origin = origin_of(plan)
    nowhere = jax.sharding.Mesh(np.empty((), object), ())
    # A file holds no mesh and no number of devices, whatever is in context here.
    # x64 is that of the plan's values: the process that saves may be set otherwise.
    with jax.set_mesh(nowhere), planning(False), jax.enable_x64(origin["x64"]):
        return _Export(origin).plan(plan, "")


def origin_of(plan: Plan) -> dict[str, Any]:
    """Describe how the stages of a plan are or will be exported, as JSON data.

    It is a part of the manifest of a plan file: `producer` (versions by name),
    `calling_convention` (an int), `platforms` (names), `x64` (whether there are 64-bit
    values), `prng` (names of implementations of random keys). If a stage is exported
    already, it says how that was exported, as all stages of a plan have one origin;
    otherwise, how this process will export them.
    """
    # Exported stages of a plan have one origin: the first one has it.
    for _, _, exported in exported_stages(plan):
        return exported.origin
    stages = plan.stages()
    return _origin(merge(features_of(s.jaxpr, location) for location, s in stages))


@functools.cache
def _producer() -> dict[str, str]:
    """Look up the versions of drjax, JAX, jaxlib and Python, by name; cached."""
    names = ("drjax", "jax", "jaxlib")
    versions = {name: version(name) for name in names}
    return {**versions, "python": platform.python_version()}


def _origin(features: StageFeatures) -> dict[str, Any]:
    """Describe how this process exports stages with these features: see `origin_of`."""
    return {
        "producer": _producer(),
        "calling_convention": export.maximum_supported_calling_convention_version,
        "platforms": list(PLATFORMS),
        "x64": features.wide,
        # The iteration of a set of strings differs from process to process.
        "prng": sorted(features.keys),
    }


class _Export:
    """Exports the stages of plans; its methods copy a plan or a part of it.

    In each copy, every stage with outputs has exported functions in `stage.exported`.

    `origin` is the dict that `origin_of` returns. `kept` is `Plan.kept()` of the plan
    that has a round: the names of values of which slices are needed after its local
    stage. A `location` is that of a stage, as `round 1, server`, or the text before
    those in a part of the plan, as `round 1, `, for errors.
    """

    def __init__(self, origin: dict[str, Any]):
        self.origin = origin
        self._known: dict[Hashable, ExportedStage] = {}  # by the code of stages

    def plan(self, plan: Plan, location: str) -> Plan:
        """Copy a plan so that all of its stages with outputs are exported.

        It is the whole plan, with an empty `location`, or that of a loop's body or an
        inner level, with one such as `round 1, scan, `.
        """
        # A plan that no reader would take is refused when it is saved.
        check_plan(plan)
        kept, steps = plan.kept(), []
        for number, a_round in enumerate(plan.rounds, 1):
            for step in a_round.steps:
                within = f"{location}round {number}, "
                steps.append(_exported(step, self, a_round, kept, within))
        server = self.server(plan.server, f"{location}server")
        return replace(plan, steps=(*steps, server))

    def server(self, stage: Stage, location: str) -> Stage:
        """Copy a server stage with its exported function in `exported`.

        The function of a fold is such a stage, too. The stage itself is returned if it
        has no outputs or is exported already.
        """
        if _is_done(stage):
            return stage
        export = lambda: Exporter(stage, location, self.origin).server()
        return replace(stage, exported=self._shared(stage, (), export))

    def local(self, a_round: Round, kept: frozenset[str], location: str) -> Stage:
        """Copy the local stage of a round with exported functions in `exported`.

        Its functions return what the round needs: partial reductions, states of folds,
        and slices of the outputs in `kept`. The stages of the plan of an inner level,
        `stage.inner`, are exported, too. The stage itself is returned if it has no
        outputs or is exported already.
        """
        stage = a_round.local
        if _is_done(stage):
            return stage
        values = [v for v in stage.outputs if v.name in kept]

        def export() -> ExportedStage:
            exporter = Exporter(stage, location, self.origin)
            return exporter.local(a_round.partials, values, a_round.folds)

        exported = self._shared(stage, _combined_key(a_round, values), export)
        inner = stage.inner and self.plan(stage.inner, f"{location}, ")
        return replace(stage, exported=exported, inner=inner)

    def _shared(
        self, stage: Stage, combined: Hashable, export: Callable[[], ExportedStage]
    ) -> ExportedStage:
        """Export a stage, unless one that has the same code is exported already.

        Rounds that are written one after another have equal stages. `combined` is a key
        of what its batched function returns; None: it has no key.
        """
        code = code_key(stage.jaxpr)
        if code is None or combined is None:
            return export()
        inputs = tuple((v.dtype, v.axis, v.partitioned) for v in stage.inputs)
        key = stage.name, bool(stage.over), stage.mesh, code, inputs, combined
        if key not in self._known:
            self._known[key] = export()
        return self._known[key]


def _combined_key(a_round: Round, kept: Sequence[Value]) -> Hashable | None:
    """Return a key of the results of the batched function of a round's local stage.

    None if it has none, as the function of a fold may have none.
    """
    stage = a_round.local
    takes = {v.name: i for i, v in enumerate(stage.inputs)}
    gives = {v.name: i for i, v in enumerate(stage.outputs)}
    folds = []
    for fold in a_round.folds:
        code = code_key(fold.combine.jaxpr)
        if code is None:
            return None
        consts = tuple(takes[v.name] for v in fold.consts)
        folds.append((code, consts, tuple(gives[v.name] for v in fold.sources)))
    partials = tuple((r.op, gives[r.source.name]) for r in a_round.partials)
    return partials, tuple(folds), tuple(gives[v.name] for v in kept)


def _is_done(stage: Stage) -> bool:
    # A stage without results has no member in the file.
    return stage.empty or stage.exported is not None


# A copy of a step whose stages are exported; its round and the text of its location.
_exported: Rules[Step] = Rules("plan.save")


@_exported.rule(Broadcast, Scatter, Reduce, Gather, Move, Loop)
def _of_bodies(
    step: Any, export: _Export, a_round: Round, kept: frozenset[str], location: str
) -> Step:
    if not step.bodies:
        return step
    location = f"{location}{step.name}, "
    return replace(step, bodies=tuple(export.plan(b, location) for b in step.bodies))


@_exported.rule(Stage)
def _of_stage(
    stage: Stage, export: _Export, a_round: Round, kept: frozenset[str], location: str
) -> Stage:
    if stage.local:
        return export.local(a_round, kept, f"{location}groups")
    return export.server(stage, f"{location}server")


@_exported.rule(Fold)
def _of_fold(
    fold: Fold, export: _Export, a_round: Round, kept: frozenset[str], location: str
) -> Fold:
    index = next(i for i, other in enumerate(a_round.folds) if other is fold)
    combine = export.server(fold.combine, f"{location}fold {index}")
    return replace(fold, combine=combine)
