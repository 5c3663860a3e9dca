"""What only Beam needs: a stage as a pipeline, over files that workers share.

adapter            `compile`, and the engine
file_exchange      an engine that runs a whole stage over shared files
kept_files         slices that stay in files between stages
transforms         the pipelines, and `MapReduce` for pipelines of users
one_round          a plan of one round, split for `MapReduce`
file_sinks         files by Beam's `FileSystems`
subprocess_run     a pipeline in a process of its own
temporary_folders  folders that are removed also when the process is ended
"""
