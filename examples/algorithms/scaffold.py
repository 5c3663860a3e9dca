"""SCAFFOLD (Karimireddy et al. 2020, arXiv 1910.06378, algorithm 1, option II).

python -m examples.algorithms.scaffold
"""

import functools

import jax
import jax.numpy as jnp
import optax

import drjax
from examples.common import clients, digits

add, sub, add_scale = optax.tree.add, optax.tree.sub, optax.tree.add_scale


def make_client_update(loss, E, steps, eta_l):
    """E epochs of a few steps; with `c = c_i = 0` it is the client of FedAvg."""
    K = E * steps

    def client_update(x, c, c_i, examples, key):
        def step(y_i, indices):
            batch = jax.tree.map(lambda a: a[indices], examples)
            g_i = jax.grad(loss)(y_i, batch)
            return add_scale(y_i, -eta_l, add(sub(g_i, c_i), c)), None

        def epoch(y_i, key):
            order = jax.random.permutation(key, len(examples.y))
            return jax.lax.scan(step, y_i, order.reshape(steps, -1))[0], None

        y_i = jax.lax.scan(epoch, x, jax.random.split(key, E))[0]
        # The paper's c_i^+, by option II; what is returned is (Delta y_i, Delta c_i).
        c_new = add_scale(sub(c_i, c), 1 / (K * eta_l), sub(x, y_i))
        return sub(y_i, x), sub(c_new, c_i)

    return client_update


def make_round(client_update, S, N, eta_g=1.0):
    """A round of S clients of N, whose control variates are `c_i`, `[S, ...]`."""

    @drjax.program(clients=S)
    def train_round(x, c, c_i, examples, keys):
        args = *drjax.broadcast((x, c)), c_i, examples, keys
        delta_y, delta_c = drjax.map_fn(client_update, args)
        x = add_scale(x, eta_g, drjax.reduce_mean(delta_y))
        c = add_scale(c, S / N, drjax.reduce_mean(delta_c))
        return x, c, drjax.map_fn(add, (c_i, delta_c))

    return train_round


def loss(x, batch):
    logits = batch.x @ x["w"] + x["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.y).mean()


def accuracy(x, test):
    return ((test.x @ x["w"] + x["b"]).argmax(-1) == test.y).mean()


def main(N=100, S=20, rounds=30):
    """Trains N clients, each with 40 digits of one label."""
    train, test = digits.load_mnist()
    order = train.y.argsort(kind="stable").reshape(N, -1)
    population = jax.device_put(digits.Digits(train.x[order], train.y[order]))
    zeros = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}

    @functools.partial(jax.jit, static_argnames=("E", "scaffold"))
    def step(x, c, c_all, t, E, scaffold):
        key = jax.random.key(t)
        i = clients.cohort(key, N, S)
        c_i, examples = jax.tree.map(lambda x: x[i], (c_all, population))
        client_update = make_client_update(loss, E, steps=5, eta_l=0.01)
        train_round = make_round(client_update, S, N)
        x, c_new, c_i = train_round(x, c, c_i, examples, clients.client_keys(key, i))
        if not scaffold:
            return x, c, c_all  # zero
        return x, c_new, jax.tree.map(lambda x, y: x.at[i].set(y), c_all, c_i)

    print("epochs  method    test accuracy, mean of the last ten rounds")
    for E in 1, 10:
        for scaffold in False, True:
            x, c, scores = zeros, zeros, []
            c_all = jax.tree.map(lambda x: jnp.zeros((N, *x.shape)), zeros)
            for t in range(rounds):
                x, c, c_all = step(x, c, c_all, t, E, scaffold)
                scores.append(accuracy(x, test))
            name = "SCAFFOLD" if scaffold else "FedAvg"
            print(f"{E:6}  {name:8}  {sum(scores[-10:]) / 10:.1%}")


if __name__ == "__main__":
    main()
