"""The shape of the project: layers, private imports, public names, documents.

Covers: drjax, README.md, CONTRIBUTING.md.
"""

import ast
import contextlib
import doctest
import functools
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import drjax

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "drjax"
CODE = [
    path
    for folder in ("drjax", "examples", "experiments", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

LAYERS = (
    {"_error_texts", "_errors", "_extras", "_partition", "_plan", "_storage", "plan"},
    {"_compat", "_context", "_jaxprs", "_pytree_paths"},
    {"_sharding"},
    {"_primitives", "primitives"},
    {"_api"},
    {"_planner"},
    {"_plan_file", "_drawing"},
    {"backends", "engines"},
    {"_lazy_names", "_jit", "compiled", "contrib", "__main__"},
)
BACKENDS = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for folder in ("backends", "engines")
    for path in (PACKAGE / folder).rglob("*.py")
    if "\ndef compile(" in path.read_text()
}
ENGINES = sorted(p.parent.name for p in (PACKAGE / "engines").glob("*/adapter.py"))
LAYER_OF = {name: i for i, names in enumerate(LAYERS) for name in names}


@functools.cache
def _imports(path: Path) -> set[str]:
    """Every module that a file imports, dotted."""
    imports, skipped = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        # What only type checkers import is no dependency of the code.
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped.update(map(id, ast.walk(node)))
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imports


def _modules() -> dict[str, set[str]]:
    """For each module of the package, dotted below it, the modules that it imports."""
    paths = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    imports = {}
    for name, path in paths.items():
        targets = {t.removeprefix("drjax.") for t in _imports(path)}
        imports[name] = {
            m for m in paths for t in targets if t == m or t.startswith(f"{m}.")
        }
    return imports


@pytest.mark.once
def test_imports_go_down_only():
    modules = _modules()
    assert {name.split(".")[0] for name in modules} == set(LAYER_OF), "no layer"
    for name, targets in modules.items():
        for target in targets:
            above, below = (LAYER_OF[x.split(".")[0]] for x in (name, target))
            assert below <= above, f"{name} imports {target}"
            # The public module of an engine is all that imports it.
            public = f"backends.{target.split('.')[1]}" if "." in target else ""
            if name.startswith(("backends.", "engines.")) and name != public:
                assert target not in BACKENDS, f"{name} imports {target}"
            # Values know nothing of what computes with them.
            if name.startswith("engines.slices."):
                other = target.startswith("engines.")
                assert not other or target.startswith("engines.slices."), (name, target)
            # It binds primitives, as its operands are checked arrays.
            if name.startswith("_planner."):
                assert not target.startswith("_api."), f"{name} imports {target}"


@pytest.mark.once
@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_else_needs_an_engine(engine):
    """Its folder, its tests and its public module can be deleted."""
    own = [f"drjax/engines/{engine}/", f"drjax/backends/{engine}/"]
    own += [f"drjax/backends/{engine}.py", f"tests/engines/{engine}/"]
    of_tests = rf"drjax\.engines\.{engine}\b|tests\.engines\.{engine}\b"
    of_package = rf"drjax\.(engines|backends)\.{engine}\b"
    for path in CODE:
        name = path.relative_to(ROOT).as_posix()
        inside = name.startswith("drjax/")
        # Of the engine of this process the tests of the core are made.
        if name.startswith(tuple(own)) or not inside and engine == "in_process":
            continue
        for target in _imports(path):
            engines = of_package if inside else of_tests
            assert not re.match(engines, target), f"{name} imports {target}"


def _delete_engine(root: Path, engine: str) -> None:
    """Delete an engine from a copy of the project, with its API entries."""
    shutil.rmtree(root / "drjax" / "engines" / engine)
    shutil.rmtree(root / "tests" / "engines" / engine)
    (public,) = (root / "drjax" / "backends").glob(f"{engine}*")
    shutil.rmtree(public) if public.is_dir() else public.unlink()
    page = root / "docs" / "api" / "backends.md"
    section = rf"^### {engine}\n.*?(?=^##)"
    text = re.sub(section, "", page.read_text(), flags=re.M | re.S | re.I)
    page.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [x for x in ENGINES if x != "in_process"])
def test_the_rest_passes_without_an_engine(engine, tmp_path):
    root = tmp_path / "project"
    others = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, root, ignore=others)
    _delete_engine(root, engine)
    run = functools.partial(
        subprocess.run, cwd=root, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # All test files can be imported, and the structure is as this file says.
    for arguments in (
        ["--collect-only", "-m", "", "tests"],
        ["tests/project/test_structure.py", "tests/project/test_site.py"],
        ["tests/test_backends.py", "tests/engines/slices"],
    ):
        done = run([*pytest_, *arguments])
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def test_contributing_has_the_table_of_layers():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| (\d) \| (.*?) \|", text, re.M)
    layers = {int(i): set(re.findall(r"`(\w+)/?`", names)) for i, names in table}
    assert layers == dict(enumerate(LAYERS))


def test_no_import_cycles():
    edges, done = _modules(), set()

    def visit(name, path):
        assert name not in path, f"cycle: {(*path, name)}"
        if name in done:
            return
        for target in edges[name]:
            visit(target, (*path, name))
        done.add(name)

    for name in edges:
        visit(name, ())


def test_only_compat_imports_private_jax():
    private = {
        str(path.relative_to(ROOT))
        for path in CODE
        if any(target.startswith("jax._src") for target in _imports(path))
    }
    assert not {x for x in private if not x.startswith("drjax/_compat/")}


@pytest.mark.once
def test_files_have_docstrings():
    for path in CODE:
        name, text = path.relative_to(ROOT), path.read_text()
        documented = ast.get_docstring(ast.parse(text)) or path.name == "__init__.py"
        assert documented, name


# ---------------------------------------------------------------------------------
# Tests

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
FOLDERS = {"helpers", "project"}  # those of tests/ that mirror no folder of the package
CODELESS = (ast.Expr, ast.Import, ast.ImportFrom)


@functools.cache
def _in_package() -> set[str]:
    """Every module of the package, dotted; those that only import have no code.

    These are packages, and the public modules of engines.
    """
    modules = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        code = not all(
            isinstance(x, CODELESS) for x in ast.parse(path.read_text()).body
        )
        if code or not (parts[-1] == "__init__" or parts[1] == "backends"):
            modules.add(".".join(parts).removesuffix(".__init__"))
    return modules - {"drjax"}


def _covered(path: Path) -> list[str]:
    """What a test file says that it covers, in the last paragraph of its docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    covers = re.search(r"^Covers: ([^:]+)\.\Z", doc, re.M)
    assert covers, f"{path}: the docstring does not end with `Covers: drjax.module.`"
    return re.split(r",\s+", covers[1])


def _public_words(name: str) -> list[str]:
    """The parts of a dotted name without what says that they are private."""
    return [part.lstrip("_") for part in name.split(".")]


@pytest.mark.once
def test_every_module_is_covered_by_a_test_file():
    named = {name for path in TESTS for name in _covered(path)}
    assert not (missing := _in_package() - named), missing
    # Of what is not an engine's own, by tests that stay when the engines are deleted.
    engines = [f"engines/{x}/" for x in ENGINES if x != "in_process"]
    without = {p for p in TESTS if not any(x in p.as_posix() for x in engines)}
    others = {name for path in without for name in _covered(path)}
    of_engines = re.compile(rf"drjax\.(engines|backends)\.({'|'.join(ENGINES)})\b")
    assert not (missing := {x for x in named - others if not of_engines.match(x)})
    unknown = {x for x in named if x.startswith("drjax.")} - _in_package()
    assert not unknown
    for name in named:
        assert name.startswith("drjax.") or (ROOT / name).exists(), name


@pytest.mark.once
@pytest.mark.parametrize("path", TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_test_files_stand_where_what_they_cover_stands(path):
    folders = path.relative_to(ROOT / "tests").parts[:-1]
    covered = [_public_words(name) for name in _covered(path)]
    if not FOLDERS & set(folders):
        assert covered[0][1:-1][: len(folders)] == list(folders)
    about = path.stem.removeprefix("test_")
    if about in {_public_words(name)[-1] for name in _in_package()}:
        assert about in {name[-1] for name in covered}, f"does not cover {about}"


@pytest.mark.once
def test_no_test_file_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        for name in _imports(path):
            assert not re.match(r"tests\..*\btest_", name), f"{path} imports {name}"


def test_layer_zero_does_not_know_jax():
    for name in LAYERS[0]:
        for path in (*PACKAGE.glob(f"{name}.py"), *PACKAGE.glob(f"{name}/*.py")):
            assert not any(t.startswith("jax") for t in _imports(path))


def test_init_is_a_table_of_contents():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    # What type checkers do not see is an import too.
    nested = [x for node in tree.body if isinstance(node, ast.If) for x in node.body]
    kinds = {type(node) for node in (*tree.body, *nested)}
    assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign, ast.If}
    assert drjax.__version__ == _literal_version()


def _literal_version() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    (version,) = re.findall(r'^version = "(.+)"$', text, re.M)
    return version


# ---------------------------------------------------------------------------------
# Documentation

PUBLIC = {
    name: value
    for name, value in vars(drjax).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
BLOCKS = {n: v for n, v in PUBLIC.items() if inspect.isfunction(v)}


@pytest.fixture(autouse=True)
def _users_settings():
    """Documents run as users run them: rank promotion allowed, leaks not checked."""
    with jax.numpy_rank_promotion("allow"), jax.check_tracer_leaks(False):
        yield


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_documented(name):
    doc = inspect.getdoc(PUBLIC[name]) or ""
    assert len(doc) > 20
    if name in BLOCKS:
        assert "Raises:" in doc and "Example:" in doc
        signature = inspect.signature(PUBLIC[name])
        for parameter in signature.parameters:
            if parameter != "args":
                assert re.search(rf"^ *\**{parameter}: ", doc, re.M), parameter
        assert "Args:" in doc or not signature.parameters
        hints = [p.annotation for p in signature.parameters.values()]
        assert inspect.Parameter.empty not in (*hints, signature.return_annotation)


@pytest.mark.parametrize("name", [*sorted(BLOCKS), "Partition"])
def test_docstring_example_runs(name):
    examples = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs={})
    (example,) = examples
    assert example.examples
    report = io.StringIO()
    result = doctest.DocTestRunner().run(example, out=report.write)
    assert result.failed == 0, report.getvalue()


def test_primitives_page_names_every_primitive():
    page = drjax.primitives.__doc__ or ""
    for name, primitive in vars(drjax.primitives).items():
        if name.endswith("_p"):
            assert f"`{name}`" in page
            assert primitive.name.startswith("drjax_")


def test_readme_code_runs_and_prints_what_it_says():
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    for block in blocks:
        want = re.findall(r"print\(.*\)  # (.*)$", block, re.M)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), namespace)
        assert want and printed.getvalue().splitlines() == want
    sharding = namespace["data"][0].sharding
    assert len(sharding.device_set) == 8 and not sharding.is_fully_replicated


@pytest.mark.parametrize(
    "path",
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!http)([^)#\s]+)[^)]*\)", path.read_text()):
        linked = path.parent / target
        written = linked.with_suffix("") / "results.json"  # by the build, from this
        assert linked.exists() or written.exists(), target
