"""Parallel tempering (Geyer 1991; Hukushima and Nemoto 1996).

"Markov chain Monte Carlo maximum likelihood"; "Exchange Monte Carlo method and
application to spin glass simulations". Each replica takes steps of Metropolis et al.
(1953).

python -m examples.algorithms.tempering
"""

import jax
import jax.numpy as jnp
import numpy as np

import drjax


def metropolis(energy, scale, state, betas, key):
    """Each replica: x' = x + noise, accepted with min(1, exp(beta (E(x) - E(x'))))."""

    def step(x, E, beta, key):
        keys = jax.random.split(jax.random.fold_in(key, drjax.partition_index()))
        new = x + scale / jnp.sqrt(beta) * jax.random.normal(keys[0], x.shape)
        accept = jnp.log(jax.random.uniform(keys[1])) < beta * (E - energy(new))
        return jnp.where(accept, new, x), jnp.where(accept, energy(new), E)

    return drjax.map_fn(step, (*state, betas, drjax.broadcast(key)))


def exchange(state, betas, partners, key):
    """Each pair (k, l): with min(1, exp((beta_k - beta_l) (E(x_k) - E(x_l))))."""

    def swap(own, other, difference, first, key):
        # Both draw the same number, so they agree without another exchange.
        chance = jax.random.uniform(jax.random.fold_in(key, first))
        accept = jnp.log(chance) < difference * (own[1] - other[1])
        return jax.tree.map(lambda a, b: jnp.where(accept, a, b), other, own)

    first = np.minimum(partners, np.arange(len(partners)))
    others = drjax.take(state, partners), betas - betas[partners], first
    return drjax.map_fn(swap, (state, *others, drjax.broadcast(key)))


def make_chain(energy, betas, sweeps, scale):
    """Samples at betas[0] = 1: `[sweeps, ...]`, from the starts of all replicas."""
    k = np.arange(len(betas))
    # (1, 2), (3, 4), ... and then (2, 3), (4, 5), ...; who has no partner is its own.
    pairs = [np.clip(((k + i) ^ 1) - i, 0, k[-1]) for i in (0, 1)]

    @drjax.program(replicas=len(betas))
    def chain(x, key):
        def sweep(state, key):
            keys = jax.random.split(key, (len(pairs), 2))
            for partners, (one, two) in zip(pairs, keys, strict=True):
                state = metropolis(energy, scale, state, betas, one)
                state = exchange(state, betas, partners, two)
            return state, drjax.select(state[0], 0)

        start = x, drjax.map_fn(energy, x)
        return jax.lax.scan(sweep, start, jax.random.split(key, sweeps))[1]

    return chain


def energy(x):
    """Of two normal modes at -3 and 3, of 40 % and 60 %."""
    return -jnp.logaddexp(
        np.log(0.4) - (x + 3) ** 2 * 2, np.log(0.6) - (x - 3) ** 2 * 2
    )


def main(sweeps=20_000):
    print("replicas  P(x > 0), exactly 0.6, after")
    print(f"          {sweeps // 4:,} sweeps  {sweeps:,} sweeps")
    for replicas in 1, 4, 8:
        betas = np.geomspace(1, 0.03, replicas).astype(np.float32)
        chain = drjax.jit(make_chain(energy, betas, sweeps, scale=0.5))
        x = chain(jnp.full(replicas, -3.0), jax.random.key(0))
        print(
            f"{replicas:8} {(x[: sweeps // 4] > 0).mean():13.3f} {(x > 0).mean():14.3f}"
        )


if __name__ == "__main__":
    main()
