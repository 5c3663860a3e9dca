"""What the site adds to MkDocs: runs code, brings in what pages point to.

Every block that starts with ```` ```python ```` is executed, page by page, and
what it prints is shown below it; an error fails the build. (Blocks of
```` ```python ray ```` need an engine; the tests of that engine run them.)
`{{ file }}` is the Markdown of a file of the project, or a Python file;
`{{ file:name }}` a function or class of one. Links to files of the project lead
to pages that show them. A public name without an entry on an API page fails the
build.
"""

import ast
import os
import re
import sys
import textwrap
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TQDM_DISABLE", "1")

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(
    r"(!?\[[^\]]*\])\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)"
)
SHOWN = "source"  # the folder of pages that show files


def on_startup(command, dirty) -> None:
    sys.path[:0] = [str(ROOT), str(DOCS)]
    os.chdir(ROOT)


def on_files(files, config):
    """Pages for the files of the project that pages link to."""
    for source in [f for f in files if f.src_uri.endswith(".md")]:
        text = _included(Path(source.abs_src_path).read_text())
        for target in _outside(text, DOCS / source.src_uri):
            uri = _page_of(target)
            if files.get_file_from_path(uri) is None:
                files.append(
                    File.generated(config, uri, content=_shown(target))
                )
    return files


def on_page_markdown(markdown, page, config, files):
    path = DOCS / page.file.src_uri
    if page.file.src_uri.startswith(SHOWN + "/"):
        return markdown
    markdown = _included(markdown)
    up = "../" * page.file.src_uri.count("/")

    def to_page(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        if (inside := _inside(target)) is not None:
            return f"{text}({up}{inside}{anchor})"
        if (resolved := _resolve(target, path)) is None:
            return match[0]
        return f"{text}({up}{_page_of(resolved)})"

    markdown = LINK.sub(to_page, markdown)

    def executed(match):
        result = 'result="text" ' if "print(" in match[1] else ""
        head = f'```python exec="1" source="above" {result}session="{path.stem}"\n'
        return head + match[1]

    markdown = re.sub(
        r"```python\n(.*?\n```)", executed, markdown, flags=re.S
    )
    return re.sub(r"```python \w+\n", "```python\n", markdown)


def on_post_build(config) -> None:
    """Public names that no page of the API documents."""
    import drjax

    pages = "".join(p.read_text() for p in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"^::: ([\w.]+)$", pages, re.M))
    names = [
        n for n, x in vars(drjax).items() if n[0] != "_" and callable(x)
    ]
    if missing := [n for n in names if f"drjax.{n}" not in documented]:
        raise PluginError(
            f"Public names without an entry in docs/api: {missing}"
        )


def _included(text: str) -> str:
    def resolved(match: re.Match) -> str:
        path, name = match.groups()
        text = (ROOT / path).read_text()
        if name is not None:
            return _definition(text, path, name)
        return text if path.endswith(".md") else _fenced(text, path)

    return re.sub(r"\{\{ ([\w./]+)(?::(\w+))? \}\}", resolved, text)


def _definition(text: str, path: str, name: str) -> str:
    """A function or class, wherever it stands in a file, as Markdown."""
    defined = (ast.FunctionDef, ast.ClassDef)
    (node,) = (
        x
        for x in ast.walk(ast.parse(text))
        if isinstance(x, defined) and x.name == name
    )
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = textwrap.dedent(
        "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    )
    return _fenced(lines, path)


def _fenced(text: str, path: str) -> str:
    return f'~~~python title="{path}"\n{text.strip()}\n~~~'


def _inside(target: str) -> str | None:
    """Of a link in the README, which is a page of the site, the page's own name."""
    name = target.removeprefix("docs/")
    return name if name != target and (DOCS / name).exists() else None


def _resolve(target: str, page: Path) -> Path | None:
    """The file or folder outside of the site that a link on a page leads to."""
    if "{{" in target or _inside(target) is not None:
        return None
    for base in (page.parent, ROOT):  # ROOT: in text of the README
        resolved = (base / target).resolve()
        if resolved.exists() and resolved.is_relative_to(ROOT):
            return None if resolved.is_relative_to(DOCS) else resolved
    return None


def _outside(text: str, page: Path) -> list[Path]:
    resolved = [_resolve(m[2], page) for m in LINK.finditer(text)]
    return [path for path in resolved if path is not None]


def _page_of(path: Path) -> str:
    return f"{SHOWN}/{path.relative_to(ROOT).as_posix()}.md"


def _shown(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        names = sorted(
            p.relative_to(path).as_posix() for p in path.rglob("*.*")
        )
        listed = [n for n in names if "__pycache__" not in n]
        return head + "".join(f"* `{n}`\n" for n in listed)
    text = path.read_text()
    if path.suffix == ".md":
        text = LINK.sub(r"\1", re.sub(r"^# .*\n", "", text, count=1))
        return head + text
    language = {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
    return f"{head}~~~~~~{language}\n{text}\n~~~~~~\n"
