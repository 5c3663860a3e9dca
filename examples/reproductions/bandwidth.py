"""The bandwidth that DiLoCo and data parallelism need between two datacenters.

    python -m examples.reproductions.bandwidth

Replicas of a model train in datacenters with a slow link between them. Data parallelism
averages their gradients in every step; DiLoCo (Douillard et al. 2023, arXiv 2311.08105,
algorithm 1) averages what H steps have changed; Streaming DiLoCo (Douillard et al.
2025, arXiv 2501.18512, algorithm 2) does so for a fragment of three layers at a time,
and may receive it a step later. How fast has the link to be, so that the accelerators
compute for 99 % of the time? Two published tables answer this by simulation: Table 4 of
the latter, and Table 6 of "Communication-Efficient Language Model Training Scales
Reliably and Robustly: Scaling Laws for DiLoCo" (Charles et al. 2025, arXiv 2503.09799).

The simulated schedule is that of section 3.1 of the former. A step of t seconds has
4 L - 1 nodes: for each of L layers the forward pass, the gradients of its parameters,
those of its input (not of the first layer), and its reduction. The reduction starts
after the gradients of the parameters; the link does one at a time; and the forward pass
of the layer waits for it, in the next step or `delay` steps later. The tables do not
say in which order layers are reduced that wait for the link: here the first layer goes
first, as it is needed first. The bandwidth is the first of `logspace(-1, 3, 50)` Gbit/s
that reaches the compute utilization.

The bits are those of the plan's ledger, `plan.communication(2)`, of programs that train
a transformer with 10 billion parameters in bfloat16: 16 for each parameter. A
bandwidth-optimal all-reduce sends 2 (1 - 1/m) times the bytes that a device puts into
it (Patarasuk and Yuan 2009); for m = 2 this is 1. The programs are planned from shapes;
nothing is allocated. No number is fitted. `--plan FILE` adds a line for any saved plan.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from matplotlib.figure import Figure

import drjax
from drjax.compiled import Report
from examples.algorithms import bandwidth
from examples.common import results
from examples.common.devices import make_mesh
from examples.common.transformer import Transformer, TransformerConfig, mean_loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Simulate the compute utilization for each bandwidth, from the bytes of plans."""

    output: Path = Path("runs/bandwidth")
    """Folder of the table and the figure."""
    model: TransformerConfig = TransformerConfig(
        *(4096, 48, 32),
        vocab=2**15,
        scan=True,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )
    """The model whose bits are counted; by default with 10 billion parameters."""
    tables: tuple[int, ...] = (4, 6)
    """Which to simulate, 4 of Douillard et al. 2025 and 6 of Charles et al. 2025."""
    plan: Path | None = None
    """A plan file to simulate, with bits as in its ledger."""
    seconds: float = 0.8
    """Time to compute a step of the plan in --plan."""
    devices: int = 2
    """Devices of a small round that is run and compared with its ledger."""
    groups_per_step: int | None = None
    """Replicas of a device that run at once in the small round; all by default."""
    seed: int = 0
    """Seed of the small model and its data."""


STREAMING = "Streaming DiLoCo"


class Model(NamedTuple):
    """Of a table: billions of parameters, time of a step, layers, its lines."""

    table: int
    billions: float
    seconds: float
    layers: int
    quoted: dict[str, tuple[float, ...]]

    def settings(self, line: str) -> dict[str, int]:
        """H, fragments and delay."""
        if line.startswith("DiLoCo"):
            return {"H": int(line.split()[-1])}
        if line == "data-parallel":
            return {}
        fragments = self.layers // bandwidth.LAYERS
        return {"H": 100, "fragments": fragments, "delay": int(line != STREAMING)}

    def timing(self, line: str, bits: float) -> tuple[Any, float, int, int]:
        """Arguments of `needed`: the published exchanges, seconds, layers, H."""
        settings = self.settings(line)
        sent = bandwidth.schedule(bits * self.billions, self.layers, **settings)
        return sent, self.seconds, self.layers, settings.get("H", 1)


MODELS = (
    Model(
        *(4, 1.0, 0.1, 24),
        {
            "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
            "DiLoCo, H = 100": (1.4, 6.2, 13.3, 23.3, 86.8),
            STREAMING: (1.4, 5.2, 9.1, 16.0, 28.1),
            "overlapped": (1.4, 4.3, 6.2, 9.1, 11.0),
            "overlapped, fp4": (0.4, 0.9, 1.7, 2.0, 3.0),
        },
    ),
    Model(
        *(4, 10.0, 0.8, 48),
        {
            "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
            "DiLoCo, H = 100": (1.7, 7.5, 16.0, 33.9, 104.8),
            STREAMING: (1.7, 5.2, 9.1, 13.3, 19.3),
            "overlapped": (1.7, 3.6, 5.2, 6.2, 7.5),
            "overlapped, fp4": (0.4, 0.9, 1.4, 1.4, 1.7),
        },
    ),
    Model(
        *(4, 100.0, 4.9, 108),
        {
            "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
            "DiLoCo, H = 100": (3.0, 11.0, 23.3, 49.4, 184.2),
            STREAMING: (2.4, 6.2, 9.1, 11.0, 19.3),
            "overlapped": (1.7, 3.6, 4.3, 5.2, 5.2),
            "overlapped, fp4": (0.5, 0.9, 1.1, 1.1, 1.4),
        },
    ),
    Model(
        *(6, 10.0, 0.8, 48),
        {
            "data-parallel": (104.8, 184.2, 222.3, 222.3, 390.7),
            "DiLoCo, H = 10": (16.0, 49.4, 86.8, 152.6, 222.3),
            "DiLoCo, H = 50": (3.0, 11.0, 23.3, 41.0, 126.5),
            "DiLoCo, H = 100": (1.4, 6.2, 13.3, 23.3, 86.8),
            "DiLoCo, H = 300": (0.5, 2.0, 4.3, 9.1, 41.0),
        },
    ),
    Model(
        *(6, 405.0, 26.0, 126),  # Llama 3 405B has 126 layers
        {
            "data-parallel": (126.5, 222.3, 268.3, 323.8, 323.8),
            "DiLoCo, H = 10": (19.3, 72.0, 126.5, 184.2, 268.3),
            "DiLoCo, H = 50": (3.6, 13.3, 28.1, 59.6, 184.2),
            "DiLoCo, H = 100": (2.0, 7.5, 16.0, 33.9, 126.5),
            "DiLoCo, H = 300": (0.7, 3.0, 6.2, 13.3, 59.6),
        },
    ),
    Model(
        *(6, 671.0, 20.0, 61),  # DeepSeek-V3 has 61 layers
        {
            "data-parallel": (323.8, 569.0, 686.6, 686.6, np.inf),
            "DiLoCo, H = 10": (49.4, 152.6, 268.3, 390.7, 686.6),
            "DiLoCo, H = 50": (7.5, 33.9, 72.0, 126.5, 390.7),
            "DiLoCo, H = 100": (4.3, 16.0, 41.0, 72.0, 268.3),
            "DiLoCo, H = 300": (1.7, 6.2, 13.3, 28.1, 126.5),
        },
    ),
)


GBITS = np.append(bandwidth.GRID, np.inf)  # where none is enough


def make_loss(graphdef: nnx.GraphDef):
    def loss(params, tokens):
        lengths = jnp.full(tokens.shape[:-1], tokens.shape[-1] - 1)
        return mean_loss(nnx.merge(graphdef, params), tokens, lengths)[0]

    return loss


def make_data_parallel(loss, optimizer, replicas=2):
    @drjax.program(replicas=replicas)
    def step(params, moments, tokens):
        grads = drjax.map_fn(jax.grad(loss), (drjax.broadcast(params), tokens))
        updates, moments = optimizer.update(drjax.reduce_mean(grads), moments, params)
        return optax.apply_updates(params, updates), moments

    return step


def make_diloco(loss, inner, outer, replicas=2, wire=None):
    @drjax.program(replicas=replicas)
    def train_round(params, moments, momentum, tokens):
        def train(params, moments, tokens):
            def step(carry, tokens):
                local, moments = carry
                grads = jax.grad(loss)(local, tokens)
                updates, moments = inner.update(grads, moments, local)
                return (optax.apply_updates(local, updates), moments), None

            (local, moments), _ = jax.lax.scan(step, (params, moments), tokens)
            return optax.tree.sub(params, local), moments

        args = drjax.broadcast(params), moments, tokens
        updates, moments = drjax.map_fn(train, args)
        update = drjax.reduce_mean(updates, wire=wire)
        step, momentum = outer.update(update, momentum, params)
        return optax.apply_updates(params, step), moments, momentum

    return train_round


def index_of(quoted) -> np.ndarray:
    """The indices in GRID of published, rounded bandwidths; its length if none."""
    ratios = np.array(quoted)[:, None] / bandwidth.GRID
    nearest = np.abs(np.log(ratios)).argmin(1)
    return np.where(np.isinf(quoted), len(bandwidth.GRID), nearest)


def shown(bandwidths) -> list[str]:
    most = bandwidth.GRID[-1]
    return [f"{x:.1f}" if x <= most else f"> {most:g}" for x in bandwidths]


def inner_state(inner, params, replicas=2):
    """The moments of all replicas, with leaves `[replicas, ...]`."""
    return jax.vmap(inner.init, axis_size=replicas, in_axes=None)(params)


def bits_of_plans(model: TransformerConfig, H=100) -> dict[str, float]:
    """Bits of a parameter that a program sends each time, by its ledger."""
    network = nnx.eval_shape(lambda: Transformer(model, nnx.Rngs(0)))
    graphdef, params = nnx.split(network)
    loss, inner = make_loss(graphdef), optax.adamw(1e-4)
    outer = optax.sgd(0.7, 0.9, nesterov=True)
    moments, momentum = (jax.eval_shape(x.init, params) for x in (inner, outer))
    tokens = lambda *steps: jax.ShapeDtypeStruct((2, *steps, 8, 2049), jnp.int32)
    step = make_data_parallel(loss, inner)
    plans = {"data-parallel": drjax.make_plan(step)(params, moments, tokens())}
    args = jax.eval_shape(lambda x: inner_state(inner, x), params), momentum, tokens(H)
    for name, wire in ("DiLoCo", None), ("fp4", "float4_e2m1fn"):
        train_round = make_diloco(loss, inner, outer, wire=wire)
        plans[name] = drjax.make_plan(train_round)(params, *args)
    parameters = sum(x.size for x in jax.tree.leaves(params))
    return {x: bandwidth.link_gbits(y) / parameters * 1e9 for x, y in plans.items()}


def run_small_round(config: Config):
    """The bytes that a round on the devices reduces, those of its ledger, its model."""
    mesh = make_mesh(config.devices, "replicas")
    loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"] - x[:, :4]) ** 2)
    inner, outer = optax.adamw(1e-2), optax.sgd(0.7, 0.9, nesterov=True)
    train_round = make_diloco(loss, inner, outer, replicas=8)
    params = {"w": jnp.zeros((8, 4)), "b": jnp.zeros(4)}
    data = jax.random.normal(jax.random.key(config.seed), (8, 5, 20, 8))
    args = params, inner_state(inner, params, 8), outer.init(params), data
    with jax.set_mesh(mesh):
        step = drjax.jit(train_round, groups_per_step=config.groups_per_step)
        compiled = step.lower(*args).compile()
        params, *_ = compiled(*args)
    counted = sum(c.result_bytes for c in Report.of(compiled).collectives)
    ledger = drjax.make_plan(train_round)(*args).communication(len(mesh.devices))
    # One device reduces by itself: its compiled collectives communicate nothing.
    expected = ledger.reduced_per_device() if len(mesh.devices) > 1 else counted
    return counted, expected, params["w"].ravel().tolist()


def main(config: Config) -> results.Results:
    """Plans the programs, simulates their schedules, compares with the tables."""
    counted, expected, weights = run_small_round(config)
    if counted != expected:
        raise ValueError(f"{counted} bytes are reduced, {expected} in the ledger.")
    grid, table, curves, off = {}, [], {}, {x: [] for x in config.tables}
    if config.plan is not None:
        gbits = bandwidth.link_gbits(drjax.load_plan(config.plan))
        layers = config.model.layers
        sent = bandwidth.schedule(gbits, layers)
        least = GBITS[bandwidth.needed(sent, config.seconds, layers)]
        grid[config.plan.name] = least
        table.append([config.plan.name, *shown(least)])
    bits = bits_of_plans(config.model)
    for model in MODELS:
        if model.table not in config.tables:
            continue
        for line, quoted in model.quoted.items():
            kind = next((x for x in ("data-parallel", "fp4") if x in line), "DiLoCo")
            timing = model.timing(line, bits[kind])
            name = f"{model.table}: {model.billions:.0f}B, {line}"
            indices = bandwidth.needed(*timing)
            off[model.table].append(indices - index_of(quoted))
            grid[name] = GBITS[indices]
            pairs = zip(shown(grid[name]), shown(quoted), strict=True)
            table.append([name, *(f"{x} ({y})" for x, y in pairs)])
            if model.billions in (10, 405):
                utilizations = [
                    bandwidth.utilization(timing[0], W, *timing[1:])
                    for W in bandwidth.GRID
                ]
                curves[model.table, model.billions, line] = utilizations, quoted
    far = {x: np.abs(y) for x, y in off.items()}
    most = max(x.max() for x in far.values())
    counts = "; ".join(
        f"Table {x}: {(y == 0).sum()} of {y.size} equal, {(y <= 1).sum()} within one "
        f"step, all within {y.max()}"
        for x, y in far.items()
    )
    result = results.Results(
        title="Gbit/s for a compute utilization, in brackets the published",
        columns=["table, model", *(f"{target:.0%}" for target in bandwidth.TARGETS)],
        table=table,
        measured=f"{bits['DiLoCo']:g} bits of the ledger, nothing fitted, in steps of "
        f"the published grid, 21 %: {counts}.",
        paper="for 99 % at 10B, data-parallel 471.5 Gbit/s, DiLoCo 104.8, Streaming "
        "DiLoCo 19.3, overlapped 7.5, with fp4 1.7 (Douillard et al. 2025, Table 4); "
        "at 405B, data-parallel 323.8, DiLoCo with H = 300 59.6 (Charles et al. 2025, "
        "Table 6).",
        badge="order reached" if most <= 2 else None,
        numbers={
            name: np.minimum(x, bandwidth.GRID[-1]).tolist() for name, x in grid.items()
        }
        | {"small round": weights},
        remarks=[
            "The two tables differ from each other for the same 10B model: DiLoCo with "
            "H = 100 needs 1.7 to 104.8 Gbit/s in Table 4, and 1.4 to 86.8 in Table 6.",
            "An assumption is the order of layers that wait for the link: the first "
            "one goes first, so that the next step can begin. If the last one did, "
            "data parallelism could not overlap reductions with the next step.",
            f"In fp4, a parameter and its share of a scale are {bits['fp4']:g} bits in "
            "the ledger; the paper counts 4. Models of a table are taken to have equal "
            "layers, and for each parameter the bits of the model that is planned.",
            f"A small round on {config.devices} devices reduced {counted:,} bytes, as "
            "its ledger says.",
        ],
    )
    result.write(config.output, config, draw(curves))
    return result


def draw(curves) -> Figure:
    """Utilization by bandwidth, with the published numbers as points."""
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    models = dict.fromkeys(key[:2] for key in curves)
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (table, billions) in zip(panels, models, strict=True):
        for (*model, line), (values, quoted) in curves.items():
            if model == [table, billions]:
                (drawn,) = axes.plot(bandwidth.GRID, values, label=line)
                color = drawn.get_color()
                axes.plot(quoted, bandwidth.TARGETS, "o", color=color, markersize=4)
        title = f"{billions:.0f}B, Table {table}"
        axes.set(xscale="log", xlabel="bandwidth (Gbit/s)", title=title)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="lower right")
    panels[0].set_ylabel("compute utilization")
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config))
