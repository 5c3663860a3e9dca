"""FedOpt (Reddi et al. 2021, arXiv 2003.00295, algorithm 1): a server optimizer.

python -m examples.algorithms.fedopt

Optax's Adam corrects the bias of its moments, which start at 0; the paper's FedAdam
does not, and starts at v = tau^2. Delta is the mean over examples, as in its
experiments.
"""

import jax
import optax

from examples.algorithms import fedavg
from examples.common import digits


def make_round(client_update, m, server_opt):
    average = fedavg.make_round(client_update, m)

    def train_round(x, state, *cohort):
        """The server optimizer takes -delta, the clients' mean change, as gradient."""
        delta = optax.tree.sub(average(x, *cohort), x)
        step, state = server_opt.update(optax.tree.scale(-1, delta), state, x)
        return optax.apply_updates(x, step), state

    return train_round


def main():
    train, test = digits.load_mnist()
    client_update = fedavg.make_client_update(fedavg.loss, E=1, B=10, eta=0.1)
    adam = optax.adam(0.003, b1=0.9, b2=0.99, eps=1e-3)  # eps is the paper's tau
    train_round = jax.jit(make_round(client_update, 10, adam))
    x = fedavg.model.init(jax.random.key(0), test.x)
    state = adam.init(x)
    print("round  test accuracy")
    for t, *cohort in fedavg.cohorts(train, 10, rounds=40):
        x, state = train_round(x, state, *cohort)
        if t % 10 == 0:
            print(f"{t:5}  {fedavg.accuracy(x, test):.1%}")


if __name__ == "__main__":
    main()
