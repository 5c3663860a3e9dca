"""Groups whose data cannot be loaded or does not fit, and groups that never end."""

import numpy as np
import pytest

import drjax
from drjax.backends.engine import local
from drjax.backends.engine.groups import Groups
from tests.conformance import rows_for, survivors, weighted_plan
from tests.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

N, BAD = 8, 3


class Data:
    """Rows read by index, one of which is another, or raises."""

    def __init__(self, bad):
        self.bad, (self.x, self.w) = bad, rows_for(N)

    def __len__(self):
        return N

    def __getitem__(self, i):
        if i != BAD:
            return self.x[i], self.w[i]
        if isinstance(self.bad, Exception):
            raise self.bad
        return self.bad(self.x[i]), self.w[i]


WRONG = {
    "a string": (lambda x: "abc", r"its data\[0\] is 'abc', which is no array: "),
    "an array of strings": (
        lambda x: np.array("abc"),
        r"data\[0\] is <U3\[\], but the",
    ),
    "an object": (lambda x: np.array(None), r"its data\[0\] is object\[\], but the"),
    "float64": (
        lambda x: np.float64(x),
        r"is float64\[\], but the plan is for float32\[\]: convert it to float32",
    ),
    "int64": (lambda x: np.int64(x), r"is int64\[\], but .*: convert it to float32"),
    "a loader": (OSError("no disk"), "loading group 3 raised OSError: no disk"),
}


@pytest.mark.parametrize("how", ["raise", "drop"])
@pytest.mark.parametrize("what", WRONG)
def test_a_group_whose_data_is_wrong(what, how):
    bad, text = WRONG[what]
    run = local.compile(weighted_plan(N), block_size=2, on_error=how)
    if how == "raise":
        with pytest.raises(drjax.EngineError, match=text) as error:
            run(np.float32(2), Groups(Data(bad)))
        assert (error.value.round, error.value.group) == ("1", BAD)
        assert "Group 3 failed in round 1 of step, in first" in str(error.value)
    else:
        survivors(run(np.float32(2), Groups(Data(bad))), np.arange(N) != BAD)
        assert [*run.report.dropped] == [BAD]


@pytest.mark.parametrize("how", ["raise", "drop"])
def test_an_iterator_ends_where_it_raises(how):
    data = Data(OSError("no disk"))
    run = local.compile(weighted_plan(N), block_size=2, on_error=how)
    text = (
        "Group 3 failed in round 1 of step, in first.*: loading group 3 raised OSError: "
        "no disk; groups 4 to 7 cannot be read either, as an iterator ends where it "
        "raises: give Groups a sequence"
    )
    with pytest.raises(drjax.EngineError, match=text) as error:
        run(np.float32(2), Groups(lambda: (data[i] for i in range(N))))
    assert (error.value.round, error.value.group) == ("1", BAD)


def test_a_sequence_of_another_length():
    run = local.compile(weighted_plan(N + 1))
    text = "The plan is for 9 groups, got 8"
    raises(drjax.DrjaxError, text, run, np.float32(2), Groups(Data(np.copy)))
