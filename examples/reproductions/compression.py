"""Compressed gradients with error feedback: top-k, signs, PowerSGD, and int8.

    python -m examples.reproductions.compression

Workers send an approximation of their gradient that has fewer bytes, and keep what they
left out for the next step. In a step

    the server sends the model w
    each worker i, in parallel:
        p_i = gradient of its loss at w, plus e_i
        c_i = compress(p_i)
        e_i = p_i - c_i
    w = w - lr * mean of the c_i

* **Top-k** (Stich et al. 2018, arXiv 1809.07599, algorithm 1) sends the largest numbers
  and their places, here one in a hundred.
* **Signs** (EF-signSGD; Karimireddy et al. 2019, arXiv 1901.09847, algorithm 2) sends
  one bit for each number, and their mean magnitude.
* **PowerSGD** (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2) sends the
  factors of a matrix of low rank: one step of power iteration from the last one's. It
  has two rounds of communication, because the first factor is averaged before the
  second is computed.
* **int8** is the library's `wire="int8"`: devices add what they exchange in 8 bits.

Without e_i, what is left out in one step is lost: each has a line without them. The
errors are partitioned values: a
program takes them and returns them, and they never leave their worker.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from examples.algorithms import compression, power_sgd
from examples.common import clients, digits, results
from examples.common.devices import make_mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare the loss by bytes of compressed and uncompressed gradients."""

    output: Path = Path("runs/compression")
    """Folder of the table and the figure."""
    steps: int = 120
    """Steps of each method."""
    workers: int = 8
    """Workers; each has digits of a few labels only."""
    width: int = 100
    """Width of the network's hidden layer."""
    rate: float = 0.3
    """Rate of the server's SGD."""
    only: str = ""
    """Run only the methods with this in their name."""
    devices: int = 4
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Workers of a device that run at once; all by default."""
    seeds: int = 3
    """Runs, each with its own initial model and partition."""


RANK = 2
FEEDBACK, NONE = "with feedback", "without"
COMPRESS = {"float32": compression.same, "int8": compression.same}
COMPRESS |= {"top 1 %": compression.top_k, "sign": compression.sign}
# By method: the bytes of a matrix [m, n] from a worker.
BYTES = {
    "float32": lambda m, n: 4 * m * n,
    "int8": lambda m, n: m * n,
    "top 1 %": lambda m, n: 0.08 * m * n,
    "sign": lambda m, n: m * n / 8 + 4,
    "PowerSGD, rank 2": lambda m, n: 4 * RANK * (m + n),
}
METHODS = ["float32", "int8"] + [
    f"{name} {feedback}"
    for name in ("top 1 %", "sign", "PowerSGD, rank 2")
    for feedback in (FEEDBACK, NONE)
]
# The paper's ResNet-18: its convolutions and last layer as matrices, and the numbers in
# vectors, which are not compressed: the biases and the scales after each convolution.
RESNET = (
    *((64, 27), *4 * [(64, 576)]),
    *((128, 576), *3 * [(128, 1152)], (128, 64)),
    *((256, 1152), *3 * [(256, 2304)], (256, 128)),
    *((512, 2304), *3 * [(512, 4608)], (512, 256)),
    (10, 512),
)
RESNET_VECTORS = sum(2 * m for m, _ in RESNET[:-1]) + 10
PANELS = "top 1 %", "sign", "PowerSGD, rank 2"  # of the figure
REMARKS = (
    "The paper trains a ResNet-18 on CIFAR-10: the ratio of the bytes depends on the "
    "shapes of the matrices, and cannot be the same here. Bytes are what a worker "
    "sends.",
    f"{results.UNCHECKED} No text of the paper's tables was within reach: its "
    "accuracies were compared with none.",
    "int8 is exchanged between devices, so its last digits depend on their number. Its "
    "losses are about those of float32, for a quarter of the bytes: it is not drawn.",
)


def times_fewer(method: str, sizes: Sequence[tuple[int, int]], vectors: int) -> float:
    """How many times fewer bytes a method has than float32; vectors keep theirs."""
    sent, full = (
        4 * vectors + sum(BYTES[x](*size) for size in sizes)
        for x in (method, "float32")
    )
    return full / sent


def base(name: str) -> str:
    """A method without a word on its feedback."""
    return name.removesuffix(FEEDBACK).removesuffix(NONE).strip()


def make_step(config: Config, name: str, held_out):
    """A step from a model and the workers' memory, and how the memory starts."""
    gradient, feedback = jax.grad(compression.loss), name.endswith(FEEDBACK)
    args = config.workers, config.rate, feedback
    if name.startswith("PowerSGD"):
        train_step = power_sgd.make_step(gradient, *args)
        memory = lambda x: power_sgd.start(x, config.workers, RANK)
    else:
        wire = "int8" if name == "int8" else None
        compress = COMPRESS[base(name)]
        train_step = compression.make_step(gradient, compress, *args, wire=wire)
        memory = lambda x: compression.no_error(x, config.workers)

    def step(params, memory, examples):
        params, memory = train_step(params, memory, examples)
        return params, memory, compression.loss(params, held_out)

    return memory, drjax.jit(step, groups_per_step=config.groups_per_step)


def draw(numbers: Mapping[str, Sequence[float]], costs: Mapping[str, float]) -> Figure:
    """A panel for each compression, with the losses of float32, by bytes."""
    curves, scale = {}, {}
    panels = [x for x in PANELS if any(name.startswith(x) for name in numbers)]
    for panel in panels:
        for name in numbers:
            if name == "float32" or name.startswith(panel):
                label = f"{panel}: {name.removeprefix(panel)}"
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


def judge(scores: Mapping[str, np.ndarray], costs: Mapping[str, float]) -> dict:
    """What accuracies in percent, by method and seed, say of bytes and of feedback."""
    full = scores.get("float32")
    kept = [name for name in scores if name.endswith(FEEDBACK)]
    if full is None or not kept:
        return {"measured": "A part of the methods.", "remarks": []}
    near = {x: not results.is_less(scores[x], full) for x in kept}
    without = {x: scores[f"{base(x)} {NONE}"] for x in kept}
    gain = {x: scores[x] - without[x] for x in kept}
    best = kept[-1]
    fewer = costs["float32"] / costs[best]
    lost = [base(x) for x in kept if not near[x]]
    return {
        "measured": f"{base(best)} sends {fewer:.1f} times fewer bytes than float32; "
        f"{spread(scores[best])} % of the digits are right instead of {spread(full)}.",
        "badge": "order reached"
        if near[best]
        and all(results.is_less(without[x], scores[x], paired=True) for x in kept)
        else None,
        "remarks": [
            "Feedback adds "
            + ", ".join(f"{spread(x)} points to {base(n)}" for n, x in gain.items())
            + ".",
            f"Below float32 by more than the spread of the seeds: {', '.join(lost)}."
            if lost
            else "All with feedback are within the spread of float32.",
        ],
    }


spread = functools.partial(results.show_spread, digits=".1f")


def main(config: Config) -> results.Results:
    """Trains by each method, and shows loss and bytes."""
    mesh = make_mesh(config.devices, "workers")
    train, held_out = digits.load_mnist()
    curves, costs, scores, table = {}, {}, {}, []
    methods = [name for name in METHODS if config.only in name]
    for name in tqdm(methods, unit="method"):
        memory_of, step = make_step(config, name, held_out)
        losses, accuracies = [], []
        for seed in range(config.seeds):
            parts = clients.split_shards(train.y, config.workers, seed)
            parts = np.stack([part[: min(map(len, parts))] for part in parts])
            examples = jax.tree.map(lambda x, parts=parts: x[parts], train)
            params = compression.init(jax.random.key(seed), config.width)
            sizes = [x.shape for x in params.values()]
            with jax.set_mesh(mesh):
                memory, curve = memory_of(params), []
                for _ in range(config.steps):
                    params, memory, score = step(params, memory, examples)
                    curve.append(jax.block_until_ready(score))
            right = compression.apply(params, held_out.x).argmax(-1) == held_out.y
            losses.append(curve)
            accuracies.append(100 * right.mean())
        curves[name] = np.mean(losses, 0).tolist()
        scores[name] = np.array(accuracies)
        sent, full = (
            sum(BYTES[x](*size) for size in sizes) for x in (base(name), "float32")
        )
        costs[name] = sent
        cells = f"{curves[name][-1]:.3f}", spread(scores[name])
        table.append([name, f"{sent:,.0f}", f"{full / sent:.1f}", *cells])
    verdict = judge(scores, costs)
    verdict["remarks"] += [
        "The paper's 136 follows from the shapes of its network: "
        f"{times_fewer('PowerSGD, rank 2', RESNET, RESNET_VECTORS):.1f}.",
        *REMARKS,
        f"Mean and standard deviation of {config.seeds} seeds, of the first model and "
        "the partition, with one rate for all.",
    ]
    result = results.Results(
        title=f"Held-out digits after {config.steps} steps of {config.workers} workers",
        columns=["", "bytes of a step", "times fewer", "loss", "accuracy, %"],
        table=table,
        paper="PowerSGD of rank 2: 136 times fewer bytes, "
        f"94.4 % {results.UNCHECKED} instead of 94.3 % {results.UNCHECKED} "
        "(Vogels et al. 2019, ResNet-18 on CIFAR-10).",
        numbers={name: x for name, x in curves.items() if name != "int8"},
        **verdict,
    )
    result.write(config.output, config, draw(result.numbers, costs))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
