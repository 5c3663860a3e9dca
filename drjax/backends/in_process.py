"""The engine of this process: the public name of `drjax.engines.in_process`."""

from drjax.engines.in_process.adapter import compile as compile
