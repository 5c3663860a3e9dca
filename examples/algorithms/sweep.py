"""Random search (Bergstra and Bengio 2012) that reduces to the best model.

n models train in parallel, each with hyperparameters of its own. The reduction is the
choice itself, a fold of (score, index, model): m devices exchange m models, where a
gather exchanges n, and `groups_per_step=k` trains k models of a device at a time.

python -m examples.algorithms.sweep
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import drjax
from examples.common import digits
from examples.common.network import apply, init, loss


def better(a, b):
    """The state with the higher score, of equal ones the first: it is associative."""
    return jax.tree.map(lambda x, y: jnp.where(a[0] >= b[0], x, y), a, b)


def make_sweep(train, n):
    """`train(settings, start, data, key)` returns a score and a model."""

    @drjax.program(trials=n)
    def sweep(settings, start, data, key):
        def trial(settings, start, data, key, index):
            score, model = train(settings, start, data, key)
            return score, index, model

        shared = drjax.broadcast((start, data, key))
        states = drjax.map_fn(trial, (settings, *shared, drjax.partition_index()))
        worst = -jnp.inf, jnp.int32(-1), jax.tree.map(jnp.zeros_like, start)
        return drjax.reduce(better, states, worst), drjax.gather(states[0])

    return sweep


def make_train(steps, batch):
    def train(settings, start, data, key):
        """Adam with decoupled weight decay; the score is the validation accuracy."""
        (rate, decay), (train_set, validation) = settings, data
        adam = optax.adamw(rate, weight_decay=decay)

        def step(carry, key):
            w, state = carry
            ids = jax.random.randint(key, (batch,), 0, len(train_set.y))
            examples = jax.tree.map(lambda x: x[ids], train_set)
            updates, state = adam.update(jax.grad(loss)(w, examples), state, w)
            return (optax.apply_updates(w, updates), state), None

        keys = jax.random.split(key, steps)
        (w, _), _ = jax.lax.scan(step, (start, adam.init(start)), keys)
        right = apply(w, validation.x).argmax(-1) == validation.y
        return right.mean(), w

    return train


def main(n=64):
    """Searches a learning rate and a weight decay, for 200 steps on digits."""
    data, test = digits.load_mnist()
    pick = lambda i: jax.tree.map(lambda x: x[i], data)
    held = np.arange(len(data.y)) % 8 == 0
    start = init(jax.random.split(jax.random.key(0)), 784, 32)
    rng = np.random.default_rng(0)
    settings = 10 ** rng.uniform(-5, 0, n), 10 ** rng.uniform(-4, 0, n)

    sweep = make_sweep(make_train(steps=200, batch=50), n)
    sweep = drjax.jit(sweep, groups_per_step=2)
    (score, i, w), scores = sweep(
        jax.tree.map(jnp.float32, settings),
        start,
        (pick(~held), pick(held)),
        jax.random.key(1),
    )
    print("        rate    decay  validation accuracy")
    for name, k in {"best": i, "median": np.argsort(scores)[n // 2]}.items():
        print(f"{name:6}  {settings[0][k]:.1e}  {settings[1][k]:.1e}  {scores[k]:.1%}")
    right = (apply(w, test.x).argmax(-1) == test.y).mean()
    print(f"test accuracy of the best, which has index {i}: {right:.1%}")


if __name__ == "__main__":
    main()
