"""A server whose state is sharded over the groups' devices (ZeRO).

    python -m examples.reproductions.sharded_server

The server's state is the model and the moments of Adam: three numbers for each
parameter, which do not depend on the group. In data parallelism every device keeps all
of them, and all do the same step. ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054,
sections 5 and 7) gives each of m devices a part of the state. In a step

    every worker, in parallel: g_i = gradient of its own batch's loss at the model
    reduce-scatter: device j gets part j of the mean of all g_i
    device j: Adam's step for part j of the model, with part j of the moments
    all-gather: every device gets all parts of the new model

An all-reduce is a reduce-scatter and an all-gather, so that the devices exchange as
many bytes as before. Stage 1 divides the optimizer's state and stage 2 also the mean
of the gradients, as this does. The model that the server keeps is divided as well (the
paper's 32-bit master copy); the workers have the whole model for the time of a step.

The program differs in one argument: `result="sharded"` of the mean. The optimizer works
on what it is given, and `broadcast` of a sharded model is the all-gather.

The model is a small transformer on modules of Python's standard library that the
repository has. Bytes and collectives are those of the compiled program.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from drjax.compiled import Report
from examples.algorithms import sharded_server
from examples.algorithms.sharded_server import init_server
from examples.common import results, text
from examples.common.devices import make_mesh
from examples.common.transformer import Transformer, TransformerConfig, mean_loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Train with a replicated and with a sharded server, and count bytes."""

    output: Path = Path("runs/sharded_server")
    """Folder of the table and the figure."""
    model: TransformerConfig = TransformerConfig()
    """Size of the model."""
    workers: int = 16
    """Workers; each has a batch of its own."""
    steps: int = 60
    """Steps of Adam."""
    batch: int = 2
    """Windows of text in a worker's batch."""
    length: int = 64
    """Bytes predicted in a window."""
    rate: float = 3e-3
    """Rate of Adam."""
    devices: int = 8
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Workers of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the initial model and of the batches."""


def make_loss(config: Config):
    """The loss of a batch of windows, and initial parameters, by flax nnx."""
    graph, params = nnx.split(Transformer(config.model, nnx.Rngs(config.seed)))

    def loss(params, tokens):
        lengths = jnp.full(tokens.shape[:-1], config.length)
        return mean_loss(nnx.merge(graph, params), tokens, lengths)[0]

    return loss, nnx.to_pure_dict(params)


def draw_batches(config: Config) -> np.ndarray:
    """Windows of the training modules' text: `[steps, workers, batch, length + 1]`."""
    source = np.concatenate([m.text for m in text.load_stdlib().train])
    shape = config.steps, config.workers, config.batch, 1
    random = np.random.default_rng(config.seed)
    starts = random.integers(0, len(source) - config.length, shape)
    return source[starts + np.arange(config.length + 1)]


def bytes_per_device(state) -> int:
    """Bytes of arrays on the first device of each."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


def results_of(report: Report, kind: str) -> int:
    """Bytes of the results of the collectives of a kind on one device."""
    return sum(c.result_bytes for c in report.collectives if c.kind == kind)


def train(config: Config, loss, params, batches, result, progress):
    """Losses, bytes of the state on each device, and the report of a step."""
    optimizer = optax.adam(config.rate)
    state = init_server(config.workers, params, optimizer, result)
    step = drjax.jit(
        sharded_server.make_step(config.workers, loss, optimizer, result),
        groups_per_step=config.groups_per_step,
        donate_argnums=(0, 1),
    )
    compiled = step.lower(*state, batches[0]).compile()
    losses = []
    for batch in batches:
        *state, value = compiled(*state, batch)
        losses.append(float(value))
        progress.update()
    size = bytes_per_device(state)
    return losses, size, Report.of(compiled)


def train_alone(config: Config, loss, params, batches, progress) -> list[float]:
    """Losses of the same on one device, by JAX and optax alone."""
    optimizer = optax.adam(config.rate)

    @jax.jit
    def step(params, moments, batch):
        mean = lambda params: jax.vmap(loss, (None, 0))(params, batch).mean()
        value, grads = jax.value_and_grad(mean)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    state, losses = (params, optimizer.init(params)), []
    for batch in batches:
        *state, value = step(*state, batch)
        losses.append(float(value))
        progress.update()
    return losses


def measure_state(config: Config, params) -> dict[str, dict[int, int]]:
    """Bytes of the state on each of 1, 2, 4, ... devices, replicated and sharded."""
    sizes = {"replicated": {}, "sharded": {}}
    for m in [2**i for i in range(config.devices.bit_length())]:
        for name, result in RESULTS.items():
            with jax.set_mesh(make_mesh(m, "workers")):
                state = init_server(
                    config.workers, params, optax.adam(config.rate), result
                )
            sizes[name][m] = bytes_per_device(state)
    return sizes


def draw(sizes, curves) -> Figure:
    """Bytes of the state by devices, and the losses."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, by_devices), marker in zip(sizes.items(), "os", strict=True):
        devices, kilobytes = zip(*by_devices.items(), strict=True)
        left.plot(devices, np.array(kilobytes) / 1e3, marker=marker, label=name)
    left.set(xscale="log", yscale="log", xlabel="devices", ylim=(100, None))
    left.set(ylabel="kB per device", title="The server's state")
    left.set_xticks(devices, [*map(str, devices)])
    left.minorticks_off()
    for (name, losses), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        right.plot(losses, style, label=name, linewidth=2)
    right.set(xlabel="step", ylabel="loss (nats per byte)", title="Training")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


RESULTS = {"replicated": None, "sharded": "sharded"}
KINDS = "all-reduce", "reduce-scatter", "all-gather"
REMARKS = (
    "Collectives of a step: how many there are, one for each array of the model, and "
    "the bytes of their results on one device. If the state is one vector "
    "(ravel_pytree), it is one of each kind. Four bytes are the loss.",
    "Sent in rings: (m - 1) / m of the bytes for a reduce-scatter or an all-gather, "
    "and twice that for an all-reduce.",
    "All numbers have 32 bits. The paper's table is for 16-bit models and gradients "
    "with a 32-bit copy in the state (K = 12 bytes for each parameter).",
)


def main(config: Config) -> results.Results:
    """Trains in each way, and compares bytes and losses."""
    mesh = make_mesh(config.devices, "workers")
    m = mesh.size
    loss, params = make_loss(config)
    vector, unravel = ravel_pytree(params)
    vector_loss = lambda vector, batch: loss(unravel(vector), batch)
    batches, count = draw_batches(config), vector.size
    runs: dict[str, Any] = {
        name: (loss, params, result) for name, result in RESULTS.items()
    }
    # The devices divide the vector, else it would be replicated.
    padded = jnp.pad(vector, (0, -count % m))
    runs["sharded, one vector"] = (
        lambda x, batch: vector_loss(x[:count], batch),
        padded,
        "sharded",
    )
    table, curves, progress = [], {}, tqdm(total=4 * config.steps, unit="step")
    for name, (objective, start, result) in runs.items():
        with jax.set_mesh(mesh):
            losses, size, report = train(
                config, objective, start, batches, result, progress
            )
        curves[name] = losses
        # Three numbers of four bytes for each parameter, and Adam's count.
        exact = 12 * count / (m if result else 1) + 4
        counted = report.by_kind
        shown = [
            f"{counted[kind].count} {kind} of {results_of(report, kind):,}"
            for kind in KINDS
            if kind in counted
        ]
        sent = f"{report.total.bytes:,}"
        cells = f"{size:,}", f"{exact:,.0f}", "; ".join(shown), sent
        table.append([name, *cells, f"{losses[-1]:.4f}"])
    curves["one device"] = train_alone(config, loss, params, batches, progress)
    progress.close()
    last = f"{curves['one device'][-1]:.4f}"
    table.append(["one device, JAX alone", *[""] * 4, last])
    far = max(
        np.abs(np.subtract(x, curves["one device"])).max() for x in curves.values()
    )
    exactly = all(line[1] == line[2] and line[4] == table[0][4] for line in table[:3])
    result = results.Results(
        title=f"The server's state of {count:,} parameters on {m} devices",
        columns=[
            "",
            "bytes per device",
            "12 P / m + 4",
            "collectives, bytes",
            "sent",
            "last loss",
        ],
        table=table,
        measured=f"State of each of {m} devices: {table[0][1]} replicated, "
        f"{table[1][1]} sharded, in bytes; it sends {table[0][4]} and {table[1][4]} in "
        f"a step, and losses differ by {far:.0e} at most.",
        badge="exact" if exactly and far < 1e-5 else None,
        paper="12 P / m bytes for P parameters in 32 bits and Adam, and no more "
        "communication than data parallelism (Rajbhandari et al. 2020, sections 5 and "
        "7).",
        numbers=curves,
        remarks=[
            *REMARKS,
            f"The text, {text.STDLIB.name}, has SHA-256 {text.sha256()}.",
        ],
    )
    some = {x: curves[x] for x in ("replicated", "sharded", "one device")}
    result.write(config.output, config, draw(measure_state(config, params), some))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
