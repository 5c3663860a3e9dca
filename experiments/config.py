"""What a run is: a TOML file of overrides, checked, and a flag for every field.

Unknown keys and wrong types are errors of pydantic, which names them.
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import tyro
from pydantic.dataclasses import dataclass

from examples.common.transformer import TransformerConfig

_STRICT = pydantic.ConfigDict(extra="forbid", strict=True)

Variant = Literal[
    "drjax", "drjax jit", "google drjax", "shard_map", "shard_map, scan", "python loop",
    "rolled loop", "no annotations",
]  # fmt: skip


@dataclass(frozen=True, config=_STRICT)
class Round:
    """A round of local SGD, as in section 4 of the paper."""

    groups: int = 4
    """n, the size of the partition."""
    steps: int = 4
    """Local steps of a group."""
    batch: int = 8
    """Sequences in a local step."""
    length: int = 512
    """Tokens in a sequence."""
    lr: float = 0.01
    """Learning rate of the local SGD."""
    average: Literal["updates", "models"] = "updates"
    """What the groups send: `new - old`, or `new`, which need not keep `old`."""


@dataclass(frozen=True, config=_STRICT)
class Machine:
    """The devices, and how a group's model is laid out over those of the group."""

    platform: Literal["cpu", "tpu", "cuda"] = "cpu"
    """TPUs are compiled for by libtpu, and H100s by JAX's CUDA plugin; nothing runs on
    them."""
    topology: str = "v2:2x2"
    """Of TPUs, as jax.experimental.topologies names it; of H100s the numbers of
    partitions, hosts and GPUs of a host, such as 1x4x8."""
    devices: int = 8
    """Virtual devices of the CPU, in all processes together."""
    processes: int = 1
    """Processes of the CPU, joined by jax.distributed."""
    group: int = 2
    """Devices of a group: its model is sharded over them."""
    fsdp: int = 1
    """Of these, how many share the batch and the parameters of a tensor-parallel
    model, as fully-sharded data parallelism does; the mesh has an axis for them."""
    layout: Literal["tensor parallel", "fsdp"] = "tensor parallel"
    """Megatron's, or all parameters sharded and gathered where they are used."""
    server: Literal["replicated", "sharded"] = "replicated"
    """Whether each group's devices hold the server's parameters, or a share of them."""

    def __post_init__(self) -> None:
        if self.devices % self.processes:
            raise ValueError(
                f"{self.devices} devices cannot be divided among {self.processes} "
                "processes."
            )
        if self.group % self.fsdp:
            raise ValueError(
                f"A group of {self.group} devices cannot be divided by fsdp = "
                f"{self.fsdp}: set fsdp to a divisor of group."
            )
        if self.fsdp > 1 and self.layout != "tensor parallel":
            raise ValueError(
                f"fsdp = {self.fsdp} adds an axis to layout 'tensor parallel', not to "
                f"{self.layout!r}, which has one axis: leave out one of the two."
            )

    @property
    def local_devices(self) -> int:
        """Virtual devices of one process."""
        return self.devices // self.processes


@dataclass(frozen=True, config=_STRICT)
class Config:
    """One run: it is compiled, measured, and written down as one JSON record."""

    model: TransformerConfig = TransformerConfig()
    """The language model."""
    round: Round = Round()
    """The round."""
    machine: Machine = Machine()
    """The devices."""
    variants: tuple[Variant, ...] = ("drjax", "shard_map")
    """How the round is written."""
    groups_per_step: int | None = None
    """Of drjax.jit: how many of a device's groups work at once."""
    text: str = "standard library"
    """What executed rounds train on: modules of Python's standard library, which the
    repository has, or articles by domain: a data set like `vblagoje/cc_news`, or a file
    like it."""
    replicated_data: bool = False
    """Whether all devices have the data of all groups."""
    donate: bool = False
    """Whether the parameters' memory may be used for the new ones."""
    execute: int = 0
    """Rounds to run; on CPUs only."""


_CONFIG = pydantic.TypeAdapter(Config)


def read(text: str) -> Config:
    """Settings as JSON; settings that are left out have their defaults."""
    return _CONFIG.validate_json(text, strict=True)


def settings(config: Config) -> dict[str, Any]:
    """All settings, for JSON."""
    return _CONFIG.dump_python(config, mode="json")


def load(path: Path) -> Config:
    """Read a file of overrides.

    Raises:
      ValueError: An unknown key or a wrong type (`pydantic.ValidationError`), or no
        TOML.
    """
    try:
        settings = tomllib.loads(path.read_text())
        return read(json.dumps(settings))  # JSON's lists are tuples
    except ValueError as error:
        error.add_note(f"This is about {path}.")
        raise


@dataclass(frozen=True, config=_STRICT)
class Command:
    """What the runner is asked for."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """The runs: files of configs/. Flags of their fields follow them."""
    out: Path = Path("runs/experiments")
    """Folder of the records."""
    peer_python: str | None = None
    """A Python with Google's drjax; without it, one is created if needed."""


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What differs in two runs' settings, but for the variants, by dotted names."""
    result = {}
    for key, value in new.items():
        if isinstance(value, dict):
            inner = changes(old[key], value)
            result |= {f"{key}.{name}": x for name, x in inner.items()}
        elif value != old[key] and key != "variants":
            result[key] = value
    return result


def from_command_line(
    args: Sequence[str] | None = None,
) -> tuple[Command, dict[Path, Config]]:
    """The command, and each file's run with the overrides of flags."""
    command, rest = tyro.cli(
        Command, args=args, return_unknown_args=True, add_help=False
    )
    if not command.files:
        if {"-h", "--help"} & set(rest):
            tyro.cli(Command, args=["--help"])
        raise SystemExit("Give files of configs/ first, then flags.")
    configs = {
        file: tyro.cli(Config, args=rest, default=load(file)) for file in command.files
    }
    return command, configs
