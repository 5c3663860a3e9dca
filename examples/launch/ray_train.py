"""The same run by Ray Train's JaxTrainer, which starts a process on each host.

    python -m examples.launch.ray_train --use gpu --workers 4
    python -m examples.launch.ray_train --use tpu --workers 4 --topology 4x4

Needs `pip install 'ray[train]'`. On TPUs and GPUs Ray connects the processes before the
loop starts. `--use cpu` is for trying it on one machine.
"""

import dataclasses
import socket
from typing import Any, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Config:
    """Start the run on a Ray cluster, or on this machine."""

    use: Literal["cpu", "gpu", "tpu"] = "cpu"
    """What the workers compute on."""
    workers: int = 2
    """Hosts with TPUs, or GPUs."""
    topology: str | None = None
    """Of the TPU slice."""
    accelerator: str = "TPU-V5LITEPOD"
    """Ray's name of the TPUs."""
    rounds: int = 5
    """Rounds of communication."""


def loop(settings: dict[str, Any]) -> None:
    """What each worker runs. It imports JAX, which the driver does not."""
    import ray.train  # type: ignore[import-not-found]

    from examples.launch import train

    if settings["port"]:  # on one machine
        settings = {
            "coordinator": f"127.0.0.1:{settings['port']}",
            "processes": ray.train.get_context().get_world_size(),
            "process": ray.train.get_context().get_world_rank(),
            "rounds": settings["rounds"],
        }
    else:
        settings = {"rounds": settings["rounds"]}
    train.main(train.Config(**settings))


def main(config: Config) -> None:
    """Starts the workers and waits for them."""
    from ray.train import ScalingConfig  # type: ignore[import-not-found]
    from ray.train.v2.jax import JaxTrainer  # type: ignore[import-not-found]

    port, resources = 0, {config.use.upper(): 1}
    if config.use == "cpu":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    tpu: dict[str, Any] = {}
    if config.use == "tpu":
        resources = {"TPU": 4}  # of a host
        tpu = {"topology": config.topology, "accelerator_type": config.accelerator}
    scaling = ScalingConfig(
        num_workers=config.workers,
        use_gpu=config.use == "gpu",
        use_tpu=config.use == "tpu",
        resources_per_worker=resources,
        **tpu,
    )
    settings = {"port": port, "rounds": config.rounds}
    JaxTrainer(loop, train_loop_config=settings, scaling_config=scaling).fit()


if __name__ == "__main__":
    main(tyro.cli(Config))
