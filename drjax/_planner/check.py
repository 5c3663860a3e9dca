"""`drjax.check`: the signature of a program, with the kind of each value.

Input: a function and its arguments. Output: a `Signature`, which prints itself. The
kinds are those of partitioning inference; no stage is built and nothing is compiled.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drjax._partition import Partition
from drjax._planner.make_plan import inline_and_infer, trace
from drjax._planner.naming import function_name, result_names
from drjax._sharding.layout import find_mesh, make_layout


@dataclass(frozen=True)
class Typed:
    """One array among the arguments or results of a program, and its kind.

    Attributes:
      name: The name of the argument (or `result`) and the path of the leaf in it, such
        as `model['w']`.
      shape: The shape of the whole array, group axis included.
      dtype: Its dtype.
      axis: The axis along which it is partitioned; None: it is global.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    axis: int | None

    @property
    def kind(self) -> str:
        """The kind in words, `global`, `partitioned` or `partitioned along axis 1`."""
        # Axis 0 is the rule in users' programs, so only others are printed.
        if self.axis is None:
            return "global"
        return "partitioned" + (f" along axis {self.axis}" if self.axis else "")


@dataclass(frozen=True)
class Signature:
    """The result of `drjax.check`: the kind of each argument and result. Print it.

    Attributes:
      name: The program's name.
      partition: Its partition; None if it calls no building block.
      arguments: A `Typed` for each leaf of its arguments.
      results: A `Typed` for each leaf of its results.
      axes: The names of the mesh axes that the partition is sharded over, () if the
        program runs locally.
      devices: The number of devices along those axes, 1 if there are none.
    """

    name: str
    partition: Partition | None
    arguments: tuple[Typed, ...]
    results: tuple[Typed, ...]
    axes: tuple[str, ...]
    devices: int

    def __str__(self) -> str:
        table = [
            (x.name, f"{x.dtype}[{','.join(map(str, x.shape))}]", x.kind)
            for x in (*self.arguments, *self.results)
        ]
        widths = [max((len(cells[i]) for cells in table), default=0) for i in range(2)]
        lines = [
            f"  {name:<{widths[0]}}  {dtype:<{widths[1]}}  {kind}"
            for name, dtype, kind in table
        ]
        count = len(self.arguments)
        title = f"{self.name}: calls no drjax building block"
        if self.partition is not None:
            title = f"{self.name} over partition {self.partition}, {self._placement()}"
        return "\n".join([title, *lines[:count], "returns", *lines[count:]])

    def _placement(self) -> str:
        """Describe the mesh axes and the groups per device, for the printed text.

        The signature must have a partition.

        Returns:
          A phrase such as "on mesh axis 'clients' of 8 devices with 4 groups each".
        """
        assert self.partition is not None
        if not self.axes:
            return "run locally (no mesh with such an axis in context)"
        # Rounded up: the last device may have padding.
        groups = -(-self.partition.size // self.devices)
        padded = " at most" if self.partition.size % self.devices else ""
        names = ", ".join(map(repr, self.axes))
        return (
            f"on mesh axis {names} of {self.devices} devices with {groups} groups each"
            + padded
        )


def check(fn: Callable, partitioned: Any = None) -> Callable[..., Signature]:
    """Infer which arguments and results of a program are global and which partitioned.

    Args:
      fn: A program, or any function that calls programs over one partition, as for
        `drjax.make_plan`.
      partitioned: Which arguments have one slice for each group: a tree of bools that
        is a prefix of the arguments, as for `drjax.make_plan`. Default: inferred.

    Returns:
      A function that takes the arguments of `fn` (or `jax.ShapeDtypeStruct`s with their
      shapes) and returns a `Signature`: print it. It has the kind of each argument and
      result, and the mesh axes and devices over which the groups are sharded.

    Raises:
      PlanError: The function mixes the groups' slices other than by a drjax reduction,
        or is bound to a mesh: see `drjax.make_plan`.

    Example:
      >>> import drjax, jax, jax.numpy as jnp
      >>> @drjax.program(clients=4)
      ... def loss(model, data):
      ...     y = drjax.map_fn(jnp.multiply, (drjax.broadcast(model), data))
      ...     return drjax.reduce_mean(y)
      >>> print(drjax.check(loss)(jnp.float32(2), jnp.ones(4, jnp.float32)))
      loss over partition clients:4, run locally (no mesh with such an axis in context)
        model   float32[]   global
        data    float32[4]  partitioned
      returns
        result  float32[]   global

    Source: Rush et al. 2024, section 5.
    """

    @functools.wraps(fn)
    def checker(*args, **kwargs) -> Signature:
        traced = trace(fn, partitioned, args, kwargs)
        kinds = inline_and_infer(traced.closed, traced.names, traced.declared)
        outs = result_names(traced.out_tree)

        def typed(var, name):
            return Typed(name, var.aval.shape, var.aval.dtype, kinds[var].axis)

        partition = kinds.partition
        # Without a building block nothing is sharded.
        axes, devices = (), 1
        # Kinds do not depend on devices; only this layout does, by the mesh in context.
        if partition is not None:
            placement = make_layout(partition, find_mesh(partition))
            axes, devices = placement.axes, placement.devices
        return Signature(
            function_name(getattr(fn, "__name__", "program")),
            partition,
            tuple(map(typed, kinds.program.invars, traced.names)),
            tuple(map(typed, kinds.program.outvars, outs)),
            axes,
            devices,
        )

    return checker
