"""The zip around a plan: `manifest.json` and the members that it lists.

Members are stored, not compressed, so that a file never holds more than its size, and
every member has its size and hash in the manifest. Reading writes nothing to disk.
Nothing in a file is trusted: each check comes before what it protects, the cheap and
general ones first.
"""

import hashlib
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from drjax import _storage
from drjax._errors import PlanFileError

FORMAT, VERSION = "drjax plan", 2
MANIFEST_LIMIT = 32 << 20  # bytes; as Python objects JSON takes some 20 times as much
_MANIFEST = "manifest.json"
_LONGEST = 600  # letters of what is wrong with a file, in an error
_NAME = re.compile(r"(stages|consts)/\w[\w.-]*")


def to_bytes(manifest: dict[str, Any], members: dict[str, bytes]) -> bytes:
    """Serialize a plan file, a zip archive; equal contents give equal bytes.

    `manifest` describes the plan, as JSON data, without the format, the version and the
    table of members, which are added. `members` are the contents of the other files in
    the zip, by name, such as `stages/1.groups.jexp`.
    """
    table = {name: _seal(data) for name, data in sorted(members.items())}
    head = {"format": FORMAT, "version": VERSION, **manifest, "members": table}
    # Python would write NaN, which is no JSON, and which other readers refuse.
    text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False).encode()
    if len(text) > MANIFEST_LIMIT:
        raise PlanFileError(
            f"The manifest of this plan has {len(text):,} bytes, but a plan file has "
            f"at most {MANIFEST_LIMIT:,}. Plan fewer rounds: write those that repeat "
            "as a lax.scan."
        )
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in ((_MANIFEST, text), *sorted(members.items())):
            info = zipfile.ZipInfo(name)  # the time is always that of 1980
            info.external_attr = 0o644 << 16
            # Unix, as zipfile's default is the system that saves: equal plans, equal
            # bytes.
            info.create_system = 3
            archive.writestr(info, data)
    return file.getvalue()


def _seal(data: bytes) -> dict[str, Any]:
    """Return the manifest's entry for a member of the zip with the contents `data`.

    It is `{"size": bytes, "sha256": hexadecimal digest}`.
    """
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read(
    path: Path | str, data: bytes | None = None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read the manifest and all members of a plan file, and check them.

    If `data`, the bytes of the file, is passed, only errors use `path`. The result is
    the contents of `manifest.json`, which describes the plan, as JSON data; and the
    bytes of all other files in the zip, by name. Of the manifest only the format, the
    version and the table of members are checked. `OSError`: the file cannot be opened;
    `PlanFileError`: it is not a whole plan file of a known version.
    """
    with _open(path, data) as file:
        size = file.seek(0, 2)
        try:
            archive = zipfile.ZipFile(file)
            infos = archive.infolist()
        except Exception as error:
            raise _bad(
                path, f"is not a zip, or was cut off: {error}", "Copy it again."
            ) from error
        names = [info.filename for info in infos]
        if _MANIFEST not in names:
            raise _bad(
                path,
                f"has no {_MANIFEST}, so it is no plan file",
                "Give the path of a file that plan.save wrote.",
            )
        _check_unique(path, names)
        first = infos[names.index(_MANIFEST)]
        # Before the manifest is read: compressed, it could expand to any size.
        _check_sizes(path, [first], size)
        if first.file_size > MANIFEST_LIMIT:
            raise _bad(
                path,
                f"has a {_MANIFEST} of {first.file_size:,} bytes, more than the "
                f"{MANIFEST_LIMIT:,} that one may have",
                "Do not trust it; copy it again from where it was saved.",
            )
        manifest = _manifest(path, _read(path, archive, first))
        # Together, as their total bounds the memory that reading them takes.
        _check_sizes(path, infos, size)
        table = _table(path, manifest, [n for n in names if n != _MANIFEST])
        members = {
            info.filename: _read(path, archive, info)
            for info in infos
            if info.filename != _MANIFEST
        }
    for name, data in members.items():
        # This detects damage, not forgery: a forged member can have a forged hash.
        if _seal(data) != table[name]:
            raise _bad(
                path,
                f"was changed: {name} is not what the manifest says",
                "Copy it again, or save the plan again.",
            )
    return manifest, members


def _open(path: Path | str, data: bytes | None) -> BinaryIO:
    """Open a plan file for reading, as a binary file object.

    If `data`, the bytes of the file, is passed, `path` is not used. `OSError`: the file
    cannot be opened; `PlanFileError`: it is no regular file, or fsspec cannot open its
    file system.
    """
    if data is not None:
        return io.BytesIO(data)
    try:
        if isinstance(path, str):
            return io.BytesIO(_storage.read_file(path))
        return _storage.open_regular(path)
    except _storage.NotRegularError as error:
        raise PlanFileError(
            f"{error}. Give the path of a file that plan.save wrote."
        ) from error
    except (ImportError, ValueError) as error:
        raise PlanFileError(f"The plan file {path} cannot be read: {error}") from error


def _check_unique(path: Path | str, names: list[str]) -> None:
    """Check that the members of a zip, the manifest included, have different names."""
    if len(set(names)) < len(names):
        # zipfile takes the last of equal names, and other readers may take another.
        name = _repeated(names)
        raise _bad(
            path,
            f"has the member {name[:200]!r} twice, so it is not clear what it holds",
            "Do not trust it: plan.save writes each member once.",
        )


def _check_sizes(path: Path | str, infos: list[zipfile.ZipInfo], size: int) -> None:
    """Check the sizes that a zip declares for some members, before any of them is read.

    No member may be compressed, and together they may not be larger than the file, of
    `size` bytes.
    """
    compressed = [i.filename for i in infos if i.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise _bad(
            path,
            f"has compressed members ({compressed[0]!r}), as plan.save never writes",
            "Do not pack it again.",
        )
    # The sum: entries that overlap fit one by one, but together could be much larger
    # than the file. Either size of an entry may be forged.
    total = sum(max(info.file_size, info.compress_size) for info in infos)
    if total > size:
        raise _bad(
            path,
            f"says that it holds {total:,} bytes, but has {size:,}",
            "Do not trust it; copy it again from where it was saved.",
        )


def _read(path: Path | str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """Return the contents of one member of an open zip."""
    try:
        return archive.read(info)
    except Exception as error:
        raise _bad(
            path,
            f"is damaged: {info.filename!r} cannot be read: {error}",
            "Copy it again.",
        ) from error


def _manifest(path: Path | str, data: bytes) -> dict[str, Any]:
    """Parse `manifest.json`, check its format and version, and return its JSON data.

    No object in it may have a key twice. Other entries are not checked.
    """
    try:
        manifest = json.loads(data, object_pairs_hook=_unique_keys)
        kind, version = manifest["format"], manifest["version"]
    # The parser recurses, and a forged manifest may nest as deeply as it likes.
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise malformed(path, error) from error
    if kind != FORMAT:
        raise malformed(path, f"its format is {str(kind)[:60]!r}, not {FORMAT!r}")
    if version != VERSION:
        raise _bad(
            path,
            f"has version {str(version)[:60]} of the format",
            f"This drjax reads version {VERSION}: load it by the drjax that saved it.",
        )
    return manifest


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raise `ValueError` if a key repeats.

    It is the `object_pairs_hook` of `json.loads`. Of equal keys Python would use the
    last one, but other readers of JSON may use another.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        key = _repeated([key for key, _ in pairs])
        raise ValueError(f"it has the key {key[:60]!r} twice")
    return table


def _repeated(names: list[str]) -> str:
    """Return the most frequent of `names`; callers know that some name repeats."""
    return Counter(names).most_common(1)[0][0]


def check_used(path: Path | str, members: Iterable[str], used: set[str]) -> None:
    """Check that each member of a plan file but the manifest is used by a stage."""
    if unused := sorted(set(members) - used):
        raise _bad(
            path,
            f"has members that no stage uses: {_listed(unused)}",
            "Do not trust it: plan.save writes only what the plan needs.",
        )


def _listed(names: list[str]) -> str:
    """Join the first three of `names` as text for errors: `a, b, c and 2 more`."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name[:200] for name in names[:3]) + more


def _table(
    path: Path | str, manifest: dict[str, Any], names: list[str]
) -> dict[str, Any]:
    """Check the names in the manifest's table of members, and return the table.

    They must be `names`, those of all other files in the zip, of the form `stages/NAME`
    or `consts/NAME`. The table has for each name the member's entry,
    `{"size": ..., "sha256": ...}`, which is not checked.
    """
    table = manifest.get("members")
    if not isinstance(table, dict):
        raise malformed(path, "it has no table of members")
    for name in (*names, *table):
        if not _NAME.fullmatch(name):
            raise _bad(
                path,
                f"has a member named {name[:200]!r}, which may lie outside of it",
                "Do not trust it: plan.save writes only stages/ and consts/.",
            )
    if set(names) != set(table):
        missing, extra = (
            sorted(set(table) - set(names)),
            sorted(set(names) - set(table)),
        )
        what = f"lacks {_listed(missing)}" if missing else "has members too many"
        what += f": {_listed(extra)}" * (not missing)
        raise _bad(path, what, "Copy it again, or save the plan again.")
    return table


def _bad(path: Path | str, what: str, fix: str) -> PlanFileError:
    """Make a `PlanFileError` with the text `The plan file {path} {what}. {fix}`.

    The caller raises it. `what` is a predicate, such as `is damaged`, and `fix` a whole
    sentence, such as `Copy it again.`
    """
    # Cut, as what is wrong may be anything of the file, of any length.
    short = what if len(what) <= _LONGEST else f"{what[:_LONGEST]} ..."
    return PlanFileError(f"The plan file {path} {short}. {fix}")


def malformed(path: Path | str, why: object) -> PlanFileError:
    """Make a `PlanFileError` for a manifest that `plan.save` would not write.

    The caller raises it. `why` is text, or the error that reading the manifest raised.
    """
    return _bad(
        path,
        f"has a malformed manifest: {str(why).rstrip('.')}",
        "Save the plan again.",
    )
