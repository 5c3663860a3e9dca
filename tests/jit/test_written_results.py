"""`drjax.jit(out=)`: results of the groups that are written while the program runs.

Covers: drjax._jit.written_results, drjax._primitives.write_groups,
drjax._primitives.chunks_on_host, drjax._pytree_paths.
"""

import threading
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._primitives.write_groups import WRITERS, write_groups_p
from drjax.backends import Groups
from tests.helpers.raising import raises

N = 10


def data_of(n=N):
    return [np.full(3, (i + 1) / n, np.float32) for i in range(n)]


def make_program(n=N):
    @drjax.program(clients=n)
    def program(w, x):
        """Two rounds, each with a result of the groups."""
        y = drjax.map_fn(lambda w, x: jnp.tanh(w * x), (drjax.broadcast(w), x))
        mean = drjax.reduce_mean(y)
        away = drjax.map_fn(jnp.subtract, (y, drjax.broadcast(mean)))
        return mean, {"y": y, "away": away}

    return program


def correct(w, n=N):
    y = np.tanh(w * np.stack(data_of(n)))
    return y.mean(0), {"y": y, "away": y - y.mean(0)}


def targets(n=N):
    return {key: np.full((n, 3), np.nan, np.float32) for key in ("y", "away")}


def assert_close(x, y):
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, x, y)


@pytest.mark.parametrize("k", [None, 1, 4, "auto"])
@pytest.mark.parametrize("inputs", [Groups, np.stack], ids=["Groups", "array"])
def test_results_are_those_of_arrays(k, inputs):
    out = targets()
    run = drjax.jit(make_program(), groups_per_step=k, out={1: out})
    mean, written = run(2.0, inputs(data_of()))
    assert written["y"] is out["y"] and written["away"] is out["away"]
    assert_close((mean, written), correct(2.0))
    run(0.0, inputs(data_of()))  # the same file again
    assert_close(out["y"], np.zeros((N, 3)))


@pytest.mark.parametrize(
    ("types", "axes", "n"),
    [
        ("Auto", {"clients": 4}, 10),
        ("Auto", {"clients": 2, "model": 2}, 10),
        ("Auto", {"clients": 8}, 3),  # some devices have no group
        ("Explicit", {"clients": 4}, 12),
        ("Explicit", {"clients": 2, "model": 2}, 12),
    ],
)
def test_each_device_writes_its_own_groups(types, axes, n):
    kind = getattr(jax.sharding.AxisType, types)
    mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=(kind,) * len(axes))
    with jax.set_mesh(mesh):
        for k in (None, 2):
            out = targets(n)
            run = drjax.jit(make_program(n), groups_per_step=k, out={1: out})
            assert_close(run(2.0, Groups(data_of(n))), correct(2.0, n))


def test_memory_does_not_grow_with_the_number_of_groups():
    sizes = []
    for n in (16, 256):
        run = drjax.jit(make_program(n), groups_per_step=4, out={1: targets(n)})
        memory: Any = run.lower(2.0, Groups(data_of(n))).compile().memory_analysis()
        sizes.append((memory.output_size_in_bytes, memory.temp_size_in_bytes))
    assert sizes[0] == sizes[1]


def test_gradients_and_whole_results_and_leaves_by_paths():
    loss = drjax.program(clients=N)(lambda w, x: drjax.reduce_sum(jnp.tanh(x) * w))
    total = lambda w, x: jnp.sum(loss(w, x))
    x, out = np.stack(data_of()), np.zeros((N, 3), np.float32)
    gradient = jax.grad(total, argnums=1)
    assert drjax.jit(gradient, groups_per_step=3, out=out)(2.0, x) is out
    assert_close(out, gradient(2.0, x))
    path, y = (1, "y"), np.zeros((N, 3), np.float32)
    mean, rest = drjax.jit(make_program(), out={path: y})(2.0, x)
    assert rest["y"] is y and isinstance(rest["away"], jax.Array)
    assert_close((mean, rest), correct(2.0))


def test_files_keys_and_every_dtype(tmp_path):
    for dtype in ("float32", "int8", "bool", "bfloat16", "uint32"):
        x = (np.arange(2 * N).reshape(N, 2) % 2).astype(jnp.dtype(dtype))
        same = drjax.program(clients=N)(lambda x: drjax.map_fn(lambda x: x, x))
        out = np.memmap(tmp_path / dtype, x.dtype, "w+", shape=x.shape)
        drjax.jit(same, groups_per_step=3, out=out)(x)
        np.testing.assert_array_equal(out, x)
    keys = jax.random.split(jax.random.key(0), N)
    out = np.zeros((N, 2), np.uint32)
    drjax.jit(same, groups_per_step=3, out=out)(keys)
    np.testing.assert_array_equal(out, jax.random.key_data(keys))
    with jax.enable_x64(True):
        x = np.arange(2.0 * N).reshape(N, 2) * (1 + 1e-10)
        out = np.zeros_like(x)
        drjax.jit(same, groups_per_step=3, out=out)(x)
        np.testing.assert_array_equal(out, x)


def test_calls_in_threads_write_to_their_own_files_and_compile_once():
    program, files = make_program(), [targets() for _ in range(4)]
    runs: list[Any] = [drjax.jit(program, groups_per_step=2, out={1: f}) for f in files]
    threads = [
        threading.Thread(target=run, args=(jnp.float32(i), Groups(data_of())))
        for i, run in enumerate(runs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, file in enumerate(files):
        assert_close(file, correct(i)[1])
    assert not WRITERS and runs[0]._cache_size() == 1


def test_methods_lowering_and_pickles():
    class Model:
        @drjax.program(clients=N)
        def step(self, x):
            return drjax.map_fn(lambda x: 2 * x, x)

    x, out = np.stack(data_of()), np.zeros((N, 3), np.float32)
    model: Any = Model
    model.run = drjax.jit(Model.step, out=out, static_argnums=0)
    assert model().run(x) is out
    assert_close(out, 2 * x)
    written = drjax.jit(module_program, out=np.zeros_like(x))
    copy = cloudpickle.loads(cloudpickle.dumps(written))
    assert_close(copy(x), 3 * x)
    # The writing is work of the groups, and needs one collective.
    jaxpr = str(drjax.jit(module_program, out=out).trace(x).jaxpr)
    assert write_groups_p.name in jaxpr and "write_groups" in jaxpr


@drjax.program(clients=N)
def module_program(x):
    return drjax.map_fn(lambda x: 3 * x, x)


def test_errors():
    x, out = np.stack(data_of()), np.zeros((N, 3), np.float32)
    run = drjax.jit(module_program, groups_per_step=2, out=out)
    text = "cannot be called inside of jax.jit, jax.grad or jax.vmap"
    raises(drjax.DrjaxValueError, text, jax.jit(run), x)
    raises(drjax.DrjaxValueError, text, jax.vmap(run), x[None])
    text = "what has a shape, a dtype and items to set, such as numpy.lib"
    raises(drjax.DrjaxTypeError, text, drjax.jit, module_program, out="file.npy")
    text = "runs a function several times"
    raises(drjax.DrjaxValueError, text, lambda: drjax.jit(run, "tune", out=out))
    for wrong in (out[1:], out[:, 1:], out.astype(np.float64)):
        text = "the type of the result, float32[10, 3], got float"
        raises(drjax.DrjaxTypeError, text, drjax.jit(module_program, out=wrong), x)
    text = "out= has result 1 of module_program, but in its place there is no 1, only a"
    raises(drjax.DrjaxValueError, text, drjax.jit(module_program, out={1: out}), x)
    text = "something for each of its leaves"
    raises(drjax.DrjaxTypeError, text, drjax.jit(module_program, out=[out]), x)
    twice = {1: targets(), (1, "y"): out}
    text = "got two of which one has a part of the other: 1, 1"
    raises(drjax.DrjaxValueError, text, drjax.jit(make_program(), out=twice), 2.0, x)
    text = "[n, ...], of a partition that the function has, got float32[3]"
    mean = drjax.jit(make_program(), out={0: out[0]})
    raises(drjax.DrjaxTypeError, text, mean, 2.0, x)


class Full:
    """A file on a disk with space for some groups."""

    shape, dtype = (N, 3), np.dtype("float32")

    def __setitem__(self, index, value):
        if index.start >= 4:
            raise OSError("no space left on device")


def test_a_file_that_cannot_be_written():
    text = "The results of groups 4 to 5 cannot be written: OSError: no space"
    run = drjax.jit(module_program, groups_per_step=2, out=Full())
    raises(drjax.DrjaxValueError, text, run, np.stack(data_of()))
    auto = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((4,), ("clients",), axis_types=auto)):
        run = drjax.jit(module_program, groups_per_step=1, out=Full())
        text = "cannot be written: OSError: no space"
        raises(drjax.DrjaxValueError, text, run, np.stack(data_of()))
    assert not WRITERS
