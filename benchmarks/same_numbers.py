"""Run the same plan files on every engine and compare the numbers.

    python -m benchmarks.same_numbers --out benchmarks/results/same-numbers.md

Needs `pip install '.[examples,ray,beam,flower]' 'flwr[simulation]'`. The plans are
those of `examples.engines`: a round of local SGD, and the gradient of MAML. Each is
saved, and an engine has nothing but the file. The reference runs one group at a time in
Python; a difference is the largest in an array, over the largest number there.
"""

import argparse
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

from benchmarks.report import table
from examples.engines import difference, round_of, run, save

ENGINES = ("xla", "ray", "beam", "flower")
PACKAGES = {"ray": "ray", "beam": "apache-beam", "flower": "flwr"}


def measure(folder: Path) -> list[list[str]]:
    """A line for each plan: its name, and the difference on each engine."""
    lines = []
    for name in ("local_sgd", "maml_gradients"):
        one, path = round_of(name), folder / f"{name}.drjax"
        save(one, path)
        expected, _ = run(path, "reference", one, 1)
        line = [name.replace("_", " ")]
        for engine in ENGINES:
            result, _ = run(path, engine, one, 1)
            line.append(f"{difference(result, expected):.1e}")
        lines.append(line)
    return lines


def main() -> None:
    """Writes or prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="the Markdown file to write")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(Path(folder))
    packages = ", ".join(f"{p} {version(p)}" for p in PACKAGES.values())
    text = (
        f"JAX {jax.__version__}, {packages}. Largest relative difference from the "
        f"reference; a float32 rounds by up to 6.0e-08.\n\n"
        f"{table(['plan', *ENGINES], lines)}\n"
    )
    print(text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
