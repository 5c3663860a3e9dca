"""Reptile (Nichol et al. 2018, arXiv 1803.02999, algorithm 2: batched version).

Where k gradient steps on a task lead is where the initial parameters move; it needs no
second derivatives, and no points apart for the meta-update. Adam takes what is left of
the way for a gradient, without the paper's 1 / alpha. Each step is on all points of a
task.

python -m examples.algorithms.reptile
"""

import jax
import jax.numpy as jnp
import optax

import drjax
from examples.algorithms import maml

K = 5  # gradient steps on a task


def task_gradient(phi, alpha, task):
    """From W_i, the parameters after k steps, to the initial ones: phi - W_i."""
    points = jax.tree.map(lambda *x: jnp.concatenate(x), task.support, task.query)
    W_i = phi
    for _ in range(K):
        W_i = maml.adapt(W_i, alpha, points)
    return optax.tree.sub(phi, W_i)


@drjax.program(tasks=maml.META_BATCH)
def meta_gradient(phi, alpha, tasks):
    phi, alpha = drjax.broadcast((phi, alpha))
    return drjax.reduce_mean(drjax.map_fn(task_gradient, (phi, alpha, tasks)))


if __name__ == "__main__":
    maml.main(meta_gradient)
