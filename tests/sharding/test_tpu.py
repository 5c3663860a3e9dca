"""Programs compiled for TPUs that are not there: models, and a grid of small ones.

XLA aborts the process for some programs whose partition's axes are Manual; a test that
ends here shows that it does not.

Covers: drjax._sharding.execute, drjax._primitives.map_fn.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from drjax.compiled import Collective, read_hlo
from drjax.contrib import diloco
from drjax.plan import Wire
from experiments import machine
from experiments.config import Machine
from tests.helpers import cases, models
from tests.helpers.compiled import BY_TPU_COMPILER
from tests.helpers.meshes import make_mesh

on_tpus = [
    pytest.mark.slow,
    BY_TPU_COMPILER,
]
AXES = {"clients": 2, "fsdp": 2, "tensor": 2}


def tpu_mesh(shape: dict[str, int], slices: int = 1) -> jax.sharding.Mesh:
    """Eight or fewer devices of TPU v5e; the first axis goes from slice to slice."""
    topology = {1: "v5e:2x4", 2: "v5e:2x2"}[slices]
    result = machine.devices(Machine(platform="tpu", topology=topology), slices)
    sizes = tuple(shape.values())
    return jax.sharding.Mesh(result[: np.prod(sizes)].reshape(sizes), tuple(shape))


def typed(mesh, tree, specs):
    """The types of arrays that lie so on a mesh."""
    on = lambda spec: jax.NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(spec)),
        tree, specs,
    )  # fmt: skip


# ---------------------------------------------------------------------------------
# Numbers that a TPU emulates, or of which it has no collective

WIDE = {
    "sum": lambda x, i: drjax.reduce_sum(x),
    "sharded sum": lambda x, i: drjax.reduce_sum(x, result="sharded"),
    "max": lambda x, i: drjax.reduce_max(x),
    "argmin": lambda x, i: drjax.reduce_argmin(x),
    "take": drjax.take,
    "put": lambda x, i: drjax.put(x, i),
    "add": lambda x, i: drjax.put(x, i, add=True),
    "fold": lambda x, i: drjax.reduce(lambda a, b: a + b - a * b, x, 0),
    "gradient of a fold": lambda x, i: jax.grad(
        lambda x: drjax.reduce(lambda a, b: a + b - a * b, x, 0).sum()
    )(x),
}


ORDERED, ADDED = ("max", "argmin"), ("sum", "sharded sum", "take", "put", "add", "fold")
WIDE_TYPES = [
    *((name, "float64") for name in WIDE),
    *((name, dtype) for name in ORDERED + ADDED for dtype in ("int64", "uint64")),
    *((name, dtype) for name in ADDED for dtype in ("complex64", "complex128")),
]


class TestWideNumbers:
    pytestmark = on_tpus

    @pytest.mark.parametrize(("name", "dtype"), WIDE_TYPES)
    def test_each_block_compiles(self, name, dtype):
        mesh, n = tpu_mesh({"clients": 8}), 16
        with jax.enable_x64(True), jax.set_mesh(mesh):
            args = typed(
                mesh,
                (jax.ShapeDtypeStruct((n, 40), dtype), jax.ShapeDtypeStruct((n,), int)),
                (P("clients"), P()),
            )
            run = drjax.program(clients=n)(WIDE[name])
            assert jax.jit(run).lower(*args).compile()


# ---------------------------------------------------------------------------------
# A round of training


def compiled_round(mesh, layers, dtype, jit: Any = jax.jit) -> str:
    n = mesh.shape["clients"]
    params = typed(mesh, models.initial(dtype), models.SPECS)
    tokens = typed(mesh, jax.ShapeDtypeStruct((n, 2, 8), jnp.int32), P("clients"))
    train = models.diloco_round(mesh, n, layers)
    train = drjax.jit(train, 1) if jit is drjax.jit else train
    lay = jax.tree.map(lambda x: x.sharding, params)
    with jax.set_mesh(mesh):
        lowered = jax.jit(train, out_shardings=lay).lower(params, tokens)
    return lowered.compile().as_text() or ""


def update_bytes(mesh, dtype) -> int:
    """Of a device's share of the update; all parameters are divided over both axes."""
    sizes = [x.size for x in jax.tree.leaves(models.initial(dtype))]
    shares = mesh.shape["fsdp"] * mesh.shape["tensor"]
    return sum(sizes) * jnp.dtype(dtype).itemsize // shares


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit], ids=["jax.jit", "drjax.jit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layers", [(name,) for name in models.LAYERS] + [tuple(models.LAYERS)], ids="+".join
)
class TestRounds:
    pytestmark = on_tpus

    def test_of_a_slice(self, layers, dtype, jit):
        mesh = tpu_mesh(AXES)
        text = compiled_round(mesh, layers, dtype, jit)
        sent = read_hlo(text, dict(mesh.shape))
        over_groups = [m for m in sent if m.axes is None or "clients" in m.axes]
        sums = [m for m in over_groups if m.kind == "all-reduce"]
        assert sum(m.result_bytes for m in sums) == update_bytes(mesh, dtype)
        # The compiler may reshard the parameters before the first step, not in a step.
        assert {m.times for m in over_groups} == {1}

    def test_of_two_slices(self, layers, dtype, jit):
        """The partition is on the data center's network, which has one all-reduce."""
        mesh = tpu_mesh(AXES, slices=2)
        text = compiled_round(mesh, layers, dtype, jit)
        sent = [c for c in read_hlo(text, dict(mesh.shape)) if c.between_slices]
        (total,) = [c for c in sent if c.kind == "all-reduce"]
        assert total.axes == ("clients",) and total.devices == 2
        assert total.result_bytes == update_bytes(mesh, dtype)


SPECS_INSIDE = [
    (None, None), ("fsdp", None), (None, "fsdp"), ("tensor", None), (None, "tensor"),
    ("fsdp", "tensor"), ("tensor", "fsdp"), (("fsdp", "tensor"), None),
]  # fmt: skip


class TestSlices:
    """The report of a program whose groups are TPU slices."""

    pytestmark = on_tpus

    @pytest.mark.parametrize("wire", [None, "int8"])
    @pytest.mark.parametrize("slices_major", [True, False])
    def test_the_exchange_of_two_slices(self, wire, slices_major):
        names = ("clients", "model")
        mesh = tpu_mesh({"clients": 2, "model": 4}, slices=2)
        if not slices_major:
            mesh = jax.sharding.Mesh(mesh.devices.T, names[::-1])
        x = typed(mesh, jax.ShapeDtypeStruct((2, 64, 256), jnp.float32), P("clients"))
        mean = drjax.program(clients=2)(lambda x: drjax.reduce_mean(x, wire=wire))
        with jax.set_mesh(mesh):
            report = drjax.collectives(jax.jit(mean))(x)
        sent = [c for c in report.collectives if c.between_slices]
        kinds = ["all-reduce"] if wire is None else ["all-to-all", "all-gather"]
        assert report.devices == 8 and [c.kind for c in sent] == kinds
        assert {(c.axes, c.devices) for c in sent} == {(("clients",), 2)}
        if wire is None:  # the chips of a slice divide it
            assert report.by_axes[("clients",)].bytes == 64 * 256 * 4 // 4

    @pytest.mark.parametrize("jit", [jax.jit, drjax.jit])
    @pytest.mark.parametrize("spec", SPECS_INSIDE, ids=str)
    def test_idle_axes_divide_what_is_sent(self, spec, jit):
        """In whatever dimension other axes shard the value, without moving it."""
        mesh = tpu_mesh({"clients": 2, "fsdp": 2, "tensor": 2}, slices=2)
        shape = jax.ShapeDtypeStruct((2, 512, 512), jnp.float32)
        x = typed(mesh, shape, P("clients", *spec))
        mean = drjax.program(clients=2)(drjax.reduce_mean)
        with jax.set_mesh(mesh):
            report = drjax.collectives(jit(mean))(x)
        reduced, *gathered = report.collectives
        assert reduced.between_slices and reduced.result_bytes == 512 * 512 * 4 // 4
        used = {axis for axis in mesh.axis_names if axis in str(spec)}
        idle = tuple(axis for axis in ("fsdp", "tensor") if axis not in used)
        assert [(c.kind, c.axes) for c in gathered] == [("all-gather", idle)][
            : len(idle)
        ]


N = 16
CONSTANTS = {
    "by": lambda x: drjax.reduce_sum(x, by=jnp.arange(N) % 3, num=3),
    "take": lambda x: drjax.take(x, jnp.arange(N)[::-1]),
    "where": lambda x: drjax.reduce_mean(x, where=jnp.arange(N) % 2 == 0),
    "operand": lambda x: drjax.reduce_sum(
        drjax.map_fn(lambda x, i: x * i, (x, jnp.arange(N)))
    ),
    "scalar": lambda x: drjax.reduce_sum(x) * (jnp.float32(3) / jnp.sqrt(7.0)),
    "roll": lambda x: jnp.roll(x, jnp.int32(2) + 1, 0),
    "rows": lambda x: drjax.map_fn(lambda x: x[jnp.arange(3) * 2], x),
}


@pytest.mark.parametrize("jit", [jax.jit, drjax.jit], ids=["jax.jit", "drjax.jit"])
@pytest.mark.parametrize("program", CONSTANTS)
class TestConstants:
    pytestmark = on_tpus

    def test_computed_while_planning(self, program, jit):
        """They are computed on a device that is there."""
        mesh = tpu_mesh({"clients": 8})
        x = typed(mesh, jax.ShapeDtypeStruct((N, 6), jnp.float32), P("clients"))
        fn = drjax.program(clients=N)(CONSTANTS[program])
        loss = lambda x: jnp.sum(jnp.sin(fn(x)))
        with jax.set_mesh(mesh):
            for each in (fn, jax.grad(loss)):
                assert "HloModule" in jit(each).lower(x).compile().as_text()


# ---------------------------------------------------------------------------------
# Numbers in few bits


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "float8_e4m3fn", "float4_e2m1fn"])
class TestWires:
    pytestmark = on_tpus

    def test_devices_send_codes_of_few_bits(self, wire):
        """An all-to-all and an all-gather of bytes; its parts are padded to tiles."""
        mesh = tpu_mesh({"workers": 8})
        x = typed(mesh, jax.ShapeDtypeStruct((8, 20_000), jnp.float32), P("workers"))
        mean = drjax.program(workers=8)(lambda x: drjax.reduce_mean(x, wire=wire))
        with jax.set_mesh(mesh):
            text = jax.jit(mean).lower(x).compile().as_text() or ""
        part = Wire(wire).nbytes(20_000 // 8)
        assert [(m.kind, m.result_bytes) for m in read_hlo(text, dict(mesh.shape))] == [
            ("all-to-all", 8 * part),
            ("all-gather", 8 * -(-part // 1024) * 1024),
        ]
        assert not re.search(r"= \w*(f32|bf16)\S* all-(to-all|gather)\(", text)


# ---------------------------------------------------------------------------------
# A synchronization that inner steps do not wait for

# Without these options the compiler for TPUs makes every all-reduce synchronous.
ASYNCHRONOUS: dict[str, str] = dict.fromkeys(
    (
        "xla_enable_async_all_reduce",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    ),
    "true",
)


def streaming_round(options: dict[str, str]) -> list[Collective]:
    """The exchanges of 8 workers in a round with two fragments and a delay of 5."""
    mesh, size, inner = tpu_mesh({"workers": 8}), 256, optax.adam(1e-3)

    def step(state, batch):
        def loss(params):
            a, b = params
            return jnp.mean((jnp.tanh(batch @ a) @ b - batch) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = inner.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, value

    round_ = diloco.Round(step, 8, fragments=2, delay=5, mixing=0.5)
    params = [jnp.zeros((size, size))] * 2
    first = {"params": params, "opt": inner.init(params)}
    state = jax.eval_shape(round_.init, first)
    batches = jax.ShapeDtypeStruct((8, 20, 128, size), jnp.float32)
    of = lambda tree, *axes: jax.tree.map(lambda x: P(*axes), tree)
    theta, outer = of((state.theta, state.outer))
    layout = diloco.State(theta, outer, of(state.workers, "workers"))
    args = typed(mesh, (state, batches), (layout, P("workers")))
    with jax.set_mesh(mesh):
        text = jax.jit(round_).lower(*args).compile(options).as_text() or ""
    return list(read_hlo(text, dict(mesh.shape)))


class TestDelayedSynchronization:
    """Over the links of a slice; tests/contrib/test_diloco_overlap.py: between them."""

    pytestmark = on_tpus

    def test_overlaps_with_the_inner_steps_until_it_is_received(self):
        sent = streaming_round(ASYNCHRONOUS)
        assert [c.kind for c in sent] == ["all-reduce"] * 2
        for c in sent:
            assert c.times == 1 and [x.trip_count for x in c.hidden_by] == [5]
            # Two products forward, and three backward, of [128, 256] and [256, 256].
            assert c.hidden_flops == 5 * 5 * 2 * 128 * 256 * 256

    def test_is_waited_for_without_the_options(self):
        assert [c.asynchronous for c in streaming_round({})] == [False] * 2


# ---------------------------------------------------------------------------------
# A grid of small programs

MESHES = {
    "no other": {"clients": 4},
    "one other": {"clients": 2, "fsdp": 4},
    "one of size one": {"clients": 4, "fsdp": 1},
    "two others": AXES,
}
DTYPES = ["float32", "bfloat16", "float16"]
REDUCTIONS = {
    "sum": drjax.reduce_sum,
    "mean": drjax.reduce_mean,
    "where": lambda x: drjax.reduce_mean(x, where=jnp.arange(4) != 3),
    "max": drjax.reduce_max,
    "min": drjax.reduce_min,
}
LOOK_UPS = {
    "none": lambda t, k: jnp.sin(t),
    "rows": lambda t, k: t[k],
    "columns": lambda t, k: t[:, k % 8],
    "along": lambda t, k: jnp.take_along_axis(t, jnp.resize(k, (16, 8)), 0),
    "update": lambda t, k: t.at[k].add(1.0),
    "slice": lambda t, k: jax.lax.dynamic_slice(t, (k[0, 0], 0), (4, 8)),
}
DRAW = np.random.RandomState(1)
TABLE, TOKENS = DRAW.randn(4, 16, 8), DRAW.randint(0, 12, (4, 4, 6))


def grid_program(look_up: str, reductions: list[str], gradient: bool):
    """A loss and what it is made of, or its gradient with respect to the tables."""

    @drjax.program(clients=4)
    def reduced(table, tokens):
        result = drjax.map_fn(LOOK_UPS[look_up], (table, tokens))
        return [REDUCTIONS[name](result) for name in reductions]

    def loss(table, tokens):
        return sum(jnp.sum(jnp.float32(y) ** 2) for y in reduced(table, tokens))

    return jax.grad(loss) if gradient else reduced


def grid_specs(mesh) -> tuple[P, P]:
    """Tables over all axes, tokens over the first two."""
    return P(*mesh.axis_names), P(*mesh.axis_names[:2])


@pytest.mark.sampled
@pytest.mark.parametrize(
    "gradient", cases.some([False, True], True, marks=pytest.mark.slow)
)
@cases.checkerboard(3, shape=MESHES, dtype=DTYPES)
def test_all_reductions_of_look_ups(shape, dtype, gradient):
    _assert_equal(shape, dtype, "rows", list(REDUCTIONS), gradient)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("look_up", LOOK_UPS)
@pytest.mark.parametrize("shape", MESHES)
def test_each_reduction_of_each_look_up(shape, look_up, reduction, dtype, gradient):
    _assert_equal(shape, dtype, look_up, [reduction], gradient)


def _assert_equal(shape, dtype, look_up, reductions, gradient):
    mesh, table = make_mesh(MESHES[shape]), jnp.asarray(TABLE, dtype)
    f = grid_program(look_up, reductions, gradient)
    lie = tuple(jax.NamedSharding(mesh, spec) for spec in grid_specs(mesh))
    with jax.set_mesh(mesh):
        result = jax.jit(f, in_shardings=lie)(table, TOKENS)
    tolerance = 1e-5 if dtype == "float32" else 0.04
    wide = lambda x: np.asarray(x, np.float64)
    same = lambda a, b: np.testing.assert_allclose(
        wide(a), wide(b), rtol=tolerance, atol=tolerance * (1 + np.abs(wide(b)).max())
    )
    jax.tree.map(same, result, f(table, TOKENS))


@pytest.mark.parametrize("gradient", [False, True], ids=["value", "gradient"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("look_up", LOOK_UPS)
@pytest.mark.parametrize("shape", MESHES)
class TestGrid:
    pytestmark = on_tpus

    def test_compiles_for_tpus(self, shape, look_up, dtype, gradient):
        mesh = tpu_mesh(MESHES[shape])
        f = grid_program(look_up, list(REDUCTIONS), gradient)
        arrays = jnp.asarray(TABLE, dtype), jnp.asarray(TOKENS)
        with jax.set_mesh(mesh):
            args = typed(mesh, arrays, grid_specs(mesh))
            assert jax.jit(f).lower(*args).compile().as_text()
