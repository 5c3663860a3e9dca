"""drjax.jit: `jit` calls the primitive of `jit_primitive`, which plans and compiles."""
