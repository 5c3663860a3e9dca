"""A random sample of mutations of one token each, and whether the default tests notice.

    python -m tests.helpers.mutation_sample --out FOLDER [--seed 7] [--number 200]

Lines of `drjax/` are drawn evenly, then a token, then what cosmic-ray puts in its
place. Not drawn are types, the `*` of keyword-only arguments, and the flags `strict=`
and `frozen=`, which assert what holds. In `FOLDER`, outside the repository, are the
mutated copy of the committed tree, what one run of the default tests says of which
test executes which line, cosmic-ray's session (`cr-report` and `cr-html` read it) and
the table `mutations.md`. What a cut run has finished is not run again; in random
order, it is a sample, too.

A mutation meets the default tests that execute its statement, nearest and cheapest
first; then those of its module's test files that execute the module: a cache may have
spared them the statement. One of a statement that runs on import only, as a decorator,
meets all that execute the module, and those of its folder. Tests of more than
`--seconds` are left out. Each survivor is a missing test, code that can go, or
equivalent.
"""

# pyright: reportMissingImports=false

import argparse
import ast
import collections
import dataclasses
import functools
import os
import random
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterable, Iterator
from pathlib import Path

import coverage
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import (
    MutationSpec,
    TestOutcome,
    WorkItem,
    WorkResult,
)
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
FIRST = 40  # tests of the first run: most mutations are killed by one of them
NO_TEST = "no test executes it"
SLACK, FACTOR = 90.0, 3.0  # the time limit is SLACK + FACTOR * their times

COVERAGE = """
[run]
source = drjax
patch = subprocess
parallel = true
core = ctrace
relative_files = true
data_file = {data}
"""


@dataclasses.dataclass(frozen=True)
class Executed:
    """Of each line of each module the tests that execute it; and what a test takes."""

    tests: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]


def run_with_coverage(out: Path) -> None:
    """Run the default tests once, in the copy."""
    # Its name must not begin as the data's: `erase` deletes `coverage.*`.
    (out / "settings.ini").write_text(COVERAGE.format(data=out / "coverage"))
    command = f"""-m pytest -q -n 2 --dist worksteal --cov=drjax --cov-report=
        --cov-config={out / "settings.ini"} --cov-context=test
        --junitxml={out / "times.xml"}"""
    # A test that fails as it is says nothing of mutations, and is left out.
    run = subprocess.run([sys.executable, *command.split()], cwd=out / "copy")
    if run.returncode > 1:  # not of tests that failed
        (out / "times.xml").unlink(missing_ok=True)
        sys.exit("The run with coverage was cut.")


def executed(out: Path) -> Executed:
    """Read what the run with coverage wrote, of tests that passed."""
    seconds = {}
    for case in xml.etree.ElementTree.parse(out / "times.xml").iter("testcase"):
        if not case.findall("*"):  # neither failed nor skipped
            file = re.sub(r"^(.*\.test_\w+).*", r"\1", case.attrib["classname"])
            classes = case.attrib["classname"].removeprefix(file).split(".")[1:]
            path = file.replace(".", "/") + ".py"
            name = "::".join([path, *classes, case.attrib["name"]])
            seconds[name] = float(case.attrib["time"])
    data = coverage.CoverageData(str(out / "coverage"))
    data.read()
    tests = {}
    for path in data.measured_files():
        lines = tests[path] = collections.defaultdict(set)
        for line, contexts in data.contexts_by_lineno(path).items():
            names = {context.rpartition("|")[0] for context in contexts}
            lines[line] = names & seconds.keys()
    return Executed(tests, seconds)


@functools.cache
def mutations_by_line(module: Path) -> dict[int, list[MutationSpec]]:
    """The mutations of a module that may be drawn, by line."""
    code = module.read_text()
    left_out = []
    for node in ast.walk(ast.parse(code)):
        left_out += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.keyword) and node.arg in ("strict", "frozen"):
            left_out.append(node.value)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            left_out += node.body
    spans = [
        ((x.lineno, x.col_offset), (x.end_lineno, x.end_col_offset))
        for x in left_out
        if x is not None
    ]
    by_line = collections.defaultdict(list)
    for item in _all_work_items([module], {}):
        (spec,) = item.mutations
        line, column = spec.start_pos
        keyword_only = code.splitlines()[line - 1][column:].startswith("*,")
        inside = any(first <= (line, column) < last for first, last in spans)
        if not (keyword_only or inside):
            by_line[line].append(spec)
    return by_line


def compiles(spec: MutationSpec) -> bool:
    """Whether a mutation is Python, and another program than before."""
    code = spec.module_path.read_text()
    operator = get_operator(spec.operator_name)(**spec.operator_args)
    try:
        tree = ast.parse(mutate_code(code, operator, spec.occurrence) or "")
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(code))


def sample(seed: int, number: int) -> Iterator[WorkItem]:
    """Random mutations of the modules in this folder, of lines drawn evenly."""
    draw = random.Random(seed)
    modules = sorted(Path("drjax").rglob("*.py"))
    lines = [
        (module, line)
        for module in modules
        for line, _ in enumerate(module.read_text().splitlines(), 1)
    ]
    draw.shuffle(lines)
    drawn = 0
    for module, line in lines:
        specs = mutations_by_line(module).get(line, [])
        while specs:
            column = draw.choice(sorted({x.start_pos for x in specs}))
            spec = draw.choice([x for x in specs if x.start_pos == column])
            if compiles(spec):
                yield WorkItem.single(f"{drawn:04d}", spec)
                drawn += 1
                break
            specs = [x for x in specs if x is not spec]
        if drawn == number:
            return


def statement_lines(module: Path, line: int) -> range:
    """The lines of the innermost statement on a line; of a compound one its header."""
    lines = range(line, line + 1)
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            first = min([node.lineno, *(x.lineno for x in decorators(node))])
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            last = node.end_lineno or node.lineno
            if body:  # of `match` the cases are no statements, and have no line
                last = getattr(body[0], "lineno", node.lineno + 1) - 1
            if first <= line <= last:
                lines = range(first, last + 1)
    return lines


def runs_on_import(spec: MutationSpec) -> bool:
    """Whether a mutation stands in no body of a function."""
    return not any(
        node.body[0].lineno <= spec.start_pos[0] <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(spec.module_path.read_text()))
        if isinstance(node, ast.FunctionDef)
    )


def decorators(node: ast.AST) -> list[ast.expr]:
    return getattr(node, "decorator_list", [])


@functools.cache
def covers(test_file: str) -> set[str]:
    """The modules that a test file says that it covers, as paths."""
    doc = ast.get_docstring(ast.parse(Path(test_file).read_text())) or ""
    covered = re.search(r"^Covers: ([^:]+)\.\Z", doc, re.M)
    names = re.split(r",\s+", covered[1]) if covered else []
    return {name.replace(".", "/") + ".py" for name in names}


def in_order(tests: Iterable[str], module: str, known: Executed) -> list[str]:
    """Those of files that cover the module first, each function once before its other
    parameters, the cheap ones first."""
    cheap = sorted(tests, key=lambda x: (known.seconds[x], x))
    seen = collections.Counter()
    keys = {}
    for test in cheap:
        function = test.split("[")[0]
        near = module in covers(test.split("::")[0])
        keys[test] = (seen[function] > 0, not near, seen[function], known.seconds[test])
        seen[function] += 1
    return sorted(cheap, key=keys.__getitem__)


def tests_of(spec: MutationSpec, known: Executed, seconds: float) -> list[str]:
    """The tests that a mutation meets, in order, up to a number of seconds."""
    module = spec.module_path.as_posix()
    lines = known.tests.get(module, {})
    statement = statement_lines(spec.module_path, spec.start_pos[0])
    direct = set().union(*(lines.get(line, set()) for line in statement))
    others = set().union(*lines.values()) - direct
    of_module = others if lines else known.seconds.keys()
    near = {x for x in of_module if module in covers(x.split("::")[0])}
    if not direct or runs_on_import(spec):
        folder = f"tests/{spec.module_path.parts[1].lstrip('_')}/"
        near |= others | {x for x in known.seconds if x.startswith(folder)}
    near -= direct
    order = in_order(direct, module, known) + in_order(near, module, known)
    total, chosen = 0.0, []
    for test in order:
        total += known.seconds[test]
        if total > seconds and chosen:
            break
        chosen.append(test)
    return chosen


def meet(item: WorkItem, tests: list[str], known: Executed) -> WorkResult:
    """Run tests on a mutation of this folder, up to the first that fails."""
    result = mutate_and_test(item.mutations, f"echo {NO_TEST}", SLACK)
    for some in filter(None, (tests[:FIRST], tests[FIRST:])):
        names = Path("../tests.txt").resolve()
        names.write_text("\n".join(some))
        # With pytest's cache: the copy keeps in it what XLA compiled.
        command = f"{sys.executable} -m pytest -x -q -n 0 --tb=line @{names}"
        limit = SLACK + FACTOR * sum(known.seconds[x] for x in some)
        result = mutate_and_test(item.mutations, command, limit)
        if result.test_outcome != TestOutcome.SURVIVED:
            break
    return result


def killer(result: WorkResult) -> str:
    """What killed a mutation: a test, or else the end of what pytest printed."""
    text = result.output or ""
    if result.test_outcome == TestOutcome.SURVIVED:
        return f"**survived**{', ' + NO_TEST if NO_TEST in text else ''}"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    return failed[1] if failed else text.strip().splitlines()[-1][:60] if text else "?"


def table(db: WorkDB) -> str:
    """The mutations that are finished, and a line that counts them."""
    done = sorted(db.completed_work_items, key=lambda x: x[0].job_id)
    survived = [x for x in done if x[1].test_outcome == TestOutcome.SURVIVED]
    text = [
        f"{len(done)} mutations, {len(done) - len(survived)} killed, "
        f"{len(survived)} survived.\n",
        "| number | line | mutation | killed by |",
        "|---|---|---|---|",
    ]
    for item, result in done:
        (spec,) = item.mutations
        name = spec.operator_name.split("/")[1]
        changed = re.findall(r"^[-+](?![-+]) *(.*)", result.diff or "", re.M)
        code = " → ".join(f"`` {x} ``" for x in changed).replace("|", r"\|")
        where = f"{spec.module_path}:{spec.start_pos[0]}"
        text.append(f"| {item.job_id} | {where} | {name}: {code} | {killer(result)} |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600, help="of one's tests")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "copy").exists():
        subprocess.run(["git", "clone", "-q", ROOT, out / "copy"], check=True)
    os.chdir(out / "copy")
    os.environ |= {"PYTHONPATH": str(out / "copy"), "JAX_PLATFORMS": "cpu"}
    # A mutation of a run that was cut.
    subprocess.run(["git", "checkout", "-q", "drjax"], check=True)
    if not (out / "times.xml").exists():
        run_with_coverage(out)
    known = executed(out)
    with use_db(out / "session.sqlite") as db:
        if not db.num_work_items:
            db.add_work_items(sample(args.seed, args.number))
        pending = sorted(db.pending_work_items, key=lambda x: x.job_id)
        for item in (bar := tqdm(pending)):
            (spec,) = item.mutations
            tests = tests_of(spec, known, args.seconds)
            result = meet(item, tests, known)
            db.set_result(item.job_id, result)
            (out / "mutations.md").write_text(table(db))
            where = f"{item.job_id} {spec.module_path}:{spec.start_pos[0]}"
            bar.write(f"{where}, {len(tests)} tests: {killer(result)}")
        print(table(db).splitlines()[0])


if __name__ == "__main__":
    main()
