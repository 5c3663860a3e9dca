"""The server: some rounds of a plan of `tests.helpers.kept_programs`."""

# pyright: reportMissingImports=false

import os
import pickle

from flwr.serverapp import ServerApp

import drjax
from drjax.backends import flower
from tests.engines.flower.messages import Recorded
from tests.helpers import kept_programs as programs

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the plan; write the state of the server and all messages."""
    config, recorded = context.run_config, Recorded(grid)
    plan = drjax.load_plan(config["plan"])
    run, start, keep = programs.on_clients(plan.name, flower.Clients())
    kept = flower.compile(plan, recorded, timeout=120, keep=keep)
    state = programs.without_kept(run(kept, start, config["rounds"], flower.Clients()))
    with open(f"{config['output']}.part", "wb") as file:
        pickle.dump((state, recorded.messages), file)
    os.replace(f"{config['output']}.part", config["output"])
