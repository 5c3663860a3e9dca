"""Hierarchical local SGD (Lin et al. 2018, arXiv 1808.07217, "hierarchical local SGD").

"Don't use large mini-batches, use local SGD": each group takes H local steps, then its
pod (the paper's block) averages; after Hb of these all pods average.

python -m examples.algorithms.hierarchical
"""

import jax
import numpy as np
import optax

import drjax
from examples.common import clients, digits, network


def make_round(loss, pods, groups, H, Hb, gamma, B):
    """A round: Hb averages in each pod, then one of all pods."""

    def local_sgd(w, examples, key):
        """H steps of a group, on batches of B of its own examples."""
        key = jax.random.fold_in(key, drjax.partition_index(over="groups"))

        def step(w, key):
            i = jax.random.randint(key, (B,), 0, len(examples.y))
            batch = jax.tree.map(lambda x: x[i], examples)
            return optax.tree.add_scale(w, -gamma, jax.grad(loss)(w, batch)), None

        return jax.lax.scan(step, w, jax.random.split(key, H))[0]

    def in_pod(w, examples, key):
        key = jax.random.fold_in(key, drjax.partition_index(over="pods"))

        def average(w, key):
            w_k, keys = drjax.broadcast((w, key), over="groups")
            w_k = drjax.map_fn(local_sgd, (w_k, examples, keys), over="groups")
            return drjax.reduce_mean(w_k, over="groups"), None

        return jax.lax.scan(average, w, jax.random.split(key, Hb))[0]

    @drjax.program(pods=pods, groups=groups)
    def train_round(w, examples, key):
        w_b, keys = drjax.broadcast((w, key), over="pods")
        w_b = drjax.map_fn(in_pod, (w_b, examples, keys), over="pods")
        return drjax.reduce_mean(w_b, over="pods")

    return train_round


def main(pods=4, groups=4, steps=500):
    train, test = digits.load_mnist()
    parts = clients.split_shards(train.y, pods * groups, seed=0)
    i = np.stack([part[:240] for part in parts]).reshape(pods, groups, 240)
    examples = digits.Digits(train.x[i], train.y[i])

    print("  H  Hb  test accuracy  MB from each group  and from each pod")
    for H, Hb in (10, 1), (100, 1), (10, 10):
        train_round = make_round(network.loss, pods, groups, H, Hb, gamma=0.05, B=10)
        w = network.init(jax.random.split(jax.random.key(0)), 784, 64)
        rounds = steps // (H * Hb)
        plan = drjax.make_plan(train_round)(w, examples, jax.random.key(0))
        up = [plan.communication().up(over=x) * rounds for x in ("groups", "pods")]
        step = drjax.jit(train_round)
        for key in jax.random.split(jax.random.key(1), rounds):
            w = step(w, examples, key)
        accuracy = (network.apply(w, test.x).argmax(-1) == test.y).mean()
        print(f"{H:3} {Hb:3} {accuracy:14.1%} {up[0] / 1e6:19.1f} {up[1] / 1e6:18.1f}")


if __name__ == "__main__":
    main()
