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
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from examples.algorithms import evolution
from examples.common import results
from examples.common.cart_pole import LONGEST, SOLVED, make_policy
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
    """First seed of the initial policy, the noise and the episodes."""
    seeds: int = 3
    """Trainings of each policy, of as many seeds."""


def make_all_reduce(config: Config):
    """The same gradient, if workers sent what they add to it: the sum of models."""

    @drjax.program(workers=config.workers)
    def gradient(params, ranks, noise_key):
        def share(params, ranks, key):
            noise = evolution.make_noise(params, key, drjax.partition_index())
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


def train(config: Config, width: int, seed: int):
    """Mean returns after each round, the last parameters, and bytes of a round."""
    (params, episode), optimizer = make_policy(width, seed), optax.adam(config.rate)
    evolve = evolution.make_round(episode, optimizer, config.workers, config.sigma)
    root = jax.random.key(seed)
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
    for i, (name, runs) in enumerate(curves.items()):
        x = np.arange(1, len(runs[0]) + 1)
        for scores in runs:
            left.plot(x, scores, color=f"C{i}", linewidth=0.7, alpha=0.5)
        left.plot(x, np.mean(runs, 0), color=f"C{i}", label=name)
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
    """Trains policies of each width, and counts rounds and bytes."""
    mesh = make_mesh(config.devices, "workers")
    table, curves, numbers, sizes, sent = [], {}, {}, [], []
    seeds, solved = range(config.seed, config.seed + config.seeds), {}
    for width in tqdm(config.widths, unit="policy"):
        with jax.set_mesh(mesh):
            runs = [train(config, width, seed) for seed in seeds]
        _, _, params, nbytes = runs[0]
        sizes.append(sum(x.size for x in jax.tree.leaves(params)))
        sent.append(nbytes)
        name = f"{sizes[-1]:,} parameters"
        curves[name] = [scores for scores, *_ in runs]
        solved[name] = [
            next((i for i, x in enumerate(scores, 1) if x >= SOLVED), None)
            for scores in curves[name]
        ]
        for seed, (_, noisy, params, _) in zip(seeds, runs, strict=True):
            numbers[f"{name}, mean return with noise, seed {seed}"] = noisy
            norm = float(optax.tree.norm(params))
            numbers[f"{name}, parameters, seed {seed}"] = [norm]
        rounds = ", ".join(str(x or "never") for x in solved[name])
        last = ", ".join(f"{scores[-1]:.0f}" for scores in curves[name])
        table.append([name, rounds, last, f"{nbytes[0]:,}", f"{nbytes[1]:,}"])
    episodes, all_rounds = 2 * config.workers, sum(solved.values(), [])
    done = [x for x in all_rounds if x]
    span = f" in {min(done)} to {max(done)} rounds" if done else ""
    result = results.Results(
        title=f"CartPole-v1 with {episodes} episodes in a round, {config.seeds} seeds",
        columns=["", "rounds to 475", "last returns", "bytes sent", "of a gradient"],
        table=table,
        measured=f"{len(done)} of {len(all_rounds)} policies solve it{span}; a worker "
        f"sends {table[-1][3]} bytes in a round, where a gradient has {table[-1][4]}.",
        paper=f"Solved: a mean return of {SOLVED:.0f} over 100 episodes, of at most "
        f"{LONGEST} (Gymnasium 1.4.0). The paper has no numbers on this task.",
        badge="no published number",
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
