"""Count what loops over groups compute, send and keep, hand-written and by `drjax.jit`.

    python -m benchmarks.streamed                # 64 and 512 groups, on 8 devices
    python -m benchmarks.streamed --quick        # 64 groups, timed twice
    python -m benchmarks.streamed --tpu v5e:2x4  # what the compiler for TPUs says

The hand-written `jax.shard_map` is what a good engineer writes: what does not change is
computed before a loop, a donated state is updated in place, an index is found
while slices pass. Most work on one group at a time; where the number of groups says
"all", a device's groups work at once. The floating-point operations of matrix products,
times how often their loops run; bytes that one device sends, likewise; its temporary
memory, and its peak with arguments and results; and time as a ratio to the hand-written
code, itself measured twice, in interleaved rounds, with quartiles. With `--out` the
table goes to `streamed-jax-VERSION.md`. With `--tpu` (which needs libtpu, and no TPU)
nothing runs, and it goes to `streamed-tpu-jax-VERSION.md`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks import counts, moves
from benchmarks.descent import descend
from benchmarks.report import spread, table
from benchmarks.residuals import descend_with_momentum, matrix_operations
from drjax.compiled import Report

DEVICES, ROUNDS, NUMBERS, WIDTH, STEPS, BATCH = 8, 8, 20_000, 64, 4, 16
OURS, WRITTEN = "drjax.jit", "shard_map"
_AXIS, _SEGMENTS = "clients", 100
_WHOLE, _GROUPS = P(), P(_AXIS)


def _vary(tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.pcast(x, _AXIS, to="varying"), tree)


def _zeros(tree: Any) -> Any:
    return _vary(jax.tree.map(jnp.zeros_like, tree))


def _mean(tree: Any, n: int) -> Any:
    return jax.tree.map(lambda x: lax.psum(x, _AXIS) / n, tree)


def _added(tree: Any, other: Any) -> Any:
    return jax.tree.map(jnp.add, tree, other)


def _sum_of_groups(fn: Callable, start: Any, xs: Any) -> Any:
    """Add up what a function returns for each of a device's groups, one by one."""
    return lax.scan(lambda sums, x: (_added(sums, fn(x)), None), start, xs)[0]


# -------------------------------------------------------------------------------------
# Random draws before a loop over rounds


def _draw(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (NUMBERS,))


def _near(m: jax.Array, noise: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(m - noise))


def _draws(n: int) -> Callable:
    @drjax.program(clients=n)
    def program(m, keys):
        noise = drjax.map_fn(_draw, keys)

        def one_round(m, _):
            distances = drjax.map_fn(_near, (drjax.broadcast(m), noise))
            return drjax.reduce_mean(distances), None

        return lax.scan(one_round, m, length=ROUNDS)[0]

    return program


def _draws_by_hand(n: int) -> Callable:
    def on_a_device(m, keys):
        noise = lax.map(_draw, keys)

        def one_round(m, _):
            near = lambda noise: _near(_vary(m), noise)
            return _mean(_sum_of_groups(near, _zeros(m), noise), n), None

        return lax.scan(one_round, m, length=ROUNDS)[0]

    return jax.shard_map(on_a_device, in_specs=(_WHOLE, _GROUPS), out_specs=_WHOLE)


# -------------------------------------------------------------------------------------
# A cohort of groups in each round, and the gradient


def _of_cohort(n: int) -> Callable:
    @drjax.program(clients=n)
    def program(m, x, ids):
        def one_round(m, ids):
            own = drjax.take(x, ids)
            work = lambda m, x: jnp.tanh(m * x)
            return drjax.reduce_mean(
                drjax.map_fn(work, (drjax.broadcast(m), own))
            ), None

        return jnp.sum(lax.scan(one_round, m, ids)[0])

    return jax.grad(program)


def _of_cohort_by_hand(n: int, take: Callable = moves.take_by_sum) -> Callable:
    def on_a_device(m, x, ids):
        def one_round(m, ids):
            own = lax.stop_gradient(take(x, ids))
            return _mean(jnp.tanh(_vary(m)[None] * own).sum(0), n), None

        return lax.scan(one_round, m, ids)[0]

    specs = _WHOLE, _GROUPS, _WHOLE
    run = jax.shard_map(on_a_device, in_specs=specs, out_specs=_WHOLE)
    return jax.grad(lambda *args: jnp.sum(run(*args)))


# -------------------------------------------------------------------------------------
# A state of each group, updated in place


def _with_states(n: int) -> Callable:
    @drjax.program(clients=n)
    def program(params, state, x):
        params = drjax.broadcast(params)
        new, state = drjax.map_fn(descend_with_momentum, (params, state, x))
        return drjax.reduce_mean(new), state

    return program


def _with_states_by_hand(n: int) -> Callable:
    def on_a_device(params, state, x):
        def one_group(i, carry):
            sums, state = carry
            of_group = lambda x: lax.dynamic_index_in_dim(x, i, 0, False)
            own = jax.tree.map(of_group, state)
            new, own = descend_with_momentum(_vary(params), own, of_group(x))
            put = lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0)
            return _added(sums, new), jax.tree.map(put, state, own)

        start = _zeros(params), state
        sums, state = lax.fori_loop(0, x.shape[0], one_group, start)
        return _mean(sums, n), state

    return jax.shard_map(
        on_a_device,
        in_specs=(_WHOLE, _GROUPS, _GROUPS),
        out_specs=(_WHOLE, _GROUPS),
    )


def _in_rounds(one_round: Callable[[int], Callable]) -> Callable[[int], Callable]:
    def of_groups(n: int) -> Callable:
        run = one_round(n)

        def rounds(params, state, x):
            step = lambda carry, _: (run(*carry, x), None)
            return lax.scan(step, (params, state), length=ROUNDS)[0]

        return rounds

    return of_groups


# -------------------------------------------------------------------------------------
# Reductions while slices pass


def _of_slice(m: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(m * x)


def _reduced(reduce: Callable) -> Callable[[int], Callable]:
    def of_groups(n: int) -> Callable:
        @drjax.program(clients=n)
        def program(m, x):
            return reduce(drjax.map_fn(_of_slice, (drjax.broadcast(m), x)), n)

        return program

    return of_groups


def _segment_of(group: Any) -> Any:
    return group * 7 % _SEGMENTS


def _over_slices(on_a_device: Callable) -> Callable:
    return jax.shard_map(on_a_device, in_specs=(_WHOLE, _GROUPS), out_specs=_WHOLE)


def _argmax_by_hand(n: int) -> Callable:
    def on_a_device(m, x):
        first = lax.axis_index(_AXIS) * x.shape[0]
        m = _vary(m)

        def step(carry, item):
            best, index = carry
            i, y = item[0], _of_slice(m, item[1])
            wins = (y > best) | (jnp.isnan(y) & ~jnp.isnan(best))
            return (jnp.where(wins, y, best), jnp.where(wins, i, index)), None

        start = _of_slice(m, x[0]), _vary(jnp.zeros(m.shape, jnp.int32)) + first
        items = first + jnp.arange(x.shape[0]), x
        # Each device has the best of a part of the numbers.
        bests, indices = (
            lax.all_to_all(y.reshape(DEVICES, -1), _AXIS, 0, 0, tiled=True)
            for y in lax.scan(step, start, items)[0]
        )
        attains = (bests == bests.max(0, keepdims=True)) | jnp.isnan(bests)
        index = jnp.where(attains, indices, n).min(0)
        return lax.all_gather(index, _AXIS, tiled=True, to="invarying")

    return _over_slices(on_a_device)


def _segments_by_hand(n: int) -> Callable:
    def on_a_device(m, x):
        first = lax.axis_index(_AXIS) * x.shape[0]
        m = _vary(m)

        def step(sums, item):
            return sums.at[_segment_of(item[0])].add(_of_slice(m, item[1])), None

        sums = _vary(jnp.zeros((_SEGMENTS, *m.shape)))
        items = first + jnp.arange(x.shape[0]), x
        return lax.psum(lax.scan(step, sums, items)[0], _AXIS)

    return _over_slices(on_a_device)


# -------------------------------------------------------------------------------------
# Two parts of a model, each sent while the groups go on with the other


def _fragments(n: int) -> Callable:
    @drjax.program(clients=n)
    def program(params, x):
        own = drjax.broadcast(params)
        for i, name in enumerate(params):
            own = drjax.map_fn(lambda p, x, i=i: descend(p, x[i :: len(p)]), (own, x))
            moved = drjax.map_fn(
                jnp.subtract, (drjax.broadcast(params[name]), own[name])
            )
            new = params[name] - 0.7 * drjax.reduce_mean(moved)
            params = {**params, name: new}
            own = {**own, name: drjax.broadcast(new)}
        return params

    return program


def _fragments_by_hand(n: int) -> Callable:
    def on_a_device(params, x):
        every = lambda y: jnp.broadcast_to(y, (x.shape[0], *y.shape))
        own = jax.tree.map(every, _vary(params))
        for i, name in enumerate(params):
            own = jax.vmap(descend)(own, x[:, i :: len(params)])
            moved = (params[name][None] - own[name]).sum(0)
            new = params[name] - 0.7 * _mean(moved, n)
            params = {**params, name: new}
            own = {**own, name: every(_vary(new))}
        return params

    return _over_slices(on_a_device)


# -------------------------------------------------------------------------------------
# Tasks


@dataclass(frozen=True)
class Task:
    """What is measured.

    Attributes:
      ours: From the number of groups to a program.
      written: From the number of groups to the hand-written function.
      args: From the number of groups to arguments, each with whether groups have it.
      at_once: How many of a device's groups work at once; None: all.
      donated: The arguments whose memory the results take.
      on_tpu: The hand-written function for TPUs, if that differs.
    """

    ours: Callable[[int], Callable]
    written: Callable[[int], Callable]
    args: Callable[[int], list[tuple[Any, bool]]]
    at_once: int | None = 1
    donated: tuple[int, ...] = ()
    on_tpu: Callable[[int], Callable] | None = None


def _random(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).randn(*shape).astype(np.float32) / 8


def _model() -> dict[str, np.ndarray]:
    return {name: _random(WIDTH, WIDTH) for name in ("in", "out")}


def _data(n: int) -> np.ndarray:
    return _random(n, STEPS, BATCH, WIDTH)


def _states(n: int) -> list[tuple[Any, bool]]:
    state = {name: _random(n, WIDTH, WIDTH) for name in ("in", "out")}
    return [(_model(), False), (state, True), (_data(n), True)]


def _slices(n: int) -> list[tuple[Any, bool]]:
    return [(_random(NUMBERS), False), (_random(n, NUMBERS), True)]


def _keys(n: int) -> list[tuple[Any, bool]]:
    return [(np.float32(1), False), (jax.random.split(jax.random.key(0), n), True)]


def _cohorts(n: int) -> list[tuple[Any, bool]]:
    ids = np.random.RandomState(1).randint(0, n, (ROUNDS, n)).astype(np.int32)
    return [*_slices(n), (ids, False)]


_argmax = _reduced(lambda x, n: drjax.reduce_argmax(x))
_segments = _reduced(
    lambda x, n: drjax.reduce_sum(x, by=_segment_of(jnp.arange(n)), num=_SEGMENTS)
)

TASKS = {
    "random draws before a scan over rounds": Task(_draws, _draws_by_hand, _keys),
    "states of groups, donated": Task(
        _with_states, _with_states_by_hand, _states, donated=(1,)
    ),
    "states of groups in a scan over rounds": Task(
        _in_rounds(_with_states), _in_rounds(_with_states_by_hand), _states
    ),
    "group of the maximum": Task(_argmax, _argmax_by_hand, _slices),
    "sum of 100 segments": Task(_segments, _segments_by_hand, _slices),
    "parts of a model, sent in turn": Task(
        _fragments, _fragments_by_hand, lambda n: [(_model(), False), (_data(n), True)],
        at_once=None,
    ),
    "gradient of cohorts in a scan": Task(
        _of_cohort, _of_cohort_by_hand, _cohorts, at_once=None,
        on_tpu=lambda n: _of_cohort_by_hand(n, moves.take_ragged),
    ),
}  # fmt: skip


def measure(
    sizes: tuple[int, ...],
    rounds: int,
    topology: str | None = None,
    show_progress: bool = True,
) -> list[dict]:
    """Compile all tasks for each number of groups, and run them.

    Args:
      sizes: Numbers of groups.
      rounds: How often each program is timed.
      topology: `DEVICES` TPU chips, that need not be there: nothing runs.
      show_progress: Whether to show a progress bar.

    Returns:
      A dict for each task, number of groups and implementation: `task`, `n`,
      `implementation`, `operations` of matrix products, `bytes` that one device sends,
      `temp` in bytes, `peak` with those of arguments and results, and `time`, the
      ratios to the hand-written code, `[rounds]`; empty with a `topology`.
    """
    mesh = counts.mesh_of(_AXIS, DEVICES, topology)
    items = [(name, n) for name in TASKS for n in sizes]
    return [
        row
        for name, n in tqdm(items, disable=not show_progress)
        for row in _measure_task(name, n, mesh, 0 if topology else rounds)
    ]


def _measure_task(
    name: str, n: int, mesh: jax.sharding.Mesh, rounds: int
) -> list[dict]:
    """The measurements of one task; see `measure`. Without rounds nothing runs."""
    task = TASKS[name]
    types, args = _arguments(task, n, mesh)
    written = task.written if rounds else task.on_tpu or task.written
    options: dict[str, Any] = {"donate_argnums": task.donated}
    with jax.set_mesh(mesh):
        functions = {
            OURS: drjax.jit(task.ours(n), task.at_once or n, **options),
            WRITTEN: jax.jit(written(n), **options),
        }
        compiled: dict[str, Any] = {
            how: run.lower(*types).compile() for how, run in functions.items()
        }
        times = dict.fromkeys(functions, np.zeros(0))
        if rounds:
            times = _times(compiled, args, rounds)
    rows = []
    for how, run in compiled.items():
        report = Report.of(run)
        rows.append(
            {
                "task": name + (", all" if task.at_once is None else ""),
                "n": n,
                "implementation": how,
                "operations": matrix_operations(run),
                "bytes": report.total.bytes_per_call,
                "temp": report.temp_bytes,
                "peak": report.peak_bytes,
                "time": times[how],
            }
        )
    return rows


def _arguments(task: Task, n: int, mesh: jax.sharding.Mesh) -> tuple[list, Callable]:
    """The types of the arguments, and a function that puts arguments on the devices."""
    pairs = [
        (x, NamedSharding(mesh, _GROUPS if of_groups else _WHOLE))
        for x, of_groups in task.args(n)
    ]
    typed = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    types = [jax.tree.map(lambda x, w=w: typed(x, w), tree) for tree, w in pairs]
    return types, lambda: [jax.device_put(tree, where) for tree, where in pairs]


def _times(
    compiled: dict[str, Any], args: Callable[[], list], rounds: int
) -> dict[str, np.ndarray]:
    """Time programs in turn, after their results are compared."""
    ours, written = (run(*args()) for run in compiled.values())
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(written), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-4, atol=2e-5)
    return counts.times_in_turn(compiled, WRITTEN, args, rounds)


def markdown(rows: list[dict], where: str) -> str:
    """The table of `measure`, with what it was measured on."""
    header = ["task", "n", "written with", "Mflop", "bytes sent", "temporary bytes"]
    header += ["peak bytes", "time"]
    body = []
    for row in rows:
        cells = [row["task"], str(row["n"]), row["implementation"]]
        cells += [f"{row['operations'] / 1e6:.2f}"]
        cells += [f"{row[key]:,}" for key in ("bytes", "temp", "peak")]
        body.append([*cells, spread(row["time"]) if len(row["time"]) else ""])
    timed = len(rows[0]["time"])
    if not timed:
        header, body = header[:-1], [line[:-1] for line in body]
    about = f"JAX {jax.__version__}, {where}, in {ROUNDS} rounds where there are some."
    return f"{about}\n\n{table(header, body, keys=3)}\n"


def main() -> None:
    options = counts.parser(__doc__, "64 groups, timed twice", tpu=True).parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    quick = options.quick or options.tpu
    sizes, rounds = ((64,), 2) if quick else ((64, 512), 20)
    where = counts.place_of(DEVICES, options.tpu)
    rows = measure(sizes, rounds, options.tpu)
    kind = "streamed-tpu" if options.tpu else "streamed"
    counts.write(markdown(rows, where), options.out, kind)


if __name__ == "__main__":
    main()
