"""Ray on this machine, with two CPUs, and two workers on it.

What the modules of tests share; `MARKS` are their marks.
"""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from drjax.backends import ray

# Processes of pytest do not see the clusters of each other.
if "RAY_TMPDIR" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["RAY_TMPDIR"] += f"/{os.environ['PYTEST_XDIST_WORKER']}"

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


@pytest.fixture
def new_cluster() -> Iterator[Any]:
    """Ray's class of clusters of several nodes, whatever Ray did in this process."""
    engine = importlib.import_module("ray")
    raylet = importlib.import_module("ray._raylet")

    def ask_anew():
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()

    engine.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        # Ray that has started by itself asks for a token, for the rest of the process,
        # which nodes of such a cluster do not know.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ask_anew()
        yield importlib.import_module("ray.cluster_utils").Cluster
        engine.shutdown()
    ask_anew()


@pytest.fixture(scope="module")
def actors(cluster):
    """Two warm workers for all plans of the tests: the defaults, on as many CPUs.

    A worker that is taken for dead but lives leaves no room for the next one.
    """
    result = ray.Actors(2)
    yield result
    result.close()
