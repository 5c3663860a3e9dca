"""Balanced trees of a function of two states, and their derivatives in one place.

Input: the operands of an equation of a fold, and the jaxprs of the function of two
states and of its derivative. Output: folds of k states, `[k, *s]` to `[1, *s]`, with
tangents, or backwards with cotangents; `fold_groups.py` says which tree that is.

Invariants: padding has the last slots, so that a node of a tree has groups if the first
of its slots has one; a node without groups is left out.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from drjax import _compat
from drjax._compat.types import Array, ClosedJaxpr
from drjax._primitives.map_columns import GROUPS, WHOLE, Kinds
from drjax._sharding.eval_on_mesh import in_same_sharding

States = list[jax.Array]
Combine = Callable[[States, States], States]

# How devices exchange states; `fold_devices.py` describes the ways.
GATHERED, COLUMNS, SWAPS = "gathered", "columns", "swaps"
# The kind of an operand or result `[m, *t]` of which each device has its own `[*t]`.
DEVICES = "devices"


@dataclass(frozen=True)
class FoldMode:
    """What an equation computes from the tree of a fold; a parameter of `fold_tree`.

    Its operands are those of the fold: what the function closes over, the first state,
    and the groups' states; then what is saved of the tops; then tangents of active
    operands, or cotangents of active leaves of the fold.

    Attributes:
      what: "value", "tangents" or "cotangents".
      way: How devices exchange their tops: `GATHERED`, `COLUMNS` or `SWAPS`.
      saved: Whether what a device has received of the tops is a further result of the
        value, and an operand of the others, which else exchange them again.
      closed: How many of the first operands only the function's derivative closes over.
      active: For each operand of the fold whether it has a tangent.
      active_out: For each leaf of a state whether it may have a tangent in the tree.
      pushed: For each leaf of a state whether the function's results have a tangent.
    """

    what: str = "value"
    way: str = GATHERED
    saved: bool = False
    closed: int = 0
    active: tuple[bool, ...] = ()
    active_out: tuple[bool, ...] = ()
    pushed: tuple[bool, ...] = ()

    def kinds(self, n_fold: int, n_states: int) -> tuple[Kinds, Kinds]:
        """Return the kinds of all operands, `n_fold` of a fold, and of all results."""
        fold = (WHOLE,) * (n_fold - n_states) + (GROUPS,) * n_states
        each = WHOLE if self.way == GATHERED else DEVICES
        tops = (each,) * (n_states * self.saved)
        moving = tuple(k for k, a in zip(fold, self.active, strict=False) if a)
        leaves = (WHOLE,) * sum(self.active_out)
        match self.what:
            case "value":
                return fold, (WHOLE,) * n_states + tops
            case "tangents":
                return (*fold, *tops, *moving), leaves
            case _:
                return (*fold, *tops, *leaves), moving

    def count(self, n_operands: int) -> int:
        """Return the number of operands of the fold itself, among all `n_operands`."""
        return n_operands if self.what == "value" else len(self.active)


VALUE = FoldMode()

# ---------------------------------------------------------------------------------
# Trees


def unless_padding(real: Array | None, new: States, old: States) -> States:
    """Select states by slot: new ones where the slot belongs to a group, else old ones.

    `real`, bool `[k]`, says so for each slot (a place for one group) on a device; if it
    is None, all do. Leaves are `[k, *s]`.
    """
    if real is None:
        return new
    select = lambda x, y: jnp.where(
        lax.broadcast_in_dim(real, (*real.shape, *(1,) * (x.ndim - 1)), (0,)), x, y
    )
    return [select(x, y) for x, y in zip(new, old, strict=True)]


def joined(x: States, y: States) -> States:
    """Concatenate two sequences of states, leaf by leaf: `[j, *s]` and `[k, *s]`."""
    pairs = zip(x, y, strict=True)
    return [jnp.concatenate(in_same_sharding(pair)) for pair in pairs]


def fold_by_tree(
    combine: Combine,
    x: States,
    real: Array | None = None,
    levels: list[States] | None = None,
) -> States:
    """Fold k states by a balanced tree, in their order: leaves `[k, *s]` to `[1, *s]`.

    `combine(a, b)` combines j pairs of states, for any j. `real`, bool `[k]`, is False
    for padding, which comes last and is left out; if no state is real, the result has
    no meaning. The states of each level, from `x` on, are appended to `levels`.
    """
    levels = [] if levels is None else levels
    levels.append(x)
    while (k := x[0].shape[0]) > 1:
        even = 2 * (k // 2)
        left, right = [y[:even:2] for y in x], [y[1:even:2] for y in x]
        pairs = combine(left, right)
        if real is not None:
            pairs = unless_padding(real[1:even:2], pairs, left)
            real = real[::2]
        if even < k:
            pairs = joined(pairs, [y[even:] for y in x])
        x = pairs
        levels.append(x)
    return x


class Tree:
    """The operands of an equation on a fold's tree, and the function on states.

    Lists of tangents and cotangents have an element for each active leaf.
    """

    def __init__(
        self,
        jaxprs: Sequence[ClosedJaxpr],
        n_states: int,
        mode: FoldMode,
        args: Sequence[Array],
    ) -> None:
        self.mode, self.n_states = mode, n_states
        self.fn, *others = map(_compat.jaxpr_as_checked_fun, jaxprs)
        # Of the value it is never called.
        self.derivative = others[0] if others else self.fn
        n = mode.count(len(args))
        operands, rest = args[:n], args[n:]
        self.n_consts = n - 2 * n_states
        saves = mode.saved and mode.what != "value"
        self.saved = list(rest[:n_states]) if saves else None
        self.extra = list(rest[n_states:] if saves else rest)
        self.consts, self.init, self.x = self.split(operands)
        self.active = self.split(mode.active)

    def split(self, values: Sequence) -> tuple[list, list, list]:
        """Split values for the fold's operands: consts, first state, groups' states."""
        c, s = self.n_consts, self.n_states
        return list(values[:c]), list(values[c : c + s]), list(values[c + s :])

    def with_root(
        self, jaxprs: Sequence[ClosedJaxpr], init: States, extra: list[Array]
    ) -> "Tree":
        """Copy the tree with other functions, first state, tangents or cotangents."""
        tree = copy.copy(self)
        tree.fn, *others = map(_compat.jaxpr_as_checked_fun, jaxprs)
        tree.derivative = others[0] if others else tree.fn
        tree.init, tree.extra = init, extra
        return tree

    def tangents(self) -> tuple[list, list, list]:
        """Return tangents of active consts, of active leaves of first state and x."""
        dense = iter(self.extra)
        consts = [next(dense) for active in self.active[0] if active]
        states = []
        for values, active in ((self.init, self.active[1]), (self.x, self.active[2])):
            triples = zip(values, active, self.mode.active_out, strict=True)
            states.append(
                [next(dense) if a else jnp.zeros_like(y) for y, a, o in triples if o]
            )
        return consts, *states

    def active_cotangents(
        self, consts: list[Array], init: list[Array], x: list[Array]
    ) -> list[Array]:
        """List the cotangents of active operands, from those of active leaves."""
        outs = list(consts)
        for cts, active in ((init, self.active[1]), (x, self.active[2])):
            moving = [a for a, o in zip(active, self.mode.active_out, strict=True) if o]
            outs += [ct for ct, a in zip(cts, moving, strict=True) if a]
        return outs

    def combine(self, a: States, b: States) -> States:
        """Combine states pair by pair, leaves `[j, *s]`."""
        axes = (None,) * (self.n_consts - self.mode.closed) + (0,) * (2 * self.n_states)
        return list(jax.vmap(self.fn, axes)(*self.consts[self.mode.closed :], *a, *b))

    def push(self, dconsts: list[Array]) -> Combine:
        """Make `combine` for states with tangents, lists `[*state, *tangents]`."""
        mode, s = self.mode, self.n_states
        moves = sum(mode.active_out)
        axes = (
            *[None] * self.n_consts, *[0] * (2 * s),
            *[None] * len(dconsts), *[0] * (2 * moves),
        )  # fmt: skip

        def combine(a: States, b: States) -> States:
            (a, da), (b, db) = (a[:s], a[s:]), (b[:s], b[s:])
            outs = jax.vmap(self.derivative, axes)(
                *self.consts, *a, *b, *dconsts, *da, *db
            )
            dense = iter(outs[s:])
            triples = zip(outs[:s], mode.pushed, mode.active_out, strict=True)
            return [
                *outs[:s],
                *(next(dense) if p else jnp.zeros_like(y) for y, p, o in triples if o),
            ]

        return combine

    def pull_pairs(
        self, a: States, b: States, cts: list[Array]
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """Return cotangents of active consts, `[j, *t]`, of both states of pairs."""
        mode, moves = self.mode, sum(self.mode.active_out)
        pairs = zip(mode.active_out, mode.pushed, strict=True)
        pushed = [p for o, p in pairs if o]
        cts = [ct for ct, p in zip(cts, pushed, strict=True) if p]
        n_consts = sum(self.active[0])
        axes = (
            *[None] * self.n_consts, *[0] * (2 * self.n_states), *[0] * len(cts)
        )  # fmt: skip
        outs = list(jax.vmap(self.derivative, axes)(*self.consts, *a, *b, *cts))
        return (
            outs[:n_consts],
            outs[n_consts : n_consts + moves],
            outs[n_consts + moves :],
        )

    def levels(self, x: States, real: Array | None = None) -> list[States]:
        """List all levels of the balanced tree over k states, these first."""
        levels = []
        fold_by_tree(self.combine, x, real, levels)
        return levels

    def pull(
        self, levels: list[States], cts: list[Array], real: Array | None = None
    ) -> tuple[list[Array], list[Array]]:
        """Go down a tree: cotangents of active consts, and of the leaves' states."""
        consts = [
            jnp.zeros_like(c)
            for c, a in zip(self.consts, self.active[0], strict=True)
            if a
        ]
        reals: list[Any] = [real]
        for _ in levels[1:]:
            reals.append(None if real is None else reals[-1][::2])
        for x, real in reversed(list(zip(levels[:-1], reals[:-1], strict=True))):
            even = 2 * (x[0].shape[0] // 2)
            left, right = [y[:even:2] for y in x], [y[1:even:2] for y in x]
            above = [ct[: even // 2] for ct in cts]
            of_consts, of_left, of_right = self.pull_pairs(left, right, above)
            if real is not None:
                both = real[1:even:2]
                zeros = lambda cts: [jnp.zeros_like(ct) for ct in cts]
                of_left = unless_padding(both, of_left, above)
                of_right = unless_padding(both, of_right, zeros(of_right))
                of_consts = unless_padding(both, of_consts, zeros(of_consts))
            consts = added(consts, [jnp.sum(c, 0, dtype=c.dtype) for c in of_consts])
            down = [
                jnp.stack([a, b], 1).reshape(even, *a.shape[1:])
                for a, b in zip(of_left, of_right, strict=True)
            ]
            rest = [ct[even // 2 :] for ct in cts]
            cts = joined(down, rest) if even < x[0].shape[0] else down
        return consts, cts

    def root(self, tops: States) -> States:
        """Fold the devices' states after the first state, leaves `[1, *s]`."""
        return self.combine(
            [y[None] for y in self.init], fold_by_tree(self.combine, tops)
        )

    def push_root(
        self, tops: States, dconsts: list[Array], dinit: list[Array]
    ) -> States:
        """Return the tangents of the root; `tops` has those of the tops after these."""
        combine = self.push(dconsts)
        first = [y[None] for y in (*self.init, *dinit)]
        return combine(first, fold_by_tree(combine, tops))[self.n_states :]

    def pull_root(self, tops: States) -> tuple[list[Array], list[Array], list[Array]]:
        """Return cotangents of active consts, of the first state, and of the tops."""
        levels = self.levels(tops)
        first = [y[None] for y in self.init]
        above = [ct[None] for ct in self.extra]
        consts, init, below = self.pull_pairs(first, levels[-1], above)
        others, of_tops = self.pull(levels, below)
        return added(first_of(consts), others), first_of(init), of_tops


def first_of(state: Sequence[Array]) -> list[Array]:
    """Return the first one of k states."""
    return [y[0] for y in state]


def added(xs: Sequence[Array], ys: Sequence[Array]) -> list[Array]:
    """Add lists of arrays element by element."""
    return [x + y for x, y in zip(xs, ys, strict=True)]
