"""Real text, partitioned: Python modules, or articles by domain.

`load_stdlib` reads modules of Python 3.13.0's standard library, which the repository
has (`examples/data/`), so that a run does not depend on the Python that runs it: one
group is one top-level module or package. `load_articles` reads CCNews, whose groups are
web domains, as in Rush et al. 2024 (arXiv 2403.07128). The groups are as unequal as
real ones: modules have from about a hundred bytes to a hundred thousand. A *window* is
a run of bytes whose first byte is only context; all windows are stored at one shape,
and `lengths` says how many targets of each are real.

Everything here depends on the text and on its arguments, on nothing else: the order of
files, the held-out groups and the windows of a round are the same in every process.
"""

import collections
import hashlib
import math
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

VOCAB = 256
STDLIB = Path(__file__).parents[1] / "data" / "python-3.13.0.zip"
# Tests, and files that are made when Python is built or installed.
SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


class Module(NamedTuple):
    """One group: the name of a module or a domain and all of its text, as bytes."""

    name: str
    text: np.ndarray  # uint8 [bytes]


class Corpus(NamedTuple):
    """The groups to train on and the groups that training never sees."""

    train: list[Module]
    held_out: list[Module]


class Windows(NamedTuple):
    """Windows of text at one shape: `lengths` of the targets are real, then padding."""

    tokens: np.ndarray  # uint8 [..., length + 1]
    lengths: np.ndarray  # int32 [...]


def source_files(root: Path) -> dict[PurePosixPath, bytes]:
    """Reads the Python files of a folder or an archive of modules, in a fixed order."""
    if root.is_dir():
        paths = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
        read = lambda name: (root / name).read_bytes()
    else:
        archive = zipfile.ZipFile(root)
        paths, read = archive.namelist(), archive.read
    kept = [
        path
        for path in map(PurePosixPath, paths)
        if not SKIPPED_FOLDERS.intersection(path.parts)
        and not path.parts[0].startswith(SKIPPED_PREFIXES)
    ]
    kept.sort(key=lambda path: (path.parts[0], path.as_posix()))
    return {path: read(path.as_posix()) for path in kept}


def is_held_out(name: str) -> bool:
    """Says whether a group is held out: by its name, so one in ten on any machine."""
    return zlib.crc32(name.encode()) % 10 == 0


def load_stdlib(root: Path = STDLIB) -> Corpus:
    """Reads modules of the standard library: the same on every Python.

    Args:
        root: another folder or archive of modules and packages, such as the standard
            library of a Python.

    Returns:
        The modules with at least one target byte, each list in order of names.
    """
    modules = collections.defaultdict(list)
    for path, source in source_files(root).items():
        modules[path.parts[0]].append(source)
    corpus = Corpus([], [])
    for name, sources in modules.items():
        _add(corpus, name.removesuffix(".py"), b"\n".join(sources))
    return corpus


def sha256(root: Path = STDLIB) -> str:
    """Of the files that `load_stdlib` reads, one after the other.

    That of the repository's is `unzip -p examples/data/python-3.13.0.zip | sha256sum`.
    """
    return hashlib.sha256(b"".join(source_files(root).values())).hexdigest()


def load_articles(source: str, split: str = "train") -> Corpus:
    """Reads news articles, one group for each web domain.

    Args:
        source: a data set of the Hugging Face hub with the columns `domain` and
            `text`, as `"vblagoje/cc_news"` has them, or a file with these columns, with
            a suffix for its kind: `.jsonl`, `.json`, `.csv` or `.parquet`.
        split: which part of a data set of the hub.

    Returns:
        The domains with at least one target byte, each list in order of names; the
        articles of a domain in their order.

    Raises:
        ValueError: a column is not there, or a file is of another kind.
    """
    import datasets

    path = Path(source)
    if path.is_file():
        kind = {".jsonl": "json"}.get(path.suffix, path.suffix.removeprefix("."))
        if kind not in ("json", "csv", "parquet"):
            raise ValueError(f"{source} is no .jsonl, .json, .csv or .parquet file.")
        rows: Any = datasets.load_dataset(kind, data_files=source, split="train")
    else:
        rows = datasets.load_dataset(source, split=split)
    if missing := {"domain", "text"} - set(rows.column_names):
        raise ValueError(f"{source} has no column {' or '.join(sorted(missing))!r}.")
    articles = collections.defaultdict(list)
    for row in tqdm(rows.select_columns(["domain", "text"]), "articles", disable=None):
        articles[row["domain"] or ""].append(row["text"] or "")
    corpus = Corpus([], [])
    for domain in sorted(articles):
        _add(corpus, domain, "\n".join(articles[domain]).encode())
    return corpus


def _add(corpus: Corpus, name: str, text: bytes) -> None:
    """Puts a group where it belongs; one without a target byte nowhere."""
    if len(text) >= 2:
        part = corpus.held_out if is_held_out(name) else corpus.train
        part.append(Module(name, np.frombuffer(text, np.uint8)))


def cut(text: np.ndarray, count: int, length: int, rng: np.random.Generator) -> Windows:
    """Cuts a text at a random phase and takes `count` of its windows, shuffled.

    Every byte but the first is a target of exactly one window of the cut, so nothing
    is seen twice; a text with fewer windows leaves the rest of them empty.

    Returns:
        Windows with tokens [count, length + 1]; the empty ones are last.
    """
    phase = rng.integers(1, length + 1)
    starts = np.append(0, np.arange(phase, len(text) - 1, length))
    ends = np.append(starts[1:], len(text) - 1)
    tokens = np.zeros((count, length + 1), np.uint8)
    lengths = np.zeros(count, np.int32)
    for row, i in enumerate(rng.permutation(len(starts))[:count]):
        lengths[row] = ends[i] - starts[i]
        tokens[row, : lengths[row] + 1] = text[starts[i] : ends[i] + 1]
    return Windows(tokens, lengths)


def batches(
    text: np.ndarray, shape: tuple[int, ...], length: int, seed: int | Sequence[int]
) -> Windows:
    """Cuts a text into windows of a shape: tokens [*shape, length + 1]."""
    windows = cut(text, math.prod(shape), length, np.random.default_rng(seed))
    return Windows(*(x.reshape(*shape, *x.shape[1:]) for x in windows))


def stack(windows: Iterable[Windows]) -> Windows:
    """Stacks windows of one shape along a new first axis."""
    return Windows(*map(np.stack, zip(*windows, strict=True)))


def sample_round(
    modules: list[Module],
    key: tuple[int, int],
    groups: int,
    steps: int,
    batch: int,
    length: int,
) -> tuple[np.ndarray, Windows]:
    """Draws the groups of one round, and each group's windows from its own text.

    Args:
        key: (seed, round). With a module's index it is all that its windows depend on.

    Returns:
        The groups' indices into `modules`, [groups], and windows with tokens
        [groups, steps, batch, length + 1]. A short module fills its first steps.
    """
    cohort = np.random.default_rng(key).choice(len(modules), groups, replace=False)
    drawn = [
        cut(
            modules[i].text,
            steps * batch,
            length,
            np.random.default_rng((*key, int(i))),
        )
        for i in cohort
    ]
    shape = (groups, steps, batch)
    tokens, lengths = stack(drawn)
    return cohort, Windows(tokens.reshape(*shape, length + 1), lengths.reshape(shape))


def deal(sizes: list[int], parts: int) -> list[list[int]]:
    """Deals things of these sizes to parts of about the same size: indices for each.

    The largest first, each to the part that has the least so far.
    """
    dealt: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        part = totals.index(min(totals))
        dealt[part].append(i)
        totals[part] += sizes[i]
    return dealt


def deal_modules(modules: list[Module], parts: int) -> np.ndarray:
    """Deals whole modules to parts, and cuts these to one length: [parts, bytes]."""
    dealt = deal([len(module.text) for module in modules], parts)
    texts = [np.concatenate([modules[i].text for i in part]) for part in dealt]
    return np.stack([x[: min(map(len, texts))] for x in texts])


def cut_all(modules: list[Module], count: int, length: int) -> Windows:
    """Cuts up to `count` windows from each module: tokens [modules, count, length + 1].

    The same windows in every run, whatever its seed.
    """
    drawn = [
        cut(modules[i].text, count, length, np.random.default_rng(i))
        for i in range(len(modules))
    ]
    return stack(drawn)


def target_mask(lengths: np.ndarray, length: int) -> np.ndarray:
    """Marks the real targets: bool [..., length]."""
    return np.arange(length) < lengths[..., None]


class Bigram(NamedTuple):
    """A bigram model of bytes: log-probabilities [previous byte, next byte]."""

    log_probs: np.ndarray

    @staticmethod
    def fit(modules: list[Module]) -> "Bigram":
        """Counts all pairs; Witten-Bell interpolation with add-one unigrams.

        Source: Chen and Goodman 1999, "An empirical study of smoothing techniques for
        language modeling", section 2.5.
        """
        counts = np.zeros((VOCAB, VOCAB))
        for module in modules:
            pairs = module.text[:-1].astype(np.int64) * VOCAB + module.text[1:]
            counts += np.bincount(pairs, minlength=VOCAB**2).reshape(VOCAB, VOCAB)
        unigram = counts.sum(0) + 1
        unigram /= unigram.sum()
        kinds = np.count_nonzero(counts, axis=1)[:, None]
        total = counts.sum(1)[:, None] + kinds
        seen = (counts + kinds * unigram) / np.where(total > 0, total, 1)
        return Bigram(np.log(np.where(total > 0, seen, unigram)))

    def loss(self, windows: Windows) -> np.ndarray:
        """Returns the summed loss of each window's real targets, in nats: [...]."""
        tokens = windows.tokens
        mask = target_mask(windows.lengths, tokens.shape[-1] - 1)
        nats = -self.log_probs[tokens[..., :-1], tokens[..., 1:]]
        return np.sum(nats * mask, axis=-1)
