"""Which values are global and which partitioned: a fixed point over the jaxpr.

Read `kind` (the lattice), `infer` (worklist and transfer rules), `control_flow` (loops
and branches, whose bodies are inferred by themselves), `diagnostics` (error texts).
"""
