"""The number of groups in a block, where the options do not give it.

Input: a round with its value types, the numbers of groups and workers; then the
measured times of the blocks of each round. Output: `BlockSize.value`, for the next run
of the stage, and `BlockSize.batch`, how many groups of a block run at once.

A batch is what fits into some bytes of the groups' inputs and results. That is an
estimate: a worker that has compiled the stage knows what it holds of the results at
once (`fitting_batch`), nothing if each is added up as it is computed. A worker adds up
the batches of a block, and a block sends one partial reduction. In the first round that
runs a stage the size of a block is what fits into some bytes that are sent for each
group, but so little that each worker gets several blocks: one of them may be slower.
Where partial reductions are large, each worker gets one. Later rounds know how long
blocks take: short ones are joined, as each costs the driver and its worker about a
millisecond, and some nanoseconds for each byte of its partial reductions; long ones are
split. Data that workers have since the first round does not limit what is joined.

Invariants: the size changes at most `_CHANGES` times, and by at least a factor of two,
as each change compiles the stage again in all workers.

Sharp edges: the size decides how sums are grouped, and encoded with `wire=`, so the
last bits of results, or more of encoded ones, may differ between runs unless
`block_size` is an option.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from drjax._jaxprs.prng_keys import raw_type
from drjax.engines.core.messages import BlockResult
from drjax.plan import Round, Value

_BYTES = 16 << 20  # of a batch, and of what is sent of a block: sent in some 10 ms
_RESULTS = 4  # as many bytes as so many partial reductions, if that is more
_READ = 256  # bytes that a group needs while it is read: some Python objects
_SENT = 8  # and if it is in an array: its index, and whether it takes part
_BLOCKS = 4  # for each worker
_SHORT, _LONG = 0.02, 5.0  # seconds that a block should take at least, and at most
_SENT_SECONDS = 100e-9  # at least, for each byte of its partial reductions
_CHANGES = 2  # each one compiles the stage again in all workers


class BlockSize:
    """The number of groups in a block of a stage, set by bytes, adjusted by run times.

    `one_by_one` says whether groups are read as Python objects; if not, their slices
    are in arrays. `kept` are the outputs of the stage whose slices are read after it,
    and `timeout` is how many seconds a block may take; None: no limit.

    Attributes:
      value: The number of groups in a block of the stage's next run, at least 1.
      batch: How many groups of a block may run at once, at least 1.
      sent: The bytes of the partial reductions of a block.
    """

    def __init__(
        self,
        a_round: Round,
        n: int,
        workers: int,
        timeout: float | None,
        kept: Sequence[Value] = (),
        one_by_one: bool = True,
    ):
        stage = a_round.local
        own = [v for v in stage.inputs if v.partitioned]
        # All outputs, also those that are only reduced: the stage computes them for all
        # groups of the batch before it reduces them.
        at_once = sum(map(_bytes, (*own, *stage.outputs)))
        least = _READ if one_by_one else _SENT
        # On a mesh of its own, one group runs at a time.
        self.batch = 1 if stage.mesh else max(1, _BYTES // max(least, at_once))
        of_group = sum(map(_bytes, (*own, *kept)))
        self.sent = sent = sum(map(_bytes, a_round.combined))
        # Without a lower bound on bytes, scalars for each group would make blocks of
        # millions, whose Python objects take far more memory than their values.
        self._fits = max(1, max(_BYTES, _RESULTS * sent) // max(least, of_group))
        self._all = -(-n // workers)  # of one worker
        blocks = max(1, min(_BLOCKS, _BYTES // max(1, sent)))
        self._n, self._workers = n, workers
        self.value = self._in_turns(min(self._fits, -(-n // (blocks * workers))))
        # With a time limit blocks stay well below it, so that a slow machine is not
        # late.
        self._long = _LONG if timeout is None else min(_LONG, timeout / 4)
        self._short = min(_SHORT + _SENT_SECONDS * sent, self._long / 2)
        self._compiled: set[int] = set()  # processes that have run a block of this size
        self._left = _CHANGES

    def _in_turns(self, size: int) -> int:
        """Return the largest size up to `size` with which workers have equal shares."""
        turns = -(-self._n // (max(1, size) * self._workers))
        return max(1, -(-self._n // (turns * self._workers)))

    def measure(self, blocks: Sequence[BlockResult], resident: bool = False) -> None:
        """Adjust `value` to how long full blocks of the latest run of the stage took.

        The median time decides; the first block of each process does not count, as its
        time includes compilation. Below 0.02 s, or more if its partial reductions are
        large, `value` grows, up to one worker's share of the groups and, unless the
        groups' data is `resident` in the workers, a limit on bytes. Above 5 s, or a
        quarter of the option `timeout` if that is less, it shrinks. It does not change
        by less than a factor of two, nor more than twice.
        """
        if not self._left:
            return
        seconds = []
        for done in blocks:
            # The first block of a process includes compilation, and says nothing of
            # later ones.
            if done.pid in self._compiled:
                seconds.append(done.seconds)
            self._compiled.add(done.pid)  # a first block is compiled, too
        if not seconds:
            return
        # The median, as one slow worker must not change the size for all.
        took = statistics.median(seconds)
        size = self.value
        if took < self._short:
            joined = int(self.value * self._short / max(took, 1e-6))
            # Never more than one worker's share of the groups, or the other workers
            # would idle.
            most = self._all if resident else min(self._all, self._fits)
            joined = self._in_turns(min(joined, most))
            size = max(self.value, joined)
        elif took > self._long:
            # Half of what is allowed, as times vary.
            size = max(1, int(self.value * self._long / (2 * took)))
        # Smaller changes are not worth compiling the stage again in all workers.
        if not self.value / 2 < size < 2 * self.value:
            self.value = size
            # A block of another size has another shape, which each process compiles.
            self._compiled.clear()
            self._left -= 1


def equal_batches(groups: int, most: int) -> int:
    """Return the size of batches, up to `most`, of which none is padded much."""
    return -(-groups // -(-groups // most))


def fitting_batch(groups: int, of_group: float) -> int:
    """Return how many of a block's groups run at once, of so many bytes each."""
    return equal_batches(groups, max(1, int(_BYTES // max(_SENT, of_group))))


def _bytes(value: Value) -> int:
    """Return the size in bytes of a plan's value; of a partitioned one, of one slice.

    A random key has the size of its raw data.
    """
    raw = raw_type(value)
    return int(np.prod(raw.shape)) * np.dtype(raw.dtype).itemsize
