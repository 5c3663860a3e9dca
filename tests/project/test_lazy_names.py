"""Names that moved work, and say where they are.

Covers: drjax._deprecated.
"""

from typing import Any

import pytest

import drjax


def test_old_name_works_and_names_the_new_one():
    package: Any = drjax
    with pytest.warns(DeprecationWarning, match="use drjax.contrib.export_federated"):
        old = package.export_federated_language
    assert old is drjax.contrib.export_federated_language


def test_unknown_name_is_an_error():
    package: Any = drjax
    with pytest.raises(AttributeError, match="no attribute 'map_fun'") as error:
        _ = package.map_fun
    assert error.value.obj is drjax  # so Python suggests `map_fn`
