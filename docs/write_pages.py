"""The generated parts of pages, which stand in the pages: they read without the site.

    python docs/write_pages.py

A part of a page is between two comments, of which the first says what it is:

    <!-- part: ../benchmarks/results/summary.md offset=1 -->
    <!-- part: ../examples/plans.py object=plans -->
    <!-- part: cards -->
    <!-- part: results -->
    <!-- end of part -->

A file of Markdown is taken as it is, with headings that are deeper by `offset`, and
from behind the text `after`; code is fenced, and may be one `object` of a file. `cards`
are the reproductions, in groups, and `results` those of the benchmarks. The pages of
the gallery are written as a whole: the docstrings and the results of the reproductions,
and the algorithms that they import. A test compares all of it.
"""

import ast
import json
import re
import shlex
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
GROUPS = {  # of the gallery, in its order
    "Federated learning": "fedavg scaffold dp_fedavg personalization robust",
    "Meta-learning and hyperparameters": "self_tuning maml population sweep",
    "Large models": "diloco bandwidth hierarchical soups",
    "Statistics and inference": "analytics federated_sklearn mixture tempering",
    "Systems": "compression sharded_server gossip evolution",
}
PART = re.compile(
    r"^<!-- part: ([^\n]+) -->\n(?:.*?)^<!-- end of part -->$", re.M | re.S
)
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}


def reproductions() -> list[Path]:
    """The files of the reproductions."""
    files = (ROOT / "examples/reproductions").glob("*.py")
    return sorted(path for path in files if path.stem != "__init__")


def algorithms(code: str) -> list[str]:
    """The algorithms that a reproduction imports."""
    return [
        name.name
        for node in ast.parse(code).body
        if isinstance(node, ast.ImportFrom) and node.module == "examples.algorithms"
        for name in node.names
    ]


def algorithm_parts(code: str) -> list[str]:
    """The algorithms of a reproduction, as a part of its page."""
    parts = []
    for algorithm in algorithms(code):
        file = f"examples/algorithms/{algorithm}.py"
        parts.append(
            f"[{file}](../../{file}), `python -m examples.algorithms.{algorithm}`:"
        )
        parts.append(f"```python\n{(ROOT / file).read_text().strip()}\n```")
    return parts


def examples() -> dict[str, dict]:
    """What the gallery shows of each example."""
    shown = {}
    for path in reproductions():
        code = path.read_text()
        title, text = (ast.get_docstring(ast.parse(code)) or "").split("\n", 1)
        results = json.loads((DOCS / f"gallery/{path.stem}/results.json").read_text())
        shown[path.stem] = results | {
            "about": results["title"],
            "title": title.rstrip("."),
            "text": text.strip("\n"),
            "algorithm": algorithm_parts(code),
        }
    return shown


def table_line(cells) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def example_page(name: str, example: dict) -> str:
    """The page of an example in the gallery."""
    columns, table = example["columns"], example["table"]
    numbers = json.dumps(
        [example["paper"], table, example["remarks"]], ensure_ascii=False
    )
    parts = [
        f"# {example['title']}",
        example["text"],
        "## The result",
        *([f"**Verdict:** {example['verdict']}"] if example.get("verdict") else []),
        example["measured"],
        f"Published: {example['paper']}",
        "\n".join(f"* {remark}" for remark in example["remarks"]),
        f"**{example['about']}**",
        "\n".join(
            [table_line(columns), table_line(["---", *["---:"] * (len(columns) - 1)])]
            + [table_line(cells) for cells in table]
        ),
        f"![{example['about']}]({name}/figure.png)",
        f"`python -m examples.reproductions.{name} --output docs/gallery/{name}` "
        f"made the\ntable and the figure in {example['seconds']} s, "
        f"{example['cpu_seconds']} s of the CPU ({example['machine']}, shared with "
        "other\nwork)."
        + (
            " † marks a published number that was not compared with the paper, "
            "whose text was not within reach."
            if "†" in numbers
            else ""
        ),
        "## The algorithm",
        *example["algorithm"],
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def card(name: str, example: dict) -> str:
    """An example: its picture, how it compares, and its result in a sentence."""
    badge = f"*{example['badge']}* · " if example.get("badge") else ""
    return (
        f"### [{example['title']}]({name}.md)\n\n"
        f"![{example['about']}]({name}/card.png)\n\n{badge}{example['measured']}"
    )


def cards() -> str:
    """The examples in their groups, one below another."""
    shown = examples()
    parts = []
    for title, names in GROUPS.items():
        parts.append(f"## {title}")
        parts += [card(name, shown[name]) for name in names.split()]
    return "\n\n".join(parts)


def part(page: Path, source: str) -> str:
    """The text of a part."""
    if source == "cards":
        return cards()
    if source == "results":
        sys.path.insert(0, str(ROOT))
        from benchmarks import proofs

        return proofs.summary()
    target, *options = shlex.split(source)
    option = dict(x.split("=", 1) for x in options)
    path = page.parent / target
    text = path.read_text()
    if path.suffix != ".md":
        for node in ast.walk(ast.parse(text)) if "object" in option else ():
            if getattr(node, "name", None) == option["object"]:
                text = ast.get_source_segment(text, node) or ""
        return f"```{LANGUAGES[path.suffix]}\n{text.strip()}\n```"
    text = text.split(option.get("after", ""), 1)[1] if "after" in option else text
    deeper = "#" * int(option.get("offset", 0))
    return re.sub(r"^(?=#+ )", deeper, text, flags=re.M).strip()


def complete(page: Path, text: str) -> str:
    """A page with the present text of its parts."""
    return PART.sub(
        lambda x: (
            f"<!-- part: {x[1]} -->\n\n{part(page, x[1])}\n\n<!-- end of part -->"
        ),
        text,
    )


def pages() -> dict[Path, str]:
    """All pages with what is generated of them."""
    written = {
        DOCS / f"gallery/{name}.md": example_page(name, example)
        for name, example in examples().items()
    }
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        if PART.search(text):
            written[page] = complete(page, text)
    return written


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
