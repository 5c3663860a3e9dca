"""Minimal programs of what compilers refuse, where hand-written code needs more for it.

    python -m benchmarks.refused                 # of the compiler for CPUs
    python -m benchmarks.refused --tpu v5e:2x4   # of the one for TPUs

Each is a reason why a count of `benchmarks.combinations`, `benchmarks.residuals` or
`benchmarks.chosen` is not that of a shorter program. For maxima the best hand-written
code pays, too; where the bits of numbers are moved, it does without. Of 8 devices of
the CPU; `tests/project/test_combination_benchmarks.py` fails when one is not refused
any more.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks import residuals
from benchmarks.counts import mesh_of
from benchmarks.descent import descend
from benchmarks.report import table

_DEVICES, _NUMBERS, _STEPS = 8, 20_000, 4


def largest_of_devices(values: np.ndarray) -> float:
    """`lax.pmax` of one float a device, of which some may be NaN."""
    mesh = jax.make_mesh((_DEVICES,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    largest = jax.shard_map(
        lambda x: lax.pmax(x[0], "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
    )
    return float(jax.jit(largest)(jnp.asarray(values, jnp.float32)))


def temporary_bytes(as_integers: bool) -> int:
    """Those of two sorts of floats, of which the second may take their bits.

    A compiler that gave the memory of floats to their bits needed none: the first sort
    could write where the second one, and the result, are.
    """

    def sort_twice(x: jax.Array) -> jax.Array:
        y = jnp.sort(x)
        return jnp.sort(lax.bitcast_convert_type(y, jnp.int32) if as_integers else -y)

    return _temporary(sort_twice, jax.ShapeDtypeStruct((_NUMBERS,), jnp.float32))


def bytes_of_choice(by_sum: bool) -> int:
    """Temporary ones of a product with one of two slices, or with zeros.

    These are chosen by a sum over the axis of two, or the two are added.
    """

    def product(chosen: jax.Array, slices: jax.Array, y: jax.Array) -> jax.Array:
        if by_sum:
            return jnp.sum(jnp.where(chosen[:, None], slices, 0), 0) * y
        first, second = (jnp.where(chosen[i], slices[i], 0) for i in range(2))
        return (first + second) * y

    of = lambda *shape: jax.ShapeDtypeStruct((*shape, _NUMBERS), jnp.float32)
    return _temporary(product, jax.ShapeDtypeStruct((2,), bool), of(2), of())


def bytes_of_branches(groups_first: bool) -> int:
    """Temporary ones of a gradient of local steps of 8 groups, in a branch.

    Its residuals leave the branch step by step, as they are computed, or group by
    group. Without branches both need the same.
    """
    params = {k: jax.ShapeDtypeStruct((64, 64), jnp.float32) for k in ("in", "out")}
    data = jax.ShapeDtypeStruct((_STEPS, 16, 64), jnp.float32)
    trees: list[Any] = []

    def linearized(params: Any, data: jax.Array) -> Any:
        new, pull_back = jax.vjp(descend, params, data)
        leaves, tree = jax.tree.flatten(pull_back)
        trees.append(tree)
        return new, leaves

    _, types = jax.eval_shape(linearized, params, data)
    axes = [int(not groups_first and x.shape[:1] == (_STEPS,)) for x in types]

    def gradient(flag: jax.Array, params: Any, data: jax.Array) -> Any:
        forward = lambda x: jax.vmap(linearized, (None, 0), (0, axes))(params, x)
        zeros = jax.eval_shape(forward, data)
        skipped = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros)
        new, residuals = lax.cond(flag, forward, skipped, data)
        one = lambda leaves, ct: trees[0].unflatten(leaves)(ct)[0]
        backward = jax.vmap(one, (axes, 0))
        return lax.cond(flag, backward, lambda _, ct: ct, residuals, new)

    groups = jax.ShapeDtypeStruct((8, *data.shape), data.dtype)
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    return _temporary(gradient, flag, params, groups)


def bytes_of_levels(with_axis: bool) -> int:
    """Temporary ones of a gradient on `[pods, groups, d]`, on 2 x 4 devices.

    A device computes with its `[1, 4, d]`, or with the `[4, d]` in it.
    """
    names = ("pods", "groups")
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, _DEVICES // 2), names, axis_types=auto)

    def away_from_mean(x: jax.Array) -> jax.Array:
        x = x if with_axis else x[0]
        mean = lax.psum(x.sum(-2, keepdims=True), "groups")
        return lax.psum(jnp.tanh(x - mean).sum(range(x.ndim - 1)), names)

    of_devices = jax.shard_map(
        away_from_mean, mesh=mesh, in_specs=P(*names), out_specs=P()
    )
    x = jax.ShapeDtypeStruct((2, 16, _NUMBERS), jnp.float32)
    return _temporary(jax.grad(lambda x: jnp.sum(of_devices(x) ** 2)), x)


def _temporary(fn: Callable, *args: Any) -> int:
    compiled: Any = jax.jit(fn).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def refused() -> list[list[str]]:
    """What each program asks for, what it gets, and what that costs."""
    values = np.arange(_DEVICES, dtype=np.float32)
    values[_DEVICES // 2] = math.nan
    return [
        [
            "`lax.pmax` of 7 numbers and a NaN",
            f"{np.max(values)}",
            f"{largest_of_devices(values)}",
            "maxima are sent as integers: 10 operations for each number of the result",
        ],
        [
            f"bits of {_NUMBERS:,} floats in the memory of these",
            f"{temporary_bytes(False):,} bytes",
            f"{temporary_bytes(True):,} bytes",
            "one more array, where a maximum, or a take of groups, is what the program "
            "returns",
        ],
        [
            "a sum over an axis of two in the loop that multiplies it",
            f"{bytes_of_choice(False):,} bytes",
            f"{bytes_of_choice(True):,} bytes",
            "one more slice, where the server computes with a batch of chosen groups",
        ],
        [
            "results of a conditional in the order in which they are computed",
            f"{bytes_of_branches(False):,} bytes",
            f"{bytes_of_branches(True):,} bytes",
            "one more copy of a round's residuals, where rounds are in branches",
        ],
        [
            "a result `[1, 4, d]` in the memory of a `[4, d]`",
            f"{bytes_of_levels(True):,} bytes",
            f"{bytes_of_levels(False):,} bytes",
            "one more array `[d]`, in gradients of programs on two levels",
        ],
    ]


def on_tpu(topology: str, fn: Callable) -> tuple[float, int]:
    """Operations, and temporary bytes, of a function of a device's 4 groups.

    The chips need not be there.
    """
    mesh = mesh_of("groups", _DEVICES, topology)
    of_devices = jax.shard_map(
        fn, mesh=mesh, in_specs=P("groups"), out_specs=P("groups")
    )
    sharding = jax.NamedSharding(mesh, P("groups"))
    shape = 4 * _DEVICES, _NUMBERS
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    compiled: Any = jax.jit(of_devices).lower(x).compile()
    operations = compiled.cost_analysis().get("flops", 0.0)
    return operations, compiled.memory_analysis().temp_size_in_bytes


def bytes_of_sums(topology: str, by_group: bool, width: int = 2048) -> int:
    """Temporary ones of a gradient through two rounds, in which states are linear.

    Cotangents of the model are added group by group, as each group has its own copy, or
    those of all groups first. It is the program of `benchmarks.residuals`.
    """

    def all_at_once(params: Any, state: Any, x: jax.Array) -> Any:
        if not by_group:
            return jax.vmap(work, (None, 0, 0))(params, state, x)
        every = lambda w: jnp.broadcast_to(w, (x.shape[0], *w.shape))
        return jax.vmap(work)(jax.tree.map(every, params), state, x)

    def local(params: Any, state: Any, x: jax.Array) -> Any:
        new, state = all_at_once(params, state, x)
        return jax.tree.map(lambda w: w.sum(0), new), state

    work = residuals.momentum_of_rounds
    mesh = mesh_of("clients", _DEVICES, topology)
    run = jax.jit(residuals.scanned(residuals.written(local, 8 * _DEVICES), 2))
    with jax.set_mesh(mesh):
        types = residuals.types(mesh, 8 * _DEVICES, True, width)
        compiled: Any = run.lower(*types).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def slice_of(largest: bool) -> Callable[[jax.Array], jax.Array]:
    """Read one of 4 slices, whose index is one of 4 numbers, or the largest of them."""

    def read(x: jax.Array) -> jax.Array:
        numbers = lax.optimization_barrier(jnp.arange(4) - lax.axis_index("groups"))
        index = numbers.max() if largest else numbers[0]
        return lax.dynamic_index_in_dim(x, index.clip(0, 3), keepdims=False)

    return read


def codes(as_bytes: bool) -> Callable[[jax.Array], jax.Array]:
    """Round numbers to int8, and read them as bytes."""
    rounded = lambda x: jnp.round(x).astype(jnp.int8)
    if not as_bytes:
        return rounded
    return lambda x: lax.bitcast_convert_type(rounded(x), jnp.uint8)


def refused_on_tpu(topology: str) -> list[list[str]]:
    """As `refused`, by the compiler for TPUs."""
    count = lambda fn: f"{on_tpu(topology, fn)[0]:,.0f} operations"
    nbytes = lambda fn: f"{on_tpu(topology, fn)[1]:,} bytes"
    return [
        [
            "the largest of 4 integers, in a register",
            nbytes(slice_of(largest=False)),
            nbytes(slice_of(largest=True)),
            "`select`, and an int8 sum of few numbers, have scratch space",
        ],
        [
            "cotangents of a model, added group by group",
            f"{bytes_of_sums(topology, False):,} bytes",
            f"{bytes_of_sums(topology, True):,} bytes",
            "states of the groups are there once more, where all run at once in a scan "
            "over rounds, and enter the next round linearly",
        ],
        [
            f"the bytes of {4 * _NUMBERS:,} int8 numbers",
            count(codes(False)),
            count(codes(True)),
            "an int8 sum has an operation more for each number",
        ],
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="of these chips: v5e:2x4")
    topology = parser.parse_args().tpu
    jax.config.update("jax_num_cpu_devices", _DEVICES)
    what = f"{_DEVICES} TPU chips" if topology else f"{_DEVICES} devices of the CPU"
    columns = ["asked for", "expected", "compiled", "so that"]
    print(f"JAX {jax.__version__}, {what}.\n")
    print(table(columns, refused_on_tpu(topology) if topology else refused()))


if __name__ == "__main__":
    main()
