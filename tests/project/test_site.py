"""The pages of the site: what can be checked without building it.

The build checks the rest: it executes all code, and each warning is an error.

Covers: docs.
"""

import ast
import contextlib
import importlib
import inspect
import json
import re
import runpy
from pathlib import Path

from markdown_it import MarkdownIt

import drjax
from drjax import plan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if not (path.parent / path.stem / "results.json").exists()  # generated
}
API = "\n".join(text for name, text in PAGES.items() if name.startswith("api/"))
ENTRIES = re.findall(r"^\.\. auto\w+:: ([\w.]+)", API, re.M)
ENGINES = [p.parent.name for p in (ROOT / "drjax" / "engines").glob("*/adapter.py")]
BACKENDS = ("reference", "xla", *ENGINES)
INTERNAL = {"Exported", "Record"}  # a protocol of the planner, the base of all records
CODE = re.compile(r"^(`{3,}|:{3,}).*?^\1$", re.M | re.S)
PART = re.compile(r"^<!-- part: .*?^<!-- end of part -->$", re.M | re.S)
INCLUDED = re.compile(r"```\{(?:literal)?include\} (\S+)")
WORDS = 1500  # of a page but the API
COLUMNS = 6  # of a table


def _definition(name: str) -> tuple[str, str]:
    """The file and the name of a function or class, by the name that users import."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    return inspect.getsourcefile(value) or "", value.__qualname__


def _docstring(name: str) -> str:
    """Of an entry, whose module may need an engine."""
    path = ROOT / (name.rpartition(".")[0].replace(".", "/") + ".py")
    # Where it is defined, unless that needs an engine.
    if not path.exists() or f"class {name.rpartition('.')[2]}" not in path.read_text():
        with contextlib.suppress(ImportError):
            path = Path(_definition(name)[0])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name == name.rpartition(".")[2]:
                return ast.get_docstring(node) or ""
    return ""


def test_public_names_have_an_entry():
    names = [f"drjax.{n}" for n, x in vars(drjax).items() if callable(x)]
    names += [f"drjax.plan.{n}" for n, x in vars(plan).items() if inspect.isclass(x)]
    names += [f"drjax.backends.{n}" for n in drjax.backends._LAZY]
    names += [f"drjax.backends.{n}.compile" for n in BACKENDS]
    public = {
        _definition(name)
        for name in names
        if not name.rpartition(".")[2].startswith("_")
    }
    public = {x for x in public if "drjax" in x[0] and x[1] not in INTERNAL}
    needs_beam = {x for x in ENTRIES if x.endswith("MapReduce")}
    documented = {_definition(name) for name in ENTRIES if name not in needs_beam}
    assert bool(needs_beam) == ("beam" in ENGINES)
    assert not (missing := public - documented), missing
    assert len(ENTRIES) == len(set(ENTRIES))


def test_raises_names_errors():
    """Else an entry has a sentence in the place of an error's name."""
    for name in ENTRIES:
        sections = re.findall(r"^Raises:\n((?: .*\n?)+)", f"{_docstring(name)}\n", re.M)
        for line in re.findall(r"^  (\S.*)", "".join(sections), re.M):
            assert re.match(r"\w+Error(, \w+Error)*: ", line), (name, line)


def test_properties_have_no_colon():
    """Else an entry has the words before it as the type."""
    seen = 0
    for path in sorted((ROOT / "drjax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                if "property" in " ".join(map(ast.unparse, node.decorator_list)):
                    first = (ast.get_docstring(node) or "").split("\n")[0]
                    assert ": " not in first, (path, node.name)
                    seen += 1
    assert seen > 20


def test_pages_are_whole():
    for name, text in PAGES.items():
        assert "{{" not in text, name
        for target in INCLUDED.findall(text):
            assert ((DOCS / name).parent / target).exists(), (name, target)
        # What is not executed needs an engine, whose tests run it, or is in a file.
        shown = PART.sub("", text)
        assert not re.findall(r"^```python$", shown, re.M), name
        if "```{code-cell}" in text:
            assert "format_name: myst" in text.split("---\n")[1], name


def test_pages_run_in_a_bare_process():
    """Their first cell asks for devices, and tutorials import nothing of a checkout."""
    for name, text in PAGES.items():
        cells = re.findall(r"^```\{code-cell\}.*?\n(.*?)^```", text, re.M | re.S)
        code = "\n".join(cells)
        if "jax.make_mesh(" in code and "%%writefile" not in code:
            assert '("jax_num_cpu_devices", 8)' in cells[0], name
        for cell in cells:  # an error is one long line
            assert "print(error" not in cell or "tags: [wrap]" in cell, (name, cell)
        if name.startswith("tutorials/"):
            imported = re.findall(r"^\s*(?:from|import) (\w+)", code, re.M)
            assert not {"benchmarks", "examples", "experiments"} & {*imported}, name


def test_the_first_page_has_the_program_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    assert f"```{{code-cell}}\n{program}```" in PAGES["index.md"]


def test_parts_of_files_that_pages_include_exist():
    directive = re.compile(r"```\{(?:literal)?include\} (\S+)\n((?::.*\n)*)")
    option = re.compile(r"^:(?:start|end)-(?:after|at|before): (['\"]?)(.+)\1$", re.M)
    parts = [
        ((DOCS / name).parent / file, text)
        for name, page in PAGES.items()
        for file, options in directive.findall(page)
        for _, text in option.findall(options)
    ]
    assert parts
    assert not [(file, text) for file, text in parts if text not in file.read_text()]


def test_pages_are_short():
    for name, text in PAGES.items():
        prose = re.sub(r"^\|.*", "", CODE.sub("", PART.sub("", text)), flags=re.M)
        assert name.startswith("api/") or len(prose.split()) <= WORDS, name


def test_tables_fit_a_page():
    for name, text in PAGES.items():
        included = [x for x in INCLUDED.findall(text) if x.endswith(".md")]
        text += "".join(((DOCS / name).parent / x).read_text() for x in included)
        for line in re.findall(r"^\|.*\|$", text, re.M):
            assert len(re.findall(r"(?<!\\)\|", line)) <= COLUMNS + 1, (name, line)
    for path in DOCS.glob("gallery/*/results.json"):
        assert len(json.loads(path.read_text())["columns"]) <= COLUMNS, path


def _anchors(text: str) -> set[str]:
    """The anchors of headings, as MyST makes them, and those that a page names."""
    titles = re.findall(r"^#+ (.*)", CODE.sub("", text), re.M)
    slugs = (re.sub(r"[^\w\- ]", "", x.strip().lower()) for x in titles)
    named = re.findall(r"^\((.+)\)=$", text, re.M)
    return {*(x.replace(" ", "-") for x in slugs), *named}


def test_anchors_exist():
    for name, text in PAGES.items():
        for page, anchor in re.findall(r"\]\((?!http)([^)\s#]*)#([^)\s]+)\)", text):
            path = (DOCS / name).parent / page if page else DOCS / name
            assert anchor in _anchors(path.read_text()), (name, page, anchor)


# ---------------------------------------------------------------------------------
# Pages without the site: as plain Markdown

MARKDOWN = MarkdownIt("commonmark").enable("table")
RAW = re.compile(
    r"\{(?:include|toctree|literalinclude|table|grid|width|image)\b|:::|^\(.+\)=$", re.M
)
NEEDS_BUILD = {"docs/api"}  # written from docstrings


def test_contents_name_each_page_of_a_section():
    """Where they name pages, and do not follow the links of the section's page."""
    tree = ast.parse((DOCS / "conf.py").read_text())
    (contents,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTENTS"
    )
    sections = [x for x in contents if x.endswith("/index") and "*" not in contents[x]]
    named = [x for x in sections if contents[x] and "/" not in contents[x]]
    assert "engines/index" in named
    for section in named:
        pages = {path.stem for path in (DOCS / section).parent.glob("*.md")}
        assert pages - {"index"} == {*contents[section].split()}, section


def test_generated_parts_are_what_generates_them():
    written = runpy.run_path(str(DOCS / "write_pages.py"))["pages"]()
    assert len(written) > 25
    for path, text in written.items():
        assert path.read_text() == text, f"python docs/write_pages.py: {path}"


def _links(path: Path) -> list[str]:
    """What a page links to and shows, if it is rendered as plain Markdown."""
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.S)
    tokens = MARKDOWN.parse(text)
    inline = [x for token in tokens for x in token.children or ()]
    targets = [x.attrs.get("href", x.attrs.get("src")) for x in [*tokens, *inline]]
    return [str(x) for x in targets if x is not None]


def _linked_pages(path: Path) -> set[Path]:
    """The Markdown files that a page links to."""
    targets = (x.partition("#")[0] for x in _links(path) if not x.startswith("http"))
    paths = {(path.parent / x).resolve() for x in targets if x.endswith(".md")}
    return {x for x in paths if x.exists()}


def _shown(path: Path) -> str:
    """The words of a page as plain Markdown, and the languages of its code."""
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.S)
    tokens = MARKDOWN.parse(text)
    shown = [
        x.info if x.type == "fence" else x.content for x in tokens if not x.children
    ]
    inline = [x for token in tokens for x in token.children or ()]
    return "\n".join(shown + [x.content for x in inline if x.type == "text"])


def test_pages_behind_the_readme_need_no_build():
    readme = ROOT / "README.md"
    first = {readme, *_linked_pages(readme)}
    pages = first | {x for page in first for x in _linked_pages(page)}
    assert len(first) > 12 and len(pages) > 50
    for page in sorted(pages):
        name = page.relative_to(ROOT).as_posix()
        for link in _links(page):
            target, _, anchor = link.partition("#")
            if not target.startswith(("http", "mailto:")):
                path = (page.parent / target).resolve() if target else page
                assert path.exists() and path.is_relative_to(ROOT), (name, link)
                if anchor and path.suffix == ".md":
                    assert anchor in _anchors(path.read_text()), (name, link)
        if page.parent.relative_to(ROOT).as_posix() not in NEEDS_BUILD:
            shown = _shown(page)
            assert not (raw := RAW.search(shown)), (name, raw)
            assert len(shown.split()) > 20, name
