"""The Ray backend on two workers: the conformance test, and what is its own."""

import pytest

from drjax.backends import ray
from tests.conformance import Conformance

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def actors():
    """Two warm workers for all plans of the tests."""
    found = ray.Actors(2)
    yield found
    found.close()


class TestRay(Conformance):
    processes = True

    @pytest.fixture(autouse=True)
    def _on(self, actors):
        def compile(plan, workers=2, **options):
            warm = actors if workers == actors.workers else workers
            return ray.compile(plan, workers=warm, **options)

        self.compile = compile
