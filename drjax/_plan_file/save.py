"""`plan.save`: a plan as a file."""

import os
from collections.abc import Callable

from drjax import _storage
from drjax._errors import PlanFileError
from drjax._plan_file import container
from drjax._plan_file.encode import encode
from drjax._plan_file.export_plan import export_plan
from drjax._plan_file.load import plan_from_bytes
from drjax.plan import Plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file.

    If the plan cannot be exported, or the file cannot be written, an earlier file is
    unchanged.
    """
    # All of it first: a plan that cannot be exported leaves an earlier file unchanged.
    data = plan_to_bytes(plan)
    try:
        _storage.write_file(_storage.locate(path), data)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise PlanFileError(
            f"The plan file {path} cannot be written: {error}. What was there before "
            "is unchanged: free space there, or give another path."
        ) from error


def plan_to_bytes(plan: Plan) -> bytes:
    """Export a plan and serialize it: return the bytes of a plan file.

    Stages that are exported already are written as they are.
    """
    manifest, members = encode(export_plan(plan))
    return container.to_bytes(manifest, members)


def pickled(plan: Plan) -> tuple[Callable[[bytes], Plan], tuple[bytes]]:
    """Return a function, and its arguments."""
    return _unpickled, (plan_to_bytes(plan),)


def _unpickled(data: bytes) -> Plan:
    """Load a plan that was pickled; all custom calls are allowed, as pickles are."""
    return plan_from_bytes("of a pickle", data, custom_calls=None)
