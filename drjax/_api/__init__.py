"""What users call: the building blocks, over pytrees.

    program        @drjax.program: the partition in scope
    blocks         broadcast, map_fn, gather, scatter, partition_index, shard
    reductions     reduce_sum, reduce_mean, ..., select
    trace_map      the function given to map_fn, traced for one group
    resolve        arguments of a block: its partition, its mesh, its leaves
    validate       the checks of arguments, and their messages
    checkify_groups                 the errors of jax.experimental.checkify

Input: pytrees and users' functions. Output: bound primitives, and pytrees of results.
"""
