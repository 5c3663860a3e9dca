"""Plan files of programs with levels, and what runs them.

Covers: drjax._plan_file.step_fields, drjax._plan_file.encode.
"""

import json

import jax
import numpy as np
import pytest

import drjax
from drjax.backends import in_process
from tests.helpers.cases import checkerboard
from tests.helpers.levels import MODEL, PROGRAMS, X, loss
from tests.helpers.meshes import in_mesh_of
from tests.helpers.plan_files import forge, local_stage, read_members, saved
from tests.helpers.raising import raises


def check(result, expected):
    for a, b in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@checkerboard(3, name=PROGRAMS)
def test_values(name, tmp_path):
    fn, args = PROGRAMS[name]
    expected = jax.jit(fn)(*args)
    plan = drjax.make_plan(fn)(*args)
    loaded = saved(plan, tmp_path / "plan.drjax")
    assert loaded.levels == plan.levels
    check(drjax.backends.reference.compile(loaded)(*args), expected)
    check(in_process.compile(plan, block_size=1)(*args), expected)
    for step in (1, 2):
        run = drjax.backends.xla.compile(loaded, groups_per_step=step)
        check(jax.jit(run)(*args), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("step", [None, 1])
def test_a_loaded_plan_on_a_mesh(step, tmp_path):
    fn, args = PROGRAMS["gradient"]
    loaded = saved(drjax.make_plan(fn)(*args), tmp_path / "plan.drjax")
    run = drjax.backends.xla.compile(loaded, groups_per_step=step)
    with in_mesh_of({"pods": 2, "groups": 2}):
        check(jax.jit(run)(*args), fn(*args))


def inner_of(manifest):
    return local_stage(manifest["plan"])["inner"]


def _other_argument(inner):
    inner["inputs"] = inner["inputs"][::-1]


def _other_result(inner):
    inner["outputs"] = inner["inputs"][:1]


def _other_size(inner):
    inner["partition"]["size"] = 4


@pytest.mark.parametrize(
    "change, text",
    [
        (_other_argument, "the plan of an inner level takes other values"),
        (_other_result, "the plan of an inner level gives other values"),
        (_other_size, "the plan of an inner level takes other values"),
    ],
)
def test_forged(change, text, tmp_path):
    drjax.make_plan(loss)(MODEL, X).save(tmp_path / "plan.drjax")
    members = read_members(tmp_path / "plan.drjax")
    manifest = json.loads(members["manifest.json"])
    change(inner_of(manifest))
    forged = tmp_path / "forged.drjax"
    forge(forged, members | {"manifest.json": json.dumps(manifest).encode()})
    raises(drjax.PlanFileError, text, drjax.load_plan, forged)
