"""Gossip on a ring: averaging and SGD without a server (D-PSGD).

    python -m examples.reproductions.gossip

Each of n workers has its own model and talks to its two neighbors. In a step (Lian et
al. 2017, arXiv 1705.09056, algorithm 1)

    each worker i, in parallel:
        g_i = gradient of its own loss at its own model x_i
        x_i = (x_{i-1} + x_i + x_{i+1}) / 3 - lr * g_i

The mean of the models does what SGD does. How far they are from their mean is a matter
of the matrix that averages neighbors: without gradients, the distance falls by a factor
of at most

    rho = 1/3 + 2/3 cos(2 pi / n),

its second largest eigenvalue, in each step; 1 - rho is the spectral gap (Boyd et al.
2006, "Randomized gossip algorithms"; Xiao and Boyd 2004, section 3). The table compares
the measured factor with this one.

A model is a partitioned value, `[n, ...]`, and no global value is ever made of them but
for the test. `drjax.shift` moves the slices to the neighbors: on a mesh, only those at
the ends of a device's groups are communicated.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import drjax
from examples.common import clients, digits, results
from examples.common.devices import make_mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure how fast a ring agrees, and train on it."""

    output: Path = Path("runs/gossip")
    """Folder of the table and the figure."""
    rings: tuple[int, ...] = (4, 8, 16, 32)
    """Numbers of workers to measure."""
    averaging: int = 60
    """Steps of averaging."""
    workers: int = 16
    """Workers that train; each has digits of a few labels only."""
    steps: int = 300
    """Steps of training."""
    rate: float = 0.1
    """Rate of SGD."""
    devices: int = 4
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Workers of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the partition and of the first values."""


def loss(params, examples):
    logits = examples.x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, examples.y).mean()


# --8<-- [start:algorithm]
def average_neighbors(params):
    mean = lambda *trees: optax.tree.scale(1 / 3, jax.tree.map(sum3, *trees))
    left, right = drjax.shift(params, 1), drjax.shift(params, -1)
    return drjax.map_fn(mean, (left, params, right))


def sum3(left, own, right):
    return left + own + right


def distance_to_mean(params):
    def square(own, mean):
        return optax.tree.norm(optax.tree.sub(own, mean), squared=True)

    mean = drjax.broadcast(drjax.reduce_mean(params))
    return jnp.sqrt(drjax.reduce_mean(drjax.map_fn(square, (params, mean))))


def gossip_step(params, examples, rate):
    gradients = drjax.map_fn(jax.grad(loss), (params, examples))
    descend = lambda own, gradient: optax.tree.add_scale(own, -rate, gradient)
    return drjax.map_fn(descend, (average_neighbors(params), gradients))


# --8<-- [end:algorithm]
def spectral_radius(n: int) -> float:
    """By which factor, in theory, the distance to the mean falls in a step."""
    return 1 / 3 + 2 / 3 * np.cos(2 * np.pi / n)


def measure(config: Config, n: int, values) -> list[float]:
    """The distance to the mean before and after each step, from values `[n, ...]`."""

    @drjax.program(workers=n)
    def run(values):
        step = lambda x, _: (average_neighbors(x), distance_to_mean(x))
        return jax.lax.scan(step, values, length=config.averaging)[1]

    run = drjax.jit(run, groups_per_step=config.groups_per_step)
    return np.asarray(run(values)).tolist()


def train(config: Config, train_set, held_out):
    """Accuracies and losses of the ring's mean and of SGD, and the distances."""
    parts = clients.split_shards(train_set.y, config.workers, config.seed)
    size = min(map(len, parts))
    examples = jax.tree.map(lambda x: np.stack([x[i[:size]] for i in parts]), train_set)
    n = config.workers
    params = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}
    own = jax.tree.map(lambda x: jnp.zeros((n, *x.shape)), params)

    @drjax.program(workers=n)
    def ring(own, examples):
        own = gossip_step(own, examples, config.rate)
        return own, distance_to_mean(own), drjax.reduce_mean(own)

    @drjax.program(workers=n)
    def central(params, examples):
        args = drjax.broadcast(params), examples
        gradient = drjax.reduce_mean(drjax.map_fn(jax.grad(loss), args))
        return optax.tree.add_scale(params, -config.rate, gradient)

    compiled = [drjax.jit(f, config.groups_per_step) for f in (ring, central)]
    distances = []
    for _ in range(config.steps):
        own, distance, mean = jax.block_until_ready(compiled[0](own, examples))
        params = jax.block_until_ready(compiled[1](params, examples))
        distances.append(distance)
    right = lambda p: ((held_out.x @ p["w"] + p["b"]).argmax(-1) == held_out.y).mean()
    losses = [float(loss(p, held_out)) for p in (mean, params)]
    return (
        [float(right(p)) for p in (mean, params)],
        losses,
        np.array(distances).tolist(),
    )


def main(config: Config) -> results.Results:
    """Measures all rings, trains on one, and shows factors and accuracies."""
    mesh = make_mesh(config.devices, "workers")
    table, curves = [], {}
    errors = []
    with jax.set_mesh(mesh):
        for n in config.rings:
            # The slowest of all: an eigenvector of the second largest eigenvalue.
            slowest = jnp.cos(2 * jnp.pi * jnp.arange(n) / n)
            worst = measure(config, n, slowest)
            steps = min(10, config.averaging - 1)
            factor = (worst[steps] / worst[0]) ** (1 / steps)
            values = jax.random.normal(jax.random.key(config.seed), (n, 100))
            curves[f"ring of {n}"] = measure(config, n, values)
            exact = spectral_radius(n)
            errors.append(abs(factor - exact))
            table.append([n, f"{factor:.6f}", f"{exact:.6f}", f"{1 - exact:.4f}"])
        scores, losses, distances = train(config, *digits.load_mnist())
    n = config.workers
    result = results.Results(
        title="By which factor a step of averaging brings a ring closer to its mean",
        columns=["workers", "measured", "theory", "spectral gap"],
        table=table,
        measured=f"The measured factors are within {max(errors):.0e} of theory; D-PSGD"
        f" on {n} workers with digits of a few labels: {scores[0]:.1%}, central SGD "
        f"{scores[1]:.1%}.",
        paper="1/3 + 2/3 cos(2 pi / n), exact; and D-PSGD converges as central SGD "
        "does (Lian et al. 2017, theorem 1).",
        numbers={name: x[:6] for name, x in curves.items()}
        | {"losses": losses, "distances": distances},
        remarks=[
            "The measured factor is over ten steps from an eigenvector; the figure "
            "starts from random numbers, which agree faster at first.",
            f"After training, a model is {distances[-1]:.3f} from the mean of all.",
        ],
    )
    figure = results.lines(
        curves, first=0, xlabel="step", ylabel="distance to the mean", log="y"
    )
    result.write(config.output, config, figure)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
