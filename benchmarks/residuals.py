"""Count what gradients through rounds compute and keep, against hand-written loops.

    python -m benchmarks.residuals               # gradients through 1 to 64 rounds
    python -m benchmarks.residuals --quick       # 1, 2 and 16 rounds
    python -m benchmarks.residuals --tpu v5e:2x4 # what the compiler for TPUs says

Each task is compiled, and nothing runs: the floating-point operations of matrix
products, times how often their loops run, in units of one forward pass of all groups
through one round; the temporary memory of a device; and the collectives that it runs.
Of a conditional, the branch with the most operations counts.
Hand-written are the two programs that an engineer would write: all groups of a device
at once by `jax.vmap`, without checkpoints; and one group at a time by `lax.scan`, with
a `jax.checkpoint` around each group and around each round. Of many rounds, those of a
segment are run again, too: the hand-written programs are nested scans, with a
`jax.checkpoint` around each segment, of as many rounds as take the least memory. Where
an engineer has several choices, the program with the least memory counts: a state that
enters the next one linearly needs no `jax.checkpoint` around the round, as the group's
local steps alone have residuals. With `--out` the table goes to
`residuals-jax-VERSION.md`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks import counts
from benchmarks.descent import Params, descend, loss
from drjax.compiled import Report
from drjax.compiled.hlo import Module
from drjax.compiled.schedule import Schedule

DEVICES, STEPS, BATCH = 8, 4, 16
# Of the model. What is smaller stays in the core of a TPU, whose memory is not counted.
WIDTH, WIDTH_ON_TPU = 64, 2048
ALL, CHECKPOINTED = "shard_map, all", "shard_map, 1"
OURS_ALL, OURS = "drjax.jit, all", "drjax.jit, 1"
_AXIS = "clients"
_WHOLE = P()


def matrix_operations(
    compiled: Any, of_branches: Callable[[list[int]], int] = min
) -> int:
    """Count the floating-point operations of the matrix products of a program.

    `of_branches` combines the counts of the branches of a conditional.
    """
    module = Module(compiled.as_text())
    total = Schedule(module, of_branches).flops(module.computations[module.entry])
    assert total is not None, "the length of a loop is not known"
    return total


# -------------------------------------------------------------------------------------
# The work of one group in one round


def descend_with_momentum(
    params: Params, state: Params, x: jax.Array
) -> tuple[Params, Params]:
    """The same, with a momentum that the group keeps for its next round."""

    def step(carry: Any, x: jax.Array) -> tuple[Any, None]:
        params, state = carry
        grads = jax.grad(loss)(params, x)
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        params = jax.tree.map(lambda w, m: w - 0.1 * m, params, state)
        return (params, state), None

    return lax.scan(step, (params, state), x)[0]


def momentum_of_rounds(
    params: Params, state: Params, x: jax.Array, descend: Callable = descend
) -> tuple[Params, Params]:
    """Local steps as one step of a momentum: the new state is linear in the old one."""
    new = descend(params, x)
    state = jax.tree.map(lambda m, w, v: 0.9 * m + (w - v), state, params, new)
    return jax.tree.map(jnp.subtract, params, state), state


def _without_state(params: Params, state: Any, x: jax.Array) -> tuple[Params, Any]:
    return descend(params, x), state


# -------------------------------------------------------------------------------------
# One round, from `(params, state, data)` to `(params, state)`: ours and hand-written


def _ours(n: int, task: "Task") -> Callable:
    @drjax.program(clients=n)
    def one_round(params, state, x):
        params = drjax.broadcast(params)
        if task.with_state:
            new, state = drjax.map_fn(task.work, (params, state, x))
        else:
            new = drjax.map_fn(descend, (params, x))
        return drjax.reduce_mean(new), state

    return one_round


def _varying(tree: Any) -> Any:
    return jax.tree.map(lambda a: lax.pcast(a, _AXIS, to="varying"), tree)


def written(local: Callable, n: int) -> Callable:
    """A round from the sums and states of the groups of one device."""

    def on_a_device(params, state, x):
        sums, state = local(_varying(params), state, x)
        return jax.tree.map(lambda y: lax.psum(y, _AXIS) / n, sums), state

    groups = P(_AXIS)
    return jax.shard_map(
        on_a_device, in_specs=(P(), groups, groups), out_specs=(P(), groups)
    )


def _all_at_once(n: int, work: Callable) -> Callable:
    def local(params, state, x):
        new, state = jax.vmap(work, (None, 0, 0))(params, state, x)
        return jax.tree.map(lambda y: y.sum(0), new), state

    return written(local, n)


def _one_at_a_time(n: int, work: Callable) -> Callable:
    def local(params, state, x):
        def step(sums, group):
            new, state = work(params, *group)
            return jax.tree.map(jnp.add, sums, new), state

        return lax.scan(step, jax.tree.map(jnp.zeros_like, params), (state, x))

    return written(local, n)


def _checkpointed(n: int, work: Callable) -> list[Callable]:
    """One group at a time, as an engineer may write it.

    With checkpoints around each group and around each round; or around the local steps
    of a group alone, where its state needs none.
    """
    work_again = jax.checkpoint(work, prevent_cse=False)
    rounds = [jax.checkpoint(_one_at_a_time(n, work_again))]
    if work is momentum_of_rounds:
        steps = jax.checkpoint(descend, prevent_cse=False)
        rounds.append(_one_at_a_time(n, partial(work, descend=steps)))
    return rounds


# -------------------------------------------------------------------------------------
# What is done with rounds


def _straight(one_round: Callable, rounds: int) -> Callable:
    def last_loss(params, state, x, validation):
        for _ in range(rounds):
            params, state = one_round(params, state, x)
        return loss(params, validation)

    return jax.grad(last_loss)


def scanned(one_round: Callable, rounds: int) -> Callable:
    """The gradient of the loss after a scan over rounds."""

    def last_loss(params, state, x, validation):
        step = lambda carry, _: (one_round(*carry, x), None)
        (params, state), _ = lax.scan(step, (params, state), length=rounds)
        return loss(params, validation)

    return jax.grad(last_loss)


def _nested(one_round: Callable, rounds: int) -> Callable:
    """Rounds in epochs, after each of which the model decays."""
    epochs = min(2, rounds)

    def last_loss(params, state, x, validation):
        step = lambda carry, _: (one_round(*carry, x), None)

        def epoch(carry, _):
            params, state = lax.scan(step, carry, length=rounds // epochs)[0]
            return (jax.tree.map(lambda w: 0.99 * w, params), state), None

        (params, state), _ = lax.scan(epoch, (params, state), length=epochs)
        return loss(params, validation)

    return jax.grad(last_loss)


def _in_a_branch(one_round: Callable, flag: jax.Array, carry: Any, x: Any) -> Any:
    """A round that is left out where a number is not positive."""
    work = lambda params, state: one_round(params, state, x)
    return lax.cond(flag > 0, work, lambda *unchanged: unchanged, *carry)


def _straight_branches(one_round: Callable, rounds: int) -> Callable:
    def last_loss(params, state, x, validation):
        carry = params, state
        for flag in validation[0, :rounds]:
            carry = _in_a_branch(one_round, flag, carry, x)
        return loss(carry[0], validation)

    return jax.grad(last_loss)


def _scanned_branches(one_round: Callable, rounds: int) -> Callable:
    def last_loss(params, state, x, validation):
        step = lambda carry, flag: (_in_a_branch(one_round, flag, carry, x), None)
        (params, state), _ = lax.scan(step, (params, state), validation[0, :rounds])
        return loss(params, validation)

    return jax.grad(last_loss)


def _segmented(one_round: Callable, rounds: int, length: int) -> Callable:
    def last_loss(params, state, x, validation):
        step = lambda carry, _: (one_round(*carry, x), None)
        segment = lambda carry, _: (lax.scan(step, carry, length=length)[0], None)
        segment = jax.checkpoint(segment, prevent_cse=False)
        (params, state), _ = lax.scan(segment, (params, state), length=rounds // length)
        return loss(params, validation)

    return jax.grad(last_loss)


@dataclass(frozen=True)
class Task:
    """What is measured.

    Attributes:
      derived: From a round and how many there are to the function that is compiled.
      work: That of one group in a round, from `(params, state, data)` to
        `(params, state)`.
    """

    derived: Callable[[Callable, int], Callable]
    work: Callable = _without_state

    @property
    def with_state(self) -> bool:
        """Whether each group keeps a state from round to round."""
        return self.work is not _without_state


TASKS = {
    "straight-line rounds": Task(_straight),
    "a scan over rounds": Task(scanned),
    "scans over rounds in a scan": Task(_nested),
    "straight-line rounds, states in the groups": Task(
        _straight, descend_with_momentum
    ),
    "a scan over rounds, states in the groups": Task(scanned, descend_with_momentum),
    "scans over rounds in a scan, states in the groups": Task(
        _nested, descend_with_momentum
    ),
    "straight-line rounds, linear states in the groups": Task(
        _straight, momentum_of_rounds
    ),
    "a scan over rounds, linear states in the groups": Task(
        scanned, momentum_of_rounds
    ),
    "scans over rounds in a scan, linear states in the groups": Task(
        _nested, momentum_of_rounds
    ),
}
# Where rounds are in branches: all are taken.
BRANCHES = {
    "rounds in branches": Task(_straight_branches),
    "a scan over rounds in branches": Task(_scanned_branches),
    "a scan over rounds in branches, states in the groups": Task(
        _scanned_branches, descend_with_momentum
    ),
}
# With checkpoints of some rounds.
SEGMENTED = {
    "checkpoints of some rounds": TASKS["a scan over rounds"],
    "checkpoints of some rounds, states in the groups": TASKS[
        "a scan over rounds, states in the groups"
    ],
}


def _implementations(task: Task, n: int, rounds: int) -> dict[str, list[Callable]]:
    """Of the hand-written ones several, of which the one with the least memory counts.

    All groups at once are without checkpoints, as `drjax.jit` saves what these need.
    """
    derived = lambda one_round: task.derived(one_round, rounds)
    ours = derived(_ours(n, task))
    checkpointed = _checkpointed(n, task.work)
    return {
        ALL: [jax.jit(derived(_all_at_once(n, task.work)))],
        OURS_ALL: [drjax.jit(ours)],
        CHECKPOINTED: [jax.jit(derived(one_round)) for one_round in checkpointed],
        OURS: [drjax.jit(ours, groups_per_step=1)],
    }


def _segmented_implementations(
    task: Task, n: int, rounds: int
) -> dict[str, list[Callable]]:
    """The same, with checkpoints of some rounds.

    The segments of the hand-written ones have 2, 4, ... rounds. All groups at once are
    not rematerialized in the rounds of a segment.
    """
    lengths = [2**i for i in range(1, 10) if 2**i < rounds]
    ours = scanned(_ours(n, task), rounds)
    nested = lambda *choices: [
        jax.jit(_segmented(one_round, rounds, length))
        for one_round in choices
        for length in lengths
    ]
    return {
        ALL: nested(_all_at_once(n, task.work)),
        OURS_ALL: [drjax.jit(ours, checkpoints="sqrt")],
        CHECKPOINTED: nested(*_checkpointed(n, task.work)),
        OURS: [drjax.jit(ours, groups_per_step=1, checkpoints="sqrt")],
    }


def types(
    mesh: jax.sharding.Mesh, n: int, with_state: bool, width: int = WIDTH
) -> tuple:
    """Those of the model, of states and data of the groups, and of data to validate."""

    def array(*shape: int, spec: P = _WHOLE) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    names, groups = ("in", "out"), P(_AXIS)
    params = {name: array(width, width) for name in names}
    kept = names if with_state else ()
    state = {name: array(n, width, width, spec=groups) for name in kept}
    data = array(n, STEPS, BATCH, width, spec=groups)
    return params, state, data, array(BATCH, width)


def measure(
    n: int,
    rounds: tuple[int, ...],
    many: tuple[int, ...] = (),
    show_progress: bool = True,
    only: str | None = None,
    topology: str | None = None,
) -> list[dict]:
    """Compile all tasks, or one, for n groups and for each number of rounds.

    With `many` rounds, checkpoints are of some rounds. It is for devices of the CPU, or
    for the TPU chips of a `topology`, that need not be there.

    Returns:
      A dict for each task, number of rounds and implementation: `task`, `rounds`,
      `implementation`, `passes`, the operations in units of one forward pass, `temp` in
      bytes, and `collectives`, how many run.
    """
    mesh = counts.mesh_of(_AXIS, DEVICES, topology)
    rows = []
    tasks = [(*item, rounds) for item in (TASKS | BRANCHES).items()]
    tasks += [(*item, many) for item in SEGMENTED.items()]
    tasks = [task for task in tasks if only in (None, task[0])]
    with jax.set_mesh(mesh):
        for name, task, numbers in tqdm(tasks, disable=not show_progress):
            width = WIDTH_ON_TPU if topology else WIDTH
            args = types(mesh, n, task.with_state, width)
            forward = jax.jit(_all_at_once(n, task.work))
            one = matrix_operations(forward.lower(*args[:3]).compile())
            for count in numbers:
                segmented = name in SEGMENTED
                make = _segmented_implementations if segmented else _implementations
                for how, choices in make(task, n, count).items():
                    compiled: Any = min(
                        (run.lower(*args).compile() for run in choices),
                        key=lambda x: Report.of(x).temp_bytes,
                    )
                    report = Report.of(compiled)
                    row = {"task": name, "rounds": count, "implementation": how}
                    row["passes"] = matrix_operations(compiled, max) / one
                    row["temp"] = report.temp_bytes
                    row["collectives"] = report.total.times
                    rows.append(row)
    return rows


def markdown(rows: list[dict], n: int, where: str, width: int = WIDTH) -> str:
    """The table of `measure`, with what it was compiled for."""
    lines = [
        f"JAX {jax.__version__}, {where}, n = {n} groups, each "
        f"with {STEPS} local steps on a model of {8 * width**2:,} bytes.",
        "",
        "| task | rounds | written with | forward passes | temporary bytes | "
        "collectives |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        first = row["implementation"] == ALL
        lines.append(
            f"| {row['task'] if first else ''} | {row['rounds'] if first else ''} | "
            f"{row['implementation']} | {row['passes']:.2f} | {row['temp']:,} | "
            f"{row['collectives']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    options = counts.parser(__doc__, "1, 2 and 16 rounds", tpu=True).parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    few = options.quick or options.tpu
    n, rounds, many = 64, (1, 2) if few else (1, 2, 4, 8), (16,) if few else (16, 64)
    rows = measure(n, rounds, many, topology=options.tpu)
    where = counts.place_of(DEVICES, options.tpu)
    width = WIDTH_ON_TPU if options.tpu else WIDTH
    kind = "residuals-tpu" if options.tpu else "residuals"
    counts.write(markdown(rows, n, where, width), options.out, kind)


if __name__ == "__main__":
    main()
