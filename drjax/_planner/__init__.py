"""From the jaxpr of a program to its plan.

make_plan
  inline                   the jaxpr, flat: no jit, no custom derivatives
  implicit_communication   equations that act across groups, as building blocks
  partitioning/            which values are global, which partitioned
  unbatching/              the equation of one group for a batched one
  rounds                   in which round each equation runs
  rematerialize            what a later round computes again
  group_index              where the group's index is needed
  build_stages             the stages of rounds, as jaxprs of their own
"""
