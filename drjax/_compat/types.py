"""The types in internal signatures, and the shapes that they stand for.

A *global* array `[*s]` is the same for all groups. A *partitioned* array `[n, *s]` has
a slice `[*s]` for each of n groups; its first axis is the group axis. On a mesh, inside
`shard_map`, a device has the slices of its k groups, `[k, *s]`. Types can't tell these
apart: an alias says which one a signature means. `s` is any shape, of any rank.

An array may be a tracer. An aval is the type of an array: shape, dtype, sharding. A
jaxpr is closed unless its name or its type says that it is open.
"""

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import jax
from jax._src import core
from jax._src.effects import Effect
from jax._src.source_info_util import SourceInfo

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr

    # JAX declares any `aval` an `AbstractValue`, which has no shape and no dtype. For
    # type checkers it is of any type, and JAX's own classes conform to these.
    Aval: TypeAlias = Any
    PyTreeDef: TypeAlias = Any  # which is a variable to them

    class Var(Protocol):
        @property
        def aval(self) -> Aval: ...

    class Literal(Var, Protocol):
        @property
        def val(self) -> Any: ...

    class Eqn(Protocol):
        @property
        def invars(self) -> list[Any]: ...
        @property
        def outvars(self) -> list[Any]: ...
        @property
        def primitive(self) -> core.Primitive: ...
        @property
        def params(self) -> dict[str, Any]: ...
        @property
        def effects(self) -> Set[Effect]: ...
        @property
        def source_info(self) -> SourceInfo: ...
        @property
        def ctx(self) -> core.JaxprEqnContext: ...
        def replace(
            self,
            invars: list[Any] | None = None,
            outvars: list[Any] | None = None,
            primitive: core.Primitive | None = None,
            params: dict[str, Any] | None = None,
            effects: Set[Effect] | None = None,
            source_info: SourceInfo | None = None,
            ctx: core.JaxprEqnContext | None = None,
        ) -> "Eqn": ...

    class OpenJaxpr(Protocol):
        @property
        def constvars(self) -> list[Any]: ...
        @property
        def invars(self) -> list[Any]: ...
        @property
        def outvars(self) -> list[Any]: ...
        @property
        def eqns(self) -> list[Any]: ...
        @property
        def effects(self) -> Any: ...
        @property
        def debug_info(self) -> Any: ...

    Atom: TypeAlias = Var | Literal
else:  # the public module takes 20 ms to import
    ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)
    Aval, Var, Eqn, OpenJaxpr = core.ShapedArray, core.Var, core.JaxprEqn, core.Jaxpr
    Atom = core.Var | core.Literal
    PyTreeDef = jax.tree_util.PyTreeDef

Array: TypeAlias = jax.Array  # global or partitioned
GlobalArray: TypeAlias = jax.Array  # [*s]
PartitionedArray: TypeAlias = jax.Array  # [n, *s]
DeviceArray: TypeAlias = jax.Array  # [k, *s], the slices that one device has

Params: TypeAlias = dict[str, Any]  # of an equation
Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh

PyTree: TypeAlias = Any
# For type checkers, a block returns the type of its tree. Leaves of results are arrays
# of JAX, and those of arguments too; but `broadcast` also takes numbers, and `shard`
# NumPy arrays, so that their results are of any type.
Tree = TypeVar("Tree")
Flags: TypeAlias = Sequence[bool]  # one for each operand or result, in order
