"""Evolution strategies (Salimans et al. 2017, arXiv 1703.03864, algorithm 2).

Workers send returns, and neither gradients nor models: all know each other's random
seeds. With mirrored sampling and ranks in place of returns (section 2.1), and Adam.

python -m examples.algorithms.evolution
"""

import jax
import jax.numpy as jnp
import optax

import drjax
from examples.common.cart_pole import make_policy


def make_noise(theta, key, i):
    """Lines 5 and 10: epsilon_i, which every worker can reconstruct."""
    key = jax.random.fold_in(key, i)
    return optax.tree.random_like(key, theta, jax.random.normal)


def shape_returns(F):
    """Ranks in [-1/2, 1/2], equal ones for equal returns."""
    flat = F.ravel()
    ranks = jnp.sign(flat[:, None] - flat).mean(1) / 2
    return ranks.reshape(F.shape)


def make_round(episode, optimizer, n, sigma):
    """A round of n workers; `episode(theta, key)` is the return of a policy."""

    @drjax.program(workers=n)
    def evolve(theta, state, key):
        noise_key, episode_key = jax.random.split(key)

        def evaluate(theta, noise_key, episode_key):  # lines 4 to 7
            i = drjax.partition_index()
            epsilon = make_noise(theta, noise_key, i)
            key = jax.random.fold_in(episode_key, i)
            pair = [optax.tree.add_scale(theta, s, epsilon) for s in (sigma, -sigma)]
            return jnp.stack([episode(theta_i, key) for theta_i in pair])

        args = drjax.broadcast((theta, noise_key, episode_key))
        F = drjax.gather(drjax.map_fn(evaluate, args))  # line 8: [n, 2]
        ranks = shape_returns(F)

        def add(total, j):  # lines 10 and 11
            epsilon = make_noise(theta, noise_key, j)
            weight = ranks[j, 0] - ranks[j, 1]
            return optax.tree.add_scale(total, weight, epsilon), None

        zeros = jax.tree.map(jnp.zeros_like, theta)
        total, _ = jax.lax.scan(add, zeros, jnp.arange(n))
        gradient = optax.tree.scale(-1 / (2 * n * sigma), total)
        updates, state = optimizer.update(gradient, state, theta)
        return optax.apply_updates(theta, updates), state, F

    return evolve


def main(n=64, rounds=16):
    """Balances a pole for at most 500 steps: CartPole-v1, solved at 475."""
    theta, episode = make_policy(width=32, seed=0)
    adam = optax.adam(0.02)
    evolve = make_round(episode, adam, n, sigma=0.1)
    args = theta, adam.init(theta), jax.random.key(0)
    sent = drjax.make_plan(evolve)(*args).communication().up()
    size = sum(x.nbytes for x in jax.tree.leaves(theta))
    print(f"bytes of a worker in a round: {sent}; of a gradient: {size:,}")
    print("round  mean return")
    evolve, state = jax.jit(evolve), args[1]
    for t in range(1, rounds + 1):
        theta, state, F = evolve(theta, state, jax.random.key(t))
        if t % 2 == 0:
            print(f"{t:5}  {F.mean():11.0f}")


if __name__ == "__main__":
    main()
