"""Files that the driver and all workers see, by Beam's file systems.

Input and output: paths that `apache_beam.io.filesystems.FileSystems` knows, and bytes.
The module is a `drjax.engines.beam.file_exchange.Files`.

Invariants: a file is there whole or not at all: it is written under another name first.

Sharp edges: between removing an old file and renaming the new one there is a moment
without either.
"""

import importlib
import secrets
from typing import Any


def _systems() -> Any:
    """Import and return Beam's class `apache_beam.io.filesystems.FileSystems`."""
    return importlib.import_module("apache_beam.io.filesystems").FileSystems


def make(folder: str) -> None:
    _systems().mkdirs(folder)


def read(path: str) -> bytes:
    with _systems().open(path) as file:
        return file.read()


def write(path: str, data: bytes) -> None:
    """Write a file whole or not at all; replace an old file of that path.

    The bytes go to a temporary file in the same folder, whose name ends in `.part`.
    Then the old file is deleted, and the temporary one is renamed.
    """
    # A crash must not leave half of a file under the name that readers look for.
    # Two workers may run one task at once: each needs a temporary file of its own.
    systems, part = _systems(), f"{path}.{secrets.token_hex(8)}.part"
    with systems.create(part) as file:
        file.write(data)
    # Some file systems do not rename over a file.
    if systems.exists(path):
        systems.delete([path])
    systems.rename([part], [path])


def listed(prefix: str) -> list[str]:
    """List the paths of files that begin with `prefix`: a folder, and part of a name.

    Files that end in `.part` are left out: `write` has not finished them.
    """
    (match,) = _systems().match([f"{prefix}*"])
    paths = [x.path for x in match.metadata_list]
    return [path for path in paths if not path.endswith(".part")]


def remove(folder: str) -> None:
    _systems().delete([folder])
