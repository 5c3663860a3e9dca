"""Variables that are bitwise-observable and must not be rematerialized.

Input: an inlined jaxpr. Output: `bitwise_observable`, a set of its variables.

A compiler may round the same equations differently in two stages. That changes a result
as little as any rounding does, unless the program compares a slice bit by bit with a
value that the server has: the derivative of an extremum, `loss ==
drjax.reduce_min(loss)`, or `loss >= the k-th of drjax.gather(loss)`. A rematerialized
`loss` could then differ from the one that was reduced, and no group, or several, would
match. So the operands of an extremum, of a gather, of a fold, of a move between groups
and of the selection of one group are computed once and saved, and so is each variable
whose values they are, through equations that only move, select or negate values.

What such equations alone compute from arguments, or from what is saved, has the same
bits in each stage: it is rematerialized, so that an argument that is compared with its
own maximum needs no copy.

Invariants: the set is closed backward over such equations. Sharp edges: a sum or a mean
rounds and is not observable bit by bit, unless its operand selects values (`select_n`):
then it may be the choice of one group. Where that is skipped in chunks (not `chosen`),
it is rematerialized all the same, unless something compares the sum (`compared.py`).
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from drjax import _compat, primitives
from drjax._compat.jax_types import Literal
from drjax._compat.types import Atom, ClosedJaxpr, Eqn, OpenJaxpr, Var
from drjax._jaxprs.elementwise import ELEMENTWISE
from drjax._jaxprs.walk import CALLS, definitions, variables
from drjax._planner.compared import is_only_added
from drjax._planner.inline import (
    CONTROL,
    InlinedJaxpr,
    is_rewritten,
    operands_of_bodies,
)
from drjax._primitives.moves import MOVES
from drjax._primitives.reduce_ops import of_primitive
from drjax._primitives.segments import place_in_segment_p, slice_of_segment_p

# For each primitive that moves values, the positions of the operands that its results
# hold values of; (): all of them. A primitive with an unbatching rule of its own is
# listed here or computes new values.
MOVED_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        """broadcast_in_dim convert_element_type copy copy_p cummax cummin dynamic_slice
        expand_dims gather neg pad rearrange reduce_max reduce_min reduce_precision
        reduce_window_max reduce_window_min reshape rev select_and_gather_add slice
        split squeeze stop_gradient tile top_k transpose unstack""".split(),
        (0,),
    ),
    **dict.fromkeys("concatenate max min stack".split(), ()),
    "dynamic_update_slice": (0, 1),
    **dict.fromkeys("scatter scatter-max scatter-min".split(), (0, 2)),
}

# Cheap equations whose results have the same bits wherever they are computed.
_EXACT = frozenset(
    """broadcast_in_dim clamp concatenate copy copy_p drjax_broadcast
    drjax_partition_index drjax_place_in_segment drjax_scatter drjax_slice_of_segment
    dynamic_slice dynamic_update_slice eq eq_to
    expand_dims gather ge gt iota is_finite le le_to lt lt_to max min ne neg pad
    rearrange reduce_max reduce_min reshape rev select_n slice split squeeze stack
    stop_gradient tile transpose unstack""".split()
)

# The building blocks that copy slices to the server or to other groups.
_COPIES = {
    primitives.gather_p,
    *MOVES.values(),  # a put_add does if no index is repeated
}


def bitwise_observable(program: InlinedJaxpr, chosen: bool = True) -> frozenset[Var]:
    """Find the variables whose exact bits a program may compare with other values.

    They must not be rematerialized, as a compiler may round differently a second time.
    They are

    * the operands of a maximum or minimum over the groups, of a gather, a `permute`, a
      `take` or a `put_add`, and of a fold, a reduction by a function of two states;
    * what a `select_n` or a `cond` selects among, if that becomes the operand of
      another reduction: such a sum may select the slice of one group;
    * the operands of a loop or branch that are bitwise-observable in one of its bodies;
    * the variables whose values these hold, through equations that only move, select or
      negate values;

    without those that such equations alone compute from arguments, or from others of no
    more bytes (`_exact`), unless they are moved and so saved themselves. Those of the
    bodies of its loops are not among them: each body is an inlined jaxpr of its own.

    Not `chosen`: nor are those that a sum may select, if nothing compares it.
    """
    definition = definitions(program.eqns)
    observable: set[Any] = set()
    for eqn in program.eqns:
        op, copies = of_primitive(eqn.primitive), eqn.primitive in _COPIES
        if op or copies:
            # A sum exposes values only if all groups but one add zeros, which a
            # select_n makes.
            selected = copies or (op is not None and op.selects)
            aliases = _aliases(program, definition, eqn.invars[0], selected)
            exposed = {var for var, selected in aliases if selected}
            again = not chosen and not selected and exposed.isdisjoint(program.outvars)
            if not (again and is_only_added(program.eqns, eqn.outvars[0])):
                observable |= exposed
        elif eqn.primitive is primitives.reduce_fold_p:
            # The function of two states may choose one of them.
            for operand in eqn.invars:
                aliases = _aliases(program, definition, operand, True)
                observable |= {var for var, _ in aliases}
        elif eqn.primitive.name in CONTROL:
            for operand in _observable_operands(program, eqn):
                aliases = _aliases(program, definition, operand, True)
                observable |= {var for var, _ in aliases}
    if not observable:
        return frozenset()
    roots = _exact(program.eqns, program.invars, observable)
    moved: set[Any] = {e.invars[0] for e in program.eqns if e.primitive in _COPIES}
    again = {v for v, of in roots.items() if v not in of and _fits(of, v)} - moved
    return frozenset(observable - again.difference(program.invars))


def _exact(
    eqns: Sequence[Eqn], known: Iterable[Var], saved: Set[Var]
) -> dict[Var, frozenset[Var]]:
    """Find the variables whose rematerialization gives the same bits, with their roots.

    They are what equations without rounding compute from `known` variables, from what
    the server sends to the groups, and from `saved` variables that others compute: the
    roots.
    """
    roots: dict[Any, frozenset[Any]] = dict.fromkeys(known, frozenset())
    for eqn in eqns:
        operands = variables(eqn.invars)
        sent = eqn.primitive in (primitives.broadcast_p, primitives.scatter_p)
        if sent:
            roots.update(dict.fromkeys(eqn.outvars, frozenset()))
        elif all(v in roots for v in operands) and _rounds_nothing(eqn):
            of_operands = frozenset().union(*(roots[v] for v in operands))
            roots.update(dict.fromkeys(eqn.outvars, of_operands))
        else:
            roots.update({v: frozenset({v}) for v in eqn.outvars if v in saved})
    return roots


def _fits(roots: Iterable[Var], var: Var) -> bool:
    """Whether variables need no more memory than another one, but for scalars."""
    nbytes = lambda v: v.aval.size * v.aval.dtype.itemsize
    sizes = sum(nbytes(v) for v in roots if v.aval.ndim > 1), nbytes(var)
    # Symbolic sizes have no order.
    return all(isinstance(x, int) for x in sizes) and sizes[0] <= sizes[1]


def _rounds_nothing(eqn: Eqn) -> bool:
    """Whether the results of an equation are bitwise functions of its operands."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        # Compilers may leave out that a number is rounded to fewer bits, and back.
        source, result = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))
        return _is_plain(source) and _is_plain(result) and np.can_cast(source, result)
    if name in CALLS or eqn.primitive is primitives.map_fn_p:
        raw = _compat.open_jaxpr(eqn.params[CALLS.get(name, "jaxpr")])
        results = {*variables(raw.outvars)}
        inputs = (*raw.invars, *raw.constvars)
        return not eqn.effects and results <= _exact(raw.eqns, inputs, set()).keys()
    whole = all(_is_whole(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars))
    return name in _EXACT or whole and name in ELEMENTWISE


def _is_plain(dtype: np.dtype) -> bool:
    """Whether NumPy knows a dtype, so that it can compare its precision with others."""
    return isinstance(dtype, np.dtype) and dtype.kind in "biufc"


def _is_whole(dtype: np.dtype) -> bool:
    """Whether a dtype has integers or bools, on which arithmetic is exact."""
    return jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_


def _observable_operands(program: InlinedJaxpr, eqn: Eqn) -> Iterator[Atom]:
    """Yield the operands of a loop or branch that are bitwise-observable in a body.

    Each is yielded once for every body of which the argument for it is.
    """
    for body, values in operands_of_bodies(program, eqn):
        # Rematerialization asks again for each rewritten program; bodies mostly stay.
        inner = body.memoize(bitwise_observable, body)
        for argument, value in zip(body.invars, values, strict=True):
            if argument in inner:
                yield value


# The jaxpr whose values are followed, inlined or not.
_Followed: TypeAlias = InlinedJaxpr | OpenJaxpr


def _aliases(
    jaxpr: _Followed, definition: dict[Var, Eqn], var: Atom, selected: bool
) -> set[tuple[Var, bool]]:
    """Find the variables whose values another variable, `var`, holds.

    The search goes backward from `var`, from the results to the operands of equations
    of `jaxpr` that only move, select or negate values, such as `reshape` or `select_n`.
    It ends at equations that compute new values.

    The flag of a variable is true if `selected` is, that of `var` itself, or if a
    `select_n` or a `cond` lies on the path from it to `var`. A variable with paths of
    both sorts occurs twice. Literals do not occur.
    """
    aliases: set[tuple[Any, bool]] = set()
    stack = [(var, selected)]
    while stack:
        var, selected = stack.pop()
        # The flag is part of the state: a variable may be reached with and without a
        # selection, on different paths.
        if isinstance(var, Literal) or (var, selected) in aliases:
            continue
        aliases.add((var, selected))
        eqn = definition.get(var)
        if eqn is not None:
            operands = _moved_operands(jaxpr, eqn, eqn.outvars.index(var))
            stack += [(operand, selected or selects) for operand, selects in operands]
    return aliases


def _moved_operands(
    jaxpr: _Followed, eqn: Eqn, index: int
) -> Iterator[tuple[Atom, bool]]:
    """Find the operands of an equation whose values its result `index` holds.

    Yields them with whether the equation selects among values to get from this operand
    to the result, as a `select_n` or a `cond` does. Nothing if the equation computes
    new values.
    """
    name = eqn.primitive.name
    # The predicate of a select_n and the index of a cond are not among the values.
    if name == "select_n":
        yield from ((operand, True) for operand in eqn.invars[1:])
    elif eqn.primitive in (place_in_segment_p, slice_of_segment_p):
        # The segment, too: with other bits a group would be in another one.
        yield from ((operand, True) for operand in eqn.invars)
    elif name in MOVED_OPERANDS:
        positions = MOVED_OPERANDS[name] or range(len(eqn.invars))
        yield from ((eqn.invars[i], False) for i in positions)
    elif name in ("clamp", "sort"):
        # Result i of a sort is a permutation of operand i; the keys only choose which.
        # The operands of clamp are (lower bound, value, upper bound).
        yield eqn.invars[1 if name == "clamp" else index], False
    elif eqn.primitive is primitives.map_fn_p:
        yield from _through_call(eqn.params["jaxpr"], eqn.invars, index, False)
    elif name in CALLS:
        yield from _through_call(eqn.params[CALLS[name]], eqn.invars, index, False)
    elif name == "cond":
        branches = eqn.params.get("branches", ())
        if isinstance(jaxpr, InlinedJaxpr) and is_rewritten(eqn):
            branches = jaxpr.bodies(eqn)
        for branch in branches:
            yield from _through_call(branch, eqn.invars[1:], index, True)


def _through_call(
    jaxpr: ClosedJaxpr | _Followed,
    operands: Sequence[Atom],
    index: int,
    selected: bool,
) -> Iterator[tuple[Atom, bool]]:
    """Find the operands whose values the result `index` of an evaluated jaxpr holds.

    Yields them with whether a selection among values lies between operand and result:
    `selected`, of the equation itself among jaxprs, or an equation in the jaxpr.
    """
    raw: Any = jaxpr
    if not isinstance(jaxpr, InlinedJaxpr):
        raw = _compat.open_jaxpr(jaxpr)
    outer = dict(zip(raw.invars, operands, strict=True))
    definition = definitions(raw.eqns)
    # Variables of the jaxpr itself are left out: stages save those of the program.
    for var, selects in _aliases(raw, definition, raw.outvars[index], selected):
        if var in outer:
            yield outer[var], selects
