"""Parquet files with columns of all types: what is read, and what is left alone.

Covers: drjax.engines.slices.parquet.
"""

# pyright: reportMissingImports=false

import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import Parquet, in_process

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),  # of pyarrow and datasets
]
pa = pytest.importorskip("pyarrow")
N = 4
X = np.arange(N * 6, dtype=np.float32).reshape(N, 6)
CUBE = X.reshape(N, 2, 3)


@pytest.fixture
def mean_of(tmp_path):
    """The mean of the groups' arrays in a table, as a plan reads it from a file."""

    def mean_of(table, columns=None, shape=(6,)):
        import pyarrow.parquet

        path = tmp_path / "clients.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=3)
        mean = drjax.program(clients=N)(drjax.reduce_mean)
        plan = drjax.make_plan(mean)(jnp.zeros((N, *shape)))
        return in_process.compile(plan)(Parquet(path, columns=columns))

    return mean_of


def lists(x=X):
    return pa.array(x.tolist(), pa.list_(pa.float32()))


WORDS = pa.array(["a", "b", "a", "c"]).dictionary_encode()
TIMES = pa.array([1, 2, 3, 4], pa.timestamp("us", "UTC"))
IGNORED = {
    "category": WORDS,
    "list of categories": pa.ListArray.from_arrays(list(range(N + 1)), WORDS),
    "struct": pa.array([{"a": 1, "b": "x"}] * N),
    "map": pa.array([[("a", 1)]] * N, pa.map_(pa.string(), pa.int32())),
    "time": TIMES,
    "text": pa.array(["x"] * N),
    "bytes": pa.array([b"x"] * N),
    "nothing": pa.nulls(N),
    "decimal": pa.array([1, 2, 3, 4], pa.decimal128(5, 2)),
    "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(CUBE),
}


@pytest.mark.parametrize("name", IGNORED)
def test_columns_that_are_not_read_do_no_harm(name, mean_of):
    table = pa.table({"x": lists(), "other": IGNORED[name]})
    np.testing.assert_allclose(mean_of(table, lambda row: row["x"]), X.mean(0))


def test_categories_are_decoded(mean_of):
    numbers = pa.array([1.0, 2.0, 1.0, 3.0], pa.float32()).dictionary_encode()
    table = pa.table({"x": numbers, "word": WORDS})
    assert mean_of(table, lambda row: row["x"], ()) == 1.75
    code = {"a": 0.0, "b": 1.0, "c": 2.0}
    by_word = lambda row: np.float32(code[str(row["word"])])
    assert mean_of(table, by_word, ()) == 0.75
    flat = pa.array(np.arange(N * 2) % 3, pa.int32()).dictionary_encode()
    nested = pa.ListArray.from_arrays([0, 2, 4, 6, 8], flat)
    of_lists = lambda row: row["x"].astype(np.float32)
    result = mean_of(pa.table({"x": nested, "y": numbers}), of_lists, (2,))
    np.testing.assert_allclose(result, (np.arange(8) % 3).reshape(4, 2).mean(0))


def test_tensors_keep_their_shape(mean_of):
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(CUBE)
    result = mean_of(pa.table({"x": tensor}), shape=(2, 3))
    np.testing.assert_allclose(result, CUBE.mean(0))
    flat = pa.FixedShapeTensorArray.from_numpy_ndarray(X)
    np.testing.assert_allclose(mean_of(pa.table({"x": flat})), X.mean(0))


def test_permuted_tensors_are_refused(mean_of):
    kind = pa.fixed_shape_tensor(pa.float32(), [2, 3], permutation=[1, 0])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 6)
    table = pa.table({"x": pa.ExtensionArray.from_storage(kind, storage)})
    with pytest.raises(drjax.EngineError, match="a tensor column with permuted dimens"):
        mean_of(table, shape=(2, 3))


def test_arrays_of_hugging_face(mean_of):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"x": datasets.Array2D((2, 3), "float32")})
    table = datasets.Dataset.from_dict({"x": CUBE}, features).data.table
    np.testing.assert_allclose(mean_of(table, shape=(2, 3)), CUBE.mean(0))


def test_a_row_is_like_a_dict(mean_of):
    table = pa.table({"x": lists(), "w": pa.array([1.0] * N, pa.float32())})
    functions = [
        lambda row: {**row}["x"],
        lambda row: dict(row)["x"],
        lambda row: row.pop("x"),
        lambda row: (row | {"y": 1})["x"],
        lambda row: ({"y": 1} | row)["x"],
        lambda row: row.copy()["x"],
        lambda row: row.get("z", row["x"]) if "x" in row and len(row) == 2 else None,
        lambda row: [value for name, value in row.items() if name != "w"][0],
    ]

    def own(row):
        row["y"] = row["x"] * row["w"]
        del row["x"]
        return row["y"]

    for fn in (*functions, own):
        np.testing.assert_allclose(mean_of(table, fn), X.mean(0))


def test_a_row_as_the_pytree(mean_of, tmp_path):
    import pyarrow.parquet

    path = tmp_path / "two.parquet"
    table = pa.table({"x": lists(), "w": pa.array([1.0] * N, pa.float32())})
    pyarrow.parquet.write_table(table, path)
    mean = drjax.program(clients=N)(drjax.reduce_mean)
    plan = drjax.make_plan(mean)({"x": jnp.zeros((N, 6)), "w": jnp.zeros(N)})
    for columns in (None, lambda row: row, lambda row: dict(row)):
        result = in_process.compile(plan)(Parquet(path, columns=columns))
        np.testing.assert_allclose(result["x"], X.mean(0))
