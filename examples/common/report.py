"""The report of a language-model run: a table, a JSON file, parameters and plots."""

import json
import math
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from examples.common import plots, text


def write(
    folder: Path,
    *,
    settings: dict[str, Any],
    corpus: text.Corpus,
    held_out: text.Windows,
    history: list[dict[str, Any]],
    params: Any,
    losses: np.ndarray,
    partitioned: jax.Array,
    groups: list[str],
) -> None:
    """Compares a run with a bigram model, prints the result and writes the files.

    Args:
        held_out: the windows of the held-out modules.
        history: one entry per round.
        losses: the model's mean loss on each held-out module.
        partitioned: one partitioned value [groups, tokens, width] to draw.
        groups: the names of its groups.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets = held_out.lengths.sum(-1)
    bigram = text.Bigram.fit(corpus.train).loss(held_out).sum(-1) / targets
    trained = history[-settings["save_every"] :]
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    arrays: dict[str, Any] = {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves
    }
    summary = {
        "held_out_uniform": math.log(text.VOCAB),
        "held_out_bigram": float(np.average(bigram, weights=targets)),
        "held_out": float(np.average(losses, weights=targets)),
        "train": float(np.mean([entry["loss"] for entry in trained])),
        "held_out_bytes": int(targets.sum()),
        "parameters": sum(array.size for array in arrays.values()),
        "rounds": len(history),
        "seconds": sum(entry["seconds"] for entry in history),
        "devices": len(partitioned.sharding.device_set),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    result = {"summary": summary, "settings": settings, "history": history}
    (folder / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    np.savez(folder / "parameters.npz", **arrays)

    numbers = [entry["round"] for entry in history]
    plots.loss_by_round(
        folder / "loss.png",
        numbers,
        [entry["loss"] for entry in history],
        {entry["round"]: entry["held_out"] for entry in history if "held_out" in entry},
        {"bigram, held-out": summary["held_out_bigram"]},
    )
    plots.group_spread(
        folder / "groups.png",
        numbers,
        [entry["group_losses"] for entry in history],
        [module.name for module in corpus.held_out],
        losses,
        bigram,
    )
    plots.sharding_of(
        folder / "sharding.png",
        partitioned,
        groups,
        f"Update of the embedding, {list(partitioned.shape)}, before it is averaged",
        "byte value",
    )
    print_table(summary, folder)


def print_table(summary: dict[str, Any], folder: Path) -> None:
    """Prints the losses side by side, and what the run was."""
    table = Table(title=f"Held-out modules, {summary['held_out_bytes']:,} bytes")
    table.add_column("model")
    table.add_column("nats per byte", justify="right")
    table.add_row("uniform", f"{summary['held_out_uniform']:.3f}")
    table.add_row("bigram", f"{summary['held_out_bigram']:.3f}")
    table.add_row("transformer", f"{summary['held_out']:.3f}", style="bold")
    console = Console()
    console.print(table)
    console.print(
        f"{summary['parameters']:,} parameters, {summary['rounds']} rounds on "
        f"{summary['devices']} devices in {summary['seconds']:.0f} s; training loss "
        f"{summary['train']:.3f}. Report and plots: {folder}",
        soft_wrap=True,
        highlight=False,
    )
