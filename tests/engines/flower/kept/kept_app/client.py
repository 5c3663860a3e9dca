"""A client: its data, its first state, and a record of what it keeps."""

import pickle
from pathlib import Path

from drjax.backends import flower
from drjax.engines.flower.records import from_record
from tests.helpers import kept_programs as programs


def load(context):
    """The client's data; and it tells the test, not the server, what it keeps."""
    group, output = context.node_config["partition-id"], context.run_config["output"]
    stored = {k: from_record(x) for k, x in context.state.array_records.items()}
    Path(f"{output}.client{group}").write_bytes(pickle.dumps(stored))
    return programs.data_of(int(group))


def initial(context):
    """Of SCAFFOLD: a control variate that nobody else knows. Of others: zeros."""
    algorithm = programs.ALGORITHMS[Path(context.run_config["plan"]).stem]
    return algorithm.first(int(context.node_config["partition-id"]))


app = flower.client(load, initial)
