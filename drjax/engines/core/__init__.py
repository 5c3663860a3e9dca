"""The core that all engines share; docs/extending/engine.md says how to add one.

    Runner (driver) -- StageCall --> Engine -- Task --> worker -- BlockResult --> totals

The driver runs server stages and loops in its own process. An engine runs the stages of
the groups: either it is a `Pool`, which runs single blocks and is driven by
`pool_scheduler`, or it runs a whole stage, as Beam's `FileExchange` does over shared
files. Read in this order: `messages`, `job`, `protocols`, `driver`, `pool_scheduler`,
`worker`; then what they use: `executable_plan`, `stage_results` with `combine` (what a
reduction computes is in the table of `_primitives/reduce_ops`), `number_of_groups`,
`block_size`, `encoded_partials`, `checkpoint` (what is saved and when) with
`checkpoint_files` (the files), `loop_progress` and `folder_lock`, `options`,
`progress`, `wire_format` (messages as bytes, without pickle). The slices of the groups
are in `slices/`, which knows nothing of the core; here `blocks_of_groups` loads those
of a block for a worker, and `kept_results` passes them from call to call.
"""
