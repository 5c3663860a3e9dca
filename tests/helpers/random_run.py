"""Runs random programs in every way: see `random_programs.py`.

`python -m tests.helpers.random_run SEED START COUNT` checks programs of a seed, and
goes on after those that disagree. Before each one it says which it is, so that it is
known when the process dies or hangs; `python -m tests.helpers.random_run SEED NUMBER`
makes one smaller.
"""

import collections
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import re
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import drjax
from drjax._api import max_and_min
from drjax._planner import (
    build_stages,
    checkpoint_loops,
    rematerialize_branches,
    rematerialize_loops,
    rematerialize_rounds,
)
from drjax._planner.partitioning import consistency
from drjax._planner.partitioning.kind import signature
from drjax._planner.unbatching.rules import UNBATCHING_RULES
from drjax._primitives import segments
from drjax.backends import Groups
from drjax.backends.xla import idle_chunks, reuse_accumulators
from drjax.backends.xla.chunked_stage import ChunkedStage
from tests.helpers.batches import batches_of
from tests.helpers.exchanges import exchanges_of_large_programs
from tests.helpers.interpreter import interpreted, stage_runner
from tests.helpers.meshes import in_mesh
from tests.helpers.plain_blocks import blocks, plainly
from tests.helpers.plan_files import saved
from tests.helpers.random_programs import (
    MESHES,
    Program,
    arguments,
    draw,
    make,
    smallest,
    used,
    walk,
)
from tests.helpers.random_steps import STEPS

STDERR: Any = sys.__stderr__  # also where pytest captures it
SECONDS = 300  # no program takes as long, however busy the machine


@contextlib.contextmanager
def strict(x64: bool = True):
    with (
        jax.enable_x64(x64),
        jax.numpy_rank_promotion("allow"),
        jax.check_tracer_leaks(False),
    ):
        yield


def check(program: Program) -> None:
    """Run a program as it says, and compare with what it means."""
    mesh, blocks.calls = program.make_mesh(), []
    # Compiles in less time, but rematerializes what an extremum is compared with; an
    # older XLA makes NaN of some loops of nested programs.
    slow = _has_extrema(program) or jax.__version_info__ < (0, 12)
    options = {} if slow else {"xla_backend_optimization_level": 0}
    large = 0 if program.step == 1 else reuse_accumulators.LARGE
    planned = functools.partial(
        drjax.jit,
        groups_per_step=program.step,
        residuals=program.residuals,
        checkpoints="sqrt" if program.checkpoints else None,
    )
    # Of an odd number of rounds, one remains, or each is a segment.
    pairs = lambda length: length % 2 == 0 or program.seed % 2
    segment = lambda length, *_: (1 + bool(pairs(length))) * (length > 1)

    with (
        mock.patch.object(checkpoint_loops, "_rounds_of_segment", segment),
        strict(program.dtype == "float64"),
        mock.patch.object(reuse_accumulators, "LARGE", large),
        mock.patch.multiple(idle_chunks, LEAST_WORK=0, TO_DECIDE=1),
        # As for many groups: sums by segment in buckets.
        mock.patch.multiple(segments, _MANY_GROUPS=2, _MEMORY=8),
        exchanges_of_large_programs(program.seed % 2 == 1),
    ):
        with plainly():
            fn, inputs = used(program, make(program), arguments(program))
            want = interpreted(fn, compiler_options=options)(*inputs)
        with in_mesh(mesh):
            args, fn = _placed(program, mesh), make(program)
            if program.runner == "inner":
                fn = planned(fn)
            fn, inputs = used(program, fn, args)
            known = _reference_too(program)
            if known:
                fn = _traced_once(fn, inputs)
            run = planned(fn) if program.runner == "drjax" else fn
            runner = interpreted if mesh is None else jax.jit
            result = runner(run, compiler_options=options)(*inputs)
            compare(program, result, want)
            _check_effects(program)
        if known:
            reference = drjax.backends.reference
            plan = drjax.make_plan(fn)(*inputs)
            with mock.patch.object(reference, "_call", stage_runner()):
                result = reference.compile(plan)(*inputs)
            compare(program, result, want)
            _check_effects(program)
            if program.seed % 8 == 1:
                read = _as_groups(program, plan, inputs)
                compare(program, planned(fn)(*read), want)
                _check_effects(program)
            if _file_too(program):
                with tempfile.TemporaryDirectory() as folder:
                    loaded = saved(plan, Path(folder) / "plan.drjax")
                compare(program, reference.compile(loaded)(*inputs), want)
                with batches_of(2):
                    run = drjax.backends.in_process.compile(loaded)
                    compare(program, run(*inputs), want)


def _has_extrema(program: Program) -> bool:
    """Whether a step of a program is a maximum or a minimum, by name or by variant."""
    written, reduced = STEPS["written"].variants, STEPS["over_features"].variants
    return any(
        re.search("max|min", name)
        or (name == "written" and j % written in (2, 3))
        or (name == "over_features" and j % reduced in (3, 15))
        for name, _, j, _ in walk(program.recipe)
    )


@contextlib.contextmanager
def counting():
    """Counts the uses of each unbatching rule, and the equations of each kind."""
    rules, kinds = collections.Counter(), collections.Counter()

    def counted(name, rule):
        @functools.wraps(rule)
        def run(eqn, axes):
            result = rule(eqn, axes)
            if result is not None:
                rules[name] += 1
            return result

        return run

    count_rules = {name: counted(name, rule) for name, rule in UNBATCHING_RULES.items()}
    check_equation = consistency.check_equation

    def check_counted(env, eqn):
        operands = ", ".join(str(env[v]) for v in eqn.invars)
        if signature(eqn.primitive) is not None:
            kinds[f"{eqn.primitive.name}({operands})"] += 1
        elif env.is_loop(eqn):
            kinds[eqn.primitive.name] += 1
        elif env.implicit_communication(eqn) is not None:
            kinds[f"means {eqn.primitive.name}({operands})"] += 1
        return check_equation(env, eqn)

    with (
        mock.patch.dict(UNBATCHING_RULES, count_rules),
        mock.patch.object(consistency, "check_equation", check_counted),
    ):
        yield rules, kinds


@contextlib.contextmanager
def choices():
    """Counts what plans save, stack and rematerialize, and how they keep and add."""
    chosen = collections.Counter()

    def counted(owner, method, names):
        original = getattr(owner, method)

        def run(self, *args):
            result = original(self, *args)
            chosen.update(names(self, result))
            return result

        return mock.patch.object(owner, method, run)

    def of_scans(pair, _):
        for what, variables in ("stacked", pair.stacks), ("again", pair.residuals):
            for var in variables.values() if what == "again" else variables:
                slices = pair.body_kinds[var].partitioned
                yield f"{what}: {'slices' if slices else 'global values'}"

    def of_branches(pair, residuals):
        for i in residuals:
            slices = pair.kinds[pair.forward.outvars[i]].partitioned
            yield f"branches: {'slices' if slices else 'global values'}"

    work, branches = rematerialize_rounds.LocalWork, rematerialize_branches.Pair
    checkpointed = lambda pair, _: [f"segments of {pair.segment}"]
    with (
        counted(checkpoint_loops._Pair, "rewritten", checkpointed),
        counted(
            work, "_in_memory_of_results", lambda _, x: ["for a result"] * len(x[0])
        ),
        counted(work, "_cut", lambda _, states: ["state"] * len(states)),
        counted(rematerialize_loops._ScanPair, "rewritten", of_scans),
        counted(branches, "worth", of_branches),
        counted(branches, "rewritten", lambda _, new: ["in branches"] * bool(new)),
        counted(ChunkedStage, "_updated", lambda _, x: ["in place"] * len(x)),
        counted(ChunkedStage, "_unless_idle", lambda *_: ["left out"]),
        counted(ChunkedStage, "_of_chosen", lambda *_: ["by index"]),
        counted(segments, "buckets_of_groups", lambda _, x: [f"{x} buckets"]),
        counted(segments.InSegments, "only_in", lambda *_: ["one slice"]),
        counted(build_stages, "later_sums", lambda _, x: ["later"] * len(x)),
        counted(max_and_min, "_first", lambda *_: ["fold of pairs"]),
    ):
        yield chosen


def is_known(program: Program, error: Exception) -> bool:
    """Whether a program is refused for one of the reasons that are known."""
    return needs_types(program, error) or _batches_a_convolution(program, error)


def _batches_a_convolution(program: Program, error: Exception) -> bool:
    """JAX's batching of a convolution merges the batch with the axis of the groups."""
    steps = [(name, j) for name, _, j, _ in walk(program.recipe)]
    variants = {"windows": (3, 4), "along_features": (35,)}
    return (
        isinstance(error, drjax.PlanError)
        and "reshape" in str(error)
        and any(
            name in variants and j % STEPS[name].variants in variants[name]
            for name, j in steps
        )
    )


def needs_types(program: Program, error: Exception) -> bool:
    """Whether JAX asks the program for shardings, which drjax.jit takes off.

    On Explicit axes it does not infer those of an index into a partitioned value, say.
    drjax.jit keeps them where the program closes over arrays of the mesh.
    """
    planned = program.runner == "drjax" and not program.closed
    if program.mesh is None or (planned and not shards_slices(program)):
        return False
    words = (
        "out_sharding",
        "is not implemented",
        "operand sharding",
        "carry input",
        "should be replicated",  # a scan over partitioned values
        "should be sharded the same",  # a vmap of sharded and replicated operands
        "is not found in mesh",  # a vmap of a loop over sharded operands
        "must have equal output types",  # branches that shard their results otherwise
        "Expected cotangent type",  # a read of one group of a sharded array
        "Incompatible types for broadcasting",  # an svd of a sharded array
    )
    typed = type(error).__name__ == "ShardingTypeError"
    return bool(MESHES[program.mesh][1]) and (
        typed or any(w in str(error) for w in words)
    )


def _reference_too(program: Program) -> bool:
    return program.mesh is None and program.runner == "drjax" and program.step != 2


def _as_groups(program: Program, plan, inputs):
    """The inputs, of which the partitioned ones are read group by group."""
    leaves, tree = jax.tree.flatten(inputs)
    return tree.unflatten(
        Groups([*x]) if v.partitioned and v.axis == 0 else x
        for v, x in zip(plan.inputs, leaves, strict=True)
    )


def _file_too(program: Program) -> bool:
    """Whether its plan goes through a file: of all batches, and of an eighth of others.

    No file has a Python callback.
    """
    chosen = program.mode == "vmap" or program.seed % 8 == 0
    return chosen and all(name != "effect" for name, *_ in program.recipe)


def _check_effects(program: Program) -> None:
    jax.effects_barrier()
    times = sum(name == "effect" for name, *_ in program.recipe)
    calls, blocks.calls[:] = sorted(blocks.calls), []
    assert calls == sorted([*range(program.n)] * times), calls


def _placed(program: Program, mesh):
    """The arguments, on a mesh some of them with each group on its device."""
    args = arguments(program)
    if mesh is not None and MESHES[program.mesh or 0][1]:
        # On Explicit axes JAX cannot add cotangents of arrays that have no mesh.
        args = tuple(map(jnp.asarray, args))
    size = 0 if mesh is None else MESHES[program.mesh or 0][0].get("clients", 0)
    if not size or program.n % size or program.mode == "vmap" or program.seed % 3 == 0:
        return args
    shard = lambda x: drjax.shard(x, partition={"clients": program.n})
    partitioned = (3, 4, 5, 7, 8, 10)
    args = tuple(shard(x) if k in partitioned else x for k, x in enumerate(args))
    if mesh is None or not shards_slices(program):
        return args
    groups = "clients" if "clients" in MESHES[program.mesh or 0][1] else None
    over_model = jax.sharding.NamedSharding(mesh, P(groups, "model"))
    return tuple(
        jax.device_put(x, over_model) if k == 4 else x for k, x in enumerate(args)
    )


def shards_slices(program: Program) -> bool:
    """Whether an Explicit axis besides the partition's shards the slices of `p1`."""
    shape, explicit = ({}, ()) if program.mesh is None else MESHES[program.mesh]
    return (
        "model" in explicit
        and program.f % shape["model"] == 0
        and program.n % shape["clients"] == 0
        and program.seed % 3 > 0
        and program.mode != "vmap"
    )


def compare(program: Program, result, want) -> None:
    assert jax.tree.structure(result) == jax.tree.structure(want)
    double = program.dtype == "float64"
    rtol, atol = (1e-8, 1e-10) if double else (2e-3, 2e-4)
    names = [jax.tree_util.keystr(k) for k, _ in jax.tree.leaves_with_path(want)]
    for name, x, y in zip(
        names, jax.tree.leaves(result), jax.tree.leaves(want), strict=True
    ):
        assert x.dtype == y.dtype, (name, x.dtype, y.dtype)
        assert x.shape == y.shape, (name, x.shape, y.shape)
        x, y = np.asarray(x), np.asarray(y)
        if y.dtype.itemsize < 4 or y.dtype.kind in "iub":
            np.testing.assert_array_equal(x, y, err_msg=name)
            continue
        scale = max(1.0, float(np.max(np.abs(y), initial=0)))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol * scale, err_msg=name)


def _traced_once(fn, args):
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    tree = jax.tree.structure(out)
    run = jax.extend.core.jaxpr_as_fun(jaxpr)
    return lambda *xs: tree.unflatten(run(*xs))


def run(seed: int, start: int, count: int) -> int:
    """Check programs; how many do not agree."""
    failed = 0
    for number in range(start, start + count):
        program = draw(seed, number)
        print(f"at {seed} {number}", flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True, file=STDERR)
        try:
            check(program)
        except Exception as error:
            if is_known(program, error):
                print(f"refused {seed} {number}: {str(error)[:80]}", flush=True)
                continue
            failed += 1
            print(f"FAILED {seed} {number} {program}", flush=True)
            traceback.print_exception(error, limit=-8, file=sys.stdout)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if number % 50 == 49:
            jax.clear_caches()
            gc.collect()
    return failed


def main(seed: int, start: int, count: int | None = None) -> None:
    importlib.import_module("tests.conftest")  # as strict as there
    if count is None:
        print(make_smaller(draw(seed, start)))
        return
    begin = time.process_time()
    with counting() as reached:
        failed = run(seed, start, count)
    seconds = (time.process_time() - begin) / count
    print(json.dumps({"reached": reached}))
    print(f"done: {count} programs, {failed} failed, {seconds:.2f} CPU-seconds each")


def make_smaller(program: Program) -> Program:
    """The smallest program found that fails with the same kind of error."""

    def error_of(program):
        try:
            check(program)
        except Exception as error:
            return type(error)
        return None

    kind = error_of(program)
    if kind is None:
        return program
    return smallest(program, lambda p: error_of(p) is kind)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
