"""A model of communication time on links: bytes over documented bandwidths.

It is a lower bound, not a measurement: all links of a chip are busy in both
directions, and there is no latency, no contention and no work at the same time. On the
data center's network it is as if each group were a slice of its own.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

GBIT = 1e9 / 8


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a chip can send, in bytes a second.

    Attributes:
      devices: JAX's devices of a chip.
      ici: Over all links to other chips together, in one direction.
      dcn: Over the data center's network, or None if that is not stated.
      source: Who says so.
    """

    devices: int
    ici: float
    dcn: float | None
    source: str


CHIPS = {
    "v2": Chip(2, 4 * 496 * GBIT, None, "Jouppi et al. 2020, CACM 63(7), ICI links"),
    "v5e": Chip(1, 1600 * GBIT, 25 * GBIT, "cloud.google.com/tpu/docs/v5e"),
    "v5p": Chip(1, 600e9, 50 * GBIT, "cloud.google.com/tpu/docs/v5p"),
}


def seconds(
    collectives: list[dict[str, Any]], axes: Collection[str], chip: Chip, network: str
) -> float:
    """Modeled seconds of the collectives over some mesh axes.

    Args:
      collectives: Of a record: axes and bytes sent in a round.
      axes: The axes whose collectives count, joined by `+`.
      chip: The chip. Its devices share its links.
      network: `"ici"` or `"dcn"`.

    Raises:
      ValueError: The bandwidth of that network is not stated for the chip.
    """
    bandwidth = {"ici": chip.ici, "dcn": chip.dcn}[network]
    if bandwidth is None:
        raise ValueError(f"The chip's bandwidth on {network} is not stated.")
    total = sum(
        c["bytes sent in a round"] for c in collectives if "+".join(c["axes"]) in axes
    )
    return total * chip.devices / bandwidth
