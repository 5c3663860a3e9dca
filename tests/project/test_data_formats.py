"""The page on data formats: each section gives the same examples of the same clients.

A section whose package is not installed is skipped; the extra `howto` has them all.

Covers: docs/howto/data_formats.md.
"""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "data_formats.md"


def _sections() -> dict[str, str]:
    """The code of each section, without tags, by its title."""
    texts = re.split(r"^#+ (.*)\n", PAGE.read_text(), flags=re.M)[1:]
    cell = r"^```\{code-cell\}\n(?::[^\n]*\n)*(.*?)^```"
    code = ["\n".join(re.findall(cell, text, re.M | re.S)) for text in texts[1::2]]
    return dict(zip(texts[::2], code, strict=True))


SECTIONS = _sections()
(START, *FORMATS, ROUND) = SECTIONS


def _imported(code: str) -> set[str]:
    """The packages that it imports."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _run(*titles: str) -> dict:
    """What the code of these sections defines, after that of the first one."""
    scope = {}
    for title in (START, *titles):
        for package in sorted(_imported(SECTIONS[title])):
            pytest.importorskip(package, exc_type=ImportError)
        exec(compile(SECTIONS[title], title, "exec"), scope)
    return scope


# webdataset leaves tar files to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*tar:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file.*tar:ResourceWarning")
@pytest.mark.parametrize("title", FORMATS)
def test_a_format_gives_the_examples_of_each_client(title):
    scope = _run(title)
    for i, expected in enumerate(scope["own"]):
        client = scope["load"](i)
        assert client.keys() == expected.keys()
        for name, values in expected.items():
            assert client[name].dtype == np.float32
            np.testing.assert_array_equal(client[name], values)
    if "file" in scope:
        scope["file"].close()
    if "base" in scope:
        scope["base"].close()


def test_a_cohort_trains_on_what_was_loaded():
    scope = _run(FORMATS[-1], ROUND)
    np.testing.assert_allclose(scope["w"], 1, atol=0.01)


def test_the_table_has_each_format():
    table = re.findall(r"^\| \[.*?\]\(#(.*?)\)", PAGE.read_text(), re.M)
    slug = lambda title: re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    assert table == [slug(title) for title in FORMATS]
