"""The site: all code on its pages is executed, and each warning is an error.

    python -m sphinx -W --keep-going -j 2 docs runs/site

With `-D nb_execution_mode=off` no code is executed.
Each page reads as plain Markdown, too: docs/write_pages.py writes what is generated
into the pages, and the contents of a section are here.
"""

import ast
import html
import json
import os
import re
import runpy
import sys
import textwrap
import tomllib
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import jupytext
from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
COLAB = (
    PROJECT["urls"]["Notebooks"]
    .replace("https://", "https://colab.research.google.com/")
    .replace("google.com/github.com", "google.com/github")
)
WRITE_PAGES = runpy.run_path(str(DOCS / "write_pages.py"))
ALGORITHMS = {  # of a page of the gallery
    f"gallery/{path.stem}": WRITE_PAGES["algorithms"](path.read_text())
    for path in WRITE_PAGES["reproductions"]()
}

sys.path.insert(0, str(ROOT))
os.environ |= {  # of the kernels
    "IPYKERNEL_CELL_NAME": "cell.py",  # in errors, instead of a temporary path
    "PYTHONPATH": str(ROOT),  # for `examples`
    "JAX_PLATFORMS": "cpu",
    "TQDM_DISABLE": "1",
}

project, version = PROJECT["name"], PROJECT["version"]
author = copyright = PROJECT["authors"][0]["name"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_sitemap",
]
exclude_patterns = [
    "experiments/*.md",
    "gallery/lines.md",
]  # parts of pages

# Pages
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 900  # of a cell, on a busy machine
nb_merge_streams = True

# API
default_role = "code"  # `x` in docstrings
smartquotes_action = "De"  # not quotes: of strings in docstrings
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!drjax\.[a-z_]*$).*")]
add_module_names = False
autodoc_mock_imports = ["apache_beam"]  # of a base class
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autosummary_generate = False  # tables only: entries are on the pages
napoleon_custom_sections = [("Attributes", "params_style")]  # no entries of their own
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 70

# HTML
templates_path = ["templates"]
html_theme = "pydata_sphinx_theme"
html_title = f"drjax {version}"
html_baseurl = PROJECT["urls"]["Documentation"]
html_static_path = ["style.css", "images/favicon.svg", "images/social.png"]
html_favicon = "images/favicon.svg"
html_css_files = ["style.css"]
html_context = {  # a page of the gallery is edited in its reproduction
    "notebooks": [
        path.relative_to(DOCS).with_suffix("").as_posix()
        for path in DOCS.rglob("*.md")
        if path != DOCS / "index.md" and "```{code-cell}" in path.read_text()
    ],
    "algorithms": ALGORITHMS,
    "colab": COLAB,
    "edit_page_provider_name": "GitHub",
    "edit_page_url_template": REPOSITORY + "/edit/main/"
    "{% if 'gallery/' in file_name and 'index' not in file_name %}"
    "{{ file_name | replace('gallery/', 'examples/reproductions/')"
    " | replace('.md', '.py') }}"
    "{% else %}docs/{{ file_name }}{% endif %}",
}
VERSIONS = {version: ""}  # of the site that are kept, and where below its address
html_theme_options = {
    "logo": {
        "text": project,
        "image_light": "images/favicon.svg",
        "image_dark": "images/favicon.svg",
    },
    "github_url": REPOSITORY,
    "header_links_before_dropdown": 8,
    "navbar_start": ["navbar-logo", "version-switcher"],
    "switcher": {
        "json_url": urljoin(html_baseurl, "switcher.json"),
        "version_match": version,
    },
    "check_switcher": False,  # it is written by the build
    "use_edit_page_button": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": "page-toc notebook edit-this-page sourcelink".split(),
}
sitemap_url_scheme, sitemap_show_lastmod = "{link}", False
sitemap_excludes = ["404.html", "search.html", "genindex.html", "_modules/*"]

# The pages of a section, as a table of contents; those of the gallery, and those that
# are not named, follow the links of the section's page.
CONTENTS = {
    "api/index": "programs blocks plans backends primitives contrib errors",
    "engines/index": "ray beam flower secure_sums data failures observing "
    "where_it_ends",
    "experiments": "experiments_tables experiments_collectives",
    "benchmarks": "experiments",
    "explanation/index": "/concepts /glossary /plans /plan_files /sharp_edges *",
    "gallery/index": "*",
    "get_started/index": "/coming_from /versions changelog",
    "howto/index": "",
    "plan_files": "plan_file_format",
    "plans": "plan_examples",
    "tutorials/index": "",
}


# The words that people search for, and the page that they mean: the first there is.
SEARCHED = {
    word: next(page for page in pages if (DOCS / f"{page}.md").exists())
    for word, pages in json.loads((DOCS / "search.json").read_text()).items()
}


CARD = re.compile(
    r"### \[(?P<title>.+)\]\((?P<page>\w+)\.md\)\n\n"
    r"!\[(?P<about>.+)\]\((?P<figure>.+)\)\n\n"
    r"(?:\*(?P<badge>[\w ]+)\* · )?(?P<result>.+)\n\n"
)
COLORS = {"no published number": "secondary", "order reached": "info"}


def as_card(match: re.Match) -> str:
    """An example of the gallery, with its badge."""
    badge = match["badge"]
    shown = f"{{bdg-{COLORS.get(badge, 'success')}}}`{badge}`\n\n" if badge else ""
    return (
        f":::{{grid-item-card}} {match['title']}\n:img-top: {match['figure']}\n"
        f":img-alt: {match['about']}\n:link: {match['page']}\n:link-type: doc\n\n"
        f"{shown}{match['result']}\n:::\n"
    )


def as_grid(text: str) -> str:
    """The examples of a group side by side; the page has one below another."""
    cards = re.sub(r"\?P<\w+>", "?:", CARD.pattern)
    return re.sub(
        f"(?:{cards})+",
        lambda x: (
            f"::::{{grid}} 1 2 2 2\n:gutter: 3\n\n{CARD.sub(as_card, x[0])}::::\n\n"
        ),
        text,
    )


def gallery_contents(text: str) -> dict[str, list[str]]:
    """The pages of each group, with the first words of their titles."""
    return {
        part.split("\n")[0]: [
            f"{card['title'].split(':')[0]} <{card['page']}>" for card in cards
        ]
        for part in re.split("^## ", text, flags=re.M)[1:]
        if (cards := [*CARD.finditer(part)])
    }


def entry_tables(text: str) -> str:
    """The pages of the API, each with its entries and their first sentences."""

    def section(match) -> str:
        page = (DOCS / "api" / match[2]).read_text()
        entries = re.findall(r"^\.\. auto\w+:: ([\w.]+)", page, re.M)
        shown = [x if x.endswith(".compile") else f"~{x}" for x in entries]
        names = "\n".join(f"   {name}" for name in shown)
        table = (
            f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{names}\n```\n"
        )
        return f"## [{match[1]}]({match[2]})\n\n{match[3]}\n\n{table if names else ''}"

    return re.sub(r"^\* \[(.+)\]\((.+)\): (.+)$", section, text, flags=re.M)


def add_contents(app, name, source) -> None:
    """Adds a table of contents to a section, and the whole file to an example.

    A figure is a link to its file, to zoom, as its width says.
    """
    if name != "gallery/index":
        figure = r"^(!\[.+\.png\))$"
        source[0] = re.sub(figure, r'\1{width="100%"}', source[0], flags=re.M)
    words = [word for word, page in SEARCHED.items() if page == name]
    if words:  # behind the title, where a result of the search leads
        entries = "".join(f"\n```{{index}} ! {word}\n```\n" for word in words)
        source[0] = re.sub(
            r"^(# .+\n)", rf"\1{entries}", source[0], count=1, flags=re.M
        )
    if name == "api/index":
        source[0] = entry_tables(source[0])
    if name in CONTENTS:
        linked = re.findall(r"^[*|] \[[^]]+\]\((.+?)\.md\)", source[0], re.M)
        tables = {"": CONTENTS[name].split() or linked}
        if name == "gallery/index":
            tables = gallery_contents(source[0])
            source[0] = as_grid(source[0])
        for caption, listed in tables.items():
            options = ":hidden:\n:glob:\n" + (
                f":caption: {caption}\n" if caption else ""
            )
            lines = "\n".join(listed)
            source[0] += f"\n```{{toctree}}\n{options}\n{lines}\n```\n"
    elif name.startswith("gallery/"):
        path = f"../../examples/reproductions/{name.removeprefix('gallery/')}.py"
        code = f"```{{literalinclude}} {path}\n```"
        source[0] += f"\n````{{dropdown}} The whole reproduction\n{code}\n````\n"


def address(page: str, target: str) -> str | None:
    """Of a file that a page links to, in the repository; None of pages and anchors."""
    path = (DOCS / page).parent.joinpath(target).resolve()
    if page == "index" and (ROOT / target).is_file():
        path = ROOT / target  # of README.md, a part of which is included
    path = path if path.exists() else path.with_name(f"{path.name}.md")
    if path.is_relative_to(DOCS) and path.suffix not in (".svg", ".png"):
        return None
    kind = "raw" if path.suffix in (".svg", ".png") else "blob"
    inside = path.is_relative_to(ROOT)
    return f"{REPOSITORY}/{kind}/main/{path.relative_to(ROOT)}" if inside else None


def link_to_repository(app, doctree) -> None:
    """Links to files outside of docs/ lead to the repository."""
    links = lambda x: isinstance(x, download_reference | pending_xref)
    for node in [*doctree.findall(links)]:
        if uri := address(app.env.docname, node["reftarget"]):
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri))


def fix_docstring(app, what, name, obj, options, lines) -> None:
    """Links and plurals of Markdown; what is returned is described, without a type."""
    for i, line in enumerate(lines):
        line = re.sub(r"(`[\w.]+`)(?=\w)", r"\1\\ ", line)  # `Value`s
        lines[i] = re.sub(r"\[([^]]+)\]\((http\S+?)\)", r"`\1 <\2>`__", line)
        if i and lines[i - 1].strip() == "Returns:":
            lines[i] = re.sub(r"^(\s*)", r"\1: ", lines[i])


def first_words(doctree) -> str:
    """Of a page's text, without markup, for search engines and `llms.txt`."""
    for node in doctree.findall(nodes.paragraph) if doctree else ():
        if isinstance(node.parent, nodes.section):
            return textwrap.shorten(node.astext().rstrip(":"), 160, placeholder=" …")
    return PROJECT["description"]


def pages_below(app, page: str) -> list[str]:
    """A page and those of its table of contents, in their order."""
    below = app.env.toctree_includes.get(page, [])
    return [page, *(x for name in below for x in pages_below(app, name))]


def describe(app, page, template, context, doctree) -> None:
    """What search engines and messengers show of a page."""
    if page not in app.env.found_docs:
        return
    about = PROJECT["description"] if page == "index" else first_words(doctree)
    tags = {
        'name="description"': about,
        'name="twitter:card"': "summary_large_image",
        'property="og:title"': app.env.titles[page].astext(),
        'property="og:description"': about,
        'property="og:type"': "website",
        'property="og:url"': urljoin(html_baseurl, f"{page}.html"),
        'property="og:image"': urljoin(html_baseurl, "_static/social.png"),
        'property="og:site_name"': project,
    }
    if page == "404":  # shown at any address: its links are from the site's start
        context["metatags"] += f'<base href="{urlsplit(html_baseurl).path}">\n'
    context["metatags"] += "".join(
        f'<meta {name} content="{html.escape(text)}">\n' for name, text in tags.items()
    )


def break_names(app, page, template, context, doctree) -> None:
    """Long names in code may break, on a phone, behind a dot or an underscore."""

    def long_word(match: re.Match) -> str:
        if len(html.unescape(match[1])) < 26:
            return match[0]
        word = re.sub(r"(?<=[._(])(?=\w)", "<wbr>", match[1])
        return f'<span class="pre long">{word}</span>'

    words = r'<span class="pre">([^<]+)</span>'
    context["body"] = re.sub(words, long_word, context.get("body", ""))


def write_indexes(app, exception) -> None:
    """The versions of the site, and `llms.txt`: its pages, for language models."""
    if exception is not None:
        return
    versions = [
        {"version": name, "url": urljoin(html_baseurl, place)}
        for name, place in VERSIONS.items()
    ]
    versions[0]["preferred"] = True
    Path(app.outdir, "switcher.json").write_text(json.dumps(versions, indent=1))
    parts = [f"# {project}", f"> {PROJECT['description']}.", f"Source: {REPOSITORY}"]
    for section in app.env.toctree_includes["index"]:
        parts.append(f"## {app.env.titles[section].astext()}")
        lines = []
        for page in pages_below(app, section):
            source = urljoin(html_baseurl, f"_sources/{page}.md.txt")
            about = first_words(app.env.get_doctree(page))
            lines.append(f"* [{app.env.titles[page].astext()}]({source}): {about}")
        parts.append("\n".join(lines))
    Path(app.outdir, "llms.txt").write_text("\n\n".join(parts) + "\n")


ON_COLAB = f"""import sys

if "google.colab" in sys.modules:
    !git clone --quiet --depth 1 {REPOSITORY} repository
    %cd repository
    %pip install --quiet '.[examples]'
"""


def write_notebook(app, name: str, notebook) -> None:
    """A notebook next to the HTML; on Colab its first cell installs the package."""
    install = jupytext.reads(f"# %%\n{ON_COLAB}", fmt="py:percent").cells[0]
    install.source = ON_COLAB.rstrip()
    first = next(i for i, x in enumerate(notebook.cells) if x.cell_type == "code")
    notebook.cells.insert(first, install)
    path = Path(app.outdir, f"{name}.ipynb")
    path.parent.mkdir(exist_ok=True)
    jupytext.write(notebook, path)


def write_notebooks(app, exception) -> None:
    """Each page with code as a notebook, with links to the site, and each algorithm."""

    def link(match) -> str:
        site = urljoin(html_baseurl + page, match[1]).replace(".md", ".html")
        return f"]({address(page, match[1]) or site}"

    if exception is not None:
        return
    for page in html_context["notebooks"]:
        text = Path(app.env.doc2path(page)).read_text()
        text = re.sub(
            r"```\{literalinclude\} (.*)\n(?::.*\n)+```", r"[The code](\1)", text
        )
        text = re.sub(r"\]\((?!http|#)([^)\s]+)", link, text)
        write_notebook(app, page, jupytext.reads(text, fmt="md:myst"))
    for name in sum(ALGORITHMS.values(), []):
        code = (ROOT / f"examples/algorithms/{name}.py").read_text()
        about = ast.get_docstring(ast.parse(code)) or ""
        code = code.split('"""', 2)[2].strip()
        title, _, about = about.partition("\n")
        text = f"# %% [markdown]\n# # {title}\n#\n" + re.sub(
            "^", "# ", about, flags=re.M
        )
        notebook = jupytext.reads(f"{text}\n\n# %%\n{code}\n", fmt="py:percent")
        write_notebook(app, f"algorithms/{name}", notebook)


def setup(app) -> None:
    app.connect("source-read", add_contents)
    app.connect("doctree-read", link_to_repository)
    app.connect("autodoc-process-docstring", fix_docstring, priority=400)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", break_names)
    app.connect("build-finished", write_indexes)
    app.connect("build-finished", write_notebooks)
