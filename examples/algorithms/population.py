"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846, algorithm 1).

Members train in parallel, (theta, h) each. The scores p are gathered: n numbers, from
which follows who copies whom. Members go from group to group, and no server sees them.
The paper's members are asynchronous; here all are ready after each round. Line 10, the
score of a new member, is left to line 5 of its next round.

python -m examples.algorithms.population
"""

import jax
import jax.numpy as jnp

import drjax


def exploit(members, p, key):
    """Line 7, truncation selection: the worst fifth copies members of the best fifth.

    Returns the members, and whether each is a copy. One that diverged is the worst.
    """
    n = len(p)
    cut = max(1, n // 5)
    order = jnp.argsort(jnp.where(jnp.isnan(p), -jnp.inf, p))
    better = jax.random.choice(key, order[n - cut :], (cut,))
    source = jnp.arange(n).at[order[:cut]].set(better)
    return drjax.take(members, source), source != jnp.arange(n)


def make_round(n, train, explore, evolve=True):
    """`train(member, data, key)` returns a member (theta, h) and its score p."""

    @drjax.program(members=n)
    def train_round(members, data, key):
        keys = jax.random.split(key, 3)

        def step_and_eval(member, data, key):  # lines 4 and 5
            key = jax.random.fold_in(key, drjax.partition_index())
            return train(member, data, key)

        def explore_copies(member, copied, key):  # lines 8 and 9
            key = jax.random.fold_in(key, drjax.partition_index())
            theta, h = member
            new = explore(h, key)
            return theta, jax.tree.map(lambda a, b: jnp.where(copied, a, b), new, h)

        args = members, *drjax.broadcast((data, keys[0]))
        members, p = drjax.map_fn(step_and_eval, args)
        p = drjax.gather(p)
        if not evolve:
            return members, p
        members, copied = exploit(members, p, keys[1])
        args = members, copied, drjax.broadcast(keys[2])
        return drjax.map_fn(explore_copies, args), p

    return train_round


# The toy problem of the paper's figure 2: two members, Q = 1.2 - theta_1^2 - theta_2^2.


def train_toy(member, data, key):
    """Four steps of ascent on 1.2 - h_1 theta_1^2 - h_2 theta_2^2, which is not Q."""
    theta, h = member
    for _ in range(4):
        theta = theta - 0.02 * 2 * h * theta
    return (theta, h), 1.2 - jnp.sum(theta**2)


def explore_toy(h, key):
    return jnp.clip(h + jax.random.uniform(key, (2,), minval=-0.2, maxval=0.2), 0, 1)


def main():
    """From h = (1, 0) and (0, 1), of which each moves one of the two coordinates."""
    step = jax.jit(make_round(2, train_toy, explore_toy))
    fixed = jax.jit(make_round(2, train_toy, explore_toy, evolve=False))
    start = jnp.full((2, 2), 0.9), jnp.eye(2)
    one, other = start, start
    print("round  Q of the best  with fixed h")
    for t in range(1, 51):
        one, p = step(one, (), jax.random.key(t))
        other, q = fixed(other, (), jax.random.key(t))
        if t % 10 == 0:
            print(f"{t:5}  {p.max():13.3f}  {q.max():12.3f}")


if __name__ == "__main__":
    main()
