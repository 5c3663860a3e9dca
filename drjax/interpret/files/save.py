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
    nowhere = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(nowhere), planning(()):  # of no number of devices
        manifest, members = encode(plan)
    archive.write(Path(path), manifest, members)
