"""A model of communication time on links: bytes over documented bandwidths.

It is a lower bound, not a measurement: all links of a chip are busy in both
directions, and there is no latency, no contention and no work at the same time. On the
data center's network it is as if each group were a slice of its own.
"""

import dataclasses
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
# Bytes that a device sends for each byte of a collective among m members.
_SENT = {
    "all-reduce": lambda m: 2 * (m - 1) / m,
    "all-gather": lambda m: (m - 1) / m,
    "reduce-scatter": lambda m: (m - 1) / m,
    "all-to-all": lambda m: (m - 1) / m,
    "ragged-all-to-all": lambda m: (m - 1) / m,
    "collective-permute": lambda m: 1,
    "collective-broadcast": lambda m: 1,
}


def seconds(
    collectives: list[dict[str, Any]], axes: dict[str, int], chip: Chip, network: str
) -> float:
    """Modeled seconds of the collectives over some mesh axes.

    Args:
      collectives: Of a record: kind, axes and bytes in a round.
      axes: Sizes of the axes whose collectives count.
      chip: The chip. Its devices share its links.
      network: `"ici"` or `"dcn"`.

    Raises:
      ValueError: The bandwidth of that network is not stated for the chip.
    """
    bandwidth = {"ici": chip.ici, "dcn": chip.dcn}[network]
    if bandwidth is None:
        raise ValueError(f"The chip's bandwidth on {network} is not stated.")
    total = 0.0
    for c in collectives:
        if (m := axes.get("+".join(c["axes"]))) is not None:
            total += _SENT[c["kind"]](m) * c["bytes in a round"]
    return total * chip.devices / bandwidth
