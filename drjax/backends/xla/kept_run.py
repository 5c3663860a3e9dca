"""A plan on XLA whose kept results take the buffers of their arguments.

Input: the function of a plan on flat inputs, and a `Keep`. Output: a compiled function
with the signature of the planned one, in which results that stay are `Kept`.

Invariants: kept arguments are donated, and have the shapes, dtypes and shardings of
their results, so that XLA puts the results into their buffers: a call allocates nothing
for them.

Sharp edges: arrays that are passed in the place of a handle, in the first call, are
donated too. If a call fails on the device, its handles are lost; if it fails before, as
by a wrong argument, they are still valid.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from drjax._compat.types import Array, Mesh, PartitionedArray, PyTree
from drjax._errors import DrjaxTypeError
from drjax._planner.arguments import flat_inputs
from drjax._sharding.layout import host_sharding
from drjax.engines.slices.kept import Keep, Kept, KeptPair
from drjax.plan import Value


class KeptRun:
    """A compiled function of a plan, which returns handles (`Kept`) for kept results.

    A kept result is one that is an argument of the next call. Its array stays on the
    devices, and the next call donates it. `keep` is not empty. `run_flat` runs the plan
    on the list of its inputs. `mesh` None: the one in context.
    """

    def __init__(
        self,
        keep: Keep,
        run_flat: Callable[[list[Array]], list[Array]],
        mesh: Mesh | None,
    ):
        self._keep, self._plan, self._mesh = keep, keep.plan, mesh
        self._inputs = [i for pair in keep.pairs for i in pair.inputs]
        self._outputs = [i for pair in keep.pairs for i in pair.outputs]

        def run(
            staying: list[Array], others: list[Array]
        ) -> tuple[list[Array], list[Array]]:
            outs = run_flat(_interleave(staying, others, self._inputs))
            return _divide(outs, self._outputs)

        self._run = jax.jit(run, donate_argnums=0)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        staying, others, handles = self._flat_arguments(args, kwargs)
        staying, others = self._run(staying, others)
        for handle in handles:
            handle.use_up()
        arrays = _interleave(staying, others, self._outputs)
        results = self._plan.out_tree.unflatten(arrays)
        return self._keep.results(results, arrays, _copies)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the function for these arguments, as `jax.jit(f).lower(...)`.

        Handles (`Kept`) among them, which stand for the results of an earlier call,
        stay valid. After `.compile()`, `memory_analysis()` tells the bytes of results
        that take the buffers of arguments.
        """
        staying, others, _ = self._flat_arguments(args, kwargs)
        return self._run.lower(staying, others)

    def _flat_arguments(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[list[Array], list[Array], list[Kept]]:
        """Flatten the arguments of a call, and replace handles by their arrays.

        The result is `(staying, others, handles)`: the arrays of the arguments that the
        option `keep` names, which the call donates, in the order of `keep` and in the
        sharding of their results; the arrays of all other arguments, in the order of
        `plan.inputs`; and the handles that were passed, which are still valid.
        """
        args, kwargs, handles = self._keep.open(args, kwargs)
        leaves = flat_inputs(self._plan, args, kwargs)
        staying, others = _divide(leaves, self._inputs)
        for i, x in zip(self._inputs, staying, strict=True):
            if isinstance(x, Tracer):
                raise DrjaxTypeError(
                    f"The function of {self._plan.name} with keep= is compiled "
                    "already, and its handles hold arrays: call it outside of "
                    f"jax.jit and other transformations, got {x} for "
                    f"{self._plan.inputs[i].name}."
                )
        values = [self._plan.inputs[i] for i in self._inputs]
        return list(map(self._in_result_sharding, values, staying)), others, handles

    def _in_result_sharding(
        self, value: Value, x: PartitionedArray
    ) -> PartitionedArray:
        """Return the array of a donated argument in the sharding of the kept result.

        XLA can put the result into the argument's buffer only if both have the same
        sharding: that of the partition on the mesh. The array, `[..., n, ...]`, is
        copied if it has another one; without a mesh it is returned as it is.
        """
        assert self._plan.partition is not None
        sharding = host_sharding(self._plan.partition, self._mesh)
        if sharding is None:
            return x
        spec = P(*[None] * value.axis, *sharding.spec)
        return jax.device_put(x, NamedSharding(sharding.mesh, spec))


def _divide(xs: Sequence[Array], indices: list[int]) -> tuple[list[Array], list[Array]]:
    """Divide a sequence into the elements with some indices, and the others.

    The first are in the order of `indices`, and the others in that of `xs`.
    """
    return [xs[i] for i in indices], [
        x for i, x in enumerate(xs) if i not in set(indices)
    ]


def _interleave(
    some: Sequence[Array], others: Sequence[Array], indices: list[int]
) -> list[Array]:
    """Join the two lists that `_divide` has returned to one: its inverse.

    `some[i]` becomes element `indices[i]`, and `others` fill the other places in order.
    """
    by_index, rest = dict(zip(indices, some, strict=True)), iter(others)
    return [
        by_index[i] if i in by_index else next(rest)
        for i in range(len(some) + len(others))
    ]


def _copies(_: KeptPair, arrays: Sequence[Array]) -> list[Array]:
    """Copy a kept result, whose arrays the next call donates, for `Kept.fetch`."""
    return [jnp.array(x, copy=True) for x in arrays]
