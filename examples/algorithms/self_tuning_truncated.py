"""Self-tuning while the model trains: gradients through the last K rounds only.

Federated averaging that changes its hyperparameters every K rounds (Rush et al. 2023,
arXiv 2301.07806), by a scan over windows with a scan over rounds inside. `drjax.jit`
rematerializes what is in a loop inside a loop only where `jax.checkpoint` says so.

python -m examples.algorithms.self_tuning_truncated
"""

import jax

from examples.algorithms import self_tuning


def make_step(train_round, adam, K=4):
    step = self_tuning.make_step(jax.checkpoint(train_round), adam)

    def train(state, w, examples, server, keys):
        """A training of T rounds, keys `[T, n]`, with T / K steps of Adam for h."""

        def window(carry, keys):
            state, w = carry
            state, value, w = step(state, w, examples, server, keys)
            return (state, w), value

        windows = keys.reshape(-1, K, keys.shape[1])
        (state, w), values = jax.lax.scan(window, (state, w), windows)
        return state, values[-1], w

    return train


if __name__ == "__main__":
    self_tuning.main(make_step, "trainings")
