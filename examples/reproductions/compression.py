"""Compressed gradients with error feedback: top-k, signs, PowerSGD, and int8.

    python -m examples.reproductions.compression

Workers send an approximation of their gradient that has fewer bytes, and keep what they
left out for the next step. In a step

    the server sends the model w
    each worker i, in parallel:
        p_i = gradient of its loss at w, plus e_i
        c_i = compress(p_i)
        e_i = p_i - c_i
    w = w - step of the server's optimizer for the mean of the c_i

* **Top-k** (Stich et al. 2018, arXiv 1809.07599, algorithm 1) sends the largest numbers
  and their places, here one in a hundred.
* **Signs** (EF-signSGD; Karimireddy et al. 2019, arXiv 1901.09847, algorithm 2) sends
  one bit for each number, and their mean magnitude.
* **PowerSGD** (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2) sends the
  factors of a matrix of low rank: one step of power iteration from the last one's. It
  has two rounds of communication, because the first factor is averaged before the
  second is computed.
* **int8** is the library's `wire="int8"`: devices add what they exchange in 8 bits.

Without e_i, what is left out in one step is lost. The errors are partitioned values: a
program takes them and returns them, and they never leave their worker.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from examples.common import clients, digits, results
from examples.common.devices import make_mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare the loss by bytes of compressed and uncompressed gradients."""

    output: Path = Path("runs/compression")
    """Folder of the table and the figure."""
    steps: int = 200
    """Steps of each method."""
    workers: int = 8
    """Workers; each has digits of a few labels only."""
    width: int = 100
    """Width of the network's hidden layer."""
    rate: float = 0.3
    """Rate of the server's SGD."""
    only: str = ""
    """Run only the methods with this in their name."""
    devices: int = 8
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Workers of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the initial model and the partition."""


def loss(params, examples):
    """A network with one hidden layer; a one behind the inputs is for the biases."""
    hidden = jax.nn.relu(with_one(examples.x) @ params["hidden"])
    logits = with_one(hidden) @ params["output"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, examples.y).mean()


def with_one(x):
    return jnp.concatenate([x, jnp.ones((len(x), 1))], axis=1)


# --8<-- [start:algorithm]
def top_k(x, share=0.01):
    values = jnp.abs(x.ravel())
    smallest = jax.lax.top_k(values, max(1, int(share * x.size)))[0][-1]
    return jnp.where(jnp.abs(x) >= smallest, x, 0)


def sign(x):
    return jnp.abs(x).mean() * jnp.sign(x)


def compressed_mean(params, errors, memory, examples, compress, feedback, wire=None):
    def worker(params, error, examples):
        target = optax.tree.add(jax.grad(loss)(params, examples), error)
        sent = jax.tree.map(compress, target)
        error = optax.tree.sub(target, sent) if feedback else error
        return sent, error

    args = drjax.broadcast(params), errors, examples
    sent, errors = drjax.map_fn(worker, args)
    return drjax.reduce_mean(sent, wire=wire), errors, memory


def power_sgd_mean(params, errors, right, examples):
    def project(params, error, right, examples):
        target = optax.tree.add(jax.grad(loss)(params, examples), error)
        return target, jax.tree.map(jnp.matmul, target, right)

    args = drjax.broadcast(params), errors, drjax.broadcast(right), examples
    targets, left = drjax.map_fn(project, args)
    left = jax.tree.map(lambda p: jnp.linalg.qr(p)[0], drjax.reduce_mean(left))

    def factor(target, left):
        right = jax.tree.map(lambda m, p: m.T @ p, target, left)
        sent = jax.tree.map(lambda p, q: p @ q.T, left, right)
        return right, optax.tree.sub(target, sent)

    right, errors = drjax.map_fn(factor, (targets, drjax.broadcast(left)))
    right = drjax.reduce_mean(right)
    return jax.tree.map(lambda p, q: p @ q.T, left, right), errors, right


# --8<-- [end:algorithm]
def same(x):
    return x


RANK = 2
# By name: the function, its options, and the bytes of a matrix [m, n] from a worker.
METHODS = {
    "float32": (compressed_mean, (same, False), lambda m, n: 4 * m * n),
    "int8": (compressed_mean, (same, False, "int8"), lambda m, n: m * n),
    "top 1 %, feedback": (compressed_mean, (top_k, True), lambda m, n: 0.08 * m * n),
    "top 1 %, none": (compressed_mean, (top_k, False), lambda m, n: 0.08 * m * n),
    "sign, feedback": (compressed_mean, (sign, True), lambda m, n: m * n / 8 + 4),
    "sign, none": (compressed_mean, (sign, False), lambda m, n: m * n / 8 + 4),
    "PowerSGD, rank 2": (power_sgd_mean, (), lambda m, n: 4 * RANK * (m + n)),
}
PANELS = "top 1 %", "sign", "PowerSGD"  # of the figure
REMARKS = (
    "The paper trains a ResNet-18 on CIFAR-10: the ratio of the bytes depends on the "
    "shapes of the matrices, and cannot be the same here.",
    "One run of each, with one rate for all: a percent more or less means nothing. Two "
    "methods without feedback show what it is for. Bytes are what a worker sends.",
    "int8 is exchanged between devices, so its last digits depend on their number. Its "
    "losses are about those of float32, for a quarter of the bytes: it is not drawn.",
)


def make_step(config: Config, mean, options, held_out):
    """A compiled step from (params, optimizer state, errors, memory)."""
    server = optax.sgd(config.rate)
    mean = drjax.program(workers=config.workers)(mean)

    def step(state, examples):
        params, moments, errors, memory = state
        update, errors, memory = mean(params, errors, memory, examples, *options)
        update, moments = server.update(update, moments)
        params = optax.apply_updates(params, update)
        return (params, moments, errors, memory), loss(params, held_out)

    def start(key):
        keys = jax.random.split(key, 3)
        shapes = {"hidden": (785, config.width), "output": (config.width + 1, 10)}
        normal = jax.nn.initializers.he_normal()
        params = {k: normal(keys[i], s) for i, (k, s) in enumerate(shapes.items())}
        # A first guess of the right factors of PowerSGD.
        memory = jax.tree.map(lambda x: normal(keys[2], (x.shape[1], RANK)), params)
        errors = jax.tree.map(lambda x: jnp.zeros((config.workers, *x.shape)), params)
        return params, server.init(params), errors, memory

    return start, drjax.jit(step, groups_per_step=config.groups_per_step)


def draw(numbers: Mapping[str, Sequence[float]], costs: Mapping[str, float]) -> Figure:
    """A panel for each compression, with the losses of float32, by bytes."""
    curves, scale = {}, {}
    panels = [x for x in PANELS if any(name.startswith(x) for name in numbers)]
    for panel in panels:
        for name in numbers:
            if name == "float32" or name.startswith(panel):
                label = f"{panel}: {name.removeprefix(panel).lstrip(', ')}"
                curves[label], scale[label] = numbers[name], costs[name]
    figure = results.lines(
        curves,
        panels,
        scale=scale,
        xlabel="bytes that a worker sent",
        ylabel="held-out loss",
        log="xy",
    )
    for ax in figure.axes:
        if legend := ax.get_legend():
            legend.set_loc("lower left")
            ax.set_ylim(bottom=0.1)  # room for it
    return figure


def main(config: Config) -> results.Results:
    """Trains by each method, and shows loss and bytes."""
    mesh = make_mesh(config.devices, "workers")
    train, held_out = digits.load_mnist()
    parts = clients.split_shards(train.y, config.workers, config.seed)
    size = min(map(len, parts))
    examples = jax.tree.map(lambda x: np.stack([x[i[:size]] for i in parts]), train)
    curves, costs, table = {}, {}, []
    methods = {name: x for name, x in METHODS.items() if config.only in name}
    for name, (mean, options, count_bytes) in tqdm(methods.items(), unit="method"):
        start, step = make_step(config, mean, options, held_out)
        with jax.set_mesh(mesh):
            state, losses = start(jax.random.key(config.seed)), []
            for _ in range(config.steps):
                state, score = jax.block_until_ready(step(state, examples))
                losses.append(score)
        curves[name] = np.array(losses).tolist()
        params = state[0]
        right = jax.nn.relu(with_one(held_out.x) @ params["hidden"])
        right = (with_one(right) @ params["output"]).argmax(-1) == held_out.y
        sizes = [x.shape for x in params.values()]
        sent, full = (
            sum(f(*x) for x in sizes) for f in (count_bytes, lambda m, n: 4 * m * n)
        )
        costs[name] = sent
        cells = f"{curves[name][-1]:.3f}", f"{right.mean():.1%}"
        table.append([name, f"{sent:,.0f}", f"{full / sent:.1f}", *cells])
    best = {line[0]: line for line in table}.get("PowerSGD, rank 2", table[0])
    result = results.Results(
        title=f"Held-out digits after {config.steps} steps of {config.workers} workers",
        columns=["", "bytes of a step", "times fewer", "loss", "accuracy"],
        table=table,
        measured=f"{best[0]} sends {best[2]} times fewer bytes than float32; "
        f"{best[4]} of the digits are right instead of {table[0][4]}.",
        paper="PowerSGD of rank 2: 136 times fewer bytes, 94.4 % instead of 94.3 % "
        f"(Vogels et al. 2019, ResNet-18 on CIFAR-10) {results.UNCHECKED}.",
        numbers={name: x for name, x in curves.items() if name != "int8"},
        remarks=REMARKS,
    )
    result.write(config.output, config, draw(result.numbers, costs))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
