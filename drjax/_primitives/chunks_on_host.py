"""What `read_groups` and `write_groups` share: the host is called for chunks of groups.

Input: the indices of the groups of a chunk, and a function that calls the host. Output:
which groups these are, and a function that JAX can lower on any mesh.
"""

from collections.abc import Callable, Set
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import PartitionSpec

R = TypeVar("R")


def first_and_count(index: np.ndarray) -> tuple[int, int]:
    """Return the first group of a chunk that is not empty, and how many it has.

    They are consecutive but for slots of padding, which are last.
    """
    flat = index.ravel()
    own = flat - flat[0] == np.arange(len(flat))
    return int(flat[0]), len(flat) if own.all() else int(np.argmin(own))


def other_axes(mesh: jax.sharding.AbstractMesh) -> Set[str]:
    """Return the axes of a mesh that are not Manual."""
    return {a for a in mesh.axis_names if a not in mesh.manual_axes}


def manual(axes: Set[str], fn: Callable[..., R]) -> Callable[..., R]:
    """Wrap a function of arrays that devices along some axes have in common.

    These axes are Manual in it: JAX calls the host where all axes are, or none is.
    """
    spec = PartitionSpec()
    return jax.shard_map(
        fn, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
    )
