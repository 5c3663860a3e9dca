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


def simulate(
    plan: Plan,
    data: Any,
    main: Callable[[Any], Any],
    keep: dict[Any, Any] | None = None,
    initial: Any = None,
) -> Any:
    """What `main(run)` returns on the server of a client for each group.

    Args:
      plan: The plan.
      data: The clients' data: slice i, along axis 0 of all arrays, is that of client i.
      main: Calls `run`, the plan on Flower, with `Clients()` for the data.
      keep: Which results stay with their clients, as for `flower.compile`.
      initial: What these are before the first call, in the manner of the data.
    """
    app, result = ServerApp(), []

    def slice_of(tree: Any) -> Callable[[Any], Any]:
        arrays = jax.tree.map(np.asarray, tree)
        group = lambda context: context.node_config["partition-id"]
        return lambda context: jax.tree.map(lambda x: x[group(context)], arrays)

    @app.main()
    def server(grid: Any, _: Any) -> None:
        with flower.compile(
            plan, grid, start=300.0, keep=keep
        ) as run:  # Ray starts first
            result.append(main(run))

    one_core = {"client_resources": {"num_cpus": 1, "num_gpus": 0}}
    begin = slice_of(initial) if keep else None
    client = flower.client(slice_of(data), begin)
    run_simulation(app, client, plan.size, backend_config=one_core)
    return result[0]
