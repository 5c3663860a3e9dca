"""The pages of the site: what can be checked without building it.

The build checks the rest: it executes all code, and each warning is an error.

Covers: docs.
"""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import drjax
from drjax import plan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix(): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if not (path.parent / path.stem / "results.json").exists()  # written by the build
}
API = "\n".join(text for name, text in PAGES.items() if name.startswith("api/"))
ENTRIES = re.findall(r"^\.\. auto\w+:: ([\w.]+)", API, re.M)
BACKENDS = ("reference", "xla", "in_process", "ray", "beam", "flower")
INTERNAL = {"Exported"}  # a protocol of the planner
CODE = re.compile(r"^(`{3,}|:{3,}).*?^\1$", re.M | re.S)
INCLUDED = re.compile(r"```\{(?:literal)?include\} (\S+)")
WRITTEN = {"cards.txt"}  # by the build
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
    if not path.exists():
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
    assert needs_beam and not (missing := public - documented), missing
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
            path = (DOCS / name).parent / target
            assert path.exists() or path.name in WRITTEN, (name, target)
        # What is not executed needs an engine, whose tests run it.
        assert not re.findall(r"^```python$", text, re.M), name
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


def test_pages_are_short():
    for name, text in PAGES.items():
        prose = re.sub(r"^\|.*", "", CODE.sub("", text), flags=re.M)
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
