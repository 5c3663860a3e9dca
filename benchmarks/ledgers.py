"""Count the bytes that algorithms communicate, from their plans alone.

    python -m benchmarks.ledgers --out benchmarks/results/ledgers.md

All train one model of a million float32 parameters, and each group computes eight
gradients. Nothing is executed: a plan is made from shapes, and its ledger says what
the server and one group exchange. The last column is what the algorithm needs, in
copies of the model: down, up, and between groups.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

import drjax
from benchmarks.report import table
from examples.algorithms import krum, robust

WIDTH, STEPS, GROUPS = 1000, 8, 16
MODEL = 4 * WIDTH * WIDTH  # bytes

clients = drjax.program(clients=GROUPS)


def loss(model, x):
    return jnp.mean((x @ model) ** 2)


def descend(model, batches, drift=0.0):
    """SGD, with one batch for each step."""
    step = lambda w, x: (w - 0.1 * (jax.grad(loss)(w, x) + drift), None)
    return jax.lax.scan(step, model, batches)[0]


@clients
def every_step(model, batches):
    """Gradients are averaged in each step."""
    for i in range(STEPS):
        grads = drjax.map_fn(jax.grad(loss), (drjax.broadcast(model), batches[:, i]))
        model = model - 0.1 * drjax.reduce_mean(grads)
    return model


@clients
def local_sgd(model, batches):
    """A round of local SGD, of FedAvg or of DiLoCo."""
    models = drjax.map_fn(descend, (drjax.broadcast(model), batches))
    return drjax.reduce_mean(models)


@clients
def local_sgd_int8(model, batches):
    """The updates are sent in 8 bits, as DiLoCo's may be."""
    update = lambda model, batches: descend(model, batches) - model
    updates = drjax.map_fn(update, (drjax.broadcast(model), batches))
    return model + drjax.reduce_mean(updates, wire="int8")


@clients
def scaffold(model, control, controls, batches):
    """Control variates of the server and of each client."""

    def work(model, control, own, batches):
        local = descend(model, batches, control - own)
        return local - model, own - control + (model - local) / (0.1 * STEPS)

    args = *drjax.broadcast((model, control)), controls, batches
    updates, new = drjax.map_fn(work, args)
    return drjax.reduce_mean((updates, new)), new


@clients
def maml(model, batches):
    """The gradient of the loss after seven steps."""

    def meta_loss(model):
        after = lambda model, xs: loss(descend(model, xs[:-1]), xs[-1])
        return drjax.reduce_mean(drjax.map_fn(after, (drjax.broadcast(model), batches)))

    return jax.grad(meta_loss)(model)


def robust_mean(aggregate: Callable) -> Callable:
    """Local models, aggregated as in `examples.algorithms`, two attackers."""

    @clients
    def mean(model, batches):
        models = drjax.map_fn(descend, (drjax.broadcast(model), batches))
        return aggregate(models, 2)

    return mean


@clients
def gossip(models, batches):
    """Each group averages with the next one, without a server."""
    models = drjax.map_fn(descend, (models, batches))
    return drjax.map_fn(lambda a, b: (a + b) / 2, (models, drjax.shift(models, 1)))


# in the papers, in copies of the model: down, up, between groups.
ALGORITHMS: dict[str, tuple[Callable, str, tuple[float, float, float]]] = {
    "SGD, averaged each step": (every_step, "mb", (STEPS, STEPS, 0)),
    "SCAFFOLD": (scaffold, "mmpb", (2, 2, 0)),
    "local SGD, FedAvg, DiLoCo": (local_sgd, "mb", (1, 1, 0)),
    "the same, int8": (local_sgd_int8, "mb", (1, 1 / 4, 0)),
    "gradient of MAML": (maml, "mb", (1, 1, 0)),
    "median of local models": (robust_mean(robust.median), "mb", (1, 1, 0)),
    "Krum": (robust_mean(krum.krum), "mb", (1, 2, 0)),
    "gossip on a ring": (gossip, "pb", (0, 0, 1)),
}


def measure() -> dict[str, tuple[int, int, int]]:
    """Bytes down, up and between groups, for each group, by algorithm."""
    types = {
        "m": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        "p": jax.ShapeDtypeStruct((GROUPS, WIDTH, WIDTH), jnp.float32),
        "b": jax.ShapeDtypeStruct((GROUPS, STEPS, 4, WIDTH), jnp.float32),
    }
    result = {}
    for name, (fn, arguments, _) in ALGORITHMS.items():
        plan = drjax.make_plan(fn)(*(types[x] for x in arguments))
        ledger = plan.communication()
        result[name] = ledger.down(), ledger.up(), ledger.between()
    return result


def markdown(measured: dict[str, tuple[int, int, int]]) -> str:
    """The table of all algorithms."""
    columns = ["algorithm", "bytes down", "up", "between groups", "in models"]
    lines = []
    for name, counts in measured.items():
        *_, needed = ALGORITHMS[name]
        models = ", ".join(f"{x:g}" for x in needed)
        lines.append([name, *(f"{x:,}" for x in counts), models])
    return (
        f"JAX {jax.__version__}. Bytes of one group, for {STEPS} gradients of a model "
        f"of {MODEL // 4:,} float32 parameters; in models: what the algorithm "
        "needs, in copies of the model, in the same order.\n\n"
        f"{table(columns, lines)}\n"
    )


def main() -> None:
    """Writes or prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="the Markdown file to write")
    out = parser.parse_args().out
    text = markdown(measure())
    print(text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
