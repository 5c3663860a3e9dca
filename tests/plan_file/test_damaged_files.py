"""Files that are no plan files, or no longer: one clear error each, no more.

Covers: drjax._plan_file.container, drjax._plan_file.load.
"""

import hashlib
import json
import shutil
import zipfile

import jax
import pytest

import drjax
from drjax._plan_file.inspect import inspect
from tests.helpers.plan_files import (
    local_stage,
    read_members,
    rewrite,
    saved_sgd_plan,
    steps_of,
)
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return saved_sgd_plan(tmp_path_factory)


@pytest.fixture
def path(good, tmp_path):
    return shutil.copy(good, tmp_path / "plan.drjax")


def with_manifest(path, change):
    members = read_members(path)
    manifest = json.loads(members["manifest.json"])
    change(manifest)
    rewrite(path, {**members, "manifest.json": json.dumps(manifest)})


STAGE = "stages/1.groups.jexp"


def not_a_zip(path):
    path.write_bytes(b"hello")


def empty(path):
    path.write_bytes(b"")


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


def another_zip(path):
    rewrite(path, {"hello.txt": b"hello"})


def damaged(path):
    data = bytearray(path.read_bytes())
    data[data.index(read_members(path)[STAGE]) + 100] ^= 1
    path.write_bytes(data)


def damaged_manifest(path):
    data = bytearray(path.read_bytes())
    data[data.index(b'"calling_convention"') + 5] ^= 1
    path.write_bytes(data)


def changed(path):
    members = read_members(path)
    rewrite(path, {**members, STAGE: members[STAGE][:-1] + b"x"})


def missing(path):
    rewrite(path, {k: v for k, v in read_members(path).items() if k != STAGE})


def extra(path):
    rewrite(path, {**read_members(path), "stages/more.jexp": b"more"})


def compressed(path):
    rewrite(path, read_members(path), zipfile.ZIP_DEFLATED)


def bomb(path):
    manifest = b" " * 10_000_000
    rewrite(path, {"manifest.json": manifest}, zipfile.ZIP_DEFLATED)


def larger_inside_than_outside(path):
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")  # of the directory: sizes stand at 20 and 24
    for position in (entry + 20, entry + 24):
        data[position : position + 4] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)


def escaping(path):
    rewrite(path, {**read_members(path), "../../evil.sh": b"echo"})


def absolute(path):
    rewrite(path, {**read_members(path), "/tmp/evil.sh": b"echo"})


def escaping_in_the_manifest(path):
    seal = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    with_manifest(path, lambda m: m["members"].update({"stages/../x": seal}))


def of_a_later_version(path):
    with_manifest(path, lambda m: m.update(version=3))


def of_another_format(path):
    with_manifest(path, lambda m: m.update(format="onnx"))


def no_json(path):
    rewrite(path, {**read_members(path), "manifest.json": b"{"})


def deep_json(path):
    rewrite(path, {**read_members(path), "manifest.json": b"[" * 100_000})


def a_list(path):
    rewrite(path, {**read_members(path), "manifest.json": b"[]"})


def without_a_plan(path):
    with_manifest(path, lambda m: m.pop("plan"))


def another_ledger(path):
    with_manifest(path, lambda m: m["ledger"][0].update(bytes=0))


def an_unknown_value(path):
    with_manifest(path, lambda m: m["plan"]["outputs"].append("x"))


def used_before_it_is_made(path):
    with_manifest(
        path, lambda m: steps_of(m["plan"], "Broadcast")[0].update(source="result")
    )


def an_unknown_dtype(path):
    with_manifest(path, lambda m: m["plan"]["values"]["model"].update(dtype="object"))


def a_negative_shape(path):
    with_manifest(path, lambda m: m["plan"]["values"]["model"].update(shape=[-3]))


def another_shape(path):
    def change(manifest):
        manifest["plan"]["values"]["work"].update(shape=[3, 1])
        manifest["plan"]["values"]["result"].update(shape=[3, 1])

    with_manifest(path, change)


def other_custom_calls(path):
    groups = lambda m: local_stage(m["plan"])
    with_manifest(path, lambda m: groups(m).update(custom_calls=["Qr"]))


def another_tree(path):
    with_manifest(path, lambda m: m["plan"]["out_tree"].update(node={"tuple": []}))


def code_for_a_tree(path):
    node = {"record": ["x; import os", [["a", "leaf"]]]}
    with_manifest(path, lambda m: m["plan"]["out_tree"].update(node=node))


def an_unknown_reduction(path):
    with_manifest(path, lambda m: steps_of(m["plan"], "Reduce")[0].update(op="or"))


def other_results(path):
    with_manifest(path, lambda m: local_stage(m["plan"]).update(rows=["x"]))


def another_member(path):
    name = "stages/../../x"
    with_manifest(path, lambda m: local_stage(m["plan"]).update(member=name))


def unreadable(path, data=b"not what jax.export wrote", member=STAGE):
    """A stage of a version that this JAX does not know; its hash is right."""
    members = read_members(path)
    manifest = json.loads(members["manifest.json"])
    seal = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["members"][member] = seal
    text = json.dumps(manifest)
    rewrite(path, {**members, "manifest.json": text, member: data})


FAULTS = {
    not_a_zip: "is not a zip, or was cut off",
    empty: "is not a zip, or was cut off",
    cut_off: "is not a zip, or was cut off",
    another_zip: "has no manifest.json, so it is no plan file",
    damaged: "is damaged: 'stages/1.groups.jexp' cannot be read",
    damaged_manifest: "is damaged: 'manifest.json' cannot be read",
    changed: "was changed: stages/1.groups.jexp is not what the manifest says",
    missing: "lacks stages/1.groups.jexp",
    extra: "has members too many",
    compressed: "has compressed members",
    bomb: "has compressed members",
    larger_inside_than_outside: "says that it holds 1,073,",
    escaping: "has a member named '../../evil.sh', which may lie outside",
    absolute: "has a member named '/tmp/evil.sh', which may lie outside",
    escaping_in_the_manifest: "has a member named 'stages/../x'",
    of_a_later_version: "has version 3 of the format. This drjax reads version 2",
    of_another_format: "its format is 'onnx', not 'drjax plan'",
    no_json: "malformed manifest: Expecting property name",
    deep_json: "malformed manifest",
    a_list: "malformed manifest: list indices",
    without_a_plan: "malformed manifest: KeyError: 'plan'",
    another_ledger: "malformed manifest: ValueError: its ledger is not that",
    an_unknown_value: "malformed manifest: ValueError: ['x'] are used before",
    used_before_it_is_made: "['result'] are used before they are made",
    an_unknown_dtype: "no dtype is called object",
    a_negative_shape: "-3 is not a count",
    another_shape: "a stage gives other types than it is said to",
    other_custom_calls: "stage work calls other code than it is said to",
    another_tree: "a pytree of 0 leaves holds 1",
    code_for_a_tree: "malformed manifest",
    an_unknown_reduction: "or is none of sum, mean",
    other_results: "a batch gives other results than the round needs",
    another_member: "malformed manifest: KeyError: 'stages/../../x.jexp'",
    unreadable: "cannot read stages/1.groups of the plan file",
}


OF_STAGES = (another_shape, other_custom_calls, unreadable)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults(fault, path, monkeypatch):
    fault(path)
    before = path.read_bytes()
    if fault not in OF_STAGES:  # the others are seen before any stage is read
        monkeypatch.setattr(jax.export, "deserialize", None)
    text = raises(drjax.PlanFileError, FAULTS[fault], drjax.load_plan, path)
    assert str(path) in text and len(text) < 1000
    assert [*path.parent.iterdir()] == [path] and path.read_bytes() == before


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        drjax.load_plan(tmp_path / "none.drjax")


@pytest.mark.parametrize("member", [STAGE, "stages/1.groups.batch.jexp"])
def test_code_of_another_version_of_stablehlo(member, path):
    exported = jax.export.deserialize(bytearray(read_members(path)[member]))
    object.__setattr__(exported, "mlir_module_serialized", b"ML\xefRStableHLO_v99")
    unreadable(path, bytes(exported.serialize()), member)
    name = member.removesuffix(".jexp")
    text = f"This JAX, {jax.__version__}, cannot read {name} of the plan file {path}"
    raises(drjax.PlanFileError, text, drjax.load_plan, path)


@pytest.mark.slow
def test_any_byte_may_be_wrong(good, tmp_path):
    """A file with a wrong byte is refused, or says the same as before."""
    data, expected = good.read_bytes(), inspect(good)[1]
    path = tmp_path / "plan.drjax"
    for position in range(0, len(data), max(1, len(data) // 300)):
        for bit in (1, 64, 128):
            wrong = bytearray(data)
            wrong[position] ^= bit
            path.write_bytes(wrong)
            try:
                result = inspect(path)[1]
            except drjax.PlanFileError:
                continue
            assert result == expected, position


def test_any_end_may_be_missing(good, tmp_path):
    data, path = good.read_bytes(), tmp_path / "plan.drjax"
    for length in range(0, len(data), max(1, len(data) // 200)):
        path.write_bytes(data[:length])
        with pytest.raises(drjax.PlanFileError):
            inspect(path)
