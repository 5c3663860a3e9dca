"""Flower's simulation: many clients on this machine, in a few worker processes.

`pip install '.[flower]' 'flwr[simulation]'` installs it.
"""

# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from drjax.backends import flower
from drjax.plan import Plan


def simulate(plan: Plan, data: Any, main: Callable[[Any], Any]) -> Any:
    """What `main(run)` returns on the server of a client for each group.

    Args:
      plan: The plan.
      data: The clients' data: slice i, along axis 0 of all arrays, is that of client i.
      main: Calls `run`, the plan on Flower, with `Clients()` for the data.
    """
    slices, app, result = jax.tree.map(np.asarray, data), ServerApp(), []

    def load(context: Any) -> Any:
        return jax.tree.map(lambda x: x[context.node_config["partition-id"]], slices)

    @app.main()
    def server(grid: Any, _: Any) -> None:
        with flower.compile(plan, grid, start=300.0) as run:  # Ray starts first
            result.append(main(run))

    one_core = {"client_resources": {"num_cpus": 1, "num_gpus": 0}}
    run_simulation(app, flower.client(load), plan.size, backend_config=one_core)
    return result[0]
