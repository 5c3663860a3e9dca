"""Random changes of manifests: a plan file is refused, or is a plan like any other.

Covers: drjax._plan_file.check_plan, drjax._plan_file.decode,
drjax._plan_file.step_fields, drjax._plan_file.json_values,
drjax._plan_file.pytrees.
"""

import contextlib
import copy
import json
import math
import random
import signal
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax._drawing.positions import layout
from drjax._plan_file import container
from drjax._plan_file.decode import _PlanReader, _StageReader
from drjax._plan_file.encode import batched_results, ledger
from drjax._plan_file.load import plan_from_bytes
from drjax._plan_file.save import plan_to_bytes
from drjax._sharding.planning_context import planning

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

n = 3
clients = drjax.program(clients=n)


def rounds(w, x):
    def step(h, y):
        grad = drjax.map_fn(lambda h, x: jnp.sin(h * x) + y, (drjax.broadcast(h), x))
        return h - drjax.reduce_mean(grad), drjax.shift(grad, 1)

    return lax.scan(step, w, jnp.ones((2, 2)))


def branches(i, w, x):
    far = lambda w: w < 9.0
    more = lambda w: w + drjax.reduce_max(drjax.map_fn(jnp.abs, x)) + 1.0
    w = lax.while_loop(far, more, w)
    same = lambda w: drjax.map_fn(jnp.add, (drjax.broadcast(w), x))
    return lax.cond(i > 0, same, lambda w: drjax.map_fn(jnp.cos, x), w)


def moves(i, key, x):
    moved = drjax.put(drjax.take(x, i), i, add=True)
    noise = lambda k, x: x + jax.random.normal(k, x.shape)
    total = drjax.reduce(jnp.maximum, drjax.map_fn(noise, (key, moved)), -jnp.inf)
    middle = drjax.reduce_columns(jnp.median, x)
    return {"all": drjax.gather(x)}, total, [middle, drjax.scatter(drjax.gather(x))]


@drjax.program(pods=2, clients=2)
def levels(w, x):
    work = lambda w, x: (w * x).sum()
    y = drjax.map_fn(work, (drjax.broadcast(w), x))
    return drjax.reduce_sum(y, over="clients"), drjax.reduce_mean(y)


X = np.ones((n, 2), np.float32)
PLANS = {
    "rounds": (clients(rounds), (np.ones(2, np.float32), X)),
    "branches": (clients(branches), (np.int32(1), np.float32(1), X[:, 0])),
    "moves": (
        clients(moves),
        (np.array([2, 0, 1], np.int32), jax.random.split(jax.random.key(0), n), X),
    ),
    "levels": (levels, (np.float32(2), np.ones((2, 2, 3), np.float32))),
}


@pytest.fixture(scope="module")
def files():
    """Of each plan its manifest and its members."""
    read = {}
    with jax.check_tracer_leaks(False):
        for name, (fn, args) in PLANS.items():
            data = plan_to_bytes(drjax.make_plan(fn)(*args))
            read[name] = container.read(name, data)
            read[name][0].pop("members")
    return read


def places(x, path=()):
    """The path of each part of a JSON value."""
    yield path
    if isinstance(x, dict | list):
        for key, part in x.items() if isinstance(x, dict) else enumerate(x):
            yield from places(part, (*path, key))


def mutate(rng: random.Random, manifest) -> None:
    """Change one part of a manifest for another of the same sort, or for any other."""
    path: Any = rng.choice([p for p in places(manifest["plan"], ("plan",)) if p[1:]])
    *around, last = path
    parent: Any = _entry_at(manifest, around)
    old = parent[last]
    # Of the same sort: what stands in the same place elsewhere, or is near.
    alike = [
        _entry_at(manifest, p)
        for p in places(manifest["plan"], ("plan",))
        if p[-1] == last and p != path
    ]
    alike += [x for x in parent if isinstance(parent, list) and x != old]
    if isinstance(old, int):
        alike += [old + 1, old - 1, 0, 10**6, 2**31 - 1, 10**40, True, float(old)]
    if isinstance(old, str):
        words = ["Scan", "While", "Cond", "Program", "Columns", "sum", "mean", "max"]
        words += ["Gather", "Permute", "Take", "PutAdd", "Stage", "Fold", "Move"]
        words += ["int32", "float16"]
        alike += [*words, *manifest["plan"]["values"], "ﬁ", "fi", "class", "x" * 10**5]
    if isinstance(old, list):
        alike += [[], old[::-1], old + old, old[:-1], ["x"] * 10**4, "", "ab"]
    if isinstance(old, dict):
        alike += [{}, dict([*old.items()][::-1])]
    odd = [None, "leaf", {"record": ["x", []]}, {"tuple": []}, -1, [[]], {"a": 1}]
    action = rng.random()
    if action < 0.1 and isinstance(parent, list):
        parent.insert(last, copy.deepcopy(old))
    elif action < 0.2:
        del parent[last]
    else:
        chosen = alike if alike and action < 0.9 else odd
        parent[last] = copy.deepcopy(rng.choice(chosen))


def _entry_at(x, path):
    for key in path:
        x = x[key]
    return x


def repair(manifest, members) -> None:
    """Make a manifest consistent again, as who forges a file would."""
    with contextlib.suppress(Exception), planning(False):
        _repair_batches(manifest["plan"], members, manifest)
    with contextlib.suppress(Exception), planning(False):
        manifest["ledger"] = ledger(_reader(manifest, members).plan(manifest["plan"]))


def _reader(manifest, members):
    return _PlanReader(_StageReader("x", members, manifest, run=False))


def _repair_batches(plan, members, manifest) -> None:
    for entry in plan["steps"]:
        for body in entry.get("bodies", ()):
            _repair_batches(body, members, manifest)
    with pytest.MonkeyPatch.context() as patch:
        # Whatever is said of batches is believed.
        patch.setattr("drjax._plan_file.decode.batched_results", lambda *_: {})
        repaired = _reader(manifest, members).plan(plan)
    of_groups = [entry for entry in plan["steps"] if entry.get("local")]
    for entry, a_round in zip(of_groups, repaired.rounds, strict=True):
        entry.update(batched_results(a_round, repaired.kept()))


class TooLongError(Exception):
    """A loop of a plan has no end, or not soon."""


@contextlib.contextmanager
def at_most(seconds):
    def stop(*_):
        raise TooLongError

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def zeros(value, size):
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), value.whole_shape(size))
    return np.zeros(value.whole_shape(size), value.dtype)


def outcome(data: bytes, seconds: float = 5) -> str:
    """What becomes of a plan file; any error but those of drjax is raised."""
    tracemalloc.start()
    try:
        plan = plan_from_bytes("x", data)
        texts = [str(plan), str(plan.communication(2))]
    except drjax.PlanFileError as error:
        texts, plan = [str(error)], None
    finally:
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert memory < 20 * len(data) + 2**24
    if plan is None:
        assert len(texts[0]) < 1000, texts[0]
        return "refused"
    assert sum(map(len, texts)) < 20 * len(data)
    layout(plan)
    numbers = [plan.size, *(loop.length or 1 for loop in plan.loops())]
    numbers += [math.prod(v.whole_shape(plan.size)) for v in plan.inputs]
    if max(numbers) > 1000:
        return "large"
    try:
        args, kwargs = plan.in_tree.unflatten(
            [zeros(v, plan.size) for v in plan.inputs]
        )
        with at_most(seconds):
            jax.block_until_ready(
                drjax.backends.reference.compile(plan)(*args, **kwargs)
            )
    except drjax.DrjaxError as error:
        assert len(str(error)) < 3000, str(error)
        return type(error).__name__
    except TooLongError:
        return "endless"
    return "runs"


def check(name, files, seeds) -> set[str]:
    manifest, members = files[name]
    seen = set()
    for seed in seeds:
        rng, changed = random.Random(f"{name} {seed}"), copy.deepcopy(manifest)
        for _ in range(rng.choice([1, 1, 2, 3])):
            mutate(rng, changed)
        if rng.random() < 0.9:
            repair(changed, members)
        try:
            seen.add(outcome(container.to_bytes(changed, members)))
        except Exception as error:
            raise AssertionError(f"{name} {seed}: {json.dumps(changed)}") from error
    return seen


@pytest.mark.once
@pytest.mark.parametrize("name", PLANS)
def test_a_few(name, files):
    manifest, members = files[name]
    assert outcome(container.to_bytes(manifest, members), 300) == "runs"
    assert "refused" in check(name, files, range(25))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_many(name, files):
    assert {"refused", "runs"} <= check(name, files, range(25, 1000))
