"""Replies of clients in the protocol of secure sums, validated: no engine needed.

Covers: drjax.engines.flower.secure_replies.
"""

import io
from types import SimpleNamespace

import numpy as np
import pytest

from drjax.engines.flower import secure_replies
from drjax.engines.flower.untrusted_replies import BadReply

STAGE, FIELD = "collect_masked_vectors_stage", "masked_params"


def saved(x, version=(1, 0)):
    """A `.npy` file of an array."""
    file = io.BytesIO()
    np.lib.format.write_array(file, x, version)
    return file.getvalue()


FACTOR, VECTOR = saved(np.array([1])), saved(np.arange(3))


@pytest.fixture
def checked(monkeypatch):
    """Validate the reply with these two arrays, where the plan is for three numbers."""
    key = SimpleNamespace(MASKED_PARAMETERS=FIELD)
    names = SimpleNamespace(Key=key, RECORD_KEY_CONFIGS="configs")
    monkeypatch.setattr(secure_replies, "constants", lambda: names)

    def check(*arrays):
        reply = SimpleNamespace(content={"configs": {FIELD: [*arrays]}})
        return secure_replies.fields_of(reply, STAGE, {1, 2, 3}, 3)

    return check


def test_masked_values_that_fit(checked):
    assert checked(FACTOR, VECTOR) == {FIELD: [FACTOR, VECTOR]}


@pytest.mark.parametrize(
    "vector",
    [
        saved(np.zeros(3)),  # as many bytes, of other types, shapes or versions
        saved(np.zeros((3, 1), int)),
        saved(np.arange(3), (2, 0)),
        saved(np.arange(3).astype(">i8")),
        b"0" * len(VECTOR),
        VECTOR[8:] + VECTOR[:8],
        bytearray(VECTOR),
        3,
    ],
)
def test_masked_values_with_another_header(vector, checked):
    with pytest.raises(BadReply, match="is no array of 3 integers"):
        checked(FACTOR, vector)


@pytest.mark.parametrize("vector", [VECTOR[:-1], VECTOR + b"0"])
def test_masked_values_with_other_sizes(vector, checked):
    with pytest.raises(BadReply, match=f"masked value has {len(vector)} bytes"):
        checked(FACTOR, vector)
