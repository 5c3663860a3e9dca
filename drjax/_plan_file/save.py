"""`plan.save`: a plan as a file."""

import os

from drjax import _storage
from drjax._errors import PlanFileError
from drjax._plan_file import container
from drjax._plan_file.encode import encode
from drjax._plan_file.export_plan import export_plan
from drjax.plan import Plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file; the implementation of `Plan.save`.

    Raises:
      PlanError: The plan cannot be exported.
      PlanFileError: The file cannot be written; an earlier file is unchanged.
    """
    data = plan_to_bytes(plan)
    try:
        _storage.write_file(_storage.locate(path), data)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise PlanFileError(
            f"The plan file {path} cannot be written: {error}. What was there before "
            "is unchanged: free space there, or give another path."
        ) from error


def plan_to_bytes(plan: Plan) -> bytes:
    """The bytes of a plan file, from a plan whose stages need not be exported yet.

    Raises:
      PlanError: The plan has symbolic dimensions, a callback into Python, or work that
        JAX cannot export.
    """
    manifest, members = encode(export_plan(plan))
    return container.to_bytes(manifest, members)
