"""`drjax.jit`: plan a program when it is traced, and compile the plan.

`jit` binds the primitive of `jit_primitive`, whose rules plan and compile programs.
`tune` measures how many groups of a device should run at once.
"""
