"""Federated averaging (McMahan et al. 2017, arXiv 1602.05629, algorithm 1).

python -m examples.algorithms.fedavg
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen

import drjax
from examples.common import clients, digits


def make_client_update(loss, E, B, eta):
    def client_update(w, examples, mask, key):
        """ClientUpdate(k, w): E epochs of SGD on batches of B, new ones in each."""

        def step(w, indices):
            batch, real = jax.tree.map(lambda x: x[indices], (examples, mask))
            rate = eta * real.any()  # no step on padding, where FedProx would take one
            return optax.tree.add_scale(w, -rate, jax.grad(loss)(w, batch, real)), None

        def epoch(w, key):
            return jax.lax.scan(step, w, clients.batches(key, mask, B))[0], None

        return jax.lax.scan(epoch, w, jax.random.split(key, E))[0]

    return client_update


def make_round(client_update, m):
    """A round of m clients; n_k of the mask of client k are true, not padding."""

    @drjax.program(clients=m)
    def train_round(w, examples, mask, keys):
        w_k = drjax.map_fn(client_update, (drjax.broadcast(w), examples, mask, keys))
        return drjax.reduce_weighted_mean(w_k, mask.sum(1))  # sum of n_k / n w_k

    return train_round


model = linen.Sequential(  # the paper's "2NN"
    [linen.Dense(200), linen.relu, linen.Dense(200), linen.relu, linen.Dense(10)]
)


def loss(w, batch, real):
    """The mean over the examples that are not padding."""
    logits = jnp.asarray(model.apply(w, batch.x))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
    return jnp.sum(losses, where=real) / jnp.maximum(real.sum(), 1)


def accuracy(w, test):
    return (jnp.asarray(model.apply(w, test.x)).argmax(-1) == test.y).mean()


def cohorts(train, m, rounds):
    """Deals the digits, most clients two labels, and draws m clients in each round."""
    parts = clients.split_shards(train.y, 100, seed=0)
    own = [digits.Digits(train.x[part], train.y[part]) for part in parts]
    examples, mask = clients.pad(own, multiple=10)
    for t in range(1, rounds + 1):
        key = jax.random.key(t)
        S_t = clients.cohort(key, len(parts), m)
        cohort = digits.Digits(examples.x[S_t], examples.y[S_t])
        yield t, cohort, mask[S_t], clients.client_keys(key, S_t)


def main(client_update, m=10):
    train, test = digits.load_mnist()
    train_round = jax.jit(make_round(client_update, m))
    w = model.init(jax.random.key(0), test.x)
    print("round  test accuracy")
    for t, *cohort in cohorts(train, m, rounds=40):
        w = train_round(w, *cohort)
        if t % 10 == 0:
            print(f"{t:5}  {accuracy(w, test):.1%}")


if __name__ == "__main__":
    main(make_client_update(loss, E=5, B=10, eta=0.1))
