"""The core that all engines share; docs/extending/engine.md says how to add one.

    Runner (driver) -- StageCall --> Engine -- Task --> worker -- BlockResult --> totals

The driver runs server stages and loops in its own process. An engine runs the stages of
the groups: either it is a `Pool`, which runs single blocks and is driven by
`pool_scheduler`, or a `FileExchange`, which runs a whole stage over shared files. Read
in this order: `messages`, `job`, `protocols`, `driver`, `pool_scheduler`, `worker`;
then what they use: `executable_plan`, `stage_results` with `combine` (what a reduction
computes is in the table of `_primitives/reduce_ops`), `blocks_of_groups`, `block_size`,
`checkpoint` (what is saved and when) with `checkpoint_files` (the files),
`loop_progress` and `folder_lock`, `options`, `progress`, `extras` (optional
dependencies). For single engines: `file_exchange`, `wire_format`, `subprocess_run`,
`temporary_folders`, `one_round` (Beam), `actor`, `placement`, `resident_slices`,
`process_exit` (Ray),
`client_data`, `secure_sums`, `secure_replies`, `untrusted_replies`, `assignment`,
`claim_queries`, `background` (Flower). What stays between stages and calls:
`worker_slices`, `kept_results`, and `coordinates`, the columns of slices.
"""
