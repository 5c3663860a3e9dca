"""Figures of the structure of the package: what a change touches, and what text says.

    python -m tests.helpers.structure_figures [FOLDER]

Of another version, `FOLDER` is its checkout. The figures are counts of syntax trees,
but for the walk, which plans a small program and follows its calls.
"""

import ast
import collections
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FIELDS = {
    *("server", "broadcast", "scatter", "local"),
    *("reduces", "moves", "loops", "folds"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
PUBLIC = ("drjax.", "drjax.plan.", "drjax.backends.", "drjax.compiled.")


def modules(root: Path) -> dict[str, ast.Module]:
    """The syntax tree of each module of the package, by its dotted name."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(
            ".__init__"
        ): ast.parse(path.read_text())
        for path in sorted((root / "drjax").rglob("*.py"))
    }


def functions(tree: ast.AST) -> Iterator[Function]:
    """All functions and methods of a module, also nested ones."""
    return (n for n in ast.walk(tree) if isinstance(n, Function))


def round_walkers(trees: dict[str, ast.Module]) -> list[str]:
    """The functions that name three or more fields of a round."""
    names = []
    for module, tree in trees.items():
        for function in functions(tree):
            named = {
                node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and node.attr in FIELDS
            }
            if len(named) > 2:
                names.append(f"{module}.{function.name}")
    return names


def op_comparisons(trees: dict[str, ast.Module]) -> int:
    """How often an attribute `op` is compared with a text, or texts."""
    count = 0
    for tree in trees.values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            is_op = any(isinstance(x, ast.Attribute) and x.attr == "op" for x in sides)
            texts = [
                n
                for x in sides
                for n in ast.walk(x)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            count += is_op and bool(texts)
    return count


def internal(function: Function, module: str) -> bool:
    """Whether a function is no part of what users import."""
    return function.name.startswith("_") or any(
        part.startswith("_") for part in module.split(".")
    )


def repeated_entries(trees: dict[str, ast.Module]) -> int:
    """The entries of `Args` of private functions that repeat another word for word.

    Functions of users, which stand in private modules too, have all of theirs.
    """
    entries: collections.Counter[str] = collections.Counter()
    for tree in trees.values():
        for function in functions(tree):
            text = ast.get_docstring(function) or ""
            if function.name.startswith("_") and "Args:" in text:
                section = text.split("Args:\n", 1)[-1].split("\n\n", 1)[0]
                parts = re.split(r"\n(?=  \S)", "\n" + section)
                entries.update(" ".join(x.split()) for x in parts if x.strip())
    return sum(count - 1 for count in entries.values())


def annotations(trees: dict[str, ast.Module]) -> tuple[float, float]:
    """The shares of internal arguments that are annotated, and by a bare `Any`."""
    total = annotated = bare = 0
    for module, tree in trees.items():
        for function in functions(tree):
            if not internal(function, module):
                continue
            a = function.args
            for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
                if arg is None or arg.arg in ("self", "cls") or arg.arg == "_":
                    continue
                total += 1
                annotated += arg.annotation is not None
                bare += isinstance(arg.annotation, ast.Name) and (
                    arg.annotation.id == "Any"
                )
    return annotated / total, bare / total


def import_circles(trees: dict[str, ast.Module]) -> list[set[str]]:
    """The sets of modules that import each other, by imports inside functions too."""
    edges: dict[str, set[str]] = {}
    for module, tree in trees.items():
        imported, typed = set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                typed.update(map(id, ast.walk(node)))
            if id(node) in typed:
                continue
            if isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{a.name}" for a in node.names]
                imported |= {x if x in trees else str(node.module) for x in named}
            elif isinstance(node, ast.Import):
                imported |= {a.name for a in node.names}
        edges[module] = {x for x in imported if x in trees and x != module}
    reached = {name: _reachable(name, edges) for name in edges}
    circles = {
        frozenset(y for y in reached[x] if x in reached[y]) | {x}
        for x in edges
        if any(x in reached[y] for y in reached[x])
    }
    return sorted(map(set, circles), key=len, reverse=True)


def _reachable(name: str, edges: dict[str, set[str]]) -> set[str]:
    seen, stack = set(), [*edges[name]]
    while stack:
        x = stack.pop()
        if x not in seen:
            seen.add(x)
            stack += edges[x]
    return seen


def lines_of_text(trees: dict[str, ast.Module], root: Path) -> tuple[int, int]:
    """The lines of all files of the package, and of docstrings in them."""
    whole = sum(len(p.read_text().splitlines()) for p in (root / "drjax").rglob("*.py"))
    nodes = (n for tree in trees.values() for n in ast.walk(tree))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = (n.body[0] for n in nodes if isinstance(n, kinds) and ast.get_docstring(n))
    return whole, sum((x.end_lineno or 0) - x.lineno + 1 for x in texts)


def returns_of_planning() -> int:
    """How often the calls of planning enter a module of the planner a further time."""
    import jax
    import jax.numpy as jnp

    import drjax
    from drjax._planner.make_plan import plan_of_jaxpr

    @drjax.program(partition_size=4)
    def mean_square(x):
        return drjax.reduce_mean(drjax.map_fn(jnp.square, x))

    closed = jax.make_jaxpr(mean_square)(jnp.ones(4))
    path: list[str] = []

    def record(frame, event, arg):
        module = frame.f_globals.get("__name__", "")
        own = module.startswith("drjax.") and not module.startswith("drjax._compat")
        if event == "call" and own and (not path or path[-1] != module):
            path.append(module)

    sys.setprofile(record)
    try:
        plan_of_jaxpr(closed, "mean_square", ["x"], [None])
    finally:
        sys.setprofile(None)
    return len(path) - len({*path})


def main() -> None:
    """Print all figures."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    trees = modules(root)
    walkers, circles = round_walkers(trees), import_circles(trees)
    whole, text = lines_of_text(trees, root)
    annotated, bare = annotations(trees)
    sizes = [len(p.read_text().splitlines()) for p in (root / "drjax").rglob("*.py")]
    near = sum(min(size % 100, 100 - size % 100) <= 5 for size in sizes if size > 95)
    print(f"functions that name three fields of a round: {len(walkers)}")
    for name in walkers:
        print(f"  {name}")
    print(f"comparisons of an op with a text: {op_comparisons(trees)}")
    print(f"repeated entries of private functions: {repeated_entries(trees)}")
    print(f"annotated internal arguments: {annotated:.1%}; bare Any: {bare:.1%}")
    print(f"files in an import circle: {sum(map(len, circles))}")
    for circle in circles:
        print(f"  {', '.join(sorted(circle))}")
    print(f"lines: {whole:,}, of these docstrings: {text:,}")
    print(f"files within 5 lines of a multiple of 100: {near} of {len(sizes)}")
    if root == Path.cwd():
        print(f"returns to a module in planning: {returns_of_planning()}")


if __name__ == "__main__":
    main()
