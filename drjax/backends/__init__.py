"""Backends: each turns a plan into something that runs. None imports another."""

from drjax.backends import reference as reference
from drjax.backends import xla as xla
