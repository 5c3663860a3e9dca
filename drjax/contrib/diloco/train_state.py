"""The state of a run of DiLoCo, and where the parameters are in a train state.

Input: a train state of any library, and what selects its parameters. Output: a tree of
arrays, and which of its leaves are parameters.

Invariants: a tree is *frozen* if all of its leaves are arrays: what is no array, such
as a function in an Equinox module, is a `Static` node without leaves. Values are
frozen between rounds and in building blocks; only the user's functions see them thawed.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from drjax._compat.types import Array, PyTree, PyTreeDef
from drjax._errors import DrjaxTypeError, DrjaxValueError

Getter = Callable[[PyTree], PyTree]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf of a train state that is no array."""

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Shared:
    """In the place of a parameter that is the global one at the end of every round."""

    index: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """The state between two rounds, a pytree of arrays: `Round.init` makes the first.

    No fragment is under way then.

    Attributes:
      theta: The global parameters, as `params` has them; what is no array is static.
      outer: Global: the state of the outer optimizer for each fragment.
      workers: Partitioned `[k, ...]`: the train state of each worker. Parameters that
        are the global ones at the end of every round are not kept.
    """

    theta: PyTree
    outer: list[PyTree]
    workers: PyTree

    @property
    def params(self) -> PyTree:
        """The global parameters as the train state has them, to evaluate or to save."""
        return thaw(self.theta)


def is_array(x: object) -> bool:
    """Whether a leaf is data: so is Python's int, as the step of Flax's TrainState.

    Other values of Python are settings, as those of `eqx.nn.Dropout`.
    """
    data = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return isinstance(x, data) or type(x) is int


def is_float(x: Any) -> bool:
    """Whether an array is synchronized; counts and random keys stay a worker's own."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def freeze(tree: PyTree) -> PyTree:
    def leaf(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct) or not is_array(x):
            return x if is_array(x) else Static(x)
        x = jnp.asarray(x)  # with its dtype once more, it is not weakly typed
        return x if is_key(x) else jnp.asarray(x, x.dtype)

    return jax.tree.map(leaf, tree)


def thaw(tree: PyTree) -> PyTree:
    value = lambda x: x.value if isinstance(x, Static) else x
    return jax.tree.map(value, tree, is_leaf=lambda x: isinstance(x, Static))


def fill(workers: PyTree, theta: list[Any]) -> PyTree:
    """A train state with the parameters that were not kept."""
    is_shared = lambda x: isinstance(x, Shared)
    value = lambda x: theta[x.index] if is_shared(x) else x
    return jax.tree.map(value, workers, is_leaf=is_shared)


def default_params(state: PyTree) -> PyTree:
    """Select the entry or the attribute `params` of a train state."""
    if isinstance(state, Mapping) and "params" in state:
        return state["params"]
    if hasattr(state, "params"):
        return state.params
    raise DrjaxTypeError(
        f"diloco needs the parameters of the train state, a {type(state).__name__} "
        "that has neither an entry nor an attribute `params`. Pass params=, such as "
        "lambda state: state[0]; or lambda state: state, if all of it is parameters."
    )


class Form(NamedTuple):
    """Where the parameters are in a frozen train state, known when it is traced."""

    treedef: PyTreeDef  # of the parameters
    indices: tuple[int, ...]  # of the train state's leaves, one for each parameter

    @classmethod
    def of(cls, state: PyTree, params: Getter) -> "Form":
        """Find the leaves that the user's function returns, by identity.

        In a trace each leaf is an object of its own. So the function that selects the
        parameters is enough to replace them.
        """
        found: list[PyTree] = []

        def trace(state: PyTree) -> None:
            index = {id(x): i for i, x in enumerate(jax.tree.leaves(state))}

            def number(path: Any, x: Any) -> Any:
                if is_array(x) and id(x) not in index:
                    raise DrjaxValueError(
                        "diloco needs params= to return leaves of the train state as "
                        f"they are, got another at params{jax.tree_util.keystr(path)}."
                    )
                return index.get(id(x), Static(x))

            chosen = params(thaw(state))
            found.append(jax.tree_util.tree_map_with_path(number, chosen))

        jax.eval_shape(trace, state)
        indices, treedef = jax.tree.flatten(found[0])
        return cls(treedef, tuple(indices))

    def params(self, state: PyTree) -> list[Array]:
        leaves = jax.tree.leaves(state)
        return [leaves[i] for i in self.indices]

    def replace(self, state: PyTree, params: list[Any]) -> PyTree:
        """The train state with other parameters, or with nodes in their place."""
        leaves, treedef = jax.tree.flatten(state)
        for i, x in zip(self.indices, params, strict=True):
            leaves[i] = x
        return treedef.unflatten(leaves)
