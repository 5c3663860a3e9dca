"""Branch-Train-Merge: experts for domains from one start, and the ensemble of them.

Li et al. 2022, arXiv 2208.03306, section 2: an expert is trained on each domain,
without communication; the ensemble weights them by the domain's posterior,

    p(next | bytes so far) = sum of p(D = k | bytes so far) p_k(next | bytes so far).

python -m examples.algorithms.branch_train_merge
"""

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from examples.algorithms import soups
from examples.common import byte_network, text


def ensemble(theta, windows, posterior=True):
    """The log-probabilities of windows, with equal weights or the posterior's."""

    def expert(theta, windows):
        values = byte_network.log_probs(theta, windows)
        before = posterior * (jnp.cumsum(values, -1) - values)  # log p_k(so far)
        return before + values, before

    add = lambda a, b: jax.tree.map(jnp.logaddexp, a, b)
    values = drjax.map_fn(expert, (theta, drjax.broadcast(windows)))
    joint, before = drjax.reduce(add, values, (-jnp.inf, -jnp.inf))
    return joint - before


def main(n=8, steps=200):
    """The domains are the largest modules of Python's standard library."""
    domains = sorted(text.load_stdlib().train, key=lambda x: -len(x.text))[:n]
    rng = np.random.default_rng(0)
    cut = lambda source, count: text.cut(source, count, 64, rng)
    stack = lambda windows: jax.tree.map(lambda *x: np.stack(x), *windows)
    parts = [np.split(x.text, [len(x.text) * 9 // 10]) for x in domains]
    batches = stack([cut(train, steps * 4) for train, _ in parts])
    batches = jax.tree.map(lambda x: x.reshape(n, steps, 4, *x.shape[2:]), batches)
    test = stack([cut(held_out, 32) for _, held_out in parts])
    mixed = stack([cut(np.concatenate([train for train, _ in parts]), steps * 4)])
    mixed = jax.tree.map(lambda x: x.reshape(1, steps, 4, *x.shape[2:]), mixed)

    seed = drjax.program(models=1)(soups.fine_tune)
    theta_0 = byte_network.init(jax.random.key(0), width=96)
    theta_0 = jax.jit(seed)(theta_0, np.array([3e-3]), mixed)
    theta_0 = jax.tree.map(lambda x: x[0], theta_0)

    @jax.jit
    @drjax.program(models=n)
    def losses(theta_0, batches):
        theta = soups.fine_tune(theta_0, jnp.full(n, 3e-3), batches)
        merged = [ensemble(theta, test, posterior) for posterior in (False, True)]
        merged = [byte_network.mean_loss(values, test) for values in merged]
        mean = drjax.reduce_mean(theta)
        return byte_network.loss(theta_0, test), byte_network.loss(mean, test), *merged

    print("test loss on all domains, nats per byte")
    names = "seed model", "mean of the models", "ensemble", "ensemble by posterior"
    for name, value in zip(names, losses(theta_0, batches), strict=True):
        print(f"{name:22} {value:.3f}")


if __name__ == "__main__":
    main()
