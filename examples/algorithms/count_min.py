"""The count-min sketch, for heavy hitters (Cormode and Muthukrishnan 2005).

"An improved data stream summary: the count-min sketch and its applications", sections
3 and 4.1.

python -m examples.algorithms.count_min
"""

import jax
import jax.numpy as jnp
import numpy as np

import drjax


def draw_hashes(random, d):
    """d pairwise independent functions: their a and b, `[d]` (Dietzfelbinger 1996)."""
    draw = lambda: random.integers(0, 2**32, d, np.uint32)
    return draw(), draw()


def h(hashes, i, bits):
    """h_j(i) of each j, for an i below 2^(33 - bits): one of w = 2^bits counters."""
    a, b = hashes
    return (a * i + b) >> (32 - bits)


def update(hashes, i, bits):
    """Section 3, update procedure: 1 to count[j, h_j(i)] of each j."""
    return jax.nn.one_hot(h(hashes, i, bits), 2**bits, dtype=jnp.int32)


def estimate(count, hashes, items, bits):
    """Section 4.1, point query: the least of count[j, h_j(i)], for each of the items.

    Never below the number of i, and with probability 1 - exp(-d) at most e n / w above.
    """
    return count[np.arange(len(count)), h(hashes, items[:, None], bits)].min(1)


def make_sketch(n, bits):
    """The counters `[d, w]` of n items; sketches are merged by their sum."""

    @drjax.program(records=n)
    def sketch(hashes, items):
        one = lambda hashes, i: update(hashes, i, bits)
        return drjax.reduce_sum(drjax.map_fn(one, (drjax.broadcast(hashes), items)))

    return sketch


def main(n=100_000, d=4, bits=10, share=0.02):
    random = np.random.default_rng(0)
    items = random.zipf(1.2, 2 * n)
    items = items[items < 2**16][:n].astype(np.uint32)
    hashes = draw_hashes(random, d)
    count = drjax.jit(make_sketch(n, bits), groups_per_step=1000)(hashes, items)
    names = np.arange(2**16, dtype=np.uint32)
    estimates = estimate(np.asarray(count), hashes, names, bits)
    exact = np.bincount(items, minlength=2**16)
    bound, chance = np.e * n / 2**bits, np.exp(-d)
    print(f"Items with {share:.0%} of {n:,}. With probability {chance:.0%} at most,")
    print(f"an estimate is more than {bound:.0f} too high.")
    print("item  estimate    exact")
    for i in np.flatnonzero(estimates >= share * n):
        print(f"{i:4} {estimates[i]:9,} {exact[i]:8,}")


if __name__ == "__main__":
    main()
