"""Benchmarks: drjax beside hand-written code, plain JAX and Google's drjax.

`python -m benchmarks.run` prints two tables and whether the goals are met.
"""
