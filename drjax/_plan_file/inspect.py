"""For `python -m drjax inspect`: what a plan file says, without reading its stages."""

import os
from collections.abc import Iterator
from typing import Any

import jax

from drjax import _storage
from drjax._errors import PlanFileError
from drjax._plan.as_text import bytes_as_text
from drjax._plan.normal_form import exported_stages
from drjax._plan_file import container
from drjax._plan_file.decode import decode
from drjax._plan_file.exported_stage import exported_of
from drjax._sharding.planning_context import planning
from drjax.plan import Plan


def inspect(path: str | os.PathLike[str]) -> tuple[Plan, str]:
    """Read a plan file without reading any code of its stages.

    The plan can be printed and drawn but not run. The text has the plan, its
    communication, its stages, and the versions that wrote it.
    """
    try:
        location = _storage.locate(path)
    except (TypeError, ValueError) as error:
        raise PlanFileError(f"No file can be inspected: {error}.") from error
    manifest, members = container.read(location)
    # x64 is on for any file: to inspect a plan with 64-bit values needs no setting.
    with planning(False), jax.enable_x64(True):
        plan = decode(location, manifest, members, run=False)
    lines = [str(plan), "", str(plan.communication()), "", *_origin(manifest)]
    lines += ["", "stages", *_stages(plan)]
    whole = sum(map(len, members.values()))
    consts = sum(len(x) for name, x in members.items() if name.startswith("consts/"))
    sizes = f"{bytes_as_text(whole)}, {bytes_as_text(consts)} constants"
    lines += ["", f"{len(members)} members of {sizes}"]
    return plan, "\n".join(lines)


def _origin(manifest: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report on the software that wrote a file."""
    producer = manifest["producer"]
    yield f"format {container.VERSION}, written by " + ", ".join(
        f"{name} {version}" for name, version in producer.items()
    )
    yield f"calling convention {manifest['calling_convention']} of jax.export"
    yield f"for {', '.join(manifest['platforms'])}"
    yield f"64-bit values: {'yes' if manifest['x64'] else 'no'}"
    yield f"random keys: {', '.join(manifest['prng']) or 'none'}"


def _stages(plan: Plan) -> Iterator[str]:
    """Yield a line of the report for each stage of a plan that has exported functions.

    The line has the location, name, size and custom calls of the stage.
    """
    for location, stage, _ in exported_stages(plan):
        exported = exported_of(stage)
        parts = [f for f in (exported.per_group, exported.batched) if f is not None]
        nbytes = bytes_as_text(sum(len(function.exported) for function in parts))
        calls = ", ".join(exported.custom_calls) or "none"
        turn = "; groups of a batch in turn" * exported.sequential
        yield f"  {location}: {stage.name}, {nbytes}; custom calls: {calls}{turn}"
