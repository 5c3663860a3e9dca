"""Devices to compile for, and how arguments lie on them.

Import this before anything starts JAX's backends.
"""

import importlib.util
import os
from pathlib import Path
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


_H100 = Path(__file__).with_name("h100.txtpb")
_COMPILERS = {  # their modules, and what pip installs
    "tpu": ("libtpu", "libtpu"),
    "cuda": ("jax_cuda12_plugin", "jax-cuda12-plugin jax-cuda12-pjrt"),
}


def devices(machine: Machine, slices: int = 1) -> np.ndarray:
    """All devices: virtual ones, or those of a topology that is not there.

    Args:
      machine: What to compile for.
      slices: Of TPUs, how many such topologies a data center's network joins.

    Raises:
      ModuleNotFoundError: The compiler for TPUs, or for GPUs, is not installed.
    """
    if machine.platform == "cpu":
        if machine.processes == 1:
            jax.config.update("jax_num_cpu_devices", machine.devices)
        return np.array(jax.devices("cpu")[: machine.devices])
    module, packages = _COMPILERS[machine.platform]
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"The compiler for {machine.platform} is missing: pip install {packages}"
        )
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": slices}
    name = machine.topology
    if machine.platform == "cuda":
        name = "h100"
        options = {"target_config": _H100.read_text(), "topology": machine.topology}
    topology = topologies.get_topology_desc(
        platform=machine.platform, topology_name=name, **options
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
