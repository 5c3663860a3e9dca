"""`drjax.check`: the signature of a program, with the kind of each value.

Input: a function and its arguments. Output: a `Signature`, which prints itself. The
kinds are those of partitioning inference. Plans are built twice, to count what they
save and rematerialize; nothing is compiled.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, PyTree
from drjax._context import resized
from drjax._errors import DrjaxValueError, PlanError
from drjax._jaxprs.associative import difference_of_orders
from drjax._jaxprs.eval_jaxpr import literal_value
from drjax._jaxprs.walk import live_equations
from drjax._partition import Partition
from drjax._plan.as_text import bytes_as_text
from drjax._planner.cost import Cost, saved_as_text
from drjax._planner.inline import inline_calls
from drjax._planner.make_plan import (
    Traced,
    check_planned,
    costs_of_residuals,
    inline_and_infer,
    trace,
)
from drjax._planner.naming import function_name, result_names
from drjax._planner.partitioning.environment import Environment
from drjax._sharding.layout import find_mesh, make_layout
from drjax.primitives import reduce_fold_p


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
      costs: By the option `residuals` of `drjax.jit`, `"store"` and `"recompute"`, what
        the server and each group then save and compute, two `Cost`s; {} if the function
        has no plan.
      chosen: Of a function of `drjax.jit`, the options that it runs with, and with
        `"auto"` the memory that decided; else "".
    """

    name: str
    partition: Partition | None
    arguments: tuple[Typed, ...]
    results: tuple[Typed, ...]
    axes: tuple[str, ...]
    devices: int
    costs: dict[str, tuple[Cost, Cost]] = field(default_factory=dict, compare=False)
    chosen: str = ""

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
        lines = [title, *lines[:count], "returns", *lines[count:]]
        lines += self._residual_lines()
        if self.chosen:
            lines.append(f"drjax.jit runs it with {self.chosen}")
        return "\n".join(lines)

    def _residual_lines(self) -> Iterator[str]:
        """Yield what is saved and rematerialized, by the option `residuals`.

        Nothing for a program of which no round needs what an earlier one has computed.
        """
        if not any(x.saved or x.rematerializes for _, x in self.costs.values()):
            return
        assert self.partition is not None
        groups = -(-self.partition.size // self.devices)
        yield f"between rounds, on each device with {groups} groups"
        for residuals, (server, group) in self.costs.items():
            yield f"  residuals={residuals!r}"
            total = bytes_as_text(groups * group.saved + server.saved)
            yield f"    saves {total}: {saved_as_text(server, group)}"
            yield f"    rematerializes {group.rematerialized_as_text()} of each group"

    def _placement(self) -> str:
        """Describe the mesh axes and the groups per device, for the printed text.

        For example "on mesh axis 'clients' of 8 devices with 4 groups each".
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


def check(fn: Callable, partitioned: PyTree = None) -> Callable[..., Signature]:
    """Infer which arguments and results of a program are global and which partitioned.

    Args:
      fn: A program, or any function that calls programs over one partition, as for
        `drjax.make_plan`.
      partitioned: Which arguments have one slice for each group: a tree of bools that
        is a prefix of the arguments, as for `drjax.make_plan`. Default: inferred.

    Returns:
      A function that takes the arguments of `fn` (or `jax.ShapeDtypeStruct`s with their
      shapes) and returns a `Signature`: print it. It has the kind of each argument and
      result, and the mesh axes and devices over which the groups are sharded. Of a
      function with several rounds, as a gradient through rounds, it says what is saved
      for later rounds, in bytes, and what is rematerialized, in floating-point
      operations as estimated, by the option `residuals` of `drjax.jit`. Of a function
      that `drjax.jit` returned, it says what it runs with; to know that of `"auto"`,
      it compiles it.

    Raises:
      PlanError: The function mixes the groups' slices other than by a drjax reduction,
        or is bound to a mesh: see `drjax.make_plan`.
      DrjaxValueError: The function given to a `drjax.reduce` is not associative. It is
        tried on the first three groups, if all arguments are arrays.

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
    check_planned("drjax.check", fn, partitioned)
    # Of what `drjax.jit` returns, which is on a layer above.
    chosen = getattr(fn, "chosen", None)
    fn = fn if chosen is None else fn.__wrapped__

    @functools.wraps(fn)
    def checker(*args: PyTree, **kwargs: PyTree) -> Signature:
        traced = trace(fn, partitioned, args, kwargs)
        kinds = inline_and_infer(traced.closed, traced.names, traced.declared)
        outs = result_names(traced.out_tree)
        _check_folds(kinds, lambda *xs: trace(fn, partitioned, *xs), args, kwargs)

        def typed(var: Atom, name: str) -> Typed:
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
            _costs(kinds, traced),
            "" if chosen is None else chosen(args, kwargs),
        )

    return checker


def _costs(kinds: Environment, traced: Traced) -> dict[str, tuple[Cost, Cost]]:
    """Count what plans of a function save and rematerialize; {} if it has none."""
    if kinds.partition is None:
        return {}
    try:
        return costs_of_residuals(kinds, traced.names, traced.declared)
    except PlanError:
        return {}


def _check_folds(
    kinds: Environment,
    trace_again: Callable[[PyTree, PyTree], Traced],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> None:
    """Raise `DrjaxValueError` if a fold gives two results for the first three groups.

    Only what these folds need is computed, of a program with three groups. Folds in
    loops are not tried, nor is a program that depends on the number of groups.
    """
    partition = kinds.partition
    leaves, tree = jax.tree.flatten((args, kwargs))
    known = all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves)
    tracers = any(isinstance(x, Tracer) for x in leaves)
    if partition is None or partition.size < 3 or not known or tracers:
        return
    if not any(e.primitive is reduce_fold_p for e in kinds.program.eqns):
        return
    axes = [kinds[v].axis for v in kinds.program.invars]
    cut = [
        x if axis is None else np.take(x, range(3), axis) if isinstance(x, np.ndarray)
        else jax.lax.slice_in_dim(x, 0, 3, axis=axis)
        for x, axis in zip(leaves, axes, strict=True)
    ]  # fmt: skip
    try:
        with resized((partition, 3)):
            program = inline_calls(trace_again(*tree.unflatten(cut)).closed)
    except Exception:  # of any class: code of the user may need the number it knows
        return
    folds = [e for e in program.eqns if e.primitive is reduce_fold_p]
    env: dict = {**program.consts, **dict(zip(program.invars, cut, strict=True))}
    read = lambda x: literal_value(x) if isinstance(x, Literal) else env[x]
    for eqn in live_equations(program.eqns, [v for e in folds for v in e.invars]):
        outs = _compat.bind_equation(eqn, [read(x) for x in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    for eqn in folds:
        n_states, fn = eqn.params["n_states"], _compat.jaxpr_as_fun(eqn.params["jaxpr"])
        operands = [jnp.asarray(read(x)) for x in eqn.invars]
        consts, states = operands[: -2 * n_states], operands[-n_states:]
        why = difference_of_orders(
            function_name(eqn.params["name"]),
            lambda a, b, fn=fn, consts=consts: fn(*consts, *a, *b),
            [[x[group] for x in states] for group in range(3)],
            eqn.params.get("commutative", False),
        )
        if why is not None:
            raise DrjaxValueError(why)
