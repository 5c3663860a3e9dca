"""A driver that trains with state that stays with the workers, until it is killed.

    python -m tests.helpers.dying_trainer scaffold FOLDER

FOLDER is that of the checkpoint. The driver restores what an earlier one has left, and
prints the number of calls that have ended, then after each call that it has. At the end
of the training it prints the bits of the state.
"""

import hashlib
import sys

import jax
import numpy as np

from tests.helpers import kept_programs as programs

N, CALLS = 6, 6


def trained(run, algorithm):
    """The state after all calls that are left; prints as above."""
    done, results = run.restore() or (0, None)
    print("restored", done, flush=True)
    state = algorithm.start(N)
    if results is not None:
        state = results[0] if isinstance(results[0], dict) else results
    for call in range(done, CALLS):
        state = algorithm.run(run, state, 1, programs.data(N))
        print("ended", call + 1, flush=True)
    return state


def bits(state):
    """A hash of the state, with what stays."""
    fetched = jax.tree.map(lambda x: x.fetch() if hasattr(x, "fetch") else x, state)
    digest = hashlib.sha256()
    for x in jax.tree.leaves(fetched):
        digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()


def compiled(name, folder):
    from drjax.backends import ray

    algorithm = programs.ALGORITHMS[name]
    options = {"keep": algorithm.keep, "checkpoint": folder, "block_size": 2}
    return ray.compile(algorithm.plan(N), workers=2, **options), algorithm


if __name__ == "__main__":
    run, algorithm = compiled(*sys.argv[1:])
    with run:
        print("bits", bits(trained(run, algorithm)), flush=True)
