"""k-means by Lloyd's algorithm (Lloyd 1982), on clients that keep their points.

"Least squares quantization in PCM", IEEE Transactions on Information Theory.

python -m examples.algorithms.kmeans
"""

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.cluster
import sklearn.datasets

import drjax
from examples.common import clients


def step(centers, x, mask):
    """A client sends, for each center, the sum and the number of its nearest points."""

    def sums(centers, x, mask):
        distances = ((x[:, None] - centers) ** 2).sum(-1)
        nearest = jax.nn.one_hot(distances.argmin(1), len(centers)) * mask[:, None]
        return nearest.T @ x, nearest.sum(0)

    args = drjax.broadcast(centers), x, mask
    total, count = drjax.reduce_sum(drjax.map_fn(sums, args))
    means = total / jnp.maximum(count, 1)[:, None]
    return jnp.where(count[:, None] > 0, means, centers)  # no points: it stays


def main(n=10, k=10):
    x = np.asarray(sklearn.datasets.load_digits(return_X_y=True)[0]) / 16
    centers = x[:k]
    options: dict = {"init": centers, "tol": 0, "max_iter": 1000}
    expected = sklearn.cluster.KMeans(k, **options).fit(x).cluster_centers_
    parts = clients.split_iid(x, n, seed=0, spread=0.5)
    x, mask = clients.pad([x[part] for part in parts])

    lloyd_step = drjax.jit(drjax.program(clients=n)(step))
    print("round  largest difference from scikit-learn's centers")
    for t in range(1, 21):
        centers = lloyd_step(centers, x, mask)
        if t % 4 == 0:
            print(f"{t:5}  {np.abs(centers - expected).max():.1e}")


if __name__ == "__main__":
    main()
