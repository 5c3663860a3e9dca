"""The bytes that a device sends in a collective.

Covers: drjax.compiled.sent.
"""

import pytest

import drjax
from drjax.compiled import sent_bytes
from tests.helpers.raising import raises


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("all-reduce", 1500),
        ("reduce-scatter", 750),
        ("all-gather", 750),
        ("all-to-all", 750),
        ("ragged-all-to-all", 750),
        ("collective-permute", 1000),
        ("collective-broadcast", 1000),
        ("send", 1000),
    ],
)
def test_a_device_of_four_sends(kind, sent):
    assert sent_bytes(kind, 1000, 4) == sent
    assert sent_bytes(kind, 1000, 1) == 0


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
@pytest.mark.parametrize("m", range(1, 9))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(size, m):
    parts = sent_bytes("reduce-scatter", size * m, m) + sent_bytes(
        "all-gather", size * m, m
    )
    assert sent_bytes("all-reduce", size * m, m) == parts == 2 * (m - 1) * size


def test_a_fraction_is_rounded_up():
    assert sent_bytes("all-gather", 10, 3) == 7
    assert sent_bytes("all-reduce", 10, 3) == 14


def test_other_kinds_are_refused():
    raises(drjax.DrjaxValueError, "needs a kind of", sent_bytes, "add", 1, 2)
