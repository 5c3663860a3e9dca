"""The devices of a collective, in all ways in which HLO writes them.

Covers: drjax.compiled.replica_groups.
"""

import pytest

from drjax.compiled.replica_groups import axes_of, devices_of

MESH = {"groups": 4, "model": 2}


@pytest.mark.parametrize(
    "written, axes",
    [
        ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("groups",)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("replica_groups=[4,2]<=[8]", ("model",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ("groups",)),
        ("replica_groups=[1,8]<=[8]", ("groups", "model")),
        ("replica_groups={}", ("groups", "model")),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("replica_groups=mesh['x'=4,'y'=2] {'x'}", ("groups",)),
        (
            "replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'c'}",
            ("groups",),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}",
            ("model",),
        ),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([8]) {'b'}", None),
        ("replica_groups={{0,3},{1,2},{4,7},{5,6}}", None),
        ("replica_groups={{0,1},{2,3},{4,6},{5,7}}", None),
        ("source_target_pairs={{0,2},{2,4},{4,6}}", ("groups",)),
        ("source_target_pairs={{0,0},{1,0}}", ("model",)),
        ("source_target_pairs={{0,1},{1,2},{2,3}}", ("groups", "model")),
    ],
)
def test_axes_along_which_devices_lie_apart(written, axes):
    attributes = f", channel_id=1, {written}, use_global_device_ids=true"
    groups = devices_of(attributes, 8)
    assert axes_of(groups, "pairs" in written, MESH) == axes


@pytest.mark.parametrize(
    "written", ["mesh['x'=8] {'x':(1)4}", "mesh['x'=8], ids {'x'}"]
)
def test_groups_that_are_written_in_an_unknown_way(written):
    with pytest.raises(ValueError, match="This way to write groups is not known"):
        devices_of(f"replica_groups={written}", 8)
