"""The field's words, in code, comments, docstrings, errors and docs.

Three checks, over the package and everything else that people read: phrases that must
not occur in any line; names that must not be bound in Python code; and "row" for a
group's slice, which is allowed in files about tables and matrices.

Not checked, as a program cannot tell the private meaning of the word from its common
one: "at", "there", "here", "found", "made", "given", "said" and "where" in sentences;
"keep", "repeat", "session", "order", "finish", "report", "message", "form" and "note",
which JAX, Flower, pytest or plain English need too; "in place", which is NumPy's term;
and pairs that the glossary defines, as engine and backend, or round and step.

Covers: docs/glossary.md, drjax.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
FOLDERS = ("drjax", "docs", "tests", "benchmarks", "experiments", "examples", "configs")
TEXTS = [
    *sorted(ROOT.glob("*.md")),
    *(
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".md", ".toml") and path != Path(__file__)
    ),
]
CODE = [path for path in TEXTS if path.suffix == ".py"]
# Not these words, but those: a reader finds code by searching for the word he knows.
PHRASES = {
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again",
    r"by[ _-]hand": "hand-written shard_map, hand-written baseline",
    r"beside (itself|themselves)": "noise floor",
    r"beside": "the noun: layout, placement; with",
    r"(of|and|or|but) nobody|of none": "if no group takes part",
    r"(computed|made|derived) again|comput\w+ (it|them|these) again": "rematerialize",
    r"keep\w* (the |its |all )?residuals?": "save residuals",
    r"travel\w*": "communication, collectives, bytes",
    r"messages? (between|over) (the )?(devices|groups)": "collectives, communication",
    r"very values": "bitwise-observable",
    r"(is|are|be|was|were|been|not) published": "bitwise-observable",
    r"variance-tracking": "varying-manual-axes checking, check_vma",
    r"number of (the|a|its|that|this|each) group(?!s)": "group index",
    r"groups?('s|') (own )?numbers?(?= (is|in|of|as|,|\.|\())": "group index",
    r"group numbers?": "group index",
    r"flights?\b(?<!in-flight)(?<!in flight)": "in-flight task",
    r"carr(y|ies|ying) (a|the|its|this) (partition|groups)": "is sharded over",
    r"axis (that )?carr(y|ies)|carr(y|ies|ying) axis": "is sharded over, mapped to",
    r"(un)?packed\(": "to_bytes, from_bytes",
    r"structures? of (a |the )?jaxprs?": "structural (alpha-equivalent) hashing",
    r"what (some|a part) of the groups": "partial reduction",
    r"(one|batch|batched|per-group|row's?) form": "per-group or batched function",
    r"row rules?": "unbatching rule",
    r"end(s|ing)? in place": "reuse accumulator buffers, aliasing",
    r"levels? of (reduction|communication)s?": "round",
    r"\*\*_?where": "layout, params; `where` is a mask",
}
# Names of values, records and functions, without underscores around them.
NAMES = {
    "at": "the noun: position, location, key",
    "beside": "the noun: layout, placement",
    "found": "the noun: result, match",
    "given": "the noun: inputs, arguments",
    "here": "the noun: local, current",
    "made": "the noun: output, result",
    "said": "the noun: text, message",
    "there": "the noun: remote, other",
    "told": "the noun: settings, fields",
    "wanted": "expected",
    "ending": "reuse of accumulators",
    "endings": "reuse of accumulators",
    "flight": "task in flight",
    "flights": "tasks in flight",
    "form": "exported function",
    "forms": "exported functions",
    "in_place": "reuse of accumulators",
    "level": "round",
    "note": "entry, checkpoint, fingerprint",
    "notes": "entries, metadata",
    "packed": "to_bytes",
    "published": "bitwise-observable",
    "session": "generation, stage run",
    "unpacked": "from_bytes",
}
# Files about rows of tables, of matrices, or of pictures.
TABLES = (
    "benchmarks/",
    "configs/",
    "docs/benchmarks.md",
    "docs/engines/",
    "docs/extending/",
    "docs/gallery/analytics.md",  # which the site writes
    "docs/howto/data_formats.md",
    "docs/plan_file",
    "docs/sharp_edges.md",
    "docs/tutorials/model_parallel.md",
    "drjax/_error_texts.py",  # rows of data frames
    "drjax/_plan_file/encode.py",  # a key of the file format
    "drjax/_planner/unbatching/rules.py",  # row-major order
    "drjax/engines/slices/arrow_columns.py",
    "drjax/engines/slices/parquet.py",
    "drjax/engines/ray/dataset_rows.py",
    "drjax/engines/slices/rows_by_key.py",
    "examples/reproductions/analytics.py",
    "examples/common/",
    "examples/engines.py",
    "examples/reproductions/maml.py",
    "experiments/",
    "tests/engines/beam/test_beam.py",
    "tests/engines/slices/test_parquet.py",
    "tests/engines/ray/test_dataset_rows.py",
    "tests/engines/slices/test_rows_by_key.py",
    "tests/engines/ray/test_ray.py",
    "tests/helpers/cases.py",
    "tests/helpers/conformance.py",
    "tests/project/",
    "tests/sharding/test_large_models.py",
    "tests/sharding/test_tpu.py",
    "tests/test_storage.py",
)
# A reader who searches for these finds the code that does it.
SEARCHED = (
    "rematerialize",
    "liveness",
    "fixed point",
    "alias",
    "dispatch",
    "scheduler",
    "validate",
    "fingerprint",
    "symbolic zero",
    "unbatch",
    "donat",
)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _texts() -> list[tuple[str, str]]:
    """The name and the text of each file."""
    return [(_name(path), path.read_text()) for path in TEXTS]


@functools.cache
def _bound() -> list[tuple[str, str]]:
    """Where each name is bound in Python code, and the name without underscores."""
    return [
        (f"{_name(path)}:{line}", name.strip("_").lower())
        for path in CODE
        for name, line in _names(ast.parse(path.read_text()))
    ]


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_of_the_field_is_used(phrase):
    pattern = re.compile(rf"(?<![\w`])({phrase})(?!\w)", re.IGNORECASE)
    if phrase.endswith("("):
        pattern = re.compile(rf"(?<![\w`])({phrase})", re.IGNORECASE)
    lines = [
        f"{name}:{1 + text[: found.start()].count(chr(10))}: {found[0]}"
        for name, text in _texts()
        for found in pattern.finditer(text)
    ]
    assert not lines, f"say {PHRASES[phrase]}:\n" + "\n".join(lines)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_nouns(name):
    places = [place for place, bound in _bound() if bound == name]
    assert not places, f"instead of {name}, {NAMES[name]}:\n" + "\n".join(places)


ROW = re.compile(r"(?<![a-z])rows?(?![a-z])", re.IGNORECASE)


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text; of Python code, its comments and strings."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    strings = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, *strings):
            yield from enumerate(token.string.splitlines(), token.start[0])


def test_a_part_of_a_partitioned_value_is_a_slice():
    places = [place for place, name in _bound() if ROW.search(name)]
    for path in TEXTS:
        places += [f"{_name(path)}:{i}" for i, line in _prose(path) if ROW.search(line)]
    places = [place for place in places if not place.startswith(TABLES)]
    assert not places, "say slice:\n" + "\n".join(places)


@pytest.mark.parametrize("word", SEARCHED)
def test_searching_for_a_word_finds_code(word):
    paths = sorted((ROOT / "drjax").rglob("*.py"))
    words = re.compile(word.replace(" ", r"[ _\n]"), re.IGNORECASE)
    assert any(
        words.search(path.name) or words.search(path.read_text()) for path in paths
    )


def test_the_glossary_is_short_and_in_order():
    text = (ROOT / "docs" / "glossary.md").read_text()
    (entries,) = re.findall(r"```\{glossary\}\n(.*?)```", text, re.S)
    terms = re.findall(r"^(\w.*)\n  ", entries, re.M)
    assert "partition" in terms
    assert len(terms) <= 40
    assert terms == sorted(terms, key=str.lower)
