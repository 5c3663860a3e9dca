"""Which values are global and which partitioned: a fixed point over the jaxpr.

    InlinedJaxpr, kinds of arguments -> infer_partitioning -> Environment (kinds)

Read `kind` (the lattice), `environment` (the cells), `propagation_rules` (transfer
functions), `control_flow` (those of loops and branches, whose bodies are inferred by
themselves), `infer` (the worklist), `consistency` (what has no meaning is refused),
`diagnostics` (error texts).
"""
