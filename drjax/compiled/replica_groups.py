"""Which devices communicate in a collective, and along which mesh axes they lie apart.

Input: the attributes of a collective in HLO text. Output: groups of devices, as numbers
of devices in the order of the mesh; names of mesh axes.

HLO writes groups in four ways:

    replica_groups={{0,1},{2,3}}              lists
    replica_groups=[2,2]<=[2,2]T(1,0)         numbers from 0 (iota), reshaped,
                                              transposed and reshaped to groups
    replica_groups=mesh['a'=2,'b'=2] {'b'}    along axes of a mesh
    source_target_pairs={{0,1},{1,0}}         pairs, of a permute

Sharp edge: `replica_groups={}`, or none, are all devices in one group.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def devices_of(attributes: str, devices: int) -> list[np.ndarray]:
    """The groups of devices that communicate with each other; of a permute, pairs.

    Args:
      attributes: What follows the operands of a collective.
      devices: The number of devices of the program.

    Raises:
      ValueError: The groups are not written in one of the four known ways.
    """
    listed = r"\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}"
    if lists := re.search(
        rf"(?:source_target_pairs|replica_groups)={listed}", attributes
    ):
        groups = re.findall(r"\{([\d,]+)\}", lists[1])
        return [np.array([int(x) for x in group.split(",")]) for group in groups]
    if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", attributes):
        shape, *order = iota.groups()
        return [*_iota(*order).reshape([int(x) for x in shape.split(",")])]
    ids = rf"(?:, device_ids=\({_IOTA}\))?"
    if axes := re.search(
        rf"replica_groups=mesh\[([^\]]*)\]{ids} \{{([^}}:]*)\}}", attributes
    ):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", axes[1]))
        chosen = re.findall(r"'([^']+)'", axes[4])
        shape = [int(x) for x in sizes.values()]
        every = _iota(*axes.groups()[1:3]) if axes[2] else np.arange(math.prod(shape))
        last = [i for i, name in enumerate(sizes) if name in chosen]
        members = math.prod(shape[i] for i in last)
        every = np.moveaxis(every.reshape(shape), last, range(-len(last), 0))
        return [*every.reshape(-1, members)]
    if written := re.search(r"replica_groups=(?!\{\})\S+", attributes):
        raise ValueError(f"This way to write groups is not known: {written[0]}")
    return [np.arange(devices)]


def axes_of(
    groups: list[np.ndarray], pairs: bool, mesh: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The mesh axes along which the devices of a group lie apart.

    Args:
      groups: What `devices_of` returns.
      pairs: Whether they are the pairs of a permute, which need not be all of an axis.
      mesh: The sizes of the mesh axes by name, major first.

    Returns:
      The names, major first; None if groups are not all devices along some axes.
    """
    apart = np.zeros(len(mesh), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, tuple(mesh.values())))
        apart |= (places != places[:, :1]).any(axis=1)
    axes = tuple(name for name, is_apart in zip(mesh, apart, strict=True) if is_apart)
    members = math.prod(mesh[name] for name in axes)
    # Distinct devices that lie apart along these axes only are all of them.
    whole = all(len(group) == members for group in groups)
    return axes if pairs or whole else None


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Numbers from 0 in the shape of these sizes, its dimensions in this order."""
    shape = [int(x) for x in sizes.split(",")]
    every = np.arange(math.prod(shape)).reshape(shape)
    return every.transpose([int(x) for x in order.split(",")] if order else None)
