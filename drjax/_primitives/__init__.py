"""The primitives, each with all of its rules, and what the rules share.

Reading order, from the ground up:

registration      constructs a primitive and registers its rules
dispatch_cache    lets equal jaxprs share one executable
lowered_equations what lowering rules know of earlier equations, to merge them
partial_reduction a reduction over two levels of groups as one collective
collectives       broadcast, reduce_sum, reduce_mean, gather, scatter
moves             take, put_add, permute: slices between groups
edge_coloring     which slices each ppermute of a permutation moves
partition_index   the group index
map_fn            the work of the groups, one jaxpr for each group
map_columns       work on one coordinate of all groups, for reduce_columns
fold_groups       associative folds in the order of the groups, for reduce
extrema           reduce_max, reduce_min
select_slice      one group's slice, a sum to which the others add zeros
reduce_ops        the table of reductions that planner and backends read

A `map_fn` equation runs on a mesh as follows:

    map_fn (shard_map or vmap) -> rbg_per_group (random bits)
    map_columns (all-to-all)
    reduce_fold, fold_tree -> fold_lowering (all-gather of the devices' states)
    broadcast, map_fn, reduce_sum -> lowered_equations, contract_groups (merged)
"""
