"""`MapReduce` under the name of the API pages."""

from drjax.engines.beam.transforms import MapReduce as MapReduce
