"""FedPer (Arivazhagan et al. 2019, arXiv 1912.00818, algorithms 1 and 2).

python -m examples.algorithms.fedper

The base layers W_B are shared; each client j keeps its head W_Pj. With no layers kept
it is FedAvg, whose clients' models are the fine-tuned ones of Wang et al. 2019 (arXiv
1910.10252); with all layers kept each client trains alone. The heads start at 0,
where the paper's are random.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import drjax
from examples.common import clients, digits


def make_client_update(loss, report, e, b, eta):
    def client_update(W_B, W_Pj, key, data, j):
        """e epochs of SGD on all layers; a report on the model before and after."""
        train, tests = data

        def step(W, indices):
            batch = jax.tree.map(lambda x: x[indices], train)
            return optax.tree.add_scale(W, -eta, jax.grad(loss)(W, batch)), None

        def epoch(W, key):
            order = jax.random.permutation(key, len(train.y))
            return jax.lax.scan(step, W, order.reshape(-1, b))

        keys = jax.random.split(jax.random.fold_in(key, j), e)
        W, _ = jax.lax.scan(epoch, W_B | W_Pj, keys)
        reports = report(W_B | W_Pj, W, tests)
        return {k: W[k] for k in W_B}, {k: W[k] for k in W_Pj}, reports

    return client_update


def make_round(client_update, N):
    """A round of N clients with as many examples each: each gamma_j is 1 / N."""

    @drjax.program(clients=N)
    def train_round(W_B, W_P, key, data):
        W_B, key = drjax.broadcast((W_B, key))
        args = W_B, W_P, key, data, drjax.partition_index()
        W_B, W_P, reports = drjax.map_fn(client_update, args)
        return drjax.reduce_mean(W_B), W_P, drjax.reduce_sum(reports)

    return train_round


def apply(W, x):
    return jax.nn.relu(x @ W["base"]) @ W["head"] + W["bias"]


def loss(W, batch):
    logits = apply(W, batch.x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.y).mean()


def accuracy(W, tests):
    return (apply(W, tests.x).argmax(-1) == tests.y).mean()


def main(N=50):
    """Trains N clients on 80 digits of a few labels each, and tests each on 20."""
    whole = jax.tree.map(lambda *x: np.concatenate(x), *digits.load_mnist())
    parts = clients.split_shards(whole.y, N, seed=0, shards=4)
    order = [np.random.default_rng(0).permutation(part) for part in parts]
    pick = lambda ids: jax.tree.map(lambda x: x[ids], whole)
    data = pick(np.array(order)[:, :80]), pick(np.array(order)[:, 80:])

    report = lambda before, W, tests: (accuracy(before, tests), accuracy(W, tests))
    client_update = make_client_update(loss, report, e=2, b=10, eta=0.1)
    train_round = jax.jit(make_round(client_update, N))
    he_normal = jax.nn.initializers.he_normal()
    base = he_normal(jax.random.key(0), (784, 32))
    print("layers kept       round  clients' accuracy, before and after training")
    for kept in (), ("head", "bias"):
        W_B = {"base": base, "head": jnp.zeros((32, 10)), "bias": jnp.zeros(10)}
        W_P = {k: jnp.stack([W_B.pop(k)] * N) for k in kept}
        for t in range(21):
            W_B, W_P, right = train_round(W_B, W_P, jax.random.key(t), data)
            if t % 10 == 0:
                before, after = (x / N for x in right)
                print(
                    f"{' '.join(kept) or 'none':16}  {t:5}  {before:.1%}  {after:.1%}"
                )


if __name__ == "__main__":
    main()
