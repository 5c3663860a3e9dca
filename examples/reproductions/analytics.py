"""Analytics in one pass: histogram, quantiles, heavy hitters, and an ensemble's test.

    python -m examples.reproductions.analytics

Each of a million records is a group, and nothing of it is kept but its part of a sum.
All questions are answered by one round:

* **Histogram and quantiles.** Buckets grow by a factor g = (1 + a) / (1 - a): bucket i
  has the values in (g^(i-1), g^i]. The q-quantile is estimated by the middle,
  2 g^i / (g + 1), of the first bucket up to which there are q n values; its relative
  error is at most a (Masson, Rim and Lee 2019, "DDSketch", arXiv 1908.10693, section
  2).
* **Heavy hitters** by the count-min sketch (Cormode and Muthukrishnan 2005, "An
  improved data stream summary: the count-min sketch and its applications", sections 3
  and 4.1): d rows of w counters, d hash functions, pairwise independent. An item i adds
  one to counter h_j(i) of each row j, and

        estimate(i) = the least of the counters h_j(i)

  is never below the count of i, and with probability 1 - exp(-d) it is at most
  e n / w above it. The hash functions multiply, add and take the upper bits
  (Dietzfelbinger 1996).
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
    """Relative error of quantiles (a)."""
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


# --8<-- [start:algorithm]
def hash_item(item, hashes, bits: int):
    """The counter of an item (below 2^(33 - bits)) in each row of the sketch."""
    return (hashes["factor"] * item + hashes["summand"]) >> (32 - bits)


def make_analysis(config: Config):
    def count(edges, hashes, record):
        # Bucket i has the values in (edges[i - 1], edges[i]].
        bucket = jnp.searchsorted(edges, record["value"])
        counters = hash_item(record["item"], hashes, config.width_bits)
        one_hot = lambda i, size: jax.nn.one_hot(i, size, dtype=jnp.int32)
        return one_hot(bucket, len(edges) + 1), one_hot(counters, 2**config.width_bits)

    def evaluate(models, record):
        logits = jax.vmap(apply, (0, None))(models, record["x"])
        members = jax.nn.log_softmax(logits)
        ensemble = jax.nn.logsumexp(members, 0, b=1 / config.models)
        scores = jnp.vstack([members, ensemble])
        return scores.argmax(1) == record["y"], -scores[:, record["y"]]

    @drjax.program(records=config.records)
    def analyze(models, edges, hashes, records):
        args = *drjax.broadcast((edges, hashes)), records
        histogram, sketch = drjax.reduce_sum(drjax.map_fn(count, args))
        args = drjax.broadcast(models), records
        right, losses = drjax.reduce_mean(drjax.map_fn(evaluate, args))
        return histogram, sketch, right, losses

    return analyze


# --8<-- [end:algorithm]
def estimate_counts(sketch, items, hashes, bits: int):
    """The sketch's counts of items: the least of their counters."""
    counters = [hash_item(x, hashes, bits) for x in items]
    return sketch[np.arange(len(sketch)), np.array(counters)].min(1)


def estimate_quantiles(histogram, edges, shares, accuracy: float):
    """The middles, with the least relative error, of the buckets with the quantiles."""
    ranks = np.maximum(np.ceil(np.array(shares) * histogram.sum()), 1)
    upper = edges[np.searchsorted(np.cumsum(histogram), ranks)]
    return upper * (1 - accuracy)


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


def draw_hashes(config: Config) -> dict[str, np.ndarray]:
    random = np.random.default_rng((config.seed, 2))
    draw = lambda: random.integers(0, 2**32, config.depth, np.uint32)
    return {"factor": draw(), "summand": draw()}


def bucket_edges(config: Config) -> np.ndarray:
    growth = (1 + config.accuracy) / (1 - config.accuracy)
    count = np.ceil(np.log(HIGH / LOW) / np.log(growth))
    return (LOW * growth ** np.arange(count + 1)).astype(np.float32)


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


def draw(edges, histogram, quantiles, exact, estimates, bound, right) -> Figure:
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    left, middle, last = figure.subplots(1, 3)
    left.stairs(histogram[1:-1], edges, fill=True, alpha=0.6)
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
        models, edges, hashes = shared
        return analyze(models, edges, hashes, data), own

    shared = train_ensemble(config), bucket_edges(config), draw_hashes(config)
    return Round(step, shared, (), draw_records(config, config.records, 0))


def main(config: Config) -> results.Results:
    """Runs the pass, and compares each answer with the exact one."""
    make_mesh(config.devices, "records")  # before any device is used
    records = draw_records(config, config.records, 0)
    models, edges, hashes = (
        train_ensemble(config),
        bucket_edges(config),
        draw_hashes(config),
    )
    shared = models, edges, hashes
    path = config.output / "analysis.drjax"
    path.parent.mkdir(parents=True, exist_ok=True)
    drjax.make_plan(make_analysis(config))(*shared, records).save(path)
    answers = run_plan(config, path, shared, records)
    histogram, sketch, right, losses = map(np.asarray, answers)

    n, bits = config.records, config.width_bits
    buckets = np.searchsorted(edges, records["value"])
    wrong = np.bincount(buckets, minlength=len(histogram)) - histogram
    quantiles = estimate_quantiles(histogram, edges, SHARES, config.accuracy)
    by_numpy = np.quantile(records["value"], SHARES, method="inverted_cdf")
    counts = np.bincount(records["item"], minlength=ITEMS)
    items = np.arange(ITEMS, dtype=np.uint32)
    estimates = estimate_counts(sketch, items, hashes, bits)
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
    result = results.Results(
        title=f"One pass over {n:,} records, and NumPy",
        columns=["", "one pass", "exact", "difference", "bound"],
        table=table,
        measured=f"Quantiles within {far:.2%}; {over:.3%} of {ITEMS:,} items are "
        f"overestimated by more than e n / w; {(heavy & claimed).sum()} of "
        f"{heavy.sum()} heavy hitters are found; accuracies and losses within "
        f"{worst:.0e}.",
        paper=f"Quantiles within {config.accuracy:.0%} (Masson et al. 2019), at most "
        f"{np.exp(-config.depth):.2%} of items over e n / w (Cormode and Muthukrishnan "
        "2005, theorem 1), and NumPy's numbers, which are exact.",
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
    figure = draw(edges, histogram, quantiles, counts, estimates, bound, right)
    result.write(config.output, config, figure)
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
