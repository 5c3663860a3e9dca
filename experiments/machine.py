"""Devices to compile for, and how arguments lie on them.

Import this before anything starts JAX's backends.
"""

import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.config import Config, Machine
from experiments.model import specs
from experiments.variants import FSDP, GROUPS, MODEL

_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip
os.environ.update(_NO_TPU_HERE)
jax.config.update("jax_platforms", "cpu")


def devices(machine: Machine, slices: int = 1) -> np.ndarray:
    """All devices: virtual ones, or those of a TPU topology that is not there.

    Args:
      machine: What to compile for.
      slices: Of TPUs, how many such topologies a data center's network joins.

    Raises:
      ModuleNotFoundError: libtpu, the compiler for TPUs, is not installed.
    """
    if machine.platform == "cpu":
        if machine.processes == 1:
            jax.config.update("jax_num_cpu_devices", machine.devices)
        return np.array(jax.devices("cpu")[: machine.devices])
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError("TPUs are compiled for by libtpu: pip install libtpu")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=machine.topology, num_slices=slices
    )
    return np.array(topology.devices)


def mesh_of(machine: Machine) -> Mesh:
    """A mesh of all groups of devices, each of `machine.group` devices.

    It has the axis `fsdp` only if more than one device is along it.

    Raises:
      ValueError: The devices cannot be divided so.
    """
    result = devices(machine)
    if len(result) % machine.group:
        raise ValueError(
            f"{len(result)} devices cannot be divided into groups of {machine.group}: "
            "set machine.group to a divisor."
        )
    if machine.fsdp == 1:
        return Mesh(result.reshape(-1, machine.group), (GROUPS, MODEL))
    shape = -1, machine.fsdp, machine.group // machine.fsdp
    return Mesh(result.reshape(shape), (GROUPS, FSDP, MODEL))


def shardings(config: Config, mesh: Mesh, params: Any) -> tuple[Any, NamedSharding]:
    """How the parameters and the text lie on the mesh."""
    fsdp = FSDP if config.machine.fsdp > 1 else None
    laid = specs(params, config.machine.layout, MODEL, fsdp)
    if config.machine.server == "sharded":
        share = lambda x, spec: _divided(x.shape, spec, mesh.shape[GROUPS])
        laid = jax.tree.map(share, params, laid)
    by_batch = () if fsdp is None else (None, fsdp)  # [groups, steps, batch, ...]
    data = P() if config.replicated_data else P(GROUPS, *by_batch)
    on = lambda spec: NamedSharding(mesh, spec)
    return jax.tree.map(on, laid, is_leaf=lambda x: isinstance(x, P)), on(data)


def _divided(shape: tuple[int, ...], spec: P, count: int) -> P:
    """Also divided over the groups, along the largest dimension that can be."""
    parts = [*spec, *[None] * (len(shape) - len(spec))]
    free = [i for i, part in enumerate(parts) if part is None and shape[i] % count == 0]
    if free:
        parts[max(free, key=lambda i: shape[i])] = GROUPS
    return P(*parts)
