"""Count the lines of algorithms, in the gallery and in other libraries.

    python -m benchmarks.lines --out docs/gallery/lines.md

The sources of the libraries are downloaded from PyPI, in the versions of `OTHERS`; they
are read, not installed or run. A line counts if it is not empty, no comment and no part
of a docstring. Of `examples/algorithms`, the functions and classes count, without
those of `TASK`, which have the data, the loss and the loop. Of a library, those of the
definitions that are named: what implements the algorithm on top of the library's own
building blocks.

What a group sends in a round is counted by `benchmarks.ledgers` for the examples, and
was read in the sources of the libraries: the arrays of a reply or of an all-reduce.
"""

import argparse
import ast
import dataclasses
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path

from benchmarks import ledgers

ROOT = Path(__file__).parents[1]

TASK = {"main", "train", "cohorts", "apply", "first_theta", "loss", "accuracy"}


@dataclasses.dataclass(frozen=True)
class Other:
    """An implementation of an algorithm in another library."""

    example: str
    """The file of that algorithm in `examples/algorithms`."""
    library: str
    """Its name, and how PyPI calls it."""
    version: str
    path: str
    """The file, from the root of the wheel or of the source distribution."""
    names: tuple[str, ...]
    """Functions, classes, and methods as `Class.method`."""
    what: str
    """What the lines do, and what they leave to the user or to other files."""
    sends: str
    """What a group sends in a round."""
    ours: str
    """The algorithm of `benchmarks.ledgers` that counts it for the example."""


_FLOWER = ("flwr", "1.42.0", "flwr/serverapp/strategy/")
_NOTHING, _LOCAL = "one process", "local SGD, FedAvg, DiLoCo"
_TFF = ("tensorflow-federated", "0.87.0")
OTHERS = (
    Other("fedavg", "fedjax", "0.0.17", "fedjax/algorithms/fed_avg.py",
          ("create_train_for_each_client", "ServerState", "federated_averaging"),
          "client and server", _NOTHING, _LOCAL),
    Other("fedavg", *_FLOWER[:2], _FLOWER[2] + "fedavg.py",
          ("FedAvg._construct_messages", "FedAvg.configure_train",
           "FedAvg._check_and_log_replies", "FedAvg.aggregate_train"),
          "server; the user writes the client", "1 model, its examples", _LOCAL),
    Other("fedavg", *_TFF,
          "tensorflow_federated/python/learning/algorithms/fed_avg.py",
          ("build_weighted_fed_avg",),
          "composes the library's client work, aggregation and finalizer",
          "1 model, its weight", _LOCAL),
    Other("diloco", "torchft", "0.2.0", "torchft/local_sgd.py",
          ("_StreamingDiLoCoFragment", "DiLoCo"),
          "wrapper of a PyTorch module, with its hooks and buckets", "1 model", _LOCAL),
    Other("diloco", "maxtext", "0.2.5", "maxtext/trainers/diloco/diloco.py",
          ("DiLoCoTrainState", "build_diloco_state",
           "build_vanilla_diloco_train_step", "build_streaming_diloco_train_step"),
          "on Google's drjax; synchronization is in other files", "1 model", _LOCAL),
    Other("maml", "learn2learn", "0.2.0", "learn2learn/algorithms/maml.py",
          ("maml_update", "MAML"),
          "inner step; the user writes the loop over tasks", _NOTHING,
          "gradient of MAML"),
    Other("dp_fedavg", *_FLOWER[:2], _FLOWER[2] + "dp_fixed_clipping.py",
          ("DifferentialPrivacyFixedClippingBase",
           "DifferentialPrivacyServerSideFixedClipping"),
          "server, with its accounting, around another strategy",
          "1 model, its examples", _LOCAL),
    Other("robust", *_FLOWER[:2], _FLOWER[2] + "fedmedian.py",
          ("FedMedian.aggregate_train",), "median", "1 model",
          "median of local models"),
    Other("krum", *_FLOWER[:2], _FLOWER[2] + "multikrum.py",
          ("MultiKrum.aggregate_train", "compute_distances", "select_multikrum"),
          "Krum", "1 model", "Krum"),
)  # fmt: skip


def code_lines(text: str, names: Collection[str] = ()) -> int:
    """The lines of code of definitions; of the whole text without names.

    Raises:
      KeyError: The text lacks a definition.
    """
    tree, lines = ast.parse(text), text.splitlines()
    classes = [node for node in tree.body if isinstance(node, _CLASS)]
    definitions = {
        prefix + node.name: node
        for parent, prefix in [(tree, ""), *((c, f"{c.name}.") for c in classes)]
        for node in parent.body
        if isinstance(node, (*_FUNCTIONS, _CLASS))
    }
    places: set[int] = set()
    for node in [definitions[name] for name in names] or tree.body:
        first = min([node.lineno, *(x.lineno for x in _decorators(node))])
        places.update(range(first, (node.end_lineno or first) + 1))
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            docstring = node.body[0]
            end = docstring.end_lineno or docstring.lineno
            places.difference_update(range(docstring.lineno, end + 1))
    code = (lines[i - 1].strip() for i in places)
    return sum(bool(line) and not line.startswith("#") for line in code)


_FUNCTIONS, _CLASS = (ast.FunctionDef, ast.AsyncFunctionDef), ast.ClassDef
_DOCUMENTED = (*_FUNCTIONS, _CLASS, ast.Module)


def _decorators(node: ast.AST) -> list[ast.expr]:
    return getattr(node, "decorator_list", [])


def algorithm_lines(example: str) -> int:
    """The lines of code of an algorithm's functions and classes, without the task's."""
    text = (ROOT / "examples" / "algorithms" / f"{example}.py").read_text()
    defined = (*_FUNCTIONS, _CLASS)
    names = [x.name for x in ast.parse(text).body if isinstance(x, defined)]
    return code_lines(text, [name for name in names if name not in TASK])


def source(other: Other, folder: Path) -> str:
    """The text of the file of another library, downloaded to a folder."""
    target = folder / f"{other.library}-{other.version}"
    if not target.exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
             "--ignore-requires-python",
             "--dest", target, f"{other.library}=={other.version}"],
            check=True,
        )  # fmt: skip
    (archive,) = target.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(other.path).decode()
    with tarfile.open(archive) as tar:
        (root,) = {name.split("/")[0] for name in tar.getnames()}
        member = tar.extractfile(f"{root}/{other.path}")
        assert member is not None
        return member.read().decode()


def table(folder: Path) -> str:
    """The table, in Markdown."""
    cells = [["algorithm", "lines", "sends", "elsewhere", "lines", "sends"]]
    cells.append(["---", "--:", "---", "---", "--:", "---"])
    measured = ledgers.measure()
    for other in OTHERS:
        file = f"{other.library} {other.version}, `{Path(other.path).name}`"
        sent = measured[other.ours][1] / ledgers.MODEL
        cells.append(
            [
                f"`{other.example}`",
                str(algorithm_lines(other.example)),
                "1 model" if sent == 1 else f"{sent:.4g} models",
                f"{file}: {other.what}",
                str(code_lines(source(other, folder), other.names)),
                other.sends,
            ]
        )
    text = "".join(f"| {' | '.join(line)} |\n" for line in cells)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="a file for the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = table(Path(folder))
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
