"""What the compiler made of a function, in the mesh in context."""

import contextlib
import importlib.util
import logging
from typing import Any

import jax
import pytest

import drjax

# What only the compiler for TPUs can say, which needs none of these.
BY_TPU_COMPILER = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, its compiler"
)


def compiled(f, *args) -> Any:
    return jax.jit(f).lower(*args).compile()


def hlo_text(f, *args) -> str:
    return compiled(f, *args).as_text()


def temp_bytes(f, *args) -> int:
    """Memory of one device besides arguments and results."""
    return drjax.collectives(f)(*args).temp_bytes


def flops(f, *args) -> float:
    """Floating-point operations of one device."""
    return compiled(f, *args).cost_analysis()["flops"]


@contextlib.contextmanager
def compilations():
    """The names of the functions that JAX compiles in the block.

    Use it under `jax.check_tracer_leaks(False)`: JAX 0.10.2 caches less with the check.
    """
    names = []

    class Recorder(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("Compiling "):
                names.append(record.getMessage().split()[1])

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Recorder()
    logger.addHandler(handler)
    muted = logging.getLogger("jax")
    others, muted.handlers[:] = muted.handlers[:], [logging.NullHandler()]
    try:
        with jax.log_compiles():
            yield names
    finally:
        muted.handlers[:] = others
        logger.removeHandler(handler)
