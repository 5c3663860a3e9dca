"""Balancing a pole on a cart: Gymnasium's CartPole-v1, in JAX.

Barto, Sutton and Anderson 1983, with the equations of Florian 2007.
"""

import jax
import jax.numpy as jnp
from flax import nnx

# Of CartPole-v1 in Gymnasium 1.4.0: the threshold, and the longest episode.
SOLVED, LONGEST = 475.0, 500


class Policy(nnx.Module):
    """Observations `[4]` to the score of a push to the right."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.second(nnx.tanh(self.first(x)))))[0]


def cart_pole(state, force):
    """The state after 0.02 s: position, velocity, angle and angular velocity."""
    _, velocity, angle, spin = state
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    push = (force + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    return state + 0.02 * jnp.stack(
        [velocity, push - 0.05 * turn * cos / 1.1, spin, turn]
    )


def make_policy(width: int, seed: int):
    """Initial parameters, and the return of an episode with parameters: F(theta, key).

    The return is the number of steps until the cart or the pole is out of bounds.
    """
    graph, params = nnx.split(Policy(width, nnx.Rngs(seed)))

    def episode(params, key):
        policy = nnx.merge(graph, params)

        def step(carry, _):
            state, up = carry
            state = cart_pole(state, jnp.where(policy(state) > 0, 10.0, -10.0))
            inside = (abs(state[0]) <= 2.4) & (abs(state[2]) <= jnp.deg2rad(12.0))
            return (state, up & inside), up

        start = (
            jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05),
            jnp.array(True),
        )
        return jax.lax.scan(step, start, length=LONGEST)[1].sum(dtype=jnp.float32)

    return params, episode
