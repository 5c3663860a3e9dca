"""Folds of the groups' states on the devices of a mesh, for the XLA backend.

Input: the folds of a round, and the groups' states on a device, chunk by chunk. Output:
the fold of the device's groups, and from those of all devices the folds of all groups.

    a chunk          balanced tree over its groups
    a device         its chunks one after another, in their order
    all devices      a tree over these, exchanged as the function allows

Invariants: states are combined in the order of the groups; one of a padded slot never
is, and the last devices, which have no group, are left out. The neutral state stands
once before all groups.

Sharp edges: JAX does not batch the function of two states of a loaded plan, so pairs
are combined one after another there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from drjax._compat.types import Array, GlobalArray
from drjax._jaxprs.eval_jaxpr import as_arrays
from drjax._plan_file.batches import over_groups
from drjax._primitives.fold_devices import fold_devices, is_pointwise
from drjax._primitives.fold_trees import fold_by_tree
from drjax._sharding.eval_on_mesh import evaluate_on_mesh
from drjax._sharding.execute import with_shardings_of
from drjax._sharding.layout import Layout
from drjax.plan import Fold, Value

States = list[Any]


@dataclass(frozen=True, eq=False)
class FoldWork:
    """A fold with the arrays of its global operands.

    A fold combines the states of all groups, in order, by an associative function of
    two states. A state is a list of arrays, its leaves. `consts` are the arrays of the
    global values that the function closes over, in order, and `init` is the neutral
    state.
    """

    fold: Fold
    consts: Sequence[Any]
    init: Sequence[Any]

    def combine(self, left: States, right: States) -> States:
        """Combine two states, that of earlier groups and that of later ones."""
        args = [*self.consts, *left, *right]
        stage = self.fold.combine
        outs = evaluate_on_mesh(stage.jaxpr, args)
        return as_arrays(outs, [v.dtype for v in stage.outputs])

    def combine_pairs(self, left: States, right: States) -> States:
        """Combine k pairs of states: entry i of `left` and of `right`, `[k, *s]`."""
        count, leaves = left[0].shape[0], len(left)
        combine = lambda *xs: self.combine([*xs[:leaves]], [*xs[leaves:]])
        axes: list[int | None] = [0] * (2 * leaves)
        return over_groups(self.fold.combine, combine, count, axes)(*left, *right)

    def of_chunk(self, states: States, layout: Layout, indices: Array) -> "ChunkState":
        """Fold the states of a chunk of c slots, `[c, *s]`, in the order of the groups.

        The neutral state is not part of the fold, nor is the state of a padding slot,
        which has no group. `indices` are the group indices of the slots, int32 `[c]`;
        of padding, n or more.
        """
        real = indices < layout.partition.size if layout.uneven else None
        leaves = fold_by_tree(self.combine_pairs, states, real)
        return ChunkState([x[0] for x in leaves], None if real is None else real[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkState:
    """The fold of the states of a chunk of groups.

    Attributes:
      leaves: The leaves of the fold, `[*s]`; they mean nothing if the chunk has no
        group.
      real: Whether the chunk has a group, bool `[]`. None: it has, as there is no
        padding.
    """

    leaves: States
    real: Any = None

    @property
    def value(self) -> States:
        """The leaves of the fold, which is `leaves`.

        `Running` and `RunningFold` have a `value`, too, so that callers can read the
        results of one chunk as those of a loop over chunks.
        """
        return self.leaves


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class RunningFold:
    """The fold of the states that a loop over chunks has seen so far, an accumulator.

    Attributes:
      work: The fold, with the arrays of its global operands.
      value: The leaves of the state, `[*s]`; zeros before the first chunk.
      empty: Whether no chunk was added yet, bool `[]`. Then `value` is no state, and is
        never passed to the user's function.
    """

    work: FoldWork
    value: States
    empty: Any

    def add(self, x: ChunkState) -> "RunningFold":
        """Return the fold of the chunks so far and the next chunk, as another one.

        The value so far is the left argument of the user's function, that of the chunk
        the right one. If `self.empty` is true, the value is that of the chunk. If the
        chunk has no group (`x.real` is false), the value is that of `self`. The result
        is never empty.
        """
        value = self._combined(x.leaves)
        if x.real is not None:
            pairs = zip(value, self.value, strict=True)
            value = [jnp.where(x.real, new, old) for new, old in pairs]
        return RunningFold(self.work, value, jnp.zeros_like(self.empty))

    def _combined(self, states: States) -> States:
        """Combine the value so far with the state of a chunk, if it is not empty."""
        first = lambda total, new: list(new)
        both = lambda total, new: with_shardings_of(self.work.combine(total, new), new)
        if not is_pointwise(self.work.fold.combine.jaxpr):
            # A branch, as a state of zeros may make the user's function loop forever.
            return lax.cond(self.empty, first, both, self.value, states)
        # Results of branches have memory of their own, besides that of the value.
        unless_empty = lambda xs: [
            jnp.where(self.empty, new, x) for x, new in zip(xs, states, strict=True)
        ]
        return unless_empty(both(unless_empty(self.value), states))

    def tree_flatten(self) -> tuple[tuple[States, Array], FoldWork]:
        return (self.value, self.empty), self.work

    @classmethod
    def tree_unflatten(
        cls, work: FoldWork, children: tuple[States, Array]
    ) -> "RunningFold":
        return cls(work, *children)


def finish_folds(layout: Layout, works: list[FoldWork], states: States) -> States:
    """Fold the devices' states; called for one device, inside the `shard_map`.

    They are folded in the order of the devices, after the neutral state, as
    `fold_devices.py` says. Devices without groups are left out.
    `states` and the result, which is the same on all devices, have for each fold, in
    order, the leaves `[*s]` of its state, in one flat list.
    """
    outs: States = []
    for work, state in zip(works, split_states(works, states), strict=True):
        own = [x[None] for x in state]
        stage = work.fold.combine
        jaxpr = stage.jaxpr if stage.exported is None else None
        combine, init = work.combine_pairs, list(work.init)
        outs += fold_devices(layout, jaxpr, work.consts, combine, init, own)
    return outs


def finish_stacked_folds(
    layout: Layout, works: list[FoldWork], states: States
) -> States:
    """As `finish_folds`, but called for all m devices, outside of a `shard_map`.

    The leaves in `states` are `[m, *s]`, those of the m devices.
    """
    return _fold_devices(works, [x[: layout.used] for x in states])


def _fold_devices(works: list[FoldWork], states: States) -> States:
    """Fold the states of the d devices that have groups, after the neutral state.

    `states` has for each fold, in order, the leaves `[d, *s]` of the devices' states,
    and the result the leaves `[*s]` of its result, in one flat list.
    """
    outs, remaining = [], iter(states)
    for work in works:
        leaves = [next(remaining) for _ in work.init]
        total = fold_by_tree(work.combine_pairs, leaves)
        outs += work.combine(list(work.init), [x[0] for x in total])
    return outs


def operands_of(folds: Sequence[Fold]) -> list[Value]:
    """Return the global values that the folds need, as one list.

    For each fold, in order, these are the values that its function closes over, and
    then the leaves of its neutral state. `with_arrays` takes an array for each of them.
    """
    return [v for fold in folds for v in (*fold.consts, *fold.init)]


def with_arrays(folds: Sequence[Fold], arrays: Sequence[GlobalArray]) -> list[FoldWork]:
    """Return a `FoldWork` for each fold, with the arrays of its global operands.

    `arrays` are those of `operands_of(folds)`, in that order.
    """
    remaining = iter(arrays)
    take = lambda values: [next(remaining) for _ in values]
    return [FoldWork(fold, take(fold.consts), take(fold.init)) for fold in folds]


def split_states(works: list[FoldWork], flat: Sequence[Array]) -> list[States]:
    """Split a flat list of the leaves of all folds' states, into one for each fold."""
    remaining: Callable[[], Any] = iter(flat).__next__
    return [[remaining() for _ in work.init] for work in works]
