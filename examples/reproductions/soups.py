"""Model soups and Branch-Train-Merge: one model from many that have a common start.

    python -m examples.reproductions.soups

The parameters of models that were fine-tuned from the same model can be averaged:

    branch: each group k starts from the same model w
    train:  each group, in parallel: w_k = w after steps with its own settings and data
    merge:  one model, or one distribution, from w_1 ... w_n

* **Model soups** (Wortsman et al. 2022, arXiv 2203.05482): the groups differ in their
  hyperparameters and batches. The **uniform** soup is the mean of the w_k. The
  **greedy** soup (recipe 1) takes them in the order of their validation scores, and
  keeps those with which the mean is no worse. The **learned** soup (appendix) has
  weights by gradient descent through the weighted mean. The **ensemble** averages the
  probabilities, and computes n times as much.
* **Branch-Train-Merge** (Li et al. 2022, arXiv 2208.03306): the groups have a domain
  each, and their models are merged by a mean, or by an ensemble with weights for the
  next byte,  p(k | bytes so far) ~ p_k(bytes so far) p(k), the posterior of the domain.

All are reductions of a partitioned value, the models, which stay where they were
trained: a mean, n means over chosen groups, a weighted mean with its derivative, and a
sum of probabilities. The models are never gathered.

The models are small networks that predict the next byte of modules of Python's standard
library from the last six. The domains are the largest modules that the repository has,
and the common start has seen all others. The models of a soup differ in the rate of
Adam, from too small to too large. Experts have a domain each or, for comparison, a part
of the windows of all domains (random split).
"""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from examples.algorithms import branch_train_merge, soups
from examples.common import byte_network, results, text
from examples.common.byte_network import loss, mean_loss
from examples.common.devices import make_mesh


@dataclasses.dataclass(frozen=True)
class Config:
    """Train from one start with different settings or domains, and merge the models."""

    output: Path = Path("runs/soups")
    """Folder of the table and the figure."""
    models: int = 8
    """Models to merge (n), and domains."""
    seed_steps: int = 1500
    """Steps of the common start, on the modules that are no domain."""
    steps: int = 400
    """Steps of each model of the soups after that, on windows of all domains."""
    expert_steps: int = 150
    """Steps of each expert after that: no domain has fewer windows."""
    batch: int = 4
    """Windows in a step."""
    length: int = 64
    """Bytes predicted in a window."""
    width: int = 96
    """Width of the hidden layer."""
    rate: float = 3e-3
    """Rate of Adam for the start and for the domains."""
    rates: tuple[float, float] = (3e-4, 3e-2)
    """The least and the largest rate of Adam among the models of the soups."""
    test_windows: int = 64
    """Windows of each domain to validate on, and as many to test on."""
    learned_steps: int = 25
    """Steps for the weights of the learned soup."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Models of a device that train at once; all by default."""
    seeds: int = 3
    """Runs, each with its own start and windows."""


# Wortsman et al., Table 3: accuracy on ImageNet.
QUOTED = {
    "best single": "80.38",
    "uniform soup": "79.97",
    "greedy soup": "81.03",
    "learned soup": "80.89",
    "ensemble": "81.19",
}
METHODS = (
    "single, on average",
    *QUOTED,
    "mean by posterior",
    "ensemble by posterior",
    "gradients averaged",
)
# Which is better than which: in that table, and in the abstract of Li et al.
ORDERS = (
    ("settings: greedy soup", "settings: best single"),
    ("settings: best single", "settings: uniform soup"),
    ("settings: ensemble", "settings: greedy soup"),
    ("settings: greedy soup", "settings: learned soup"),
    ("domains: ensemble by posterior", "domains: gradients averaged"),
    ("domains: ensemble by posterior", "random split: ensemble by posterior"),
)


def train_together(start, rate, windows):
    """One model, by the mean of the groups' gradients: windows [steps, n, ...]."""
    adam = optax.adam(rate)

    def step(carry, windows):
        params, state = carry
        grads = drjax.map_fn(jax.grad(loss), (drjax.broadcast(params), windows))
        updates, state = adam.update(drjax.reduce_mean(grads), state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (start, adam.init(start)), windows)
    return params


class Merged(NamedTuple):
    """What `merge` finds: losses by method, of each model, and weights of the soups."""

    test: dict[str, Array]
    singles: Array  # on the test, [models, domains]
    weights: dict[str, Array]


def merge(models, validation, test, steps: int) -> Merged:
    """Merges models in each way; validation and test are windows [domains, m, ...]."""

    def score(params, validation, test):
        of_domains = jax.vmap(loss, (None, 0))(params, test)
        return loss(params, validation), loss(params, test), of_domains

    args = models, drjax.broadcast(validation), drjax.broadcast(test)
    scores, alone, singles = drjax.gather(drjax.map_fn(score, args))
    weights = {
        "best single": jax.nn.one_hot(jnp.argmin(scores), len(scores)),
        "uniform soup": jnp.ones(len(scores)) / len(scores),
        "greedy soup": soups.greedy_weights(models, validation),
        "learned soup": soups.learned_weights(models, validation, steps),
    }
    losses = {name: loss(soups.soup(models, x), test) for name, x in weights.items()}
    losses["single, on average"] = alone.mean()
    by_posterior = branch_train_merge.average_loss(models, validation, test)
    losses["mean by posterior"] = by_posterior
    for name, posterior in ("ensemble", False), ("ensemble by posterior", True):
        values = branch_train_merge.ensemble(models, test, posterior)
        losses[name] = mean_loss(values, test)
    return Merged(losses, singles, weights)


class Data(NamedTuple):
    """Windows of a seed."""

    start: text.Windows
    train: dict[str, text.Windows]  # by what the models differ in, [n, steps, batch]
    validation: text.Windows
    test: text.Windows


def make_data(config: Config, modules: list[text.Module], seed: int) -> Data:
    """Cuts windows of the domains, which are the first modules, and of the others."""
    n, length = config.models, config.length
    parts = [np.split(x.text, [len(x.text) * 8 // 10]) for x in modules[:n]]
    mixed = np.concatenate([part for part, _ in parts])
    rest = np.concatenate([x.text for x in modules[n:]])
    shape, expert = (
        (steps, config.batch) for steps in (config.steps, config.expert_steps)
    )
    train = {
        "settings": text.stack(
            [text.batches(mixed, shape, length, (seed, 0, k)) for k in range(n)]
        ),
        "random split": text.batches(mixed, (n, *expert), length, (seed, 1)),
        "domains": text.stack(
            [
                text.batches(part, expert, length, (seed, 2, k))
                for k, (part, _) in enumerate(parts)
            ]
        ),
    }
    start = text.batches(rest, (config.seed_steps, config.batch), length, (seed, 3))
    held_out = [
        text.batches(part, (2, config.test_windows), length, (seed, 4, k))
        for k, (_, part) in enumerate(parts)
    ]
    halves = zip(*(map(text.Windows, *x) for x in held_out), strict=True)
    return Data(start, train, *map(text.stack, halves))


def main(config: Config) -> results.Results:
    """Trains models for both methods from one start, merges and compares them."""
    mesh, n = make_mesh(config.devices, "models"), config.models
    modules = sorted(text.load_stdlib().train, key=lambda x: (-len(x.text), x.name))
    equal = np.full(n, config.rate, np.float32)
    rates = np.geomspace(*config.rates, n, dtype=np.float32)
    program, groups = drjax.program(models=n), config.groups_per_step
    train = drjax.jit(program(soups.fine_tune), groups)
    combine = functools.partial(merge, steps=config.learned_steps)
    combine = drjax.jit(program(combine), groups)
    together = drjax.jit(program(train_together), groups)
    pretrain, evaluate = jax.jit(soups.train), jax.jit(loss)
    runs = []
    for seed in tqdm(range(config.seeds), unit="seed"):
        data = make_data(config, modules, seed)
        start = byte_network.init(jax.random.key(seed), config.width)
        start = pretrain(start, config.rate, data.start)
        start = jax.tree.map(np.asarray, start)
        merged = {}
        with jax.set_mesh(mesh):
            for name, windows in data.train.items():
                settings = rates if name == "settings" else equal
                models = jax.block_until_ready(train(start, settings, windows))
                out = combine(models, data.validation, data.test)
                merged[name] = jax.tree.map(np.asarray, out)
            steps = data.train["domains"]
            steps = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), steps)
            params = together(start, config.rate, steps)
        merged["domains"].test["gradients averaged"] = evaluate(params, data.test)
        for out in merged.values():
            out.test["common start"] = evaluate(start, data.test)
        runs.append(merged)
    merged = {
        name: jax.tree.map(lambda *x: np.stack(x), *(run[name] for run in runs))
        for name in runs[0]  # in this order
    }
    return show(config, merged, modules[:n])


def show(config: Config, merged: dict[str, Merged], domains):
    """The table, the figure, and whether the order is the published one."""
    losses = {
        f"{name}: {method}": values.tolist()
        for name, out in merged.items()
        for method, values in out.test.items()
    }
    table = []
    for method in ("common start", *METHODS):
        cells = [losses.get(f"{name}: {method}") for name in merged]
        cells = [results.show_spread(values) if values else "" for values in cells]
        table.append([method, *cells, QUOTED.get(method, "")])
    orders = [compare(losses, *pair) for pair in ORDERS]
    reached = all(
        results.is_less(losses[better], losses[worse], paired=True)
        for better, worse in ORDERS
    )
    mean = {key: f"{np.mean(values):.3f}" for key, values in losses.items()}
    chosen = (merged["settings"].weights["greedy soup"] > 0).sum(-1).tolist()
    singles = {f"{name}: singles": x.singles.mean(0) for name, x in merged.items()}
    result = results.Results(
        title=f"Test loss of {config.models} merged models (nats per byte)",
        columns=["", *merged, "paper, soups, %"],
        table=table,
        measured=f"Test loss of the best single model {mean['settings: best single']}, "
        f"uniform soup {mean['settings: uniform soup']}, greedy soup "
        f"{mean['settings: greedy soup']}; ensemble of experts "
        f"{mean['domains: ensemble by posterior']}, averaged gradients "
        f"{mean['domains: gradients averaged']}.",
        badge="order reached" if reached else None,
        paper="accuracy in percent, "
        + ", ".join(f"{name} {quoted}" for name, quoted in QUOTED.items())
        + " (Wortsman et al. 2022, Table 3, ImageNet).",
        numbers=losses | {name: np.ravel(x).tolist() for name, x in singles.items()},
        remarks=[
            *orders,
            f"The greedy soups have {', '.join(map(str, chosen))} of the "
            f"{config.models} models with other settings. The ensemble has all of "
            "them, also those with a poor rate.",
            "The paper's numbers are accuracies of another task, and those of "
            "Branch-Train-Merge perplexities of transformers: only the order can be "
            "compared. Averaged gradients are the same number of steps on the same "
            "windows as the experts, with communication in each. Mean and standard "
            f"deviation of {config.seeds} seeds; the settings were chosen on another.",
            f"The text, {text.STDLIB.name}, has SHA-256 {text.sha256()}.",
        ],
    )
    result.write(config.output, config, draw(config, merged, domains))
    return result


def compare(losses: dict[str, list[float]], better: str, worse: str) -> str:
    """In how many seeds the order of two is the papers'."""
    pairs = list(zip(losses[better], losses[worse], strict=True))
    reached = sum(a < b for a, b in pairs)
    count = "all" if reached == len(pairs) else f"{reached} of {len(pairs)}"
    means = np.mean(losses[better]), np.mean(losses[worse])
    return f"{better} {means[0]:.3f}, {worse} {means[1]:.3f}: " + (
        f"as published in {count} seeds." if reached else "not the published order."
    )


def draw(config: Config, merged, domains) -> Figure:
    """Losses by rate with those of the soups; each expert's loss on each domain."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    mixed = merged["settings"]
    rates = np.geomspace(*config.rates, config.models)
    left.plot(
        rates, mixed.singles.mean((0, 2)), "o-", color="0.6", label="single models"
    )
    lines = "uniform soup", "greedy soup", "ensemble"
    for name, color in zip(lines, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        left.axhline(mixed.test[name].mean(), color=color, label=name)
    left.set(xscale="log", xlabel="rate of Adam", ylabel="test loss (nats per byte)")
    left.grid(alpha=0.3)
    left.legend()
    experts = merged["domains"].singles.mean(0)
    image = right.imshow(experts - experts.min(0), cmap="viridis_r", vmax=0.5)
    names = [x.name for x in domains]
    right.set_xticks(range(len(names)), names, rotation=45, ha="right")
    right.set_yticks(range(len(names)), names)
    right.set(xlabel="text of", ylabel="trained on")
    figure.colorbar(image, label="loss above the least", extend="max")
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config))
