"""Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, algorithm 2).

In building blocks alone, to read; `drjax.contrib.diloco` is the layer for trainers.

python -m examples.algorithms.streaming_diloco
"""

import jax
import jax.numpy as jnp
import optax

import drjax
from examples.algorithms import diloco
from examples.common import text


def make_round(loss, inner, outer, k, tau, alpha, wire=None):
    """H steps of k workers; each of the P fragments of theta is synchronized once.

    The paper's loop, which asks after each step whether a fragment is due, is unrolled:
    fragment p is received at step (p + 1) H / P, and sent tau <= H / P steps earlier.
    The k workers are the paper's M replicas.

    `wire` is the dtype of what devices send each other: float4 is E2M1, where the paper
    has E3M0. On one device nothing is encoded.
    """
    inner_steps = diloco.make_inner_steps(loss, inner)

    def mix(own, new):
        return jax.tree.map(lambda x, y: alpha * x + (1 - alpha) * y, own, new)

    @drjax.program(workers=k)
    def train_round(shared, own, D, keys):
        (theta, momentum), (theta_i, states) = map(list, shared), own
        P, H, parts = len(theta), keys.shape[1], []

        def advance(theta_i, states, first, last):
            """These steps of the round, by all workers."""
            steps = drjax.map_fn(lambda keys: keys[first:last], keys)
            *worker, losses = drjax.map_fn(inner_steps, (theta_i, states, D, steps))
            parts.append(losses)
            return worker

        for p in range(P):
            first, received = p * H // P, (p + 1) * H // P
            sent = received - tau
            assert first <= sent, "a fragment is sent in its own interval"
            theta_i, states = advance(theta_i, states, first, sent)
            # Sent; the next tau steps do not wait for it.
            args = drjax.broadcast(theta[p]), theta_i[p]
            Delta_p = drjax.map_fn(optax.tree.sub, args)
            Delta_p = drjax.reduce_mean(Delta_p, wire=wire)
            theta_i, states = advance(theta_i, states, sent, received)
            # Received: the outer step, and each worker's mixture of old and new.
            updates, momentum[p] = outer.update(Delta_p, momentum[p], theta[p])
            theta[p] = optax.apply_updates(theta[p], updates)
            args = theta_i[p], drjax.broadcast(theta[p])
            theta_i[p] = drjax.map_fn(mix, args)
        losses = drjax.map_fn(lambda *x: jnp.concatenate(x), tuple(parts))
        return (theta, momentum), (theta_i, states), losses

    return train_round


def split(theta, P):
    """Its leaves in P fragments of about the same size, and the inverse."""
    leaves, structure = jax.tree.flatten(theta)
    dealt = text.deal([x.size for x in leaves], P)

    def join(theta):
        pairs = zip(sum(dealt, []), sum(theta, []), strict=True)
        return structure.unflatten([x for _, x in sorted(pairs, key=lambda x: x[0])])

    return [[leaves[i] for i in part] for part in dealt], join


def start(theta, inner, outer, k):
    """What is shared, and the parameters and the state of each worker, `[k, ...]`."""
    own = jax.tree.map(lambda x: jnp.stack([x] * k), (theta, inner.init(theta)))
    return (theta, [*map(outer.init, theta)]), own


def main():
    theta, join = split(diloco.first_theta(), P=2)
    loss = lambda theta, *args: diloco.loss(join(theta), *args)
    optimizers = diloco.inner, diloco.outer
    train_round = make_round(
        loss, *optimizers, 8, tau=5, alpha=0.5, wire="float4_e2m1fn"
    )
    diloco.train(train_round, *start(theta, *optimizers, 8), join)


if __name__ == "__main__":
    main()
