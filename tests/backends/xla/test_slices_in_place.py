"""New slices take the memory of old ones, where groups run chunk by chunk.

Covers: drjax.backends.xla.chunked_stage, drjax._plan.uses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax import _compat
from drjax._plan import uses
from tests.helpers.compiled import temp_bytes
from tests.helpers.meshes import in_mesh_of

N, D = 8, 16


def with_state(n, rounds):
    """Each round updates a state, and then reads both the old one and the new one."""

    def work(p, state, x):
        new = jnp.tanh(state @ x) + p
        return new - state, new

    @drjax.program(clients=n)
    def fn(p, state, x):
        for _ in range(rounds):
            change, state = drjax.map_fn(work, (drjax.broadcast(p), state, x))
            p = p + drjax.reduce_mean(change)
        return p, state

    return fn


def fragments(n, rounds):
    """Groups keep a model between rounds that begins and ends as a part of no value."""

    @drjax.program(clients=n)
    def fn(p, state, x):
        q = drjax.broadcast(p)
        for _ in range(rounds):
            q = drjax.map_fn(lambda q, x: jnp.tanh(q @ x), (q, x))
            moved = drjax.reduce_mean(drjax.map_fn(jnp.subtract, (q, state)))
            q = drjax.map_fn(lambda q, m: (q + m) / 2, (q, drjax.broadcast(moved)))
        return moved, q

    return fn


def crossed(n, rounds):
    """Two states of one type: which of them has the memory of which is not said."""

    def work(p, a, b):
        return p * (a - b), b @ a, a + b

    @drjax.program(clients=n)
    def fn(p, a, b):
        for _ in range(rounds):
            sums, a, b = drjax.map_fn(work, (drjax.broadcast(p), a, b))
            p = drjax.reduce_max(sums)
        return p, a, b

    return fn


def in_a_loop(n, rounds):
    one_round = with_state(n, 1)

    def fn(p, state, x):
        step = lambda carry, _: (one_round(carry[0], carry[1], x), None)
        return lax.scan(step, (p, state), length=rounds)[0]

    return fn


def until(n, rounds):
    one_round = with_state(n, 1)

    def fn(p, state, x):
        def step(carry):
            i, p, state = carry
            return i + 1, *one_round(p, state, x)

        return lax.while_loop(lambda carry: carry[0] < rounds, step, (0, p, state))

    return fn


def branches(n, rounds):
    one_round = with_state(n, rounds)

    def fn(p, state, x):
        new = lax.cond(p[0, 0] > -9, one_round, lambda p, s, x: (p, s), p, state, x)
        return new, drjax.program(clients=n)(drjax.reduce_sum)(state)

    return fn


PROGRAMS = [with_state, fragments, crossed, in_a_loop, until, branches]


def arguments(n):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(D, D), (n, D, D), (n, D, D)]
    return tuple(jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=True))


@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize(
    "mesh, step", [(None, 1), (None, 3), ({"clients": 2}, 1), ({"clients": 3}, 2)]
)
def test_values(make, mesh, step):
    fn, args = make(N, 3), arguments(N)
    expected = jax.jit(fn)(*args)
    with in_mesh_of(mesh):
        results = drjax.jit(fn, groups_per_step=step)(*args)
    close = lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5)
    jax.tree.map(close, results, expected)


@pytest.mark.parametrize("make", [with_state, fragments, crossed, in_a_loop, until])
def test_memory_does_not_grow_with_the_number_of_groups(make):
    """Nor with that of the rounds: a state is in the memory of the result."""

    def memory(n, rounds):
        args = jax.eval_shape(lambda: arguments(n))
        return temp_bytes(drjax.jit(make(n, rounds), groups_per_step=1), *args)

    few = memory(8, 2)
    if not _compat.UPDATES_BEHIND_BARRIERS:  # two rounds keep at most two states each
        assert memory(512, 2) <= few + 4 * 512 * D * D * 4
        return
    assert memory(512, 2) <= few + 64
    state = 64 * D * D * 4
    assert memory(64, 6) < few + state / 4  # The server's part grows.


@pytest.mark.parametrize("make", [with_state, in_a_loop])
def test_donated_states_are_updated_in_place(make):
    fn = drjax.jit(make(64, 2), groups_per_step=1, donate_argnums=1)
    memory = fn.lower(*arguments(64)).compile().memory_analysis()
    assert memory is not None
    state = 64 * D * D * 4
    assert memory.alias_size_in_bytes == state
    updated = _compat.UPDATES_BEHIND_BARRIERS
    assert memory.temp_size_in_bytes < state / 4 + (0 if updated else 2 * state)


def test_arguments_are_not_changed():
    p, state, x = arguments(N)
    before = np.array(state)
    drjax.jit(with_state(N, 2), groups_per_step=1)(p, state, x)
    np.testing.assert_array_equal(state, before)


def test_what_is_read_later_keeps_its_memory():
    def reads_again(p, state, x):
        first, new = with_state(N, 1)(p, state, x)
        return first, new, with_state(N, 1)(first, state, x)

    plan = drjax.make_plan(reads_again)(*arguments(N))
    first, second = uses.replaced(plan, frozenset())
    assert not {"state"} & {*first.values()} and "state" in second.values()
    assert "state" not in uses.replaced(plan, frozenset({"state"}))[1].values()
