"""The reductions, folds, moves and inner levels of a round, from JSON data.

Input: an entry of `reduces`, `folds` or `moves` of a manifest, and the values of the
plan by name. Output: a `Reduce`, `Fold` or `Move`. Invariant: an entry that no plan
could have is a `ValueError`, which `decode` converts to `PlanFileError`. Sharp edge:
files of earlier versions lack `wire`, `sharded`, `secure` and `bound`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from drjax._plan_file import json_values
from drjax._plan_file.json_values import Json
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax.plan import MOVES, Fold, Move, Plan, Reduce, Stage, Value, Wire

# From names to the values of the plan that have these names, in order.
Values = Callable[[Iterable[str]], tuple[Value, ...]]


def reduce(data: dict[str, Any], values: Values) -> Reduce:
    """Build a reduction from its JSON data.

    They are `op`, its name; `values`, the names of its operand and its result; and
    perhaps `wire`, `sharded`, `secure` and `bound`.
    """
    source, result = values(data["values"])
    op = json_values.one_of((*REDUCE_OPS, "gather"), data["op"])
    wire = _wire(op, source, data.get("wire"))
    sharded = data.get("sharded", False)
    if sharded not in (False, True, "auto"):
        raise ValueError(f"{str(sharded)[:60]} is no layout of a result")
    secure = json_values.count(data.get("secure", 0))
    if secure and (op not in ("sum", "mean") or secure < 2):
        raise ValueError(f"a {op} of {secure} groups cannot be secure")
    bound = data.get("bound")
    if bound is not None and not (
        secure and type(bound) is float and 0 < bound < math.inf
    ):
        raise ValueError(f"{str(bound)[:60]} is no bound of a secure sum")
    return Reduce(op, source, result, wire, sharded, secure, bound)


def _wire(op: str, source: Value, data: Json) -> Wire | None:
    """Build the encoding of a reduction from a list of dtype and block size.

    None: it is not encoded. The reduction `op` of `source` must be a sum or mean of
    real floats.
    """
    if data is None:
        return None
    additive = op in REDUCE_OPS and REDUCE_OPS[op].additive
    if not (additive and jnp.issubdtype(source.dtype, jnp.floating)):
        raise ValueError(f"a {op} of {source} cannot be encoded")
    dtype, block = json_values.items(data)
    return Wire(json_values.text(dtype), json_values.count(block))


def fold(data: dict[str, Any], values: Values, combine: Stage) -> Fold:
    """Build a fold from its JSON data, and check that its states have one type.

    They are names of values, `init`, `sources` and `results`; and `commutative`.
    `combine` is the stage of the function that combines two states.
    """
    init, sources, results = (values(data[k]) for k in ("init", "sources", "results"))
    types = lambda xs: [(v.shape, v.dtype) for v in xs]
    state, count = types(results), len(results)
    sides = combine.inputs[max(0, len(combine.inputs) - 2 * count) :]
    if not state or any(types(xs) != state for xs in (init, sources, combine.outputs)):
        raise ValueError("a fold has states of different types")
    if types(sides) != state * 2:
        raise ValueError("a fold has no function of two states")
    global_ones = (*init, *results, *combine.inputs, *combine.outputs)
    if any(v.partitioned for v in global_ones):
        raise ValueError("a fold has a neutral state or a result that is partitioned")
    if not all(v.partitioned for v in sources):
        raise ValueError("a fold has states that are not partitioned")
    return Fold(combine, init, sources, results, data["commutative"] is True)


def move(data: dict[str, Any], values: Values, size: int) -> Move:
    """Build a move of slices between groups from its JSON data.

    They are `op`, its name; `values`, the names of its source, of its index if it has
    one, and of its result; and `sources`, the permutation of a permute. `size` is n; 0
    without a partition.
    """
    op = json_values.one_of(MOVES, data["op"])
    source, *index, result = values(data["values"])
    sources = tuple(map(json_values.count, data["sources"]))
    ends = (source, result)
    of_groups = [v.partitioned for v in ends]
    if not (all(of_groups) or (any(of_groups) and op != "permute")):
        raise ValueError(f"a {op} moves values that are not partitioned")
    # A population has its slices along axis 0.
    first, second = ((v.shape[not v.partitioned :], v.dtype) for v in ends)
    if first != second or any(not (v.partitioned or v.shape) for v in ends):
        raise ValueError(f"a {op} changes the type of slices")
    if op == "permute":
        # Their number first: a file may claim any number of groups.
        if index or len(sources) != size or sorted(sources) != [*range(size)]:
            raise ValueError("a permute has no permutation of the groups")
        return Move(op, source, result, sources)
    (by,) = index
    indexed = result if op == "take" else source
    slices = size if indexed.partitioned else indexed.shape[0]
    if sources or by.partitioned or (by.shape, by.dtype) != ((slices,), np.int32):
        raise ValueError(f"a {op} has no index of the groups")
    return Move(op, source, result, (), by)


def checked_inner(inner: Plan, stage: Stage) -> Plan:
    """Check that the plan of an inner level has the types of its stage; return it.

    Its inputs must have the types of a group index, int32 `[]`, and then of the stage's
    inputs; its outputs those of the stage's outputs. `stage` is the local stage of the
    outer level, in each of whose groups the plan runs.
    """

    def types(values: Sequence[Value]) -> list[tuple[tuple[int, ...], Any]]:
        return [(v.whole_shape(inner.size), v.dtype) for v in values]

    of_stage = lambda values: [(v.shape, v.dtype) for v in values]
    index = ((), np.dtype(np.int32))
    if types(inner.inputs) != [index, *of_stage(stage.inputs)]:
        raise ValueError("the plan of an inner level takes other values")
    if types(inner.outputs) != of_stage(stage.outputs):
        raise ValueError("the plan of an inner level gives other values")
    return inner
