"""Count what programs compute and keep that choose groups, against hand-written loops.

    python -m benchmarks.chosen                # 64 and 256 groups
    python -m benchmarks.chosen --quick        # 16 and 64 groups
    python -m benchmarks.chosen --tpu v5e:2x4  # what the compiler for TPUs says

One device, one group at a time. Each row is a value and its gradient: the
floating-point operations of matrix products that run, in units of a forward pass of all
groups; the temporary memory; and the time. Hand-written code is a loop that keeps the
index of the best group so far, or the losses of all where several may be the largest,
and a derivative of the work of the chosen groups alone, of several at once with
`jax.checkpoint`. Where a `lax.cond` decides about the work of a group, a branch counts
as often as it runs. Times are medians of interleaved runs, relative to the hand-written
code, with their quartiles. With `--out` the table goes to `chosen-jax-VERSION.md`.
With `--tpu` (which needs libtpu, and no TPU) nothing runs, groups are larger, and it
goes to `chosen-tpu-jax-VERSION.md`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

import drjax
from benchmarks import counts, report
from benchmarks.residuals import matrix_operations

# Of the model, and of a group's data. On TPUs, what is smaller is in a chip's core.
WIDTH, BATCH = 64, 256
WIDTH_ON_TPU, BATCH_ON_TPU = 2048, 8192
OURS, WRITTEN = "drjax.jit, 1", "hand-written"


def _work(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def _loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean(_work(w, x) ** 2)


def _slice_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(_work(w, x)))


def _two_of(n: int) -> jax.Array:
    return jnp.array([1, n // 2])


def _together(slices: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(slices[0] * slices[1]))


# -------------------------------------------------------------------------------------
# Ours


def _ours(n: int, combine: Callable) -> Callable:
    @drjax.program(clients=n)
    def program(w, x):
        of_groups = lambda fn, *more: drjax.map_fn(fn, (drjax.broadcast(w), x, *more))
        return combine(n, of_groups)

    return jax.value_and_grad(program)


def _worst_loss(n: int, of_groups: Callable) -> jax.Array:
    return drjax.reduce_max(of_groups(_loss))


def _best_slice(n: int, of_groups: Callable) -> jax.Array:
    both = lambda w, x: (_work(w, x), _loss(w, x))
    slices, losses = of_groups(both)
    best = drjax.select(slices, drjax.reduce_argmin(losses))
    return jnp.sum(jnp.sin(best))


def _one_slice(n: int, of_groups: Callable) -> jax.Array:
    return jnp.sum(jnp.sin(drjax.select(of_groups(_work), jnp.int32(n // 2))))


def _two_slices(n: int, of_groups: Callable) -> jax.Array:
    slices = of_groups(_work)
    return _together(jax.vmap(lambda i: drjax.select(slices, i))(_two_of(n)))


def _sum_of_two(n: int, of_groups: Callable) -> jax.Array:
    def loss(w: jax.Array, x: jax.Array, i: jax.Array, chosen: jax.Array) -> jax.Array:
        return jnp.where(jnp.any(i == chosen), _slice_loss(w, x), 0)

    index, chosen = drjax.partition_index(), drjax.broadcast(_two_of(n))
    return drjax.reduce_sum(of_groups(loss, index, chosen))


def _some_losses(n: int, of_groups: Callable) -> jax.Array:
    return drjax.reduce_mean(of_groups(_loss), where=jnp.arange(n) % 8 == 3)


def _all_losses(n: int, of_groups: Callable) -> jax.Array:
    return drjax.reduce_mean(of_groups(_loss), where=jnp.arange(n) >= 0)


def _mean_of_some(n: int, of_groups: Callable) -> jax.Array:
    mean = drjax.reduce_mean(of_groups(_work), where=jnp.arange(n) % 8 == 3)
    return jnp.sum(jnp.sin(mean))


# -------------------------------------------------------------------------------------
# Hand-written: each from the model and the data to a value and its gradient


def _index_of_least(w: jax.Array, x: jax.Array) -> jax.Array:
    """The group with the least loss, found group by group."""

    def step(carry: Any, item: Any) -> tuple[Any, None]:
        (best, index), (i, x) = carry, item
        loss = _loss(w, x)
        first = (loss < best) | (i == 0)
        return (jnp.where(first, loss, best), jnp.where(first, i, index)), None

    start = jnp.float32(0), jnp.int32(0)
    return lax.scan(step, start, (jnp.arange(len(x)), x))[0][1]


def _written_worst(w: jax.Array, x: jax.Array) -> Any:
    losses = lax.map(lambda x: _loss(w, x), x)
    largest = jnp.max(losses)
    # Groups with equal losses share the gradient, as those of `jnp.max` do.
    mask, zeros = losses == largest, jnp.zeros_like(w)
    total = _sum_over(_if_chosen(jax.grad(_loss), zeros), zeros, w, (mask, x))
    return largest, total / jnp.sum(mask)


def _written_best(w: jax.Array, x: jax.Array) -> Any:
    return jax.value_and_grad(_slice_loss)(w, x[_index_of_least(w, x)])


def _written_one(w: jax.Array, x: jax.Array) -> Any:
    return jax.value_and_grad(_slice_loss)(w, x[jnp.int32(len(x) // 2)])


def _written_two(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        work = jax.checkpoint(lambda i: _work(w, x[i]))
        return _together(lax.map(work, _two_of(len(x))))

    return jax.value_and_grad(loss)(w)


def _sum_over(fn: Callable, start: Any, w: jax.Array, items: Any) -> Any:
    """Add up what a function of the model returns for each of some items."""
    add = lambda total, item: (jax.tree.map(jnp.add, total, fn(w, item)), None)
    return lax.scan(add, start, items)[0]


def _written_sum(w: jax.Array, x: jax.Array) -> Any:
    each = lambda w, i: jax.value_and_grad(_slice_loss)(w, x[i])
    return _sum_over(each, (jnp.float32(0), jnp.zeros_like(w)), w, _two_of(len(x)))


def _written_mean(chosen: Callable) -> Callable:
    def run(w: jax.Array, x: jax.Array) -> Any:
        mask, start = chosen(jnp.arange(len(x))), (jnp.float32(0), jnp.zeros_like(w))
        each = _if_chosen(jax.value_and_grad(_loss), start)
        total = _sum_over(each, start, w, (mask, x))
        return jax.tree.map(lambda y: y / jnp.sum(mask), total)

    return run


def _written_mean_of_some(w: jax.Array, x: jax.Array) -> Any:
    mask, zeros = jnp.arange(len(x)) % 8 == 3, jnp.zeros_like(w)
    start = jnp.zeros_like(x[0])
    mean = _sum_over(_if_chosen(_work, start), start, w, (mask, x)) / jnp.sum(mask)
    value, ct = jax.value_and_grad(lambda mean: jnp.sum(jnp.sin(mean)))(mean)
    ct = ct / jnp.sum(mask)
    back = _if_chosen(lambda w, x: jax.vjp(lambda w: _work(w, x), w)[1](ct)[0], zeros)
    return value, _sum_over(back, zeros, w, (mask, x))


def _if_chosen(fn: Callable, zeros: Any) -> Callable:
    """Call a function for the groups of a mask, in place of `zeros`."""
    nothing = lambda *_: zeros
    return lambda w, item: lax.cond(item[0], fn, nothing, w, item[1])


@dataclass(frozen=True)
class Task:
    """What is measured.

    Attributes:
      ours: From n, and from a function of the model and a group's data to its values in
        all groups, to a number.
      written: From the model and the data of all groups to a value and its gradient.
      busy: The part of the n groups which a loop with branches does not leave out.
    """

    ours: Callable[[int, Callable], jax.Array]
    written: Callable[[jax.Array, jax.Array], Any]
    busy: Callable[[int], float]


def _always(_: int) -> float:
    return 1.0


TASKS = {
    "the largest loss": Task(_worst_loss, _written_worst, lambda n: 1 / n),
    "the slices of the best group": Task(_best_slice, _written_best, _always),
    "the slices of one group": Task(_one_slice, _written_one, _always),
    "the slices of two groups": Task(_two_slices, _written_two, _always),
    "a sum over two groups": Task(_sum_of_two, _written_sum, _always),
    "a mean over an eighth": Task(
        _some_losses, _written_mean(lambda i: i % 8 == 3), lambda n: 1 / 8
    ),
    "a mean of slices, of an eighth": Task(
        _mean_of_some, _written_mean_of_some, lambda n: 1 / 8
    ),
    "a mean over a mask of all": Task(
        _all_losses, _written_mean(lambda i: i >= 0), _always
    ),
}


def passes(
    compiled: Any, n: int, busy: float, width: int = WIDTH, batch: int = BATCH
) -> float:
    """Count the forward passes of n groups; branches for a part of them are `busy`."""
    least, most = (matrix_operations(compiled, of) for of in (min, max))
    return (least + (most - least) * busy) / (4 * width**2 * batch * n)


def _functions(task: Task, n: int) -> dict[str, Callable]:
    ours = drjax.jit(_ours(n, task.ours), groups_per_step=1)
    return {OURS: ours, WRITTEN: jax.jit(task.written)}


def measure(
    sizes: tuple[int, ...], runs: int, show_progress: bool = True
) -> list[dict]:
    """Compile and run all tasks, for each number of groups.

    Returns:
      A dict for each task, number of groups and implementation: `task`, `n`, `how`,
      `passes`, `temp` in bytes, and `seconds` of each run.
    """
    rows = []
    items = [(n, *item) for item in TASKS.items() for n in sizes]
    for n, name, task in tqdm(items, disable=not show_progress):
        keys = jax.random.split(jax.random.key(0))
        w = jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5
        x = jax.random.normal(keys[1], (n, BATCH, WIDTH))
        both: dict[str, Any] = _functions(task, n)
        compiled = {how: run.lower(w, x).compile() for how, run in both.items()}
        seconds: dict[str, list[float]] = {how: [] for how in both}
        for i in range(runs + 1):
            for how in sorted(both, reverse=bool(i % 2)):
                start = time.perf_counter()
                jax.block_until_ready(compiled[how](w, x))
                seconds[how].append(time.perf_counter() - start)
        for how in both:
            row = {"task": name, "n": n, "how": how, "seconds": seconds[how][1:]}
            row["passes"] = passes(compiled[how], n, task.busy(n))
            row["temp"] = compiled[how].memory_analysis().temp_size_in_bytes
            rows.append(row)
    return rows


def count_on_tpu(
    sizes: tuple[int, ...], topology: str, show_progress: bool = True
) -> list[dict]:
    """Count what the compiler for TPUs makes of the tasks, for one chip.

    Returns:
      As `measure`, without `seconds`.
    """
    rows = []
    mesh = counts.mesh_of("chips", 1, topology)
    whole = NamedSharding(mesh, PartitionSpec())
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)
    width, batch = WIDTH_ON_TPU, BATCH_ON_TPU
    items = [(n, *item) for item in TASKS.items() for n in sizes]
    with jax.set_mesh(mesh):
        for n, name, task in tqdm(items, disable=not show_progress):
            args = of(width, width), of(n, batch, width)
            both: dict[str, Any] = _functions(task, n)
            for how, run in both.items():
                compiled = run.lower(*args).compile()
                row = {"task": name, "n": n, "how": how}
                row["passes"] = passes(compiled, n, task.busy(n), width, batch)
                row["temp"] = compiled.memory_analysis().temp_size_in_bytes
                rows.append(row)
    return rows


def markdown(rows: list[dict]) -> str:
    """The table of `measure` or `count_on_tpu`, with what it was measured on."""
    body, timed = [], "seconds" in rows[0]
    for ours, written in zip(rows[::2], rows[1::2], strict=True):
        for row in (ours, written):
            size = f"{row['n']}"
            cells = [row["task"], size, row["how"], f"{row['passes']:.3f}"]
            body.append([*cells, f"{row['temp']:,}"])
            if timed:
                times = report.compared(ours["seconds"], written["seconds"])
                body[-1].append(times if row is ours else "")
    header = ["value and gradient of", "n", "written with", "forward passes"]
    header += ["temporary bytes", "time"] if timed else ["temporary bytes"]
    where, width, batch = "compiled for a TPU chip", WIDTH_ON_TPU, BATCH_ON_TPU
    last = "Nothing was run."
    if timed:
        where, width, batch = "one device of the CPU", WIDTH, BATCH
        last = "Times are relative to the hand-written code."
    return (
        f"JAX {jax.__version__}, {where}, groups of {batch:,} slices of {width:,} "
        f"numbers. A slice of the work is {4 * batch * width:,} bytes, the model "
        f"{4 * width**2:,}. {last}\n\n" + report.table(header, body, keys=2) + "\n"
    )


def main() -> None:
    options = counts.parser(__doc__, "16 and 64 groups", tpu=True).parse_args()
    if options.tpu:
        table = markdown(count_on_tpu((16, 64), options.tpu))
        counts.write(table, options.out, "chosen-tpu")
        return
    sizes, runs = ((16, 64), 5) if options.quick else ((64, 256), 21)
    counts.write(markdown(measure(sizes, runs)), options.out, "chosen")


if __name__ == "__main__":
    main()
