"""The Beam backend: the public names of `drjax.engines.beam`."""

from typing import Any

from drjax._extras import needed
from drjax.engines.beam.adapter import compile as compile


def __getattr__(name: str) -> Any:
    # Imported late: it is a subclass of Beam's `PTransform`, and needs Beam.
    if name == "MapReduce":
        needed("apache_beam", "beam", "drjax.backends.beam")
        from drjax.engines.beam.transforms import MapReduce

        return MapReduce
    raise AttributeError(name)
