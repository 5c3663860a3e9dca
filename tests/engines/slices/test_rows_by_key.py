"""Groups that are read many at once: by a function of a slice, and columns of Parquet.

Covers: drjax.engines.slices.groups, drjax.engines.slices.parquet,
drjax.engines.core.blocks_of_groups, drjax.engines.slices.rows_by_key,
drjax.engines.slices.arrow_columns.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

import drjax
from drjax.backends import Groups, Parquet, in_process
from tests.helpers.raising import raises

N = 10
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
Y = np.arange(N, dtype=np.float32)


@drjax.program(clients=N)
def program(w, data):
    y = drjax.map_fn(
        lambda w, d: d["y"] * jnp.sum(w * d["x"]), (drjax.broadcast(w), data)
    )
    return drjax.reduce_mean(y), drjax.reduce_max(data["x"])


W = np.ones(3, np.float32)
WANT = program(W, {"x": X, "y": Y})
RUNS = {
    "drjax.jit": drjax.jit(program, groups_per_step=4),
    "engine": in_process.compile(
        drjax.make_plan(program)(W, {"x": X, "y": Y}), block_size=4
    ),
    "drops": in_process.compile(
        drjax.make_plan(program)(W, {"x": X, "y": Y}), block_size=4, on_error="drop"
    ),
}


def check(run, data):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), run, data)


@pytest.mark.parametrize("run", ["drjax.jit", "engine"])
def test_a_function_reads_a_slice_of_groups(run):
    calls = []

    def read(groups):
        calls.append(groups.stop - groups.start)
        return {"x": X[groups], "y": Y[groups]}

    check(RUNS[run](W, Groups.from_batches(read, N)), WANT)
    first = [1] if run == "drjax.jit" else []  # for the types
    assert sorted(calls) == sorted([*first, 4, 4, 2])


@pytest.mark.parametrize("run", ["drjax.jit", "engine"])
@pytest.mark.parametrize("row_group_size", [3, 4, 100])
def test_columns_become_arrays(run, row_group_size, tmp_path, monkeypatch):
    table = pa.table({"x": list(X), "y": Y})
    path = tmp_path / "groups.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    groups = Parquet(path)
    check(RUNS[run](W, groups), WANT)
    # No row is read alone, but that for the types.
    monkeypatch.setattr(Parquet, "_rows", lambda *_: iter([{"x": X[0], "y": Y[0]}]))
    check(RUNS[run](W, Parquet(path)), WANT)
    rows, seen = groups.cursor(5), []
    assert rows is not None
    for count in (1, 3, 1):
        seen.append(rows.take(count)["y"])
    np.testing.assert_array_equal(np.concatenate(seen), Y[5:])


def test_a_group_that_cannot_be_read_is_found():
    def read(groups):
        if groups.start <= 6 < groups.stop:
            raise OSError("disk")
        return {"x": X[groups], "y": Y[groups]}

    groups = Groups.from_batches(read, N)
    for run in ("drjax.jit", "engine"):
        text = "loading group 6 raised OSError: disk"
        raises(drjax.DrjaxError, text, RUNS[run], W, groups)
    RUNS["drops"](W, groups)
    assert [*RUNS["drops"].report.dropped] == [6]


def test_rows_that_differ_are_read_one_by_one(tmp_path):
    table = pa.table({"x": [*X[:9], X[9][:1]], "y": Y})
    pyarrow.parquet.write_table(table, tmp_path / "groups.parquet")
    run = RUNS["drops"]
    run(W, Parquet(tmp_path / "groups.parquet"))
    assert [*run.report.dropped] == [9]


@pytest.mark.parametrize("run", ["drjax.jit", "engine"])
def test_wrong_numbers_of_groups_are_refused(run):
    read = lambda groups: {"x": X[groups], "y": Y[groups]}
    for n in (N - 1, N + 1):
        with pytest.raises(drjax.DrjaxError):
            RUNS[run](W, Groups.from_batches(read, n))
    short = lambda groups: {"x": X[groups][:2], "y": Y[groups][:2]}
    check(RUNS[run](W, Groups.from_batches(short, N)), WANT)  # one by one
    raises(drjax.DrjaxTypeError, "a function of a slice", Groups.from_batches, X, N)


# -------------------------------------------------------------------------------------
# Rows by key


TABLE = {
    "client": ["c", "a", "b", "a", "c", "a", "d", "e", "f", "g", "h", "i", "j"],
    "x": list(np.arange(39, dtype=np.float32).reshape(13, 3)),
    "y": np.arange(13, dtype=np.float32),
}


def padded(columns, length=3):
    """The sum of a client's rows."""
    assert len(columns["y"]) <= length
    return {"x": np.stack(columns["x"]).sum(0), "y": columns["y"].sum()}


@pytest.mark.parametrize(
    "table", [dict, pa.table, pd.DataFrame], ids=["dict", "arrow", "pandas"]
)
@pytest.mark.parametrize("run", ["drjax.jit", "engine"])
def test_rows_of_equal_keys_are_groups(run, table):
    groups = Groups.by_key(table(TABLE), "client", padded)
    items: Any = groups.items
    assert items.keys == [*"abcdefghij"]
    names = np.array(TABLE["client"])
    rows = [np.flatnonzero(names == key) for key in "abcdefghij"]
    x = np.stack([np.stack(TABLE["x"])[i].sum(0) for i in rows])
    y = np.stack([TABLE["y"][i].sum() for i in rows])
    check(RUNS[run](W, groups), program(W, {"x": x, "y": y}))


def test_errors_and_reports_name_the_key():
    def columns(rows):
        y = rows["y"].sum()
        return {"x": rows["x"][0] * (np.nan if y == 2 else 1), "y": y}

    groups = Groups.by_key(TABLE, "client", columns)
    plan = drjax.make_plan(program)(W, {"x": X, "y": Y})
    drops = in_process.compile(plan, on_error="drop", check_nans=True)
    drops(W, groups)
    assert "client 'b': it yields NaN" in drops.report.dropped[1]
    run = in_process.compile(plan, check_nans=True)
    raises(drjax.EngineError, "client 'b': it yields NaN", run, W, groups)
    text = "Group 1 (client 'b'): loading group 1 raised ValueError"

    def fails(rows):
        if 2 in rows["y"]:
            raise ValueError("no data")
        return columns(rows)

    groups = Groups.by_key(TABLE, "client", fails)
    raises(drjax.DrjaxError, text, RUNS["drjax.jit"], W, groups)


def test_tables_without_keys_are_refused():
    raises(drjax.DrjaxValueError, "one column 'id'", Groups.by_key, TABLE, "id")
    table = {"client": ["a", None], "x": [1.0, 2.0]}
    raises(drjax.DrjaxValueError, "1 rows have no", Groups.by_key, table, "client")
    raises(drjax.DrjaxTypeError, "needs an Arrow table", Groups.by_key, 1, "client")
