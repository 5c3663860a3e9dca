"""Names that are imported by their first use, and names that moved.

Covers: drjax._lazy_names.
"""

from typing import Any

import pytest

import drjax
from tests.helpers.run_python import run

FIRST_USES = """
import sys
import drjax
loaded = {name.removeprefix("drjax.") for name in sys.modules if "drjax." in name}
late = "_planner", "_plan_file", "_drawing", "_jit", "backends", "compiled", "plan"
assert not [name for name in loaded if name.startswith(late)]
assert drjax.make_plan is drjax.make_plan
assert drjax.plan.Plan and drjax.backends.xla
assert {"check", "jit", "plan", "map_fn"} < {*dir(drjax)}
"""


def test_plans_and_backends_are_imported_by_their_first_use():
    run("-c", FIRST_USES)


def test_old_name_works_and_names_the_new_one():
    package: Any = drjax
    with pytest.warns(DeprecationWarning, match="use drjax.contrib.export_federated"):
        old = package.export_federated_language
    assert old is drjax.contrib.export_federated_language


def test_unknown_name_is_an_error_that_suggests_one():
    package: Any = drjax
    with pytest.raises(AttributeError, match="no attribute 'map_fun'") as error:
        _ = package.map_fun
    # Of these, Python suggests a name that is close.
    assert (error.value.name, error.value.obj) == ("map_fun", drjax)
