"""Jaxprs on another mesh: copies with other axis types, for inside of a `shard_map`.

Input: a jaxpr, and the change of its mesh. Output: a copy with new variables.
Invariants: the copy computes the same; the original is unchanged.
Sharp edges: a copy cannot be differentiated, as its derivative rules have old types.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core, dtypes

from drjax._compat.jax_types import (
    JAXPR_TYPES,
    MERGED,
    Jaxpr,
    ShapedArray,
    weakref_lru_cache,
)
from drjax._compat.jaxprs import jaxpr_consts, open_jaxpr


@contextlib.contextmanager
def spmd_axes(axes: Sequence[str]):
    """The context of code that a `vmap(spmd_axis_name=axes)` will surround.

    In it, the derivative of a `shard_map` that maps over all axes of the mesh does not
    add up over the mesh axes `axes`, along which each device works on something else.
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
    """A set of axes that is false as a condition, though it is not empty.

    The derivative rules of `shard_map` leave out the axes that are in it.

    JAX's batching rules ask whether there are such axes, and if so, make what they
    insert vary over them. That is right in a batching rule of the surrounding vmap. It
    is wrong in a vmap of the user's inside of a `shard_map(check_vma=True)`, whose
    other values do not vary over these axes. So to these rules there are none.
    """

    def __bool__(self):
        return False

    def __eq__(self, other):
        return isinstance(other, _SpmdAxes) and super().__eq__(other)

    __hash__ = frozenset.__hash__


@weakref_lru_cache
def with_manual_axes(jaxpr, axes: tuple[str, ...]):
    """Copy a jaxpr as if traced where these mesh axes are Manual: inside a `shard_map`.

    Each `shard_map` in the jaxpr no longer maps over these axes, as the surrounding
    `shard_map` does.
    """
    return _Retyped(_manual(axes), lambda manual: manual - set(axes)).jaxpr(jaxpr)


@weakref_lru_cache
def with_whole_shard_maps(jaxpr, axes: tuple[str, ...]):
    """Copy a jaxpr so that each `shard_map` in it maps over these mesh axes, too.

    `vmap(spmd_axis_name=axes)` needs that.
    """
    return _Retyped(lambda mesh: mesh, lambda manual: manual | set(axes)).jaxpr(jaxpr)


@weakref_lru_cache
def without_mesh_types(jaxpr):
    """Copy a jaxpr as if traced without any mesh.

    Equations of `reshard` and `mesh_cast`, which change only shardings, are dropped.
    What is bound to devices stays as it is: a `shard_map`, a sharding constraint.
    """
    empty = jax.sharding.AbstractMesh((), ())
    return _Retyped(lambda mesh: empty, lambda manual: manual).jaxpr(jaxpr)


def _manual(axes: Sequence[str]) -> Callable:
    """Make a function from an `AbstractMesh` to one in which these axes are Manual.

    Axes that a mesh does not have are left out.
    """

    def changed(mesh):
        own = [axis for axis in axes if axis in mesh.axis_names]
        kinds = dict.fromkeys(own, jax.sharding.AxisType.Manual)
        return mesh.update_axis_types(kinds) if own else mesh

    return changed


def _is_void_constraint(eqn, change_mesh: Callable) -> bool:
    """Whether `eqn` constrains a sharding, and all axes of the new mesh are Manual.

    Nothing is left to shard, and vmap refuses such a constraint. `change_mesh` maps the
    old `AbstractMesh` to the new one.
    """
    if eqn.primitive.name != "sharding_constraint":
        return False
    old = eqn.params["sharding"]
    if not isinstance(old, jax.sharding.NamedSharding) or old.memory_kind:
        return False
    new = change_mesh(old.mesh.abstract_mesh)
    return not new.empty and new.are_all_axes_manual


def _without_devices(x):
    """Copy an array or typed keys to the default device, through the host."""
    if dtypes.issubdtype(x.dtype, dtypes.prng_key):
        data: Any = np.asarray(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.numpy.asarray(np.asarray(x))


class _Retyped:
    """Copies a jaxpr with other axis types of the mesh under which it was traced.

    The mesh is part of the types of variables, of the context of each equation, and of
    parameters: shardings, meshes, types and jaxprs, also within tuples and dicts.
    Python functions (rules of `custom_jvp` and `custom_vjp`) stay as they are, so a
    copy is for use after all derivatives have been taken.

    Args:
      mesh: From an `AbstractMesh` to the one in its place.
      shard_map_axes: From the axes that a `shard_map` makes Manual to new ones. If it
        adds some, they are Manual inside.
    """

    _LAYOUT_ONLY = ("reshard", "mesh_cast")

    def __init__(self, mesh: Callable, shard_map_axes: Callable):
        self._mesh, self._shard_map_axes = mesh, shard_map_axes
        self._vars: dict[Any, Any] = {}
        self._known: dict[int, Any] = {}
        self._contexts: dict[Any, Any] = {}

    def jaxpr(self, jaxpr):
        """Copy a jaxpr, open or closed; the same jaxpr object has the same copy."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = self._copy(jaxpr)
        return self._known[id(jaxpr)]

    def _copy(self, jaxpr):
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

    def _const(self, value):
        """Copy a constant of a jaxpr to the default device, if the new mesh is empty.

        Other constants are returned as they are.
        """
        mesh = getattr(getattr(value, "sharding", None), "mesh", None)
        if mesh is None or not self._mesh(mesh.abstract_mesh).empty:
            return value
        return _without_devices(value)

    def _atom(self, atom):
        """Copy a variable or literal; the same variable has the same copy."""
        if isinstance(atom, core.Literal):
            return core.Literal(self._literal(atom.val), self._aval(atom.aval))
        if atom not in self._vars:
            if type(atom) is not core.Var:  # a result without a use
                self._vars[atom] = atom
            else:
                self._vars[atom] = core.Var(self._aval(atom.aval))
        return self._vars[atom]

    def _literal(self, value: Any):
        """Move the value of a literal to the new mesh.

        Only a NumPy array of JAX's own class has a type, `.aval`, with a mesh.
        """
        known: Any = getattr(value, "aval", None)
        if known is None or not isinstance(value, np.ndarray):
            return value
        aval, make = self._aval(known), type(value)
        return value if aval is known else make(np.asarray(value), aval)

    def _aval(self, aval):
        """Move a type to the new mesh; for a mutable array, its inner type."""
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

    def _context(self, context):
        """Move the context in which an equation was traced to the new mesh."""
        if context not in self._contexts:
            new = self._mesh(context.cur_abstract_mesh)
            if new != context.cur_abstract_mesh:
                with context.manager, jax.sharding.use_abstract_mesh(new):
                    context = core.JaxprEqnContext()
            self._contexts[context] = context
        return self._contexts[context]

    def _eqn(self, eqn):
        """Copy an equation; None if it is dropped, as it changes only a sharding.

        The operands of a dropped equation take the place of its results.
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

    def _param(self, value):
        """Move a parameter of an equation, or a part of one, to the new mesh."""
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
