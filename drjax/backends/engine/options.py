"""`EngineOptions`, the options of `compile` of every engine."""

from drjax.engines.core.options import EngineOptions as EngineOptions
