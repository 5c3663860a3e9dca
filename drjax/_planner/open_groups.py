"""Plans for any number of groups: nothing in them depends on n.

Input: a plan for n groups, and how to make it for another number. Output: the plan,
marked as open, or a refusal that names what depends on n.

The program is traced once more with a symbol for n, as the number of groups and as the
length of partitioned arguments. So whatever code computes with n is seen, for all n at
once: arithmetic gives an equation that reads the symbol, or a shape that is computed
from it, and a decision that is not the same for every n is an error.

It is also planned for n + 1 groups, and the two plans are compared: their values,
communication, and stages, equation by equation. So what the planner makes of n is found
where it ends up. A mean has no n: backends divide by the number of groups that took
part. Its derivative has one, as a literal of a stage.

Invariants: what communicates all groups' slices (a gather, a scatter, a move) depends
on n, also if the two plans are alike.

Sharp edges: a number that user code has of its own is no symbol. A symbol as a key of a
dictionary is found by none of its numbers.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, replace
from typing import Any, cast

import jax
import numpy as np

from drjax import _compat
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, Aval, ClosedJaxpr, Eqn, OpenJaxpr, PyTree
from drjax._context import resized
from drjax._errors import PlanError
from drjax._jaxprs.prng_keys import to_raw
from drjax._jaxprs.provenance import line_of_error, source_line
from drjax._partition import Partition
from drjax._plan import normal_form
from drjax._primitives.dispatch_cache import parameter_keys, value_key
from drjax.plan import (
    Broadcast,
    Fold,
    Gather,
    Loop,
    Move,
    Plan,
    Reduce,
    Rules,
    Scatter,
    Stage,
    Step,
    Value,
)


def opened(
    plan: Plan,
    make: Callable[..., Plan],
    jaxpr_of: Callable[[PyTree, PyTree], ClosedJaxpr],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> Plan:
    """Mark a plan as one for any number of groups, if nothing in it depends on n.

    `make(*args, **kwargs)` plans the program, as it has made `plan`, and
    `jaxpr_of(args, kwargs)` traces it. Raises `PlanError` if the plan depends on n,
    there is none for n + 1 groups, or the program has no partition.
    """
    begin = f"{plan.name} has no plan for any number of groups (open_groups=True): "
    if plan.partition is None:
        raise PlanError(f"{begin}it calls no building block.")
    if (why := fixed_by(plan)) is not None:
        raise PlanError(f"{begin}{why}, which has as many slices as there are groups.")
    n = plan.size + 1
    leaves, tree = jax.tree.flatten((args, kwargs))
    for_size = lambda n: tree.unflatten(
        _resized_type(n, *pair) for pair in zip(plan.inputs, leaves, strict=True)
    )
    args, kwargs = for_size(n)
    try:
        with resized((plan.partition, n)):
            other = make(*args, **kwargs)
    # Of any class: also what code of the user raises for another number of groups.
    except Exception as error:
        raise PlanError(
            f"{begin}it was planned for {plan.size} groups, but planning it for {n} "
            f"raises {type(error).__name__}: {error}"
        ) from error
    if (why := _difference(plan, normal_form.resized(other, plan.size))) is not None:
        raise PlanError(
            f"{begin}{why} differs between {plan.size} and {n} groups. Only "
            "drjax.reduce_mean may divide by that number, and not its derivative: take "
            "gradients in the mapped function, or that of reduce_weighted_mean."
        )
    _check_code(begin, plan.partition, jaxpr_of, for_size)
    return replace(plan, open_groups=True)


def _check_code(
    begin: str,
    partition: Partition,
    jaxpr_of: Callable[[PyTree, PyTree], ClosedJaxpr],
    for_size: Callable[[Any], PyTree],
) -> None:
    """Raise `PlanError` if code of the program computes with the number of groups."""
    fix = (
        "A plan for any number of groups has a symbol for that number, which only "
        "means and counts know: write drjax.reduce_mean, or count the groups by "
        "drjax.reduce_sum(drjax.broadcast(1.0)); or plan without open_groups=True."
    )
    size = _compat.symbolic_size("groups")
    args, kwargs = for_size(size)
    try:
        with resized((partition, size)):
            jaxpr = jaxpr_of(args, kwargs)
    # Of any class: also what code of the user raises for a symbol.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise PlanError(
            f"{begin}the code at {line_of_error(error)} depends on the number of "
            f"groups ({type(error).__name__}: {lines[0]}). {fix}"
        ) from error
    for eqn in _compat.reads_of_size(jaxpr, size):
        raise PlanError(
            f"{begin}{eqn.primitive.name} at {source_line(eqn)} computes with the "
            f"number of groups. {fix}"
        )


def fixed_by(plan: Plan) -> str | None:
    """Find the first scatter, gather or move of a plan, also in its loops.

    These depend on the number of groups. It is a clause for an error, such as `it
    gathers loss`; None if there is none.
    """
    for step in plan.steps:
        if (why := _fixed(step)) is not None:
            return why
    return None


# What of a step depends on the number of groups: a clause, or None.
_fixed: Rules[str | None] = Rules("open_groups=True")


@_fixed.rule(Stage, Broadcast, Reduce, Fold)
def _open(step: Step) -> None:
    return None


@_fixed.rule(Scatter)
def _scatters(step: Scatter) -> str:
    return f"it scatters {step.source}"


@_fixed.rule(Gather)
def _gathers(step: Gather) -> str:
    return f"it gathers {step.source}"


@_fixed.rule(Move)
def _moves(step: Move) -> str:
    return f"it moves {step.source} between groups ({step.op})"


@_fixed.rule(Loop)
def _of_bodies(step: Loop) -> str | None:
    return next(filter(None, map(fixed_by, step.bodies)), None)


def _resized_type(n: int, value: Value, leaf: object) -> Any:
    """Return the type of an argument of the program, for another number of groups.

    It is a `jax.ShapeDtypeStruct` with n, or a symbol, along the group axis; `leaf`
    itself if it is global.
    """
    if not value.partitioned:
        return leaf
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(value.whole_shape(n), value.dtype, weak_type=weak)


def _difference(plan: Plan, other: Plan) -> str | None:
    """Find the first difference between two plans of a program, for n and n + 1 groups.

    It is the subject of a sentence, such as `the number of rounds`.
    """
    if len(plan.rounds) != len(other.rounds):
        return "the number of rounds"
    for pair in zip(plan.steps, other.steps, strict=False):
        if (why := _difference_of_steps(*pair)) is not None:
            return why
    if len(plan.steps) != len(other.steps):
        return "what is communicated"
    for name in ("inputs", "outputs"):
        mine, others = getattr(plan, name), getattr(other, name)
        for value, another in itertools.zip_longest(mine, others):
            if value != another:
                return f"the type of {value or another}"
    return None


def _difference_of_steps(step: Step, other: Step) -> str | None:
    """Find the first difference between two steps, of plans for n and n + 1 groups.

    It is the subject of a sentence, such as `length of the loop scan`.
    """
    if type(step) is not type(other):
        return f"what is communicated ({_named(step)} and {_named(other)})"
    if isinstance(step, Stage) and isinstance(other, Stage):
        return _difference_of_stages(step, other)
    if isinstance(step, Fold) and isinstance(other, Fold):
        if (why := _difference_of_stages(step.combine, other.combine)) is not None:
            return why
    for pair in zip(step.bodies, other.bodies, strict=False):
        if (why := _difference(*pair)) is not None:
            return why
    for field in fields(cast(Any, step)):
        mine, another = getattr(step, field.name), getattr(other, field.name)
        # Plans and stages were compared.
        if field.name not in ("bodies", "combine") and mine != another:
            if isinstance(step, Loop):
                return f"{field.name} of the loop {step.name}"
            return f"what is communicated ({field.name} of a {_named(step)})"
    return None


def _named(step: Step) -> str:
    return getattr(step, "op", "stage")


def _difference_of_stages(stage: Stage, other: Stage) -> str | None:
    """Find the first difference between two stages, of plans for n and n + 1 groups.

    It is the subject of a sentence: the first equation that differs, with its source
    line; else the type of an input or output.
    """
    pairs = itertools.zip_longest(
        _comparison_keys(stage.jaxpr), _comparison_keys(other.jaxpr)
    )
    for mine, another in pairs:
        if mine is None or another is None or mine[1] != another[1]:
            eqn, _ = mine or another or (None, None)
            if eqn is None:
                return f"a value that {stage.name} takes, or a constant of it,"
            return f"{eqn.primitive.name} at {source_line(eqn)}, in {stage.name},"
    for value, another in itertools.zip_longest(
        (*stage.inputs, *stage.outputs), (*other.inputs, *other.outputs)
    ):
        if value != another:
            return f"the type of {value or another}, in {stage.name},"
    return None


def _comparison_keys(
    jaxpr: ClosedJaxpr | OpenJaxpr,
) -> Iterator[tuple[Eqn | None, Any]]:
    """Divide a jaxpr into parts with keys; jaxprs with equal keys are equal.

    Variables are numbered in the order of their first use, so that names do not matter.

    Yields pairs of an equation and its key: first with None for the inputs and
    constants, then one for each equation, and last with None for the results. A jaxpr
    in the parameters of an equation is divided likewise. Its pairs come before that of
    the equation, and the equation replaces None in them.
    """
    numbers: dict[Any, int] = {}
    inside = _compat.open_jaxpr(jaxpr)

    def atom(x: Atom) -> tuple[Hashable, Aval]:
        if isinstance(x, Literal):
            return _array_key(x.val), x.aval
        return numbers.setdefault(x, len(numbers)), x.aval

    ins = [atom(v) for v in (*inside.constvars, *inside.invars)]
    yield None, (ins, [_array_key(x) for x in _compat.jaxpr_consts(jaxpr)])
    for eqn in inside.eqns:
        for inner in _compat.jaxprs_in(eqn.params):
            for deeper, key in _comparison_keys(inner):
                yield deeper or eqn, key
        params = parameter_keys(eqn, lambda _: ())
        ins, outs = ([atom(v) for v in vs] for vs in (eqn.invars, eqn.outvars))
        yield eqn, (eqn.primitive, ins, outs, params)
    yield None, [atom(v) for v in inside.outvars]


def _array_key(x: Any) -> Hashable:
    """Return a hashable key of a number, or of an array: its dtype, shape and bits."""
    return value_key(np.asarray(to_raw(x)) if hasattr(x, "dtype") else x, lambda _: ())
