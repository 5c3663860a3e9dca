"""What hosts the project: versions, hosted CI, hooks, forms; each fact in one place.

Covers: .ci, .github, noxfile.py, pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import drjax

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GATE = (ROOT / ".ci/run").read_text()
NOXFILE = (ROOT / "noxfile.py").read_text()
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEXT = {".md", ".py", ".toml", ".yml", ".cff", ".txt", ".html", ".mjs", ".svg"}
FOLDERS = ".ci .github benchmarks docs drjax examples experiments tests".split()
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


def _yaml(path: str | Path) -> dict:
    return yaml.safe_load((ROOT / path).read_text())


def _jobs(workflow: Path) -> list[dict]:
    return list(_yaml(workflow)["jobs"].values())


def _commands(name: str) -> list[str]:
    """The commands of a document, one a line, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(), re.S)
    return [re.sub(r" +# .*", "", x) for b in blocks for x in b.splitlines()]


def test_one_version():
    version = PYPROJECT["project"]["version"]
    assert drjax.__version__ == version
    assert _yaml("CITATION.cff")["version"] == version
    (first, *_) = re.findall(
        r"^## \[(.+?)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert first == version


def test_one_address():
    """A checkout may be hosted anywhere: one file names its addresses."""
    urls = PYPROJECT["project"]["urls"]
    assert set(urls) == {"Documentation", "Notebooks", "Repository"}
    named = [
        re.escape(url.rstrip("/").removeprefix("https://")) for url in urls.values()
    ]
    files = [*ROOT.glob("*.*"), *(x for y in FOLDERS for x in (ROOT / y).rglob("*.*"))]
    files = [path for path in files if path.suffix in TEXT]
    assert len(files) > 400
    for path in files:
        if path.name not in ("pyproject.toml", "CHANGELOG.md"):
            assert not re.findall("|".join(named), path.read_text()), path


def test_one_floor():
    project = PYPROJECT["project"]
    python = project["requires-python"].removeprefix(">=")
    (jax,) = (x for x in project["dependencies"] if x.startswith("jax>="))
    extras = project["optional-dependencies"].values()
    needs = " ".join([*project["dependencies"], *(x for y in extras for x in y)])
    oldest = re.findall(r"([\w-]+)>=([\d.]+)", needs)
    pins = (ROOT / ".ci/floor.txt").read_text().splitlines()
    pins = [line for line in pins if not line.startswith("#")]
    assert pins == sorted({f"{name}=={version}" for name, version in oldest})
    assert f"floor=$(python_at {python})" in GATE
    for name in ("CONTRIBUTING.md", "docs/versions.md"):
        text = (ROOT / name).read_text()
        assert f"Python {python}" in text and jax.replace("jax>=", "JAX ") in text


def test_tools_have_one_version():
    project = PYPROJECT["project"]["optional-dependencies"]
    groups = [x for g in PYPROJECT["dependency-groups"].values() for x in g]
    pins = [
        x.split("==")
        for x in (*groups, *(y for extra in project.values() for y in extra))
        if isinstance(x, str) and "==" in x
    ]
    assert len(dict(pins)) == len({tuple(pin) for pin in pins})
    for tool in re.findall(r"\$\(pinned ([\w-]+)\)", GATE):
        assert tool in dict(pins)


def test_gate_runs_the_commands_of_the_readme():
    taken = re.findall(r"command_in_readme (\S+?)\)", GATE)
    assert taken == ["pytest", "examples.diloco"]
    for word in taken:
        assert len([x for x in _commands("README.md") if word in x]) == 1


def test_gate_and_documents_name_sessions():
    defined = set(re.findall(r"^@nox\.session\ndef (\w+)\(", NOXFILE, re.M))
    gate = re.findall(r'\bsession \S+ ([a-z]+)|"engine_env \$name (\w+)"', GATE)
    hooks = _yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]
    lines = [*_commands("CONTRIBUTING.md"), *(hook["entry"] for hook in hooks)]
    named = {x for line in lines for x in re.findall(r"nox -R -s ([\w ]+\w)", line)}
    assert {x for pair in gate for x in pair if x} < defined
    assert {x for names in named for x in names.split()} < defined


def test_default_tests_are_those_of_the_readme():
    (command,) = (x for x in _commands("README.md") if "pytest" in x)
    (options,) = re.findall(r'posargs or \((".+")\)', NOXFILE)
    assert command.endswith("pytest " + " ".join(re.findall(r'"(.+?)"', options)))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_hosted_jobs_are_jobs_of_the_gate(path):
    (listed,) = re.findall(r"^  (lint \|.+)\)$", GATE, re.M)
    named = re.findall(r"^(\w+)=", GATE, re.M)
    (others,) = re.findall(r'"engine \$1 "\{(.+?)\}', GATE)
    engines = ["ray", *others.split(",")]
    for job in _jobs(path):
        for name in job["strategy"]["matrix"]["job"]:
            function, *environment = name.split()
            assert function in listed.split(" | ")
            assert f"\n{function}() {{" in GATE
            assert all(x in named or x in engines for x in environment), name
        runs = [step for step in job["steps"] if "run" in step]
        assert [step["run"] for step in runs] == ['bash .ci/run "$JOB"']
        assert runs[0]["env"] == {"JOB": "${{ matrix.job }}"}
        nightly = "tests nightly" in job["strategy"]["matrix"]["job"]
        assert nightly == ("tests nightly" in job.get("continue-on-error", ""))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_hosted_python_is_supported(path):
    classifiers = PYPROJECT["project"]["classifiers"]
    python = "Programming Language :: Python :: 3."
    supported = [f"3.{x[len(python) :]}" for x in classifiers if x.startswith(python)]
    for job in _jobs(path):
        (set_up,) = (s for s in job["steps"] if "setup-python" in s.get("uses", ""))
        versions = set_up["with"]["python-version"].split()
        assert versions == [supported[0], supported[-1]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_may_only_read_and_pin_actions(path):
    assert _yaml(path)["permissions"] == {"contents": "read"}
    for job in _jobs(path):
        assert "permissions" not in job
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", step["uses"])


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_issue_forms_are_whole(path):
    template = _yaml(path)
    assert template["name"] and template["description"]
    ids = [field["id"] for field in template["body"]]
    assert len(ids) == len(set(ids))
    for field in template["body"]:
        assert field["attributes"]["label"]
        assert (field["type"] == "dropdown") == ("options" in field["attributes"])


def test_bugs_have_versions_and_a_program():
    fields = {f["id"]: f for f in _yaml(".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    for name in ("program", "versions"):
        assert fields[name]["validations"]["required"]
    assert "drjax.__version__" in fields["versions"]["attributes"]["description"]


@pytest.mark.parametrize(
    "name", ["CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "docs/versions.md"]
)
def test_links_lead_somewhere(name):
    path = ROOT / name
    for target in re.findall(r"\]\((?!http|#)([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target
