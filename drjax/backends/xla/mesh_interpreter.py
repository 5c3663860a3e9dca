"""Rounds of a plan on a mesh: one `shard_map` each, with a scan over chunks of groups.

Input: a plan, and how its partition is laid out on a mesh. Output: `MeshInterpreter`,
which traces the plan as JAX operations.

Invariants: a value that is not returned lives until its last use; partitioned values
are whole arrays `[..., n, ...]`, whose slices the devices share.

Sharp edges: a partition that is Manual around the plan is refused, as a device has only
its own groups there.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from drjax import _compat
from drjax._compat.types import (
    Array,
    DeviceArray,
    GlobalArray,
    Mesh,
    PartitionedArray,
)
from drjax._errors import MeshError, PlanError
from drjax._plan import uses
from drjax._plan.loops import takes_blocks
from drjax._plan.schedule_moves import Sources
from drjax._plan_file.batches import combines_itself
from drjax._planner.fences import fenced_inputs
from drjax._primitives.dispatch_cache import same_source
from drjax._primitives.in_two_legs import received_after
from drjax._primitives.map_fn import (
    lowers_by_vmap,
    prepare_group_jaxpr,
    vmap_over_devices,
)
from drjax._primitives.moves import MOVES
from drjax._sharding.eval_on_mesh import evaluate_on_mesh
from drjax._sharding.execute import (
    as_operand,
    computed_in_parts,
    divided_coordinates,
    shard_map_over_devices,
    undivided_if_uneven,
    with_shardings_of,
)
from drjax._sharding.layout import Layout, Placement, find_mesh, make_layout
from drjax.backends._all_columns import coordinate_axes, run_columns
from drjax.backends._interpret_plan import RULES, Environment, PlanInterpreter
from drjax.backends.xla.chunked_stage import (
    ChunkedStage,
    call,
    result_specs,
)
from drjax.backends.xla.fold_states import (
    finish_folds,
    finish_stacked_folds,
    operands_of,
    with_arrays,
)
from drjax.backends.xla.folds_around import (
    folded_slices,
    has_folds,
    only_for_folds,
    run_with_folds,
)
from drjax.backends.xla.inner_programs import (
    OfOneGroup,
    Slices,
    Stacked,
    map_jaxprs,
    run_inner_levels,
)
from drjax.backends.xla.merge_levels import InnerLevels
from drjax.backends.xla.reuse_accumulators import (
    AccumulatorReuse,
    find_reuse,
    finish_stacked,
)
from drjax.plan import (
    Columns,
    Cond,
    Fold,
    Gather,
    Loop,
    Move,
    Plan,
    Program,
    Round,
    Rules,
    Scan,
    Stage,
    Value,
    While,
)
from drjax.primitives import gather_p


def layout_of(plan: Plan, mesh: Mesh | None = None) -> Layout | None:
    """Return how a plan's partition is laid out on the mesh; None without a partition.

    Without a mesh it is local: one device has all groups. `mesh` None: the one in
    context. `MeshError`: the partition does not fit the mesh, or its mesh axes are
    Manual.
    """
    if plan.partition is None:
        return None
    layout = make_layout(plan.partition, find_mesh(plan.partition, mesh))
    # Inputs and rounds of a plan have all n groups, those of a device there n / m.
    if layout.manual:
        raise MeshError(
            f"The plan of {plan.name!r} needs all groups of {plan.partition}, but "
            f"inside jax.shard_map over {layout.axes} a device holds only its own. Use "
            "jax.jit of the program in that jax.shard_map, or call drjax.jit or the "
            "compiled plan outside of it."
        )
    return layout


class MeshInterpreter(PlanInterpreter):
    """Traces a plan on a mesh, as JAX operations: `interpreter(inputs)`.

    Partitioned values are whole arrays `[..., n, ...]`, with the group axis
    `Value.axis`. An input of an inner level's plan may be a `Stacked`, which stands for
    a part of an array of more groups.

    `layout` is None without a partition. `step` is how many of a device's groups run at
    once; None: all. `mesh` is the one that the user passed, for inner levels; None: the
    one in context. `partial` has the names of those results of reductions that are not
    combined over the m devices: the interpreter gives their partial reductions,
    `[m, *s]`. `lasting` has the names of inputs that are read after the plan, or again
    when it runs again: no result takes their memory.
    """

    rules = Rules("The XLA backend", RULES)

    def __init__(
        self,
        plan: Plan,
        layout: Layout | None,
        step: int | None,
        mesh: Mesh | None = None,
        partial: frozenset[str] = frozenset(),
        lasting: frozenset[str] = frozenset(),
    ):
        self.plan, self.layout, self.step, self.mesh = plan, layout, step, mesh
        self._partial = partial
        self._kept, self._folded = plan.kept(), folded_slices(plan)
        self._in_parts = _computed_from_parts(plan)
        # Only a loop over chunks writes into what it reads.
        self._replaced: list[dict[str, str]] = [{}] * len(plan.rounds)
        if step is not None:
            self._replaced = uses.replaced(plan, lasting)
        # The work of rounds that repeat, by what it is made of: traced once.
        self._known_work: dict[Hashable, Callable[..., list[Array]]]
        # What the groups have returned last.
        self._last_work: tuple[Value, ...]

    def __call__(self, inputs: Iterable[Slices]) -> list[Array]:
        self._known_work, self._last_work = {}, ()  # of this trace
        return super().__call__(
            x if isinstance(x, Stacked) else jnp.asarray(x) for x in inputs
        )

    def run_server(self, stage: Stage, env: Environment) -> None:
        # It may have run together with the round before it: `_reuse_accumulators`.
        if not any(value in env for value in stage.outputs):
            args = self._received(stage, env)
            if self.layout is not None and has_folds(stage):
                outs = run_with_folds(stage, args, self.layout)
            else:
                outs = call(stage, args)
            for i, value in enumerate(stage.outputs):
                if self.layout is not None and value.name in self._in_parts:
                    outs[i] = computed_in_parts(outs[i], self.layout)
            env.write(stage.outputs, outs)

    def _received(self, stage: Stage, env: Environment) -> list[Array]:
        """Read what a stage takes; what a fence of it holds, after work of the groups.

        So XLA receives it after that work. `fences.py` says what waits for what.
        """
        args, layout = env.read(stage.inputs), self.layout
        if layout is None or not stage.after:
            return args
        is_float = lambda v: v in env and jnp.issubdtype(v.dtype, jnp.floating)
        work = [*filter(is_float, stage.after)]
        # Nothing else may read it: then other results of the groups' last work.
        work = work or [*filter(is_float, self._last_work)]
        if not work:
            return args
        least = env[min(work, key=lambda v: math.prod(v.shape))]
        on: Placement = {"partition": layout.partition, "mesh": layout.mesh}
        in_parts = {r.result for x in self.plan.rounds for r in x.reduces if r.sharded}
        held = fenced_inputs(stage.jaxpr)
        for sharded in (False, True):
            late = [i for i in held if (stage.inputs[i] in in_parts) is sharded]
            xs = received_after([args[i] for i in late], least, on, sharded)
            for i, x in zip(late, xs, strict=True):
                args[i] = x
        return args

    def scatter(self, slices: Value, whole: GlobalArray) -> PartitionedArray:
        # A scatter is a matter of layout: the shard_map of the groups takes each
        # device's part.
        if self.layout is None or slices.name in self._folded:
            return whole
        return undivided_if_uneven(whole, self.layout, slices.axis)

    # -----------------------------------------------------------------------------
    # The groups' work

    def run_groups(self, index: int, env: Environment) -> None:
        with jax.named_scope(f"drjax.round_{index + 1}"):
            self._run_round(index, env)

    def _run_round(self, index: int, env: Environment) -> None:
        """Run the groups of a round, and its reductions and folds: see `run_groups`."""
        a_round, layout = self.plan.rounds[index], self.layout
        stage = a_round.local
        self._last_work = stage.outputs
        # A round may only broadcast or gather; but effects must run.
        if stage.empty and not stage.jaxpr.effects:
            return
        assert layout is not None
        streams = self.step is not None and self.step < layout.per_device
        if streams and layout.sharded:
            _check_known_shapes(stage)
        kept = [v for v in stage.outputs if v.name in self._kept]
        levels = InnerLevels.of_round(layout, a_round, kept, self.mesh, self._partial)
        # Without a scan over chunks there are no running sums to alias.
        aliases = streams and not levels.merged and not levels.partial
        reuse = find_reuse(self.plan, index) if aliases else None
        combine = reuse is None  # else the reuse of accumulators combines the devices
        totals, stacks = _run_groups(
            layout,
            a_round,
            kept,
            env,
            self.step,
            combine,
            levels,
            self._replaced[index],
            self._known_work if len(self.plan.rounds) > 1 else None,
        )
        if reuse is None:
            env.write(a_round.combined, totals)
        for value, x in zip(kept, stacks, strict=True):
            env[value] = jnp.moveaxis(x, 0, value.axis)
        # Last, as it may gather slices of this round, which are in `env` only now.
        for gather in a_round.all(Gather):
            env[gather.result] = self._gathered(gather, layout, env)
        if reuse is not None:
            self._reuse_accumulators(layout, reuse, totals, env)

    def _gathered(
        self, gather: Gather, layout: Layout, env: Environment
    ) -> PartitionedArray:
        if only_for_folds(self.plan, gather.result):
            return env[gather.source]
        params = {"partition": layout.partition, "mesh": layout.mesh}
        if gather.sharded:
            params["sharded"] = gather.sharded
        x = env[gather.source]
        # In their flat order, coordinates may be divided that no axis of theirs is.
        count = 0 if layout.explicit else coordinate_axes(self.plan, gather.result)
        if count > 1:
            flat = gather_p.bind(lax.collapse(x, 1, 1 + count), **params)
            return lax.reshape(flat, x.shape)
        return gather_p.bind(x, **params)

    def _reuse_accumulators(
        self,
        layout: Layout,
        reuse: AccumulatorReuse,
        totals: list[Array],
        env: Environment,
    ) -> None:
        """Combine the devices' partial reductions, and run the next server stage.

        That stage is the one of the next round, or the last one of the plan. Its
        outputs are written to `env`, with the results that are read later, so that
        `run_server` does not run it again. Those results that `reuse.aliases` names
        take the buffers of running sums. `totals` has for each reduction of the round
        but gathers the partial reductions of the m devices, `[m, *s]`.
        """

        def server(results: dict[str, Array]) -> dict[str, Array]:
            # A copy: tracers of the loop's step must not leave it.
            inner = env.updated(results)
            self.run_server(reuse.server, inner)
            return {v.name: inner[v] for v in reuse.server.outputs}

        # With the stage's outputs in `env`, `run_server` skips it in the next round.
        env.arrays |= reuse.run(layout, totals, server)

    def move(self, move: Move, slices: Array, index: Array | None = None) -> Array:
        assert self.layout is not None
        return _MOVES(move, self.layout, slices, index)

    # -----------------------------------------------------------------------------
    # Loops

    def run_loop(self, index: int, loop: Loop, inputs: list[Any]) -> list[Array]:
        return _LOOPS(loop, self, inputs)

    def bodies(self, loop: Loop) -> list["MeshInterpreter"]:
        """Make the interpreters of a loop's bodies, over the plan's own partition."""

        def lasting(i: int, body: Plan) -> frozenset[str]:
            # A condition leaves its inputs to the body of its loop, a branch to what
            # follows. The compiler unrolls a loop of one step, and then drops a state
            # that nothing reads, but not what a loop over chunks carries.
            carries = i == len(loop.bodies) - 1 and bool(loop.carry)
            once = not carries or loop.length == 1
            values = body.inputs if once else body.inputs[: loop.consts[-1]]
            return frozenset(v.name for v in values)

        return [
            MeshInterpreter(
                body, self.layout, self.step, self.mesh, lasting=lasting(i, body)
            )
            for i, body in enumerate(loop.bodies)
        ]

    def typed(self, loop: Loop, inputs: list[Any]) -> list[Any]:
        """Shard a loop's partitioned inputs: see `_typed`."""
        return [
            x if isinstance(x, Stacked) else self._typed(v, x)
            for v, x in zip(loop.inputs, inputs, strict=True)
        ]

    def _typed(self, value: Value, x: Array) -> Array:
        """Shard a loop's partitioned input over the groups, if mesh axes are Explicit.

        A round returns partitioned values in this sharding. On Explicit axes it is a
        part of their type, which a carried value must not change between steps. Global
        values are returned unchanged; so are all values if no mesh axis of the
        partition is Explicit.
        """
        layout = self.layout
        if not value.partitioned or layout is None or layout.spec_entry is None:
            return x
        x = as_operand(jnp.moveaxis(x, value.axis, 0), layout, True)
        return jnp.moveaxis(x, 0, value.axis)


@MeshInterpreter.rules.rule(Gather)
def _with_the_groups(*_: Any) -> None:
    """Nothing: it is done before the server stage that may run with the groups."""


def _computed_from_parts(plan: Plan) -> frozenset[str]:
    """Name what the server computes from results that devices have parts of."""
    parts = {x.result.name for each in plan.rounds for x in each.reduces if x.sharded}
    if parts and plan.in_tree is None:
        # The body of a loop may carry such a value.
        parts |= {v.name for v in plan.inputs if not v.partitioned}
    for a_round in plan.rounds:
        if parts.intersection(v.name for v in a_round.server.inputs):
            parts |= {v.name for v in a_round.server.outputs}
    return frozenset(parts)


# -------------------------------------------------------------------------------------
# Moves

_MOVES: Rules[Array] = Rules("A move of slices on a mesh")


@_MOVES.rule(Move)
def _move(move: Move, layout: Layout, slices: Array, index: Array | None) -> Array:
    of_source = make_layout(move.over(move.source), layout.mesh)
    operands = [as_operand(slices, of_source, True)]
    if index is not None:
        operands.append(as_operand(index, layout, False))
    return MOVES[move.op].bind(
        *operands,
        partition=move.over(getattr(move, move.partition_of)),
        mesh=layout.mesh,
        sources=Sources(move.sources) if move.sources else None,
    )


# -------------------------------------------------------------------------------------
# Loops

_LOOPS: Rules[list[Array]] = Rules("A loop on a mesh")


@_LOOPS.rule(Columns)
def _columns(loop: Columns, run: MeshInterpreter, inputs: list[Any]) -> list[Array]:
    outs, (body,) = run_columns(loop, inputs, evaluate_on_mesh), loop.bodies
    if run.layout is None:
        return outs
    # The coordinates are along axis 1 of what has a value for each group, too.
    return [
        divided_coordinates(y, run.layout, body.size) if v.axis else y
        for v, y in zip(body.outputs, outs, strict=True)
    ]


@_LOOPS.rule(Program)
def _program(loop: Program, run: MeshInterpreter, inputs: list[Any]) -> list[Array]:
    # Over another partition, on the same mesh.
    layout = layout_of(loop.body, run.layout and run.layout.mesh)
    return MeshInterpreter(loop.body, layout, run.step, run.mesh)(inputs)


@_LOOPS.rule(Cond)
def _cond(loop: Cond, run: MeshInterpreter, inputs: list[Any]) -> list[Array]:
    inputs = run.typed(loop, inputs)
    branches = [lambda *x, body=body: body([*x]) for body in run.bodies(loop)]
    return lax.switch(inputs[0], branches, *inputs[1:])


@_LOOPS.rule(While)
def _while(loop: While, run: MeshInterpreter, inputs: list[Any]) -> list[Array]:
    condition_consts, body_consts, init = loop.split(run.typed(loop, inputs))
    condition, body = run.bodies(loop)
    return lax.while_loop(
        # The condition's plan returns one value, a bool.
        lambda carry: condition([*condition_consts, *carry])[0],
        lambda carry: with_shardings_of(body([*body_consts, *carry]), carry),
        init,
    )


@_LOOPS.rule(Scan)
def _scan(loop: Scan, run: MeshInterpreter, inputs: list[Any]) -> list[Array]:
    (body,) = run.bodies(loop)
    consts, init, xs = loop.split(run.typed(loop, inputs))
    entries = loop.split(loop.bodies[0].inputs)[2]
    xs = [
        x.reshape(loop.length, -1, *x.shape[1:]) if takes_blocks(v, entry) else x
        for x, v, entry in zip(xs, loop.split(loop.inputs)[2], entries, strict=True)
    ]

    def step(
        carry: Sequence[Array], xs: list[Array]
    ) -> tuple[Sequence[Array], list[Array]]:
        outs = body([*consts, *carry, *xs])
        carried = with_shardings_of(outs[: loop.carry], carry)
        return carried, outs[loop.carry :]

    carry, ys = lax.scan(step, init, xs, loop.length, loop.reverse)
    stacks, entries = (x.outputs[loop.carry :] for x in (loop, loop.bodies[0]))
    pairs = zip(stacks, entries, strict=True)
    ys = [
        y.reshape(-1, *y.shape[2:]) if takes_blocks(*pair) else y
        for y, pair in zip(ys, pairs, strict=True)
    ]
    return [*carry, *ys]


# -------------------------------------------------------------------------------------
# The groups of a round


def _run_groups(
    layout: Layout,
    a_round: Round,
    kept: list[Value],
    env: Environment,
    step: int | None,
    combine: bool,
    levels: InnerLevels,
    replaced: dict[str, str],
    known: dict[Hashable, Callable[..., list[Array]]] | None = None,
) -> tuple[list[Array], list[PartitionedArray]]:
    """Run the local stage of a round for all groups, on all devices, and reduce.

    The inputs of the stage and of the folds are read from `env`, which is not changed.
    `kept` are the outputs of the stage to return as slices. `step` is how many of a
    device's groups run at once; None: all. `levels` tells which reductions are combined
    over two levels at once, or by an outer level. `known` has the work of the rounds
    before, and gets that of this one.

    The result is `(totals, stacks)`. If `combine`, `totals` has for each reduction but
    gathers its result `[*s]`, and then the leaves of the result of each fold, `[*s]`;
    results that `levels` leaves to an outer level are `[m, *s]`. If not, all of them
    are the partial reductions of the m devices, `[m, *s]`. `stacks` has for each output
    in `kept` the slices of all groups, `[n, *s]`.
    """
    stage, reduces, folds = a_round.local, a_round.partials, a_round.folds
    shared = env.read(v for v in stage.inputs if not v.partitioned)
    count = len(shared)
    shared += env.read(operands_of(folds))
    stage, prepared, inner, by_vmap = _prepare(layout, a_round, step, levels)
    cut = by_vmap or layout.uneven or layout.spec_entry is not None
    slices, positions, stacked = _read_slices(stage, env, cut)
    # Numbers, as the work must close over no arrays to be traced once.
    end, skipped = len(shared), len(positions)

    def work(*args) -> tuple[list[Array], list[DeviceArray]]:
        *args, first = args
        args, indices = args[skipped:], iter(args[:skipped])
        works = with_arrays(prepared, args[count:end])
        chunked = ChunkedStage(
            layout,
            stage,
            reduces,
            works,
            kept,
            args[:count],
            inner,
            levels.merged,
            replaced,
        )
        pairs = zip(args[end:], stacked, strict=True)
        own = [
            Stacked(x, next(indices)) if is_stacked else x for x, is_stacked in pairs
        ]
        return chunked.run(first, own, step)

    def body(*args: Array) -> list[Array]:
        totals, stacks = work(*args[:-1], args[-1][0])
        # `[1, *s]`: the shard_map stacks the devices' values along this axis.
        if not combine:
            return [*(total[None] for total in totals), *stacks]
        args = args[skipped:]
        works = with_arrays(prepared, args[count:end])
        sums, states = totals[: len(reduces)], totals[len(reduces) :]
        folded = finish_folds(layout, works, states)
        return [*levels.finish(layout, stage, reduces, sums), *folded, *stacks]

    # On Explicit axes, a sharded result has another type than an operand.
    shared = [as_operand(x, layout, False) for x in shared]
    if by_vmap:
        args = [*shared, *slices]
        partitioned = [False] * len(shared) + [True] * len(slices)
        totals, stacks = vmap_over_devices(layout, work, args, partitioned)
        if not combine:
            return totals, stacks
        sums, states = totals[: len(reduces)], totals[len(reduces) :]
        works = with_arrays(folds, shared[count:])
        folded = finish_stacked_folds(layout, works, states)
        return [*finish_stacked(layout, reduces, sums), *folded], stacks
    each = _specs_of_totals(layout, a_round, combine, levels)
    outputs = [*each, *[True] * len(kept)]
    # As in the surrounding code: users' loops inside were traced under it.
    operands, whole = [*positions, *shared, *slices], len(positions) + len(shared)
    divided = [P(None, layout.axes) if x else True for x in stacked]

    def run(*operands: Array) -> list[Array]:
        return shard_map_over_devices(
            layout, body, operands, [False] * whole + divided, outputs,
            _compat.check_vma(), with_first_index=True,
        )  # fmt: skip

    plain = not (folds or inner or levels.merged or levels.partial or any(stacked))
    if known is not None and plain and _compat.under_trace():
        key = _key_of_work(a_round, kept, step, combine, replaced)
        if key is not None:
            # Inlined: its equations are staged again, without being traced again.
            run = known.setdefault(key, jax.jit(run, inline=True))
    outs = run(*operands)
    return outs[: len(each)], outs[len(each) :]


def _key_of_work(
    a_round: Round,
    kept: list[Value],
    step: int | None,
    combine: bool,
    replaced: dict[str, str],
) -> Hashable | None:
    """Return a key of the work of a round, without folds, by which rounds are equal.

    None if it has none, or effects.
    """
    stage = a_round.local
    if stage.exported is not None or _compat.effects_of(stage.jaxpr):
        return None
    code = same_source(stage.jaxpr)
    if code is None:
        return None
    takes = {v.name: i for i, v in enumerate(stage.inputs)}
    gives = {v.name: i for i, v in enumerate(stage.outputs)}
    inputs = tuple((v.shape, v.dtype, v.partitioned, v.axis) for v in stage.inputs)
    partials = tuple(
        (r.op, gives[r.source.name], r.wire, r.sharded, r.result.dtype)
        for r in a_round.partials
    )
    slices = tuple((gives[v.name], v.axis) for v in kept)
    pairs = ((gives.get(new), takes.get(old)) for new, old in replaced.items())
    return code, inputs, partials, slices, step, combine, tuple(pairs)


def _prepare(
    layout: Layout, a_round: Round, step: int | None, levels: InnerLevels
) -> tuple[Stage, list[Fold], OfOneGroup | None, bool]:
    """Make the jaxprs of a round ready to be traced in a device's code.

    The result is `(stage, folds, inner, by_vmap)`: the local stage and the folds with
    the jaxprs to trace; the `inner` of a `ChunkedStage`; and whether the devices' work
    is mapped by `vmap`, as it cannot be in a `shard_map` (see `map_fn.py`).
    """
    stage, folds = a_round.local, a_round.folds
    works = stage, *(fold.combine for fold in folds)
    by_vmap = any(lowers_by_vmap(layout, x.jaxpr) for x in works)
    # A stage from a plan file has no jaxpr.
    rewrite = lambda jaxpr: jaxpr and prepare_group_jaxpr(layout, jaxpr, by_vmap)
    prepare = lambda x: map_jaxprs(x, rewrite)
    folds = [replace(fold, combine=prepare(fold.combine)) for fold in folds]
    stage, inner = prepare(stage), None
    # Only its own batch folds its states.
    if not (folds and combines_itself(stage)):
        inner = run_inner_levels(
            stage,
            layout.partition,
            MeshInterpreter,
            step,
            levels.mesh,
            by_vmap,
            levels.merged,
        )
    return stage, folds, inner, by_vmap


def _read_slices(
    stage: Stage, env: Environment, cut: bool
) -> tuple[list[Array], list[Array], list[bool]]:
    """Read the partitioned inputs of a stage; a `Stacked` one as two operands.

    The result is `(arrays, positions, stacked)`: for each partitioned input, in order,
    its array, the groups' slices `[n, *s]` or the array of a `Stacked`; for each
    `Stacked` input the position in its array; and for each partitioned input whether it
    is `Stacked`. If `cut`, none is: the slices are cut out of their arrays.
    """
    slices = [
        env[v]
        if isinstance(env[v], Stacked) or v.axis == 0
        else jnp.moveaxis(env[v], v.axis, 0)
        for v in stage.inputs
        if v.partitioned
    ]
    if cut:
        slices = [x.whole() if isinstance(x, Stacked) else x for x in slices]
    arrays = [x.array if isinstance(x, Stacked) else x for x in slices]
    positions = [x.index for x in slices if isinstance(x, Stacked)]
    return arrays, positions, [isinstance(x, Stacked) for x in slices]


def _specs_of_totals(
    layout: Layout, a_round: Round, combine: bool, levels: InnerLevels
) -> list[P | bool | None]:
    """Where the totals of a round are on the devices, for `shard_map_over_devices`.

    For each reduction but gathers and then each leaf of the results of the folds: False
    if it is the same on all devices, a `PartitionSpec` if it is sharded, None for a
    partial reduction of each device, as all are unless `combine`.
    """
    reduces = a_round.partials
    leaves = sum(len(fold.results) for fold in a_round.folds)
    if not combine:
        return [None] * (len(reduces) + leaves)
    each = [*result_specs(layout, reduces), *[False] * leaves]
    for i, reduce in enumerate(reduces):
        each[i] = None if reduce.result.name in levels.partial else each[i]
    return each


def _check_known_shapes(stage: Stage) -> None:
    """Check that no input or output of a local stage has symbolic dimensions.

    XLA crashes on these in a loop in a `shard_map`.
    """
    for value in (*stage.inputs, *stage.outputs):
        if not all(isinstance(size, int) for size in value.shape):
            raise PlanError(
                f"{value} has symbolic dimensions, and with groups_per_step= on a mesh "
                "the work of the groups is a loop in a shard_map, where XLA cannot "
                "compile them. Export it without groups_per_step=, or without a mesh, "
                "or for known shapes."
            )
