"""Engines: what runs plans in workers of its own. Public names are in `backends/`.

core     what all engines share: the driver, the scheduler of a pool, workers
slices   partitioned values, wherever their slices are
in_process, ray, beam, flower
         what one engine alone needs, each with its `compile` in `adapter`

A folder of one engine can be deleted, with its tests, and its module in `backends/`:
nothing else imports from it. docs/extending/engine.md says how to add one.
"""
