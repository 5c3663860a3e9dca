"""Which values are global and which partitioned: a fixed point over the jaxpr."""
