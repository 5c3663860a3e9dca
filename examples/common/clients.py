"""Clients with unequal data: padding and masks, sampling of cohorts, partitions.

A population of clients is a tree of arrays `[population, longest, ...]` with a mask
`[population, longest]`. A round works on a cohort of them: the group index is only a
place in the cohort, and what is random for a client follows from the seed, the round
and the client's own id.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

PyTree = Any


def pad(batches: Sequence[PyTree], multiple: int = 1) -> tuple[PyTree, np.ndarray]:
    """Stacks trees whose arrays have different lengths, with zeros behind the short.

    Args:
        batches: one tree for each client; the leaves of client i are `[n_i, ...]`.
        multiple: `longest` is rounded up to a multiple of it, for whole batches.

    Returns:
        The tree with leaves `[len(batches), longest, ...]`, and the mask
        `[len(batches), longest]`, true for real examples.
    """
    lengths = np.array([len(jax.tree.leaves(batch)[0]) for batch in batches])
    longest = -(-lengths.max() // multiple) * multiple

    def stack(*leaves):
        widths = [(0, longest - len(leaf)) for leaf in leaves]
        rest = [(0, 0)] * (leaves[0].ndim - 1)
        return np.stack(
            [np.pad(x, [w, *rest]) for x, w in zip(leaves, widths, strict=True)]
        )

    return jax.tree.map(stack, *batches), np.arange(longest) < lengths[:, None]


def cohort(key: Array, population: int, n: int) -> Array:
    """Draws n different clients of a population: ids, int32 `[n]`."""
    return jax.random.choice(key, population, (n,), replace=False)


def poisson_cohort(key: Array, population: int, rate: float, n: int):
    """Draws each client of a population independently with probability `rate`.

    The number of clients is random. They get the first of n places.

    Returns:
        ids, int32 `[n]`; the mask of the places that are taken, `[n]`; and whether all
        drawn clients got a place, which differential privacy depends on.
    """
    drawn = jax.random.bernoulli(key, rate, (population,))
    ids = jnp.argsort(~drawn, stable=True)[:n]
    return ids, drawn[ids], drawn.sum() <= n


def client_keys(key: Array, ids: Array) -> Array:
    """A key `[n]` for each client of a cohort, by the key of the round and its id."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)


def batches(key: Array, mask: Array, size: int) -> Array:
    """Draws the batches of an epoch: a client's examples in random order, then padding.

    Args:
        mask: which examples are not padding, `[longest]`.
        size: of a batch; it divides `longest`.

    Returns:
        The indices of the examples, int32 `[longest / size, size]`.
    """
    order = jnp.argsort(jnp.where(mask, jax.random.uniform(key, mask.shape), 2))
    return order.reshape(-1, size)


def split_iid(
    labels: np.ndarray, clients: int, seed: int, spread: float = 0.0
) -> list[np.ndarray]:
    """Deals examples to clients at random: for each client the indices of its own.

    Args:
        spread: standard deviation of the logarithm of the clients' sizes; with 0 they
            differ by one at most.
    """
    rng = np.random.default_rng(seed)
    return np.split(
        rng.permutation(len(labels)), _ends(len(labels), clients, spread, rng)
    )


def split_shards(
    labels: np.ndarray, clients: int, seed: int, spread: float = 0.0, shards: int = 2
) -> list[np.ndarray]:
    """Deals each client a few shards of the examples sorted by label.

    With two shards most clients have examples of two labels only (McMahan et al. 2017,
    arXiv 1602.05629, section 3).
    """
    rng = np.random.default_rng(seed)
    by_label = np.lexsort((rng.permutation(len(labels)), labels))
    parts = np.split(by_label, _ends(len(labels), clients * shards, spread, rng))
    dealt = rng.permutation(clients * shards).reshape(clients, shards)
    return [np.concatenate([parts[i] for i in mine]) for mine in dealt]


def _ends(total: int, parts: int, spread: float, rng: np.random.Generator):
    """Where all parts but the last end. Each has at least one example."""
    sizes = np.exp(spread * rng.standard_normal(parts))
    ends = np.cumsum(sizes) / sizes.sum() * (total - parts)
    return (np.round(ends).astype(int) + np.arange(1, parts + 1))[:-1]
