"""Equations that store types of their first trace, in groups on every kind of mesh.

JAX writes more and more of its functions as classes of high-level equations. Each
instance stores types, and with them the mesh, of the trace that made it.

Covers: drjax._compat.retype_mesh.
"""

import contextlib
import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lineax
import numpy as np
import optimistix
import pytest
from jax.ad_checkpoint import checkpoint_name

import drjax
from drjax import _compat
from tests.helpers.cases import checkerboard
from tests.helpers.meshes import AUTO, EXPLICIT, in_mesh, make_mesh

N = 4
X = np.array(np.random.default_rng(0).normal(size=(N, 5)), np.float32)
# JAX 0.10 has no vmap of it, and groups are vmapped.
_WITHOUT_VMAP = {} if _compat.MERGED else {"CheckpointName": "has no vmap in JAX 0.10"}
# Never in the jaxpr of a group, for the reason given.
ELSEWHERE = {
    **_WITHOUT_VMAP,
    "CheckpointNameFwd": "for nested rules of JAX's own checkpoints only",
    "CustomRemat": "no public function makes it",
    "Einshape": "for Pallas kernels on a TPU only",
    "Fusible": "for Pallas kernels only",
    "PrimalLeftTangentRight": "goes with the derivatives of a checkpoint",
    "Scan3": "has no vmap in JAX, and groups are vmapped",
    "VmapOf": "made by a vmap of one of the others",
}
MESHES = {
    "auto": ({"clients": 4}, AUTO),
    "uneven": ({"clients": 3}, AUTO),
    "auto model": ({"clients": 2, "model": 2}, AUTO),
    "explicit": ({"clients": 4}, EXPLICIT),
    "explicit model": ({"clients": 2, "model": 2}, (AUTO, EXPLICIT)),
}


@dataclass(frozen=True)
class Equation:
    """A class of high-level equations, and a function of a group that uses it.

    Attributes:
      name: The name of the class.
      fn: The function, `[5] -> [5]`.
      option: The option of JAX that makes it use the class; None: it always does.
    """

    name: str
    fn: Callable
    option: str | None = None

    def __str__(self):
        return self.name

    def enabled(self):
        if self.option is None:
            return contextlib.nullcontext()
        config = importlib.import_module("jax._src.config")
        return getattr(config, self.option.removeprefix("jax_"))(True)


def cube_root(x):
    newton = lambda f, y: jax.lax.fori_loop(
        0, 30, lambda _, y: y - f(y) / (3 * y**2), y
    )
    return jax.lax.custom_root(
        lambda y: y**3 - x - 5, x * 0 + 2, newton, lambda g, y: y / g(jnp.ones(5))
    )


def with_jvp(x):
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda x, t: (jnp.sin(x[0]), 2 * t[0]))
    return f(x)


def with_vjp(x, **options):
    f = jax.custom_vjp(jnp.sin)
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (t * x,), **options)
    return f(x)


def checkpointed(x, policy=None):
    name = checkpoint_name if policy else lambda x, name: x
    return jax.checkpoint(lambda x: jnp.sin(name(jnp.exp(x), "exp")), policy=policy)(x)


def saved(x):
    policy = jax.checkpoint_policies.save_only_these_names("exp")
    return checkpointed(x, policy)


def of_numpy(name: str) -> Callable:
    """A function behind `jax.numpy`, which does not use all of them in each version."""
    return getattr(importlib.import_module("jax._src.numpy.hijax"), name)


def cases() -> list[Any]:
    """For each class of high-level equations, a function of a group that uses it."""
    nonzero = lambda x: x.at[of_numpy("nonzero")(x > 0, size=2)[0]].mul(3.0)
    steps = np.arange(-2.0, 3.0, dtype=np.float32)
    searched = lambda x: x * of_numpy("searchsorted")(steps, x)
    powers = np.arange(5, dtype=np.int32)
    optimized = lambda x: with_vjp(x, optimize_remat=True)
    return [
        Equation("Nonzero", nonzero),
        Equation("SearchSorted", searched),
        Equation("Einsum", lambda x: of_numpy("einsum")("i,j,j->i", x, x, x)),
        Equation("Ldexp", lambda x: jnp.ldexp(x, powers)),
        Equation("Frexp", lambda x: jnp.frexp(x)[0]),
        Equation("CustomRoot", cube_root),
        Equation("_RootLinearMap", cube_root),
        Equation("CustomJVPTraced", with_jvp, "jax_custom_jvp3"),
        Equation("CustomVJPTraced", with_vjp, "jax_custom_vjp3"),
        Equation("OptRemat", optimized, "jax_custom_vjp3"),
        Equation("RematTraced", checkpointed, "jax_remat3"),
        Equation("CheckpointName", saved, "jax_remat3"),
    ]


def installed() -> set[str]:
    """The names of all classes of high-level equations in JAX's source."""
    define = re.compile(
        r"^class (\w+)\((?:hijax\.)?(?:HiPrim|VJPHiPrimitive)\):", re.MULTILINE
    )
    files = Path(jax.__file__).parent.joinpath("_src").rglob("*.py")
    return {name for file in files for name in define.findall(file.read_text())}


def classes_in(jaxpr) -> set[str]:
    classes = set()
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if "_prim" in eqn.params:
            classes.add(type(eqn.params["_prim"]).__name__)
        for inner in _compat.jaxprs_in(eqn.params):
            classes |= classes_in(inner)
    return classes


def test_every_class_of_equations_that_jax_has_is_tried():
    """A class that is new in JAX needs a case here, or a reason why it needs none."""
    tried = {case.name for case in cases()}
    assert {"SearchSorted", "Nonzero"} <= installed()
    assert installed() - ELSEWHERE.keys() <= tried


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_function_of_each_case_uses_its_class(case):
    """Otherwise the tests below would try something else."""
    if case.name not in installed() - ELSEWHERE.keys():
        return
    total = lambda x: jnp.sum(case.fn(x) ** 2)
    made_by = case.fn, lambda x: jax.jvp(total, (x,), (x,)), jax.grad(total)
    with case.enabled():
        assert any(case.name in classes_in(jax.make_jaxpr(f)(X[0])) for f in made_by)


@checkerboard(3, case=cases(), mesh=MESHES, compile=[jax.jit, drjax.jit])
def test_an_equation_that_stores_types_runs_in_groups(case, mesh, compile):
    if case.name not in installed() - ELSEWHERE.keys():
        return
    shape, kind = MESHES[mesh]

    @drjax.program(clients=N)
    def f(x):
        return drjax.reduce_sum(drjax.map_fn(lambda x: jnp.sum(case.fn(x) ** 2), x))

    run = jax.value_and_grad(f)
    with case.enabled():
        want = run(jnp.asarray(X))
        with in_mesh(make_mesh(shape, kind)):
            got = compile(run)(jnp.asarray(X))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), got, want)


FUNCTIONS = {
    "nonzero": lambda x: x[jnp.nonzero(x > 0, size=2, fill_value=0)[0]],
    "where": lambda x: x[jnp.where(x > 0, size=2)[0]],
    "flatnonzero": lambda x: x.at[jnp.flatnonzero(x > 0, size=2)].set(0.0),
    "slice at the first": lambda x: jax.lax.dynamic_slice(
        x, jnp.nonzero(x > 0, size=1)[0], (2,)
    ),
    "insert": lambda x: jnp.insert(x, 1, 0.0),
    "place": lambda x: jnp.place(x, x > 1, jnp.ones(1), inplace=False),
    "interp": lambda x: jnp.interp(x, jnp.arange(-2.0, 3.0), jnp.arange(5.0)),
    "set a root": lambda x: x.at[jnp.arange(5)].set(cube_root(x)),
    "root in a branch": lambda x: jax.lax.cond(
        x[0] > 0, lambda: x, lambda: cube_root(x)
    ),
}


@checkerboard(3, name=FUNCTIONS, run=["eager", "jax.jit", "drjax.jit"])
def test_functions_of_jax_that_store_types(name, run):
    f = drjax.program(clients=N)(
        lambda x: drjax.gather(drjax.map_fn(FUNCTIONS[name], x))
    )
    runs = {"eager": lambda f: f, "jax.jit": jax.jit, "drjax.jit": drjax.jit}
    with in_mesh(make_mesh(*MESHES["auto"])):
        got = runs[run](f)(jnp.asarray(X))
    np.testing.assert_allclose(got, jax.vmap(FUNCTIONS[name])(X), 1e-4, 1e-4)


def solve_by_optimistix(solver: str, theta, x):
    """The root, or the minimum, that a solver of optimistix finds in one group."""
    if solver == "Newton":
        excess = lambda y, a: jnp.sum(jax.nn.sigmoid(a[1] * a[0] + y)) - 2.0
        return optimistix.root_find(
            excess, optimistix.Newton(1e-5, 1e-5), jnp.zeros(()), (theta, x),
            throw=False,
        ).value  # fmt: skip
    residual = lambda y, a: y - a[0] * a[1]
    if solver == "BFGS":
        squares = lambda y, a: jnp.sum(residual(y, a) ** 2)
        solution = optimistix.minimise(
            squares, optimistix.BFGS(1e-5, 1e-5), jnp.zeros(5), (theta, x), throw=False
        )
    else:
        method = optimistix.LevenbergMarquardt(1e-5, 1e-5)
        solution = optimistix.least_squares(
            residual, method, jnp.zeros(5), (theta, x), throw=False
        )
    return solution.value.sum()


def newton_step_by_lineax(theta, x):
    excess = lambda y, a: jnp.sum(jax.nn.sigmoid(a[1] * a[0] + y)) - 2.0
    operator = lineax.JacobianLinearOperator(excess, jnp.zeros(()), (theta, x))
    return lineax.linear_solve(operator, jnp.ones(()), throw=False).value


SOLVERS = {
    "lineax": newton_step_by_lineax,
    "Newton": functools.partial(solve_by_optimistix, "Newton"),
    "BFGS": functools.partial(solve_by_optimistix, "BFGS"),
    "Levenberg-Marquardt": functools.partial(solve_by_optimistix, "LM"),
}


@checkerboard(4, solver=SOLVERS, mesh=["auto", "uneven"], compile=[jax.jit, drjax.jit])
def test_solvers_run_in_groups(solver, mesh, compile):
    """Their jaxprs have constants, and are retyped while the program is lowered."""
    shape, kind = MESHES[mesh]

    @drjax.program(clients=N)
    def f(theta, x):
        y = drjax.map_fn(SOLVERS[solver], (drjax.broadcast(theta), x))
        return drjax.reduce_mean(y)

    args = jnp.float32(1.3), jnp.asarray(X)
    # The solvers' own code broadcasts scalars, and caches tracers.
    with jax.numpy_rank_promotion("allow"), jax.check_tracer_leaks(False):
        want = jax.jit(jax.value_and_grad(f))(*args)
        with in_mesh(make_mesh(shape, kind)):
            got = compile(jax.value_and_grad(f))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, want)
