"""The lowering of folds over the groups: on each device, then over the devices.

Input: the jaxpr of an associative function of two states, its neutral state, and a
state for each group. Output: the fold of all states in the order of the groups; and, on
request, for each group the fold of the states before it and of those after it.

On m devices with k groups each, a device folds its k states by a balanced tree, of
depth log k. One all-gather gives it the m states of all devices, which it folds, too:

    reduce_fold     tree over k,  all-gather of m states,  tree over m
    fold_around     scans of k,   the same all-gather,     scans of m

A device combines the scans of its own groups with the folds of the devices before and
after it, so that prefixes and suffixes cost no further communication.

Invariants: no state of a padded slot is ever combined with another; the last devices,
which have no group, are left out. All leaves of one dtype go through one all-gather,
unless other mesh axes may shard them.
Sharp edges: the function was traced for one group, but runs without VMA checking, as
states of a device differ from those of another. Results then vary over all axes over
which an operand varies.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from drjax import _compat
from drjax._jaxprs.prng_keys import on_raw
from drjax._primitives.collectives import execute_gather, execute_scatter
from drjax._primitives.columns_lowering import GROUPS, WHOLE, by_gather_and_scatter
from drjax._primitives.map_lowering import lowers_by_vmap, prepare_for_shard_map
from drjax._sharding.eval_on_mesh import in_same_sharding
from drjax._sharding.execute import shard_map_over_devices, vary
from drjax._sharding.layout import Layout, make_layout, other_axes

States = list[jax.Array]
Combine = Callable[[States, States], States]


def kinds_of_fold(n_operands: int, n_states: int, prefixes_and_suffixes: bool):
    """Return which operands and results of a fold have a slice for each group.

    A fold combines the states of all groups by a function f of two states.

    Args:
      n_operands: The number of operands: the arrays that f closes over, the leaves of
        the neutral state, and the leaves of the groups' states, in this order.
      n_states: The number of leaves of a state.
      prefixes_and_suffixes: Whether the folds before and after each group are results,
        too: 2 * n_states more leaves.

    Returns:
      `(kinds of the operands, kinds of the results)`, two tuples: `GROUPS` for an array
      `[n, *s]`, `WHOLE` for one that all groups share, `[*s]`. `by_gather_and_scatter`
      takes the pair.
    """
    kinds_in = (WHOLE,) * (n_operands - n_states) + (GROUPS,) * n_states
    return kinds_in, (WHOLE,) * n_states + (GROUPS,) * (
        2 * n_states * prefixes_and_suffixes
    )


def execute_fold(
    *args,
    jaxpr,
    n_states,
    partition,
    mesh,
    name,
    prefixes_and_suffixes=False,
    commutative=False,
):
    """Execution function of `reduce_fold` and of `fold_around`.

    f is an associative function of two states, and a state is a list of arrays.

    Args:
      *args: The arrays that f closes over, `[*t]`; then the leaves of the neutral
        state, `[*s]`; then those of the groups' states, `[n, *s]`.
      jaxpr: The closed jaxpr of f, from what it closes over and the leaves of two
        states to the leaves of one.
      n_states: The number of leaves of a state.
      partition: The `Partition`, of n groups.
      mesh: The mesh, or None: the program runs locally.
      name: The name of f, ignored.
      prefixes_and_suffixes: Whether to compute for each group the fold of the states
        before it, and of those after it, too, as `fold_around` does.
      commutative: Whether the groups may be combined in any order, ignored.

    Returns:
      One list: the leaves of the fold of all groups, `[*s]`; with
      `prefixes_and_suffixes`, then those of the folds before each group, `[n, *s]`, and
      those of the folds after it. Both exclude the group's own state.
    """
    layout = make_layout(partition, mesh)
    kinds = kinds_of_fold(len(args), n_states, prefixes_and_suffixes)
    if lowers_by_vmap(layout, jaxpr):
        run = fold_of_all(partition, jaxpr, n_states, prefixes_and_suffixes)
        params = {"partition": partition, "mesh": mesh}
        return by_gather_and_scatter(
            run, args, kinds, execute_gather, execute_scatter, params
        )
    fn = _compat.jaxpr_as_fun(prepare_for_shard_map(layout, jaxpr))

    def body(*args):
        *args, first = args
        return _run_device(layout, fn, n_states, prefixes_and_suffixes, args, first[0])

    partitioned_in, partitioned_out = (
        [kind == GROUPS for kind in side] for side in kinds
    )
    # The surrounding check_vma: users' loops inside were traced under it.
    return shard_map_over_devices(
        layout, body, args, partitioned_in, partitioned_out, _compat.check_vma(),
        with_first_index=True,
    )  # fmt: skip


def fold_of_all(
    partition, jaxpr, n_states: int, prefixes_and_suffixes: bool
) -> Callable:
    """Make the function that computes a fold from the states of all groups, locally.

    Args:
      partition: The `Partition`, of n groups.
      jaxpr: The closed jaxpr of f, the function of two states.
      n_states: The number of leaves of a state.
      prefixes_and_suffixes: Whether to compute the fold before each group and the one
        after it, too.

    Returns:
      The function. It takes the arrays that f closes over, the leaves of the neutral
      state, `[*s]`, and those of all groups' states, `[n, *s]`. It returns the list of
      the leaves of the fold, `[*s]`; with `prefixes_and_suffixes`, then those of the
      folds before each group, `[n, *s]`, and those of the folds after it.
    """
    local, fn = make_layout(partition, None), _compat.jaxpr_as_fun(jaxpr)
    return lambda *args: _run_device(local, fn, n_states, prefixes_and_suffixes, args)


# ---------------------------------------------------------------------------------
# One device


def _run_device(
    layout: Layout,
    fn: Callable,
    n_states: int,
    prefixes_and_suffixes: bool,
    args,
    first=0,
) -> States:
    """Fold the states of a device's groups, and then those of all devices.

    It is called inside a `shard_map` over the partition's axes, or, on one device,
    alone. One all-gather gives each device the folds of all devices.

    Args:
      layout: The layout: m devices with k slots (places for one group) each, of which
        the last ones may be padding.
      fn: The function of two states, which takes and returns flat sequences of arrays:
        first what it closes over, and then the leaves of both states.
      n_states: The number of leaves of a state.
      prefixes_and_suffixes: Whether to compute the fold before each slot and the one
        after it, too.
      args: The operands: what `fn` closes over, `[*t]`, the leaves of the neutral
        state, `[*s]`, and those of the states in the device's slots, `[k, *s]`.
      first: The group index of the device's first slot, int32 `[]`.

    Returns:
      The list of the leaves of the fold of all groups, `[*s]`; with
      `prefixes_and_suffixes`, then those of the folds of all groups before each slot,
      `[k, *s]`, and of those after it, without the slot itself.
    """
    varying = frozenset[str]().union(
        *(_compat.varying(_compat.typeof(x)) for x in args)
    )
    n_consts = len(args) - 2 * n_states
    consts, x = args[:n_consts], list(args[n_consts + n_states :])
    init = [y[None] for y in args[n_consts : n_consts + n_states]]
    in_axes = (None,) * n_consts + (0,) * (2 * n_states)
    combine = lambda a, b: list(jax.vmap(fn, in_axes)(*consts, *a, *b))
    k, used = layout.per_device, -(-layout.partition.size // layout.per_device)
    real = None
    if layout.uneven:
        real = first + lax.iota(jnp.int32, k) < layout.partition.size
    with _compat.without_vma():  # as the states vary over the devices
        local = _scans(combine, x, real) if prefixes_and_suffixes else None
        own = [y[-1:] for y in local[0]] if local else fold_by_tree(combine, x, real)
    states = states_of_devices(layout, own, varying, used)
    with _compat.without_vma():
        if local is None:
            totals = combine(init, fold_by_tree(combine, states))
            outs = []
        else:
            ends = _scans(combine, states)
            totals = combine(init, [y[-1:] for y in ends[0]])
            outs = _prefixes_and_suffixes(combine, init, local, ends, first // k, real)
    others = varying - set(layout.axes)
    return [
        *(vary(y[0], others) for y in totals),
        *(vary(y, varying | set(layout.axes)) for y in outs),
    ]


def states_of_devices(layout: Layout, own: States, varying, used: int) -> States:
    """Collect one state of each device that has groups, by all-gathers.

    It is called in the code of one device. It runs one all-gather for each dtype; or
    one for each leaf, if the mesh has axes that are not the partition's and that may
    shard the leaves: Auto ones larger than one, or Explicit ones.

    Args:
      layout: The layout of the partition, on m devices.
      own: The leaves of this device's state, `[1, *s]`.
      varying: The set of the Manual mesh axes over which some operand of the fold
        varies. Before the all-gather, the leaves are cast to vary over these and the
        partition's axes.
      used: The number of devices that have groups: the first ones.

    Returns:
      The leaves of the states in the order of the devices, `[used, *s]`, the same on
      all devices. `own` itself if the program runs locally.
    """
    if not layout.axes:
        return own
    # All devices have the same result. With VMA checking its type must say so.
    to = "invarying" if _compat.check_vma() else "varying"
    axes = varying | set(layout.axes)

    def gathered(x):
        if not x.size:
            return jnp.zeros((used, *x.shape[1:]), x.dtype)
        x = lax.all_gather(vary(x, axes), layout.axes, tiled=True, to=to)
        return lax.slice_in_dim(x, 0, used)

    def together(*leaves):
        ends = np.cumsum([x.size for x in leaves])[:-1]
        flat = lax.concatenate([lax.reshape(x, (1, x.size)) for x in leaves], 1)
        parts = jnp.split(gathered(flat), ends, axis=1)
        pairs = zip(parts, leaves, strict=True)
        return [lax.reshape(y, (used, *x.shape[1:])) for y, x in pairs]

    # Where other axes of the mesh shard a leaf, a reshape could cost a collective.
    others = other_axes(layout) or layout.other_explicit_axes
    pack = len(own) > 1 and not others
    each = lambda *leaves: [gathered(x) for x in leaves]
    return _by_dtype(together if pack else each, own)


def _by_dtype(fn: Callable, leaves: Sequence[jax.Array]) -> States:
    """Apply a function of arrays of one dtype to the leaves of each dtype.

    Args:
      fn: `fn(*leaves)`, which returns a sequence of as many arrays. It is called once
        for each dtype; for typed random keys, once for each leaf, with the raw data of
        the keys.
      leaves: The leaves, of any dtypes.

    Returns:
      The list of the results, in the order of the leaves.
    """
    outs: dict[int, jax.Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        chosen = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            one = lambda x: fn(x)[0]
            outs |= {i: on_raw(one, leaves[i]) for i in chosen}
        else:
            results = fn(*(leaves[i] for i in chosen))
            outs |= dict(zip(chosen, results, strict=True))
    return [outs[i] for i in range(len(leaves))]


# ---------------------------------------------------------------------------------
# Trees and scans. Padding has the last slots, so that a node of a tree has groups if
# the first of its slots has one; a node without groups is left out.


def _unless_padding(real, new: States, old: States) -> States:
    """Select states by slot: new ones where the slot belongs to a group, else old ones.

    A slot is a place for one group on a device.

    Args:
      real: For each slot whether it belongs to a group, bool `[k]`; else it is padding.
        None: all do, and `new` is returned.
      new: Leaves `[k, *s]`.
      old: Leaves `[k, *s]`.

    Returns:
      The list of leaves `[k, *s]`.
    """
    if real is None:
        return new
    select = lambda x, y: jnp.where(
        lax.broadcast_in_dim(real, (*real.shape, *(1,) * (x.ndim - 1)), (0,)), x, y
    )
    return [select(x, y) for x, y in zip(new, old, strict=True)]


def _join(x: States, y: States) -> States:
    """Concatenate two sequences of states, leaf by leaf: `[j, *s]` and `[k, *s]`.

    Return the list of leaves `[j + k, *s]`, those of `x` first.
    """
    pairs = zip(x, y, strict=True)
    return [jnp.concatenate(in_same_sharding(pair)) for pair in pairs]


def fold_by_tree(combine: Combine, x: States, real=None) -> States:
    """Fold states by a balanced tree, in their order.

    Args:
      combine: `combine(a, b)` combines two lists of leaves `[j, *s]`, j states each,
        pair by pair to leaves `[j, *s]`, for any j.
      x: The leaves of k states, `[k, *s]`.
      real: For each state whether it belongs to a group, bool `[k]`; padding, which
        comes last, is left out. None: all do.

    Returns:
      The leaves of the fold, `[1, *s]`. If no state belongs to a group, it has no
      meaning.
    """
    k = x[0].shape[0]
    while k > 1:
        even = 2 * (k // 2)
        left, right = [y[:even:2] for y in x], [y[1:even:2] for y in x]
        pairs = combine(left, right)
        if real is not None:
            pairs = _unless_padding(real[1:even:2], pairs, left)
            real = real[::2]
        if even < k:
            pairs = _join(pairs, [y[even:] for y in x])
        x, k = pairs, pairs[0].shape[0]
    return x


def _scans(combine: Combine, x: States, real=None) -> tuple[States, States]:
    """Compute the inclusive folds of states up to each one, and from each one on.

    Args:
      combine: `combine(a, b)` combines two lists of leaves `[j, *s]`, j states each,
        pair by pair to leaves `[j, *s]`, for any j.
      x: The leaves of k states, `[k, *s]`.
      real: For each state whether it belongs to a group, bool `[k]`; padding, which
        comes last, is left out. None: all do.

    Returns:
      `(prefixes, suffixes)`, lists of leaves `[k, *s]`. Prefix i is the fold of the
      states 0 to i, and suffix i that of the states i to k - 1. The suffix of padding
      has no meaning.
    """

    def with_flags(a, b):
        pairs = combine(a[:-1], b[:-1])
        return [*_unless_padding(b[-1], pairs, a[:-1]), a[-1]]

    fn, states = (combine, x) if real is None else (with_flags, [*x, real])
    flip = lambda states: [y[::-1] for y in states]
    swapped = lambda a, b: fn(b, a)
    forward, backward = _scan(fn, states), flip(_scan(swapped, flip(states)))
    return forward[: len(x)], backward[: len(x)]


def _scan(combine: Combine, x: States) -> States:
    """Compute the inclusive fold of the states 0 to i for each i, in log k steps.

    It combines pairs of states, and scans these, as `lax.associative_scan` does, but
    never combines states of zeros, which that function pads with.

    Args:
      combine: `combine(a, b)` combines two lists of leaves `[j, *s]`, j states each,
        pair by pair to leaves `[j, *s]`, for any j.
      x: The leaves of k states, `[k, *s]`.

    Returns:
      The leaves of the k folds, `[k, *s]`.
    """
    k = x[0].shape[0]
    if k == 1:
        return x
    even, rest = 2 * (k // 2), (k - 1) // 2
    pairs = combine([y[:even:2] for y in x], [y[1:even:2] for y in x])
    odds = _scan(combine, pairs)
    evens = [y[:1] for y in x]
    if rest:
        others = combine([y[:rest] for y in odds], [y[2::2] for y in x])
        evens = _join(evens, others)
    pairs = zip(evens, odds, strict=True)
    outs = [
        jnp.stack([y[: k // 2], z], 1).reshape(even, *z.shape[1:]) for y, z in pairs
    ]
    return outs if even == k else _join(outs, [y[k // 2 :] for y in evens])


def _prefixes_and_suffixes(
    combine: Combine, init: States, local, ends, device, real
) -> States:
    """Compute the exclusive folds of all groups before and after each slot of a device.

    A slot is a place for one group. The fold before slot i of this device combines the
    devices before it with its own slots 0 to i - 1; the fold after it combines its own
    slots i + 1 to k - 1 with the devices after it. Slot i itself is in neither. Before
    the first group and after the last one it is the neutral state.

    Args:
      combine: `combine(a, b)` combines two lists of leaves `[j, *s]`, j states each,
        pair by pair to leaves `[j, *s]`, for any j.
      init: The leaves of the neutral state, `[1, *s]`.
      local: `(prefixes, suffixes)`, the inclusive folds of the device's own slots: for
        each slot of all slots up to it, and of all from it on, leaves `[k, *s]`.
      ends: `(prefixes, suffixes)` of the devices that have groups: for each of them the
        inclusive fold of all devices up to it, and of all from it on, leaves
        `[used, *s]`.
      device: The index of this device, int32 `[]` or an int.
      real: For each slot whether it belongs to a group, bool `[k]`; padding comes last.
        None: all do.

    Returns:
      One list: the leaves of the folds before each slot, `[k, *s]`, and then of those
      after it. In padded slots they have no meaning.
    """
    (ups, downs), (heads, tails) = local, ends
    k, used = ups[0].shape[0], heads[0].shape[0]
    one_of = lambda xs, i: [lax.dynamic_slice_in_dim(x, i, 1) for x in xs]
    spread = lambda xs: [jnp.broadcast_to(x, (k - 1, *x.shape[1:])) for x in xs]
    # A device without groups computes what nobody reads.
    clip = min if isinstance(device, int) else jnp.minimum
    before = one_of(_join(init, heads), clip(device, used))
    after = one_of(_join(tails, init), clip(device + 1, used))
    if k == 1:
        return [*before, *after]
    prefixes = combine(spread(before), [y[:-1] for y in ups])
    suffixes = combine([y[1:] for y in downs], spread(after))
    if real is not None:
        suffixes = _unless_padding(real[1:], suffixes, spread(after))
    return [*_join(before, prefixes), *_join(suffixes, after)]
