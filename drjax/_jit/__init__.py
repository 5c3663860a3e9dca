"""`drjax.jit`.

`jit` binds the primitive of `jit_primitive`, whose rules plan and compile programs.
"""
