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

from drjax._errors import DrjaxTypeError
from drjax._planner.arguments import flat_inputs
from drjax._sharding.layout import host_sharding
from drjax.backends.kept import Keep, Kept
from drjax.plan import Value


class KeptRun:
    """A compiled function of a plan, which returns handles (`Kept`) for kept results.

    A kept result is one that is an argument of the next call. Its array stays on the
    devices, and the next call donates it.

    Args:
      keep: Which results are which arguments; not empty.
      run_flat: The function of the plan: from the list of the arrays of `plan.inputs`
        to the list of those of `plan.outputs`.
      mesh: A `jax.sharding.Mesh` or `AbstractMesh`; None: the one in context.
    """

    def __init__(self, keep: Keep, run_flat: Callable[[list], list], mesh: Any):
        self._keep, self._plan, self._mesh = keep, keep.plan, mesh
        self._inputs = [i for pair in keep.pairs for i in pair.inputs]
        self._outputs = [i for pair in keep.pairs for i in pair.outputs]

        def run(staying: list, others: list) -> tuple[list, list]:
            outs = run_flat(_interleave(staying, others, self._inputs))
            return _divide(outs, self._outputs)

        self._run = jax.jit(run, donate_argnums=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        staying, others, handles = self._flat_arguments(args, kwargs)
        staying, others = self._run(staying, others)
        for handle in handles:
            handle.use_up()
        arrays = _interleave(staying, others, self._outputs)
        results = self._plan.out_tree.unflatten(arrays)
        return self._keep.results(results, arrays, _copies)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the function for these arguments, as `jax.jit(f).lower(...)`.

        Args:
          *args: The positional arguments. Handles (`Kept`) among them, which stand for
            the results of an earlier call, stay valid.
          **kwargs: The keyword arguments.

        Returns:
          A `jax.stages.Lowered`. After `.compile()`, `memory_analysis()` tells the
          bytes of results that take the buffers of arguments.
        """
        staying, others, _ = self._flat_arguments(args, kwargs)
        return self._run.lower(staying, others)

    def _flat_arguments(
        self, args: tuple, kwargs: dict
    ) -> tuple[list, list, list[Kept]]:
        """Flatten the arguments of a call, and replace handles by their arrays.

        Args:
          args: The positional arguments.
          kwargs: The keyword arguments.

        Returns:
          `(staying, others, handles)`: the list of the arrays of the arguments that the
          option `keep` names, which the call donates, in the order of `keep` and in the
          sharding of their results; the list of the arrays of all other arguments, in
          the order of `plan.inputs`; and the handles (`Kept`) that were passed, which
          are still valid.

        Raises:
          DrjaxTypeError: The call is inside `jax.jit` or another transformation.
          DrjaxValueError: A handle is a result of another function, or was passed to an
            earlier call, or is passed as another argument than its own.
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

    def _in_result_sharding(self, value: Value, x: Any) -> Any:
        """Return the array of a donated argument in the sharding of the kept result.

        XLA can put the result into the argument's buffer only if both have the same
        sharding: that of the partition on the mesh. The array is copied if it has
        another one; without a mesh it is returned as it is.

        Args:
          value: The input of the plan, a partitioned value that `keep` names.
          x: Its array, `[..., n, ...]`.
        """
        assert self._plan.partition is not None
        sharding = host_sharding(self._plan.partition, self._mesh)
        if sharding is None:
            return x
        spec = P(*[None] * value.axis, *sharding.spec)
        return jax.device_put(x, NamedSharding(sharding.mesh, spec))


def _divide(xs: Sequence[Any], indices: list[int]) -> tuple[list, list]:
    """Divide a sequence into the elements with some indices, and the others.

    Args:
      xs: The sequence.
      indices: The indices.

    Returns:
      `(some, others)`: the list of the elements in the order of `indices`, and the list
      of all other elements, in the order of `xs`.
    """
    return [xs[i] for i in indices], [
        x for i, x in enumerate(xs) if i not in set(indices)
    ]


def _interleave(some: Sequence[Any], others: Sequence[Any], indices: list[int]) -> list:
    """Join the two lists that `_divide` has returned to one: its inverse.

    Args:
      some: The elements with these indices: `some[i]` becomes element `indices[i]`.
      others: All other elements, in the order in which they fill the other indices.
      indices: The indices of `some` in the result.
    """
    by_index, rest = dict(zip(indices, some, strict=True)), iter(others)
    return [
        by_index[i] if i in by_index else next(rest)
        for i in range(len(some) + len(others))
    ]


def _copies(_: Any, arrays: Sequence[Any]) -> list:
    """Copy the arrays of a kept result, for `Kept.fetch`: the next call donates them.

    Args:
      _: The `KeptPair` of the result and its argument; not used.
      arrays: The arrays of the result's leaves.

    Returns:
      The list of the copies.
    """
    return [jnp.array(x, copy=True) for x in arrays]
