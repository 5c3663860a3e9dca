"""DiLoCo and Streaming DiLoCo: workers that communicate once in many steps.

    python -m examples.reproductions.diloco

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1) lets each worker take H
steps of AdamW on its own data; then an outer optimizer, SGD with Nesterov momentum,
gets the mean of the workers' changes. Streaming DiLoCo (Douillard et al. 2025, arXiv
2501.18512, algorithm 2) synchronizes the parameters in fragments, each at a time of its
own, while the inner steps go on, and sends 4-bit floats. With H = 1, SGD of rate 1
inside, so that the mean change is the mean gradient, and AdamW outside, a round is a
step of data-parallel training. `drjax.contrib.diloco` makes all of these rounds, and
their checkpoints, of one train step.

All of them train a small byte-level transformer on modules of Python's standard library
that the repository has; each worker has modules of its own. As in the papers, all
methods begin with the parameters of one worker that was trained before, and then see
the same number of bytes. The claim, which the first line of the output tries: with
H = 10, the held-out loss is at most 5 % above that of data parallelism, with a tenth of
its bytes, for each seed.

Rates and momentum are the best of a few on a seed that is not reported, 3, for DiLoCo
with H = 10 (learning rate 0.003 to 0.02, momentum 0.5 to 0.9) and for data parallelism
(0.003 to 0.03): `--seeds 3 --no-parts --only "H = 10" --inner-lr 0.01`, and so on. The
other methods have those of H = 10.

The same rounds then show what comes with them:

* the outer rate and the momentum, tuned by `jax.grad` through the first rounds;
* the temporary memory of that gradient, by `jax.jit` and by `drjax.jit`;
* the bytes of the ledger, known before a run, and those of the compiled collectives;
* the plan file of a round, run by worker processes of which one is killed.

`--resume` continues from the latest checkpoints, bit-exactly with the same settings,
and also with another number of `--workers`. `--inner muon` is MuLoCo.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro  # The flags, their types and their help come from the dataclass below.
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import drjax
from drjax.compiled import Report
from drjax.contrib import diloco
from examples.algorithms import diloco as algorithms
from examples.algorithms import streaming_diloco
from examples.common import plots, processes, results, text
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
    """Continue from the latest checkpoints there; a fresh run removes them."""
    only: str = ""
    """Run only the methods with this in their name, such as "DiLoCo, H = 50"."""
    parts: bool = True
    """After the training, show gradients through rounds, and worker processes."""
    library: Path | None = None
    """A folder or archive of Python modules to train on, such as the standard library
    of a Python, in place of the repository's."""
    model: TransformerConfig = TransformerConfig(d_model=64, layers=2, heads=4)
    """Size of the model."""
    workers: int = 8
    """Workers (k)."""
    steps: int = 1000
    """Inner steps of a worker."""
    pretrain: int = 1000
    """Steps of one worker before these; all methods begin with its parameters."""
    save_every: int = 250
    """Inner steps between evaluations on held-out modules, each with a checkpoint."""
    batch: int = 1
    """Windows in a step of a worker."""
    length: int = 32
    """Bytes predicted in a window."""
    inner: Literal["adamw", "muon"] = "adamw"
    """The inner optimizer."""
    pretrain_lr: float = 3e-3
    """Peak of the learning rate of these."""
    inner_lr: float = 6e-3
    """The same of DiLoCo; all have a warm-up, and a cosine decay over the steps."""
    parallel_lr: float = 1e-2
    """The same of data parallelism."""
    outer_lr: float = 0.7
    """Learning rate of the outer Nesterov optimizer."""
    outer_momentum: float = 0.7
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
    eval_windows: int = 16
    """Windows of each held-out module to evaluate on, at most."""
    tuned_rounds: int = 4
    """Rounds through which the outer rate and the momentum are tuned."""
    tuning_steps: int = 4
    """Steps of Adam for the two."""
    devices: int = 8
    """Devices; virtual ones on a CPU."""
    groups_per_step: int | None = None
    """Workers of a device that run at once; all by default."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the initial parameters and of all sampling: one run of each method for
    each."""


class Method(NamedTuple):
    """A line of the table."""

    name: str
    inner: optax.GradientTransformation
    outer: optax.GradientTransformation
    workers: int
    period: int  # H
    fragments: int = 0  # P of the streaming algorithm, if it is that
    delay: int = 0
    mixing: float = 0.0
    wire: str | None = None


def make_round(method: Method, loss: Callable) -> diloco.Round:
    """The round of a method, for a loss of parameters and the batch of a step."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt = method.inner.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, value

    return diloco.Round(
        step,
        method.workers,
        outer=method.outer,
        fragments=max(method.fragments, 1),
        delay=method.delay,
        mixing=method.mixing,
        wire=method.wire,
    )


def start(train_round: diloco.Round, method: Method, params) -> diloco.State:
    """The first state of a run, on the devices."""
    return train_round.init({"params": params, "opt": method.inner.init(params)})


def step_keys(seed, first, period: int, workers: int) -> jax.Array:
    """Keys `[workers, period]` of the steps of a round, which begins with `first`."""
    fold, key = jax.random.fold_in, jax.random.key(seed)
    of_steps = jax.vmap(lambda number: fold(key, number))(first + jnp.arange(period))
    of_worker = lambda i: jax.vmap(lambda key: fold(key, i))(of_steps)
    return jax.vmap(of_worker)(jnp.arange(workers))


def inner_optimizer(config: Config, steps: int, peak: float | None = None):
    """With a learning rate that decays over so many steps."""
    peak, warm_up = peak or config.inner_lr, steps // 20 + 1
    args = peak / 10, peak, warm_up, steps + 1, peak / 20
    rate = optax.warmup_cosine_decay_schedule(*args)
    if config.inner == "muon":
        return optax.contrib.muon(rate)
    # `eps_root`, as the root has no derivative where a parameter never had a gradient.
    adamw = optax.adamw(rate, b2=0.99, eps_root=1e-12, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def list_methods(config: Config) -> list[Method]:
    """The lines of the table."""
    k, adamw = config.workers, inner_optimizer(config, config.steps)
    nesterov = optax.sgd(config.outer_lr, config.outer_momentum, nesterov=True)
    local = [
        Method(f"DiLoCo, H = {h}", adamw, nesterov, k, h, wire=config.wire)
        for h in (10, 50, 250)
    ]
    streaming = local[1]._replace(
        name=f"Streaming {local[1].name}",
        fragments=config.fragments,
        delay=config.delay,
        mixing=config.mixing,
        wire=config.wire or "float4_e2m1fn",
    )
    tuned = inner_optimizer(config, config.steps, config.parallel_lr)
    parallel = Method("data parallel", optax.sgd(1.0), tuned, k, 1)
    methods = parallel, *local, streaming
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
        self.graphdef = nnx.split(Transformer(config.model, nnx.Rngs(0)))[0]
        windows = config.eval_windows, config.length
        self.held_out = text.cut_all(self.corpus.held_out, *windows)
        by_module = drjax.program(workers=len(self.corpus.held_out))(self._evaluate)
        self.by_module, self.evaluate = by_module, jax.jit(by_module)

    def params(self, seed: int):
        """The first parameters of a seed."""
        return nnx.split(Transformer(self.config.model, nnx.Rngs(seed)))[1]

    def deal(self, workers: int) -> np.ndarray:
        """The training text, `[workers, bytes]`: modules of its own for each worker."""
        return text.deal_modules(self.corpus.train, workers)

    def draw(self, data, keys):
        """The windows of each worker's text for these steps, `[k, H, batch, bytes]`."""
        of_worker = jax.vmap(self.windows, (None, 0))
        of_workers = drjax.program(workers=len(data))(drjax.map_fn)
        return of_workers(of_worker, (data, keys))

    def windows(self, data, key):
        """Those of a step, of a worker's text."""
        batch, length = self.config.batch, self.config.length
        starts = jax.random.randint(key, (batch, 1), 0, data.size - length)
        return data[starts + jnp.arange(length + 1)]

    def mean_loss(self, params, tokens, lengths):
        """Of windows, and the number of targets."""
        return mean_loss(nnx.merge(self.graphdef, params), tokens, lengths)

    def _evaluate(self, params, windows):
        """The mean loss of the held-out modules, and that of each."""
        args = drjax.broadcast(params), *windows
        losses, targets = drjax.map_fn(self.mean_loss, args)
        return drjax.reduce_weighted_mean(losses, targets), losses

    def loss(self, params, tokens):
        """Of the windows of a step."""
        return self.mean_loss(
            params, tokens, jnp.full(len(tokens), self.config.length)
        )[0]


class Run(NamedTuple):
    """What is left of a method and a seed."""

    state: diloco.State
    history: list[dict[str, Any]]  # an entry for each evaluation
    modules: np.ndarray  # the losses of the held-out modules


class Program(NamedTuple):
    """A method, compiled for the devices of the mesh."""

    method: Method
    train_round: diloco.Round
    data: jax.Array  # of the workers
    step: Any  # all rounds from one evaluation to the next


def compile_method(config: Config, task: Task, method: Method, params) -> Program:
    """For parameters of this structure."""
    k, H, every = method.workers, method.period, config.save_every
    if method.fragments and (
        H % method.fragments or method.delay >= H / method.fragments
    ):
        raise ValueError(f"{method.name} needs a delay below H / P, an integer.")
    if every % H or config.steps % every:
        raise ValueError(
            "H must divide --save-every, and that --steps and --pretrain: "
            f"{method.name}"
        )
    train_round = make_round(method, task.loss)

    def advance(state, data, number, seed):
        def body(state, number):
            batches = task.draw(data, step_keys(seed, number, H, k))
            state, losses = train_round(state, batches)
            return state, losses.mean(-1)

        state, losses = jax.lax.scan(body, state, number + jnp.arange(0, every, H))
        return state, losses.mean(0)

    data = drjax.shard(task.deal(k), partition=train_round)
    state = start(train_round, method, params)
    layout = jax.tree.map(lambda x: x.sharding, state)
    step = drjax.jit(advance, groups_per_step=config.groups_per_step)
    step = jax.jit(step, out_shardings=(layout, None))
    args = jnp.asarray(0), jnp.asarray(0)
    step = step.lower(state, data, *args).compile()
    return Program(method, train_round, data, step)


def bytes_of_round(config: Config, task: Task, program: Program, state):
    """By the ledger, and by the compiled collectives, both of one worker."""
    k, H = program.method.workers, program.method.period
    batches = task.draw(program.data, step_keys(0, 0, H, k))
    plan = drjax.make_plan(program.train_round)(state, batches)
    ledger = plan.communication(devices=k).reduced_per_device()
    report = Report.of(program.step, jax.sharding.get_mesh())
    return ledger, (report.total.bytes_per_call or 0) * H / config.save_every


def train(
    config: Config, task: Task, program: Program, starts: Sequence[Any]
) -> list[Run]:
    """Runs what is still to do of a method, from first parameters for each seed."""
    (method, train_round, data, step), runs = program, []
    every = config.save_every
    windows = drjax.shard(tuple(task.held_out), partition=task.by_module)
    for seed, params in zip(config.seeds, starts, strict=True):
        checkpoints = open_checkpoints(config, method, seed)
        state = start(train_round, method, params)
        state, history = checkpoints.restore(train_round, state)
        pending = range(len(history), config.steps // every)
        name = f"{method.name}, seed {seed}"
        for i in (progress := tqdm(pending, name, unit=f"{every} steps")):
            began = time.process_time()
            number = jnp.asarray(config.pretrain + i * every)
            state, losses = step(state, data, number, jnp.asarray(seed))
            held_out = float(task.evaluate(state.params, windows)[0])
            entry = {"step": (i + 1) * every, "held_out": held_out}
            entry["losses"] = np.asarray(losses).tolist()
            entry["cpu_seconds"] = time.process_time() - began
            history.append(entry)
            checkpoints.save(i + 1, state, history)
            progress.set_postfix(held_out=f"{held_out:.3f}")
        checkpoints.close()
        modules = task.evaluate(state.params, windows)[1]
        runs.append(Run(state, history, np.asarray(modules)))
    return runs


def open_checkpoints(config: Config, method: Method, seed: int) -> Checkpoints:
    """Those of a method and a seed."""
    settings = dataclasses.asdict(config)
    folder, resume = settings.pop("output"), settings.pop("resume")
    free = "only", "parts", "devices", "groups_per_step", "seeds"
    for name in (*free, "tuned_rounds", "tuning_steps"):
        del settings[name]
    settings["library"] = text.sha256(config.library or text.STDLIB)
    name = re.sub(r"\W+", "_", f"{method.name}, seed {seed}")
    path = folder / "checkpoints" / name
    return Checkpoints(path, settings, keep=resume, free=["workers"])


def pretrain(config: Config, task: Task) -> list[Any]:
    """For each seed the parameters of one worker, which begins the schedule."""
    starts = [task.params(seed) for seed in config.seeds]
    if not config.pretrain:
        return starts
    steps = config.pretrain + config.steps
    adamw = inner_optimizer(config, steps, config.pretrain_lr)
    method = Method("pretraining", optax.sgd(1.0), adamw, 1, 1)
    once = dict(steps=config.pretrain, save_every=config.pretrain, pretrain=0)
    config = dataclasses.replace(config, **once)
    with jax.set_mesh(make_mesh(1, "workers")):
        program = compile_method(config, task, method, starts[0])
        runs = train(config, task, program, starts)
    return [jax.device_get(run.state.params) for run in runs]


# ---------------------------------------------------------------------------------
# What comes with the rounds

PERIOD = 10  # H of these rounds
PAPER_OUTER = 0.7, 0.9  # the paper's outer rate and momentum


def numbered_round(task, method: Method, seed: int) -> Callable:
    """DiLoCo's round, `step(shared, own, data)`, with the number of its first step."""
    train_round = make_round(method, task.loss)

    def step(shared, own, data):
        theta, outer, number = shared
        keys = step_keys(seed, number, method.period, method.workers)
        state = diloco.State(theta, outer, own)
        state, _ = train_round(state, task.draw(data, keys))
        return (state.theta, state.outer, number + method.period), state.workers

    return step


def numbered_start(method: Method, params, number: int):
    """Its first `shared` and `own`: of a state without a mesh."""
    state = start(make_round(method, lambda *_: 0.0), method, params)
    return (state.theta, state.outer, jnp.asarray(number)), state.workers


def tune(config: Config, task: Task, params) -> list[str]:
    """Tunes the outer optimizer by `jax.grad` through the first rounds of the run."""
    inner = inner_optimizer(config, config.steps)
    seed, rounds = config.seeds[0], config.tuned_rounds
    windows = text.cut_all(task.corpus.train, 2, config.length)
    windows = jax.tree.map(np.concatenate, windows)

    def after(h, params, data):
        """The loss, on windows of the training modules, after the rounds."""
        rate, momentum = jnp.exp(h[0]), jax.nn.sigmoid(h[1])
        outer = optax.sgd(rate, momentum, nesterov=True)
        method = Method("", inner, outer, config.workers, PERIOD)
        step = numbered_round(task, method, seed)
        state = numbered_start(method, params, config.pretrain)
        advance = jax.checkpoint(lambda state, _: (step(*state, data), None))
        state, _ = jax.lax.scan(advance, state, length=rounds)
        return task.mean_loss(state[0][0], *windows)[0]

    rate, momentum = PAPER_OUTER
    h = jnp.log(jnp.array([rate, momentum / (1 - momentum)]))
    data = task.deal(config.workers)  # all workers on one device
    gradient = jax.jit(jax.value_and_grad(after))  # traced once for both
    plain = gradient.lower(h, params, data)
    # It is never run: only its buffers are of interest, and not its machine code.
    plain = plain.compile({"xla_backend_optimization_level": 0})
    ours = jax.jit(drjax.jit(gradient, groups_per_step=1))
    ours = ours.lower(h, params, data).compile()
    sizes = [Report.of(x).temp_bytes / 1e6 for x in (plain, ours)]
    adam = optax.adam(0.3)
    moments, tried = adam.init(h), []
    for _ in tqdm(range(config.tuning_steps + 1), "outer rate and momentum"):
        value, slope = ours(h, params, data)
        tried.append((float(value), h))
        updates, moments = adam.update(slope, moments)
        h = optax.apply_updates(h, updates)
    (first, _), (last, best) = tried[0], min(tried, key=lambda x: x[0])
    rate, momentum = float(jnp.exp(best[0])), float(jax.nn.sigmoid(best[1]))
    return [
        f"Outer rate and momentum by jax.grad through {rounds} rounds of H = {PERIOD}, "
        f"{config.tuning_steps} steps of Adam: from the published {PAPER_OUTER[0]}, "
        f"{PAPER_OUTER[1]} to {rate:.2f}, {momentum:.2f}; the loss after these rounds, "
        f"on the training modules, from {first:.3f} to {last:.3f}.",
        "Temporary memory of that gradient, with jax.checkpoint around each round and "
        f"all workers on one device: jax.jit {sizes[0]:.1f} MB, drjax.jit "
        f"{sizes[1]:.1f} MB.",
    ]


def compare_algorithms(config: Config, task: Task, params) -> list[str]:
    """Runs a round as examples/algorithms has it, too: the two agree to rounding."""
    inner, k, keys = inner_optimizer(config, config.steps), config.workers, step_keys
    outer = optax.sgd(config.outer_lr, config.outer_momentum, nesterov=True)
    keys, data = keys(config.seeds[0], config.pretrain, PERIOD, k), task.deal(k)
    method, kept = Method("", inner, outer, k, PERIOD), (inner, outer, k)
    streamed = dict(fragments=2, delay=PERIOD // 4, mixing=config.mixing)

    def of_key(params, data, key):
        return task.loss(params, task.windows(data, key))

    def of_layer(method):
        train_round = make_round(method, task.loss)
        state = start(train_round, method, params)
        return jax.jit(train_round)(state, task.draw(data, keys))[0].params

    written = algorithms.make_round(of_key, *kept)
    plain = jax.jit(written)(*algorithms.start(params, *kept), data, keys)[0][0]
    split, join = streaming_diloco.split(params, 2)
    of_split = lambda theta, *args: of_key(join(theta), *args)
    options = streamed["delay"], streamed["mixing"]
    written = streaming_diloco.make_round(of_split, *kept, *options)
    streaming = streaming_diloco.start(split, *kept)
    streaming = join(jax.jit(written)(*streaming, data, keys)[0][0])
    pairs = (plain, method), (streaming, method._replace(**streamed))
    far = lambda x, y: jnp.max(jnp.abs(x - y))
    apart = [jax.tree.map(far, x, of_layer(y)) for x, y in pairs]
    largest = max(float(x) for x in jax.tree.leaves(apart))
    return [
        "`drjax.contrib.diloco`, which trains here, and the two algorithms below: "
        f"after a round, parameters differ by {largest:.0e} at most."
    ]


def run_in_processes(config: Config, task: Task, params) -> list[str]:
    """Runs the plan file of a round in worker processes, of which one is killed."""
    inner = inner_optimizer(config, config.steps)
    outer = optax.sgd(config.outer_lr, config.outer_momentum, nesterov=True)
    method = Method("", inner, outer, config.workers, PERIOD)
    step = numbered_round(task, method, config.seeds[0])
    first = jax.device_get(numbered_start(method, params, config.pretrain))
    data, path = task.deal(config.workers), config.output / "round.drjax"
    drjax.make_plan(step)(*first, data).save(path)
    plan = drjax.load_plan(path)

    def run(step, rounds=2):
        state, structure = first, jax.tree.structure(first)
        for _ in range(rounds):  # a plan file has classes of its own for the results
            state = jax.device_get(jax.tree.leaves(step(*state, data)))
            state = jax.tree.unflatten(structure, state)
        return state

    pool = MortalProcesses(min(2, config.workers))
    try:
        step = processes.compile(plan, pool, block_size=1)
        whole = run(step)
        pool.armed = True
        killed = run(step)
    finally:
        pool.close()
    alone = run(jax.jit(drjax.backends.xla.compile(plan)))
    same = all(map(np.array_equal, jax.tree.leaves(whole), jax.tree.leaves(killed)))
    windows = jax.tree.map(np.concatenate, task.held_out)
    losses = [float(task.mean_loss(x[0][0], *windows)[0]) for x in (killed, alone)]
    return [
        f"The plan file of a round, {path.stat().st_size:,} bytes, ran in "
        f"{pool.workers} worker processes, {pool.killed} of which was killed at work: "
        f"{'the same bits' if same else 'not the same bits'} as without; the held-out "
        f"loss after two rounds is {losses[0]:.6f}, by XLA {losses[1]:.6f}."
    ]


class MortalProcesses(processes.Processes):
    """Processes of which one is killed at work once `armed` is set."""

    armed = False

    def wait(self, handles, timeout):
        if self.armed:
            self.armed = False
            self.kill()
        return super().wait(handles, timeout)


def engine_round() -> Round:
    """A round of a tiny model: `examples.engines` runs it."""
    config = Config(
        model=TransformerConfig(d_model=8, layers=1, heads=2),
        workers=4,
        batch=2,
        length=16,
    )
    # Backends are compared, and an outer gradient is a difference of parameters: in a
    # small one their rounding shows. With Adam's usual epsilon a gradient that is
    # nothing but rounding would move a parameter as far as any other.
    inner, task = optax.adamw(0.05, eps=1e-2), Task(config)
    outer = optax.sgd(config.outer_lr, config.outer_momentum, nesterov=True)
    method = Method("", inner, outer, config.workers, 2)
    numbered = numbered_round(task, method, seed=0)
    shared, own = numbered_start(method, task.params(0), 0)

    def step(shared, own, data):
        (*shared, _), own = numbered(shared, own, data)
        return tuple(shared), own

    data = task.deal(config.workers)[:, :2000]
    return Round(step, shared, own, data)


# ---------------------------------------------------------------------------------
# What the run says

PARALLEL, CLAIMED = "data parallel", "DiLoCo, H = 10"
BOUND = 5.0  # percent
Losses = dict[str, list[float]]  # of each method, for each seed


def percent_above(losses: Losses, name: str) -> list[float]:
    """How far a method's losses are above those of data parallelism, by seed."""
    pairs = zip(losses[name], losses[PARALLEL], strict=True)
    return [100 * (loss / other - 1) for loss, other in pairs]


def verdict(losses: Losses, sent: dict[str, float]) -> str:
    """Whether DiLoCo's loss is within the bound, with a tenth of the bytes.

    Args:
        losses: the held-out losses of each method.
        sent: its bytes per step.
    """
    if PARALLEL not in losses or CLAIMED not in losses:
        return f"unknown, as {CLAIMED} and {PARALLEL} were not both run."
    above, times = percent_above(losses, CLAIMED), sent[PARALLEL] / sent[CLAIMED]
    holds = round(times, 6) >= 10 and max(above) <= BOUND
    return (
        f"{CLAIMED}, has a loss at most {BOUND:g} % above that of data parallelism, "
        "with a tenth of its bytes, for each seed: "
        f"{'holds' if holds else 'does not hold'} "
        f"({', '.join(f'{x:+.1f} %' for x in above)}; {times:.1f} times fewer bytes)."
    )


def is_published_order(losses: Losses) -> bool | None:
    """Whether DiLoCo has the lower loss; None if that is not known."""
    if PARALLEL not in losses or CLAIMED not in losses:
        return None
    return results.is_less(losses[CLAIMED], losses[PARALLEL], paired=True)


def compare_order(losses: Losses) -> str:
    """The order of the two methods of the paper, which no choice of ours assures."""
    if is_published_order(losses) is None:
        return "Not both methods of the paper were run, so no order is known."
    pairs = list(zip(losses[CLAIMED], losses[PARALLEL], strict=True))
    lower = sum(one < other for one, other in pairs)
    shown = f"{lower} of {len(pairs)} seeds"
    return f"DiLoCo has the lower loss in the paper, here in {shown}."


def describe(config: Config, task: Task) -> list[str]:
    """What the run differs in from the paper, and which text it was."""
    size = sum(x.size for x in jax.tree.leaves(task.params(0)))
    parts = [sum(len(module.text) for module in part) for part in task.corpus]
    source = config.library or text.STDLIB
    return [
        f"{size:,} parameters, {config.workers} workers with {config.batch} x "
        f"{config.length} bytes per step. The paper has perplexities on C4 of 150 "
        "million, after 24,000 steps of one worker and 64,000 of each method, with "
        "H = 500: the order can be compared, not the numbers.",
        f"The text, {source.name}: {len(task.corpus.train)} modules of {parts[0]:,} "
        f"bytes, and {len(task.corpus.held_out)} of {parts[1]:,} held out; SHA-256 "
        f"{text.sha256(source)}.",
    ]


def spread(values: Sequence[float]) -> str:
    """The mean, and the least and the largest."""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def measured(losses: Losses) -> str:
    """The result in one sentence."""
    if PARALLEL not in losses or CLAIMED not in losses:
        means = (f"{name} {np.mean(x):.3f}" for name, x in losses.items())
        return f"Held-out loss: {', '.join(means)}."
    return (
        f"With H = {PERIOD} and a tenth of the bytes DiLoCo reaches "
        f"{np.mean(losses[CLAIMED]):.3f} nats per byte, data parallelism "
        f"{np.mean(losses[PARALLEL]):.3f}."
    )


def draw(config: Config, curves: dict[str, np.ndarray], sent) -> Figure:
    """Held-out loss against bytes: the mean of the seeds, and their spread."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    ax = figure.subplots()
    for name, values in curves.items():  # [seeds, evaluations]
        steps = config.save_every * np.arange(1, values.shape[1] + 1)
        x = steps * sent[name]
        ax.plot(x, values.mean(0), "o-", markersize=3, label=name)
        ax.fill_between(x, values.min(0), values.max(0), alpha=0.25)
    ax.set(
        xscale="log",
        xlabel="bytes sent by a worker",
        ylabel="held-out loss (nats per byte)",
    )
    ax.grid(alpha=0.3)
    title = f"mean and range\nof {len(config.seeds)} seeds"
    figure.legend(title=title, loc="outside right upper")
    return figure


def main(config: Config) -> results.Results:
    """Trains by all methods, and shows their losses and their bytes."""
    make_mesh(config.devices, "workers")  # before anything uses a device
    task, methods = Task(config), list_methods(config)
    starts, k = pretrain(config, task), min(config.devices, config.workers)
    table, losses, sent, curves, numbers = [], {}, {}, {}, {}
    for method in methods:
        name, H = method.name, method.period
        with jax.set_mesh(make_mesh(k, "workers")):
            program = compile_method(config, task, method, starts[0])
            runs = train(config, task, program, starts)
            ledger, compiled = bytes_of_round(config, task, program, runs[-1].state)
        curves[name] = np.array([[x["held_out"] for x in run.history] for run in runs])
        losses[name], sent[name] = curves[name][:, -1].tolist(), ledger / H
        if method.wire is None:
            for seed, curve in zip(config.seeds, curves[name], strict=True):
                numbers[f"{name}, seed {seed}"] = curve.tolist()
        seconds = [x["cpu_seconds"] for run in runs for x in run.history]
        above = percent_above(losses, name) if PARALLEL in losses else []
        table.append(
            [
                name,
                spread(losses[name]),
                f"{max(above):+.1f} %" if above and name != PARALLEL else "",
                f"{sent[name]:,.0f}",
                f"{compiled / H:,.0f}",
                f"{1e3 * np.median(seconds) / config.save_every:.1f}",
            ]
        )
    remarks = [compare_order(losses)]
    if config.parts:
        remarks += tune(config, task, starts[0])
        remarks += compare_algorithms(config, task, starts[0])
        remarks += run_in_processes(config, task, starts[0])
    result = results.Results(
        title=f"{config.steps} steps of {config.workers} workers, seeds "
        f"{', '.join(map(str, config.seeds))}: held-out modules",
        columns=[
            "",
            "nats per byte",
            "above",
            "bytes per step",
            "compiled",
            "CPU ms",
        ],
        table=table,
        measured=measured(losses),
        paper="Perplexity of a batch 8 times as large 15.30, of DiLoCo 15.02 "
        "(Douillard et al. 2023, Table 2).",
        numbers=numbers,
        badge="order reached" if is_published_order(losses) else None,
        verdict=verdict(losses, sent),
        remarks=[
            *remarks,
            "Nats per byte are the mean of the seeds; above: how far, at most, the "
            "loss of a seed is above data parallelism's. Bytes per step are by the "
            "ledger, what a worker puts into reductions; compiled is what one of "
            f"{k} devices sends, in a ring 2 ({k} - 1) / {k} times that. CPU ms are of "
            "a step of all workers.",
            *describe(config, task),
        ],
    )
    result.write(config.output, config, draw(config, curves, sent))
    draw_workers(config, task, methods[-1], runs[-1])
    return result


def draw_workers(config: Config, task: Task, method: Method, run: Run) -> None:
    """How loss spreads over workers and modules, and where a worker's state is."""
    targets = task.held_out.lengths.sum(-1)
    bigram = text.Bigram.fit(task.corpus.train).loss(task.held_out).sum(-1) / targets
    entries = [x for x in run.history if len(x["losses"]) == method.workers]
    plots.group_spread(
        config.output / "groups.png",
        [entry["step"] for entry in entries],
        [entry["losses"] for entry in entries],
        [module.name for module in task.corpus.held_out],
        run.modules,
        bigram,
    )
    shape = config.model.vocab, config.model.d_model
    kept = jax.tree.leaves(run.state.workers)
    plots.sharding_of(
        config.output / "sharding.png",
        next(x for x in kept if x.shape[1:] == shape),
        [f"worker {i}" for i in range(method.workers)],
        f"{method.name}: what each worker keeps for the embedding",
        "byte value",
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
