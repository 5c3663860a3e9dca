"""Backends: each turns a plan into something that runs. None imports another.

reference, xla                on this machine, with JAX alone
in_process, ray, beam, flower engines: `compile` takes the fields of `EngineOptions`
Groups, Parquet               arguments of engines that are made group by group
Kept                          handles of results that stay with their groups (`kept`)
Retry                         how engines try blocks again

Engines are in `drjax/engines`: here are modules with their public names.

What backends share: `_interpret_plan`, the loop over the rounds of a plan;
`_python_loops`, the loops and branches of a plan whose bodies communicate, stepped by
Python; `_all_columns`, functions of one coordinate, for all coordinates at once; and
`_locate_failure`, the user's line at which a stage raises or yields a NaN.
"""

import importlib
from typing import TYPE_CHECKING, Any

# These two need only JAX, so they are imported with drjax.
from drjax.backends import reference as reference
from drjax.backends import xla as xla

if TYPE_CHECKING:
    from drjax.backends import in_process as in_process
    from drjax.backends.engine.options import EngineOptions as EngineOptions
    from drjax.backends.engine.options import Retry as Retry
    from drjax.backends.groups import Groups as Groups
    from drjax.backends.kept import Kept as Kept
    from drjax.backends.parquet import Parquet as Parquet

_LAZY = {  # so that `import drjax` does not pay for engines
    "EngineOptions": "engine.options",
    "Groups": "groups",
    "Kept": "kept",
    "Parquet": "parquet",
    "Retry": "engine.options",
}
_MODULES = ("beam", "flower", "in_process", "ray")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"drjax.backends.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(f"drjax.backends.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
