"""The engines' core, with blocks that run in this process."""

from drjax.backends.engine import local
from tests.conformance import Conformance


class TestLocal(Conformance):
    compile = staticmethod(local.compile)
