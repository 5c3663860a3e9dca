"""Paths and URLs: of plan files, of groups, and of what is no place for files.

Covers: drjax._storage, drjax.engines.slices.parquet,
drjax.engines.slices.arrow_columns.
"""

import pickle
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import drjax
from drjax import _storage
from drjax.__main__ import main
from drjax.backends import in_process
from drjax.backends.parquet import Parquet
from drjax.engines.slices import arrow_columns
from tests.helpers.full_disk import files_of_at_most
from tests.helpers.plan_files import sgd_plan
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/below"


def put(url, data):
    system, name = fsspec.core.url_to_fs(url)
    system.pipe_file(name, data)


class Remote:
    """A path of another package, as those of etils or universal_pathlib."""

    def __init__(self, url):
        self.url = url

    def __fspath__(self):
        return self.url

    __str__ = __fspath__


@pytest.mark.parametrize(
    "path, result",
    [
        ("run/x", Path("run/x")),
        (Path("run/x"), Path("run/x")),
        (b"run/x", Path("run/x")),
        ("C:/x", Path("C:/x")),
        ("a::b", Path("a::b")),
        ("file:///tmp/x", Path("/tmp/x")),
        ("gs://bucket/x", "gs://bucket/x"),
        ("simplecache::s3://bucket/x", "simplecache::s3://bucket/x"),
        (Remote("gs://bucket/x"), "gs://bucket/x"),
    ],
)
def test_paths_and_urls(path, result):
    assert _storage.locate(path) == result


def test_a_folder_may_be_named_as_a_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gs:").mkdir()
    assert _storage.locate(Path("gs:/x")) == Path("gs:/x")


def test_plan_files_at_urls(url, capsys):
    plan = sgd_plan()
    plan.save(f"{url}/plan.drjax")
    loaded = drjax.load_plan(f"{url}/plan.drjax")
    assert str(loaded) == str(plan)
    assert str(drjax.load_plan(Remote(f"{url}/plan.drjax"))) == str(plan)
    assert main(["inspect", f"{url}/plan.drjax"]) == 0
    assert str(plan) in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=f"{url}/none.drjax"):
        drjax.load_plan(f"{url}/none.drjax")
    put(f"{url}/cut.drjax", b"PK")
    text = f"The plan file {url}/cut.drjax is not a zip, or was cut off"
    raises(drjax.PlanFileError, text, drjax.load_plan, f"{url}/cut.drjax")


class Broken(fsspec.AbstractFileSystem):
    """A file system that is not there, with an error of its own."""

    protocol = "broken"

    def _fail(self, *_, **__):
        raise RuntimeError("no credentials")

    cat_file = pipe_file = open = glob = isfile = _fail


fsspec.register_implementation("broken", Broken)


@pytest.mark.parametrize(
    "path, text",
    [
        ("nosuch://x/y", "Protocol not known: nosuch"),
        ("", "got an empty text"),
        (7, "a path or a URL is needed, got int"),
        (Path("s3://bucket/plan"), "give it as a text, 's3://bucket/plan'"),
    ],
)
def test_what_is_no_place_for_a_file(path, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = sgd_plan()
    raises(drjax.PlanFileError, text, drjax.load_plan, path)
    raises(drjax.PlanFileError, text, plan.save, path)
    raises(drjax.DrjaxValueError, text, Parquet, path)
    assert not [*tmp_path.iterdir()]


def test_errors_of_file_systems_name_the_url():
    text = "broken://x/y: RuntimeError: no credentials"
    with pytest.raises(OSError, match=text):
        drjax.load_plan("broken://x/y")
    raises(drjax.PlanFileError, text, sgd_plan().save, "broken://x/y")
    raises(drjax.DrjaxValueError, text, Parquet, "broken://x/y")
    run = in_process.compile(sgd_plan(), checkpoint="broken://x/y")
    args = np.ones(3, np.float32), np.ones((8, 5, 3), np.float32)
    raises(drjax.EngineError, text, run, *args)


def test_what_to_install_for_urls(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    text = "pip install fsspec gcsfs (gs://) or s3fs (s3://)"
    plan = sgd_plan()
    raises(drjax.PlanFileError, text, drjax.load_plan, "gs://bucket/plan.drjax")
    raises(drjax.PlanFileError, text, plan.save, "gs://bucket/plan.drjax")


def test_a_plan_file_is_written_whole_or_not_at_all(tmp_path):
    path, plan = tmp_path / "plan.drjax", sgd_plan()
    path.write_text("what was there before")
    path.chmod(0o600)
    with files_of_at_most(100):
        text = raises(drjax.PlanFileError, "File too large", plan.save, path)
    assert f"The plan file {path} cannot be written" in text
    assert "What was there before is unchanged" in text
    assert path.read_text() == "what was there before"
    assert [*tmp_path.iterdir()] == [path]
    link = tmp_path / "link.drjax"
    link.symlink_to(path)
    plan.save(link)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert str(drjax.load_plan(path)) == str(plan)
    text = "is not a regular file"
    raises(drjax.PlanFileError, text, plan.save, tmp_path)
    raises(drjax.PlanFileError, "cannot be written", plan.save, path / "below")


def test_two_writers_of_one_file(tmp_path):
    folder = _storage.LocalFolder(tmp_path)

    def chunks():
        yield b"first "
        folder.write("x", [b"of another writer"])
        assert folder.read("x") == b"of another writer"
        yield b"second"

    folder.write("x", chunks())
    assert folder.read("x") == b"first second"
    assert folder.names() == ["x"]


def test_groups_from_parquet_files_at_urls(url):
    n = 20
    x = np.arange(n, dtype=np.float32)
    system, name = fsspec.core.url_to_fs(url)
    system.makedirs(name)
    for part in range(2):
        table = pa.table({"x": x[part * 10 : part * 10 + 10]})
        path = f"{name}/groups-{part}.parquet"
        pq.write_table(table, path, row_group_size=4, filesystem=system)
    groups = Parquet(f"{url}/groups-*.parquet")
    assert groups.bounds() == [0, 4, 8, 10, 14, 18, 20]
    program = drjax.program(clients=n)(lambda x: (drjax.reduce_sum(x), x))
    plan = drjax.make_plan(program)(jax.ShapeDtypeStruct((n,), np.float32))
    for source in (groups, pickle.loads(pickle.dumps(groups))):
        run = in_process.compile(plan, block_size=8, checkpoint=f"{url}/run")
        total, slices = run(source)
        assert total == x.sum()
        np.testing.assert_array_equal(slices, x)
    identity = groups.identity()
    assert "/below/groups-1.parquet', " in identity
    raises(drjax.DrjaxValueError, "There is no file", Parquet, f"{url}/none-*.parquet")
    put(f"{url}/no.parquet", b"no")
    text = "/below/no.parquet is no Parquet file"
    raises(drjax.DrjaxValueError, text, Parquet, f"{url}/no.parquet")


@pytest.mark.parametrize("bad", [[[1], [2, 3]], [None, [2, 3]], [[1]]])
def test_one_bad_row_of_a_parquet_file(bad, tmp_path):
    good = [[1, 2], [3, 4]]
    column = pa.array([good, bad, good], pa.list_(pa.list_(pa.float32())))
    pq.write_table(pa.table({"x": column}), tmp_path / "x.parquet")
    program = drjax.program(clients=3)(drjax.reduce_sum)
    plan = drjax.make_plan(program)(jax.ShapeDtypeStruct((3, 2, 2), np.float32))
    run = in_process.compile(plan, on_error="drop")
    total = run(Parquet(tmp_path / "x.parquet"))
    np.testing.assert_array_equal(total, 2 * np.array(good))
    assert [*run.report.dropped] == [1]


@pytest.mark.parametrize("tensors", [True, False])
def test_a_part_of_a_column_of_lists_of_one_size(tensors):
    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    words = pa.array(x.astype(np.int32).ravel() % 5).dictionary_encode()
    column: Any = pa.FixedSizeListArray.from_arrays(words, 6)
    if tensors:
        column = pa.FixedShapeTensorArray.from_numpy_ndarray(x)
    cells = arrow_columns.cells(arrow_columns.plain(column.slice(1, 2)))
    expected = x[1:3] if tensors else x[1:3].reshape(2, 6) % 5
    np.testing.assert_array_equal(cells, expected)
