"""What users call: the building blocks, over pytrees.

    program        @drjax.program: the partition in scope
    blocks         broadcast, map_fn, gather, scatter, partition_index, shard
    reductions     reduce_sum, reduce_mean, reduce_weighted_mean
    select         one group's slices as global values
    max_and_min    reduce_max, reduce_min, reduce_argmax, reduce_argmin
    participation  their where=, by=, num= and default=
    column_reductions  reduce_columns
    fold           reduce: an associative fold in the order of the groups
    pure_functions     what the functions given to these two may not do
    moves          take, put, shift: slices between groups
    levels         over=: the levels of a program on which a building block acts
    trace_map      the function given to map_fn, traced for one group
    resolve        arguments of a building block: its partition, its mesh, its leaves
    validate       the checks of arguments, and their messages
    checkify_groups                 the errors of jax.experimental.checkify

Input: pytrees and users' functions. Output: bound primitives, and pytrees of results.
"""
