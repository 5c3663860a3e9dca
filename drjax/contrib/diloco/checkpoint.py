"""Checkpoints of a run of DiLoCo, by Orbax.

Input: the state between two rounds. Output: the same in a folder, and from there, also
for a round with another number of workers.

Invariants: arrays are saved by their paths in the state, random keys as their data;
each process writes and reads its own shards.
"""

import math
from pathlib import Path
from typing import Any

import jax

from drjax._compat.types import Array, PyTree
from drjax._errors import DrjaxValueError
from drjax._extras import needed
from drjax.contrib.diloco.round import Round
from drjax.contrib.diloco.train_state import State, is_key


class Checkpoints:
    """The checkpoints of a run in one folder, by number of finished rounds.

    They are written in the background, and visible when complete: a process that is
    killed at any moment leaves the latest complete one.

    Args:
      folder: Where they are; made if it does not exist.
      keep: How many of the latest are kept.

    Raises:
      EngineError: orbax-checkpoint is not installed.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax
      >>> from drjax.contrib import diloco
      >>> step = lambda state, x: ({"params": state["params"] + x}, {"x": x})
      >>> of_two, of_six = (diloco.Round(step, k, outer=optax.sgd(1.0)) for k in (2, 6))
      >>> first = {"params": jnp.zeros(())}
      >>> state, _ = jax.jit(of_two)(of_two.init(first), jnp.ones((2, 3)))
      >>> checkpoints = diloco.Checkpoints(tempfile.mkdtemp())
      >>> checkpoints.save(1, state, {"lr": 0.1})
      >>> rounds, state = checkpoints.restore(of_six, of_six.init(first))
      >>> print(rounds, state.params, checkpoints.metadata())
      1 3.0 {'lr': 0.1}
      >>> checkpoints.close()
    """

    def __init__(self, folder: str | Path, keep: int = 2):
        ocp = needed("orbax.checkpoint", "examples", "diloco.Checkpoints")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        json, standard = ocp.JsonCheckpointHandler(), ocp.StandardCheckpointHandler()
        keywords = dict(item_handlers=dict(state=standard, about=json), options=options)
        self._manager = ocp.CheckpointManager(Path(folder).resolve(), **keywords)
        self._args = ocp.args

    def save(self, rounds: int, state: State, metadata: Any = None) -> None:
        """Start to write a checkpoint.

        Args:
          rounds: The number of finished rounds.
          state: The state after them. Its arrays may be donated to the next round.
          metadata: What JSON can hold: settings, history, the position in the data.
        """
        args = self._args
        state_, metadata = args.StandardSave(_by_path(state)), args.JsonSave([metadata])
        self._manager.save(rounds, args=args.Composite(state=state_, about=metadata))

    def metadata(self) -> Any:
        """What was saved with the latest checkpoint; None if there is none."""
        self._manager.wait_until_finished()
        if (rounds := self._manager.latest_step()) is None:
            return None
        about = self._args.Composite(about=self._args.JsonRestore())
        return self._manager.restore(rounds, args=about)["about"][0]

    def restore(self, round_: Round, like: State) -> tuple[int, State]:
        """Read the latest checkpoint, of any number of workers, for those of a round.

        Args:
          round_: The round that goes on.
          like: A state of it, as `round_.init` makes: its types and shardings are those
            of the result.

        Returns:
          The number of finished rounds and the state after them; 0 and `like` if
          nothing was saved yet.

        Raises:
          DrjaxValueError: The checkpoint is of another train state, of other fragments
            or of another outer optimizer.
        """
        self._manager.wait_until_finished()
        rounds, args = self._manager.latest_step(), self._args
        if rounds is None:
            return 0, like
        item = self._manager.item_metadata(rounds)["state"]
        saved = {name: tuple(x.shape) for name, x in item.items()}
        rows = [shape[0] for name, shape in saved.items() if name.startswith(_WORKERS)]
        n = rows[0] if rows else round_.partition.size
        types = {name: _type(name, x, n) for name, x in _by_path(like).items()}
        differ = {(name, x.shape) for name, x in types.items()} ^ {*saved.items()}
        if differ:
            raise DrjaxValueError(
                "diloco restores a checkpoint of the same train state, fragments and "
                "outer optimizer, got one that differs in "
                f"{', '.join(sorted({x for x, _ in differ}))}."
            )
        wanted = args.Composite(state=args.StandardRestore(types))
        read = self._manager.restore(rounds, args=wanted)["state"]

        def value(path: Any, x: Array) -> Array:
            data = read[jax.tree_util.keystr(path)]
            impl = jax.random.key_impl(x) if is_key(x) else None
            return jax.random.wrap_key_data(data, impl=impl) if impl else data

        state = jax.tree_util.tree_map_with_path(value, like)
        return rounds, state if n == round_.partition.size else round_.resize(state)

    def close(self) -> None:
        """Wait until everything is written."""
        self._manager.close()


_WORKERS = ".workers"


def _by_path(state: PyTree) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    data = lambda x: jax.random.key_data(x) if is_key(x) else x
    return {jax.tree_util.keystr(path): data(x) for path, x in leaves}


def _type(name: str, x: Array, n: int) -> jax.ShapeDtypeStruct:
    """The type of an array with n workers, divided as far as JAX can."""
    shape, sharding = x.shape, x.sharding
    if name.startswith(_WORKERS):
        shape = (n, *shape[1:])
        if isinstance(sharding, jax.NamedSharding) and len(sharding.spec):
            first, *spec = sharding.spec
            axes = first if isinstance(first, tuple) else (first,) if first else ()
            fits = n % math.prod(sharding.mesh.shape[axis] for axis in axes) == 0
            spec = jax.P(first if fits else None, *spec)
            sharding = jax.NamedSharding(sharding.mesh, spec)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
