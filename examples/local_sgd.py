"""Local SGD on real text: a small language model and the standard library's source.

Each round draws some of the library's top-level modules, one per group. Every group
starts from the global parameters and takes local AdamW steps on its own text; the
groups' updates, weighted by how many bytes each really trained on, are averaged and
given to an outer Nesterov optimizer. This is DiLoCo (Douillard et al. 2023, arXiv
2311.08105, algorithm 1) with groups sampled in each round, as in federated
averaging (McMahan et al. 2017, arXiv 1602.05629, algorithm 1), and the local SGD of
Rush et al. 2024 (arXiv 2403.07128).

    python -m examples.local_sgd

The held-out loss must end below that of a bigram model fitted on the same text.
`--resume` continues from the latest checkpoint bit-exactly, because the text of a
round depends on nothing but the seed and the round's number.
"""

import dataclasses
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro  # The flags, their types and their help come from the dataclass below.
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

import drjax
from examples.common import report, text
from examples.common.checkpoint import Checkpoints
from examples.common.devices import make_mesh
from examples.common.transformer import Transformer, TransformerConfig, mean_loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a byte-level transformer by local SGD on the standard library's source."""

    output: Path = Path("runs/local_sgd")
    """Folder of the checkpoints, the report and the plots."""
    resume: bool = False
    """Continue from the latest checkpoint there; a fresh run removes them."""
    model: TransformerConfig = TransformerConfig()
    """Size of the model."""
    rounds: int = 40
    """Rounds of communication."""
    groups: int = 16
    """Groups in a round: modules drawn from all training modules."""
    steps: int = 32
    """Local steps of a group in a round."""
    batch: int = 2
    """Windows in a local step."""
    length: int = 128
    """Bytes predicted in a window."""
    inner_lr: float = 5e-3
    """Peak learning rate of the local AdamW; warm-up and cosine decay over rounds."""
    outer_lr: float = 1.0
    """Learning rate of the outer Nesterov optimizer."""
    outer_momentum: float = 0.8
    """Momentum of the outer optimizer."""
    seed: int = 0
    """Seed of the initial parameters and of all sampling."""
    eval_windows: int = 16
    """Windows of each held-out module to evaluate on, at most."""
    save_every: int = 5
    """Rounds between evaluations on held-out modules, each with a checkpoint."""
    devices: int = 8
    """Devices; virtual ones on a CPU."""


class State(NamedTuple):
    """All that a round changes."""

    params: optax.Params
    outer: optax.OptState


class Metrics(NamedTuple):
    """What a round reports. The last two are partitioned: one slice per group."""

    loss: Array
    group_loss: Array
    embedding_update: Array


def make_programs(graphdef: nnx.GraphDef, config: Config, held_out: int):
    """Makes the outer optimizer, the program of a round and that of an evaluation."""
    peak = config.inner_lr
    schedule = optax.warmup_cosine_decay_schedule(
        peak / 3, peak, min(3, config.rounds - 1), config.rounds, peak / 20
    )
    outer = optax.sgd(config.outer_lr, config.outer_momentum, nesterov=True)

    def group_loss(params, windows):
        return mean_loss(nnx.merge(graphdef, params), *windows)

    def local_steps(params, round_number, windows):
        """One group's work: its update, its mean loss and its number of targets."""
        rate = jnp.asarray(schedule(round_number))
        adamw = optax.adamw(rate, b2=0.99, weight_decay=0.01)
        inner = optax.chain(optax.clip_by_global_norm(1.0), adamw)

        def step(carry, windows):
            local, moments = carry
            value_and_grad = jax.value_and_grad(group_loss, has_aux=True)
            (loss, targets), grads = value_and_grad(local, windows)
            updates, new_moments = inner.update(grads, moments, local)
            new = optax.apply_updates(local, updates), new_moments
            # A module that has run out of text takes no further steps.
            keep = lambda new, old: jnp.where(targets > 0, new, old)
            return jax.tree.map(keep, new, carry), (loss, targets)

        carry = params, inner.init(params)
        (local, _), (loss, targets) = jax.lax.scan(step, carry, windows)
        update = jax.tree.map(jnp.subtract, params, local)
        return update, loss @ targets / targets.sum(), targets.sum()

    @drjax.program(groups=config.groups)
    def train_round(state: State, round_number, windows) -> tuple[State, Metrics]:
        start = drjax.broadcast((state.params, round_number))
        updates, losses, weights = drjax.map_fn(local_steps, (*start, windows))
        update, loss = drjax.reduce_weighted_mean((updates, losses), weights)
        step, moments = outer.update(update, state.outer, state.params)
        params = optax.apply_updates(state.params, step)
        metrics = Metrics(loss, losses, updates["embed"]["embedding"][...])
        return State(params, moments), metrics

    @drjax.program(groups=held_out)
    def evaluate(params, windows) -> tuple[Array, Array]:
        losses, weights = drjax.map_fn(group_loss, (drjax.broadcast(params), windows))
        return drjax.reduce_weighted_mean(losses, weights), losses

    return outer, train_round, evaluate


def train(config: Config) -> None:
    """Runs the rounds that are still to do, then writes the report and the plots."""
    mesh = make_mesh(config.devices, "groups")
    corpus = text.load_stdlib()
    graphdef, params = nnx.split(Transformer(config.model, nnx.Rngs(config.seed)))
    outer, train_round, evaluate = make_programs(graphdef, config, len(corpus.held_out))
    train_step, eval_step = jax.jit(train_round), jax.jit(evaluate)
    state = State(params, outer.init(params))
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    settings = dataclasses.asdict(config)
    folder, resume = settings.pop("output"), settings.pop("resume")
    checkpoints = Checkpoints(folder / "checkpoints", settings, keep=resume)
    state, history = checkpoints.restore(state)
    held_out = text.cut_all(corpus.held_out, config.eval_windows, config.length)

    def run_round(state: State, number: int) -> tuple[list[str], State, Metrics]:
        shape = (config.groups, config.steps, config.batch, config.length)
        cohort, windows = text.sample_round(corpus.train, (config.seed, number), *shape)
        windows = drjax.shard(windows, partition=train_round)
        names = [corpus.train[i].name for i in cohort]
        return names, *train_step(state, jnp.asarray(number), windows)

    with jax.set_mesh(mesh):
        eval_windows = drjax.shard(held_out, partition=evaluate)
        todo = range(len(history), config.rounds)
        progress = tqdm(todo, "rounds", config.rounds, initial=len(history))
        for number in progress:
            began, done = time.perf_counter(), number + 1
            names, state, metrics = run_round(state, number)
            losses = np.asarray(metrics.group_loss).tolist()
            entry = {"round": done, "loss": float(metrics.loss)}
            entry |= {"groups": names, "group_losses": losses}
            history.append(entry)
            if due := done % config.save_every == 0 or done == config.rounds:
                entry["held_out"] = float(eval_step(state.params, eval_windows)[0])
                progress.set_postfix(held_out=f"{entry['held_out']:.3f}")
            entry["seconds"] = time.perf_counter() - began
            if due:
                checkpoints.save(done, state, history)
        checkpoints.close()
        _, module_losses = eval_step(state.params, eval_windows)
        # What the groups of one more round would send, for the picture.
        names, _, metrics = run_round(state, config.rounds)
    report.write(
        folder,
        settings=settings,
        corpus=corpus,
        held_out=held_out,
        history=history,
        params=state.params,
        losses=np.asarray(module_losses),
        partitioned=metrics.embedding_update,
        groups=names,
    )


if __name__ == "__main__":
    train(tyro.cli(Config))
