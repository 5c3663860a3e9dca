"""`Runner`, what `compile` of an engine returns."""

from drjax.engines.core.driver import Runner as Runner
