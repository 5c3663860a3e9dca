"""How a partition maps to a mesh: the only folder that inspects meshes.

layout             groups per device, mesh axes, and the mode: local, manual, sharded
avals              types of global, partitioned and per-group values on a mesh
execute            a function of one device's slices, run on all devices
padding            the padded slots, if the devices do not divide the groups
eval_on_mesh       a jaxpr that was traced without the mesh of its arguments
planning_context   the context in which the jaxprs of plans are traced
"""
