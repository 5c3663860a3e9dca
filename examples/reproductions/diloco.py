"""DiLoCo and Streaming DiLoCo: workers that communicate once in many steps.

    python -m examples.reproductions.diloco

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1). In a round t

    each worker i of k, in parallel:
        theta_i = theta
        H times: theta_i = InnerOpt(theta_i, gradient of its loss on its own data)
    outer gradient Delta = mean of (theta - theta_i)
    theta = OuterOpt(theta, Delta)

The inner optimizer is AdamW (or Muon, as in MuLoCo, with `--inner muon`), and each
worker keeps its state from round to round: a partitioned value that the round takes and
returns. The outer one is SGD with Nesterov momentum.

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, algorithm 2) divides the
parameters into fragments p. Each is synchronized every H steps, at a time of its own:

    send:     Delta_p = mean of (theta_p - theta_{i,p}), while the inner steps go on
    receive:  tau steps later
              theta_p = OuterOpt(theta_p, Delta_p)
              theta_{i,p} = alpha theta_{i,p} + (1 - alpha) theta_p

`--wire` is the dtype in which outer gradients are sent. With one fragment, tau = 0
and alpha = 0 it is DiLoCo. With H = 1, SGD of rate 1 inside (so that Delta is the mean
gradient) and AdamW outside, DiLoCo is data-parallel training.

All of them train a small byte-level transformer on modules of Python's standard library
that the repository has; each worker has modules of its own. The claim, which the last
line of the output tries: with H = 10, DiLoCo's held-out loss is at most 1 % above that
of data parallelism, a batch as many times as large as there are workers, with a tenth
of its bytes. The first paper's Table 2 has two more methods, one worker and one with as
many times its steps. As there, all methods begin with the parameters of one worker that
was trained before.

`--resume` continues from the latest checkpoint, bit-exactly with the same settings, and
also with another number of `--workers`.
"""

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro  # The flags, their types and their help come from the dataclass below.
from flax import nnx
from tqdm import tqdm

import drjax
from examples.common import plots, results, text
from examples.common.checkpoint import Checkpoints
from examples.common.devices import make_mesh
from examples.common.rounds import Round
from examples.common.transformer import Transformer, TransformerConfig, mean_loss


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a language model by DiLoCo, and by what it is compared with."""

    output: Path = Path("runs/diloco")
    """Folder of the checkpoints, the table and the figures."""
    resume: bool = False
    """Continue from the latest checkpoint there; a fresh run removes them."""
    only: str = ""
    """Run only the methods with this in their name, such as "DiLoCo, H = 50"."""
    library: Path | None = None
    """A folder or archive of Python modules to train on, such as the standard library
    of a Python, in place of the repository's."""
    model: TransformerConfig = TransformerConfig(d_model=16, layers=1, heads=2)
    """Size of the model."""
    workers: int = 8
    """Workers (k)."""
    steps: int = 2000
    """Inner steps of a worker."""
    pretrain: int = 1000
    """Steps of one worker before these; all methods begin with its parameters."""
    save_every: int = 200
    """Inner steps between evaluations on held-out modules, each with a checkpoint."""
    batch: int = 1
    """Windows in a step of a worker."""
    length: int = 32
    """Bytes predicted in a window."""
    inner: Literal["adamw", "muon"] = "adamw"
    """The inner optimizer."""
    inner_lr: float = 1e-2
    """Peak of its learning rate; warm-up and cosine decay over the steps."""
    outer_lr: float = 0.7
    """Learning rate of the outer Nesterov optimizer."""
    outer_momentum: float = 0.9
    """Its momentum."""
    fragments: int = 2
    """Fragments of the parameters (P) of Streaming DiLoCo."""
    delay: int = 5
    """Its inner steps between sending and receiving (tau); less than H / P."""
    mixing: float = 0.5
    """What a worker keeps of its own parameters when it receives (alpha)."""
    wire: str | None = None
    """Dtype of outer gradients: bfloat16, int8 or float4_e2m1fn, the default of the
    streaming method. Without it the others send float32."""
    drop: float = 0.0
    """Probability that an outer gradient of a worker is lost."""
    eval_windows: int = 16
    """Windows of each held-out module to evaluate on, at most."""
    devices: int = 8
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Workers of a device that run at once; all by default."""
    seed: int = 0
    """Seed of the initial parameters and of all sampling."""


class Method(NamedTuple):
    """A line of the table."""

    name: str
    inner: optax.GradientTransformation
    outer: optax.GradientTransformation
    workers: int
    period: int  # H
    updates: int = 1  # for each inner step of the other methods
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    wire: str | None = None
    drop: float = 0.0


class State(NamedTuple):
    """All that a round changes. Parameters are lists of fragments."""

    params: Any
    outer: Any  # a list too: the outer optimizer's state for each fragment
    local: Any  # partitioned: the parameters of each worker
    inner: Any  # partitioned: the state of each worker's inner optimizer


def first_state(method: Method, params: list) -> State:
    """What a run begins with: all workers have the same parameters."""

    @drjax.program(workers=method.workers)
    def start(params):
        local = drjax.broadcast(params)
        inner = drjax.map_fn(method.inner.init, local)
        return State(params, [*map(method.outer.init, params)], local, inner)

    return start(params)


# --8<-- [start:algorithm]
def make_round(method: Method, loss: Callable, is_alive: Callable):
    """A round: H inner steps, and one synchronization of each fragment."""
    interval = method.period // method.fragments

    def inner_steps(numbers, data, *worker):
        def step(worker, number):
            local, inner, total = worker
            value, grads = jax.value_and_grad(loss)(local, data, number)
            updates, inner = method.inner.update(grads, inner, local)
            return (optax.apply_updates(local, updates), inner, total + value), None

        return jax.lax.scan(step, worker, numbers)[0]

    def mix(own, new, alive):  # A worker whose message is lost keeps its parameters.
        keep = jnp.where(alive, method.mixing, 1.0)
        return jax.tree.map(lambda x, y: keep * x + (1 - keep) * y, own, new)

    @drjax.program(workers=method.workers)
    def train_round(state: State, data, number) -> tuple[State, jax.Array]:
        def advance(workers, first, count):
            numbers = drjax.broadcast(number + first + jnp.arange(count))
            args = numbers, data, *workers
            return drjax.map_fn(inner_steps, args) if count else workers

        params, outer = list(state.params), list(state.outer)
        workers = state.local, state.inner, drjax.broadcast(0.0)
        alive = drjax.map_fn(is_alive, drjax.broadcast(number))
        where = alive if method.drop else None
        for p in range(method.fragments):
            send = (p + 1) * interval - method.delay
            workers = advance(workers, p * interval, interval - method.delay)
            args = drjax.broadcast(params[p]), workers[0][p]
            change = drjax.map_fn(optax.tree.sub, args)
            change = drjax.reduce_mean(change, where, wire=method.wire, default=0)
            workers = advance(workers, send, method.delay)  # These do not wait for it.
            step, outer[p] = method.outer.update(change, outer[p], params[p])
            params[p] = optax.apply_updates(params[p], step)
            args = workers[0][p], drjax.broadcast(params[p]), alive
            workers[0][p] = drjax.map_fn(mix, args)
        return State(params, outer, *workers[:2]), workers[2] / method.period

    return train_round


# --8<-- [end:algorithm]
def split_params(tree, parts: int):
    """The leaves of a tree in fragments of about the same size, and the inverse."""
    leaves, structure = jax.tree.flatten(tree)
    dealt = text.deal([x.size for x in leaves], parts)

    def join(fragments):
        order = np.argsort(np.concatenate(dealt))
        flat = jax.tree.leaves(fragments)
        return structure.unflatten([flat[i] for i in order])

    return [[leaves[i] for i in part] for part in dealt], join


def resize(state: State, workers: int) -> State:
    """The state for another number of workers; new ones begin like the first one."""
    index = np.arange(workers)
    slices = lambda x: x[np.where(index < len(x), index, 0)]
    local, inner = jax.tree.map(slices, (state.local, state.inner))
    return State(state.params, state.outer, local, inner)


def place(state: State, workers: int) -> State:
    """The state on the devices: each has its workers' slices, and what is global."""
    mesh = jax.sharding.get_mesh()
    shared = jax.device_put(state[:2], jax.NamedSharding(mesh, jax.P()))
    partition = drjax.program(workers=workers)(lambda: None)
    return State(*shared, *drjax.shard(state[2:], partition=partition))


def inner_optimizer(config: Config, steps: int) -> optax.GradientTransformation:
    """With a learning rate that decays over so many steps."""
    peak, warm_up = config.inner_lr, steps // 20 + 1
    args = peak / 10, peak, warm_up, steps + 1, peak / 20
    rate = optax.warmup_cosine_decay_schedule(*args)
    if config.inner == "muon":
        return optax.contrib.muon(rate)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def list_methods(config: Config) -> list[Method]:
    """The lines of the table."""
    k, steps = config.workers, config.steps
    gradient, adamw = optax.sgd(1.0), inner_optimizer(config, steps)
    nesterov = optax.sgd(config.outer_lr, config.outer_momentum, nesterov=True)
    diloco = [Method(f"DiLoCo, H = {h}", adamw, nesterov, k, h) for h in (10, 50)]
    diloco = [x._replace(wire=config.wire, drop=config.drop) for x in diloco]
    streaming = diloco[-1]._replace(
        name=f"Streaming {diloco[-1].name}",
        fragments=config.fragments,
        delay=config.delay,
        mixing=config.mixing,
        wire=config.wire or "float4_e2m1fn",
    )
    slower = inner_optimizer(config, k * steps)
    longer = Method(f"{k} x updates", gradient, slower, 1, 1, updates=k)
    methods = (
        Method("one worker", gradient, adamw, 1, 1),
        Method(f"data parallel, {k} x batch", gradient, adamw, k, 1),
        longer,
        *diloco,
        streaming,
    )
    chosen = [method for method in methods if config.only in method.name]
    if not chosen:
        names = ", ".join(method.name for method in methods)
        raise ValueError(f"--only {config.only!r} is in none of these: {names}.")
    return chosen


class Task:
    """The text, the model, and its loss: the same for all methods."""

    def __init__(self, config: Config):
        self.config = config
        self.corpus = text.load_stdlib(config.library or text.STDLIB)
        self.graphdef, self.params = nnx.split(
            Transformer(config.model, nnx.Rngs(config.seed))
        )
        windows = config.eval_windows, config.length
        self.held_out = text.cut_all(self.corpus.held_out, *windows)

    def deal(self, workers: int) -> np.ndarray:
        """The training text, `[workers, bytes]`: modules of its own for each worker."""
        texts = [module.text for module in self.corpus.train]
        dealt = text.deal([len(x) for x in texts], workers)
        parts = [np.concatenate([texts[i] for i in part]) for part in dealt]
        return np.stack([part[: min(map(len, parts))] for part in parts])

    def make_round(self, method: Method):
        """The round of a method, the first parameters in fragments, and the inverse."""
        fragments, join = split_params(self.params, method.fragments)
        loss = lambda params, *args: self.loss(join(params), *args)
        return make_round(method, loss, self.is_alive), fragments, join

    def draw(self, number, salt: int):
        """The key of a worker at a step."""
        key = jax.random.key(self.config.seed)
        for data in (salt, number, drjax.partition_index()):
            key = jax.random.fold_in(key, data)
        return key

    def is_alive(self, number):
        """Whether the messages of a worker arrive in the round from a step on."""
        return jax.random.uniform(self.draw(number, 1)) >= self.config.drop

    def mean_loss(self, params, tokens, lengths):
        """Of windows, and the number of targets."""
        return mean_loss(nnx.merge(self.graphdef, params), tokens, lengths)

    def loss(self, params, data, number):
        """Of the random windows of a worker at a step."""
        batch, length = self.config.batch, self.config.length
        shape, end = (batch, 1), data.size - length
        starts = jax.random.randint(self.draw(number, 0), shape, 0, end)
        tokens = data[starts + jnp.arange(length + 1)]
        return self.mean_loss(params, tokens, jnp.full(batch, length))[0]


def train(config: Config, task: Task, method: Method):
    """Runs what is still to do.

    Returns:
        The state; an entry for each evaluation; the losses of the held-out modules; and
        the ledger of a round.
    """
    interval, every = method.period // method.fragments, config.save_every
    if method.period % method.fragments or method.delay >= interval:
        raise ValueError(f"{method.name} needs a delay below H / P, an integer.")
    if every % method.period or config.steps % every:
        raise ValueError(
            "H must divide --save-every, and that --steps and --pretrain: "
            f"{method.name}"
        )
    train_round, fragments, join = task.make_round(method)
    every *= method.updates

    def advance(state, data, number):
        """All rounds from one evaluation to the next."""
        body = lambda state, number: train_round(state, data, number)
        numbers = number + jnp.arange(0, every, method.period)
        state, losses = jax.lax.scan(body, state, numbers)
        return state, losses.mean(0)

    @drjax.program(workers=len(task.corpus.held_out))
    def evaluate(params, windows):
        args = drjax.broadcast(join(params)), *windows
        losses, targets = drjax.map_fn(task.mean_loss, args)
        return drjax.reduce_weighted_mean(losses, targets), losses

    settings = dataclasses.asdict(config)
    folder, resume = settings.pop("output"), settings.pop("resume")
    for name in ("only", "devices", "groups_per_step"):
        del settings[name]
    settings["library"] = text.sha256(config.library or text.STDLIB)
    name = re.sub(r"\W+", "_", method.name)
    checkpoints = Checkpoints(
        folder / "checkpoints" / name, settings, keep=resume, free=["workers"]
    )
    with jax.set_mesh(make_mesh(min(config.devices, method.workers), "workers")):
        saved = 1 if method.workers == 1 else checkpoints.setting("workers")
        like = place(first_state(method._replace(workers=saved), fragments), saved)
        state, history = checkpoints.restore(like)
        state = place(resize(state, method.workers), method.workers)
        layout = jax.tree.map(lambda x: x.sharding, state)
        data = drjax.shard(task.deal(method.workers), partition=train_round)
        windows = drjax.shard(tuple(task.held_out), partition=evaluate)
        plan = drjax.make_plan(train_round)(state, data, jnp.asarray(0))
        ledger = plan.communication(devices=method.workers)
        advance = drjax.jit(advance, groups_per_step=config.groups_per_step)
        advance = jax.jit(advance, out_shardings=(layout, None))
        evaluate = jax.jit(evaluate)
        todo = range(len(history), config.steps // config.save_every)
        for i in (progress := tqdm(todo, method.name, unit=f"{every} steps")):
            began = time.perf_counter()
            number = jnp.asarray(config.pretrain + i * every)
            state, losses = advance(state, data, number)
            held_out = float(evaluate(state.params, windows)[0])
            entry = {"step": (i + 1) * every, "held_out": held_out}
            entry["losses"] = np.asarray(losses).tolist()
            entry["seconds"] = time.perf_counter() - began
            history.append(entry)
            checkpoints.save(i + 1, state, history)
            progress.set_postfix(held_out=f"{held_out:.3f}")
        checkpoints.close()
        modules = np.asarray(evaluate(state.params, windows)[1])
    return state, history, modules, ledger


def pretrain(config: Config, task: Task):
    """The parameters of one worker after the first steps of its schedule."""
    adamw = inner_optimizer(config, config.pretrain + config.steps)
    method = Method("pretraining", optax.sgd(1.0), adamw, 1, 1)
    config = dataclasses.replace(config, steps=config.pretrain, pretrain=0)
    params = train(config, task, method)[0].params
    return jax.device_get(split_params(task.params, 1)[1](params))


def engine_round() -> Round:
    """A round of two inner steps of a tiny model: `examples.engines` runs it."""
    config = Config(
        model=TransformerConfig(d_model=8, layers=1, heads=2),
        workers=4,
        batch=2,
        length=16,
    )
    # Backends are compared, and an outer gradient is a difference of parameters: in a
    # small one their rounding shows. With Adam's usual epsilon a gradient that is
    # nothing but rounding would move a parameter as far as any other.
    inner = optax.adamw(0.05, eps=1e-2)
    outer = optax.sgd(config.outer_lr, config.outer_momentum, nesterov=True)
    method = Method("DiLoCo", inner, outer, config.workers, 2)
    task = Task(config)
    train_round, fragments, _ = task.make_round(method)
    state = first_state(method, fragments)

    def step(shared, own, data):
        params, outer, number = shared
        state, _ = train_round(State(params, outer, *own), data, number)
        return state[:2], state[2:]

    data = task.deal(config.workers)[:, :2000]
    return Round(step, (state.params, state.outer, np.int32(0)), state[2:], data)


# Douillard et al. 2023, Table 2: C4, 150M parameters, 8 workers, H = 500.
QUOTED = {
    "one worker": 16.23,
    "data parallel": 15.30,
    "DiLoCo, H = 10": 15.02,
    "8 x updates": 14.72,
}
CLAIMED = "DiLoCo, H = 10"
REMARKS = (
    "Bytes are what a worker puts into all-reduces, by the ledger: the mean over "
    "steps, and those of the largest synchronization. Seconds are medians.",
    "Between devices int8 and float4 are sent in blocks with a scale each, so the last "
    "digits of these lines depend on the number of devices.",
)


def compare_order(losses: dict[str, float]) -> str:
    """Whether the losses are in the paper's order, which no choice of ours assures."""
    pairs = [(quoted(name), loss) for name, loss in losses.items()]
    known = {paper: loss for paper, loss in pairs if paper}
    if len(known) < len(QUOTED):
        return "Not all methods of the paper were run, so no order is known."
    is_equal = sorted(known, key=known.__getitem__) == sorted(known)
    return f"The order of the losses is {'' if is_equal else 'not '}the paper's."


def compare_bytes(name: str, losses: dict[str, float], sent: dict[str, float]) -> str:
    """A method's loss and bytes next to those of data parallelism."""
    other = next(x for x in losses if x.startswith("data parallel"))
    change = 100 * (losses[name] / losses[other] - 1)
    where = f"{abs(change):.2f} % {'above' if change > 0 else 'below'}"
    fewer = f"with {sent[other] / sent[name]:.1f} times fewer bytes"
    return f"{name}: a loss of {losses[name]:.3f}, {where} {other}, {fewer}"


def verdict(losses: dict[str, float], sent: dict[str, float]) -> str:
    """Whether DiLoCo's loss is at most 1 % above data parallelism's, with few bytes.

    Args:
        losses: the held-out loss of each method.
        sent: its bytes per step.
    """
    other = next((x for x in losses if x.startswith("data parallel")), None)
    if other is None or CLAIMED not in losses:
        return f"unknown, as {CLAIMED} and data parallel were not both run."
    few = round(sent[other] / sent[CLAIMED], 6) >= 10
    holds = few and losses[CLAIMED] <= 1.01 * losses[other]
    return (
        "a loss at most 1 % above that of data parallelism, with a tenth of its bytes: "
        f"{'holds' if holds else 'does not hold'}. "
        f"{compare_bytes(CLAIMED, losses, sent)}."
    )


def describe_rounds(config: Config, methods: list[Method]) -> str:
    """How many rounds the methods have here and in the paper."""
    local = {x.period: config.steps // x.period for x in methods if x.period > 1}
    numbers = ", ".join(f"H = {h} gives {rounds}" for h, rounds in local.items())
    return (
        "The paper has perplexities on C4, after 24,000 steps of one worker and 64,000 "
        "of each method. The order can be compared, not the numbers. Its H = 500 gives "
        f"128 rounds; here {numbers or 'no method has rounds'}."
    )


def describe_text(config: Config, corpus: text.Corpus) -> str:
    """Which text it was, so that a run can be repeated on the same."""
    sizes = [sum(len(module.text) for module in part) for part in corpus]
    source = config.library or text.STDLIB
    return (
        f"The text, {source.name}: {len(corpus.train)} modules of {sizes[0]:,} bytes, "
        f"and {len(corpus.held_out)} of {sizes[1]:,} held out; SHA-256 "
        f"{text.sha256(source)}."
    )


def quoted(name: str) -> float | None:
    """The perplexity of the paper for a line of the table."""
    return next((x for start, x in QUOTED.items() if name.startswith(start)), None)


def main(config: Config) -> results.Results:
    """Trains by all methods, and shows their losses and their bytes."""
    make_mesh(config.devices, "workers")  # before anything uses a device
    task = Task(config)
    targets = task.held_out.lengths.sum(-1)
    bigram = text.Bigram.fit(task.corpus.train).loss(task.held_out).sum(-1) / targets
    bigram_loss = float(np.average(bigram, weights=targets))
    if config.pretrain:
        task.params = pretrain(config, task)
    table: list[list] = [["bigram model", f"{bigram_loss:.3f}", "", "", "", ""]]
    curves, sent, costs, numbers, methods = {}, {}, {}, {}, list_methods(config)
    for method in methods:
        state, history, modules, ledger = train(config, task, method)
        curve = [entry["held_out"] for entry in history]
        curves[method.name], bytes_sent = curve, ledger.reduced_per_device()
        sent[method.name] = bytes_sent / method.period
        costs[method.name] = sent[method.name] * config.save_every
        if method.wire is None:
            numbers[f"{method.name}, held-out loss"] = curve
        rounds = config.save_every * method.updates / method.period
        seconds = np.median([entry["seconds"] for entry in history]) / rounds
        paper = quoted(method.name)
        table.append(
            [
                method.name,
                f"{curve[-1]:.3f}",
                f"{sent[method.name]:,.0f}",
                f"{max(ledger.reduced_per_device(x.round) for x in ledger.messages):,}",
                f"{seconds:.3f}",
                f"{paper:.2f}" if paper else "",
            ]
        )
    losses = {name: curve[-1] for name, curve in curves.items()}
    others = [x for x, n in sent.items() if n and "DiLoCo" in x and x != CLAIMED]
    if not any(name.startswith("data parallel") for name in losses):
        others = []
    shown = "; ".join(f"{line[0]}: {line[1]}" for line in table)
    result = results.Results(
        title=f"{config.steps} steps of {config.workers} workers: held-out modules",
        columns=[
            "",
            "nats per byte",
            "bytes per step",
            "largest sync",
            "s a round",
            "paper",
        ],
        table=table,
        measured=f"Held-out loss: {shown}.",
        paper="Perplexity of one worker 16.23, of a batch 8 times as large 15.30, of "
        "DiLoCo 15.02, of 8 times the updates 14.72 (Douillard et al. 2023, Table 2).",
        numbers=numbers,
        verdict=verdict(losses, sent),
        remarks=[
            compare_order(losses),
            *(f"{compare_bytes(name, losses, sent)}." for name in others),
            describe_rounds(config, methods),
            describe_text(config, task.corpus),
            *REMARKS,
        ],
    )
    figure = results.lines(
        {name: curve for name, curve in curves.items() if costs[name]},
        scale=costs,
        target=curves.get("one worker", [bigram_loss])[-1],
        xlabel="bytes sent (dashed: one worker)",
        ylabel="held-out loss (nats per byte)",
        log="x",
    )
    result.write(config.output, config, figure)
    entries = [x for x in history if len(x["losses"]) == methods[-1].workers]
    plots.group_spread(
        config.output / "groups.png",
        [entry["step"] for entry in entries],
        [entry["losses"] for entry in entries],
        [module.name for module in task.corpus.held_out],
        modules,
        bigram,
    )
    shape = config.model.vocab, config.model.d_model
    kept = jax.tree.leaves((state.inner, state.local))
    plots.sharding_of(
        config.output / "sharding.png",
        next(x for x in kept if x.shape[1:] == shape),
        [f"worker {i}" for i in range(methods[-1].workers)],
        f"{methods[-1].name}: what each worker keeps for the embedding",
        "byte value",
    )
    return result


if __name__ == "__main__":
    main(tyro.cli(Config))
