"""Files by path or by URL: local ones by the operating system, others by fsspec.

What goes in: a path, as text or as an object, or a URL such as `gs://bucket/run`, of
any file system that fsspec knows. What comes out: bytes, or a folder to keep files in.

A local file is written whole or not at all: under another name, flushed to the disk,
then renamed. An object store does the same by itself. Each writer has a temporary file
of its own, `.NAME.DIGITS.part`, which a crash leaves behind. Only a local lock file, by
`Folder.create`, may be cut off by a crash. Errors are `OSError`s that name the file,
and `ImportError`s that name what to install, for callers to put in context.
"""

import glob
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

_SCHEME = "[A-Za-z][A-Za-z0-9+.-]+:"  # of two characters or more: C: is a drive


def locate(path: object) -> Path | str:
    """Tell local paths from URLs: return a `Path`, or the URL as text.

    The argument is a text, bytes, or an object that stands for a path: `os.PathLike`,
    or one of universal_pathlib. A `file://` URL is a local path. What has another type
    is a `TypeError`; an empty text, and a URL that `pathlib.Path` has changed, such as
    `gs:/bucket/run` with one slash, are `ValueError`s.
    """
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, str | os.PathLike) and not hasattr(path, "protocol"):
        raise TypeError(f"a path or a URL is needed, got {type(path).__name__}")
    text = str(path)
    if not text:
        raise ValueError("a path or a URL is needed, got an empty text")
    if re.match(f"{_SCHEME}(//|:.+://)", text):
        for scheme in ("file://", "local://"):
            if text.startswith(scheme):
                return Path(text.removeprefix(scheme))
        return text
    if re.match(f"{_SCHEME}/[^/]", text) and not Path(text).parent.exists():
        scheme, rest = text.split(":/", 1)
        raise ValueError(
            f"{text} is what pathlib.Path makes of a URL: give it as a text, "
            f"'{scheme}://{rest}'"
        )
    return Path(text)


def file_system(url: str) -> tuple[Any, str]:
    """Return the `fsspec.AbstractFileSystem` of a URL, and the path of the URL in it.

    Without fsspec, or what it needs for this file system, it raises an `ImportError`;
    of a file system that fsspec does not know, a `ValueError`.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(
            f"URLs such as {url} need fsspec, which is not installed here. Install it, "
            "and the package of the file system: pip install fsspec gcsfs (gs://) or "
            "s3fs (s3://)"
        ) from error
    return fsspec.core.url_to_fs(url)


class NotRegularError(OSError):
    """The path to read or write is that of a folder, a pipe or a device."""


def read_file(path: Path | str) -> bytes:
    """Read a file at a local path or a URL, and return all of its bytes."""
    if isinstance(path, str):
        system, name = file_system(path)
        return _call(path, lambda: system.cat_file(name))
    with open_regular(path) as file:
        return file.read()


def open_regular(path: Path) -> Any:
    """Open a local file for reading, as a binary file object; only a regular file.

    Folders, pipes and devices are refused: they may have no end, or block because no
    process writes to them.
    """
    # Without O_NONBLOCK, to open a pipe waits for one who writes.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY)
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise NotRegularError(f"{path} is {kind}, not a regular file")
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def write_file(path: Path | str, data: bytes) -> None:
    """Write a file at a local path or a URL, and create the folders that it is in.

    A local file of this name is replaced at once, when the new one is complete; after
    an error it is as it was before. If the path is a link, the file that it leads to is
    replaced.
    """
    if isinstance(path, str):
        system, name = file_system(path)
        write = lambda: system.pipe_file(name, data)
        _write_remote(system, name, path, write)
        return
    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():
        raise NotRegularError(f"{path} is not a regular file")
    folder = LocalFolder(path.parent)
    folder.make()
    folder.write(path.name, [data])


def list_files(pattern: Path | str) -> list[str]:
    """List the files whose names match a glob pattern, sorted: local paths, or URLs."""
    if isinstance(pattern, Path):
        return sorted(glob.glob(str(pattern)))
    system, name = file_system(pattern)
    paths = _call(pattern, lambda: system.glob(name))
    return sorted(map(system.unstrip_protocol, paths))


def file_system_of(path: str) -> tuple[Any, str]:
    """Return the file system of a local path or a URL, and the path in it.

    That of a local path is None.
    """
    place = locate(path)
    return (None, str(place)) if isinstance(place, Path) else file_system(place)


def file_size(path: str) -> int:
    """Return the size in bytes of the file at a local path or a URL."""
    system, name = file_system_of(path)
    if system is None:
        return os.path.getsize(name)
    return _call(path, lambda: system.size(name))


class Folder(Protocol):
    """The interface of a local or remote folder that holds files by name.

    A name has no path in it. `LocalFolder` and `RemoteFolder` implement the interface,
    for instance for checkpoints.
    """

    def make(self) -> None:
        """Create the folder, if its file system has folders.

        If the path is that of a file, it raises an `OSError`.
        """
        ...

    def location(self, name: str) -> str:
        """Return the path or URL of the file `name` as text, for errors."""
        ...

    def names(self) -> list[str]:
        """List the names of the files and folders in the folder, in any order.

        If the folder does not exist yet, a remote one returns [], and a local one
        raises `FileNotFoundError`.
        """
        ...

    def read(self, name: str) -> bytes:
        """Return the contents of the file `name`."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write a file that does not exist yet, such as a lock file.

        Unlike `write`, this is not atomic for local files: a crash may leave a part of
        one. If the folder has a file of this name, it raises a `FileExistsError`.
        """
        ...

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """Write a file; a file of the same name is replaced atomically.

        The chunks are bytes-like objects that are written one after another. A local
        folder must exist: `make` it first.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove the file `name`; do nothing if the folder has no such file."""
        ...


def part_names(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for the names of temporary files of `LocalFolder.write`.

    A crash leaves such files behind, named `.NAME.DIGITS.part`, or `.NAME.part` by
    earlier versions. The pattern finds them, to remove them. The argument is a regular
    expression for `NAME`, the names that the files would have got.
    """
    # Earlier versions of drjax wrote names without random digits.
    return re.compile(rf"\.(?:{pattern})(?:\.[0-9a-f]+)?\.part")


class LocalFolder:
    """A `Folder` on this machine's file systems; it need not exist yet."""

    def __init__(self, path: Path):
        self.path = path

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def location(self, name: str) -> str:
        return str(self.path / name)

    def names(self) -> list[str]:
        return os.listdir(self.path)

    def read(self, name: str) -> bytes:
        return read_file(self.path / name)

    def create(self, name: str, data: bytes) -> None:
        with open(self.path / name, "xb") as file:
            file.write(data)

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        final = self.path / name
        # Two writers of one file must not write into one temporary file. `part_names`
        # matches this name.
        part = self.path / f".{name}.{secrets.token_hex(8)}.part"
        try:
            with open(part, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            with suppress(OSError):
                shutil.copymode(final, part)
            os.replace(part, final)
        except BaseException as error:
            with suppress(OSError):
                part.unlink()
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(final)  # a full disk names no file
            raise
        _sync(self.path)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Flush the entries of a local folder to the disk by `fsync`; ignore errors."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


class RemoteFolder:
    """A `Folder` on a file system that fsspec knows; on an object store, a prefix.

    It need not exist yet. Errors of the constructor are those of `file_system`.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._system, path = file_system(self.url)
        self._path = path.rstrip("/")

    def make(self) -> None:
        # An object store has no folders; others get theirs with the first file.
        if _call(self.url, lambda: self._system.isfile(self._path)):
            raise NotADirectoryError(f"{self.url} is a file")

    def location(self, name: str) -> str:
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            paths = _call(self.url, lambda: self._system.ls(self._path, detail=False))
            return [path.rstrip("/").rpartition("/")[2] for path in paths]
        return []

    def read(self, name: str) -> bytes:
        return _call(
            self.location(name), lambda: self._system.cat_file(self._path_of(name))
        )

    def create(self, name: str, data: bytes) -> None:
        path, url = self._path_of(name), self.location(name)

        def write() -> None:
            try:
                self._system.pipe_file(path, data, mode="create")
            except TypeError:  # a file system that cannot do both at once
                if self._system.exists(path):
                    raise FileExistsError from None
                self._system.pipe_file(path, data)

        try:
            _write_remote(self._system, path, url, write)
        except OSError as error:
            if self._system.exists(path):  # each file system has an error of its own
                raise FileExistsError(f"{url} exists already") from error
            raise

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        path, chunks = self._path_of(name), list(chunks)

        def write() -> None:
            with self._system.open(path, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)

        _write_remote(self._system, path, self.location(name), write)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            _call(
                self.location(name), lambda: self._system.rm_file(self._path_of(name))
            )

    def _path_of(self, name: str) -> str:
        return f"{self._path}/{name}"


def folder(path: Path | str) -> LocalFolder | RemoteFolder:
    """Make the object for the folder at a local path or a URL; it need not exist yet.

    It is not created: `make` does that. The argument is what `locate` returns.
    """
    if isinstance(path, str):
        return RemoteFolder(path)
    return LocalFolder(path.absolute())


def _write_remote(system: Any, path: str, url: str, write: Callable[[], Any]) -> None:
    """Write a remote file; if its folder is missing, create the folder and try again.

    `write` writes the file at `path` in the `fsspec.AbstractFileSystem`; it may be
    called twice.
    """
    try:
        _call(url, write)
    except FileNotFoundError:
        # Not before: on an object store this may ask for the right to make a bucket.
        _call(url, lambda: system.makedirs(path.rpartition("/")[0], exist_ok=True))
        _call(url, write)


_KNOWN_ERRORS = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    OSError,
)


def _call(url: str, action: Callable[[], Any]) -> Any:
    """Run an operation on a remote file, and convert its errors to `OSError`s.

    They name the URL. The class of an error stays if it is `OSError` or one of its
    common subclasses, such as `FileNotFoundError`.
    """
    try:
        return action()
    except Exception as error:
        kinds = [kind for kind in _KNOWN_ERRORS if isinstance(error, kind)]
        why = str(error) or "no reason is given"
        if not kinds or not str(error):
            why = f"{type(error).__name__}: {why}"
        raise (kinds or [OSError])[0](f"{url}: {why}") from error
