"""FedProx (Li et al. 2020, arXiv 1812.06127, algorithm 2): FedAvg, near the server.

Sampling and weights are FedAvg's, as in the paper's experiments (section 5.1).

python -m examples.algorithms.fedprox
"""

import optax

from examples.algorithms import fedavg


def make_client_update(loss, mu, **sgd):
    def client_update(w_t, examples, mask, key):
        """SGD, for an inexact minimum of h(w) = loss(w) + mu / 2 |w - w_t|^2."""

        def h(w, batch, real):
            distance = optax.tree.norm(optax.tree.sub(w, w_t), squared=True)
            return loss(w, batch, real) + mu / 2 * distance

        return fedavg.make_client_update(h, **sgd)(w_t, examples, mask, key)

    return client_update


def main():
    for mu in 0.0, 0.1:
        print(f"mu = {mu}")
        fedavg.main(make_client_update(fedavg.loss, mu, E=5, B=10, eta=0.1))


if __name__ == "__main__":
    main()
