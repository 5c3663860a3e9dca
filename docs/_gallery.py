"""The gallery: a card and a page for each example that marks its algorithm.

A page has the docstring of the example, its algorithm, and what its command
wrote into `docs/gallery/NAME`: the table with the published numbers, and the
figure.
"""

import ast
import json
import textwrap
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
START, END = "# --8<-- [start:algorithm]\n", "# --8<-- [end:algorithm]\n"
PAGE = """# {title}

{text}

## The result

{measured}

Published: {paper}

**{about}**

{table}
{remarks}
![{about}]({name}/figure.png)

`python -m examples.{name} --output docs/gallery/{name}` made the table and the
figure in {seconds} s, {cpu_seconds} s of the CPU ({machine}, shared with other
work). † marks a published number that was not compared with the paper.

## The algorithm

~~~python
{algorithm}
~~~

## The whole file

~~~python title="examples/{name}.py"
{code}~~~
"""
CARD = """## [{title}](gallery/{name}.md)

[![{about}](gallery/{name}/figure.png){{ width=480 }}](gallery/{name}.md)

{measured}

Published: {paper}

`python -m examples.{name}`
"""


def on_files(files, config):
    for uri in _uris(config["nav"]):
        page = PAGE.format(**_read(Path(uri).stem))
        files.append(File.generated(config, uri, content=page))
    return files


def on_page_markdown(markdown, page, config, files):
    cards = [
        CARD.format(**_read(Path(uri).stem)) for uri in _uris(config["nav"])
    ]
    table = (ROOT / "docs" / "gallery" / "lines.md").read_text()
    return markdown.replace("<!-- the cards -->", "\n".join(cards)).replace(
        "<!-- the lines -->", table
    )


def _uris(nav) -> list[str]:
    """The pages of the gallery in their order, from the site's navigation."""
    if isinstance(nav, str):
        return [nav] if nav.startswith("gallery/") else []
    return sum(
        map(_uris, nav.values() if isinstance(nav, dict) else nav), []
    )


def _read(name: str) -> dict:
    """What stands on the page of an example and on its card."""
    code = (ROOT / "examples" / f"{name}.py").read_text()
    title, text = (ast.get_docstring(ast.parse(code)) or "").split("\n", 1)
    file = ROOT / "docs" / "gallery" / name / "results.json"
    results = json.loads(file.read_text())
    columns = results["columns"]
    lines = [
        columns,
        ["---"] + ["---:"] * (len(columns) - 1),
        *results["table"],
    ]
    return results | {
        "about": results["title"],
        "algorithm": textwrap.dedent(
            code.split(START)[1].split(END)[0]
        ).strip(),
        "code": code,
        "name": name,
        "remarks": "".join(f"* {x}\n" for x in results["remarks"]),
        "table": "".join(f"| {' | '.join(map(str, x))} |\n" for x in lines),
        "text": text.strip(),
        "title": title.rstrip("."),
    }
