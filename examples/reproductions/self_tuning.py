"""Self-tuning: gradients by client weights and by learning rates, through rounds.

    python -m examples.reproductions.self_tuning

Federated averaging has hyperparameters. Federated automatic differentiation (Rush et
al. 2023, arXiv 2301.07806) computes derivatives by them through the communication, so
they are trained too. With hyperparameters h = (v_1 ... v_n, a, b), in a round

    the server sends the model w
    each client k, in parallel: w_k = w after some steps of SGD with the inner rate
    w = w - outer rate * sum_k weight_k (w - w_k) / sum_k weight_k
    with weight_k = sigmoid(v_k), inner rate = sigmoid(a), outer rate = 2 sigmoid(b)

whose bounds keep a step of h from leaving what is sensible.

* **Through all rounds**: F(h) is the loss of the server's own validation examples after
  T rounds from the initial model. In each pass, h = h - step of Adam for F'(h).
* **Truncated**: h changes while the model trains, every K rounds, by the gradient
  through the last K rounds only: a scan over windows, with a scan over rounds inside.

The gradient of T rounds is T rounds of the same kind, forward and backward. `jax.jit`
saves the residuals of all local steps of all clients; with `jax.checkpoint` around a
round it saves a model for each round, and the residuals of all clients in one round.
`drjax.jit` rematerializes a client's work, one client of a device at a time.

Half of the clients have random labels, and the server does not know which.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from examples.common import clients, digits, results
from examples.common.devices import make_mesh
from examples.common.network import apply, init, loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Tune client weights and learning rates by gradients through rounds."""

    output: Path = Path("runs/self_tuning")
    """Folder of the table and the figure."""
    rounds: int = 16
    """Rounds of training (T)."""
    window: int = 4
    """Rounds between two steps of the hyperparameters in the truncated form (K)."""
    passes: int = 30
    """Trainings of the form through all rounds, each with a step of Adam."""
    meta_rate: float = 0.2
    """Rate of Adam for the hyperparameters."""
    clients: int = 16
    """Clients; all take part in every round."""
    noisy: float = 0.5
    """Share of the clients with random labels."""
    steps: int = 4
    """Local steps of a client in a round."""
    batch: int = 16
    """Digits in a local step."""
    width: int = 32
    """Width of the network's hidden layer."""
    validation: int = 200
    """Digits of the server's, by which the hyperparameters are judged."""
    only: str = ""
    """Tune only in the forms with this in their name."""
    memory: bool = True
    """Compile the gradient in three ways, for the bytes that it needs."""
    devices: int = 2
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = 1
    """Clients of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the initial model, the partition, the labels and the batches."""


DEFAULT = 0.1, 1.0  # the inner and the outer rate
RATES = [*itertools.product((0.1, 0.2, 0.4, 0.8), (0.7, 1.0, 1.4))]


class Hyper(NamedTuple):
    """Hyperparameters without bounds; `bounded` has what they stand for."""

    weights: Array  # [clients]
    inner: Array
    outer: Array


def bounded(hyper: Hyper) -> Hyper:
    """Weights and the inner rate in (0, 1), and the outer rate in (0, 2)."""
    return Hyper(*map(jax.nn.sigmoid, hyper))._replace(
        outer=2 * jax.nn.sigmoid(hyper.outer)
    )


def unbounded(inner: float, outer: float, n: int) -> Hyper:
    """The hyperparameters for these rates and for n equal weights."""
    logit = lambda x: jnp.log(x / (1 - x))
    return Hyper(jnp.zeros(n), logit(jnp.float32(inner)), logit(jnp.float32(outer / 2)))


# --8<-- [start:algorithm]
def make_round(config: Config):
    def client_update(params, rate, examples, key):
        def step(local, key):
            ids = jax.random.randint(key, (config.batch,), 0, len(examples.y))
            grads = jax.grad(loss)(local, jax.tree.map(lambda x: x[ids], examples))
            return optax.tree.add_scale(local, -rate, grads), None

        local, _ = jax.lax.scan(step, params, jax.random.split(key, config.steps))
        return optax.tree.sub(params, local)

    @drjax.program(clients=config.clients)
    def train_round(params, hyper: Hyper, examples, keys):
        weights, inner, outer = bounded(hyper)
        shared = drjax.broadcast((params, inner))
        updates = drjax.map_fn(client_update, (*shared, examples, keys))
        update = drjax.reduce_weighted_mean(updates, drjax.scatter(weights))
        return optax.tree.add_scale(params, -outer, update)

    return train_round


def train(train_round, hyper, params, examples, validation, keys):
    """The loss after a round for each of keys `[rounds, clients]`, and the model."""
    step = lambda params, keys: (train_round(params, hyper, examples, keys), None)
    params, _ = jax.lax.scan(step, params, keys)
    return loss(params, validation), params


def train_truncated(train_round, adam, state, params, examples, validation, keys):
    """The same, with a step of Adam for `state` by window: keys `[windows, K, n]`."""
    value_and_grad = jax.value_and_grad(train, argnums=1, has_aux=True)

    def window(carry, keys):
        (hyper, moments), params = carry
        args = hyper, params, examples, validation, keys
        (value, params), grads = value_and_grad(train_round, *args)
        updates, moments = adam.update(grads, moments)
        return ((optax.apply_updates(hyper, updates), moments), params), value

    (state, params), values = jax.lax.scan(window, (state, params), keys)
    return state, values[-1]


# --8<-- [end:algorithm]
def make_data(config: Config):
    """The clients' digits, some with random labels; the server's; those of the test."""
    data, test = digits.load_mnist()
    pick = lambda i: jax.tree.map(lambda x: jnp.asarray(x[i]), data)
    order = np.random.default_rng(config.seed).permutation(len(data.y))
    own, rest = np.split(order, [config.validation])
    parts = clients.split_iid(data.y[rest], config.clients, config.seed)
    size = min(map(len, parts))
    examples = pick(np.stack([rest[part[:size]] for part in parts]))
    labels = jax.random.randint(
        jax.random.key(config.seed), examples.y.shape, 0, 10, examples.y.dtype
    )
    noisy = jnp.arange(config.clients) < round(config.noisy * config.clients)
    labels = jnp.where(noisy[:, None], labels, examples.y)
    return examples._replace(y=labels), noisy, pick(own), test


def round_keys(config: Config, number: int) -> Array:
    """Keys of training `number`, for each round and client: `[rounds, clients]`."""
    key = jax.random.fold_in(jax.random.key(config.seed), number)
    rounds = jax.random.split(key, config.rounds)
    ids = jnp.arange(config.clients)
    return jax.vmap(clients.client_keys, in_axes=(0, None))(rounds, ids)


def tune(config: Config, name: str, train_round, params, data):
    """The hyperparameters after all passes, and the validation loss in each."""
    adam = optax.adam(config.meta_rate)
    value_and_grad = jax.value_and_grad(train, argnums=1, has_aux=True)

    def full(state, params, examples, validation, keys):
        hyper, moments = state
        args = hyper, params, examples, validation, keys
        (value, _), grads = value_and_grad(train_round, *args)
        updates, moments = adam.update(grads, moments)
        return (optax.apply_updates(hyper, updates), moments), value

    def truncated(state, params, examples, validation, keys):
        keys = keys.reshape(-1, config.window, config.clients)
        args = state, params, examples, validation, keys
        return train_truncated(train_round, adam, *args)

    step = {"all rounds": full, "truncated": truncated}[name]
    step = drjax.jit(step, groups_per_step=config.groups_per_step)
    hyper, values = unbounded(*DEFAULT, config.clients), []
    state = replicated((hyper, adam.init(hyper)))
    for number in tqdm(range(config.passes), name, leave=False):
        state, value = step(state, params, *data, round_keys(config, number))
        state = replicated(jax.block_until_ready(state))
        values.append(float(value))
    return state[0], values


def replicated(tree):
    """The same on all devices of the mesh, for one compilation of a step."""
    return jax.device_put(tree, NamedSharding(jax.sharding.get_mesh(), PartitionSpec()))


def temporary_bytes(config: Config, train_round, args) -> dict[str, list[int]]:
    """Of the gradient through 1/4, 1/2 and all rounds, by how it is compiled."""
    hyper, params, examples, validation, keys = args
    plain, saved = (
        lambda *args, fn=fn: jax.value_and_grad(train, argnums=1, has_aux=True)(
            fn, *args
        )
        for fn in (train_round, jax.checkpoint(train_round))
    )
    ways = {
        "jax.jit": jax.jit(plain),
        "jax.jit and jax.checkpoint": jax.jit(saved),
        "drjax.jit": drjax.jit(plain, groups_per_step=config.groups_per_step),
    }
    return {
        name: [
            drjax.collectives(step)(
                hyper, params, examples, validation, keys[:rounds]
            ).temp_bytes
            for rounds in lengths(config)
        ]
        for name, step in ways.items()
    }


def lengths(config: Config) -> list[int]:
    return [config.rounds // k for k in (4, 2, 1)]


def main(config: Config) -> results.Results:
    """Tunes in both forms, and compares with fixed hyperparameters."""
    mesh = make_mesh(config.devices, "clients")
    examples, noisy, validation, test = make_data(config)
    keys = jax.random.split(jax.random.key(config.seed))
    params = init(keys, 784, config.width)
    train_round = make_round(config)
    new = round_keys(config, config.passes)  # the batches of no pass
    fit = lambda hyper: train(train_round, hyper, params, examples, validation, new)
    fit = drjax.jit(fit, groups_per_step=config.groups_per_step)
    curves, sizes = {}, {}
    with jax.set_mesh(mesh):
        grid = [unbounded(*rates, config.clients) for rates in RATES]
        best = min(grid, key=lambda hyper: float(fit(replicated(hyper))[0]))
        fixed = f"fixed, best of {len(grid)} rates"
        runs = {"fixed, default rates": unbounded(*DEFAULT, config.clients)}
        runs[fixed] = best
        for name in [
            name for name in ("all rounds", "truncated") if config.only in name
        ]:
            args = train_round, params, (examples, validation)
            runs[f"tuned, {name}"], curves[name] = tune(config, name, *args)
        weights = jnp.where(noisy, -20.0, 20.0)
        runs["best rates, clean clients"] = best._replace(weights=weights)
        table, losses = [], {}
        for name, hyper in runs.items():
            value, model = fit(replicated(hyper))
            losses[name] = float(loss(model, test))
            right = (apply(model, test.x).argmax(-1) == test.y).mean()
            weights, inner, outer = bounded(hyper)
            clean = weights[~noisy].sum() / weights.sum()
            cells = f"{inner:.2f}", f"{outer:.2f}", f"{clean:.1%}", f"{value:.3f}"
            table.append([name, *cells, f"{losses[name]:.3f}", f"{right:.1%}"])
        if config.memory:
            args = best, params, examples, validation, new
            sizes = temporary_bytes(config, train_round, args)
    levels = {name: float(line[4]) for name, line in zip(runs, table, strict=True)}
    levels = {name: levels[name] for name in (fixed, "best rates, clean clients")}
    last = [name for name in runs if name.startswith("tuned")]
    megabytes = {
        name: ", ".join(f"{size / 1e6:.1f}" for size in values)
        for name, values in sizes.items()
    }
    result = results.Results(
        title=f"{config.rounds} rounds, {config.noisy:.0%} of the clients with random "
        "labels",
        columns=[
            *("", "rates, inner and outer", "weight of clean clients"),
            *("validation loss", "test loss", "test accuracy"),
        ],
        table=[[name, f"{x}, {y}", *rest] for name, x, y, *rest in table],
        measured="Test loss "
        + ", ".join(f"{losses[name]:.3f} ({name})" for name in (*last, fixed))
        + "; temporary MB of the gradient through "
        + f"{config.rounds} rounds: "
        + ", ".join(f"{name} {x[-1] / 1e6:.1f}" for name, x in sizes.items())
        + ".",
        paper="none on this task: the paper tunes on larger federated data sets, and "
        "its claim is that tuned hyperparameters are better than fixed ones.",
        numbers=curves | {"test loss": list(losses.values())},
        remarks=[
            f"Temporary MB of a device for the gradient through "
            f"{', '.join(map(str, lengths(config)))} rounds, by the compiler's memory "
            "analysis: "
            + "; ".join(f"{name}: {text}" for name, text in megabytes.items())
            + ".",
            "The last line knows the clean clients, the others do not. The server "
            f"has {config.validation} clean digits, to which h is fitted; nothing else "
            "is trained on them.",
            "Both forms compute for as long: a pass is a training from the initial "
            "model, with one step of h or, truncated, "
            f"{config.rounds // config.window}. The lines of the table are of one more "
            "training, with batches that are in no pass.",
        ],
    )
    result.write(config.output, config, draw(config, curves, levels, sizes))
    return result


def draw(config: Config, curves, levels, sizes) -> Figure:
    """Validation loss by pass, and bytes by the number of rounds."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, values in curves.items():
        left.plot(range(1, len(values) + 1), values, label=f"tuned, {name}")
    for (name, value), style in zip(levels.items(), ("--", ":"), strict=True):
        left.axhline(value, color="0.35", linestyle=style, label=name)
    left.set(xlabel="pass", ylabel="validation loss", yscale="log")
    left.legend(fontsize=9)
    for name, values in sizes.items():
        right.plot(lengths(config), np.array(values) / 1e6, "o-", label=name)
    right.set(xlabel="rounds", ylabel="temporary MB of the gradient")
    if sizes:
        right.set(yscale="log", xticks=lengths(config))
        right.legend(fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config))
