"""`drjax.jit` of data that are read chunk by chunk: `Groups` in place of arrays.

Covers: drjax._jit.lazy_arguments, drjax._jit.read_in_loops,
drjax._primitives.read_groups, drjax.engines.slices.read_ahead.
"""

import contextlib
import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import drjax
from drjax._jit import lazy_arguments
from drjax._primitives.read_groups import READERS
from drjax.backends import Groups
from drjax.engines.slices.groups import like_the_first
from drjax.engines.slices.read_ahead import ReadAhead
from tests.helpers.compiled import compilations
from tests.helpers.raising import raises

N = 10


class Counted:
    """A sequence of the groups' data that counts what is read, and by which thread."""

    def __init__(self, n=N, size=3, fail=None):
        self.n, self.size, self.fail, self.reads, self.threads = (
            n,
            size,
            fail,
            [],
            set(),
        )

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.fail:
            raise OSError("disk")
        self.reads.append(i)
        self.threads.add(threading.current_thread().name)
        x = np.random.default_rng(i).normal(size=self.size)
        return {"x": x.astype(np.float32), "y": np.int32(i % 3)}

    def stacked(self):
        """What the program takes instead; not counted."""
        own = [type(self)(self.n, self.size)[i] for i in range(self.n)]
        return jax.tree.map(lambda *xs: jnp.stack(xs), *own)


def make_loss(n=N):
    @drjax.program(clients=n)
    def loss(w, data):
        def one(w, data):
            return jnp.mean(jnp.tanh(w * data["x"])) * data["y"]

        mean = drjax.reduce_mean(drjax.map_fn(one, (drjax.broadcast(w), data)))
        return jnp.log(mean**2 + 1)  # its derivative reads the data in a second round

    return loss


W = jnp.arange(1.0, 4.0)


def inside(loss, k: int | None = 4):
    return drjax.jit(jax.value_and_grad(loss), groups_per_step=k)


def outside(loss, k: int | None = 4):
    return jax.value_and_grad(drjax.jit(loss, groups_per_step=k))


def assert_close(x, y):
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, x, y)


@pytest.mark.parametrize("derivative", [inside, outside])
@pytest.mark.parametrize("kind", ["a sequence", "an iterable", "an iterator's maker"])
def test_value_and_gradient_are_those_of_arrays(derivative, kind):
    items = Counted()
    own = [items[i] for i in range(N)]
    kinds = {
        "a sequence": items,
        "an iterable": dict(enumerate(own)).values(),
        "an iterator's maker": lambda: iter(own),
    }
    step = derivative(make_loss())
    # Without n of the data, it is that of the program.
    assert_close(step(W, Groups(kinds[kind])), step(W, items.stacked()))


def test_each_round_reads_each_group_once_in_one_thread():
    for derivative, rounds in ((inside, 2), (outside, 3)):
        items = Counted(n=12)
        step, groups = derivative(make_loss(12)), Groups(items)
        step(W, groups)
        assert sorted(items.reads) == sorted([0, *[*range(12)] * rounds])
        items.reads.clear()
        step(W, groups)  # the types are known
        assert len(items.reads) == 12 * rounds
        assert len(items.threads - {threading.main_thread().name}) <= 2


def test_memory_and_arguments_do_not_grow_with_the_number_of_groups():
    sizes = []
    for n in (16, 256):
        step = inside(make_loss(n))
        compiled: Any = step.lower(W, Groups(Counted(n))).compile().memory_analysis()
        sizes.append((compiled.argument_size_in_bytes, compiled.temp_size_in_bytes))
    assert sizes[0] == sizes[1]


def round_of(w, data):
    step = lambda w, data: w - 0.1 * jax.grad(lambda w: jnp.mean(w * data["x"]) ** 2)(w)
    return drjax.reduce_mean(drjax.map_fn(step, (drjax.broadcast(w), data)))


def scan(w, data):
    return lax.scan(lambda w, _: (round_of(w, data), None), w, length=3)[0]


def scan_of_work_before(w, data):
    data = data | {"x": data["x"] * 2}
    return scan(w, data)


def scan_of_checkpoints(w, data):
    step = jax.checkpoint(lambda w, _: (round_of(w, data), None))
    return lax.scan(step, w, length=3)[0]


def nested_scans(w, data):
    return lax.scan(lambda w, _: (scan(w, data), None), w, length=2)[0]


def while_loop(w, data):
    more = lambda c: c[0] < jnp.max(w) + 0 * data["y"].sum()
    step = lambda c: (c[0] + 1, jax.jit(round_of)(c[1], data))
    return lax.while_loop(more, step, (0, w))[1]


def branches(w, data):
    return lax.cond(jnp.sum(w) > 0, round_of, lambda w, data: w, w, data)


def sums_of_axes(w, data):
    return w * jnp.mean(data["x"], axis=0)


def stacks(w, data):
    return lax.scan(lambda w, x: (w + x, None), w, data["x"])[0]


FLAT = [scan, scan_of_work_before, scan_of_checkpoints]
FORWARD = [*FLAT, nested_scans, while_loop, branches, sums_of_axes, stacks]


@pytest.mark.parametrize("fn", FORWARD)
def test_loops_and_branches_read_in_each_step(fn):
    """What the loop does not keep for its steps is not in memory for all groups."""
    sizes = []
    for n in (16, 128):
        program, items = drjax.program(clients=n)(fn), Counted(n, 100)
        w, groups, want = jnp.ones(100), Groups(items), items.stacked()
        total = lambda w, data, program=program: jnp.sum(program(w, data) ** 2)
        uses = [program, *([jax.grad(total)] if fn in FLAT else [])]
        for use in uses:
            step = drjax.jit(use, groups_per_step=4)
            memory: Any = step.lower(w, groups).compile().memory_analysis()
            sizes.append((memory.argument_size_in_bytes, memory.temp_size_in_bytes))
            assert_close(step(w, groups), jax.jit(use)(w, want))
    half = len(sizes) // 2
    assert sizes[:half] == sizes[half:]


def test_one_chunk_is_read_ahead():
    items = Counted()
    source, _ = like_the_first(Groups(items), "data", N)
    items.reads.clear()
    read = ReadAhead(source, raises=True)
    points, labels = read(0, 3, 9, 1)
    assert points.shape == (3, 3) and labels.tolist() == [0, 1, 2]
    read._thread.submit(int).result()  # what was ahead is read
    assert items.reads == [*range(6)]
    read(3, 6, 9, 1), read(6, 9, 9, 1)
    read._thread.submit(int).result()
    assert items.reads == [*range(9)]  # the tenth is another device's
    read.close()


def test_new_data_of_the_same_types_compile_nothing():
    step = inside(make_loss())
    step(W, Groups(Counted()))
    with compilations() as compiled:
        for _ in range(2):
            step(W, Groups(Counted()))
    assert compiled == []


def test_readers_are_closed():
    step, outer = inside(make_loss()), outside(make_loss())
    before = set(READERS)
    step(W, Groups(Counted()))
    assert set(READERS) == before
    groups = Groups(Counted())
    outer(W, groups), outer(W, groups)
    assert len(set(READERS) - before) == 1
    alive = weakref.ref(groups.items)
    del groups
    gc.collect()
    last = Groups(Counted())
    outer(W, last)
    assert len(set(READERS) - before) == 1
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("types", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", [{"clients": 4}, {"clients": 2, "model": 2}], ids=str)
def test_each_device_reads_its_own_groups(types, axes):
    n = 12 if types == "Explicit" else 10
    items = Counted(n)
    kind = getattr(jax.sharding.AxisType, types)
    mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=(kind,) * len(axes))
    want = inside(make_loss(n), None)(W, items.stacked())
    with jax.set_mesh(mesh):
        step, groups = inside(make_loss(n), 1), Groups(items)
        assert_close(step(W, groups), want)
        first = [9] if n == 10 and axes["clients"] == 4 else []  # is kept for padding
        twice = sorted([0, *range(n), *range(n)])
        assert sorted([*items.reads, *first]) == twice
        assert_close(outside(make_loss(n), 2)(W, groups), want)


def test_inside_of_other_transformations():
    items = Counted()
    groups, step = Groups(items), inside(make_loss())
    want = step(W, items.stacked())
    assert_close(jax.jit(lambda w: step(w, groups))(W), want)
    batch = jax.vmap(step, in_axes=(0, None))(jnp.stack([W, 2 * W]), groups)
    assert_close(jax.tree.map(lambda x: x[0], batch), want)


def test_any_argument_may_be_groups():
    own = [Counted()[i]["x"] for i in range(N)]
    stacked, groups = np.stack(own), Groups(own)
    rates = np.arange(N, dtype=np.float32)

    @drjax.program(clients=N)
    def total(w, data, rate):
        x, y = data["x"], data["y"]
        one = lambda w, x, y, rate: rate * w * x * y
        return drjax.reduce_sum(drjax.map_fn(one, (drjax.broadcast(w), x, y, rate)))

    want = total(W, {"x": stacked, "y": stacked + 1}, rates)
    others = Groups([x + 1 for x in own])
    step = drjax.jit(total, groups_per_step=3, donate_argnums=0)
    for x, y, rate in (
        (groups, others, Groups(list(rates))),
        (stacked, others, rates),
        (groups, stacked + 1, jnp.asarray(rates)),
    ):
        assert_close(step(w=W + 0, data={"x": x, "y": y}, rate=rate), want)
    with jax.disable_jit():
        assert_close(step(W, {"x": groups, "y": others}, rates), want)
    report = drjax.collectives(step)(W, {"x": groups, "y": others}, rates)
    # The model, the numbers of two readers, and the array.
    assert report.argument_bytes == 4 * 3 + 2 * 4 + 4 * N


def test_data_may_be_random_keys_and_results_may_be_written():
    keys, written = [jax.random.key(i) for i in range(N)], np.zeros((N, 3), np.float32)

    @drjax.program(clients=N)
    def draw(keys):
        def one(i, key):
            x = jax.random.normal(key, (3,))
            io_callback(written.__setitem__, None, i, x)
            return x

        return drjax.reduce_mean(drjax.map_fn(one, (drjax.partition_index(), keys)))

    mean = drjax.jit(draw, groups_per_step=3)(Groups(keys))
    jax.effects_barrier()
    want = jax.vmap(lambda key: jax.random.normal(key, (3,)))(jnp.stack(keys))
    assert_close((mean, written), (want.mean(0), want))


@pytest.mark.parametrize(
    "dtype", ["float64", "int64", "complex128", "bfloat16", "bool"]
)
def test_every_dtype_is_read_as_it_is(dtype):
    """Also of 64 bits, where x64 is enabled in this thread only; on a mesh of 8."""
    with jax.enable_x64(True):
        x = (np.arange(16).reshape(8, 2) % 5 * (1 + 1e-10)).astype(jnp.dtype(dtype))
        same = drjax.program(clients=8)(lambda x: drjax.map_fn(lambda x: x, x))
        for mesh in (None, jax.make_mesh((8,), ("clients",))):
            with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
                out = drjax.jit(same, groups_per_step=1)(Groups(list(x)))
            assert out.dtype == x.dtype
            np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("k", [None, "auto", "tune"])
def test_how_many_groups_at_once_may_be_chosen(k):
    items = Counted()
    step = drjax.jit(make_loss(), groups_per_step=k)
    assert_close(step(W, Groups(items)), step(W, items.stacked()))


def test_errors_name_the_group():
    step = inside(make_loss())
    items = [Counted()[i] for i in range(N)]
    text = "Group 6: loading group 6 raised OSError: disk"
    raises(drjax.DrjaxValueError, text, step, W, Groups(Counted(fail=6)))
    bad = [*items]
    bad[6] = {"x": np.zeros(4, np.float32), "y": np.int32(0)}
    text = "Group 6: its data['x'] is float32[4], but the plan is for float32[3]"
    raises(drjax.DrjaxValueError, text, step, W, Groups(bad))
    text = "The plan is for 10 groups, got more"
    raises(drjax.DrjaxValueError, text, step, W, Groups(lambda: iter([*items, bad[0]])))
    text = "convert it to float32"
    wide = jax.tree.map(lambda x: x.astype(np.float64), items)
    raises(drjax.DrjaxValueError, text, step, W, Groups(wide))
    text = "needs the number of groups before it reads"
    raises(
        drjax.DrjaxValueError, text,
        drjax.jit(lambda w, d: make_loss()(w, d)), W, Groups(lambda: iter(items)),
    )  # fmt: skip
    text = "a partition of so many; it has none"
    raises(drjax.DrjaxTypeError, text, drjax.jit(lambda d: d["x"] + 1), Groups(items))


def test_an_error_inside_of_a_transformation_is_the_runtime_s():
    with pytest.raises(jax.errors.JaxRuntimeError, match="OSError: disk"):
        jax.block_until_ready(outside(make_loss())(W, Groups(Counted(fail=6))))
    assert lazy_arguments.has_groups({"data": Groups([1])})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("jitted", [False, True])
def test_an_error_of_one_device_is_raised_when_no_other_waits(size, jitted):
    items = Counted(fail=6)
    groups, derivative = Groups(items), outside(make_loss())
    run = lambda w: derivative(w, groups)
    auto = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((size,), ("clients",), axis_types=auto)):
        run = jax.jit(run) if jitted else run
        with pytest.raises(jax.errors.JaxRuntimeError, match="OSError: disk"):
            jax.block_until_ready(run(W))
        with pytest.raises(jax.errors.JaxRuntimeError, match="OSError: disk"):
            jax.effects_barrier()  # JAX reports it there, too
        items.fail = None  # the disk is back
        assert_close(run(W), derivative(W, items.stacked()))


def test_a_number_of_a_program_is_no_reader_s():
    """A failed reader says nothing about a program that has its number as data."""

    @drjax.program(clients=N)
    def program(w, count, data):
        step = lambda w, _: (branches(w, data) * count, None)
        return jnp.sum(jax.checkpoint(lambda w: lax.scan(step, w, length=2)[0])(w))

    asked = []

    class Failed:
        def raise_error(self):
            asked.append("the error of another reader")

    inside, outside = drjax.jit(jax.grad(program)), jax.grad(drjax.jit(program))
    batched = jax.vmap(outside, (0, None, None))
    with numbered(Failed()) as number:
        for step, w in ((inside, W), (outside, W), (batched, jnp.stack([W, W]))):
            jax.block_until_ready(step(w, jnp.int32(number), Groups(Counted())))
    assert not asked


@contextlib.contextmanager
def numbered(reader):
    number = next(lazy_arguments._numbers)
    READERS[number] = reader
    try:
        yield number
    finally:
        del READERS[number]


def test_progress(capfd):
    mean = drjax.program(clients=N)(lambda x: drjax.reduce_mean(x["x"]))
    for progress in (False, True):
        drjax.jit(mean, groups_per_step=2, progress=progress)(Groups(Counted()))
        shown = capfd.readouterr().err
        assert ("groups read" in shown and f"/{N}" in shown) == progress
