"""Evolution strategies: workers that exchange returns, and no gradients or models.

    python -m examples.reproductions.evolution

An estimate of a gradient from returns alone, for a policy that need not be
differentiable (Salimans et al. 2017, arXiv 1703.03864, algorithm 2). All workers know
each other's random seeds. In a round

    each worker i, in parallel:
        e_i = standard normal noise, by the key of the round and i
        F_i = the return of an episode of the policy with parameters w + sigma e_i
        send F_i, a number, to all other workers
    all workers:
        make e_1, ..., e_n again, by their keys
        w = w + step of the optimizer for  1 / (n sigma) sum_i F_i e_i

With the improvements of the paper's section 2.1: noise in pairs, e_i and -e_i
(mirrored sampling), so a worker has two returns; and ranks in place of
returns (fitness shaping). Adam is the optimizer.

The task is Gymnasium's CartPole-v1 (Barto, Sutton and Anderson 1983, with the
equations of Florian 2007): a pole on a cart stays up for at most 500 steps, and the
task counts as solved at a mean return of 475.

The ledger counts what is communicated. A round has one all-gather, of 8 bytes for each
worker whatever the size of the model. If the workers sent what they add to the
gradient, it would be all-reduces of the size of the model: the same sum, for the same
noise.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from examples.common import results
from examples.common.devices import make_mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """Balance a pole by evolution strategies, with policies of several sizes."""

    output: Path = Path("runs/evolution")
    """Folder of the table and the figure."""
    rounds: int = 20
    """Rounds."""
    workers: int = 64
    """Workers (n); each has a pair of episodes in a round."""
    widths: tuple[int, ...] = (8, 32, 128)
    """Widths of the two hidden layers of the policies."""
    sigma: float = 0.1
    """Standard deviation of the noise in the parameters."""
    rate: float = 0.02
    """Rate of Adam."""
    episodes: int = 100
    """Episodes to test the policy, without noise, after each round."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Workers of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the initial policy, the noise and the episodes."""


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


def make_episode(graph):
    """The return of a policy: the steps until the cart or the pole is out of bounds."""

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

    return episode


# --8<-- [start:algorithm]
def make_noise(params, key, index):
    key = jax.random.fold_in(key, index)
    return optax.tree.random_like(key, params, jax.random.normal)


def shape_returns(returns):
    """Ranks of the returns in [-1/2, 1/2], equal ones for equal returns."""
    flat = returns.ravel()
    ranks = jnp.sign(flat[:, None] - flat).mean(1) / 2
    return ranks.reshape(returns.shape)


def make_round(
    episode: Callable, optimizer: optax.GradientTransformation, config: Config
):
    @drjax.program(workers=config.workers)
    def evolve(params, state, key):
        noise_key, episode_key = jax.random.split(key)

        def evaluate(params, noise_key, episode_key):
            index = drjax.partition_index()
            noise = make_noise(params, noise_key, index)
            key = jax.random.fold_in(episode_key, index)
            pair = config.sigma, -config.sigma
            moved = [optax.tree.add_scale(params, sigma, noise) for sigma in pair]
            return jnp.stack([episode(x, key) for x in moved])

        args = drjax.broadcast((params, noise_key, episode_key))
        returns = drjax.gather(drjax.map_fn(evaluate, args))  # [workers, 2]
        ranks = shape_returns(returns)

        def add(total, index):
            noise = make_noise(params, noise_key, index)
            return optax.tree.add_scale(
                total, ranks[index, 0] - ranks[index, 1], noise
            ), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, jnp.arange(config.workers))
        gradient = optax.tree.scale(-1 / (2 * config.workers * config.sigma), total)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, returns

    return evolve


# --8<-- [end:algorithm]
def make_all_reduce(config: Config):
    """The same gradient, if workers sent what they add to it: the sum of models."""

    @drjax.program(workers=config.workers)
    def gradient(params, ranks, noise_key):
        def share(params, ranks, key):
            noise = make_noise(params, key, drjax.partition_index())
            return optax.tree.scale(ranks[0] - ranks[1], noise)

        params, key = drjax.broadcast((params, noise_key))
        return drjax.reduce_mean(drjax.map_fn(share, (params, ranks, key)))

    return gradient


def count_bytes(config: Config, evolve, args) -> tuple[int, int]:
    """Bytes that a worker sends in a round: returns, and instead a gradient."""
    params, _, key = args
    returns = drjax.make_plan(evolve)(*args).communication().up()
    ranks = jnp.zeros((config.workers, 2))
    plan = drjax.make_plan(make_all_reduce(config))(params, ranks, key)
    return returns, plan.communication().up()


def train(config: Config, width: int):
    """Mean returns after each round, the last parameters, and bytes of a round."""
    graph, params = nnx.split(Policy(width, nnx.Rngs(config.seed)))
    episode, optimizer = make_episode(graph), optax.adam(config.rate)
    evolve = make_round(episode, optimizer, config)
    root = jax.random.key(config.seed)
    state = optimizer.init(params)
    sent = count_bytes(config, evolve, (params, state, root))

    def step(params, state, key):
        params, state, returns = evolve(params, state, jax.random.fold_in(key, 0))
        keys = jax.random.split(jax.random.fold_in(key, 1), config.episodes)
        tests = jax.vmap(episode, in_axes=(None, 0))(params, keys)
        return params, state, returns.mean(), tests.mean()

    step = drjax.jit(step, groups_per_step=config.groups_per_step)
    scores, noisy = [], []
    for number in range(config.rounds):
        args = params, state, jax.random.fold_in(root, number)
        params, state, *both = jax.block_until_ready(step(*args))
        noisy.append(float(both[0]))
        scores.append(float(both[1]))
    return scores, noisy, params, sent


def draw(curves, sizes, sent) -> Figure:
    """Returns by round, and bytes by the size of the policy."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, scores in curves.items():
        left.plot(np.arange(1, len(scores) + 1), scores, label=name)
    left.axhline(SOLVED, color="0.35", linestyle="--", linewidth=1)
    left.set(xlabel="round", ylabel="steps until the pole falls", ylim=(0, 520))
    left.legend()
    returns, gradients = np.array(sent).T
    right.plot(sizes, gradients, "o-", color="0.5", label="a gradient")
    right.plot(sizes, returns, "o-", color="tab:red", label="returns")
    right.set(xlabel="parameters", ylabel="bytes of a worker in a round")
    right.set(xscale="log", yscale="log", ylim=(1, 2 * gradients.max()))
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def main(config: Config) -> results.Results:
    """Trains a policy of each width, and counts rounds and bytes."""
    mesh = make_mesh(config.devices, "workers")
    table, curves, numbers, sizes, sent = [], {}, {}, [], []
    for width in tqdm(config.widths, unit="policy"):
        with jax.set_mesh(mesh):
            scores, noisy, params, nbytes = train(config, width)
        sizes.append(sum(x.size for x in jax.tree.leaves(params)))
        sent.append(nbytes)
        name = f"{sizes[-1]:,} parameters"
        curves[name] = scores
        numbers[f"{name}, mean return with noise"] = noisy
        numbers[f"{name}, parameters"] = [float(optax.tree.norm(params))]
        solved = next((i for i, x in enumerate(scores, 1) if x >= SOLVED), "never")
        shown = f"{nbytes[0]:,}", f"{nbytes[1]:,}"
        table.append([name, solved, f"{scores[-1]:.0f}", *shown])
    rounds = ", ".join(str(line[1]) for line in table)
    episodes = 2 * config.workers
    result = results.Results(
        title=f"CartPole-v1 with {episodes} episodes in a round",
        columns=["", "rounds to 475", "last return", "bytes sent", "of a gradient"],
        table=table,
        measured=f"Solved in {rounds} rounds of {episodes} episodes; a worker sends "
        f"{table[-1][3]} bytes in a round, where a gradient has {table[-1][4]}.",
        paper="Solved: a mean return of 475 over 100 episodes, of at most 500 (Gym"
        "nasium 1.4.0). The paper has no numbers on this task.",
        numbers=numbers,
        remarks=[
            f"Returns are means of {config.episodes} episodes without noise.",
            "Bytes are those that the plan's ledger has up. On a mesh, each device has "
            "the parameters and updates them, so nothing else is communicated; an "
            "engine sends them down in each round.",
        ],
    )
    result.write(config.output, config, draw(curves, sizes, sent))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
