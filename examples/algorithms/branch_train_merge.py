"""Branch-Train-Merge: experts for domains from one start, and the merging of them.

Li et al. 2022, arXiv 2208.03306, sections 2.3 and 3: an expert is trained on each
domain, without communication; the ensemble weights them by the domain's posterior,

    p(next | bytes so far) = sum of p(D = k | bytes so far) p_k(next | bytes so far),

and so does the mean of their parameters, for a domain as a whole. The prior is uniform,
and all experts are used, not the top k.

python -m examples.algorithms.branch_train_merge
"""

import jax
import jax.numpy as jnp
import numpy as np

import drjax
from examples.algorithms import soups
from examples.common import byte_network, text
from examples.common.byte_network import loss, mean_loss


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


def average(theta, windows):
    """One model for a domain: its posterior is the mean of that of its windows."""
    mean_losses = drjax.map_fn(
        jax.vmap(loss, (None, 0)), (theta, drjax.broadcast(windows))
    )
    posterior = jax.nn.softmax(-drjax.gather(mean_losses) * windows.lengths, axis=0)
    return soups.soup(theta, posterior.mean(1))


def average_loss(theta, windows, test):
    """The loss of each domain's average on its test windows: [domains, m, ...]."""
    one = lambda x: byte_network.log_probs(average(theta, x[0]), x[1])
    return mean_loss(jax.lax.map(one, (windows, test)), test)


def main(n=8, steps=150):
    """The domains are the largest modules of Python's standard library."""
    domains = sorted(text.load_stdlib().train, key=lambda x: -len(x.text))[:n]
    parts = [np.split(x.text, [len(x.text) * 8 // 10]) for x in domains]
    batches = text.stack(text.batches(x, (steps, 4), 64, seed=0) for x, _ in parts)
    held_out = [text.batches(x, (2, 64), 64, seed=0) for _, x in parts]
    held_out = zip(*(map(text.Windows, *x) for x in held_out), strict=True)
    windows, test = map(text.stack, held_out)
    mixed = text.batches(np.concatenate([x for x, _ in parts]), (300, 4), 64, seed=0)
    theta_0 = byte_network.init(jax.random.key(0), width=96)
    theta_0 = jax.jit(soups.train)(theta_0, 3e-3, mixed)

    @jax.jit
    @drjax.program(models=n)
    def losses(theta_0, batches):
        theta = soups.fine_tune(theta_0, jnp.full(n, 3e-3), batches)
        merged = [mean_loss(ensemble(theta, test, x), test) for x in (False, True)]
        means = loss(drjax.reduce_mean(theta), test), average_loss(theta, windows, test)
        return loss(theta_0, test), *means, *merged

    print("test loss on all domains, nats per byte")
    names = (
        "seed model",
        "mean",
        "mean by posterior",
        "ensemble",
        "ensemble by posterior",
    )
    for name, value in zip(names, losses(theta_0, batches), strict=True):
        print(f"{name:22} {value:.3f}")


if __name__ == "__main__":
    main()
