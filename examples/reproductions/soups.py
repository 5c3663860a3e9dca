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
library from the last six. The domains are the largest modules that the repository has.
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
    seed_steps: int = 200
    """Steps of the common start, on the modules that are no domain."""
    steps: int = 100
    """Steps of each model after that."""
    batch: int = 4
    """Windows in a step."""
    length: int = 64
    """Bytes predicted in a window."""
    width: int = 96
    """Width of the hidden layer."""
    rate: float = 3e-3
    """Rate of Adam for the start and for the domains."""
    rates: tuple[float, float] = (1e-3, 2e-2)
    """The least and the largest rate of Adam among the models of the soups."""
    test_windows: int = 32
    """Windows of each domain to test on, and half as many to validate on."""
    learned_steps: int = 25
    """Steps for the weights of the learned soup."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Models of a device that train at once; all by default."""
    seed: int = 0
    """Seed of the start and of all windows."""


# Wortsman et al., Table 3: accuracy on ImageNet.
QUOTED = {
    "best single": "80.38",
    "uniform soup": "79.97",
    "greedy soup": "81.03",
    "learned soup": f"80.89 {results.UNCHECKED}",
    "ensemble": "81.19",
}
METHODS = *QUOTED, "ensemble by posterior"


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
    validation: Array  # [models]
    singles: Array  # on the test, [models, domains]
    weights: dict[str, Array]


def merge(models, validation, test, steps: int) -> Merged:
    """Merges models in each way; validation and test are windows [domains, m, ...]."""
    by_domain = lambda params, windows: jax.vmap(loss, (None, 0))(params, windows)
    scores = drjax.map_fn(loss, (models, drjax.broadcast(validation)))
    singles = drjax.map_fn(by_domain, (models, drjax.broadcast(test)))
    scores, singles = drjax.gather((scores, singles))
    weights = {
        "best single": jax.nn.one_hot(jnp.argmin(scores), len(scores)),
        "uniform soup": jnp.ones(len(scores)) / len(scores),
        "greedy soup": soups.greedy_weights(models, validation),
        "learned soup": soups.learned_weights(models, validation, steps),
    }
    losses = {name: loss(soups.soup(models, x), test) for name, x in weights.items()}
    for name, posterior in ("ensemble", False), ("ensemble by posterior", True):
        values = branch_train_merge.ensemble(models, test, posterior)
        losses[name] = mean_loss(values, test)
    return Merged(losses, scores, singles, weights)


def cut(source: np.ndarray, count: int, config: Config, *key: int) -> text.Windows:
    rng = np.random.default_rng((config.seed, *key))
    return text.cut(source, count, config.length, rng)


def stack(windows: list[text.Windows]) -> text.Windows:
    return jax.tree.map(lambda *x: np.stack(x), *windows)


def in_steps(windows: text.Windows, steps: int) -> text.Windows:
    """Windows `[n, steps * batch]` of some length as `[n, steps, batch]`."""
    split = lambda x: x.reshape(len(x), steps, -1, *x.shape[2:])
    return text.Windows(*map(split, windows))


def main(config: Config) -> results.Results:
    """Trains models for both methods from one start, merges and compares them."""
    mesh, n = make_mesh(config.devices, "models"), config.models
    modules = sorted(text.load_stdlib().train, key=lambda x: (-len(x.text), x.name))
    domains, others = modules[:n], modules[n:]
    parts = [np.split(x.text, [len(x.text) * k // 10 for k in (8, 9)]) for x in domains]
    count = config.steps * config.batch
    mixed = np.concatenate([part[0] for part in parts])
    rest = np.concatenate([x.text for x in others])
    windows = {
        "settings": [cut(mixed, count, config, 0, k) for k in range(n)],
        "domains": [cut(part[0], count, config, 1, k) for k, part in enumerate(parts)],
    }
    windows = {name: in_steps(stack(x), config.steps) for name, x in windows.items()}
    rest = stack([cut(rest, config.seed_steps * config.batch, config, 2)])
    rest = in_steps(rest, config.seed_steps)
    validation, test = (
        stack([cut(part[i], held, config, 2 + i, k) for k, part in enumerate(parts)])
        for i, held in ((1, config.test_windows // 2), (2, config.test_windows))
    )
    equal = np.full(n, config.rate, np.float32)
    rates = np.geomspace(*config.rates, n, dtype=np.float32)

    one = jax.jit(drjax.program(models=1)(soups.fine_tune))
    start = one(
        byte_network.init(jax.random.key(config.seed), config.width), equal[:1], rest
    )
    start = jax.tree.map(lambda x: np.asarray(x[0]), start)
    program = drjax.program(models=n)
    groups = config.groups_per_step
    train = drjax.jit(program(soups.fine_tune), groups)
    combine = functools.partial(merge, steps=config.learned_steps)
    combine = drjax.jit(program(combine), groups)
    merged = {}
    progress = tqdm(total=5, unit="program")
    with jax.set_mesh(mesh):
        for name, settings in ("settings", rates), ("domains", equal):
            models = jax.block_until_ready(train(start, settings, windows[name]))
            progress.update()
            merged[name] = jax.tree.map(np.asarray, combine(models, validation, test))
            progress.update()
        together = drjax.jit(program(train_together), groups)
        steps = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), windows["domains"])
        together = float(jax.jit(loss)(together(start, config.rate, steps), test))
        progress.update()
    progress.close()
    return show(config, merged, float(jax.jit(loss)(start, test)), together, domains)


def show(config: Config, merged, start: float, together: float, domains):
    """The table, the figure, and whether the order is the published one."""
    table = [["common start", f"{start:.3f}", f"{start:.3f}", ""]]
    for name in METHODS:
        losses = [f"{float(x.test[name]):.3f}" for x in merged.values()]
        table.append([name, *losses, QUOTED.get(name, "")])
    table.append(["gradients averaged", "", f"{together:.3f}", ""])
    by_settings, by_domain = (
        {k: float(v) for k, v in x.test.items()} for x in merged.values()
    )
    by_domain["gradients averaged"] = together
    chosen = int((merged["settings"].weights["greedy soup"] > 0).sum())
    result = results.Results(
        title=f"Test loss of {config.models} merged models (nats per byte)",
        columns=["", "settings", "domains", "paper, soups, %"],
        table=table,
        measured="Test loss, "
        + ", ".join(f"{name} {by_settings[name]:.3f}" for name in QUOTED)
        + f"; of domains, uniform soup {by_domain['uniform soup']:.3f}, ensemble by "
        f"posterior {by_domain['ensemble by posterior']:.3f}.",
        paper="accuracy in percent, "
        + ", ".join(f"{name} {quoted}" for name, quoted in QUOTED.items())
        + " (Wortsman et al. 2022, Table 3, ImageNet).",
        numbers={
            f"{name}: {key}": np.ravel(value).tolist()
            for name, x in merged.items()
            for key, value in (x.test | {"singles": x.singles}).items()
        },
        remarks=[
            compare(by_settings, "greedy soup", "best single"),
            compare(by_settings, "greedy soup", "uniform soup"),
            compare(by_settings, "best single", "uniform soup"),
            compare(by_settings, "ensemble", "greedy soup"),
            compare(by_domain, "ensemble by posterior", "ensemble"),
            compare(by_domain, "ensemble by posterior", "uniform soup"),
            compare(by_domain, "ensemble by posterior", "gradients averaged"),
            f"The greedy soup has {chosen} of the {config.models} models with other "
            "settings. The ensemble has all of them, also those with a poor rate.",
            "The paper's numbers are accuracies of another task, and those of "
            "Branch-Train-Merge perplexities of transformers: only the order can be "
            "compared. Averaged gradients are the same number of steps on the same "
            "windows, with communication in each. One run; 0.001 means nothing.",
            f"The text, {text.STDLIB.name}, has SHA-256 {text.sha256()}.",
        ],
    )
    result.write(config.output, config, draw(config, merged, domains))
    return result


def compare(losses: dict[str, float], better: str, worse: str) -> str:
    """Whether the order of two is the papers'."""
    reached = losses[better] <= losses[worse]
    text = "as published" if reached else "not the published order"
    return f"{better} {losses[better]:.3f}, {worse} {losses[worse]:.3f}, {text}."


def draw(config: Config, merged, domains) -> Figure:
    """Losses by rate with those of the soups; each expert's loss on each domain."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    mixed = merged["settings"]
    rates = np.geomspace(*config.rates, config.models)
    left.plot(rates, mixed.singles.mean(1), "o-", color="0.6", label="single models")
    lines = "uniform soup", "greedy soup", "ensemble"
    for name, color in zip(lines, ("tab:blue", "tab:orange", "tab:green"), strict=True):
        left.axhline(float(mixed.test[name]), color=color, label=name)
    left.set(xscale="log", xlabel="rate of Adam", ylabel="test loss (nats per byte)")
    left.grid(alpha=0.3)
    left.legend()
    experts = merged["domains"].singles
    image = right.imshow(experts - experts.min(0), cmap="viridis_r", vmax=0.5)
    names = [x.name for x in domains]
    right.set_xticks(range(len(names)), names, rotation=45, ha="right")
    right.set_yticks(range(len(names)), names)
    right.set(xlabel="text of", ylabel="trained on")
    figure.colorbar(image, label="loss above the least", extend="max")
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config))
