"""Benchmarks: drjax, hand-written code, plain JAX and Google's drjax.

`python -m benchmarks.run` measures the building blocks and `python -m benchmarks.plans`
`drjax.jit`; each prints tables and whether the goals are met.
"""
