"""The field's words, in code, messages and docs.

Covers: docs/glossary.md, drjax.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [
    *sorted((ROOT / "drjax").rglob("*.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "CONTRIBUTING.md",
    ROOT / "README.md",
]
# Not these words, but those: a reader finds code by searching for the word he knows.
WORDS = {
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again",
    r"written by hand|code by hand|loops? by hand": "hand-written",
    r"of nobody|of none": "if no group takes part",
    r"(is|are|be|each) (computed|made) again|computed again": "rematerialize",
    r"what travels": "communication, collectives, bytes",
    r"very values": "bitwise-observable",
    r"variance-tracking": "varying-manual-axes checking, check_vma",
    r"number of the group|group's number": "group index",
    r"flights?\b(?<!in-flight)(?<!in flight)": "in-flight task",
    r"carr(y|ies) the partition": "the partition is sharded over",
    r"(un)?packed\(": "to_bytes, from_bytes",
}
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


def _lines(path: Path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if "benchmarks/results" not in line and not line.startswith("| "):
            yield number, line


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_the_field_is_used(word):
    pattern = re.compile(rf"(?<![\w`])({word})", re.IGNORECASE)
    result = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in TEXTS
        for number, line in _lines(path)
        if pattern.search(line)
    ]
    assert not result, f"say {WORDS[word]}:\n" + "\n".join(result)


@pytest.mark.parametrize("word", SEARCHED)
def test_searching_for_a_word_finds_code(word):
    paths = sorted((ROOT / "drjax").rglob("*.py"))
    words = re.compile(word.replace(" ", r"[ _\n]"), re.IGNORECASE)
    assert any(
        words.search(path.name) or words.search(path.read_text()) for path in paths
    )


def test_the_glossary_is_short_and_in_order():
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+?) \|", text, re.M)[1:]
    assert len(terms) <= 40
    assert terms == sorted(terms, key=str.lower)
