"""DP-FedAvg (McMahan et al. 2018, arXiv 1710.06963, algorithm 1, fixed denominator).

python -m examples.algorithms.dp_fedavg

The divisor is the expected size of a cohort, q W: a mean over those drawn would reveal
how many they were. All users have the weight 1, so that W is their number. A step is on
all examples of a user, and the change is clipped once, after the steps, by which the
sensitivity is the same as if each step were clipped.
"""

import dp_accounting
import jax
import jax.numpy as jnp
import optax
from dp_accounting import rdp

import drjax
from examples.common import clients, digits


def make_client_update(loss, S, steps, eta):
    def client_update(theta_0, examples, mask):
        """Some steps of SGD on a user's examples, and the clipped change."""

        def step(theta, _):
            grads = jax.grad(loss)(theta, examples, mask)
            return optax.tree.add_scale(theta, -eta, grads), None

        theta, _ = jax.lax.scan(step, theta_0, length=steps)
        delta = optax.tree.sub(theta, theta_0)
        return optax.tree.scale(jnp.minimum(1, S / optax.tree.norm(delta)), delta)

    return client_update


def make_round(client_update, places, S, z, qW):
    """A round; of its `places`, the mask `taken` has those with a drawn user."""

    @drjax.program(clients=places)
    def train_round(theta, examples, mask, taken, key):
        args = drjax.broadcast(theta), examples, mask
        total = drjax.reduce_sum(drjax.map_fn(client_update, args), where=taken)
        noise = optax.tree.random_like(key, theta, jax.random.normal)
        total = optax.tree.add_scale(total, z * S, noise)
        # Delta and its noise, of standard deviation sigma = z S / (q W).
        return optax.tree.add_scale(theta, 1 / qW, total)

    return train_round


def spent(q, z, T, delta):
    """Epsilon after T rounds, by Renyi divergence, as is the moments accountant's."""
    gaussian = dp_accounting.GaussianDpEvent(z)
    sampled = dp_accounting.PoissonSampledDpEvent(q, gaussian)
    event = dp_accounting.SelfComposedDpEvent(sampled, T)
    return rdp.RdpAccountant(range(2, 129)).compose(event).get_epsilon(delta)


def loss(theta, examples, mask):
    logits = examples.x @ theta["w"] + theta["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, examples.y)
    return jnp.sum(losses, where=mask) / jnp.maximum(mask.sum(), 1)


def main(W=1000, q=0.1, S=0.5, z=1.0, T=40, places=170):
    """Trains on digits of 1,000 users, each of whom has four."""
    train, test = digits.load_mnist()
    parts = clients.split_iid(train.y, W, seed=0)
    population = clients.pad([digits.Digits(train.x[i], train.y[i]) for i in parts])

    client_update = make_client_update(loss, S, steps=5, eta=0.1)
    train_round = jax.jit(make_round(client_update, places, S, z, q * W))
    theta = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}
    print("round  test accuracy  epsilon for delta = 0.001")
    for t in range(1, T + 1):
        draw, key = jax.random.split(jax.random.key(t))
        users, taken, fit = clients.poisson_cohort(draw, W, q, places)
        assert fit, f"More than {places} users were drawn."
        cohort = jax.tree.map(lambda x, users=users: x[users], population)
        theta = train_round(theta, *cohort, taken, key)
        if t % 10 == 0:
            right = (test.x @ theta["w"] + theta["b"]).argmax(-1) == test.y
            print(f"{t:5}  {right.mean():13.1%}  {spent(q, z, t, 1e-3):.2f}")


if __name__ == "__main__":
    main()
