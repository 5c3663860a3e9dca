"""The primitives, each with all of its rules, and what the rules share.

collectives       broadcast, reduce_sum, reduce_mean, gather, scatter
extrema           reduce_max, reduce_min
partition_index   the index of the group
map_fn            the work of the groups; map_lowering runs it on a mesh
registration      how a primitive is made and its rules are registered
"""
