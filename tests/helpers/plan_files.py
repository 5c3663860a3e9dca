"""Plans that go through files."""

import hashlib
import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import drjax
from tests.helpers.cases import N

STAGE = "stages/1.groups"  # the files of the code of the groups

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


def lists(calls):
    """A change of the manifest: what the stage of the groups calls."""
    groups = lambda manifest: local_stage(manifest["plan"])
    return lambda manifest: groups(manifest).update(custom_calls=[*calls])


def forged_with(target, members, path):
    """A file whose stage calls a target, and says so."""
    old = export.deserialize(bytearray(members[f"{STAGE}.jexp"]))

    def fn(*args):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        x = jax.ffi.ffi_call(target, shape)(index=np.uint64(0))
        return jax.tree.unflatten(
            old.out_tree, [jnp.zeros(o.shape, o.dtype) + x for o in old.out_avals]
        )

    args, _ = jax.tree.unflatten(
        old.in_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in old.in_avals]
    )
    unchecked = [export.DisabledSafetyCheck.custom_call(target)]
    exporter = export.export(
        jax.jit(fn), platforms=old.platforms, disabled_checks=unchecked
    )
    new = exporter(*args)
    code = bytes(new.mlir_module_serialized)
    changed = {f"{STAGE}.jexp": bytes(new.serialize()), f"{STAGE}.mlirbc": code}
    forge(path, members, changed, lists([target]))
    return path
