"""The kinds of what goes through a `scan`, `while` or `cond`.

A loop is inferred by an engine of its own, given what is known of its operands, until
what goes round the loop comes back as it went in. It makes no more passes than the
program around it has begun, which may still demand a global value of it.
"""

from collections.abc import Sequence
from typing import Any

from drjax import _compat
from drjax._planner.partitioning import diagnostics
from drjax._planner.partitioning.kind import FREE, GLOBAL, PARTITIONED, Kind, moved


class LoopKinds:
    """What is known of a `scan`, `while` or `cond`.

    Args:
      outer: The engine of the program in which it stands, a `Kinds`.
      eqn: Its equation.

    Attributes:
      bodies: The engines of its jaxprs, as `Flat.bodies` gives them.
      ins: For each operand the kind that it needs.
      outs: For each result its kind.
    """

    def __init__(self, outer: Any, eqn):
        self.outer, self.eqn = outer, eqn
        cells = [outer.cell(v) for v in eqn.invars]
        wanted = [outer.cell(v) for v in eqn.outvars]
        make = {"scan": self._scan, "while": self._while, "cond": self._cond}
        self.ins, self.outs, self.bodies = make[eqn.primitive.name](cells, wanted)

    def _body(self, index: int, given: Sequence, wanted: Sequence) -> Any:
        flat = self.outer.program.bodies(self.eqn)[index]
        return self.outer.body(flat, given, wanted)

    def _scan(self, cells, wanted):
        n_consts, n_carry = _compat.scan_sizes(self.eqn)
        n_init = n_consts + n_carry
        xs = [moved(c, -1) for c in cells[n_init:]]
        ys = [moved(c, -1) for c in wanted[n_carry:]]
        carry = _join(_open(cells[n_consts:n_init]), wanted[:n_carry])
        while True:
            body = self._body(0, [*cells[:n_consts], *carry, *xs], [*carry, *ys])
            ins, outs = _ends(body)
            found = _join(carry, ins[n_consts:n_init], outs[:n_carry])
            if found == carry:
                break
            carry = found
        xs = [moved(c, +1) for c in ins[n_init:]]
        ys = [moved(c, +1) for c in outs[n_carry:]]
        return [*ins[:n_consts], *carry, *xs], [*carry, *ys], (body,)

    def _while(self, cells, wanted):
        n_cond, n_body = (self.eqn.params[f"{p}_nconsts"] for p in ("cond", "body"))
        n = n_cond + n_body
        carry = _join(_open(cells[n:]), wanted)
        while True:
            cond = self._body(0, [*cells[:n_cond], *carry], [GLOBAL])
            body = self._body(1, [*cells[n_cond:n], *carry], carry)
            cond_ins, _ = _ends(cond)
            ins, outs = _ends(body)
            found = _join(carry, cond_ins[n_cond:], ins[n_body:], outs)
            if found == carry:
                break
            carry = found
        needs = [*cond_ins[:n_cond], *ins[:n_body], *carry]
        return needs, carry, (cond, body)

    def _cond(self, cells, wanted):
        outs, ins = list(wanted), cells[1:]
        while True:
            branches = tuple(
                self._body(i, ins, outs)
                for i in range(len(self.outer.program.bodies(self.eqn)))
            )
            ends = [_ends(branch) for branch in branches]
            found = _join(outs, *(_open(out) for _, out in ends))
            if found == outs:
                break
            outs = found
        needs = _join(ins, *(needs for needs, _ in ends))
        return [GLOBAL, *needs], outs, branches

    def check(self) -> None:
        """Refuse loops over the groups, and whatever the bodies refuse."""
        name, cells = self.eqn.primitive.name, [self.outer[v] for v in self.eqn.invars]
        first = sum(_compat.scan_sizes(self.eqn)) if name == "scan" else 0
        scanned = cells[first:] if name == "scan" else cells[:1] * (name == "cond")
        if PARTITIONED in scanned:
            raise self.outer.refusal(self.eqn, cells, diagnostics.MIXES_ROWS)
        for need, kind in zip(self.ins, cells, strict=True):
            if kind.partitioned and need != kind:
                raise self.outer.refusal(
                    self.eqn, cells, diagnostics.ALREADY_PARTITIONED
                )
        for out, var in zip(self.outs, self.eqn.outvars, strict=True):
            if out.partitioned and self.outer[var] != out:
                raise self.outer.refusal(self.eqn, cells, diagnostics.MIXES_ROWS)
        for body in self.bodies:
            body.check()


def _ends(body: Any) -> tuple[list[Kind], list[Kind]]:
    """The cells of a body's arguments and results."""
    p = body.program
    return [body.cell(v) for v in p.invars], [body.cell(v) for v in p.outvars]


def _open(kinds: Sequence[Kind]) -> list[Kind]:
    """What a value is before a loop or in a branch: if global, it may be scattered."""
    return [kind if kind.partitioned else FREE for kind in kinds]


def _join(*columns: Sequence[Kind]) -> list[Kind]:
    """For each variable the highest of its kinds; partitioned above global."""
    joined = []
    for kinds in zip(*columns, strict=True):
        rows = [k for k in kinds if k.partitioned] or [k for k in kinds if k == GLOBAL]
        joined.append(rows[0] if rows else FREE)
    return joined
