"""DiLoCo as a layer: any train step becomes local SGD, DiLoCo or Streaming DiLoCo.

Input: a train step of one worker, `(state, batch) -> (state, metrics)`, of any library,
and an outer optimizer. Output: a program of one round of H steps over k workers, and
checkpoints of its state.

Invariants: a round is made of building blocks only, so that it has derivatives, plans
and engines as any program. Fragment p of P is received at step (p + 1) H / P, and was
sent `delay` steps earlier; the inner steps between do not depend on it.

A tree is *frozen* if all of its leaves are arrays: what is no array, such as a function
in an Equinox module, is a `Static` node without leaves. Values are frozen between
rounds and in building blocks; only the user's functions see them thawed.

Source: Douillard et al. 2023, arXiv 2311.08105, algorithm 1; Douillard et al. 2025,
arXiv 2501.18512, algorithm 2.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import drjax
from drjax._api.collective_options import collective_options
from drjax._compat.types import Array, GlobalArray, PartitionedArray, PyTree, PyTreeDef
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._extras import needed
from drjax._partition import attached_levels, integer_of
from drjax._plan.wire import Wire
from drjax._primitives.between_slices import free_axes
from drjax._primitives.in_two_legs import (
    auto_devices_in_context,
    complete,
    is_divided,
    received_after,
)
from drjax._primitives.shards_in_lanes import ravel_shards, unravel_shards
from drjax._sharding.layout import find_mesh, host_sharding

Getter = Callable[[PyTree], PyTree]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf of a train state that is no array."""

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shared:
    """In the place of a parameter that is the global one at the end of every round."""

    index: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state between two rounds, a pytree of arrays: `Round.init` makes the first.

    No fragment is under way then.

    Attributes:
      theta: The global parameters, as `params` has them; what is no array is static.
      outer: Global: the state of the outer optimizer for each fragment.
      workers: Partitioned `[k, ...]`: the train state of each worker. Parameters that
        are the global ones at the end of every round are not kept.
    """

    theta: PyTree
    outer: list[PyTree]
    workers: PyTree

    @property
    def params(self) -> PyTree:
        """The global parameters as the train state has them, to evaluate or to save."""
        return thaw(self.theta)


def is_array(x: object) -> bool:
    """Whether a leaf is data: so is Python's int, as the step of Flax's TrainState.

    Other values of Python are settings, as those of `eqx.nn.Dropout`.
    """
    data = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return isinstance(x, data) or type(x) is int


def is_float(x: Any) -> bool:
    """Whether an array is synchronized; counts and random keys stay a worker's own."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def freeze(tree: PyTree) -> PyTree:
    def leaf(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct) or not is_array(x):
            return x if is_array(x) else Static(x)
        x = jnp.asarray(x)  # with its dtype once more, it is not weakly typed
        return x if is_key(x) else jnp.asarray(x, x.dtype)

    return jax.tree.map(leaf, tree)


def thaw(tree: PyTree) -> PyTree:
    value = lambda x: x.value if isinstance(x, Static) else x
    return jax.tree.map(value, tree, is_leaf=lambda x: isinstance(x, Static))


def fill(workers: PyTree, theta: list[Any]) -> PyTree:
    """A train state with the parameters that were not kept."""
    is_shared = lambda x: isinstance(x, Shared)
    value = lambda x: theta[x.index] if is_shared(x) else x
    return jax.tree.map(value, workers, is_leaf=is_shared)


def default_params(state: PyTree) -> PyTree:
    """Select the entry or the attribute `params` of a train state."""
    if isinstance(state, Mapping) and "params" in state:
        return state["params"]
    if (params := getattr(state, "params", None)) is not None:
        return params
    raise DrjaxTypeError(
        f"diloco needs the parameters of the train state, a {type(state).__name__} "
        "that has neither an entry nor an attribute `params`. Pass params=, such as "
        "lambda state: state[0]; or lambda state: state, if all of it is parameters."
    )


class Params(NamedTuple):
    """Where the parameters are in a frozen train state, known when it is traced."""

    treedef: PyTreeDef  # of the parameters
    indices: tuple[int, ...]  # of the train state's leaves, one for each parameter

    @classmethod
    def of(cls, state: PyTree, params: Getter) -> "Params":
        """Find the leaves that the user's function returns, by identity.

        In a trace each leaf is an object of its own. So the function that selects the
        parameters is enough to replace them.
        """
        results: list[PyTree] = []

        def trace(state: PyTree) -> None:
            index = {id(x): i for i, x in enumerate(jax.tree.leaves(state))}

            def number(path: Any, x: Any) -> Any:
                if is_array(x) and id(x) not in index:
                    raise DrjaxValueError(
                        "diloco needs params= to return leaves of the train state as "
                        f"they are, got another at params{jax.tree_util.keystr(path)}."
                    )
                return index.get(id(x), Static(x))

            chosen = params(thaw(state))
            results.append(jax.tree_util.tree_map_with_path(number, chosen))

        jax.eval_shape(trace, state)
        indices, treedef = jax.tree.flatten(results[0])
        return cls(treedef, tuple(indices))

    def get(self, state: PyTree) -> list[Array]:
        leaves = jax.tree.leaves(state)
        return [leaves[i] for i in self.indices]

    def set(self, state: PyTree, values: list[Any]) -> PyTree:
        """The train state with other values, or with nodes in their place."""
        leaves, treedef = jax.tree.flatten(state)
        for i, x in zip(self.indices, values, strict=True):
            leaves[i] = x
        return treedef.unflatten(leaves)


# ---------------------------------------------------------------------------------
# Fragments


Slices = Any  # a tuple of positions on a leaf's leading axis; None: the whole leaf


class Fragment(NamedTuple):
    """Parameters that are sent together."""

    names: tuple[str, ...]  # of its units
    leaves: Mapping[int, Slices]
    bytes: int
    treedef: PyTreeDef  # of all parameters

    def take(self, leaves: Sequence[Array]) -> PyTree:
        """The tree of the parameters, with None for what is not in the fragment."""
        out: list[Any] = [None] * len(leaves)
        for i, slices in self.leaves.items():
            out[i] = leaves[i] if slices is None else leaves[i][_index(slices)]
        return self.treedef.unflatten(out)

    def put(self, leaves: Sequence[Array], values: PyTree) -> list[Array]:
        """The leaves with other values of the fragment, a tree as `take` makes it."""
        out, new = list(leaves), self.treedef.flatten_up_to(values)
        for i, slices in self.leaves.items():
            out[i] = new[i] if slices is None else _put(out[i], slices, new[i])
        return out


class Fragments(NamedTuple):
    """Parameters in fragments: `diloco.fragments` makes them. Printed, a table.

    Attributes:
      parts: For each fragment the `names` of what is in it, and its `bytes`.
      shapes: Of the parameters.
    """

    parts: tuple[Fragment, ...]
    shapes: list[tuple[int, ...]]

    def check(self, theta: PyTree) -> tuple[Fragment, ...]:
        """The parts; raise unless they are of parameters of this structure."""
        leaves, treedef = jax.tree.flatten(theta)
        if (treedef, _shapes(leaves)) != (self.parts[0].treedef, self.shapes):
            raise DrjaxValueError(
                "diloco needs fragments of the parameters that params= selects, got "
                "those of others. Make them of these: diloco.fragments(params, count)."
            )
        return self.parts

    def __str__(self) -> str:
        total = sum(part.bytes for part in self.parts)
        lines = ["fragment           bytes   share  parameters"]
        for p, part in enumerate(self.parts):
            share, names = part.bytes / total, ", ".join(part.names)
            lines.append(f"{p:8}  {part.bytes:14,}  {share:6.1%}  {shorten(names, 72)}")
        return "\n".join(lines)


def fragments(
    params: PyTree,
    count: int = 1,
    *,
    layers: str | None = None,
    scanned: str | None = None,
    apart: str | None = None,
) -> Fragments:
    """Divide parameters into fragments of about the same number of bytes.

    Without patterns a unit is a leaf. Patterns are regular expressions, searched in the
    path of a leaf, such as `blocks/0/attention/kernel`. Only floats are synchronized:
    other leaves, as counts and random keys, are in no fragment.

    Args:
      params: The parameters, a tree of arrays or of `jax.ShapeDtypeStruct`.
      count: Number of fragments (P), with that of `apart`.
      layers: Leaves in whose paths it finds the same text are one unit, as of a layer:
        `r"blocks/\\d+"`.
      scanned: The leaves of layers that are stacked on their leading axis, for
        `jax.lax.scan`: slice i of all of them is one unit.
      apart: The leaves that make a fragment of their own, the last one, as embeddings.

    Returns:
      The fragments. `print` shows their bytes and names.

    Raises:
      DrjaxValueError: There are no floats, or fewer units than fragments; a pattern
        finds nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> from drjax.contrib import diloco
      >>> params = {"embed": jnp.ones((9, 2)), "blocks": {"w": jnp.ones((4, 2, 2))}}
      >>> print(diloco.fragments(params, 3, scanned="blocks", apart="embed"))
      fragment           bytes   share  parameters
             0              32   23.5%  blocks[0], blocks[2]
             1              32   23.5%  blocks[1], blocks[3]
             2              72   52.9%  embed

    Source: Douillard et al. 2025, "Streaming DiLoCo", section 3.1.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(freeze(params))
    leaves = [x for _, x in named]
    show = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    paths = {i: show(x[0]) for i, x in enumerate(named) if is_float(x[1]) and x[1].size}
    for name, pattern in dict(layers=layers, scanned=scanned, apart=apart).items():
        if pattern and not any(re.search(pattern, x) for x in paths.values()):
            raise DrjaxValueError(
                f"diloco.fragments({name}={pattern!r}) finds none of the parameters "
                f"{', '.join(paths.values())}."
            )
    units: dict[str, dict[int, Slices]] = {}
    alone: dict[str, dict[int, Slices]] = {}
    for i, path in paths.items():
        if apart and re.search(apart, path):
            alone[path] = {i: None}
        elif scanned and leaves[i].ndim and (match := re.search(scanned, path)):
            for k in range(leaves[i].shape[0]):
                units.setdefault(f"{match[0]}[{k}]", {})[i] = (k,)
        else:
            match = layers and re.search(layers, path)
            units.setdefault(match[0] if match else path, {})[i] = None
    parts = (integer_of(count) or 0) - bool(alone)
    if not min(1, len(units)) <= parts <= len(units) or not (units or alone):
        raise DrjaxValueError(
            "diloco.fragments needs a count of at least 1, and one more for apart=; at "
            f"most {len(units) + bool(alone)}, as many as the patterns make parts of "
            f"the floats; got {count!r}."
        )
    join = lambda units: _join(units, treedef, leaves)
    sizes = {name: join({name: unit}).bytes for name, unit in units.items()}
    part_of, totals = {}, [0] * parts
    for name in sorted(units, key=lambda name: -sizes[name]):
        part_of[name] = totals.index(min(totals))
        totals[part_of[name]] += sizes[name]
    dealt = [{x: units[x] for x in units if part_of[x] == p} for p in range(parts)]
    whole = [join(units) for units in (*dealt, alone) if units]
    return Fragments(tuple(whole), _shapes(leaves))


def _join(units: Any, treedef: PyTreeDef, leaves: list[Any]) -> Fragment:
    """One fragment of several units, each of which has leaves by their index."""
    joined: dict[int, Slices] = {}
    for unit in units.values():
        for i, slices in unit.items():
            joined[i] = None if slices is None else (*(joined.get(i) or ()), *slices)
    size = 0
    for i, slices in joined.items():
        x, of_scan = leaves[i], slices is not None
        share = len(slices) / x.shape[0] if of_scan else 1
        size += round(x.size * share) * x.dtype.itemsize
        if of_scan and len(slices) == x.shape[0]:
            joined[i] = None  # all of them
    return Fragment(tuple(units), joined, size, treedef)


def _shapes(leaves: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in leaves]


def _index(slices: Sequence[int]) -> Any:
    """As an index: one with a stride, which needs no gather, if they have one."""
    step = slices[1] - slices[0] if len(slices) > 1 else 1
    even = slices == tuple(range(slices[0], slices[-1] + 1, step))
    return slice(slices[0], slices[-1] + 1, step) if even else np.array(slices)


def _put(x: Array, slices: Sequence[int], new: Array) -> Array:
    """Replace slices on the leading axis, without a scatter, or a gather if it can.

    Of one whose other dimensions devices divide, the compiler for TPUs may abort.
    """
    index, size = _index(slices), x.shape[0]
    if isinstance(index, slice):
        gaps = index.start, size - 1 - slices[-1], index.step - 1
        zero = jnp.zeros((), new.dtype)
        spread = jax.lax.pad(new, zero, [gaps, *[(0, 0, 0)] * (x.ndim - 1)])
    else:
        place = np.zeros(size, int)
        place[index] = np.arange(len(slices))
        spread = new[place]
    chosen = np.isin(np.arange(size), slices)
    return jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), spread, x)


# ---------------------------------------------------------------------------------
# A round


Run = tuple[list[GlobalArray], list[PyTree], PyTree, Any]  # theta, outer, worker, alive


@dataclasses.dataclass(eq=False)
class Round:
    """A round of local SGD, DiLoCo or Streaming DiLoCo, of any train step.

    In a round each of k workers takes H steps, with batches of its own; the outer
    optimizer gets the mean of their changes. An outer `optax.sgd(1.0)` is local SGD.
    With H = 1 and an inner `optax.sgd(1.0)`, the outer optimizer does data-parallel
    training.

    A round is called with `(state, batches, where=None, weights=None)`, and compiled by
    `jax.jit` or `drjax.jit`. Leaves of `batches` are `[k, H, ...]`. `where` are bools
    `[k]`: who is there. `weights` are numbers `[k]`, such as of tokens; a worker of
    weight zero is away. It returns the state, and the metrics `[k, H, ...]`.

    A worker that is away does not count, whatever is in its slices. It begins the next
    round with the global parameters, and with the rest of its state, such as that of
    its optimizer, as it was before. With nobody there, nothing global changes.

    Args:
      step: `(state, batch) -> (state, metrics)` of one worker. The train state is a
        pytree of any library, which has the state of the inner optimizer.
      workers: k, or a mapping such as `{"slices": 2}` from the name of the partition,
        and of the mesh axis over which it is sharded. Default name: `workers`.
      outer: The outer optimizer, of optax. Default: that of the paper,
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      fragments: The number P of fragments, which are synchronized one after another in
        a round; or `diloco.fragments(...)`.
      delay: Inner steps between sending and receiving a fragment (tau), at most H / P.
        The two collectives of a `wire` have half of them each; with one step there is
        one collective, as with `drjax.plan.Wire(..., collectives=1)`.
      mixing: What a worker keeps of its own parameters when it receives (alpha).
      wire: The dtype that is sent, as for `drjax.reduce_sum`.
      params: Selects the parameters among the leaves of the train state. Default: the
        entry or the attribute `params`.
      drop_diverged: Whether a worker whose change of a fragment has a number that is
        not finite is away from then to the end of the round.

    Attributes:
      partition: The workers, a `drjax.Partition`.

    Raises:
      DrjaxValueError: An argument does not fit. In a call: the batches are not
        `[k, H, ...]`, `delay` is longer than H / P, or `fragments` are of others.
      DrjaxTypeError: In a call: `where` are not bools, or `weights` no numbers.
      TypeError: In a call: `step` returns other types than it gets, by `jax.lax.scan`.
      EngineError: `outer` is missing, and optax is not installed.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from drjax.contrib import diloco
      >>> adam = optax.adam(0.1)
      >>> def step(state, batch):
      ...     loss = lambda w: jnp.sum((w - batch) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(state["params"])
      ...     updates, opt = adam.update(grads, state["opt"])
      ...     params = optax.apply_updates(state["params"], updates)
      ...     return {"params": params, "opt": opt}, value
      >>> round_ = diloco.Round(step, workers=2)
      >>> w = jnp.zeros(3)
      >>> state = round_.init({"params": w, "opt": adam.init(w)})
      >>> state, losses = jax.jit(round_)(state, jnp.ones((2, 10, 3)))
      >>> state.params.shape, losses.shape
      ((3,), (2, 10))

    Source: Douillard et al. 2023, "DiLoCo", algorithm 1; Douillard et al. 2025,
    "Streaming DiLoCo", algorithm 2.
    """

    step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]
    workers: int | Mapping[str, int]
    _: dataclasses.KW_ONLY
    outer: Any = None
    fragments: int | Fragments = 1
    delay: int = 0
    mixing: Any = 0.0
    wire: Any = None
    params: Getter = default_params
    drop_diverged: bool = False
    __name__ = "diloco_round"

    def __post_init__(self) -> None:
        if self.outer is None:
            optax = needed("optax", "examples", "diloco.Round without outer=")
            self.outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        share, steps = isinstance(self.mixing, int | float), integer_of(self.delay)
        needs = {
            "step": ("a function (state, batch)", callable(self.step)),
            "params": ("a function of the train state", callable(self.params)),
            "outer": ("an optimizer of optax", hasattr(self.outer, "update")),
            "delay": ("a number of steps", steps is not None and steps >= 0),
            "mixing": ("a share from 0 to 1", not share or 0 <= self.mixing <= 1),
        }
        for name, (what, fits) in needs.items():
            if not fits:
                text = f"diloco.Round({name}=) needs {what}, got "
                raise DrjaxValueError(f"{text}{getattr(self, name)!r}.")
        named = isinstance(self.workers, Mapping)
        sizes = self.workers if named else {"workers": self.workers}
        self._program = drjax.program(placements=sizes)(self._run)
        (self.partition,) = attached_levels(self._program)

    def __call__(
        self, state: State, batches: PyTree, where: Any = None, weights: Any = None
    ) -> tuple[State, PyTree]:
        return self._program(state, batches, where, weights)

    def init(self, state: PyTree) -> State:
        """Make the first state of a run from the train state of one worker.

        Args:
          state: The train state. Arrays that are sharded over other mesh axes, those of
            the model, stay so; others are copied to all devices of the mesh in context.
            Random keys are folded with the number of the worker.

        Returns:
          The state, whose `workers` are divided over the mesh axis of the workers. In a
          trace, as of `jax.eval_shape`, nothing is placed.

        Raises:
          DrjaxTypeError, DrjaxValueError: The parameters are not found, or `fragments`
            are of others.
        """
        state = freeze(state)
        params = Params.of(state, self.params)
        state = jax.tree.map(self._place, state)
        theta = params.get(state)
        tree = params.treedef.unflatten(theta)
        parts = self._parts(tree)
        outer = [self.outer.init(part.take(theta)) for part in parts]
        workers = jax.tree.map(partial(self._spread, slices=_copies, lead=0), state)
        kept = self._kept(workers, params, parts)
        return State(tree, jax.tree.map(self._place, outer), kept)

    def resize(self, state: State) -> State:
        """The state of a run with any number of workers, for those of this round.

        New workers begin as copies of the first one, with random keys of their own; the
        last ones go. The arrays are placed as by `init`.
        """

        def slices(x: PartitionedArray, k: int) -> PartitionedArray:
            new = _copies(x[0], k)[len(x) :]
            return jnp.concatenate([x, new]) if len(new) else x[:k]

        spread = partial(self._spread, slices=slices, lead=1)
        workers = jax.tree.map(spread, state.workers)
        theta, outer = jax.tree.map(self._place, (state.theta, state.outer))
        return State(theta, outer, workers)

    # -----------------------------------------------------------------------------
    # One round

    def _run(
        self, state: State, batches: PyTree, where: Any, weights: Any
    ) -> tuple[State, PyTree]:
        theta, treedef = jax.tree.flatten(state.theta)
        parts, outer, before = self._parts(state.theta), state.outer, state.workers
        one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        params = Params.of(fill(jax.tree.map(one, before), theta), self.params)
        P, H = len(parts), self._steps(batches, len(parts))
        alive, metrics = self._members(where, weights), []

        def advance(worker: PyTree, first: int, last: int) -> tuple[PyTree, Any]:
            """These steps of the round, by all workers; and a small result of them."""
            if first == last:
                return worker, None

            def steps(worker: PyTree, batches: PyTree) -> Any:
                slices = jax.tree.map(lambda x: x[first:last], batches)
                return jax.lax.scan(self._step, worker, slices)

            worker, got = drjax.map_fn(steps, (worker, batches))
            metrics.append(got)
            floats = [x for x in jax.tree.leaves((got, worker)) if is_float(x)]
            return worker, min(floats, key=lambda x: x.size)

        worker = drjax.map_fn(fill, (before, drjax.broadcast(theta)))
        for p, part in enumerate(parts):
            last = (p + 1) * H // P
            worker, _ = advance(worker, p * H // P, last - self.delay)
            run = theta, outer, worker, alive
            run = self._exchange(p, part, params, weights, run, advance, last)
            theta, outer, worker, alive = run
        if alive is not None:

            def back(alive: Array, worker: PyTree, before: PyTree, theta: Any) -> Any:
                """A worker that does not count begins with the global parameters."""
                old = fill(before, theta)
                pairs = zip(theta, params.get(old), strict=True)
                old = params.set(old, [x if is_float(x) else own for x, own in pairs])
                return jax.tree.map(partial(jnp.where, alive), worker, old)

            args = alive, worker, before, drjax.broadcast(theta)
            worker = drjax.map_fn(back, args)
        join = lambda parts: jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        kept = self._kept(worker, params, parts)
        return State(treedef.unflatten(theta), outer, kept), drjax.map_fn(join, metrics)

    def _step(self, worker: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        state, metrics = self.step(thaw(worker), batch)
        return freeze(state), metrics

    def _exchange(
        self,
        p: int,
        part: Fragment,
        params: Params,
        weights: Any,
        run: Run,
        advance: Callable[[PyTree, int, int], tuple[PyTree, Any]],
        last: int,
    ) -> Run:
        """One fragment, from when it is sent until it is received, after step `last`.

        All communication of a round is here. The steps between depend on none of it.
        If numbers in few bits take two collectives, each has half of these steps.
        """
        theta, outer, worker, alive = run
        old = part.take(theta)
        own = lambda worker: part.take(params.get(worker))
        change = lambda old, worker: jax.tree.map(jnp.subtract, old, own(worker))
        changed = drjax.map_fn(change, (drjax.broadcast(old), worker))
        if self.drop_diverged:
            alive = drjax.map_fn(_is_finite, (alive, changed))
        options = {} if alive is None else dict(where=alive, default=0.0)
        reduce: Any = drjax.reduce_mean
        if weights is not None:
            reduce = partial(drjax.reduce_weighted_mean, w=weights)
        on: Any = {"partition": self.partition, "mesh": find_mesh(self.partition)}
        late = partial(received_after, on=on)
        wire, begin = self._wire_of_shards(changed), last - self.delay
        if wire is None:
            sent = reduce(changed, wire=self.wire, **options)
        else:
            parts, result = auto_devices_in_context(self.partition), "sharded"
            if wire.collectives == 1:
                parts, result = 1, None
            layout = dict(parts=parts, block=wire.block, axes=self._chips())
            raveled = drjax.map_fn(partial(ravel_shards, **layout), changed)
            sent = reduce(raveled, wire=wire, result=result, **options)
        if wire is not None and wire.collectives == 2:
            half = last - self.delay // 2
            worker, done = advance(worker, begin, half)
            (sent,) = late([sent], done, sharded=True)
            sent, worker = jax.lax.optimization_barrier((sent, worker))  # in plans, too
            sent, begin = complete(sent, wire, self.partition), half
        worker, done = advance(worker, begin, last)
        if self.delay:
            leaves, treedef = jax.tree.flatten(sent)
            sent = treedef.unflatten(late(leaves, done))
        mean = sent if wire is None else unravel_shards(sent, old)
        updates, after = self.outer.update(mean, outer[p], old)
        new = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), old, updates)
        if alive is not None:
            chosen = partial(jnp.where, drjax.reduce_sum(alive) > 0)
            new, after = jax.tree.map(chosen, (new, after), (old, outer[p]))

        def merge(own: list[Any], new: PyTree) -> list[Any]:
            """The mixture of a worker's own parameters and the global ones."""
            a = self.mixing
            mix = lambda x, y: (a * x + (1 - a) * y).astype(x.dtype)
            new = new if self._replaces else jax.tree.map(mix, part.take(own), new)
            return part.put(own, new)

        # What else a worker has does not wait for the exchange, in a plan neither.
        every = params.get(worker)
        of_part = [x if i in part.leaves else None for i, x in enumerate(every)]
        merged = drjax.map_fn(merge, (of_part, drjax.broadcast(new)))
        pairs = zip(merged, every, strict=True)
        worker = params.set(worker, [y if x is None else x for x, y in pairs])
        outer = [*outer[:p], after, *outer[p + 1 :]]
        return part.put(theta, new), outer, worker, alive

    def _chips(self) -> Mapping[str, int]:
        """The other mesh axes in context, over which chips divide a worker's model."""
        own = self.partition.mesh_axes
        return {x: size for x, size in free_axes().items() if x not in own}

    def _wire_of_shards(self, changed: PyTree) -> Wire | None:
        """How shards are encoded behind the steps; None: leaves are sent as they are.

        Of two collectives each needs a step to be hidden: with one step there is one.
        """
        reals = [jnp.issubdtype(x.dtype, np.floating) for x in jax.tree.leaves(changed)]
        if not (self.wire and self.delay and all(reals) and is_divided(self.partition)):
            return None
        wire = collective_options("reduce_mean", self.wire, None)["wire"]
        return wire if self.delay > 1 else dataclasses.replace(wire, collectives=1)

    @property
    def _replaces(self) -> bool:
        """Whether a worker keeps nothing of its own, which is known without a trace."""
        return isinstance(self.mixing, int | float) and self.mixing == 0

    def _kept(self, workers: PyTree, params: Params, parts: Any) -> PyTree:
        """The workers without the leaves that all received at the end of a round."""
        whole = parts[-1].leaves if self._replaces else {}
        own = enumerate(params.get(workers))
        shared = lambda i: i in whole and whole[i] is None
        return params.set(workers, [Shared(i) if shared(i) else x for i, x in own])

    def _parts(self, theta: PyTree) -> tuple[Fragment, ...]:
        parts = self.fragments
        parts = parts if isinstance(parts, Fragments) else fragments(theta, parts)
        return parts.check(theta)

    def _steps(self, batches: PyTree, P: int) -> int:
        """H, of the batches `[k, H, ...]` of a round."""
        k, leaves = self.partition.size, jax.tree_util.tree_leaves_with_path(batches)
        shapes = {jax.tree_util.keystr(path): jnp.shape(x) for path, x in leaves}
        H = next((shape[1] for shape in shapes.values() if len(shape) > 1), 0)
        wrong = [f", batches{x}: {y}" for x, y in shapes.items() if y[:2] != (k, H)]
        if wrong or P > H or self.delay > H // P:
            raise DrjaxValueError(
                "A round of diloco needs batches [k, H, ...], of H steps of each of "
                f"k = {k} workers, with P <= H and delay <= H / P, as each of P "
                f"fragments is sent and received in H / P steps; got H = {H}, P = {P}, "
                f"delay = {self.delay}{''.join(wrong)}."
            )
        return H

    def _members(self, where: Any, weights: Any) -> Any:
        """Who counts in a round as it begins, bool `[k]`; None: all."""
        if weights is not None:
            present = drjax.map_fn(lambda x: x > 0, weights)
            both = lambda *x: x[0] & x[1]
            return present if where is None else drjax.map_fn(both, (where, present))
        return drjax.broadcast(True) if where is None and self.drop_diverged else where

    # -----------------------------------------------------------------------------
    # Devices

    def _place(self, x: GlobalArray) -> GlobalArray:
        """Put a global array on the mesh; one that is sharded by the model stays so."""
        sharding = self._sharding(x)
        return x if sharding is None else jax.device_put(x, sharding)

    def _spread(
        self, x: Array, slices: Callable[[Array, int], PartitionedArray], lead: int
    ) -> PartitionedArray:
        """Make a slice for each worker, of an array with `lead` axes of workers."""
        k, sharding = self.partition.size, self._sharding(x, lead, of_workers=True)
        if sharding is None:
            return slices(x, k)
        if x.sharding.device_set != sharding.device_set:
            x = jax.device_put(x, self._sharding(x, lead))
        return jax.jit(slices, static_argnums=1, out_shardings=sharding)(x, k)

    def _sharding(self, x: Array, lead: int = 0, of_workers: bool = False) -> Any:
        """That of the model, and of the workers; None in a trace or without a mesh."""
        traced = isinstance(x, Tracer)
        workers = None if traced else host_sharding(self.partition, None)
        if workers is None:
            return None
        has = lambda axis: {*jax.tree.leaves(axis)} <= {*workers.mesh.axis_names}
        spec = tuple(getattr(x.sharding, "spec", ()))[lead:]
        spec = [axis if has(axis) else None for axis in spec]
        first = (*workers.spec, None)[:1] if of_workers else (None,) * lead
        return jax.NamedSharding(workers.mesh, jax.P(*first, *spec))


def _copies(x: GlobalArray, k: int) -> PartitionedArray:
    """`x` for each of k workers; a random key is folded with the worker's number."""
    if is_key(x):
        return jax.vmap(lambda i: jax.random.fold_in(x, i))(jnp.arange(k))
    return jnp.broadcast_to(x, (k, *x.shape))


def _is_finite(alive: Array, changed: PyTree) -> Array:
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(changed)]
    return jnp.stack([alive, *finite]).all()


# ---------------------------------------------------------------------------------
# Checkpoints


class Checkpoints:
    """The checkpoints of a run in one folder, by number of finished rounds.

    They are written in the background, and visible when complete: a process that is
    killed at any moment leaves the latest complete one.

    Args:
      folder: Where they are; made if it does not exist.
      keep: How many of the latest are kept.

    Raises:
      EngineError: orbax-checkpoint is not installed.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax
      >>> from drjax.contrib import diloco
      >>> step = lambda state, x: ({"params": state["params"] + x}, {"x": x})
      >>> of_two, of_six = (diloco.Round(step, k, outer=optax.sgd(1.0)) for k in (2, 6))
      >>> first = {"params": jnp.zeros(())}
      >>> state, _ = jax.jit(of_two)(of_two.init(first), jnp.ones((2, 3)))
      >>> checkpoints = diloco.Checkpoints(tempfile.mkdtemp())
      >>> checkpoints.save(1, state, {"lr": 0.1})
      >>> rounds, state = checkpoints.restore(of_six, of_six.init(first))
      >>> print(rounds, state.params, checkpoints.metadata())
      1 3.0 {'lr': 0.1}
      >>> checkpoints.close()
    """

    def __init__(self, folder: str | Path, keep: int = 2):
        ocp = needed("orbax.checkpoint", "examples", "diloco.Checkpoints")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        json, standard = ocp.JsonCheckpointHandler(), ocp.StandardCheckpointHandler()
        keywords = dict(item_handlers=dict(state=standard, about=json), options=options)
        self._manager = ocp.CheckpointManager(Path(folder).resolve(), **keywords)
        self._args = ocp.args

    def save(self, rounds: int, state: State, metadata: Any = None) -> None:
        """Start to write a checkpoint.

        Args:
          rounds: The number of finished rounds.
          state: The state after them. Its arrays may be donated to the next round.
          metadata: What JSON can hold: settings, history, the position in the data.
        """
        args = self._args
        state_, metadata = args.StandardSave(_by_path(state)), args.JsonSave([metadata])
        self._manager.save(rounds, args=args.Composite(state=state_, about=metadata))

    def metadata(self) -> Any:
        """What was saved with the latest checkpoint; None if there is none."""
        self._manager.wait_until_finished()
        if (rounds := self._manager.latest_step()) is None:
            return None
        about = self._args.Composite(about=self._args.JsonRestore())
        return self._manager.restore(rounds, args=about)["about"][0]

    def restore(self, round_: Round, like: State) -> tuple[int, State]:
        """Read the latest checkpoint, of any number of workers, for those of a round.

        Args:
          round_: The round that goes on.
          like: A state of it, as `round_.init` makes: its types and shardings are those
            of the result.

        Returns:
          The number of finished rounds and the state after them; 0 and `like` if
          nothing was saved yet.

        Raises:
          DrjaxValueError: The checkpoint is of another train state, of other fragments
            or of another outer optimizer.
        """
        self._manager.wait_until_finished()
        rounds, args = self._manager.latest_step(), self._args
        if rounds is None:
            return 0, like
        item = self._manager.item_metadata(rounds)["state"]
        saved = {name: tuple(x.shape) for name, x in item.items()}
        of_workers = lambda name: name.startswith(".workers")
        one = {name: shape[of_workers(name) :] for name, shape in saved.items()}
        expected = _by_path(like)
        differ = {(name, x.shape[of_workers(name) :]) for name, x in expected.items()}
        differ ^= {*one.items()}
        if differ:
            raise DrjaxValueError(
                "diloco restores a checkpoint of the same train state, fragments and "
                "outer optimizer, got one that differs in "
                f"{', '.join(sorted({x for x, _ in differ}))}."
            )
        k = n = round_.partition.size
        for name in filter(of_workers, saved):
            n = saved[name][0]
        others = dataclasses.replace(round_, workers={round_.partition.name: n})

        def sharding(name: str, x: Array) -> Any:
            """Where to read an array: that of other workers, as these would be."""
            if n == k or not of_workers(name):
                return x.sharding
            return others._sharding(x, 1, of_workers=True) or x.sharding

        types = {
            name: jax.ShapeDtypeStruct(saved[name], x.dtype, sharding=sharding(name, x))
            for name, x in expected.items()
        }
        state = args.Composite(state=args.StandardRestore(types))
        read = self._manager.restore(rounds, args=state)["state"]

        def value(path: Any, x: Array) -> Array:
            data = read[jax.tree_util.keystr(path)]
            impl = jax.random.key_impl(x) if is_key(x) else None
            return jax.random.wrap_key_data(data, impl=impl) if impl else data

        state = jax.tree_util.tree_map_with_path(value, like)
        return rounds, state if n == k else round_.resize(state)

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.close()


def _by_path(state: PyTree) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    data = lambda x: jax.random.key_data(x) if is_key(x) else x
    return {jax.tree_util.keystr(path): data(x) for path, x in leaves}
