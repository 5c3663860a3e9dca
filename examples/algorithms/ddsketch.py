"""DDSketch (Masson, Rim and Lee 2019, arXiv 1908.10693, algorithms 1 and 2).

A sketch has a fixed shape, for the values from low to high.

python -m examples.algorithms.ddsketch
"""

import jax
import jax.numpy as jnp
import numpy as np

import drjax


def bounds(alpha, low, high):
    """The upper bounds of buckets, from low to high: low gamma^i, not gamma^i."""
    gamma = (1 + alpha) / (1 - alpha)
    i = np.arange(np.ceil(np.log(high / low) / np.log(gamma)) + 1)
    return (low * gamma**i).astype(np.float32)


def insert(upper, x):
    """Algorithm 1: one more value in bucket i, with upper[i - 1] < x <= upper[i]."""
    i = jnp.searchsorted(upper, x)  # a logarithm's rounding would miss a few
    return jax.nn.one_hot(i, len(upper) + 1, dtype=jnp.int32)


def quantile(B, upper, alpha, q):
    """Algorithm 2: the first bucket up to which there are more than q (n - 1) values.

    Its estimate, 2 upper[i] / (gamma + 1), is within alpha of all values in it.
    """
    i = np.argmax(np.cumsum(B) > q * (B.sum() - 1))
    return upper[i] * (1 - alpha)  # 2 / (gamma + 1) = 1 - alpha


def make_sketch(n):
    """The buckets' counts B for n values; sketches are merged by their sum."""

    @drjax.program(records=n)
    def sketch(upper, x):
        return drjax.reduce_sum(drjax.map_fn(insert, (drjax.broadcast(upper), x)))

    return sketch


def main(n=100_000, alpha=0.01):
    x = np.random.default_rng(0).lognormal(1, 1.5, n).astype(np.float32)
    upper = bounds(alpha, 1e-3, 1e4)
    B = np.asarray(drjax.jit(make_sketch(n), groups_per_step=1000)(upper, x))
    print(f"{n:,} values, {len(B):,} counters, relative error at most {alpha:.0%}")
    print("quantile  sketch   exact  relative error")
    for q in 0.5, 0.9, 0.99, 0.999:
        estimate, exact = (
            quantile(B, upper, alpha, q),
            np.quantile(x, q, method="lower"),
        )
        error = abs(estimate / exact - 1)
        print(f"{q:8.1%} {estimate:7.2f} {exact:7.2f} {error:15.2%}")


if __name__ == "__main__":
    main()
