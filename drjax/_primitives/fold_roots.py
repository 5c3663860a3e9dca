"""The root of a fold, over the devices: its value, tangents and cotangents.

Input: the tree of a device's groups, its top `[1, *s]`, and what the device has
received of the others (`fold_devices.py`), or nothing yet. Output, with the first state
in front: the value; tangents from that of the device's own top; or, backwards, the
cotangent of its own top.

    way        tangents                                   cotangents
    gathered   of all tops, its own alone not zero;       of all tops, of which a device
               an all-reduce                              takes its own
    columns    of its columns, after an all-to-all;       of its columns; an all-to-all
               an all-gather                              returns those of its own top
    swaps      up its path, others' zero; an all-reduce   down its path

Invariants: what the function closes over has a term at each node. Cotangents of it are
parts, to be summed over the devices, and each node counts on one device only; those of
the first state are complete, the same on all devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._compat.types import Array, Aval, ClosedJaxpr
from drjax._primitives.device_sums import psum
from drjax._primitives.fold_devices import Columns, Swaps, states_of_devices
from drjax._primitives.fold_trees import (
    COLUMNS,
    SWAPS,
    States,
    Tree,
    added,
    first_of,
)
from drjax._sharding.execute import vary
from drjax._sharding.layout import Layout


@dataclass(frozen=True)
class Root:
    """The root by gathered tops; a device's index is int32 `[]`."""

    layout: Layout
    tree: Tree
    device: Array | int
    varying: frozenset[str]

    def exchange(self, own: States) -> States:
        """Receive what the device needs of others' tops: arrays to save."""
        return states_of_devices(self.layout, own, self.varying)

    def value(self, saved: States, own: States) -> States:
        """Return the value of the fold, `[*s]`."""
        del own
        return first_of(self.tree.root(saved))

    def tangents(self, saved: States, own: States, moved: list[Array]) -> list[Array]:
        """Return the tangents of the value from those of the own top, `[1, *s]`."""
        del own
        dconsts, dinit, _ = self.tree.tangents()
        placed = [jnp.where(self._is_mine(t), t, jnp.zeros_like(t)) for t in moved]
        with _compat.without_vma():
            total = self.tree.push_root(
                [*saved, *placed], self.once(dconsts), self.once(dinit)
            )
        return self.sum(first_of(total))

    def cotangents(
        self, saved: States, own: States
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """Return those of what is closed over, the first state, the own top."""
        del own
        consts, init, tops = self.tree.pull_root(saved)
        mine = [
            jnp.sum(jnp.where(self._is_mine(x), x, jnp.zeros_like(x)), 0, keepdims=True)
            for x in tops
        ]
        return self.once(consts), init, mine

    def once(self, xs: Sequence[Array]) -> list[Array]:
        """Keep on the first device what all have; zeros elsewhere."""
        return zeros_unless(self.device == 0, xs)

    def sum(self, xs: Sequence[Array]) -> list[Array]:
        """Sum values over the devices, in one all-reduce."""
        if not (xs and self.layout.axes):
            return [*xs]
        axes = self.varying | set(self.layout.axes)
        return [*psum(self.layout, *(vary(x, axes) for x in xs))]

    def _is_mine(self, x: Array) -> Array:
        """Mark the own top among those of all devices."""
        places = lax.iota(jnp.int32, self.layout.used) == self.device
        return places.reshape(-1, *[1] * (x.ndim - 1))


@dataclass(frozen=True)
class RootOfColumns(Root):
    """The root by columns; `columns` is the tree of parts of the elements.

    Scalars enter on the first device only, backwards, as all columns read them.
    """

    columns: Columns
    parts: Sequence[ClosedJaxpr]

    def exchange(self, own: States) -> States:
        return [self.columns.exchange(i, x) for i, x in enumerate(own)]

    def _root(self, extra: list[Array]) -> Tree:
        """The tree of this device's columns, with their cotangents if there are any."""
        init = [self.columns.own(i, y) for i, y in enumerate(self.tree.init)]
        return self.tree.with_root(self.parts, init, extra)

    def value(self, saved: States, own: States) -> States:
        total = first_of(self._root([]).root(saved))
        return [self.columns.whole(i, y) for i, y in enumerate(total)]

    def tangents(self, saved: States, own: States, moved: list[Array]) -> list[Array]:
        dconsts, dinit, _ = self.tree.tangents()
        active = self._active()
        columns = [
            self.columns.exchange(i, t) for i, t in zip(active, moved, strict=True)
        ]
        dinit = [self.columns.own(i, t) for i, t in zip(active, dinit, strict=True)]
        total = self._root([]).push_root([*saved, *columns], dconsts, dinit)
        pairs = zip(active, first_of(total), strict=True)
        return [self.columns.whole(i, t) for i, t in pairs]

    def cotangents(
        self, saved: States, own: States
    ) -> tuple[list[Array], list[Array], list[Array]]:
        active, extra = self._active(), []
        for i, ct in zip(active, self.tree.extra, strict=True):
            part = self.columns.own(i, ct, padding="zero")
            extra += self.once([part]) if self.columns.is_scalar(i) else [part]
        consts, init, tops = self._root(extra).pull_root(saved)
        scalars = iter(
            self.sum([x for i, x in zip(active, init, strict=True) if self._scalar(i)])
        )
        init = [
            next(scalars) if self._scalar(i) else self.columns.whole(i, x)
            for i, x in zip(active, init, strict=True)
        ]
        mine = [self.columns.back(i, x) for i, x in zip(active, tops, strict=True)]
        return consts, init, mine

    def _scalar(self, i: int) -> bool:
        return self.columns.is_scalar(i)

    def _active(self) -> list[int]:
        """The leaves of a state that have tangents."""
        return [i for i, a in enumerate(self.tree.mode.active_out) if a]


@dataclass(frozen=True)
class RootOfSwaps(Root):
    """The root by swaps: what is saved has the states next to the path, `[levels]`."""

    @property
    def swaps(self) -> Swaps:
        return Swaps(self.layout, self.tree.combine)

    def exchange(self, own: States) -> States:
        levels = self.swaps.exchange(own)
        return [jnp.concatenate(xs) for xs in zip(*levels, strict=True)]

    def _others(self, saved: States) -> list[States]:
        return [[x[i : i + 1] for x in saved] for i in range(len(self.swaps.levels))]

    def _first_state(self) -> States:
        return [y[None] for y in self.tree.init]

    def value(self, saved: States, own: States) -> States:
        top = self.swaps.path(own, self._others(saved))[-1]
        return first_of(self.tree.combine(self._first_state(), top))

    def tangents(self, saved: States, own: States, moved: list[Array]) -> list[Array]:
        dconsts, dinit, _ = self.tree.tangents()
        others, n_states = self._others(saved), self.tree.n_states
        state, moved = own, zeros_unless(self.device < self.layout.used, moved)
        for swap, other in zip(self.swaps.levels, others, strict=True):
            place = self.swaps.place(swap)
            none = [jnp.zeros_like(t) for t in moved]
            first, second = place.in_order([*state, *moved], [*other, *none])
            push = self.tree.push(zeros_unless(place.is_first, dconsts))
            new = push(first, second)[n_states:]
            both = place.real & place.meets
            moved = [jnp.where(both, x, y) for x, y in zip(new, moved, strict=True)]
            state = self.swaps.step(swap, state, other)
        push = self.tree.push(self.once(dconsts))
        init = [*self._first_state(), *(t[None] for t in self.once(dinit))]
        return self.sum(first_of(push(init, [*state, *moved])[n_states:]))

    def cotangents(
        self, saved: States, own: States
    ) -> tuple[list[Array], list[Array], list[Array]]:
        others, tree = self._others(saved), self.tree
        path = self.swaps.path(own, others)
        above = [ct[None] for ct in tree.extra]
        consts, init, cts = tree.pull_pairs(self._first_state(), path[-1], above)
        consts = self.once(first_of(consts))
        for swap, state, other in reversed(
            [*zip(self.swaps.levels, path[:-1], others, strict=True)]
        ):
            place = self.swaps.place(swap)
            of_consts, left, right = tree.pull_pairs(*place.in_order(state, other), cts)
            both = place.real & place.meets
            counts = both & place.is_first
            consts = added(consts, zeros_unless(counts, first_of(of_consts)))
            cts = [
                jnp.where(both, jnp.where(place.is_left, x, y), ct)
                for x, y, ct in zip(left, right, cts, strict=True)
            ]
        return consts, first_of(init), zeros_unless(self.device < self.layout.used, cts)


def zeros_unless(keep: Array | bool, xs: Sequence[Array]) -> list[Array]:
    """Replace arrays by zeros unless a condition holds."""
    return [jnp.where(keep, x, jnp.zeros_like(x)) for x in xs]


def root_of(
    layout: Layout,
    tree: Tree,
    parts: Sequence[ClosedJaxpr],
    device: Array | int,
    varying: frozenset[str],
) -> Root:
    """Make the root of a fold, by the way of its mode; `parts` are for columns."""
    where = layout, tree, device, varying
    if tree.mode.way == SWAPS:
        return RootOfSwaps(*where)
    if tree.mode.way != COLUMNS:
        return Root(*where)
    outs: list[Aval] = parts[0].out_avals
    of_parts = [x.shape for x in outs[: tree.n_states]]
    columns = Columns(layout, [y.shape for y in tree.init], of_parts)
    return RootOfColumns(*where, columns, parts)
