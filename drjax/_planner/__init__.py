"""From the jaxpr of a program to its plan.

The passes, in the order in which `make_plan` runs them:

  inline                   inline calls, remove dead equations (liveness)
  gathered_columns         functions of one coordinate, as gathers and loops
  rotations                jnp.roll and its transpose, as one equation
  partitioning/            partitioning inference: global or partitioned, a fixed point
  unbatching/              the per-group equation of a batched one
  explicit_communication   building blocks in place of what implies them:
    implicit_communication reductions over the group axis,
    scan_over_groups       scans that are maps, and
    read_and_update_groups reads and updates of some groups, by their index;
    bind_blocks            the primitives that all three bind
  rematerialize_loops      rematerialize residuals of loops, unless
    bitwise_observable     they are bitwise-observable
  rounds                   the round of each equation, as few as possible
  build_stages             split into stages, as jaxprs of their own, with
    stage_values           the values that stages exchange,
    naming                 their names,
    rematerialize_rounds   the equations of each local stage, rematerialized ones too,
    trace_stages           their jaxprs, and
    group_index            the group index as an argument
  inner_plans              the plans of programs in the work of a group
  open_groups            a plan for any number of groups: traced with a symbol for it

`check` prints what partitioning inference concludes; `arguments` validates the
arguments of a plan.
"""
