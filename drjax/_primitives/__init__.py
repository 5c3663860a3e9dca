"""The primitives, one file for each family, with all of its rules and its lowering.

Reading order, from the ground up:

registration        constructs a primitive and registers its rules
dispatch_cache      lets equal jaxprs share one executable
lowered_equations   what lowering rules know of earlier equations, to merge them
partial_reduction   a reduction over two levels of groups as one collective
wire_codes          numbers as bytes of few bits, and back
between_slices      collectives that the devices inside a TPU slice divide
device_sums         sums over devices: whole, divided or encoded
shards_in_lanes     all numbers of a tree as one array, of shards that devices keep
in_two_legs         an exchange of two collectives, with work of the groups behind each
collectives         broadcast, reduce_sum, reduce_mean, gather, scatter
moves               take, put_add, permute: slices between groups
partition_index     the group index
rbg_per_group       random bits of a group that do not depend on other groups
ordered_callbacks   ordered callbacks in the work of a group
contract_groups     sums over the groups inside the map that computes the summands
map_fn              the work of the groups, one jaxpr for each group
map_columns         work on one coordinate of all groups, for reduce_columns
fold_groups         associative folds in the order of the groups, for reduce
extrema             reduce_max, reduce_min
chunks_on_host      what the two below share: the host is called for chunks of groups
read_groups         data of groups that the host reads while the program runs
write_groups        results of groups that the host takes while it runs
select_slice        one group's slice, a sum to which the others add zeros
reduce_ops          the table of reductions that planner and backends read

On a mesh, what they have in common is in the file of the first that needs it:

    map_fn         the work of the groups: by shard_map or vmap, with rbg_per_group and
                   ordered_callbacks
    map_columns    the work of one coordinate, after an all-to-all, or by a gather
    fold_groups    the trees of the devices' states, after an all-gather
    broadcast, map_fn, reduce_sum   merged, by lowered_equations and contract_groups
"""
