"""The checks of users' functions given to `reduce` and `reduce_columns`.

Such a function sees whole arrays, and is traced within the building block.

Input: a trace of such a function, and the sentences of its errors. Output: its jaxpr
and what it closes over, or an error.

Invariants: the function sees no partition. So building blocks, collectives over the
partition's axes, effects, and arrays sharded over these axes are errors in it.
Sharp edges: a partitioned value is an array like any other. If the function closes over
one, that is an error if its type shows the partition's axes, else when a plan is made.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._api.trace_map import collective_axes, mentions, names_own_axis
from drjax._compat.types import Array
from drjax._errors import DrjaxError, DrjaxTypeError, MeshError, ScopeError
from drjax._jaxprs.walk import deep_equations
from drjax._sharding.layout import Layout


@dataclass(frozen=True)
class PureFunctionErrors:
    """The checks of a function that a building block traces, and their errors' texts.

    It is for functions given to `reduce` and `reduce_columns`, which see plain arrays.

    Attributes:
      what: The beginning of each error, which names the function and the building
        block.
      sees: The rest of the error about building blocks in the function: what it sees,
        and what to do instead.
      has: The rest of the error about collectives: what it has, and what to do instead.
      effects: The rest of the error about effects: how often they would run, and what
        to do instead.
    """

    what: str
    layout: Layout
    sees: str
    has: str
    effects: str

    def checked(
        self, trace: Callable[[], tuple[Any, list[Array]]]
    ) -> tuple[Any, list[Array]]:
        """Trace a function given to `reduce` or `reduce_columns`, and check it.

        `trace` returns its closed jaxpr, and the list of the arrays and tracers that it
        closes over; so does this.
        """
        layout = self.layout
        scope = ScopeError(
            f"{self.what} calls a building block or a program; {self.sees}"
        )
        collective = MeshError(
            f"{self.what} uses a collective over the axis of partition "
            f"{layout.partition} itself, {layout.partition.mesh_axes}; {self.has}"
        )
        try:
            jaxpr, consts = trace()
        except ScopeError as error:
            raise scope from error
        except DrjaxError:
            raise
        except NameError as error:
            if names_own_axis(error, layout):
                raise collective from error
            raise
        if any("partition" in eqn.params for eqn in deep_equations(jaxpr)):
            raise scope
        if collective_axes(jaxpr) & set(layout.partition.mesh_axes):
            raise collective
        if effects := sorted(map(str, _compat.effects_but_axes(jaxpr))):
            raise DrjaxTypeError(
                f"{self.what} has effects, {effects}, which would run {self.effects}"
            )
        self._check_closed_over(consts)
        return jaxpr, consts

    def _check_closed_over(self, consts: Sequence[Array]) -> None:
        """Raise `MeshError` if the user's function closes over a partitioned value.

        Such a value is recognized by its type only: an array that is sharded over the
        partition's Explicit mesh axes, or varies over its Manual ones. Any other
        partitioned value looks like a global one, and is not an error in this check.
        """
        layout = self.layout
        for const in consts:
            aval = _compat.typeof(const)
            varying = _compat.varying(aval) & set(layout.axes)
            if mentions(aval.sharding, layout.axes) or varying:
                raise MeshError(
                    f"{self.what} closes over an array that is sharded over "
                    f"{layout.axes}, along which the groups of {layout.partition} are. "
                    "Close over global values only, such as a result of "
                    "drjax.reduce_sum or drjax.gather."
                )


def without_other_axes(x: Array, layout: Layout, partitioned: bool = True) -> Array:
    """Reshard an array, on Explicit axes, so that only its group axis is sharded.

    It is for building blocks that distribute the elements of slices over the
    partition's axes, or compute with whole slices. It runs outside the building block's
    primitive, so that JAX transposes it. A global array is not sharded at all.
    """
    sharding = _compat.typeof(x).sharding
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    lead = (layout.spec_entry,) if partitioned else ()
    spec = P(*lead, *[None] * (x.ndim - len(lead)))
    if not explicit or sharding.spec == spec:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))
