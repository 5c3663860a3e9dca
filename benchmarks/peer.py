"""Google's drjax, whose import name is ours: an environment and a folder of its own."""

import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

NAME = "google drjax"
VERSION = "0.2.1"
ROOT = Path(__file__).resolve().parent.parent


def make(directory: Path, *packages: str) -> str:
    """A new environment with Google's drjax; returns its Python.

    Args:
      directory: Where it is made.
      packages: What else is installed; these and JAX in the versions that are here.
    """
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = str(directory / "bin" / "python")
    ours = [f"{name}=={version(name)}" for name in ("jax", *packages)]
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, f"drjax=={VERSION}", *ours], check=True)
    return python


def copy_sources(directory: Path, *packages: str) -> None:
    """Copies packages of the repository into a folder without our library."""
    for name in packages:
        ignore = shutil.ignore_patterns("results", "__pycache__")
        shutil.copytree(ROOT / name, directory / name, ignore=ignore)
