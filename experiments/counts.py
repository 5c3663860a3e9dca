"""From HLO text to numbers: flops of products, overlap, a table of collectives.

Input: a record with the text of a compiled program. Output: a record with counts. The
collectives are those of `drjax.compiled`; this module adds the flops of products, loops
counted as often as they run, where the compiler's own cost analysis counts the body of
a loop once. Sharp edge: on GPUs most products are calls of libraries, which are not
counted.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from drjax.compiled import Collective, read_hlo
from drjax.compiled.hlo import Instruction, Module

Record = dict[str, Any]


def counted(record: Record) -> Record:
    """A worker's record, with counts in place of the text of its program.

    Args:
      record: What `experiments.worker.measure` returns.

    Raises:
      ValueError: It is not known how often a loop runs.
    """
    if "hlo" not in record:  # its program needs more memory than there is
        return record
    rest = {key: value for key, value in record.items() if key != "hlo"}
    sent = count_collectives(read_hlo(record["hlo"], record["mesh"]))
    return rest | {"flops": flops(Module(record["hlo"])), "collectives": sent}


def count_collectives(collectives: Iterable[Collective]) -> list[Record]:
    """By kind and axes: how many in the program, how many in a run, bytes sent.

    The bytes are those that a device sends, by `drjax.compiled.sent_bytes`.

    Raises:
      ValueError: It is not known how often a loop runs.
    """
    static, dynamic, size = Counter(), Counter(), Counter()
    for x in collectives:
        key = x.kind, ("?",) if x.axes is None else x.axes
        static[key] += 1
        dynamic[key] += _known(x.times, x.name)
        size[key] += _known(x.times, x.name) * x.bytes
    return [
        {"kind": kind, "axes": list(axes), "in the program": static[kind, axes],
         "in a round": dynamic[kind, axes], "bytes sent in a round": size[kind, axes]}
        for kind, axes in sorted(static)
    ]  # fmt: skip


def flops(module: Module) -> int:
    """Operations of products of matrices and of convolutions, on one device.

    Raises:
      ValueError: It is not known how often a loop runs.
    """
    total = 0
    for running in module.running():
        if count := _flops(module, running.instruction):
            total += count * _known(running.times, running.instruction.name)
    return total


def overlaps(module: Module, kind: str) -> tuple[int, int]:
    """Asynchronous collectives of a kind, and those that overlap with products.

    The text of a compiled program is in the order in which a device starts its
    instructions: those between the start of a collective and its end run at the same
    time.
    """
    overlapped = []
    for xs in module.computations.values():
        ends = {x.operands[0]: i for i, x in enumerate(xs) if x.operands}
        for i, x in enumerate(xs):
            if x.opcode == f"{kind}-start":
                meanwhile = xs[i + 1 : ends[x.name]]
                overlapped.append(any(_multiplies(module, y) for y in meanwhile))
    return len(overlapped), sum(overlapped)


def _known(times: int | None, name: str) -> int:
    if times is None:
        raise ValueError(f"It is not known how often the loop around {name} runs.")
    return times


def _multiplies(module: Module, x: Instruction) -> bool:
    """Whether an instruction is, or calls, a product of matrices."""
    inside = (y for _, name in x.called for y in module.computations.get(name, ()))
    return x.opcode in ("dot", "convolution") or any(
        _multiplies(module, y) for y in inside
    )


def _flops(module: Module, x: Instruction) -> int:
    if x.opcode not in ("dot", "convolution"):
        return 0
    left, right = (_dims(module.instructions[name].shape) for name in x.operands)
    out = _dims(x.shape)
    if x.opcode == "dot":
        (contracted,) = re.findall(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
        sizes = [left[int(i)] for i in contracted.split(",") if i]
        return 2 * math.prod(out) * math.prod(sizes)
    return 2 * _products(x.attributes, left, right, out)


def _dims(shape: str) -> list[int]:
    (dims,) = re.findall(r"^\w+\[([\d,]*)\]", shape)
    return [int(size) for size in dims.split(",") if size]


def _products(
    text: str, left: Sequence[int], right: Sequence[int], out: Sequence[int]
) -> int:
    """Products of numbers in a convolution, those with padding left out."""
    (labels,) = re.findall(r"dim_labels=(\w+)->", text)
    (results,) = re.findall(r"dim_labels=\w+->(\w+)", text)
    ins, kernel = labels.split("_")
    count = right[kernel.index("i")]
    count *= out[results.index("b")] * out[results.index("f")]
    window = re.search(r"window=\{([^}]*)\}", text)
    fields = (
        dict(part.split("=") for part in window[1].split() if "=" in part)
        if window
        else {}
    )
    spatial = sorted(label for label in results if label.isdigit())
    read = lambda name, i, default: (
        fields[name].split("x")[i] if name in fields else default
    )
    for i, label in enumerate(spatial):
        taps = int(read("size", i, "1"))
        low = int(read("pad", i, "0_0").split("_")[0])
        stride, spread = int(read("stride", i, "1")), int(read("rhs_dilate", i, "1"))
        dilated = int(read("lhs_dilate", i, "1"))
        index = np.arange(out[results.index(label)])[:, None] * stride
        index = index + np.arange(taps) * spread - low
        inside = (index >= 0) & (index <= (left[ins.index(label)] - 1) * dilated)
        count *= int((inside & (index % dilated == 0)).sum())
    return count
