"""Python in a process of its own, from the root of the checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Seconds after which a process of a test hangs: more than any takes on a slow machine.
HANGS = 900


def run(*args: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs Python from the checkout's root, on the CPU."""
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done
