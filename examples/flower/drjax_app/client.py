"""A client: its own data, of which the server sees reductions alone."""

import numpy as np

from drjax.backends import flower


def load(context):
    """Points of a line, others on each client: x `[20, 3]`, y `[20]`."""
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    x = rng.normal(size=(20, 3)).astype(np.float32)
    return x, (x @ np.array([1, -2, 3], np.float32)).astype(np.float32)


app = flower.client(load)
