"""A schedule of `lax.ppermute`s that moves slices between devices.

Input: a static map from the slots of the result to the slots of the operand, where m
devices have k slots each. Output: `PermuteStep`s, each a `ppermute` of some slices per
device, and where each device finds the slice of each of its slots afterwards.

A `ppermute` sends from each device to at most one other, so a step is a matching of the
bipartite multigraph whose edges are the slices that change their device, from senders
to receivers. No device sends or receives more than k slices, so that k matchings
suffice (König 1916, "Über Graphen und ihre Anwendung": a bipartite multigraph of
degree k has an edge coloring with k colors). A ring shift needs one or two steps: its
matchings are equal, and equal matchings are one step of several slices.

Invariants: a slice that stays on its device is in no step. Sharp edges: the coloring is
computed in Python, when the program is lowered: n slices take up to n * m operations.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PermuteStep:
    """One `ppermute` of `slots.shape[1]` slices per device.

    Attributes:
      pairs: `(sender, receiver)` device indices, as `lax.ppermute` takes them.
      slots: int32 `[m, c]`: which of its slots each device sends. Devices that send
        nothing have zeros.
    """

    pairs: tuple[tuple[int, int], ...]
    slots: np.ndarray


@dataclass(frozen=True)
class Schedule:
    """The steps that give each device the slices of its slots.

    Attributes:
      steps: The steps. Their order does not matter.
      positions: int32 `[m, k]`: for each slot of each device the position of its slice
        in the concatenation of the device's own k slices with those that it receives in
        each step.
    """

    steps: tuple[PermuteStep, ...]
    positions: np.ndarray


@functools.lru_cache(maxsize=256)
def schedule(sources: tuple[int, ...], devices: int, per_device: int) -> Schedule:
    """Schedule the moves of slices.

    Args:
      sources: For each slot of the result the slot of the operand whose slice it gets.
        Slot s is on device `s // per_device`. There are at most `devices * per_device`
        of them; slots beyond are padding. No slot occurs twice.
      devices: m, the number of devices.
      per_device: k, the number of slots of each device.
    """
    moves = [(s // per_device, t // per_device) for t, s in enumerate(sources)]
    colors = _equal_matchings(moves, per_device)
    if colors is None:
        colors = color_edges(moves, devices)
    # Slices of one color are one matching; equal matchings become one step.
    matchings: dict[int, list[int]] = {}
    for target, color in colors.items():
        matchings.setdefault(color, []).append(target)
    merged: dict[tuple[tuple[int, int], ...], list[list[int]]] = {}
    for targets in matchings.values():
        pairs = tuple(sorted(moves[t] for t in targets))
        merged.setdefault(pairs, []).append(targets)
    positions = np.zeros((devices, per_device), np.int32)
    for target, source in enumerate(sources):
        if moves[target][0] == moves[target][1]:
            slot = source % per_device
            positions[target // per_device, target % per_device] = slot
    steps, received = [], per_device
    for pairs, groups in merged.items():
        slots = np.zeros((devices, len(groups)), np.int32)
        for column, targets in enumerate(groups):
            for target in targets:
                source, receiver = sources[target], target // per_device
                slots[source // per_device, column] = source % per_device
                positions[receiver, target % per_device] = received + column
        steps.append(PermuteStep(pairs, slots))
        received += len(groups)
    return Schedule(tuple(steps), positions)


def _equal_matchings(
    moves: Sequence[tuple[int, int]], per_device: int
) -> dict[int, int] | None:
    """Color the edges by the receiver's slot, if that is an edge coloring.

    It is for a ring shift, whose slots on all devices come from equally distant ones.
    Then many colors have equal matchings, which a general coloring would mix.

    Args:
      moves: For each slot of the result the devices `(sender, receiver)` of its slice.
      per_device: k, the number of slots of each device.

    Returns:
      For each slot whose slice changes its device the color; None if two slices of a
      color have the same sender.
    """
    colors, senders = {}, set()
    for target, (sender, receiver) in enumerate(moves):
        if sender == receiver:
            continue
        color = target % per_device
        if (sender, color) in senders:
            return None
        senders.add((sender, color))
        colors[target] = color
    return colors


def color_edges(moves: Sequence[tuple[int, int]], devices: int) -> dict[int, int]:
    """Color the edges of a bipartite multigraph with as many colors as its degree.

    Each edge gets a color that is free at its sender. If it is not free at its
    receiver, the colors of an alternating path, which starts there, are swapped. The
    path cannot end at the sender, as the graph is bipartite.

    Args:
      moves: The edges `(sender, receiver)`. Those with equal ends are left out.
      devices: The number of senders, and of receivers.

    Returns:
      From the index of an edge in `moves` to its color, from 0. Edges with a common
      sender, or a common receiver, have different colors.
    """
    # Which edge has a color at a device: `ends[side][device][color]`, side 0: senders.
    ends: tuple[list[dict[int, int]], ...] = tuple(
        [{} for _ in range(devices)] for _ in range(2)
    )
    colors: dict[int, int] = {}
    for edge, move in enumerate(moves):
        if move[0] == move[1]:
            continue
        a, b = (_free(ends[side][move[side]]) for side in range(2))
        if a != b:
            # Free `a` at the receiver: swap a and b along the path of these colors.
            side, device, path, color = 1, move[1], [], a
            while color in ends[side][device]:
                path.append(ends[side][device][color])
                side, color = 1 - side, b if color == a else a
                device = moves[path[-1]][side]
            for other in path:
                for s in range(2):
                    del ends[s][moves[other][s]][colors[other]]
            for other in path:
                colors[other] = b if colors[other] == a else a
                for s in range(2):
                    ends[s][moves[other][s]][colors[other]] = other
        colors[edge] = a
        for side in range(2):
            ends[side][move[side]][a] = edge
    return colors


def _free(used: dict[int, int]) -> int:
    """The first color that no edge of a device has, from the dict of those used."""
    return next(color for color in range(len(used) + 1) if color not in used)
