"""Folds in plan files: values of a loaded plan by chunks and on meshes; forged entries.

Covers: drjax._plan_file.step_fields, drjax._plan_file.export_stage.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax._plan_file.batches import run_batch
from tests.helpers.cases import checkerboard
from tests.helpers.folds import FOLDS, MESHES, close, data, direct_of, program_of
from tests.helpers.meshes import in_mesh
from tests.helpers.plan_files import forge, read_members, steps_of
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")
N = 7


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "fold.drjax"
    drjax.make_plan(program_of("affine", N))(data(N, 3)).save(path)
    return path


@pytest.mark.sampled
@checkerboard(6, name=FOLDS, mesh=["none", "uneven", "empty devices"], step=[None, 2])
def test_a_loaded_plan(name, mesh, step, tmp_path):
    f, x = program_of(name, N), data(N, 3)
    want = jax.jit(direct_of(name))(x)
    plan = drjax.make_plan(f)(x)
    plan.save(tmp_path / "a.drjax")
    loaded = drjax.load_plan(tmp_path / "a.drjax")
    assert str(loaded) == str(plan)
    jax.tree.map(close, drjax.backends.reference.compile(loaded)(x), want)
    make = MESHES[mesh][1]
    with in_mesh(make and make()):
        run = jax.jit(drjax.backends.xla.compile(loaded, groups_per_step=step))
        jax.tree.map(close, run(x), want)
    loaded.save(tmp_path / "b.drjax")
    a, b = ((tmp_path / f"{name}.drjax").read_bytes() for name in "ab")
    assert a == b


def _drop(entry):
    entry["init"] = entry["init"][:1]


def _no_function(entry):
    entry["combine"]["inputs"] = entry["combine"]["inputs"][1:]


def _partitioned_init(entry):
    entry["init"] = entry["sources"]


def _global_states(entry):
    entry["sources"] = entry["init"]


@pytest.mark.parametrize(
    "change,text",
    [
        (_drop, "a fold has states of different types"),
        (_no_function, "a fold has no function of two states"),
        (_partitioned_init, "a neutral state or a result that is partitioned"),
        (_global_states, "a fold has states that are not partitioned"),
        (lambda entry: entry.pop("results"), "KeyError"),
    ],
)
def test_forged(change, text, path, tmp_path):
    members = read_members(path)
    manifest = json.loads(members["manifest.json"])
    change(steps_of(manifest["plan"], "Fold")[0])
    forged = tmp_path / "forged.drjax"
    forge(forged, members | {"manifest.json": json.dumps(manifest).encode()})
    raises(drjax.PlanFileError, text, drjax.load_plan, forged)


def test_states_of_masked_groups_do_not_count(tmp_path):
    """The batched function of a file folds what its mask selects, in order."""
    x, path = data(N, 3), tmp_path / "best.drjax"
    drjax.make_plan(program_of("best", N))(x).save(path)
    stage = drjax.load_plan(path).rounds[0].local
    for mask in ([0, 1, 0, 0, 1, 1, 0], [1] * 7, [0, 0, 0, 0, 0, 0, 1]):
        mask = np.array(mask, bool)
        groups = np.arange(N, dtype=np.int32)
        outs, _ = run_batch(stage, (), [], jnp.array(mask), groups, [x])
        want = jax.tree.leaves(direct_of("best")(x[mask]))
        jax.tree.map(close, list(outs), want)
