"""Jaxprs on another mesh: copies with other axis types, for inside of a `shard_map`.

Input: a jaxpr, and the change of its mesh. Output: a copy with new variables.
Invariants: the copy computes the same; the original is unchanged.
Sharp edges: a copy cannot be differentiated, as its derivative rules have old types.
JAX's high-level equations (`HiPrim`: nonzero, searchsorted, custom_root, ...) store the
types of their first trace in Python objects, which no copy can reach. So they are
replaced by the equations that they stand for, as JAX does at lowering, before the copy.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, TypeAlias

import jax
import numpy as np
from jax._src import core, dtypes
from jax._src.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh

from drjax._compat.jax_types import (
    JAXPR_TYPES,
    MERGED,
    Jaxpr,
    ShapedArray,
    weakref_lru_cache,
)
from drjax._compat.jaxprs import jaxpr_consts, open_jaxpr
from drjax._compat.types import Array, Atom, Aval, ClosedJaxpr, Eqn, OpenJaxpr

ChangeMesh: TypeAlias = Callable[[AbstractMesh], AbstractMesh]


@contextlib.contextmanager
def spmd_axes(axes: Sequence[str]) -> Iterator[None]:
    """Make a context for tracing code that a `vmap(spmd_axis_name=axes)` will surround.

    Under such a vmap, the devices along the mesh axes `axes` work on different batch
    members. So the derivative rule of a `shard_map` over all axes of the mesh must not
    sum over `axes`; in this context, it does not. The axes are added to those of a
    surrounding context.
    """
    outer = core.trace_ctx.axis_env
    names = _SpmdAxes(outer.spmd_axis_names | set(axes))
    inner = core.AxisEnv(outer.axis_sizes, names, outer.explicit_mesh_axis_names)
    core.trace_ctx.set_axis_env(inner)
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(outer)


class _SpmdAxes(frozenset):
    """A set of mesh axis names whose truth value is False, though it is not empty.

    It is for `AxisEnv.spmd_axis_names` in JAX's trace context, which JAX reads in two
    places:

    * The derivative rules of `shard_map` leave out the axes that are in the set.
    * Batching rules test whether the set is empty. If it is not, they make what they
      insert vary over its axes.

    For the vmap that will surround the code, the second is right. For a user's vmap
    inside of a `shard_map(check_vma=True)` it is wrong, as the other values there do
    not vary over these axes. So the truth value tells batching rules that the set is
    empty.
    """

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SpmdAxes) and super().__eq__(other)

    __hash__ = frozenset.__hash__


@weakref_lru_cache
def with_manual_axes(jaxpr: ClosedJaxpr | OpenJaxpr, axes: tuple[str, ...]) -> Any:
    """Copy a jaxpr as if traced where these mesh axes are Manual: inside a `shard_map`.

    Types in the copy are on the mesh with `axes` Manual. A `shard_map` in the jaxpr no
    longer maps over `axes`, as the surrounding `shard_map` will do that. Cached.
    """
    return _Retyped(_manual(axes), lambda manual: manual - set(axes)).jaxpr(jaxpr)


@weakref_lru_cache
def with_whole_shard_maps(jaxpr: ClosedJaxpr | OpenJaxpr, axes: tuple[str, ...]) -> Any:
    """Copy a jaxpr so that each `shard_map` in it also maps over the mesh axes `axes`.

    A `vmap(spmd_axis_name=axes)` of the jaxpr needs that. Cached.
    """
    return _Retyped(lambda mesh: mesh, lambda manual: manual | set(axes)).jaxpr(jaxpr)


@weakref_lru_cache
def without_mesh_types(jaxpr: ClosedJaxpr | OpenJaxpr) -> Any:
    """Copy a jaxpr as if traced without any mesh; cached.

    Equations of `reshard` and `mesh_cast`, which change only shardings, are removed.
    The copy of a `shard_map` or of a sharding constraint has no mesh, so it cannot be
    lowered.
    """
    empty = jax.sharding.AbstractMesh((), ())
    return _Retyped(lambda mesh: empty, lambda manual: manual).jaxpr(jaxpr)


def _manual(axes: Sequence[str]) -> ChangeMesh:
    """Return a function that copies a mesh with some of its axes Manual.

    Names that are no axes of the mesh have no effect.
    """

    def changed(mesh: AbstractMesh) -> AbstractMesh:
        own = [axis for axis in axes if axis in mesh.axis_names]
        kinds = dict.fromkeys(own, jax.sharding.AxisType.Manual)
        return mesh.update_axis_types(kinds) if own else mesh

    return changed


def _is_void_constraint(eqn: Eqn, change_mesh: ChangeMesh) -> bool:
    """Return whether an equation is a sharding constraint that the new mesh voids.

    That is so if its sharding is a `NamedSharding` without a memory kind, and all axes
    of the new mesh are Manual. The caller then leaves out the equation, as it has no
    effect, and vmap refuses it.
    """
    if eqn.primitive.name != "sharding_constraint":
        return False
    old = eqn.params["sharding"]
    if not isinstance(old, jax.sharding.NamedSharding) or old.memory_kind:
        return False
    new = change_mesh(old.mesh.abstract_mesh)
    return not new.empty and new.are_all_axes_manual


def _on_default_device(x: Array) -> Array:
    """Copy an array or typed random keys through the host to the default device.

    So a constant loses its sharding, and with that its mesh.
    """
    # A copy is cached: made under a trace, its constants would be tracers of it.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        if dtypes.issubdtype(x.dtype, dtypes.prng_key):
            data: Any = np.asarray(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.numpy.asarray(np.asarray(x))


def without_high_level(jaxpr: Any) -> Any:
    """Replace the high-level equations of a closed jaxpr by what they stand for.

    An open jaxpr of an older JAX is returned unchanged.
    """
    if not isinstance(jaxpr, Jaxpr) or not jaxpr.is_high:
        return jaxpr
    return pe.lower_jaxpr2(jaxpr)


class _Retyped:
    """Copies jaxprs, as if traced under a mesh with other axis types, or under none.

    The mesh is part of the types of variables, of the context of each equation, and of
    parameters: shardings, meshes, types and jaxprs, also within tuples and dicts. All
    of these are replaced. Python functions (rules of `custom_jvp` and `custom_vjp`)
    stay as they are, so a copy is for use after all derivatives have been taken. Each
    variable and jaxpr is copied once, and the copy is recorded.

    `mesh` maps a mesh in the jaxpr to the new one: itself if the mesh stays, an empty
    mesh if the copy is to have none. `shard_map_axes` maps the set of axes that a
    `shard_map` makes Manual, `newly_manual_axes`, to the set that its copy makes
    Manual. Axes that it adds are Manual in the inner jaxpr of the copy, too.
    """

    _LAYOUT_ONLY = ("reshard", "mesh_cast")

    def __init__(
        self, mesh: ChangeMesh, shard_map_axes: Callable[[frozenset[str]], Set[str]]
    ):
        self._mesh, self._shard_map_axes = mesh, shard_map_axes
        self._vars: dict[Any, Any] = {}
        self._known: dict[int, Any] = {}
        self._contexts: dict[Any, Any] = {}

    def jaxpr(self, jaxpr: ClosedJaxpr | OpenJaxpr) -> Any:
        """Return the copy of a jaxpr, open or closed; the same one at each call."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = self._copy(jaxpr)
        return self._known[id(jaxpr)]

    def _copy(self, jaxpr: ClosedJaxpr | OpenJaxpr) -> Any:
        """Copy a jaxpr, open or closed; `jaxpr` records the copy."""
        jaxpr = without_high_level(jaxpr)
        raw = open_jaxpr(jaxpr)
        changed = raw.replace(
            constvars=list(map(self._atom, raw.constvars)),
            invars=list(map(self._atom, raw.invars)),
            eqns=[new for eqn in raw.eqns if (new := self._eqn(eqn)) is not None],
            outvars=list(map(self._atom, raw.outvars)),
            debug_info=raw.debug_info,
        )
        consts = list(map(self._const, jaxpr_consts(jaxpr)))
        if MERGED:
            return changed.with_consts(consts) if consts else changed
        return changed if jaxpr is raw else Jaxpr(changed, consts)

    def _const(self, value: Any) -> Any:
        """Return a constant, on the default device if it loses its mesh."""
        mesh = getattr(getattr(value, "sharding", None), "mesh", None)
        if mesh is None or not self._mesh(mesh.abstract_mesh).empty:
            return value
        return _on_default_device(value)

    def _atom(self, atom: Atom) -> Any:
        """Return the copy of a variable, the same one at each call, or of a literal.

        A `DropVar`, of a result without a use, is returned unchanged.
        """
        if isinstance(atom, core.Literal):
            return core.Literal(self._literal(atom.val), self._aval(atom.aval))
        if atom not in self._vars:
            if type(atom) is not core.Var:  # a result without a use
                self._vars[atom] = atom
            else:
                self._vars[atom] = core.Var(self._aval(atom.aval))
        return self._vars[atom]

    def _literal(self, value: object) -> Any:
        """Copy the value of a literal: a Python or NumPy scalar, or a NumPy array.

        Only NumPy arrays of JAX's own subclass have a type, `.aval`; other values stay.
        """
        known: Any = getattr(value, "aval", None)
        if known is None or not isinstance(value, np.ndarray):
            return value
        aval, make = self._aval(known), type(value)
        return value if aval is known else make(np.asarray(value), aval)

    def _aval(self, aval: Aval) -> Any:
        """Copy a type, with the mesh of its sharding replaced.

        The same dimensions are sharded; none, if the new mesh is empty. Of a mutable
        array's type, the inner type is replaced. Types that are no `ShapedArray` stay.
        """
        inner = getattr(aval, "inner_aval", None)
        if inner is not None:
            return aval.update(inner_aval=self._aval(inner))
        if not isinstance(aval, ShapedArray):
            return aval
        mesh = aval.sharding.mesh
        new = self._mesh(mesh)
        if new == mesh:
            return aval
        if new.empty:
            return ShapedArray(aval.shape, aval.dtype, aval.weak_type)
        return aval.update(sharding=aval.sharding.update(mesh=new))

    def _context(self, context: core.JaxprEqnContext) -> core.JaxprEqnContext:
        """Copy the context in which an equation was traced, with its mesh replaced.

        JAX's other settings stay. Equal contexts get the same copy.
        """
        if context not in self._contexts:
            mesh, copy = self._mesh(context.cur_abstract_mesh), context
            if mesh != context.cur_abstract_mesh:
                with context.manager, jax.sharding.use_abstract_mesh(mesh):
                    copy = core.JaxprEqnContext()
            self._contexts[context] = copy
        return self._contexts[context]

    def _eqn(self, eqn: Eqn) -> Eqn | None:
        """Copy an equation; None if the copied jaxpr does without it.

        That is a `reshard` or `mesh_cast` where there is no mesh any more, or a void
        sharding constraint. Then the copies of its operands become the copies of its
        results.
        """
        name = eqn.primitive.name
        dissolves = self._mesh(eqn.ctx.cur_abstract_mesh).empty
        if (dissolves and name in self._LAYOUT_ONLY) or _is_void_constraint(
            eqn, self._mesh
        ):
            for new, old in zip(eqn.outvars, eqn.invars, strict=True):
                self._vars[new] = self._atom(old)
            return None
        params = {k: self._param(v) for k, v in eqn.params.items()}
        if name == "shard_map":
            old = eqn.params["newly_manual_axes"]
            new = params["newly_manual_axes"] = frozenset(self._shard_map_axes(old))
            if added := new - old:
                inside = _Retyped(_manual(tuple(added)), lambda manual: manual)
                params["jaxpr"] = inside.jaxpr(eqn.params["jaxpr"])
        return eqn.replace(
            invars=list(map(self._atom, eqn.invars)),
            outvars=list(map(self._atom, eqn.outvars)),
            params=params,
            ctx=self._context(eqn.ctx),
        )

    def _param(self, value: Any) -> Any:
        """Copy a parameter of an equation, or a part of it, with its meshes replaced.

        A `Mesh` that is replaced becomes an `AbstractMesh`. A `NamedSharding` becomes
        None if its new mesh is empty.
        """
        if isinstance(value, JAXPR_TYPES):
            return self.jaxpr(value)
        if isinstance(value, jax.sharding.AbstractMesh):
            return self._mesh(value)
        if isinstance(value, jax.sharding.Mesh):
            new = self._mesh(value.abstract_mesh)
            return value if new == value.abstract_mesh else new
        if isinstance(value, jax.sharding.NamedSharding):
            mesh = self._param(value.mesh)
            if mesh is value.mesh:
                return value
            if mesh.empty:
                return None
            return jax.sharding.NamedSharding(
                mesh, value.spec, memory_kind=value.memory_kind
            )
        if isinstance(value, ShapedArray):
            return self._aval(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._param, value))
        if type(value) in (tuple, list):
            return type(value)(map(self._param, value))
        if type(value) is dict:
            return {k: self._param(v) for k, v in value.items()}
        return value
