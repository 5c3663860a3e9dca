"""Ray on this machine, with two CPUs, and two workers on it.

What the modules of tests share; `MARKS` are their marks.
"""

import importlib

import pytest

from drjax.backends import ray

MARKS = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    # Ray 2.55's own, which Flower's simulation needs:
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
]


@pytest.fixture(scope="module")
def cluster():
    engine = importlib.import_module("ray")
    engine.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    engine.shutdown()


@pytest.fixture(scope="module")
def actors(cluster):
    """Two warm workers for all plans of the tests: the defaults, on as many CPUs.

    A worker that is taken for dead but lives leaves no room for the next one.
    """
    result = ray.Actors(2)
    yield result
    result.close()
