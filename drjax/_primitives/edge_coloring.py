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
    """One `ppermute`, in which each sender sends c of its slices to one receiver.

    Attributes:
      pairs: `(sender, receiver)` device indices, as `lax.ppermute` takes them.
      slots: int32 `[m, c]`: for each of the m devices the slots (places for one group's
        slice, from 0) whose slices it sends. Devices that send nothing have zeros.
    """

    pairs: tuple[tuple[int, int], ...]
    slots: np.ndarray


@dataclass(frozen=True)
class Schedule:
    """The `ppermute`s that give each device the slices of its slots.

    A slot is a place for one group's slice on a device; each of m devices has k of
    them.

    Attributes:
      steps: The `ppermute`s. Their order does not matter, as all send slices that the
        devices had before the first one.
      positions: int32 `[m, k]`: for each slot of each device the position of its new
        slice in a concatenation: the device's own k old slices, and then those that it
        receives in each step, in the order of `steps`. 0 for padding.
    """

    steps: tuple[PermuteStep, ...]
    positions: np.ndarray


@functools.lru_cache(maxsize=256)
def schedule(sources: tuple[int, ...], devices: int, per_device: int) -> Schedule:
    """Make the `Schedule` of `ppermute`s by which each slot of a result gets its slice.

    `sources` has for each slot of the result the slot of the operand whose slice it
    gets; no slot occurs twice, and the last slots, if it ends before them, are padding.
    Slot s is a place for one group's slice, on device `s // per_device`. Slices that
    stay on their device are not sent. No device sends or receives more than k =
    `per_device` slices, so that there are at most k steps.
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
    """Give each slice to send the color of its slot at the receiver, if that is valid.

    Slices of one color are sent by one `ppermute`, in which each device sends to at
    most one other. The color of a slice is the place of its slot on the receiver, 0 to
    k - 1. In a ring shift, each device sends to one or two others; so most colors have
    the same pairs of devices, and the caller merges them to one `ppermute`. A general
    coloring, as of `color_edges`, would mix the pairs.

    `moves` are the devices `(sender, receiver)` of the slice of each slot of the
    result; slot i is on device `i // k`, the receiver. The dict has the color of each
    slice that changes its device, by its index in `moves`. None if two slices of a
    color have the same sender, so that one `ppermute` cannot send both.
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

    Edges with a common sender, or a common receiver, get different colors, so that the
    edges of one color can be one `ppermute`. Each edge gets the first color that is
    free at its sender. If that color is not free at its receiver, two colors of a path
    of edges are swapped first: the path starts at the receiver, and alternates between
    that color and one that is free at the receiver. It cannot end at the sender, as the
    graph is bipartite.

    `moves` are the edges, `(sender, receiver)`, of so many `devices` on either side;
    those with equal ends are left out. The dict has the color, from 0, of each edge, by
    its index in `moves`.
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
    """Return the first color, from 0, that no edge of a device has yet."""
    return next(color for color in range(len(used) + 1) if color not in used)
