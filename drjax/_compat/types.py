"""The types in internal signatures, and the shapes that they stand for.

A *global* array `[*s]` is the same for all groups. A *partitioned* array `[n, *s]` has
a slice `[*s]` for each of n groups; its first axis is the group axis. On a mesh, inside
`shard_map`, a device has the slices of its k groups, `[k, *s]`. Types can't tell these
apart: an alias says which one a signature means. `s` is any shape, of any rank.

An array may be a tracer. An aval is the type of an array: shape, dtype, sharding. A
jaxpr is closed unless its name or its type says that it is open.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
from jax._src import core

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
else:  # the public module takes 20 ms to import
    ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)

Array: TypeAlias = jax.Array  # global or partitioned
GlobalArray: TypeAlias = jax.Array  # [*s]
PartitionedArray: TypeAlias = jax.Array  # [n, *s]
DeviceArray: TypeAlias = jax.Array  # [k, *s], the slices that one device has

Aval: TypeAlias = core.ShapedArray
OpenJaxpr: TypeAlias = core.Jaxpr
Eqn: TypeAlias = core.JaxprEqn
Var: TypeAlias = core.Var
Atom: TypeAlias = core.Var | core.Literal
Params: TypeAlias = dict[str, Any]  # of an equation
Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh

PyTree: TypeAlias = Any
# For type checkers, a block returns the type of its tree. Leaves of results are arrays
# of JAX, and those of arguments too; but `broadcast` also takes numbers, and `shard`
# NumPy arrays, so that their results are of any type.
Tree = TypeVar("Tree")
Flags: TypeAlias = Sequence[bool]  # one for each operand or result, in order
