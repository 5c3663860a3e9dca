"""`plan.save`: a plan as a file."""

import os

import jax
import numpy as np

from drjax import _storage
from drjax._errors import PlanFileError
from drjax._plan_file import container
from drjax._plan_file.encode import encode
from drjax._sharding.planning_context import planning
from drjax.plan import Plan, check_known_shapes


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file; see `Plan.save`."""
    data = plan_to_bytes(plan)
    try:
        _storage.write_file(_storage.locate(path), data)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise PlanFileError(
            f"The plan file {path} cannot be written: {error}. What was there before "
            "is unchanged: free space there, or give another path."
        ) from error


def plan_to_bytes(plan: Plan) -> bytes:
    """What a plan file holds."""
    check_known_shapes(plan, "saved")
    nowhere = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(nowhere), planning(False):  # of no number of devices
        manifest, members = encode(plan)
    return container.to_bytes(manifest, members)
