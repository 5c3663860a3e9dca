"""The Ray backend: the public names of `drjax.engines.ray`."""

from drjax.engines.ray.adapter import Actors as Actors
from drjax.engines.ray.adapter import compile as compile
