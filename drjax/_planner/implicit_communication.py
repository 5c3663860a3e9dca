"""Equations of `lax` that combine groups: communication that a program implies.

Input: an equation and the group axes of its operands. Output: the same equation written
with building blocks, or None.

* A registered reduction of `jax.lax` over the group axis, such as a sum or a maximum,
  is that of drjax, such as `reduce_sum` or `reduce_max`, whether a user wrote it
  (`jnp.mean(x)`) or a derivative did (the transpose of the broadcast of a global value
  that meets partitioned ones in pointwise equations). Each group first reduces the
  other axes by itself.
* A product that contracts the group axis, such as the derivative of a product of a
  partitioned value and a matrix, is one product in each group, and their sum. So is a
  convolution.
* A scan over the groups may be a map: see `scan_over_groups.py`.
* Reading, or updating, the slices of some groups: see `read_and_update_groups.py`.
* Updating an array that has no group axis by a slice of each group: the server does it.

Invariants: equations are recognized by what they compute and never by their source
lines or names. Sharp edges: a sum in another order rounds otherwise, as any reduction
over groups does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._compat.types import Array, Eqn, GlobalArray
from drjax._partition import Partition
from drjax._planner.bind_blocks import (
    WithBlocks,
    gather_groups,
    map_groups,
    reduce_groups,
)
from drjax._planner.gathered_columns import columns_p
from drjax._planner.moves_between_groups import move_groups
from drjax._planner.read_and_update_groups import (
    SCATTERS,
    read_some_groups,
    update_some_groups,
)
from drjax._planner.scan_over_groups import scan_as_map
from drjax._planner.unbatching.core import drop
from drjax._primitives import reduce_ops
from drjax._primitives.map_columns import evaluate_columns
from drjax.primitives import reduce_sum_p


@dataclass(frozen=True)
class ImplicitCommunication:
    """The communication that an equation implies, as a function that replaces it.

    Attributes:
      fn: `fn(partition, *operands)` computes the results of the equation, one array or
        a list, with building blocks.
      in_axes: For each operand the group axis along which `fn` takes it partitioned, so
        that a global operand is scattered; None: `fn` takes it as a global value.
      out_axes: For each result its group axis, None if it is global; (): all are
        global.
    """

    fn: Callable
    in_axes: tuple[int | None, ...]
    out_axes: tuple[int | None, ...] = ()

    def result_axes(self, eqn: Eqn) -> tuple[int | None, ...]:
        """Return the group axis of each result of the equation; None: it is global.

        Unlike `out_axes`, it is never () for an equation with results.
        """
        return self.out_axes or (None,) * len(eqn.outvars)


def implicit_communication(
    eqn: Eqn, axes: Sequence[int | None], index: tuple[int, ...] | None = None
) -> ImplicitCommunication | None:
    """Recognize an equation of JAX that combines or moves slices of groups.

    For example, a `lax.reduce_sum` over the group axis is a `drjax.reduce_sum`. `index`
    has the values of its second operand, the indices `[n, 1]` of a gather or scatter,
    if they are known while planning. None if the equation implies no communication, or
    some that building blocks cannot express.
    """
    if eqn.primitive.name == "scan":
        mapped = scan_as_map(eqn, axes)
        return None if mapped is None else ImplicitCommunication(*mapped)
    if eqn.primitive is columns_p:
        # Its function closes over slices: what it does with them may have a plan.
        inlined = lambda _, *operands: evaluate_columns(*operands, **eqn.params)
        return ImplicitCommunication(inlined, tuple(axes))
    moved = move_groups(eqn, axes, index)
    if moved is not None:
        return ImplicitCommunication(*moved)
    if _updates_population(eqn, axes):
        return gather_operands(eqn, axes)
    # These take two partitioned operands; all others at most one.
    if eqn.primitive is lax.dot_general_p:
        return _contraction(eqn, *axes)
    if eqn.primitive is lax.conv_general_dilated_p:
        return _convolution(eqn, *axes)
    axis, *others = axes or [None]
    if axis is None or any(other is not None for other in others):
        return None
    fn = _with_global_result(eqn, axis)
    if fn is not None:
        return ImplicitCommunication(fn, (axis, *others))
    fn = update_some_groups(eqn, axis)
    return None if fn is None else ImplicitCommunication(fn, (axis, *others), (axis,))


def _updates_population(eqn: Eqn, axes: Sequence[int | None]) -> bool:
    """Whether an equation updates an array without group axis by a slice of each group.

    The derivative of reading a cohort from a population, `data[ids]`, does: each group
    has the cotangent of its element of `data`. The server adds them to the array.
    """
    if eqn.primitive.name not in SCATTERS:
        return False
    array, _, updates = (v.aval for v in eqn.invars)
    axis, dims = axes[2], eqn.params["dimension_numbers"]
    if axes[0] is not None or axis is None or axis in dims.update_window_dims:
        return False
    return not dims.operand_batching_dims and updates.shape[axis] not in array.shape


def gather_operands(
    eqn: Eqn, axes: Sequence[int | None]
) -> ImplicitCommunication | None:
    """Rewrite an equation to act once on whole arrays, after a gather of its operands.

    It is for equations over a single group, whose gather costs nothing, and for updates
    of an array without group axis by a slice of each group. All results are global.
    None for callbacks and effects, which would see the whole arrays.
    """
    # Python would receive whole arrays where a group has a slice.
    if "callback" in eqn.primitive.name or eqn.effects:
        return None

    def on_gathered(partition: Partition, *operands: Array) -> list[GlobalArray]:
        whole = [
            x if axis is None else gather_groups(x, axis, partition)
            for x, axis in zip(operands, axes, strict=True)
        ]
        return _compat.bind_equation(eqn, whole)

    return ImplicitCommunication(on_gathered, tuple(axes))


def _with_global_result(eqn: Eqn, axis: int) -> WithBlocks | None:
    """Rewrite an equation that reduces, or reads some, groups of its first operand.

    No other operand is partitioned. None if it does neither.
    """
    op = reduce_ops.of_lax_primitive(eqn.primitive)
    if op is not None:
        return _reduction(eqn, op, axis)
    return read_some_groups(eqn, axis)


def _contraction(
    eqn: Eqn, left: int | None, right: int | None
) -> ImplicitCommunication | None:
    """Rewrite a product that contracts the group axis as products and a `reduce_sum`.

    With the group axis c of x and of y, `sum_c x[c] y[c]` is by definition the sum over
    groups of the products of their slices: the contraction becomes a batch dimension,
    and a `reduce_sum` over it. An operand that is not partitioned is scattered. None if
    no group axis is contracted, or if both operands are partitioned and their group
    axes are not contracted with each other.
    """
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    if left is not None and left in lc:
        position = lc.index(left)
    elif right is not None and right in rc:
        position = rc.index(right)
    else:
        return None
    in_axes = lc[position], rc[position]
    # Else the products of one group would need slices of other groups.
    matches = left in (None, in_axes[0]) and right in (None, in_axes[1])
    if not matches:
        return None
    params = dict(eqn.params)
    # The groups become the first batch dimension and so axis 0 of the result, along
    # which reductions take them.
    params["dimension_numbers"] = (
        (drop(position, lc), drop(position, rc)),
        ((in_axes[0], *lb), (in_axes[1], *rb)),
    )

    def products(partition: Partition, x: Array, y: Array) -> GlobalArray:
        per_group = lax.dot_general_p.bind(x, y, **params)
        return reduce_groups(reduce_sum_p, per_group, partition)

    return ImplicitCommunication(products, in_axes)


def _convolution(
    eqn: Eqn, left: int | None, right: int | None
) -> ImplicitCommunication | None:
    """Rewrite a convolution whose input features are the groups, with a `reduce_sum`.

    Each group convolves its feature, and the sum over groups contracts them. The
    derivative of a convolution in its kernel has this form: its input features are the
    batch. None if an operand is partitioned along another dimension, if neither is
    partitioned, or if the convolution has several feature groups or batch groups.
    """
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    in_axes = dims.lhs_spec[1], dims.rhs_spec[1]
    matches = left in (None, in_axes[0]) and right in (None, in_axes[1])
    # Feature groups split the contracted axis, so that it is no single sum.
    plain = params["feature_group_count"] == params["batch_group_count"] == 1
    if (left is None and right is None) or not (matches and plain):
        return None

    def convolve(x: Array, y: Array) -> list[Array]:
        # One group is one feature, so the slice of each operand keeps that dimension.
        x, y = lax.expand_dims(x, in_axes[:1]), lax.expand_dims(y, in_axes[1:])
        return [lax.conv_general_dilated_p.bind(x, y, **params)]

    def sums(partition: Partition, x: Array, y: Array) -> GlobalArray:
        x, y = jnp.moveaxis(x, in_axes[0], 0), jnp.moveaxis(y, in_axes[1], 0)
        # A map_fn, as no rule unbatches a convolution of two partitioned operands.
        (per_group,) = map_groups(convolve, x, y, partition=partition)
        return reduce_groups(reduce_sum_p, per_group, partition)

    return ImplicitCommunication(sums, in_axes)


def _reduction(eqn: Eqn, op: reduce_ops.ReduceOp, axis: int) -> WithBlocks | None:
    """Rewrite a reduction of `jax.lax` over the group axis, and maybe over others.

    `op` is the reduction of drjax that computes the same over the group axis. None if
    `eqn` does not reduce this axis, or if drjax has no such reduction of this dtype.
    """
    axes, dtype = eqn.params["axes"], eqn.invars[0].aval.dtype
    # On bools they are a maximum and a minimum, on integers they combine bits.
    bitwise = eqn.primitive in (lax.reduce_or_p, lax.reduce_and_p)
    # lax orders complex values lexicographically; drjax has no such reduction.
    unordered = op.selects and jnp.issubdtype(dtype, jnp.complexfloating)
    # Without the group axis, each group reduces by itself: an unbatching rule.
    if axis not in axes or unordered or (bitwise and dtype != jnp.bool_):
        return None
    others = tuple(a for a in axes if a != axis)
    # The position of the group axis after the other axes are gone.
    left = axis - sum(a < axis for a in others)
    params = {**eqn.params, "axes": others}

    def reduction(partition: Partition, x: Array) -> GlobalArray:
        # Each group reduces its other axes first, so that less is communicated.
        per_group = eqn.primitive.bind(x, **params) if others else x
        slices = jnp.moveaxis(per_group, left, 0)
        return reduce_groups(op.primitive, slices, partition)

    return reduction
