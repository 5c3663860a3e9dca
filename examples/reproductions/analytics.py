"""Analytics in one pass: histogram, quantiles, heavy hitters, and an ensemble's test.

    python -m examples.reproductions.analytics

Each of a million records is a group, and nothing of it is kept but its part of a sum.
All questions are answered by one round:

* **Histogram and quantiles** (Masson, Rim and Lee 2019, "DDSketch", arXiv 1908.10693,
  section 2). Bucket i has the values in (gamma^(i-1), gamma^i], for gamma = (1 + alpha)
  / (1 - alpha). The q-quantile is estimated by 2 gamma^i / (gamma + 1) of the first
  bucket up to which there are more than q (n - 1) values. Its relative error is at most
  alpha.
* **Heavy hitters** by the count-min sketch (Cormode and Muthukrishnan 2005, "An
  improved data stream summary: the count-min sketch and its applications", sections 3
  and 4.1): d rows of w counters, d hash functions, pairwise independent. An item i adds
  one to counter h_j(i) of each row j. The least of them is never below the count of i,
  and with probability 1 - exp(-d) it is at most e n / w above it.
* **Evaluation of an ensemble**: accuracy and log loss of each of its models, and of the
  mean of their probabilities.

The pass is a plan, saved and loaded again, so that it runs without this file:
`--engine beam` writes the records to Parquet files, which the workers of Apache Beam
read (`pip install '.[beam]'`); `--engine ray` is the same on Ray. NumPy, which has all
records at once, gives the exact answers.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
import tyro
from matplotlib.figure import Figure

import drjax
from examples.algorithms import count_min, ddsketch
from examples.common import results
from examples.common.devices import make_mesh
from examples.common.network import apply, init
from examples.common.rounds import Round


@dataclasses.dataclass(frozen=True)
class Config:
    """Answer all questions in one pass, and compare with NumPy."""

    output: Path = Path("runs/analytics")
    """Folder of the plan, the table and the figure; of the Parquet files too."""
    engine: Literal["xla", "in_process", "beam", "ray"] = "xla"
    """What runs the plan."""
    records: int = 1_000_000
    """Records (n)."""
    files: int = 16
    """Parquet files, for Beam and Ray."""
    accuracy: float = 0.01
    """Relative error of quantiles (alpha)."""
    width_bits: int = 10
    """Binary logarithm of the counters in a row of the sketch (w)."""
    depth: int = 4
    """Rows of the sketch (d)."""
    share: float = 0.01
    """Items with at least this share of the records are heavy hitters."""
    models: int = 5
    """Models of the ensemble."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = 500
    """Records of a device that are worked on at once; all by default."""
    seed: int = 0
    """Seed of the records, the hash functions and the models."""


def make_analysis(config: Config):
    """One round, which answers all questions."""

    def count(upper, hashes, record):
        one = count_min.update(hashes, record["item"], config.width_bits)
        return ddsketch.insert(upper, record["value"]), one

    def evaluate(models, record):
        logits = jax.vmap(apply, (0, None))(models, record["x"])
        members = jax.nn.log_softmax(logits)
        ensemble = jax.nn.logsumexp(members, 0, b=1 / config.models)
        scores = jnp.vstack([members, ensemble])
        return scores.argmax(1) == record["y"], -scores[:, record["y"]]

    @drjax.program(records=config.records)
    def analyze(models, upper, hashes, records):
        args = *drjax.broadcast((upper, hashes)), records
        histogram, sketch = drjax.reduce_sum(drjax.map_fn(count, args))
        args = drjax.broadcast(models), records
        right, losses = drjax.reduce_mean(drjax.map_fn(evaluate, args))
        return histogram, sketch, right, losses

    return analyze


LOW, HIGH = 1e-2, 1e4  # of values in the buckets between the first and the last
ITEMS, FEATURES, LABELS = 2**16, 8, 10
SHARES = (0.5, 0.9, 0.99, 0.999)


def draw_records(config: Config, n: int, stream: int) -> dict[str, np.ndarray]:
    """Times of two kinds, items by Zipf's law, and points around ten centers."""
    centers = np.random.default_rng(config.seed).normal(size=(LABELS, FEATURES))
    random = np.random.default_rng((config.seed, stream))
    slow = random.random(n) < 0.1
    value = np.exp(0.5 * random.standard_normal(n) + np.where(slow, 3.5, 1))
    zipf = 1 / np.arange(1, ITEMS + 1) ** 1.2
    ranks = np.searchsorted(np.cumsum(zipf / zipf.sum()), random.random(n))
    # The names of items say nothing about their frequency.
    names = np.random.default_rng(config.seed).permutation(ITEMS)
    y = random.integers(0, LABELS, n)
    x = centers[y] + 0.8 * random.standard_normal((n, FEATURES))
    return {
        "value": value.astype(np.float32),
        "item": names[np.minimum(ranks, ITEMS - 1)].astype(np.uint32),
        "x": x.astype(np.float32),
        "y": y.astype(np.int32),
    }


def train_ensemble(config: Config, width: int = 16, steps: int = 100):
    """Small networks, each trained on 300 records of its own."""
    data = draw_records(config, 300 * config.models, 1)
    x, y = (data[k].reshape(config.models, 300, *data[k].shape[1:]) for k in "xy")
    adam = optax.adam(1e-2)

    def train(key, x, y):
        model = init(jax.random.split(key), FEATURES, width, LABELS)

        def loss(model):
            losses = optax.softmax_cross_entropy_with_integer_labels
            return losses(apply(model, x), y).mean()

        def step(carry, _):
            model, state = carry
            updates, state = adam.update(jax.grad(loss)(model), state)
            return (optax.apply_updates(model, updates), state), None

        return jax.lax.scan(step, (model, adam.init(model)), length=steps)[0][0]

    keys = jax.random.split(jax.random.key(config.seed), config.models)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(train))(keys, x, y))


def make_shared(config: Config) -> tuple:
    """The models, the bounds of the buckets, and the hash functions."""
    upper = ddsketch.bounds(config.accuracy, LOW, HIGH)
    random = np.random.default_rng((config.seed, 2))
    return train_ensemble(config), upper, count_min.draw_hashes(random, config.depth)


def write_parquet(config: Config, records: dict[str, np.ndarray]) -> Path:
    """The records as rows of Parquet files; returns the pattern of their names."""
    import pyarrow
    import pyarrow.parquet

    folder = config.output / "records"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.parquet"):
        old.unlink()
    for i, part in enumerate(np.array_split(np.arange(config.records), config.files)):
        columns: dict[str, Any] = {k: v[part] for k, v in records.items()}
        flat = columns["x"].ravel()
        columns["x"] = pyarrow.FixedSizeListArray.from_arrays(flat, FEATURES)
        table = pyarrow.table(columns)
        path = folder / f"records-{i:03}.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=16384)
    return folder / "*.parquet"


def run_plan(config: Config, path: Path, shared: tuple, records: dict) -> Any:
    """The results of the plan file on the engine."""
    from drjax import backends

    plan = drjax.load_plan(path)
    if config.engine == "xla":
        with jax.set_mesh(make_mesh(config.devices, "records")):
            run = backends.xla.compile(plan, groups_per_step=config.groups_per_step)
            return jax.jit(run)(*shared, records)
    if config.engine == "in_process":
        return backends.in_process.compile(plan, block_size=4096)(*shared, records)
    groups = backends.Parquet(write_parquet(config, records))
    engine = {"beam": "drjax.backends.beam", "ray": "drjax.backends.ray"}
    with importlib.import_module(engine[config.engine]).compile(
        plan, workers=2, block_size=4096
    ) as run:
        return run(*shared, groups)


def evaluate_exactly(models, records):
    """Accuracy and log loss of each model and of the ensemble, in 64 bits."""
    x, y = records["x"].astype(float), records["y"]
    all_right, losses, mean = [], [], np.zeros((len(y), LABELS))
    count = len(models["hidden"])
    for hidden, output in zip(models["hidden"], models["output"], strict=True):
        p = scipy.special.softmax(np.maximum(x @ hidden, 0) @ output, axis=1)
        mean += p / count
        all_right.append((p.argmax(1) == y).mean())
        losses.append(-np.log(p[np.arange(len(y)), y]).mean())
    all_right.append((mean.argmax(1) == y).mean())
    losses.append(-np.log(mean[np.arange(len(y)), y]).mean())
    return np.array(all_right), np.array(losses)


def draw(upper, histogram, quantiles, exact, estimates, bound, right) -> Figure:
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, middle, last = figure.subplots(1, 3)
    left.stairs(histogram[1:-1], upper, fill=True, alpha=0.6)
    for share, x in zip(SHARES, quantiles, strict=True):
        left.axvline(x, color="0.2", linestyle="--", linewidth=1)
        side = "left" if share == SHARES[-1] else "right"  # of the line, away from it
        top = {"rotation": 90, "va": "top", "ha": side, "color": "0.2"}
        left.text(x, 1.3 * histogram[1:-1].max(), f"{share:.1%}", **top)
    left.set(xscale="log", xlim=(0.3, 400), xlabel="value", ylabel="records")
    left.set_ylim(0, 1.32 * histogram[1:-1].max())
    left.set_title("Histogram and quantiles")
    seen = exact > 0
    middle.scatter(exact[seen], estimates[seen], s=4, alpha=0.3, rasterized=True)
    line = np.geomspace(1, exact.max(), 50)
    middle.plot(line, line, color="0.2", linewidth=1, label="exact")
    middle.plot(line, line + bound, "--", color="tab:red", label="bound, e n / w")
    middle.set(xscale="log", yscale="log", xlabel="count", ylabel="estimate")
    middle.set_title("Count-min sketch")
    middle.legend()
    names = [*map(str, range(1, len(right))), "all"]
    colors = ["tab:blue"] * (len(right) - 1) + ["tab:orange"]
    last.bar(names, right, color=colors)
    last.set(ylim=(right.min() - 0.05, right.max() + 0.02), xlabel="model")
    last.set(ylabel="accuracy", title="The ensemble")
    for axes in (left, middle, last):
        axes.grid(alpha=0.3)
    return figure


def engine_round() -> Round:
    """The pass over sixteen records, for `examples.engines`."""
    config = Config(records=16, models=2, width_bits=6)
    analyze = make_analysis(config)

    def step(shared, own, data):
        models, upper, hashes = shared
        return analyze(models, upper, hashes, data), own

    return Round(step, make_shared(config), (), draw_records(config, config.records, 0))


def main(config: Config) -> results.Results:
    """Runs the pass, and compares each answer with the exact one."""
    make_mesh(config.devices, "records")  # before any device is used
    records = draw_records(config, config.records, 0)
    shared = models, upper, hashes = make_shared(config)
    path = config.output / "analysis.drjax"
    path.parent.mkdir(parents=True, exist_ok=True)
    drjax.make_plan(make_analysis(config))(*shared, records).save(path)
    answers = run_plan(config, path, shared, records)
    histogram, sketch, right, losses = map(np.asarray, answers)

    n, bits = config.records, config.width_bits
    buckets = np.searchsorted(upper, records["value"])
    wrong = np.bincount(buckets, minlength=len(histogram)) - histogram
    estimate = lambda q: ddsketch.quantile(histogram, upper, config.accuracy, q)
    quantiles = np.array([estimate(q) for q in SHARES])
    by_numpy = np.quantile(records["value"], SHARES, method="lower")
    counts = np.bincount(records["item"], minlength=ITEMS)
    items = np.arange(ITEMS, dtype=np.uint32)
    estimates = count_min.estimate(sketch, hashes, items, bits)
    bound = np.e * n / 2**bits
    heavy, claimed = counts >= config.share * n, estimates >= config.share * n
    exact_right, exact_losses = evaluate_exactly(models, records)

    table: list[list] = [["values in a wrong bucket", int(abs(wrong).sum()), 0, "", 0]]
    for share, x, y in zip(SHARES, quantiles, by_numpy, strict=True):
        far = f"{abs(x / y - 1):.2%}"
        limit = f"{config.accuracy:.0%}"
        table.append([f"quantile {share:.1%}", f"{x:.3f}", f"{y:.3f}", far, limit])
    for i in np.argsort(-counts)[:3]:
        cells = f"{estimates[i]:,}", f"{counts[i]:,}", f"{estimates[i] - counts[i]:,}"
        table.append([f"count of item {i}", *cells, f"{bound:,.0f}"])
    over = np.mean(estimates - counts > bound)
    cells = f"{over:.3%}", "", "", f"{np.exp(-config.depth):.2%}"
    table.append(["items above the bound", *cells])
    claims = f"{claimed.sum()}, with all {(heavy & claimed).sum()}"
    table.append([f"items over {config.share:.0%}", claims, int(heavy.sum()), "", ""])
    for name, i in ("best model", exact_right[:-1].argmax()), ("ensemble", -1):
        for what, ours, exact in (
            ("accuracy", right, exact_right),
            ("log loss", losses, exact_losses),
        ):
            far = f"{abs(ours[i] - exact[i]):.0e}"
            numbers = f"{ours[i]:.5f}", f"{exact[i]:.5f}", far, "rounding"
            table.append([f"{name}: {what}", *numbers])
    far = np.abs(quantiles / by_numpy - 1).max()
    worst = max(np.abs(right - exact_right).max(), np.abs(losses - exact_losses).max())
    size = sketch.size + histogram.size
    within = far <= config.accuracy and over <= np.exp(-config.depth)
    within &= not wrong.any() and heavy[claimed].sum() == heavy.sum() and worst < 1e-6
    result = results.Results(
        title=f"One pass over {n:,} records, and NumPy",
        columns=["", "one pass", "exact", "difference", "bound"],
        table=table,
        measured=f"{n:,} records in one pass: quantiles within {far:.2%}, "
        f"{(heavy & claimed).sum()} of {heavy.sum()} heavy hitters, an ensemble's "
        f"accuracies and losses within {worst:.0e}.",
        paper=f"Quantiles within {config.accuracy:.0%} (Masson et al. 2019), at most "
        f"{np.exp(-config.depth):.2%} of items over e n / w (Cormode and Muthukrishnan "
        "2005, theorem 1), and NumPy's numbers, which are exact.",
        badge="number reached" if within else None,
        numbers={
            "quantiles": quantiles.tolist(),
            "heavy hitters": estimates[heavy].tolist(),
            "accuracies": right.tolist(),
            "losses": losses.tolist(),
        },
        remarks=[
            f"Engine: {config.engine}. Each record adds to a few of {size:,} counters, "
            "and workers add up those of a block of records.",
            "All items are looked up in the sketch. For a universe too large for this, "
            "the paper has a hierarchy of sketches.",
        ],
    )
    figure = draw(upper, histogram, quantiles, counts, estimates, bound, right)
    result.write(config.output, config, figure)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
