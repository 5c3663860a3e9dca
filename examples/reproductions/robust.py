"""Robust aggregation: the median, the trimmed mean, Krum and the geometric median.

    python -m examples.reproductions.robust

Some of n workers send anything they like, and the server does not know which. In a step

    the server sends the model w
    each worker i, in parallel: g_i = gradient of its own loss at w, or an attack
    w = w - lr * aggregate(g_1, ..., g_n)

One attacker can move the mean anywhere. These it cannot, as long as fewer than half are
attackers:

* **Median** and **trimmed mean** (Yin et al. 2018, arXiv 1803.01498, options I and II):
  of each coordinate on its own, the middle of the n numbers, or their mean without the
  f largest and the f smallest.
* **Krum** (Blanchard et al. 2017, arXiv 1703.02757, section 4): the g_i with the least
  sum of squared distances to its n - f - 2 nearest others. **Multi-Krum** is the mean
  of the n - f best.
* **Geometric median** (Pillutla et al. 2022, arXiv 1912.13445, algorithm 2): the point
  with the least sum of distances to all g_i, by Weiszfeld's weights
  1 / max(distance, e).

Krum and the geometric median need distances only, and so the n x n matrix of inner
products: a sum over the coordinates, which devices compute for a share of them each. No
device ever has all gradients.

The task is the paper's (Yin et al., section 7): a multi-class logistic regression on
MNIST by 40 workers, some of which have the labels 9 - y in place of y: two of them, as
in the paper, then eight. In a third attack eight workers send their gradients times
-10. The server knows that there are eight at most, no more.

What flipped labels cost the mean depends on the rate: they keep gradients large, and
with a high rate descent by the mean does not settle. One line of the table has a tenth
of the rate.

A step of Krum learns from the digits of one worker, a 40th of all. One line shows what
a worker reaches with its digits alone.
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
from examples.algorithms import geometric_median, krum, robust
from examples.common import clients, digits, results
from examples.common.devices import make_mesh
from examples.common.rounds import Round


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare six aggregations without attackers and under three attacks."""

    output: Path = Path("runs/robust")
    """Folder of the table and the figure."""
    steps: int = 100
    """Steps of gradient descent."""
    workers: int = 40
    """Workers; each has the same number of digits."""
    few: float = 0.05
    """Share of the workers with flipped labels in the first attack."""
    many: float = 0.2
    """Share of the workers that attack in the others."""
    rate: float = 1.0
    """Rate of gradient descent."""
    seeds: int = 3
    """Partitions of the digits; the table has mean and standard deviation."""
    only: str = ""
    """Run only the aggregations with this in their name."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Workers of a device that run at once; all by default."""


AGGREGATIONS = {
    "mean": robust.mean,
    "median": robust.median,
    "trimmed mean": robust.trimmed_mean,
    "Krum": krum.krum,
    "multi-Krum": krum.multi_krum,
    "geometric median": geometric_median.geometric_median,
}
SLOW, ALONE = "mean, a tenth of the rate", "one worker alone"
# Yin et al., Table 2: under flipped labels. Their mean without attackers: 88.0 %.
QUOTED = {"mean": 76.8, "median": 87.2, "trimmed mean": 86.9}
CLEAN = 88.0


def gradient(params, own):
    """Of a worker, times its factor, which is one unless it negates."""
    examples, factor = own
    return optax.tree.scale(factor, jax.grad(robust.loss)(params, examples))


def make_step(config: Config, name: str, f: int):
    """The program of a step of gradient descent."""
    rate = config.rate / 10 if name == SLOW else config.rate
    n = 1 if name == ALONE else config.workers
    aggregate = AGGREGATIONS.get(name, robust.mean)
    return robust.make_step(gradient, aggregate, n, f, rate)


def start():
    """A model of zeros."""
    return {"W": jnp.zeros((784, 10)), "b": jnp.zeros(10)}


def right(params, examples):
    """The share of digits that a model gets right."""
    logits = examples.x @ params["W"] + params["b"]
    return (logits.argmax(-1) == examples.y).mean()


def make_train(config: Config, name: str, f: int):
    """The step, with accuracy and loss on held-out digits after it."""
    train_step = make_step(config, name, f)

    def step(params, own, held_out):
        params = train_step(params, own)
        return params, (right(params, held_out), robust.loss(params, held_out))

    return drjax.jit(step, groups_per_step=config.groups_per_step)


def attacks(config: Config, train: digits.Digits, seed: int):
    """By name: the workers' digits, and factors of their gradients."""
    n = config.workers
    parts = clients.split_iid(train.y, n, seed)
    size = min(map(len, parts))
    honest = jax.tree.map(lambda x: np.stack([x[part[:size]] for part in parts]), train)
    few, many = (round(share * n) for share in (config.few, config.many))

    def flip(f):
        liars = np.arange(n)[:, None] < f
        return honest._replace(y=np.where(liars, 9 - honest.y, honest.y))

    ones = np.ones(n, np.float32)
    return {
        "no attack": (honest, ones),
        f"{few} flip labels": (flip(few), ones),
        f"{many} flip labels": (flip(many), ones),
        f"{many} negate": (honest, np.where(np.arange(n) < many, -10, ones)),
    }


def engine_round() -> Round:
    """A step by the median, Krum and the geometric median, with ten workers."""
    config = Config(workers=10)
    examples, factor = attacks(config, digits.load_mnist()[0], 0)["2 negate"]
    names = "median", "Krum", "geometric median"
    steps = [make_step(config, name, f=2) for name in names]

    def step(shared, own, data):
        return [step(shared, data) for step in steps], own

    few = jax.tree.map(lambda x: x[:, :20], examples)
    return Round(step, start(), (), (few, factor))


def draw(
    numbers: Mapping[str, Sequence[float]], names: Sequence[str], cases: Sequence[str]
) -> Figure:
    """A panel for each aggregation, with its losses under each attack."""
    names = [name for name in names if name in AGGREGATIONS]
    figure = results.lines(
        {
            f"{name}: {case}": numbers[f"{case}: {name}, held-out loss"]
            for name in names
            for case in cases
        },
        [f"{name}:" for name in names],
        xlabel="step",
        ylabel="held-out loss",
    )
    figure.axes[0].set_ylim(0.2, 2.5)  # eight that negate drive a mean beyond it
    for ax, name in zip(figure.axes, names, strict=False):
        ax.set_title(name)
    return figure


def judge(scores: Mapping[str, Mapping[str, np.ndarray]], few: str, many: str) -> dict:
    """What accuracies in percent, by method, case and seed, say of flipped labels."""
    if not {*AGGREGATIONS, SLOW, ALONE} <= set(scores):  # a part of the aggregations
        return {"measured": "A part of the aggregations.", "remarks": []}

    def mean(name, case):
        return scores[name][case].mean()

    def lost(name, case):
        return mean(name, "no attack") - mean(name, case)

    def above(case):
        """Which are above the mean under an attack, as in the paper."""
        return [
            name
            for name in ("median", "trimmed mean")
            if results.is_less(scores["mean"][case], scores[name][case], paired=True)
        ]

    quoted = CLEAN - QUOTED["mean"]
    reached = all(len(above(case)) == 2 for case in (few, many))
    return {
        "measured": f"With {many}, the mean falls from {mean('mean', 'no attack'):.1f}"
        f" to {mean('mean', many):.1f} %, the median to {mean('median', many):.1f}, "
        f"the trimmed mean to {mean('trimmed mean', many):.1f}.",
        "badge": "order reached" if reached and lost("mean", many) >= quoted else None,
        "remarks": [
            f"The paper's mean loses {quoted:.1f} points when 2 of 40 workers flip "
            f"their labels. Here it loses {lost('mean', few):.1f} with {few}, "
            f"{lost('mean', many):.1f} with {many}, and {lost(SLOW, many):.1f} with "
            "these and a tenth of the rate.",
            "Above the mean with every partition of the digits, as in the paper: "
            + "; ".join(
                f"with {case}, {' and '.join(above(case)) or 'neither'}"
                for case in (few, many)
            )
            + ".",
            f"Krum has {mean('Krum', 'no attack'):.1f} % without attack, one worker "
            f"alone {mean(ALONE, 'no attack'):.1f}, and multi-Krum "
            f"{mean('multi-Krum', 'no attack'):.1f}: what Krum lacks are the digits "
            "of the other workers.",
        ],
    }


def main(config: Config) -> results.Results:
    """Trains with each aggregation under each attack, and shows the accuracies."""
    mesh = make_mesh(config.devices, "workers")
    train, held_out = digits.load_mnist()
    cases = [attacks(config, train, seed) for seed in range(config.seeds)]
    f = round(config.many * config.workers)
    numbers, scores, table = {}, {}, []
    names = [name for name in (*AGGREGATIONS, SLOW, ALONE) if config.only in name]
    progress = tqdm(total=len(names) * len(cases[0]), unit="case")
    for name in names:
        step = make_train(config, name, f)
        cells, scores[name] = [], {}
        for case in cases[0]:
            progress.update()
            if name == ALONE and case != "no attack":
                cells.append("")
                continue
            curves = []
            for own in [partition[case] for partition in cases]:
                if name == ALONE:
                    own = jax.tree.map(lambda x: x[-1:], own)
                params, curve = start(), []
                with jax.set_mesh(None if name == ALONE else mesh):
                    for _ in range(config.steps):
                        params, score = step(params, own, held_out)
                        curve.append(jax.block_until_ready(score))
                curves.append(curve)
            accuracies, losses = np.array(curves).transpose(2, 0, 1)
            numbers[f"{case}: {name}, held-out loss"] = losses.mean(0).tolist()
            scores[name][case] = 100 * accuracies[:, -1]
            cells.append(results.show_spread(scores[name][case], ".1f"))
        table.append([name, *cells, QUOTED.get(name, "")])
    progress.close()
    _, few, many, _ = cases[0]
    verdict = judge(scores, few, many)
    verdict["remarks"] += [
        f"The paper's mean without attackers: {CLEAN} %. It uses all of MNIST; Krum "
        "and the geometric median are from other papers.",
        f"Mean and standard deviation of {config.seeds} partitions of the digits.",
    ]
    result = results.Results(
        title=f"Accuracy (%) after {config.steps} steps of {config.workers} workers",
        columns=["", *cases[0], "paper, two flip"],
        table=table,
        paper="mean 76.8 %, median 87.2 %, trimmed mean 86.9 % (Yin et al. 2018, "
        "Table 2).",
        numbers=numbers,
        **verdict,
    )
    figure = draw(numbers, names, tuple(cases[0]))
    result.write(config.output, config, figure)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
