"""`drjax.jit`.

`jit` binds the primitive of `jit_primitive`, whose rules plan and compile programs.
`tune` measures how many groups of a device should run at once.
"""
