"""Folds of the groups' states on the devices of a mesh, for the XLA backend.

Input: the folds of a round, and the groups' states on a device, chunk by chunk. Output:
the fold of the device's groups, and from those of all devices the folds of all groups.

    a chunk          balanced tree over its groups
    a device         its chunks one after another, in their order
    all devices      one all-gather of m states, and a tree over these

Invariants: states are combined in the order of the groups; one of a padded slot never
is, and the last devices, which have no group, are left out. The neutral state stands
once before all groups.

Sharp edges: JAX does not batch the function of two states of a loaded plan, so states
are combined pair by pair there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from drjax._jaxprs.eval_jaxpr import as_arrays
from drjax._primitives.fold_lowering import fold_by_tree, states_of_devices
from drjax._sharding.eval_on_mesh import evaluate_on_mesh
from drjax._sharding.layout import Layout
from drjax.plan import Fold, Value

States = list[Any]


@dataclass(frozen=True, eq=False)
class FoldWork:
    """A fold with the arrays of its global operands.

    Attributes:
      fold: The fold.
      consts: The arrays of the values that its function closes over.
      init: The leaves of the neutral state, `[*s]`.
    """

    fold: Fold
    consts: Sequence[Any]
    init: Sequence[Any]

    def combine(self, left: States, right: States) -> States:
        """Combine two states, lists of leaves `[*s]`."""
        args = [*self.consts, *left, *right]
        stage = self.fold.combine
        outs = evaluate_on_mesh(stage.jaxpr, args)
        return as_arrays(outs, [v.dtype for v in stage.outputs])

    def combine_pairs(self, left: States, right: States) -> States:
        """Combine each of k states with another, lists of leaves `[k, *s]`."""
        count = left[0].shape[0]
        if self.fold.combine.exported is not None or count == 1:
            each = lambda states, i: [x[i] for x in states]
            pairs = [self.combine(each(left, i), each(right, i)) for i in range(count)]
            return [jnp.stack(xs) for xs in zip(*pairs, strict=True)]
        return jax.vmap(self.combine)(left, right)

    def of_chunk(self, states: States, layout: Layout, indices) -> "ChunkState":
        """Fold the states of a chunk of c slots, in the order of the groups.

        Args:
          states: Their leaves, `[c, *s]`; those of padding are copies, and left out.
          layout: How the groups are laid out on the mesh.
          indices: The group indices of the slots, int32 `[c]`; of padding, n or more.

        Returns:
          A `ChunkState`.
        """
        real = indices < layout.partition.size if layout.uneven else None
        leaves = fold_by_tree(self.combine_pairs, states, real)
        return ChunkState([x[0] for x in leaves], None if real is None else real[0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkState:
    """The fold of the states of a chunk.

    Attributes:
      leaves: Its leaves, `[*s]`.
      real: Whether the chunk has groups, bool `[]`; None: it has.
    """

    leaves: States
    real: Any = None

    @property
    def value(self) -> States:
        """The leaves of the state, under the name that running reductions have."""
        return self.leaves


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class RunningFold:
    """The fold of the states that a loop over chunks has seen so far.

    Attributes:
      work: The fold.
      value: The leaves of the state, `[*s]`.
      empty: Whether there is none yet, bool `[]`: no combination sees what stands in
        `value` then.
    """

    work: FoldWork
    value: States
    empty: Any

    def add(self, x: ChunkState) -> "RunningFold":
        """Combine the fold with that of the next chunk; this one is unchanged."""
        first = lambda total, new: list(new)
        both = lambda total, new: _reshard_like(self.work.combine(total, new), new)
        # A branch, as a state of zeros may make the user's function loop forever.
        value = lax.cond(self.empty, first, both, self.value, x.leaves)
        if x.real is not None:
            pairs = zip(value, self.value, strict=True)
            value = [jnp.where(x.real, new, old) for new, old in pairs]
        return RunningFold(self.work, value, jnp.zeros_like(self.empty))

    def tree_flatten(self):
        return (self.value, self.empty), self.work

    @classmethod
    def tree_unflatten(cls, work, children):
        return cls(work, *children)


def _reshard_like(states: States, like: States) -> States:
    """Reshard states to the shardings of others on Explicit axes.

    The branches of a `cond` need results of equal types.

    Args:
      states: The leaves of the states.
      like: The leaves of the other ones.
    """
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return states
    pairs = zip(states, like, strict=True)
    return [jax.sharding.reshard(x, jax.typeof(y).sharding) for x, y in pairs]


def finish_folds(layout: Layout, works: list[FoldWork], states: list) -> list:
    """Fold the devices' states; called for one device, inside the `shard_map`.

    Args:
      layout: How the partition is laid out on the mesh.
      works: The folds.
      states: The leaves of the state of this device, `[*s]`, of all folds.

    Returns:
      The leaves of the fold of all groups, `[*s]`, of all folds.
    """
    own = [x[None] for x in states]
    used = -(-layout.partition.size // layout.per_device)
    return _fold_devices(works, states_of_devices(layout, own, frozenset(), used))


def finish_stacked_folds(layout: Layout, works: list[FoldWork], states: list) -> list:
    """Fold the devices' states; called for all devices, outside of a `shard_map`.

    Args:
      layout: How the partition is laid out on the mesh, with m devices.
      works: The folds.
      states: The leaves of the states of the devices, `[m, *s]`, of all folds.

    Returns:
      The leaves of the fold of all groups, `[*s]`, of all folds.
    """
    used = -(-layout.partition.size // layout.per_device)
    return _fold_devices(works, [x[:used] for x in states])


def _fold_devices(works: list[FoldWork], states: list) -> list:
    """Fold the states of all devices that have groups, after the neutral state.

    Args:
      works: The folds.
      states: The leaves of the states of all folds, `[used, *s]` of as many devices.

    Returns:
      The leaves of the fold of all groups, `[*s]`, of all folds.
    """
    outs, remaining = [], iter(states)
    for work in works:
        leaves = [next(remaining) for _ in work.init]
        total = fold_by_tree(work.combine_pairs, leaves)
        outs += work.combine(list(work.init), [x[0] for x in total])
    return outs


def operands_of(folds: Sequence[Fold]) -> list[Value]:
    """The global values that the functions of folds close over, and neutral states.

    `with_arrays` takes an array for each of them.
    """
    return [v for fold in folds for v in (*fold.consts, *fold.init)]


def with_arrays(folds: Sequence[Fold], arrays: Sequence[Any]) -> list[FoldWork]:
    """The folds with the arrays of their global operands.

    Args:
      folds: The folds.
      arrays: The array of each value in `operands_of(folds)`.
    """
    remaining = iter(arrays)
    take = lambda values: [next(remaining) for _ in values]
    return [FoldWork(fold, take(fold.consts), take(fold.init)) for fold in folds]


def split_states(works: list[FoldWork], flat: Sequence[Any]) -> list[States]:
    """Split a flat list of the leaves of all folds' states into one for each fold."""
    remaining: Callable[[], Any] = iter(flat).__next__
    return [[remaining() for _ in work.init] for work in works]
