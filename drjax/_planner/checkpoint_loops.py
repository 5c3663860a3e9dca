"""Checkpoints of loops over rounds: a gradient saves the state of some rounds only.

Input: the kinds of an inlined jaxpr, after `rematerialize_loops.py`. Output: an
equivalent one in which a scan over T rounds, and the backward scan that reads what it
stacks, are loops over segments of c rounds:

    forward F: carry -> carry, y_t           becomes  segments of F: carry -> carry
               backward B: ..., y_t -> ...             saves the carry of T / c rounds
                                              backward over segments: from a saved carry
                                               F: carry -> y_t of c rounds, then B

So T / c carried values are saved, and the stacks of c rounds at once, for one more
forward pass, as by a `jax.checkpoint` around each segment of a nested scan (Griewank
and Walther 2000, "Algorithm 799: revolve"; Chen, Xu, Zhang and Guestrin 2016, "Training
deep nets with sublinear memory cost"). c is the number of rounds for which both take
the fewest bytes together: about the square root of T where a round stacks what it
carries. If it does not divide T, the last T mod c rounds are first split off, as scans
of their own (`_split`), whose stacks are saved: they are fewer than those of a segment.

Soundness: F runs again from a value that it had, on the same constants and entries of
stacks, so that it computes what it computed, up to the compiler's rounding. B takes all
that it compares from the second run. A scan with effects is not run twice.

Invariants: what a scan takes step by step is taken block by block, without a copy.
Communication of the forward rounds is repeated, as with a `jax.checkpoint`. Sharp
edges: a scan is rewritten if one scan reads its stacks backward: in a gradient of a
gradient there may be more. What scans take step by step is copied where it is split.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from drjax import _compat
from drjax._compat.types import Eqn, Var
from drjax._jaxprs.walk import live_equations, split_scan, variables
from drjax._planner.inline import InlinedJaxpr
from drjax._planner.partitioning.environment import Environment
from drjax._planner.scans import ScanEquation, replace_scans, step_axes
from drjax._planner.work import bytes_of
from drjax._sharding.layout import devices_in_context


def checkpoint_rounds(kinds: Environment) -> InlinedJaxpr | None:
    """Rewrite scans over rounds, and their backward scans, to loops over segments.

    None if there is no scan to rewrite.
    """
    program, pairs, taken = kinds.program, list[_Pair](), set[int]()
    devices = devices_in_context(kinds.partition)
    part = lambda v: 1 / devices if kinds[v].partitioned else 1
    for eqn in program.eqns:
        if eqn.primitive.name == "scan" and kinds.is_loop(eqn) and not eqn.effects:
            pair = _Pair(program, ScanEquation(program, eqn), part)
            own = set(map(id, pair.eqns))
            if pair.segment and taken.isdisjoint(own):
                pairs.append(pair)
                taken |= own
    replaced: dict[int, tuple[Eqn, InlinedJaxpr]] = {}
    for pair in pairs:
        program, first = _split(program, pair)
        first.segment = pair.segment
        replaced |= first.rewritten()
    return replace_scans(program, replaced) if replaced else None


class _Pair:
    """A forward scan, and the backward scan that alone reads some of its stacks.

    `part` says which part of the bytes of a variable of the program a device has.

    Attributes:
      backward: The backward scan; None: there is none, or several.
      segment: The number of rounds of a segment; 0: segments would save no bytes.
      eqns: The equations of both.
    """

    def __init__(
        self,
        program: InlinedJaxpr,
        forward: ScanEquation,
        part: Callable[[Var], float] = lambda _: 1,
    ):
        self.program, self.forward, self.backward = program, forward, None
        self.segment, self.length = 0, forward.eqn.params["length"]
        self.eqns: list[Eqn] = []
        stacks = dict(zip(forward.ys, forward.body_ys, strict=True))
        users = {y: [e for e in program.eqns if y in e.invars] for y in stacks}
        backward = [e for e in program.eqns if any(e in users[y] for y in stacks)]
        scans = [e for e in backward if self._is_backward(e)]
        if len(scans) != 1 or 0 in sum(step_axes(forward.eqn, forward.body), []):
            return
        self.backward = ScanEquation(program, scans[0])
        self.eqns = [forward.eqn, scans[0]]
        # Stacks that only the backward scan reads, entry by entry.
        whole = {*self.backward.consts, *self.backward.carry, *program.outvars}
        taken = {*self.backward.xs}
        self._residuals = {
            y for y in stacks if y in taken - whole and len(users[y]) == 1
        }
        # All that it reads is rematerialized, so that it compares values of one run.
        self._again = [y for y in stacks if y in taken]
        roots = [stacks[y] for y in self._again]
        self._eqns, self._needed = _needed_for(roots, forward)
        size = lambda outer, v: part(outer) * bytes_of([v])
        ends = forward.eqn.outvars
        saved = sum(size(ends[i], forward.body_carry[i]) for i in self._needed)
        each = {stacks[y]: y for y in self._residuals}
        stacked = sum(size(y, v) for v, y in each.items())
        xs = [x for x in (*forward.xs, *self.backward.xs) if x not in stacks]
        ys = [y for y in forward.ys if y not in self._residuals]
        moved = sum(size(v, v) for v in {*xs, *ys, *self.backward.ys})
        self.segment = _rounds_of_segment(self.length, saved, stacked, moved)

    def _is_backward(self, eqn: Eqn) -> bool:
        forward, name = self.forward.eqn, eqn.primitive.name
        return (
            name == "scan"
            and eqn.params["length"] == self.length
            and eqn.params["reverse"] != forward.params["reverse"]
            and not eqn.effects
            and any(y in split_scan(eqn, eqn.invars)[2] for y in self.forward.ys)
            and 0 not in sum(step_axes(eqn, *self.program.bodies(eqn)), [])
        )

    def rewritten(self) -> dict[int, tuple[Eqn, InlinedJaxpr]]:
        """Return by the `id` of each of both scans the new one and its body."""
        assert self.backward is not None
        segments = self.length // self.segment
        self._saved = [
            _compat.new_var(_compat.stacked_aval(v.aval, segments))
            for v in (self.forward.body_carry[i] for i in self._needed)
        ]
        forward, backward = self.eqns
        return {
            id(forward): self._forward(),
            id(backward): self._backward(self.backward),
        }

    def _forward(self) -> tuple[Eqn, InlinedJaxpr]:
        """Build the loop over segments of rounds, which saves where each begins."""
        forward = self.forward
        pairs = zip(forward.ys, forward.body_ys, strict=True)
        kept = [(y, v) for y, v in pairs if y not in self._residuals]
        consts, carry = _fresh(forward.body_consts), _fresh(forward.body_carry)
        xs, ys = self._blocks(forward.body_xs), self._blocks([v for _, v in kept])
        ends = _fresh(forward.body_carry)
        inner = _with(forward.eqn, [consts, carry, xs], [*ends, *ys], self.segment)
        body = InlinedJaxpr(
            [*forward.body_consts, *forward.body_carry, *forward.body_xs],
            forward.body.eqns,
            [*forward.body.outvars[: len(carry)], *(v for _, v in kept)],
            forward.body.consts,
            forward.body.known_bodies,
        )
        body.known_arguments = forward.body.known_arguments
        starts = [carry[i] for i in self._needed]
        outer = InlinedJaxpr(
            [*consts, *carry, *xs],
            [inner],
            [*ends, *ys, *starts],
            {},
            {inner: (body,)},
        )
        outs = [*forward.eqn.outvars[: len(carry)], *(y for y, _ in kept), *self._saved]
        operands = [forward.consts, forward.carry, forward.xs]
        segments = self.length // self.segment
        return _with(forward.eqn, operands, outs, segments), outer

    def _backward(self, scan: ScanEquation) -> tuple[Eqn, InlinedJaxpr]:
        """Build the backward loop over segments, which first run forward again."""
        forward, stacks = (
            self.forward,
            dict(zip(self.forward.ys, self.forward.body_ys, strict=True)),
        )
        # The rounds of the segment, from where it begins.
        of_rounds = _fresh(forward.body_consts)
        starts = _fresh([forward.body_carry[i] for i in self._needed])
        entries = self._blocks(forward.body_xs)
        again = self._blocks([stacks[y] for y in self._again])
        ends = _fresh(starts)
        rounds = _with(
            forward.eqn, [of_rounds, starts, entries], [*ends, *again], self.segment
        )
        renamed = {e: _compat.as_rematerialized(e) for e in self._eqns}
        known = forward.body.known_bodies
        body = InlinedJaxpr(
            [
                *forward.body_consts,
                *(forward.body_carry[i] for i in self._needed),
                *forward.body_xs,
            ],
            [*renamed.values()],
            [
                *(forward.body.outvars[i] for i in self._needed),
                *(stacks[y] for y in self._again),
            ],
            forward.body.consts,
            {new: known[e] for e, new in renamed.items() if e in known},
        )
        body.known_arguments = forward.body.known_arguments
        # Then the backward scan of the segment.
        consts, carry = _fresh(scan.body_consts), _fresh(scan.body_carry)
        blocks = dict(zip(self._again, again, strict=True))
        pairs = list(zip(scan.xs, self._blocks(scan.body_xs), strict=True))
        others = [(x, block) for x, block in pairs if x not in blocks]
        taken = [blocks.get(x, block) for x, block in pairs]
        outs = [*_fresh(scan.body_carry), *self._blocks(scan.body_ys)]
        inner = _with(scan.eqn, [consts, carry, taken], outs, self.segment)
        outer = InlinedJaxpr(
            [*consts, *of_rounds, *carry, *starts, *entries, *(b for _, b in others)],
            [rounds, inner],
            [*outs],
            {},
            {rounds: (body,), inner: (scan.body,)},
        )
        operands = [
            [*scan.consts, *forward.consts],
            scan.carry,
            [*self._saved, *forward.xs, *(x for x, _ in others)],
        ]
        segments = self.length // self.segment
        return _with(scan.eqn, operands, scan.eqn.outvars, segments), outer

    def _blocks(self, entries: Sequence[Var]) -> list[Var]:
        """Make variables for the entries of a segment's rounds."""
        return [
            _compat.new_var(_compat.stacked_aval(v.aval, self.segment)) for v in entries
        ]


def _rounds_of_segment(length: int, saved: float, stacked: float, moved: float) -> int:
    """Choose how many of `length` rounds a segment has; 0: no number saves bytes.

    `saved` are the bytes of what a segment starts from, `stacked` those of what the
    backward scan reads of a round, and `moved` those of what is copied if rounds remain
    after the last segment.
    """
    cost = lambda c: saved * (length // c) + stacked * c + moved * (length % c > 0)
    order = lambda c: (cost(c), length % c > 0)
    best = min(range(1, length), key=order, default=0)
    return best if best and cost(best) < stacked * length else 0


def _split(program: InlinedJaxpr, pair: _Pair) -> tuple[InlinedJaxpr, _Pair]:
    """Split off the last rounds of a pair of scans, if its segments leave some.

    The pair of the first rounds is returned, too.
    """
    rest = pair.length % pair.segment
    if not rest:
        return program, pair
    assert pair.backward is not None
    forward, backward = pair.forward, pair.backward
    parts = pair.length - rest, rest
    moves = _Moves(pair.length, parts, forward.eqn.params["reverse"])
    known = dict(program.known_bodies)

    def split(
        scan: ScanEquation, order: Sequence[int], own: dict[Var, tuple[Var, Var]]
    ) -> tuple[list[Eqn], list[tuple[Var, Var]]]:
        """Run a scan as two; `own` has both parts of stacks that are split already."""
        eqns, carry, stacks = list[Eqn](), scan.carry, {}
        for x in dict.fromkeys(scan.xs):
            stacks[x] = own.get(x) or moves.divided(x, eqns)
        part_of = lambda v, n: _compat.new_var(_compat.stacked_aval(v.aval, n))
        ys = [(part_of(v, parts[0]), part_of(v, rest)) for v in scan.body_ys]
        for part in order:
            last = part == order[-1]
            ends = scan.eqn.outvars[: len(carry)] if last else _fresh(scan.body_carry)
            xs = [stacks[x][part] for x in scan.xs]
            outs = [*ends, *(y[part] for y in ys)]
            eqn = _with(scan.eqn, [scan.consts, carry, xs], outs, parts[part])
            known[eqn] = (scan.body,)
            eqns.append(eqn)
            carry = ends
        return eqns, ys

    first, ys = split(forward, (0, 1), {})
    own = dict(zip(forward.ys, ys, strict=True))
    second, cotangents = split(backward, (1, 0), own)
    # Only what others read is joined; the rest is dead.
    for eqns, joined in (
        (first, own),
        (second, dict(zip(backward.ys, cotangents, strict=True))),
    ):
        eqns += [moves.joined(y, both) for y, both in joined.items()]
    new = {id(forward.eqn): first, id(backward.eqn): second}
    eqns = [e for eqn in program.eqns for e in new.get(id(eqn), [eqn])]
    live = live_equations(eqns, program.outvars)
    result = InlinedJaxpr(program.invars, live, program.outvars, program.consts, known)
    scan = next(e for e in first if e.primitive.name == "scan")
    return result, _Pair(result, ScanEquation(result, scan))


class _Moves:
    """How stacks of rounds are divided into those of the first and last, and joined."""

    def __init__(self, length: int, parts: tuple[int, int], reverse: bool):
        first = parts[0]
        self._reverse = reverse
        self._bounds = [(0, first), (first, length)]
        if reverse:
            self._bounds = [(length - first, length), (0, length - first)]

    def divided(self, x: Var, eqns: list[Eqn]) -> tuple[Var, Var]:
        """Return both parts of a stack; what computes them is added to `eqns`."""
        parts = [
            _applied(lambda x, low=low, high=high: lax.slice_in_dim(x, low, high), [x])
            for low, high in self._bounds
        ]
        eqns += parts
        first, last = (eqn.outvars[0] for eqn in parts)
        return first, last

    def joined(self, y: Var, parts: tuple[Var, Var]) -> Eqn:
        order = parts[::-1] if self._reverse else parts
        eqn = _applied(lambda *xs: lax.concatenate(xs, 0), order)
        return eqn.replace(outvars=[y])


def _applied(fn: Callable[..., Any], operands: Sequence[Var]) -> Eqn:
    """Return the one equation of a function of arrays, of these operands."""
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    (eqn,) = jax.make_jaxpr(fn)(*types).jaxpr.eqns
    outs: list[Any] = [_compat.new_var(v.aval) for v in eqn.outvars]
    ins: list[Any] = [*operands]
    return eqn.replace(invars=ins, outvars=outs)


def _needed_for(
    roots: Sequence[Var], scan: ScanEquation
) -> tuple[list[Eqn], list[int]]:
    """Find what of a scan's body computes some results of all steps.

    The equations are returned, and the positions of the carried values.
    """
    n_carry, needed = len(scan.carry), set[int]()
    while True:
        ends = [scan.body.outvars[i] for i in sorted(needed)]
        eqns = live_equations(scan.body.eqns, [*roots, *ends])
        read = {*roots, *ends, *(v for e in eqns for v in variables(e.invars))}
        more = {i for i in range(n_carry) if scan.body_carry[i] in read}
        if more <= needed:
            return eqns, sorted(needed)
        needed |= more


def _fresh(like: Sequence[Var]) -> list[Var]:
    return [_compat.new_var(v.aval) for v in like]


def _with(
    eqn: Eqn, operands: Sequence[Sequence[Var]], outs: Sequence[Var], length: int
) -> Eqn:
    """Copy a scan without its body, with other operands, results and steps.

    `operands` are constants, carried values and stacks.
    """
    sizes = _compat.scan_size_params(eqn, *map(len, operands))
    params = {**sizes, "length": length, "reverse": eqn.params["reverse"]}
    invars = [v for each in operands for v in each]
    return eqn.replace(invars=invars, outvars=[*outs], params=params)
