"""Federated averaging that learns its rates and its clients' weights by gradients.

Federated automatic differentiation (Rush et al. 2023, arXiv 2301.07806): F(h) is the
server's loss after T rounds with hyperparameters h. Communication has a derivative, so
`jax.grad` of F goes back through all rounds, and h follows by Adam. (The paper's
algorithm 2 goes back through the last round only, for the server's optimizer, with the
loss of clients.) `jax.jit` saves the residuals of all clients in all rounds;
`drjax.jit` rematerializes a client at a time.

python -m examples.algorithms.self_tuning
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.nn import sigmoid

import drjax
from examples.common import digits
from examples.common.network import init, loss


def bounded(h):
    """Clients' weights and inner rate, in (0, 1), and the outer rate, in (0, 2)."""
    v, a, b = h
    return sigmoid(v), sigmoid(a), 2 * sigmoid(b)


def unbounded(inner, outer, n):
    """The h of these rates and of n equal weights."""
    logit = lambda x: jnp.log(x / (1 - x))
    return jnp.zeros(n), logit(jnp.float32(inner)), logit(jnp.float32(outer / 2))


def make_round(n, steps, batch):
    def client_update(w, rate, examples, key):
        def step(w_k, key):
            ids = jax.random.randint(key, (batch,), 0, len(examples.y))
            grads = jax.grad(loss)(w_k, jax.tree.map(lambda x: x[ids], examples))
            return optax.tree.add_scale(w_k, -rate, grads), None

        w_k, _ = jax.lax.scan(step, w, jax.random.split(key, steps))
        return optax.tree.sub(w, w_k)

    @drjax.program(clients=n)
    def train_round(w, h, examples, keys):
        weights, inner, outer = bounded(h)
        shared = drjax.broadcast((w, inner))
        updates = drjax.map_fn(client_update, (*shared, examples, keys))
        update = drjax.reduce_weighted_mean(updates, drjax.scatter(weights))
        return optax.tree.add_scale(w, -outer, update)

    return train_round


def make_objective(train_round):
    def F(h, w, examples, server, keys):
        """The loss of the server's examples after T rounds, keys `[T, n]`; and w."""
        step = lambda w, keys: (train_round(w, h, examples, keys), None)
        w, _ = jax.lax.scan(step, w, keys)
        return loss(w, server), w

    return F


def make_step(train_round, adam):
    F = make_objective(train_round)

    def step(state, *args):
        """A step of Adam for the derivative of F: h, through all rounds."""
        h, moments = state
        (value, w), grads = jax.value_and_grad(F, has_aux=True)(h, *args)
        updates, moments = adam.update(grads, moments)
        return (optax.apply_updates(h, updates), moments), value, w

    return step


def main(make_step=make_step, unit="steps of Adam", n=16, T=16):
    """Half of the clients have random labels, and the server does not know which."""
    data, test = digits.load_mnist()
    own = np.random.default_rng(0).permutation(4000).reshape(n, -1)
    labels, noisy = data.y[own], np.arange(n) < n // 2
    labels[noisy] = np.random.default_rng(1).integers(0, 10, labels[noisy].shape)
    server, test = (jax.tree.map(lambda x, i=i: x[i::5], test) for i in (0, 1))

    train_round, adam = make_round(n, steps=4, batch=16), optax.adam(0.2)
    F = make_objective(train_round)
    w = init(jax.random.split(jax.random.key(0)), 784, 32)
    keys = lambda i: jax.random.split(jax.random.key(i), (T, n))
    args = w, digits.Digits(data.x[own], labels), server
    evaluate = drjax.jit(lambda h: F(h, *args, keys(1000)), groups_per_step=1)

    def show(name, h):
        weights, inner, outer = bounded(h)
        clean = weights[~noisy].sum() / weights.sum()
        cells = f"{inner:5.2f}  {outer:5.2f}  {clean:13.1%}"
        print(f"{name:18}  {cells}  {loss(evaluate(h)[1], test):9.3f}")

    print("                    inner  outer  clean clients")
    print("h                    rate   rate         weight  test loss")
    rates = itertools.product((0.1, 0.2, 0.4, 0.8), (0.7, 1.0, 1.4))
    grid = [unbounded(*pair, n) for pair in rates]
    show("best of 12 fixed", min(grid, key=lambda h: float(evaluate(h)[0])))
    h = unbounded(0.1, 1.0, n)
    show("initial", h)
    state, step = (h, adam.init(h)), make_step(train_round, adam)
    tune = drjax.jit(step, groups_per_step=1)
    for i in range(1, 31):
        state, _, _ = tune(state, *args, keys(i))
        if i % 10 == 0:
            show(f"{i} {unit}", state[0])
    for name, fn in {"jax.jit": jax.jit(step), "drjax.jit": tune}.items():
        memory = drjax.collectives(fn)(state, *args, keys(0)).temp_bytes
        print(f"temporary memory, {name + ':':10} {memory / 1e6:5.1f} MB")


if __name__ == "__main__":
    main()
