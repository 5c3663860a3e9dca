"""Layers with explicit collectives inside a group, on a mesh (groups, X, Y).

    python -m experiments.collectives        # compile each for TPUs

The layers are those of "How to Scale Your Model" (Austin et al. 2025), chapter 10, and
of JAX's tutorial on `shard_map`: matrix products that overlap with their communication
(collective matmuls: Wang et al. 2023, ASPLOS, "Overlap communication with
dependent computation via decomposition"), FSDP, tensor and pipeline parallelism, and a
mixture of experts. Each is the body of a mapped function; the groups share its weights.
In the comments B, D and F are batch, width and hidden width, and F_Y is divided over Y.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import drjax
from benchmarks import report
from drjax.compiled import read_hlo
from drjax.compiled.hlo import Module
from experiments import counts, machine
from experiments.config import Machine
from experiments.variants import GROUPS

X, Y = "X", "Y"
Weights = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: by devices, and as one program.

    Attributes:
      parts: What a device computes of its share: `(weights, x) -> y`.
      whole: The same for whole arrays, on one device.
      shapes: Of the weights, given Y's size, B, D and F.
      weights: How the weights lie on X and Y.
      x: How the input lies there.
      y: How the output does.
      collectives: Counts of the kinds of collectives over Y, given Y's size.
    """

    parts: Callable[[Weights, Array], Array]
    whole: Callable[[Weights, Array], Array]
    shapes: Callable[[int, int, int], dict[str, tuple[int, ...]]]
    weights: dict[str, P]
    x: P
    y: P
    collectives: Callable[[int], Counter[str]]


def shifted(x: Array, by: int) -> Array:
    """What the device `by` places before in Y has."""
    n = lax.axis_size(Y)
    return lax.ppermute(x, Y, [(i, (i + by) % n) for i in range(n)])


def _block(x: Array, i: Array | int, axis: int) -> Array:
    """The i-th of as many blocks as Y has devices."""
    n = lax.axis_size(Y)
    size = x.shape[axis] // n
    return lax.dynamic_slice_in_dim(x, (i % n) * size, size, axis)


# ---------------------------------------------------------------------------------
# Products of matrices


def gathered(x: Array, w: Array) -> Array:
    """x [B_X, D_Y], w [D, F_Y] -> [B_X, F_Y], all of x gathered first."""
    return lax.all_gather(x, Y, axis=1, tiled=True) @ w


def while_gathering(x: Array, w: Array) -> Array:
    """The same: blocks of x go round while others are multiplied."""
    i, n = lax.axis_index(Y), lax.axis_size(Y)
    out = x @ _block(w, i, 0)
    for k in range(1, n):
        x = shifted(x, -1)
        out += x @ _block(w, i + k, 0)
    return out


def while_gathering_both_ways(x: Array, w: Array) -> Array:
    """The same in half as many steps: blocks go round in both directions."""
    i, n = lax.axis_index(Y), lax.axis_size(Y)
    out, later, earlier = x @ _block(w, i, 0), x, x
    for k in range(1, n // 2 + 1):
        later = shifted(later, -1)
        out += later @ _block(w, i + k, 0)
        if 2 * k < n:
            earlier = shifted(earlier, 1)
            out += earlier @ _block(w, i - k, 0)
    return out


def scattered(h: Array, w: Array) -> Array:
    """h [B_X, F_Y], w [F_Y, D] -> [B_X, D_Y], summed at the end."""
    return lax.psum_scatter(h @ w, Y, scatter_dimension=1, tiled=True)


def while_scattering(h: Array, w: Array, way: int = 1) -> Array:
    """The same: sums go round, and each device adds its product to them."""
    i, n = lax.axis_index(Y), lax.axis_size(Y)
    total = h @ _block(w, i - way, 1)
    for k in range(2, n + 1):
        total = shifted(total, way) + h @ _block(w, i - way * k, 1)
    return total


def while_scattering_both_ways(h: Array, w: Array) -> Array:
    """The same with half of the sums going round in each direction."""
    n = lax.axis_size(Y)
    halves = w.reshape(w.shape[0], n, 2, -1)
    one, other = (halves[:, :, i].reshape(w.shape[0], -1) for i in range(2))
    return jnp.concatenate(
        [while_scattering(h, one, 1), while_scattering(h, other, -1)], axis=1
    )


def while_reducing(h: Array, w: Array) -> Array:
    """h [B_X, F_Y], w [F_Y, D] -> [B_X, D]: each block is reduced as it is made."""
    blocks = [lax.psum(h @ _block(w, j, 1), Y) for j in range(lax.axis_size(Y))]
    return jnp.concatenate(blocks, axis=1)


# ---------------------------------------------------------------------------------
# Perceptrons


def fsdp(weights: Weights, x: Array) -> Array:
    """x [B_XY, D]: a device gathers each matrix, W_in [D_Y, F], W_out [F_Y, D]."""
    w_in, w_out = (
        lax.all_gather(weights[name], Y, axis=0, tiled=True) for name in ("in", "out")
    )
    return jax.nn.gelu(x @ w_in) @ w_out


def tensor_parallel(weights: Weights, x: Array) -> Array:
    """x [B_X, D], W_in [D, F_Y], W_out [F_Y, D]: one sum over Y."""
    return lax.psum(jax.nn.gelu(x @ weights["in"]) @ weights["out"], Y)


def block(weights: Weights, x: Array) -> Array:
    """In · W_in · W_out end to end: x [B_X, D_Y] -> [B_X, D_Y]."""
    h = jax.nn.gelu(while_gathering(x, weights["in"]))
    return while_scattering(h, weights["out"])


def block_both_ways(weights: Weights, x: Array) -> Array:
    """The same, in both directions."""
    h = jax.nn.gelu(while_gathering_both_ways(x, weights["in"]))
    return while_scattering_both_ways(h, weights["out"])


MICROBATCHES = 4


def pipeline(weights: Weights, x: Array) -> Array:
    """x [B_X, D]; a stage of the perceptron [D, D] on each device of Y.

    The batch goes through in microbatches, as in GPipe (Huang et al. 2019).
    """
    i, n = lax.axis_index(Y), lax.axis_size(Y)
    waiting = x.reshape(MICROBATCHES, -1, x.shape[1])
    state, done = lax.pcast(jnp.zeros_like(waiting[0]), Y, to="varying"), []
    for t in range(MICROBATCHES + n - 1):
        if t:
            state = shifted(state, 1)
        if t < MICROBATCHES:
            state = jnp.where(i == 0, waiting[t], state)
        state = jnp.tanh(state @ weights["stages"][0])
        if t >= n - 1:
            done.append(state)
    out = jnp.concatenate(done)
    return lax.psum(jnp.where(i == n - 1, out, 0), Y)


def whole_pipeline(weights: Weights, x: Array) -> Array:
    for stage in weights["stages"]:
        x = jnp.tanh(x @ stage)
    return x


def experts(weights: Weights, x: Array) -> Array:
    """x [B_XY, D]; experts [E_Y, D, D]; each token goes to its best expert and back.

    Top-1 routing (Fedus et al. 2021, arXiv 2101.03961, section 2.1), with room for all
    tokens at one expert, so that none is dropped.
    """
    gates = jax.nn.softmax(x @ weights["router"])
    chosen = jax.nn.one_hot(gates.argmax(1), gates.shape[1])  # [tokens, experts]
    place = jnp.cumsum(chosen, axis=0) * chosen - 1  # -1: not there
    dispatch = jax.nn.one_hot(place.astype(int), len(x))  # [tokens, experts, places]
    sent = jnp.einsum("tep,td->epd", dispatch, x)
    received = lax.all_to_all(sent, Y, split_axis=0, concat_axis=1, tiled=True)
    worked = jnp.tanh(jnp.einsum("epd,edf->epf", received, weights["experts"]))
    back = lax.all_to_all(worked, Y, split_axis=1, concat_axis=0, tiled=True)
    return jnp.einsum("tep,te,epd->td", dispatch, gates * chosen, back)


def whole_experts(weights: Weights, x: Array) -> Array:
    gates = jax.nn.softmax(x @ weights["router"])
    each = jnp.tanh(jnp.einsum("td,edf->tef", x, weights["experts"]))
    chosen = jax.nn.one_hot(gates.argmax(1), gates.shape[1])
    return jnp.einsum("te,tef->tf", gates * chosen, each)


# ---------------------------------------------------------------------------------
# All of them


def _product(parts: Callable, kind: str, columns: bool, count: Callable) -> Layer:
    """A product of matrices whose weights lie divided by columns or by rows."""
    return Layer(
        lambda weights, x: parts(x, weights["w"]),
        lambda weights, x: x @ weights["w"],
        lambda y, d, f: {"w": (d, f)},
        {"w": P(None, Y) if columns else P(Y, None)},
        P(X, Y),
        P(X, None) if kind == "all-reduce" else P(X, Y),
        lambda n: Counter({kind: count(n)}),
    )


def _whole_perceptron(weights: Weights, x: Array) -> Array:
    return jax.nn.gelu(x @ weights["in"]) @ weights["out"]


def _perceptron(parts: Callable, weights: tuple[P, P], x: P, count: Any) -> Layer:
    shapes = lambda y, d, f: {"in": (d, f), "out": (f, d)}
    specs: dict[str, P] = {"in": weights[0], "out": weights[1]}
    return Layer(parts, _whole_perceptron, shapes, specs, x, x, count)


_PERMUTE = "collective-permute"
_ring = lambda n: n - 1
_both = lambda n: 2 * (n - 1)
_BY_UNITS = P(None, Y), P(Y, None)
LAYERS: dict[str, Layer] = {
    "all-gather, then product": _product(gathered, "all-gather", True, lambda n: 1),
    "all-gather matmul": _product(while_gathering, _PERMUTE, True, _ring),
    "all-gather matmul, both ways": _product(
        while_gathering_both_ways, _PERMUTE, True, _ring
    ),
    "product, then reduce-scatter": _product(
        scattered, "reduce-scatter", False, lambda n: 1
    ),
    "reduce-scatter matmul": _product(while_scattering, _PERMUTE, False, _ring),
    "reduce-scatter matmul, both ways": _product(
        while_scattering_both_ways, _PERMUTE, False, _both
    ),
    "all-reduce matmul": _product(while_reducing, "all-reduce", False, lambda n: n),
    "In W_in W_out": _perceptron(
        block, _BY_UNITS, P(X, Y), lambda n: Counter({_PERMUTE: 2 * (n - 1)})
    ),
    "In W_in W_out, both ways": _perceptron(
        block_both_ways, _BY_UNITS, P(X, Y), lambda n: Counter({_PERMUTE: 3 * (n - 1)})
    ),
    "FSDP": _perceptron(
        fsdp, (P(Y, None), P(Y, None)), P((X, Y), None),
        lambda n: Counter({"all-gather": 2}),
    ),
    "tensor parallel": _perceptron(
        tensor_parallel, _BY_UNITS, P(X, None), lambda n: Counter({"all-reduce": 1})
    ),
    "pipeline": Layer(
        pipeline, whole_pipeline, lambda y, d, f: {"stages": (y, d, d)},
        {"stages": P(Y)}, P(X, None), P(X, None),
        lambda n: Counter({_PERMUTE: MICROBATCHES + n - 2, "all-reduce": 1}),
    ),
    "mixture of experts": Layer(
        experts, whole_experts,
        lambda y, d, f: {"router": (d, 2 * y), "experts": (2 * y, d, d)},
        {"router": P(), "experts": P(Y)}, P((X, Y), None), P((X, Y), None),
        lambda n: Counter({"all-to-all": 2}),
    ),
}  # fmt: skip


def program(layer: Layer, n: int, by_devices: bool) -> Callable[[Weights, Array], Any]:
    """The mean over n groups of a number of the layer's output: `(weights, xs)`.

    Args:
      layer: The layer.
      n: The number of groups; `xs` is `[n, B, D]`, the weights are global.
      by_devices: Whether the layer is the one with explicit collectives.
    """

    def work(weights: Weights, x: Array) -> Array:
        whole = layer.whole
        if by_devices:
            specs = (layer.weights, layer.x)
            whole = jax.shard_map(layer.parts, in_specs=specs, out_specs=layer.y)
        return jnp.sum(jnp.sin(whole(weights, x)))

    @drjax.program(placements={GROUPS: n})
    def mean(weights: Weights, xs: Array) -> Array:
        outputs = drjax.map_fn(work, (drjax.broadcast(weights), xs))
        return drjax.reduce_mean(outputs)

    return mean


def outputs(layer: Layer, n: int) -> Callable[[Weights, Array], Array]:
    """The layer's output in each group, with nothing summed: `(weights, xs)`."""
    specs = (layer.weights, layer.x)

    @drjax.program(placements={GROUPS: n})
    def each(weights: Weights, xs: Array) -> Array:
        work = jax.shard_map(layer.parts, in_specs=specs, out_specs=layer.y)
        return drjax.map_fn(work, (drjax.broadcast(weights), xs))

    return each


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Compile each layer for TPUs, and count its collectives."""

    topology: str = "v5e:4x4"
    """The chips; four of them are Y, two are the groups, and the others X."""
    batch: int = 4096
    """B, in each group."""
    width: int = 2048
    """D."""
    hidden: int = 8192
    """F."""
    out: Path = Path("runs/experiments")
    """Folder of the table."""


def compiled(layer: Layer, sizes: Sizes, mesh: Mesh) -> str:
    """The HLO text of the layer in bfloat16."""

    def typed(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    shapes = layer.shapes(mesh.shape[Y], sizes.width, sizes.hidden)
    weights = {
        name: typed(shape, layer.weights[name]) for name, shape in shapes.items()
    }
    n = mesh.shape[GROUPS]
    xs = typed((n, sizes.batch, sizes.width), P(GROUPS, *layer.x))
    with jax.set_mesh(mesh):
        program = jax.jit(outputs(layer, n)).lower(weights, xs).compile()
    return program.as_text() or ""


def row(name: str, text: str, mesh: Mesh) -> list[str]:
    """A line of the table."""
    sent = counts.count_collectives(read_hlo(text, dict(mesh.shape)))
    kinds, size = Counter(), 0
    for record in sent:
        kinds[record["kind"]] += record["in the program"]
        size += record["bytes sent in a round"]
    module = Module(text)
    count, overlapped = counts.overlaps(module, _PERMUTE)
    shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return [name, f"{counts.flops(module):.4g}", shown, f"{size / 1e6:.4g}",
            f"{overlapped} of {count}" if count else ""]  # fmt: skip


def main(sizes: Sizes) -> None:
    """Writes the table."""
    devices = machine.devices(Machine(platform="tpu", topology=sizes.topology))
    mesh = Mesh(devices.reshape(2, -1, 4), (GROUPS, X, Y))
    titles = [
        "layer",
        "flops",
        "collectives",
        "MB sent by a device",
        "permutes overlapped with products",
    ]
    rows = []
    for name, layer in tqdm(LAYERS.items()):
        rows.append(row(name, compiled(layer, sizes, mesh), mesh))
    text = report.table(titles, rows)
    sizes.out.mkdir(parents=True, exist_ok=True)
    (sizes.out / "collectives.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(tyro.cli(Sizes))
