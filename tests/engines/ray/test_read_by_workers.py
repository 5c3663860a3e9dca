"""Data that workers read themselves.

Covers: drjax.engines.ray.read_by_workers.
"""

import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import drjax
from drjax.backends import Groups, Parquet
from drjax.engines.core.blocks_of_groups import blocks_of_groups
from drjax.engines.ray.read_by_workers import Unread, UnreadPart, read, readable
from drjax.engines.slices.groups import flat_slices
from drjax.engines.slices.slices import HostSlices

N = 10


@pytest.fixture
def inputs(tmp_path):
    """Leaves "w" and "x" of Parquet files, of which the second has a bad group."""
    for part in range(2):
        x = [[float(i), 1.0] for i in range(5 * part, 5 * part + 5)]
        if part:
            x[2] = [7.0]  # group 7
        schema = pyarrow.schema(
            {"w": pyarrow.float32(), "x": pyarrow.list_(pyarrow.float32())}
        )
        w = np.arange(5 * part, 5 * part + 5, dtype=np.float32)
        table = pyarrow.table({"w": w, "x": x}, schema)
        pyarrow.parquet.write_table(table, tmp_path / f"{part}.parquet")

    @drjax.program(clients=N)
    def total(data):
        return drjax.reduce_sum(data)

    shapes = {"w": np.zeros(N, np.float32), "x": np.zeros((N, 2), np.float32)}
    plan = drjax.make_plan(total)(shapes)
    lazy = flat_slices(plan, (Parquet(tmp_path / "*.parquet"),), {})
    others = flat_slices(plan, (Groups([shapes] * N),), {})
    assert all(map(readable, lazy)) and not any(map(readable, others))
    assert not readable(HostSlices(None, shapes["w"]))
    return lazy


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_blocks_are_as_where_the_driver_reads(inputs, size):
    alive, own = np.arange(N) != 4, np.arange(N) * 2
    unread = [Unread(inputs[1], 1), HostSlices(None, own), Unread(inputs[0], 0)]
    sent = blocks_of_groups(unread, alive, size)
    remote = pickle.loads(pickle.dumps(inputs))
    expected = blocks_of_groups([inputs[1], inputs[0]], alive, size)
    for (block, none), (right, failed) in zip(sent, expected, strict=True):
        assert not none and isinstance(block.slices[0], UnreadPart)
        # As after a half of the block was lost, and in any case without what it masks.
        halves = [block, *block.halves()] if block.valid.sum() > 1 else [block]
        for part in halves:
            loaded, reasons = read(part, remote)
            chosen = np.isin(right.groups, part.groups)
            np.testing.assert_array_equal(loaded.groups, part.groups)
            np.testing.assert_array_equal(loaded.valid, right.valid[chosen])
            assert reasons == {g: w for g, w in failed.items() if g in part.groups}
            if not loaded.valid.any():
                continue  # it does not run
            x, host, w = loaded.slices
            np.testing.assert_array_equal(host, own[part.groups])
            for mine, theirs in ((x, right.slices[0]), (w, right.slices[1])):
                np.testing.assert_array_equal(
                    mine[loaded.valid], theirs[chosen][loaded.valid]
                )


def test_all_of_it_is_read_where_it_is_needed(inputs):
    whole = Unread(inputs[0], 0).whole()
    np.testing.assert_array_equal(whole[:7], np.arange(7))
