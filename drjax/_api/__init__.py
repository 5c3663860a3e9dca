"""What users call: the building blocks, over pytrees.

    program        @drjax.program: the partition in scope
    blocks         broadcast, map_fn, gather, scatter, partition_index, shard
    reductions     reduce_sum, reduce_mean, ..., select
    trace_map      the function given to map_fn, traced for one group
    resolve        arguments of a block: its partition, its mesh, its leaves
    validate       what is refused, and the messages
    checkify_groups                 the errors of jax.experimental.checkify

Pytrees and users' functions go in; primitives are bound.
"""
