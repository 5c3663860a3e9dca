"""The primitives, each with all of its rules, and what the rules share.

Reading order, from the ground up:

registration      constructs a primitive and registers its rules
dispatch_cache    lets equal jaxprs share one executable
fused_lowering    lowering rules that merge broadcasts and sums into maps
collectives       broadcast, reduce_sum, reduce_mean, gather, scatter
partition_index   the group index
map_fn            the work of the groups, one jaxpr for each group
extrema           reduce_max, reduce_min
reduce_ops        the table of reductions that planner and backends read

A `map_fn` equation runs on a mesh as follows:

    map_fn -> map_lowering (shard_map or vmap) -> rbg_per_group (random bits)
    broadcast, map_fn, reduce_sum -> fused_lowering -> contract_groups
"""
