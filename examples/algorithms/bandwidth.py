"""The bandwidth that DiLoCo needs between datacenters: a simulated schedule.

"Streaming DiLoCo with overlapping communication" (Douillard et al. 2025, arXiv
2501.18512, section 3.1 and Table 4).

python -m examples.algorithms.bandwidth
"""

import heapq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import drjax

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)  # compute utilizations, the table's columns
GRID = np.logspace(-1, 3, 50)  # Gbit/s
LAYERS = 3  # of a fragment


class Exchange(NamedTuple):
    """Layers that are sent after a number of steps of a round, received `delay` later.

    `gbits` are what the link sends for all of them.
    """

    sent: int
    delay: int
    layers: range
    gbits: float


def schedule(gbits, L, H=1, fragments=1, delay=0):
    """The paper's: every H steps each of the fragments, of every P-th layer."""
    interval = H // (fragments + 1) if fragments > 1 else H
    parts = [range(p, L, fragments) for p in range(fragments)]
    share = [gbits * len(layers) / L for layers in parts]
    return [
        Exchange((p + 1) * interval, delay, parts[p], share[p])
        for p in range(fragments)
    ]


def utilization(exchanges, W, t, L, H=1):
    """Of steps of t seconds, in rounds of H, with a link of W Gbit/s.

    A step has a node for the forward pass of each of L layers, then, from the last
    layer to the first, for the gradients of its parameters and of its input. A layer
    is reduced after the former, in one node of the link; of those that wait, the first
    layer goes first. Its forward pass waits for it, `delay` steps later.
    """
    node, steps = t / (3 * L - 1), H * max(4, 24 // H)
    free, end, received = 0.0, 0.0, {}  # when the link is free, the last step ends
    for step in range(steps):
        start = end
        for layer, time in sorted(received.pop(step, {}).items()):
            start += max(0, time - (start + layer * node))
        end = start + t
        for x in exchanges:
            if x.sent % H == (step + 1) % H:
                ready = {layer: end - 2 * layer * node for layer in x.layers}
                done = reduced(ready, x.gbits / len(x.layers) / W, free)
                received.setdefault(step + 1 + x.delay, {}).update(done)
                free = max(done.values())
    return steps * t / max(end, free)


def reduced(ready, link, free):
    """When each layer is reduced, which is ready at a time, by a link that is free."""
    to_come, waiting, done = sorted(ready, key=ready.get, reverse=True), [], {}
    while to_come or waiting:
        if not waiting:
            free = max(free, ready[to_come[-1]])
        while to_come and ready[to_come[-1]] <= free:
            heapq.heappush(waiting, to_come.pop())
        free += link
        done[heapq.heappop(waiting)] = free
    return done


def needed(exchanges, t, L, H=1):
    """Indices in GRID of the least bandwidths for TARGETS; its length if none."""
    values = np.array([utilization(exchanges, W, t, L, H) for W in GRID])
    reached = values >= np.array(TARGETS)[:, None]
    return np.where(reached.any(1), reached.argmax(1), len(GRID))


def link_gbits(plan, m=2):
    """Of a device, in a bandwidth-optimal all-reduce (Patarasuk and Yuan 2009)."""
    return 2 * (1 - 1 / m) * 8e-9 * plan.communication(m).reduced_per_device()


@drjax.program(replicas=2)
def outer_round(w, w_k):
    """What communicates in a round of DiLoCo; data-parallel, gradients are reduced."""
    delta = drjax.map_fn(jnp.subtract, (drjax.broadcast(w), w_k))
    return w - drjax.reduce_mean(delta)


def main(parameters=10**10, t=0.8, L=48, H=100):
    shapes = (parameters,), (2, parameters)  # planned from shapes, nothing is allocated
    w, w_k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    gbits = link_gbits(drjax.make_plan(outer_round)(w, w_k))
    streaming = dict(H=H, fragments=L // LAYERS)
    print(f"Gbit/s to reach{''.join(f'{x:8.0%}' for x in TARGETS)}")
    for name, share, settings in (
        ("data-parallel", 1, {}),
        ("DiLoCo", 1, dict(H=H)),
        ("Streaming DiLoCo", 1, streaming),
        ("overlapped", 1, dict(streaming, delay=1)),
        ("overlapped, fp4", 1 / 4, dict(streaming, delay=1)),
    ):
        exchanges = schedule(share * gbits, L, **settings)
        W = GRID[needed(exchanges, t, L, settings.get("H", 1))]
        print(f"{name:16}{''.join(f'{x:8.1f}' for x in W)}")


if __name__ == "__main__":
    main()
