"""The zip around a plan: `manifest.json` and the members that it lists.

Members are stored, not compressed, so that a file never holds more than its size, and
every member has its size and hash in the manifest. Reading writes nothing to disk.
"""

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

from drjax._errors import PlanFileError

FORMAT, VERSION = "drjax plan", 1
_MANIFEST = "manifest.json"
_NAME = re.compile(r"(stages|consts)/\w[\w.-]*")


def write(path: Path, manifest: dict[str, Any], members: dict[str, bytes]) -> None:
    """Write a plan file; equal contents make equal files."""
    table = {name: _seal(data) for name, data in sorted(members.items())}
    head = {"format": FORMAT, "version": VERSION, **manifest, "members": table}
    text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ((_MANIFEST, text.encode()), *sorted(members.items())):
            info = zipfile.ZipInfo(name)  # the time is always that of 1980
            info.external_attr = 0o644 << 16
            info.create_system = 3
            archive.writestr(info, data)


def _seal(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest and all members of a plan file, checked.

    Raises:
      OSError: The file cannot be opened.
      PlanFileError: It is not a whole plan file of a known version.
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        try:
            archive = zipfile.ZipFile(file)
            infos = archive.infolist()
        except Exception as error:
            raise _bad(
                path, f"is not a zip, or was cut off: {error}", "Copy it again."
            ) from error
        names = [info.filename for info in infos]
        if names.count(_MANIFEST) != 1:
            raise _bad(
                path, f"has no {_MANIFEST}, so it is no plan file",
                "Give the path of a file that plan.save wrote.",
            )  # fmt: skip
        first = infos[names.index(_MANIFEST)]
        _check_sizes(path, [first], size)
        manifest = _manifest(path, _read(path, archive, first))
        _check_sizes(path, infos, size)
        table = _table(path, manifest, [n for n in names if n != _MANIFEST])
        members = {
            info.filename: _read(path, archive, info)
            for info in infos
            if info.filename != _MANIFEST
        }
    for name, data in members.items():
        if _seal(data) != table[name]:
            raise _bad(
                path, f"was changed: {name} is not what the manifest says",
                "Copy it again, or save the plan anew.",
            )  # fmt: skip
    return manifest, members


def _check_sizes(path: Path, infos: list[zipfile.ZipInfo], size: int) -> None:
    packed = [i.filename for i in infos if i.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise _bad(
            path, f"has compressed members ({packed[0]!r}), as plan.save never writes",
            "Do not pack it anew.",
        )  # fmt: skip
    total = sum(max(info.file_size, info.compress_size) for info in infos)
    if total > size:
        raise _bad(
            path, f"says that it holds {total:,} bytes, but has {size:,}",
            "Do not trust it; copy it again from where it was saved.",
        )  # fmt: skip


def _read(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        return archive.read(info)
    except Exception as error:
        raise _bad(
            path, f"is damaged: {info.filename!r} cannot be read: {error}",
            "Copy it again.",
        ) from error  # fmt: skip


def _manifest(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
        kind, version = found["format"], found["version"]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise malformed(path, error) from error
    if kind != FORMAT:
        raise malformed(path, f"its format is {str(kind)[:60]!r}, not {FORMAT!r}")
    if version != VERSION:
        raise _bad(
            path, f"has version {str(version)[:60]} of the format",
            f"This drjax reads version {VERSION}: load it by the drjax that saved it.",
        )  # fmt: skip
    return found


def _table(path: Path, manifest: dict[str, Any], names: list[str]) -> dict[str, Any]:
    table = manifest.get("members")
    if not isinstance(table, dict):
        raise malformed(path, "it has no table of members")
    for name in (*names, *table):
        if not _NAME.fullmatch(name):
            raise _bad(
                path, f"has a member named {name[:200]!r}, which may lie outside of it",
                "Do not trust it: plan.save writes only stages/ and consts/.",
            )  # fmt: skip
    if len(set(names)) != len(names) or set(names) != set(table):
        missing = sorted(set(table) - set(names))
        what = f"lacks {', '.join(missing)}" if missing else "has members too many"
        raise _bad(path, what, "Copy it again, or save the plan anew.")
    return table


def _bad(path: Path, what: str, fix: str) -> PlanFileError:
    return PlanFileError(f"The plan file {path} {what}. {fix}")


def malformed(path: Path, why: object) -> PlanFileError:
    """The error for a manifest that is not as `plan.save` writes it."""
    return _bad(path, f"has a malformed manifest: {why}", "Save the plan anew.")
