"""`plan.save`: a plan as a file."""

from pathlib import Path

import jax
import numpy as np

from drjax._planning import planning
from drjax.interpret.files import archive
from drjax.interpret.files.manifest import encode
from drjax.plan import Plan


def save(plan: Plan, path: str | Path) -> None:
    """Write a plan file; see `Plan.save`."""
    data, path = packed(plan), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def packed(plan: Plan) -> bytes:
    """What a plan file holds."""
    nowhere = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(nowhere), planning(False):  # of no number of devices
        manifest, members = encode(plan)
    return archive.pack(manifest, members)
