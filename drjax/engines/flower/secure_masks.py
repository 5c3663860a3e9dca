"""Flower's protocol of secure sums with masks of full strength, and checks of sums.

Input: Flower's client and workflow of SecAgg. Output: copies of their functions that
draw masks by SHAKE-256 of the whole secret, at both ends, where Flower's fold it to 32
bits and seed a Mersenne Twister (flwrlabs/flower#7522), and that check the sum.

Invariants: Flower's modules are not changed, so that other apps in the process keep
Flower's masks. Sharp edges: a copy is of a function's code, by the names that it looks
up; a Flower release without these names is refused.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from drjax._errors import EngineError
from drjax._extras import needed

MODULUS = 2**32
CLIENT = "flwr.client.mod.secure_aggregation.secaggplus_mod"
SERVER = "flwr.server.workflow.secure_aggregation.secaggplus_workflow"
_DOMAIN = b"drjax mask\0"


def masks(
    seed: bytes, num_range: int, dimensions_list: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """Draw masks, int64 below 2^32, from all of a secret; a `pseudo_rand_gen`."""
    if num_range != MODULUS:
        raise ValueError(f"masks are modulo 2^32, and the server asks for {num_range}")
    sizes = [int(np.prod(shape)) for shape in dimensions_list]
    stream = hashlib.shake_256(_DOMAIN + seed).digest(4 * sum(sizes))
    words = np.frombuffer(stream, "<u4").astype(np.int64)
    pieces = np.split(words, np.cumsum(sizes)[:-1])
    return [x.reshape(d) for x, d in zip(pieces, dimensions_list, strict=True)]


def _copy(fn: FunctionType, **names: object) -> FunctionType:
    """Copy a Flower function that looks up `names`, to look up these in their place."""
    if missing := {*names} - {*fn.__code__.co_names}:
        raise EngineError(
            f"This release of Flower draws the masks of secure sums in another way "
            f"({fn.__qualname__} has no {', '.join(sorted(missing))}), so that they "
            "would be weak. Install a release that drjax[flower] names."
        )
    return FunctionType(
        fn.__code__, fn.__globals__ | names, fn.__name__, fn.__defaults__
    )


@functools.cache
def client_mod() -> Callable[..., Any]:
    """Return Flower's `secaggplus_mod`, with masks of full strength."""
    module = needed(CLIENT, "flower", "Flower")
    collect = _copy(module._collect_masked_vectors, pseudo_rand_gen=masks)
    return _copy(module.secaggplus_mod, _collect_masked_vectors=collect)


def workflow(check: Callable[[int, Sequence[np.ndarray]], None], **options: Any) -> Any:
    """Make Flower's workflow of SecAgg, with masks of full strength.

    `check(weights, vectors)` gets the sum of the clients' weights and the sums of their
    integers, and raises an error if they cannot be right. `options` are Flower's.
    """
    module = needed(SERVER, "flower", "Flower")

    def extract(parameters: list[np.ndarray]) -> tuple[int, list[np.ndarray]]:
        total, vectors = module.factor_extract(parameters)
        check(int(total), vectors)
        return total, vectors

    base = module.SecAggPlusWorkflow
    unmask = _copy(base.unmask_stage, pseudo_rand_gen=masks, factor_extract=extract)
    own = type("SecAggWorkflow", (base,), {"unmask_stage": unmask})
    # A share of each secret for each other client: the complete graph.
    return own(num_shares=1.0, max_weight=1.0, modulus_range=MODULUS, **options)
