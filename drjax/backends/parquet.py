"""`Parquet`, an argument that is read from files."""

from drjax.engines.slices.parquet import Parquet as Parquet
