"""Which devices communicate in a collective, and along which mesh axes they lie apart.

Input: the attributes of a collective in HLO text. Output: groups of devices, as numbers
of devices in the order of the mesh; names of mesh axes.

HLO writes groups in four ways:

    replica_groups={{0,1},{2,3}}              lists
    replica_groups=[2,2]<=[2,2]T(1,0)         numbers from 0 (iota), reshaped,
                                              transposed and reshaped to groups
    replica_groups=mesh['a'=2,'b'=2] {'b'}    along axes of a mesh
    source_target_pairs={{0,1},{1,0}}         pairs, of a permute

Between TPU slices it is an attribute of a `send`, in two ways: a product of slices,
counted from 1, and ranges of devices in a slice, one group for each device; or lists or
pairs of numbers 100000 * slice + device:

    _xla_megascale_target="{1,2}x{0:3}"
    _xla_megascale_target={{100000,200000},{100001,200001}}
    _xla_megascale_target={{100000->200000}}

Sharp edge: `replica_groups={}`, or none, are all devices in one group.
"""

import math
import re
from collections.abc import Mapping

import numpy as np

_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def devices_of(attributes: str, devices: int) -> list[np.ndarray]:
    """Read from a collective's attributes which devices communicate with each other.

    The groups are arrays of positions in the order of the mesh, `[members]`; of a
    permute, the `(source, target)` pairs. Without any groups in the text, all `devices`
    of the program are one group. `ValueError` if they are not written in one of the
    four ways that are known: lists, reshaped numbers, axes of a mesh, or pairs.
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


def devices_of_slices(attributes: str) -> list[np.ndarray]:
    """Read from a send between slices which devices communicate with each other.

    Each group is `[members, 2]`: the slice of each member, from 0, and its number in
    the slice. Of a permute they are pairs. `ValueError` is raised for another notation.
    """
    target = r"_xla_megascale_target=(\"[^\"]*\"|\{(?:\{[^{}]*\},?)*\})"
    written = re.search(target, attributes)
    text = written[1].strip('"') if written else ""
    if product := re.fullmatch(r"\{([\d,:]+)\}x\{([\d,:]+)\}", text):
        slices, numbers = map(_ranges, product.groups())
        return [np.array([(s - 1, d) for s in slices]) for d in numbers]
    groups = re.findall(r"\{([\d,>-]+)\}", text)
    if not groups:
        raise ValueError(f"This way to write devices of slices is not known: {text}")
    members = [[int(x) for x in re.split(r",|->", group)] for group in groups]
    return [np.array([(x // 100_000 - 1, x % 100_000) for x in g]) for g in members]


def _ranges(text: str) -> list[int]:
    """List the integers of `1,2` or `0:3`, whose last number is included."""
    ends = [[int(x) for x in part.split(":")] for part in text.split(",")]
    return [x for part in ends for x in range(part[0], part[-1] + 1)]


def axes_of(
    groups: list[np.ndarray], pairs: bool, mesh: Mapping[str, int]
) -> tuple[str, ...] | None:
    """Return the mesh axes over which a collective communicates, major first.

    They are the axes along which devices of one group have different positions.
    `groups` are those of `devices_of`, in the order of `mesh`, which has the sizes of
    its axes by name, major first. None if a group has only some of the devices along
    these axes; but the `pairs` of a permute need not be all.
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
    """Make the array for which `[sizes]T(order)` stands in HLO, as `[2,4]T(1,0)`.

    It has the numbers from 0 on, counted along the last dimension first, and is then
    transposed, unless `order` is None.
    """
    shape = [int(x) for x in sizes.split(",")]
    every = np.arange(math.prod(shape)).reshape(shape)
    return every.transpose([int(x) for x in order.split(",")] if order else None)
