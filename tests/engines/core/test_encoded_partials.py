"""Sums with `wire=` on engines: workers encode what they send to the driver.

Covers: drjax.engines.core.encoded_partials.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._primitives.wire_codes import decode, encode
from drjax.backends import in_process
from drjax.engines.core.encoded_partials import EncodedPartial, decoded, encode_partials
from drjax.engines.core.job import Job
from drjax.engines.core.messages import Block
from drjax.engines.core.stage_results import StageResults
from drjax.plan import Reduce, Value, Wire
from tests.helpers.cases import checkerboard

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

# The largest error of a code, relative to its block.
ERRORS = {
    "bfloat16": 1 / 256,
    "int8": 1 / 254,
    "float8_e4m3fn": 1 / 28,
    "float4_e2m1fn": 1 / 6,
}
N, BLOCK = 6, 2
X = np.sin(np.arange(N * 70.0)).astype(np.float32).reshape(N, 7, 10)


@drjax.program(clients=N)
def step(x, w, wire):
    y = drjax.map_fn(lambda x: x + 1, x)
    return (
        drjax.reduce_sum(y, wire=wire),
        drjax.reduce_mean(y),
        drjax.reduce_mean({"a": y, "b": y[:, 0]}, wire=wire),
        drjax.reduce_weighted_mean(y, w, wire=wire),
        drjax.reduce_max(y),
    )


def plan_of(wire, x: Any = X):
    w = np.ones(N, np.float32)
    return drjax.make_plan(lambda x, w: step(x, w, wire))(x, w), (x, w)


def reduce_of(shape, wire, secure=0):
    nbytes = 4 * int(np.prod(shape))
    source = Value("x", shape, "float32", (drjax.Partition("clients", N),), nbytes)
    result = Value("y", shape, "float32", (), nbytes)
    return Reduce("sum", source, result, wire, False, secure)


@checkerboard(7, wire=ERRORS, dtype=["float32", "bfloat16"])
def test_results_are_within_the_bound(wire, dtype, monkeypatch):
    received = []
    add = StageResults.add
    spy = lambda self, block, result, alive: (
        received.append(result.partials) or add(self, block, result, alive)
    )
    monkeypatch.setattr(StageResults, "add", spy)
    plan, args = plan_of(wire, jnp.asarray(X, dtype))
    with in_process.compile(plan, block_size=BLOCK) as run:
        total, mean, means, weighted, largest = run(*args)
    exact = np.asarray(args[0], np.float64) + 1
    last = 2.0 ** (-23 if dtype == "float32" else -8)  # of the dtype of the results
    # Each of three blocks is encoded once, of sums below 4.
    bound = ERRORS[wire] * 3 * 4 + last * 12
    wide = lambda x: np.asarray(x, np.float64)
    assert 0 < np.abs(wide(total) - exact.sum(0)).max() <= bound
    for value in means["a"], weighted:
        assert np.abs(wide(value) - exact.mean(0)).max() <= bound / N + last * 2
    assert np.abs(wide(means["b"]) - exact[:, 0].mean(0)).max() <= bound / N + last * 2
    assert np.abs(wide(mean) - exact.mean(0)).max() <= last * 2  # not encoded
    assert np.abs(wide(largest) - exact.max(0)).max() <= last * 2
    for partials in received:
        for reduce, x in zip(plan.rounds[0].partials, partials, strict=True):
            assert isinstance(x, EncodedPartial) == (reduce.wire is not None)
            if isinstance(x, EncodedPartial):
                assert x.codes.nbytes == reduce.nbytes  # that of the ledger
    assert len(received) == N / BLOCK


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 257)])
@pytest.mark.parametrize("wire", [*ERRORS, ("int8", 2)])
def test_any_shape(wire, shape):
    wire = Wire(wire) if isinstance(wire, str) else Wire(*wire)
    x = np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape)
    (encoded,) = encode_partials([reduce_of(shape, wire)], [x])
    y = decoded(encoded)
    assert y.shape == shape and y.dtype == np.float32
    assert encoded.codes.nbytes == wire.nbytes(x.size)
    np.testing.assert_allclose(y, x, atol=ERRORS[wire.dtype] * 1.001)


def test_secure_sums_are_not_encoded():
    (x,) = encode_partials([reduce_of((3,), Wire("int8"), 2)], [np.ones(3)])
    assert isinstance(x, np.ndarray)


def test_nans_and_infinities_stay_visible():
    for bad in np.nan, np.inf, -np.inf:
        x = np.array([1, bad, 3, 3], np.float32)
        (encoded,) = encode_partials([reduce_of((4,), Wire("int8", 2))], [x])
        np.testing.assert_array_equal(decoded(encoded), [np.nan, np.nan, 3, 3])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_group_with_a_nan_is_found(bad):
    """An infinity too, which the encoding would make NaNs of a whole block."""
    plan, (x, w) = plan_of("int8")
    x = x.copy()
    x[3, 0, 0] = bad
    with in_process.compile(plan, block_size=BLOCK, check_nans=True) as run:
        with pytest.raises(drjax.EngineError, match="Group 3.* it yields NaN"):
            run(x, w)
    options = {"block_size": BLOCK, "check_nans": True, "on_error": "drop"}
    with in_process.compile(plan, **options) as run:
        total, *_ = run(x, w)
    assert np.isfinite(np.asarray(total)).all()


def test_numbers_above_float32_are_found():
    with jax.enable_x64(True):
        x = np.full((N, 3), 1e39)
        mean = drjax.program(clients=N)(lambda x: drjax.reduce_mean(x, wire="int8"))
        plan = drjax.make_plan(mean)(x)
        with in_process.compile(plan, check_nans=True) as run:
            with pytest.raises(drjax.EngineError, match="it yields NaN"):
                run(x)
        with in_process.compile(plan, check_nans=True) as run:
            np.testing.assert_allclose(run(x / 1e9), 1e30, rtol=1e-6)


@pytest.mark.parametrize("wire", [Wire("int8", 2), Wire("float4_e2m1fn", 4)])
def test_codes_are_those_of_devices(wire):
    """NumPy encodes on the host, JAX on devices; the last bit of a scale may differ."""
    x = np.random.RandomState(0).randn(64).astype(np.float32)
    x[8:12] = 0, 1e-38, -6, 2.5
    (encoded,) = encode_partials([reduce_of(x.shape, wire)], [x])
    codes = encoded.codes
    on_devices = np.asarray(jax.jit(encode, static_argnums=1)(x, wire))
    assert codes.dtype == on_devices.dtype and codes.shape == on_devices.shape
    y = decode(codes, wire)
    assert y.dtype == np.float32 and np.abs(y - x).max() < 0.6
    for other in (
        jax.jit(decode, static_argnums=1)(codes, wire),
        decode(on_devices, wire),
    ):
        np.testing.assert_allclose(other, y, rtol=1e-6)


def test_workers_that_combine_do_not_encode():
    mean = drjax.program(clients=N)(lambda x: drjax.reduce_mean(x, wire="int8"))
    file = in_process.compile(drjax.make_plan(mean)(X)).file
    job = Job(file, 0, "round 1", ("mean",), BLOCK, False, False, [])
    block = Block(np.arange(2, dtype=np.int32), np.array([True] * 2), [X[:2]])
    for encodes in True, False:
        (partial,) = job.run(block, {}, encode=encodes).partials
        assert isinstance(partial, EncodedPartial) == encodes


def test_a_secure_sum_takes_no_wire():
    fn = lambda x: drjax.reduce_sum(x, secure=True, wire="int8")
    with pytest.raises(drjax.DrjaxValueError, match="no wire= with secure=True"):
        drjax.program(clients=N)(fn)(X)
