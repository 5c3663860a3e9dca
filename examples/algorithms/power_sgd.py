"""PowerSGD: gradients of low rank, by one step of power iteration from the last ones.

Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2, without momentum. It has two
rounds of communication, because P is averaged before the workers compute Q. What a
worker remembers is what its own Q leaves out, not the mean Q.

python -m examples.algorithms.power_sgd
"""

import jax
import jax.numpy as jnp
import optax

import drjax
from examples.algorithms import compression


def decompress(P_hat, Q):
    return jax.tree.map(lambda P, Q: P @ Q.T, P_hat, Q)


def make_step(gradient, W, gamma, feedback=True):
    @drjax.program(workers=W)
    def step(x, memory, examples):
        e, Q = memory

        def project(x, e_w, Q, examples):
            M = optax.tree.add(gradient(x, examples), e_w)
            return M, jax.tree.map(jnp.matmul, M, Q)

        args = drjax.broadcast(x), e, drjax.broadcast(Q), examples
        M, P = drjax.map_fn(project, args)
        orthogonalize = lambda P: jnp.linalg.qr(P)[0]
        P_hat = jax.tree.map(orthogonalize, drjax.reduce_mean(P))

        def factor(M, P_hat, e_w):
            Q = jax.tree.map(lambda M, P: M.T @ P, M, P_hat)
            sent = decompress(P_hat, Q)
            return Q, optax.tree.sub(M, sent) if feedback else e_w

        Q, e = drjax.map_fn(factor, (M, drjax.broadcast(P_hat), e))
        Q = drjax.reduce_mean(Q)
        return optax.tree.add_scale(x, -gamma, decompress(P_hat, Q)), (e, Q)

    return step


def start(x, W, rank=2):
    """No errors, and a random Q of each matrix."""
    Q = lambda leaf: jax.random.normal(jax.random.key(1), (leaf.shape[1], rank))
    return compression.no_error(x, W), jax.tree.map(Q, x)


if __name__ == "__main__":
    make = lambda feedback: make_step(jax.grad(compression.loss), 8, 0.3, feedback)
    names = {"PowerSGD, rank 2": True, "without feedback": False}
    compression.main({name: (make(x), start) for name, x in names.items()})
