"""The checks of the project, as sessions of nox: each in an environment of its own.

    nox -l             the list of them
    nox                those of each commit: lint, types, tests
    nox -R -s types    one of them, without installing again
    nox -s tests -- tests/plan    pytest's arguments

`.ci/run` runs them in fresh copies, with the oldest and the newest Python and JAX.
"""

import shutil
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|venv"  # uv installs in a fifth of the time
nox.options.sessions = ["lint", "types", "tests"]

ENGINES = ("beam", "flower", "federated_language")  # that one environment can have
COMPILED = Path("runs/compiled")  # of the site's code, for its notebooks
PYPROJECT = nox.project.load_toml("pyproject.toml")


def _tools(session: nox.Session, group: str, *names: str) -> None:
    """Install tools of a dependency group in their pinned versions; no name: all."""
    pins = nox.project.dependency_groups(PYPROJECT, group)
    chosen = [p for p in pins if not names or p.partition("==")[0] in names]
    session.install("-q", *chosen)


def _tracked(session: nox.Session, *patterns: str) -> list[str]:
    """The files of the commit that match."""
    out = session.run("git", "ls-files", *patterns, external=True, silent=True)
    return str(out).split()


def _keep_compiled(folder: Path) -> dict[str, str]:
    """What processes compile they keep in a folder, where others find it."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder.resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.03",
        # JAX does not write an entry at once: another process may meet a part of it,
        # and compiles then.
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry,"
        "ignore:Error writing persistent compilation cache entry",
    }


@nox.session
def lint(session: nox.Session) -> None:
    """Code, prose, workflows of hosted CI, shell scripts."""
    _tools(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("zizmor", "--offline", "--strict-collection", ".")
    scripts = _tracked(session, "*.sh")
    session.run("shellcheck", "-S", "warning", ".ci/run", *scripts)
    # All but tests.
    prose = _tracked(session, "*.md", "[!t]*.py")
    session.run("proselint", "check", *prose)


@nox.session
def types(session: nox.Session) -> None:
    """Types, by pyright."""
    session.install("-q", "-e", ".[tests]")
    _tools(session, "lint", "pyright")
    session.run("pyright", "--pythonpath", f"{session.bin}/python")


@nox.session
def tests(session: nox.Session) -> None:
    """The default tests, as in the README; or pytest's arguments after `--`."""
    session.install("-q", "-e", ".[tests]")
    arguments = session.posargs or ("-n", "2", "--dist", "worksteal")
    session.run("python", "-m", "pytest", *arguments)


@nox.session
def goldens(session: nox.Session) -> None:
    """Plans and compiled programs as they were frozen, or the module's arguments."""
    session.install("-q", "-e", ".[tests]")
    session.run("python", "-m", "tests.helpers.goldens", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """The slow tests, by file: what those of one share is computed once."""
    _slow(session, "slow and not grid")


@nox.session
def grids(session: nox.Session) -> None:
    """Every case of the table on every mesh."""
    _slow(session, "grid")


def _slow(session: nox.Session, marks: str) -> None:
    session.install("-q", "-e", ".[tests]")
    marks = f"{marks} and not engines"
    by_file = ("-n", "2", "--dist", "loadfile", "--durations", "20")
    session.run("python", "-m", "pytest", "-m", marks, *by_file, *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """The tests of Ray, without Flower's simulation, which needs an older one."""
    session.install("-q", "-e", ".[tests,ray]")
    # They wait for processes more than they work: two files at a time.
    _engine(session, "ray", "-n", "2", "--dist", "loadfile", *session.posargs)


@nox.session
def engines(session: nox.Session) -> None:
    """The tests of the other engines, or of one: `-- beam`."""
    extras = ".[tests,beam,flower,federated-language]"
    session.install("-q", "-e", extras, "flwr[simulation]")
    named = [x for x in session.posargs if x in ENGINES]
    for name in named or ENGINES:
        _engine(session, name, *(x for x in session.posargs if x not in named))


def _engine(session: nox.Session, name: str, *arguments: str) -> None:
    files = [
        *Path("tests/engines", name).glob("test_*.py"),
        *Path("tests").glob(f"*/test_{name}*.py"),
    ]
    marks = ("-m", "engines and not grid", "--durations", "15")
    # In a folder of its own Ray does not see the clusters of other tests.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        env = {"RAY_TMPDIR": folder, **_keep_compiled(Path(folder, "compiled"))}
        # Workers that Ray starts before there is work are not those of drjax.
        env["RAY_prestart_worker_first_driver"] = "0"
        tests = *marks, *map(str, files), *arguments
        session.run("python", "-m", "pytest", *tests, env=env)


@nox.session
def site(session: nox.Session) -> None:
    """The site, in runs/site; all of its code runs. Node.js checks its search."""
    session.install("-q", "-e", ".[docs]")
    shutil.rmtree(COMPILED, ignore_errors=True)
    site, env = "runs/site", _keep_compiled(COMPILED)
    build = ("-W", "--keep-going", "-j", "2", "docs", site)
    session.run("python", "-m", "sphinx", *build, env=env)
    session.run("node", "docs/check_search.mjs", site, external=True)


@nox.session
def notebooks(session: nox.Session) -> None:
    """The tutorials of the site as notebooks, where only the README's extra is."""
    session.install("-q", ".[examples]", "ipykernel", "nbclient")
    tutorials = sorted(map(str, Path("runs/site/tutorials").glob("*.ipynb")))
    session.run("jupyter", "execute", *tutorials, env=_keep_compiled(COMPILED))


@nox.session
def distributions(session: nox.Session) -> None:
    """The wheel and the source, in dist/."""
    _tools(session, "wheel")
    session.run("python", "-m", "build")
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
