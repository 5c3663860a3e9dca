"""The server: the rounds of a plan `(model, data) -> (model, loss)`."""

# pyright: reportMissingImports=false

import json
import os
import time

import numpy as np
from flwr.serverapp import ServerApp

import drjax
from drjax.backends import flower

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the plan of the run's configuration; write the model and what happened."""
    config = context.run_config
    plan = drjax.load_plan(config["plan"])
    options = {
        "on_error": config["on-error"],
        "min_groups": config["min-groups"],
        "timeout": float(config["timeout"]),
        "retries": 0,
        "nodes": [int(node) for node in config["nodes"].split()] or None,
    }
    model, history = np.zeros(plan.inputs[0].shape, np.float32), []
    with flower.compile(plan, grid, **options) as run:
        for number in range(config["rounds"]):
            begin = time.perf_counter()
            model, loss = run(model, flower.Clients())
            seconds = time.perf_counter() - begin
            pids, dropped = [*run.report.workers], dict(run.report.dropped)
            history.append({"loss": float(loss), "pids": pids, "dropped": dropped})
            with open(f"{config['output']}.log", "a") as log:
                log.write(f"round {number + 1}: loss {loss:.4f}, {seconds:.2f} s\n")
    np.savez(f"{config['output']}.part.npz", model=model, history=json.dumps(history))
    os.replace(f"{config['output']}.part.npz", config["output"])
