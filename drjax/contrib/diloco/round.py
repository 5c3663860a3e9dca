"""The round of local SGD, DiLoCo and Streaming DiLoCo, for any train step.

Input: a train step of one worker, `(state, batch) -> (state, metrics)`, and an outer
optimizer. Output: a program of one round of H steps, over k workers.

Invariants: the round is made of building blocks only, so that it has derivatives,
plans and engines as any program. Fragment p of P is received at step (p + 1) H / P, and
was sent `delay` steps earlier; the inner steps between do not depend on it.

Source: Douillard et al. 2023, arXiv 2311.08105, algorithm 1; Douillard et al. 2025,
arXiv 2501.18512, algorithm 2.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import drjax
from drjax._compat.types import Array, GlobalArray, PartitionedArray, PyTree
from drjax._errors import DrjaxTypeError, DrjaxValueError
from drjax._extras import needed
from drjax._partition import integer_of
from drjax._sharding.layout import host_sharding
from drjax.contrib.diloco.fragments import Fragment, Fragments, fragments
from drjax.contrib.diloco.train_state import (
    Form,
    Getter,
    Shared,
    State,
    default_params,
    fill,
    freeze,
    is_float,
    is_key,
    thaw,
)

Mask = PartitionedArray | None  # bool [k]: who counts; None: all
Exchanged = tuple[list[GlobalArray], PyTree, PyTree, Mask]


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
        and of the mesh axis that carries it. Default name: `workers`.
      outer: The outer optimizer, of optax. Default: that of the paper,
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      fragments: The number P of fragments, which are synchronized one after another in
        a round; or `diloco.fragments(...)`.
      delay: Inner steps between sending and receiving a fragment (tau), at most H / P.
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
      DrjaxTypeError: In a call: `where` are not bools.
      TypeError: In a call: `step` returns other types than it gets, by `jax.lax.scan`.
      EngineError: `outer` is not given, and optax is not installed.

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
                got = getattr(self, name)
                raise DrjaxValueError(
                    f"diloco.Round({name}=) needs {what}, got {got!r}."
                )
        named = isinstance(self.workers, Mapping)
        sizes = self.workers if named else {"workers": self.workers}
        self._program = drjax.program(placements=sizes)(self._run)
        (self.partition,) = drjax._partition.attached_levels(self._program)

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
        form = Form.of(state, self.params)
        state = jax.tree.map(self._place, state)
        theta = form.params(state)
        tree = form.treedef.unflatten(theta)
        parts = self._parts(tree)
        outer = [self.outer.init(part.take(theta)) for part in parts]
        workers = jax.tree.map(partial(self._spread, rows=_copies), state)
        kept = self._kept(workers, form, parts)
        return State(tree, jax.tree.map(self._place, outer), kept)

    def resize(self, state: State) -> State:
        """The state of a run with any number of workers, for those of this round.

        New workers begin as copies of the first one, with random keys of their own; the
        last ones go. The arrays are placed as by `init`.
        """

        def rows(x: PartitionedArray, k: int) -> PartitionedArray:
            new = _copies(x[0], k)[len(x) :]
            return jnp.concatenate([x, new]) if len(new) else x[:k]

        workers = jax.tree.map(partial(self._spread, rows=rows, lead=1), state.workers)
        return State(*jax.tree.map(self._place, (state.theta, state.outer)), workers)

    # -----------------------------------------------------------------------------
    # One round

    def _run(
        self, state: State, batches: PyTree, where: Any, weights: Any
    ) -> tuple[State, PyTree]:
        theta, treedef = jax.tree.flatten(state.theta)
        parts, outer, before = self._parts(state.theta), [*state.outer], state.workers
        row = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        form = Form.of(fill(jax.tree.map(row, before), theta), self.params)
        P, H = len(parts), self._steps(batches, len(parts))
        alive, metrics = self._members(where, weights), []

        def advance(worker: PyTree, first: int, last: int) -> PyTree:
            """These steps of the round, by all workers."""
            if first == last:
                return worker

            def steps(worker: PyTree, batches: PyTree) -> Any:
                rows = jax.tree.map(lambda x: x[first:last], batches)
                return jax.lax.scan(self._step, worker, rows)

            worker, got = drjax.map_fn(steps, (worker, batches))
            metrics.append(got)
            return worker

        worker = drjax.map_fn(fill, (before, drjax.broadcast(theta)))
        for p, part in enumerate(parts):
            last = (p + 1) * H // P
            sent = last - self.delay
            worker = advance(worker, p * H // P, sent)
            exchange = partial(self._exchange, part, form, weights)
            theta, outer[p], worker, alive = exchange(
                theta, outer[p], worker, alive, partial(advance, first=sent, last=last)
            )
        if alive is not None:

            def back(alive: Array, worker: PyTree, before: PyTree, theta: Any) -> Any:
                """A worker that does not count begins with the global parameters."""
                old = fill(before, theta)
                pairs = zip(theta, form.params(old), strict=True)
                old = form.replace(old, [x if is_float(x) else own for x, own in pairs])
                return jax.tree.map(partial(jnp.where, alive), worker, old)

            args = alive, worker, before, drjax.broadcast(theta)
            worker = drjax.map_fn(back, args)
        join = lambda parts: jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        kept = self._kept(worker, form, parts)
        return State(treedef.unflatten(theta), outer, kept), drjax.map_fn(join, metrics)

    def _step(self, worker: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        state, metrics = self.step(thaw(worker), batch)
        return freeze(state), metrics

    def _exchange(
        self,
        part: Fragment,
        form: Form,
        weights: PartitionedArray | None,
        theta: list[GlobalArray],
        outer: PyTree,
        worker: PyTree,
        alive: Mask,
        delayed: Callable[[PyTree], PyTree],
    ) -> Exchanged:
        """One fragment, from when it is sent until it is received, `delayed` later.

        All communication of a round is here. The steps between depend on none of it.
        """
        old = part.take(theta)
        own = lambda worker: part.take(form.params(worker))
        change = lambda old, worker: jax.tree.map(jnp.subtract, old, own(worker))
        changed = drjax.map_fn(change, (drjax.broadcast(old), worker))
        if self.drop_diverged:
            alive = drjax.map_fn(_is_finite, (alive, changed))
        options: Any = {} if alive is None else dict(where=alive, default=0.0)
        if weights is None:
            mean = drjax.reduce_mean(changed, wire=self.wire, **options)
        else:
            options["wire"] = self.wire
            mean = drjax.reduce_weighted_mean(changed, weights, **options)
        worker = delayed(worker)
        updates, after = self.outer.update(mean, outer, old)
        new = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), old, updates)
        if alive is not None:
            chosen = partial(jnp.where, drjax.reduce_sum(alive) > 0)
            new, after = jax.tree.map(chosen, (new, after), (old, outer))

        def merge(worker: PyTree, new: PyTree) -> PyTree:
            """The mixture of a worker's own parameters and the global ones."""
            a, mixed = self.mixing, new
            if not self._replaces:
                mix = lambda x, y: (a * x + (1 - a) * y).astype(x.dtype)
                mixed = jax.tree.map(mix, own(worker), new)
            return form.replace(worker, part.put(form.params(worker), mixed))

        worker = drjax.map_fn(merge, (worker, drjax.broadcast(new)))
        return part.put(theta, new), after, worker, alive

    @property
    def _replaces(self) -> bool:
        """Whether a worker keeps nothing of its own, which is known without a trace."""
        return isinstance(self.mixing, int | float) and self.mixing == 0

    def _kept(self, workers: PyTree, form: Form, parts: tuple[Fragment, ...]) -> PyTree:
        """The workers without the leaves that all received at the end of a round."""
        whole = parts[-1].leaves if self._replaces else {}
        own = enumerate(form.params(workers))
        shared = lambda i: i in whole and whole[i] is None
        return form.replace(workers, [Shared(i) if shared(i) else x for i, x in own])

    def _parts(self, theta: PyTree) -> tuple[Fragment, ...]:
        if not isinstance(self.fragments, Fragments):
            return fragments(theta, self.fragments).parts
        self.fragments.check(theta)
        return self.fragments.parts

    def _steps(self, batches: PyTree, P: int) -> int:
        """H, of the batches `[k, H, ...]` of a round."""
        k, leaves = self.partition.size, jax.tree_util.tree_leaves_with_path(batches)
        shapes = {jax.tree_util.keystr(path): jnp.shape(x) for path, x in leaves}
        H = next((shape[1] for shape in shapes.values() if len(shape) > 1), 0)
        wrong = [f"batches{x}: {y}" for x, y in shapes.items() if y[:2] != (k, H)]
        if wrong or not H:
            raise DrjaxValueError(
                "A round of diloco needs batches [k, H, ...], of H steps of each of "
                f"k = {k} workers, got {', '.join(wrong) or 'none'}."
            )
        if P > H or self.delay > H // P:
            raise DrjaxValueError(
                "A round of diloco sends and receives P fragments in H / P steps each, "
                f"so that it needs P <= H and delay <= H / P, got H = {H}, P = {P}, "
                f"delay = {self.delay}."
            )
        return H

    def _members(self, where: Any, weights: Any) -> Mask:
        """Who counts in a round as it begins."""
        if weights is not None:
            there = drjax.map_fn(lambda x: x > 0, weights)
            where = there if where is None else drjax.map_fn(_both, (where, there))
        elif where is None and self.drop_diverged:
            where = drjax.broadcast(True)
        if where is not None and jnp.result_type(where) != jnp.bool_:
            raise DrjaxTypeError(
                f"A round of diloco needs where= to be bools, got {where}; numbers are "
                "weights=."
            )
        return where

    # -----------------------------------------------------------------------------
    # Devices

    def _place(self, x: GlobalArray) -> GlobalArray:
        return self._spread(x, lambda x, k: x, lead=None)

    def _spread(
        self, x: Array, rows: Callable[[Array, int], Array], lead: int | None = 0
    ) -> Array:
        """Make an array from `x` and the number of workers, on the mesh in context.

        `lead` is the number of axes of workers that `x` has; None: the result has none.
        """
        k, traced = self.partition.size, isinstance(x, jax.core.Tracer)
        of_workers = None if traced else host_sharding(self.partition, None)
        if of_workers is None:
            return rows(x, k)
        on = lambda *spec: jax.NamedSharding(of_workers.mesh, jax.P(*spec))
        has = lambda axis: {*jax.tree.leaves(axis)} <= {*of_workers.mesh.axis_names}
        spec = tuple(getattr(x.sharding, "spec", ()))[lead or 0 :]
        spec = [axis if has(axis) else None for axis in spec]
        target = on(*spec) if lead is None else on((*of_workers.spec, None)[0], *spec)
        if x.sharding.device_set != target.device_set:
            x = jax.device_put(x, on(*[None] * (lead or 0), *spec))
        return jax.jit(rows, static_argnums=1, out_shardings=target)(x, k)


def _copies(x: GlobalArray, k: int) -> PartitionedArray:
    """`x` for each of k workers; a random key is folded with the worker's number."""
    if is_key(x):
        return jax.vmap(lambda i: jax.random.fold_in(x, i))(jnp.arange(k))
    return jnp.broadcast_to(x, (k, *x.shape))


def _both(x: Array, y: Array) -> Array:
    return x & y


def _is_finite(alive: Array, changed: PyTree) -> Array:
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(changed)]
    return jnp.stack([alive, *finite]).all()
