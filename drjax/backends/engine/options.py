"""`EngineOptions`, the options of `compile` of every engine; `Retry` is of one."""

from drjax.engines.core.options import EngineOptions as EngineOptions
from drjax.engines.core.retries import Retry as Retry
