"""The exchange of a plan that each building block over the groups becomes.

Input: an equation of the planned jaxpr. Output: its `ExchangeRule`, or None: which of
its operands are slices of the groups, which are global, and the `Exchange` itself. All
passes of the planner that need to know what communicates ask this table.

Sharp edges: a block over another partition than the plan's is work of one group, or of
another plan, and has no rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drjax import primitives
from drjax._compat.jax_types import Primitive
from drjax._compat.types import Atom, Eqn
from drjax._partition import Partition
from drjax._plan.exchanges import MOVES
from drjax._planner.partitioning.environment import Environment
from drjax._planner.stage_values import StageValues
from drjax._planner.trace_stages import trace_combine_stage
from drjax._primitives.moves import MOVES as PRIMITIVES
from drjax._primitives.moves import partitions_of
from drjax._primitives.reduce_ops import of_primitive
from drjax.plan import Exchange, Fold, Gather, Move, Reduce, Value


@dataclass(frozen=True)
class ExchangeRule:
    """How the equations of one primitive become exchanges.

    Attributes:
      make: `make(eqn, sources, values)` builds the exchange; `sources` are the `Value`s
        of its operands that are slices.
      slices: `slices(eqn, own)`: the operands that are slices of the groups of the
        plan's partition, along axis 0.
      rank: The position of its kind among the exchanges of one round.
      gives_slices: Whether the result is partitioned, so that the groups get slices
        after the round.
      passes_through: Whether slices of earlier rounds pass through the local stage of
        the round: backends combine outputs of the round's own stage, partly while it
        runs.
      closed_over: `closed_over(eqn)`: the operands that the local stage takes whole, as
        blocks of groups are combined where the groups are.
    """

    make: Callable[[Eqn, Sequence[Value], StageValues], Exchange]
    slices: Callable[[Eqn, Partition | None], list[Atom]]
    rank: int = 0
    gives_slices: bool = False
    passes_through: bool = True
    closed_over: Callable[[Eqn], list[Atom]] = lambda eqn: []

    def globals_of(self, eqn: Eqn, own: Partition | None) -> list[Atom]:
        """The operands that the exchange itself reads, all global."""
        others = {id(v) for v in (*self.slices(eqn, own), *self.closed_over(eqn))}
        return [v for v in eqn.invars if id(v) not in others]


def exchange_rule(eqn: Eqn, kinds: Environment) -> ExchangeRule | None:
    """The rule of an equation that communicates over the plan's partition, or None."""
    reduces = of_primitive(eqn.primitive) is not None
    rule = _REDUCTION if reduces else _RULES.get(eqn.primitive)
    return rule if rule and kinds.partition in partitions_of(eqn) else None


# -------------------------------------------------------------------------------------
# Reductions


def _reduce(eqn: Eqn, sources: Sequence[Value], values: StageValues) -> Reduce:
    op = of_primitive(eqn.primitive)
    assert op is not None
    optional = ("wire", "sharded", "secure", "bound")
    options = {k: eqn.params[k] for k in optional if k in eqn.params}
    (source,) = sources
    return Reduce(op.name, source, values.value(eqn.outvars[0]), **options)


def _gather(eqn: Eqn, sources: Sequence[Value], values: StageValues) -> Gather:
    (source,), sharded = sources, eqn.params.get("sharded", False)
    return Gather(source, values.value(eqn.outvars[0]), sharded)


def _first(eqn: Eqn, own: Partition | None) -> list[Atom]:
    return [eqn.invars[0]]


# -------------------------------------------------------------------------------------
# Folds: of what the function closes over, the neutral state, and the groups' states


def _states(eqn: Eqn, own: Partition | None) -> list[Atom]:
    return eqn.invars[len(eqn.invars) - eqn.params["n_states"] :]


def _closed_over(eqn: Eqn) -> list[Atom]:
    return eqn.invars[: len(eqn.invars) - 2 * eqn.params["n_states"]]


def _fold(eqn: Eqn, sources: Sequence[Value], values: StageValues) -> Fold:
    closed_over = _closed_over(eqn)
    init = eqn.invars[len(closed_over) : len(closed_over) + len(sources)]
    return Fold(
        trace_combine_stage(eqn, closed_over, values),
        tuple(map(values.value, init)),
        tuple(sources),
        tuple(map(values.value, eqn.outvars)),
        eqn.params.get("commutative", False),
    )


# -------------------------------------------------------------------------------------
# Moves: of slices, or of a population, which is global


def _moved(eqn: Eqn, own: Partition | None) -> list[Atom]:
    return [eqn.invars[0]] if partitions_of(eqn)[0] == own else []


def _move(eqn: Eqn, sources: Sequence[Value], values: StageValues) -> Move:
    """Build the move of the primitive's name."""
    (source,) = sources or [values.value(eqn.invars[0])]
    cls = next(cls for cls in MOVES if PRIMITIVES[cls.op] is eqn.primitive)
    fields: dict[str, Any] = {"sources": tuple(eqn.params.get("sources") or ())}
    if len(eqn.invars) > 1:
        fields["index"] = values.value(eqn.invars[1])
    make: Any = cls
    return make(source, values.value(eqn.outvars[0]), **fields)


_MOVE = ExchangeRule(_move, _moved, rank=1, gives_slices=True, passes_through=False)

# Of every registered reduction.
_REDUCTION = ExchangeRule(_reduce, _first)
_RULES: dict[Primitive, ExchangeRule] = {
    primitives.gather_p: ExchangeRule(_gather, _first),
    **dict.fromkeys(PRIMITIVES.values(), _MOVE),
    primitives.reduce_fold_p: ExchangeRule(
        _fold, _states, rank=2, closed_over=_closed_over
    ),
}
