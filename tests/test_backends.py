"""The public names of engines, under `drjax.backends`.

Covers: drjax.backends.
"""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import drjax

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api" / "backends.md").read_text()
NAMES = re.findall(r"^\.\. auto\w+:: ([\w.]+)", PAGE, re.M)
ENGINES = sorted(p.parent.name for p in (ROOT / "drjax/engines").glob("*/adapter.py"))


@pytest.mark.parametrize("name", [x for x in NAMES if not x.endswith("MapReduce")])
def test_names_of_the_api_page(name):
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    assert value.__doc__ and value.__name__ == attribute


@pytest.mark.parametrize("name", drjax.backends._LAZY)
def test_lazy_names(name):
    value = getattr(drjax.backends, name)
    where = importlib.import_module(f"drjax.backends.{drjax.backends._LAZY[name]}")
    assert value is getattr(where, name)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_public_module_has_the_engines_own_function(engine):
    adapter = importlib.import_module(f"drjax.engines.{engine}.adapter")
    assert getattr(drjax.backends, engine).compile is adapter.compile


@pytest.mark.slow
def test_drjax_does_not_import_engines():
    code = "import sys, drjax\n"
    code += "\n".join(f"import drjax.backends.{engine}" for engine in ENGINES)
    code += "\nassert not {'ray', 'apache_beam', 'flwr', 'pyarrow'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
