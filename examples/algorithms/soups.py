"""Model soups: one model, the mean of many that were fine-tuned from the same start.

Wortsman et al. 2022, arXiv 2203.05482: the uniform soup, the greedy soup (recipe 1) and
the learned soup (appendix, without a temperature), with the loss on validation text in
place of the accuracy.

python -m examples.algorithms.soups
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import drjax
from examples.common import byte_network, text
from examples.common.byte_network import loss


def train(theta, rate, batches):
    adam = optax.adam(rate)

    def step(carry, batch):
        theta, state = carry
        updates, state = adam.update(jax.grad(loss)(theta, batch), state)
        return (optax.apply_updates(theta, updates), state), None

    return jax.lax.scan(step, (theta, adam.init(theta)), batches)[0][0]


def fine_tune(theta_0, rates, batches):
    """theta_i = FineTune(theta_0, h_i), where h_i is a rate of Adam."""
    return drjax.map_fn(train, (drjax.broadcast(theta_0), rates, batches))


def soup(theta, weights):
    return drjax.reduce_weighted_mean(theta, drjax.scatter(weights))


def greedy_weights(theta, validation):
    """Recipe 1: from the best model on, each stays if the soup is no worse with it."""

    def add(carry, i):
        ingredients, best = carry
        more = ingredients.at[i].set(True)
        value = loss(drjax.reduce_mean(theta, where=drjax.scatter(more)), validation)
        kept = jnp.where(value <= best, more, ingredients)
        return (kept, jnp.minimum(value, best)), None

    alone = drjax.map_fn(loss, (theta, drjax.broadcast(validation)))
    order = jnp.argsort(drjax.gather(alone))
    start = jnp.zeros(order.shape, bool), jnp.inf
    (ingredients, _), _ = jax.lax.scan(add, start, order)
    return ingredients / ingredients.sum()


def learned_weights(theta, validation, steps=25):
    """Gradient descent through the soup, by Adam on the logits of its weights."""
    adam = optax.adam(0.3)
    value = lambda alpha: loss(soup(theta, jax.nn.softmax(alpha)), validation)

    def step(carry, _):
        alpha, state = carry
        updates, state = adam.update(jax.grad(value)(alpha), state)
        return (optax.apply_updates(alpha, updates), state), None

    alpha = jnp.zeros(drjax.partition_size())
    (alpha, _), _ = jax.lax.scan(step, (alpha, adam.init(alpha)), length=steps)
    return jax.tree.map(jax.nn.softmax, alpha)


def main(n=8, steps=150):
    """The start has seen half of a text; it is fine-tuned on the other half."""
    modules = sorted(text.load_stdlib().train, key=lambda x: -len(x.text))[:20]
    old, new = (np.concatenate([x.text for x in modules[i::2]]) for i in range(2))
    new, held_out = np.split(new, [len(new) * 8 // 10])
    held_out = text.batches(held_out, (2, 200), 64, seed=0)
    validation, test = map(text.Windows, *held_out)
    batches = text.batches(new, (n, steps, 4), 64, seed=0)
    theta_0 = byte_network.init(jax.random.key(0), width=96)
    theta_0 = jax.jit(train)(theta_0, 3e-3, text.batches(old, (1000, 4), 64, seed=0))

    @jax.jit
    @drjax.program(models=n)
    def losses(theta_0, batches):
        theta = fine_tune(theta_0, np.geomspace(1e-3, 3e-2, n), batches)
        scores, singles = (
            drjax.gather(drjax.map_fn(loss, (theta, drjax.broadcast(windows))))
            for windows in (validation, test)
        )
        recipes = greedy_weights(theta, validation), learned_weights(theta, validation)
        soups = [loss(soup(theta, x), test) for x in (jnp.ones(n) / n, *recipes)]
        return loss(theta_0, test), singles[jnp.argmin(scores)], *soups

    names = "common start", "best single", "uniform soup", "greedy soup", "learned soup"
    print("test loss, nats per byte")
    for name, value in zip(names, losses(theta_0, batches), strict=True):
        print(f"{name:13} {value:.3f}")


if __name__ == "__main__":
    main()
