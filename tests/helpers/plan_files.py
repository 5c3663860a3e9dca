"""Plans that go through files."""

import hashlib
import json
import zipfile

import jax
import jax.numpy as jnp

import drjax
from tests.helpers.cases import N

program = drjax.program(clients=N)


def saved(plan, path):
    """A plan that went through a file."""
    plan.save(path)
    loaded = drjax.load_plan(path)
    assert str(loaded) == str(plan)
    assert str(loaded.communication(4)) == str(plan.communication(4))
    return loaded


def sgd_plan():
    @program
    def step(model, data):
        def work(model, x):
            return model - 0.1 * jax.grad(lambda m: jnp.mean((x @ m) ** 2))(model)

        return drjax.reduce_mean(drjax.map_fn(work, (drjax.broadcast(model), data)))

    return drjax.make_plan(step)(jnp.ones(3), jnp.ones((N, 5, 3)))


def saved_sgd_plan(tmp_path_factory):
    """The path of a good plan file, for a fixture of a module."""
    path = tmp_path_factory.mktemp("good") / "plan.drjax"
    with jax.check_tracer_leaks(False):
        sgd_plan().save(path)
    return path


def read_manifest(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("manifest.json"))


def read_members(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def steps_of(plan, kind):
    """The entries of a plan in a manifest that are steps of this class, by its name."""
    return [entry for entry in plan["steps"] if entry["step"] == kind]


def local_stage(plan):
    """The entry of the first local stage of a plan in a manifest."""
    return next(entry for entry in steps_of(plan, "Stage") if entry["local"])


def rewrite(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def forge(path, members, changed=(), change=lambda manifest: None):
    """Write a plan file with other members, whose hashes the manifest has."""
    members = {**members, **dict(changed)}
    manifest = json.loads(members.pop("manifest.json"))
    for name, data in dict(changed).items():
        seal = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["members"][name] = seal
    change(manifest)
    rewrite(path, {**members, "manifest.json": json.dumps(manifest)})
