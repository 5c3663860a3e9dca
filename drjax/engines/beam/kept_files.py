"""Slices that stay in files between calls, of engines that exchange files.

Input: results of blocks, whose slices a worker writes to a file of their own; and
blocks of later stages, whose slices are parts of such files. Output: names of files, in
place of arrays, in all that the driver and the workers exchange.

    kept-STAGE / block-GROUP       the slices of a block that stay

Invariants: a folder is removed with the last value that has slices in it, or when the
engine is closed.

Sharp edges: a piece may also be arrays that the driver has; then the driver sends the
slices of a block that needs it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from drjax.engines.core import wire_format
from drjax.engines.core.messages import Block, BlockResult
from drjax.engines.slices.worker_slices import Columns, Pieces


def folders_of(tables: Iterable[Pieces]) -> set[str]:
    """Return the folders of the files that have these slices."""
    paths = [piece for table in tables for piece, _ in table.pieces]
    return {path.rpartition("/")[0] for path in paths if isinstance(path, str)}


def read(files: Any, path: str) -> list[np.ndarray]:
    """Read the file that `path_of` names, with the slices that one block has left.

    For each output of that stage whose slices stay between stages, in order, it has an
    array `[c, ...]`.
    """
    return wire_format.from_bytes(files.read(path))[1]


def path_of(folder: str, block: Block) -> str:
    """Return the path of the file with a block's slices that stay between stages.

    `folder` is that of this run of the stage; the file is named by the block's first
    group.
    """
    return f"{folder}/block-{block.groups[0]:012}"


def store_staying_slices(
    files: Any, folder: str, stay: Sequence[bool], block: Block, result: BlockResult
) -> BlockResult:
    """Write a block's slices that stay between stages to a file; a worker calls it.

    `stay` says for each of `result.slices` whether it stays; a copy of the result
    without these is returned. `result` itself, and no file, if it has no slices.
    """
    if not result.slices:  # all groups have failed
        return result
    pairs = [*zip(result.slices, stay, strict=True)]
    own = wire_format.to_bytes({}, [x for x, stays in pairs if stays])
    files.write(path_of(folder, block), own)
    return replace(result, slices=[x for x, stays in pairs if not stays])


def slices_to_message(
    x: Any, read: Callable[[str], Sequence[np.ndarray]]
) -> tuple[Any, list[np.ndarray]]:
    """Prepare a block's slices for a file to workers: as paths, or as arrays.

    `x` is an array `[c, ...]`, or a `Pieces` whose pieces are paths of files,
    with slices that one block has left, or lists of arrays that the driver has. `read`
    takes a path to the list of arrays of the file.

    The result is `(entry, arrays)`. For a `Pieces` whose groups have slices of
    files only, `entry` is JSON data: `pieces`, a list of pairs of a path and the
    position of the value among the arrays of that file; and `columns`, whether it is
    columns of these. `arrays` is then two index arrays, int `[c]`: for each group the
    index of its file in `pieces` (-1: none), and the position of its slice along axis
    0; of columns also the further attributes. Else `entry` is None, and `arrays` has
    the slices themselves, one array `[c, ...]`.
    """
    if not isinstance(x, Pieces):
        return None, [x]
    x = x.only_used()  # as others may be many
    if any(isinstance(piece, list) for piece, _ in x.pieces):
        arrays = lambda piece: piece if isinstance(piece, list) else read(piece)
        return None, [x.assemble(arrays)]
    index = [x.piece, x.position]
    if x.columns is not None:
        columns = x.columns
        index += [columns.coordinates, np.array(columns.number), columns.empty]
    return {"pieces": x.pieces, "columns": x.columns is not None}, index


def slices_from_message(
    entries: Sequence[Any],
    arrays: Sequence[np.ndarray],
    files: Any,
    parts: Mapping[str, Mapping[int, np.ndarray]] | None = None,
) -> list[np.ndarray]:
    """Read the slices of a block, on a worker: the inverse of `slices_to_message`.

    `entries` has for each partitioned input of the stage, in order, the `entry` that
    `slices_to_message` returned, and `arrays` has their arrays, in the same order. The
    result is an array `[c, ...]` for each; a file is read once.

    `parts`, if workers have exchanged the columns, has those of the block: from the
    path of a file and a position among its arrays to an array `[k, c, *t]`. None: they
    are read from the files.
    """
    rest, slices = iter(arrays), []
    cache: dict[str, list[np.ndarray]] = {}

    def cached(path: str) -> list[np.ndarray]:
        if path not in cache:
            cache[path] = read(files, path)
        return cache[path]

    for entry in entries:
        x = next(rest)
        if entry is not None:
            pieces = [(path, leaf) for path, leaf in entry["pieces"]]
            source: Callable[[str], Any] = cached
            block = Pieces(pieces, x, next(rest))
            if entry["columns"]:
                coordinates, number, empty = (next(rest) for _ in range(3))
                columns = Columns(coordinates, int(number), empty)
                if parts is not None:
                    columns, source = columns.of_its_own_parts(), parts.__getitem__
                block = replace(block, columns=columns)
            x = block.assemble(source)
        slices.append(x)
    return slices


def columns_of_file(
    files: Any, path: str, leaves: Sequence[tuple[int, int, int]]
) -> dict[int, np.ndarray]:
    """Read slices of some groups from a file, with their coordinates along one axis.

    `leaves` are `(position of an array in the file, d, number of axes of t)` for slices
    `[*s, *t]` of d coordinates of the shape `s`. The dict has by position arrays
    `[k, d, *t]`.
    """
    arrays = read(files, path)
    return {
        leaf: arrays[leaf].reshape(
            len(arrays[leaf]), number, *arrays[leaf].shape[arrays[leaf].ndim - axes :]
        )
        for leaf, number, axes in leaves
    }
