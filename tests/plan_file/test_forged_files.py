"""Plan files that were forged: hashes are right, what is in them is not.

Covers: drjax._plan_file.container, drjax._plan_file.decode, drjax._plan_file.inspect,
drjax._plan_file.json_values.
"""

import io
import json
import os
import random
import time
import tracemalloc
import warnings
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import drjax
from drjax._plan_file import container
from drjax._plan_file.inspect import inspect
from tests.helpers.cases import N
from tests.helpers.plan_files import (
    forge,
    program,
    read_members,
    rewrite,
    saved_sgd_plan,
    sgd_plan,
    steps_of,
)
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")

STAGE = "stages/1.groups"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return saved_sgd_plan(tmp_path_factory)


@pytest.fixture
def members(good):
    return read_members(good)


# ---------------------------------------------------------------------------------
# The zip and the manifest


def refused(path, text):
    text = raises(drjax.PlanFileError, text, drjax.load_plan, path)
    assert str(path) in text and len(text) < 1000
    raises(drjax.PlanFileError, text, inspect, path)


def write_twice(path, members, name):
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as file:
        warnings.simplefilter("ignore")  # zipfile says so
        for member, data in [*members.items(), (name, b"{}")]:
            file.writestr(member, data)


@pytest.mark.parametrize("name", ["manifest.json", f"{STAGE}.jexp"])
def test_a_member_that_is_there_twice(name, members, tmp_path):
    path = tmp_path / "plan.drjax"
    write_twice(path, members, name)
    refused(path, f"has the member '{name}' twice")


def test_a_key_that_is_there_twice(members, tmp_path):
    text = members["manifest.json"].decode()
    text = '{"members": {}, ' + text.lstrip()[1:]
    rewrite(tmp_path / "plan.drjax", {**members, "manifest.json": text})
    refused(
        tmp_path / "plan.drjax", "malformed manifest: it has the key 'members' twice"
    )


def test_members_that_nothing_uses(members, tmp_path):
    more = {f"consts/{i}.npy": b"MZ" * i for i in range(5)}
    forge(tmp_path / "plan.drjax", members, more)
    text = (
        "has members that no stage uses: consts/0.npy, consts/1.npy, consts/2.npy and"
    )
    refused(tmp_path / "plan.drjax", text)


def test_any_number_of_groups_though_it_scatters(tmp_path):
    path = tmp_path / "plan.drjax"
    work = lambda x: drjax.map_fn(jnp.add, (drjax.scatter(jnp.sin(x)), x))
    drjax.make_plan(program(lambda x: drjax.reduce_sum(work(x))))(jnp.ones(N)).save(
        path
    )
    forge(path, read_members(path), change=lambda m: m["plan"].update(open_groups=True))
    refused(path, "it cannot run with any number of groups")


def test_the_name_of_a_member_too_many(members, tmp_path):
    rewrite(tmp_path / "plan.drjax", {**members, "stages/more.jexp": b"more"})
    refused(tmp_path / "plan.drjax", "has members too many: stages/more.jexp")


def test_a_manifest_has_a_limit(members, tmp_path, monkeypatch):
    path, text = tmp_path / "plan.drjax", members["manifest.json"]
    large = text + b" " * (container.MANIFEST_LIMIT + 1 - len(text))
    rewrite(path, {**members, "manifest.json": large})
    monkeypatch.setattr(json, "loads", None)  # it is not parsed
    refused(path, "has a manifest.json of 33,554,433 bytes, more than the 33,554,432")
    monkeypatch.setattr(container, "MANIFEST_LIMIT", len(text) - 1)
    raises(drjax.PlanFileError, "Plan fewer rounds", sgd_plan().save, path)


def test_only_regular_files_are_read(good, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    refused(tmp_path, "is a folder, not a regular file")
    for path in (fifo, "/dev/zero", "/dev/null"):  # none of them blocks
        refused(path, "is a pipe or a device, not a regular file")
    raises(drjax.PlanFileError, "is not a regular file", sgd_plan().save, fifo)
    link = tmp_path / "link"
    link.symlink_to(good)
    drjax.load_plan(link)


def test_an_array_of_more_than_its_bytes(tmp_path):
    path, table = tmp_path / "plan.drjax", jnp.arange(2000.0)
    f = program(lambda x: drjax.reduce_sum(drjax.map_fn(lambda x: x + table, x)))
    drjax.make_plan(f)(jnp.ones(N)).save(path)
    members = read_members(path)
    name = next(name for name in members if name.startswith("consts/"))
    for shape, descr in (((1 << 50,), "<f4"), ((1,), "|O"), ((-4, -500), "<f4")):
        file = io.BytesIO()
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        forge(path, members, {name: file.getvalue() + members[name][-8000:]})
        raises(drjax.PlanFileError, "malformed manifest: ", drjax.load_plan, path)


def test_a_directory_that_declares_more_than_there_is(good, tmp_path):
    path, data = tmp_path / "plan.drjax", good.read_bytes()
    expected, refusals = inspect(good)[1], 0
    start, count = data.index(b"PK\x01\x02"), data.count(b"PK\x01\x02")
    for offset, width in ((20, 4), (24, 4), (42, 4), (28, 2), (30, 2)):
        for value in (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\0"):
            position = start
            for _ in range(count):
                wrong = bytearray(data)
                wrong[position + offset : position + offset + width] = value[:width]
                path.write_bytes(wrong)
                try:
                    assert inspect(path)[1] == expected
                except drjax.PlanFileError:
                    refusals += 1
                position = max(data.find(b"PK\x01\x02", position + 1), start)
    assert refusals > 60


def test_deep_and_wide_manifests_end_soon(members, tmp_path):
    path, leaf = tmp_path / "plan.drjax", "leaf"
    wide = {"tuple": [leaf] * 20_000}
    deep = wide
    for _ in range(190):  # paths of leaves would have 190 keys of 10 kB each
        deep = {"dict": [["k" * 10_000, deep]]}
    start = time.monotonic()
    for node in (deep, {"tuple": [wide] * 50}):
        change = lambda m, node=node: m["plan"]["in_tree"].update(node=node)
        forge(path, members, change=change)
        refused(path, "leaves holds 2")
    loops = plan = json.loads(members["manifest.json"])["plan"]
    for _ in range(120):
        scan = {"step": "Scan", "name": "scan", "inputs": [], "outputs": []}
        scan |= {"bodies": [loops], "consts": [0], "carry": 0, "length": 1}
        loops = {**plan, "steps": [*plan["steps"][:-1], scan, plan["steps"][-1]]}
    forge(path, members, change=lambda m: m.update(plan=loops))
    refused(path, "malformed manifest")
    assert time.monotonic() - start < 60


def _loop(manifest):
    return steps_of(manifest["plan"], "Scan")[0]


def _tree_of_equal_names(manifest):  # once Python has normalized them
    fields = [["\ufb01", "leaf"], ["fi", "leaf"]]
    manifest["plan"]["out_tree"]["node"] = {"record": ["X", fields]}


def _a_node_in_a_list(manifest):
    manifest["plan"]["out_tree"]["node"] = ["leaf"]


def _many_axes(manifest):
    manifest["plan"]["partition"]["mesh_axes"] = ["a"] * 100_000


def _no_arguments(manifest):
    manifest["plan"]["in_tree"]["node"] = {"tuple": ["leaf", "leaf"]}


@pytest.mark.parametrize(
    "change,text",
    [
        (_tree_of_equal_names, "SyntaxError: duplicate argument 'fi'"),
        (_a_node_in_a_list, "a pytree cannot have the node ['leaf']"),
        (_many_axes, "mesh_axes of partition 'clients' need to differ"),
        (_no_arguments, "malformed manifest: "),
        (lambda m: _loop(m)["bodies"][0].update(outputs=""), "is not a list"),
        (lambda m: _loop(m).update(step="While"), "a While has no ['length']"),
        (lambda m: _loop(m).update(length=3), "a scan has stacks of another type"),
        (lambda m: _loop(m).update(length=None), "Scan.length needs int, got NoneType"),
        (lambda m: _loop(m).update(carry=0), "a scan has "),
        (lambda m: m["plan"].update(in_tree=None), "it has no structure of its argu"),
    ],
)
def test_what_could_be_neither_printed_nor_run(change, text, tmp_path):
    path, table = tmp_path / "plan.drjax", jnp.ones((20, 20))

    @program
    def f(w, x):
        def step(w, y):
            mean = drjax.reduce_mean(drjax.map_fn(jnp.add, (drjax.broadcast(w), x)))
            return mean + y, None

        return lax.scan(step, w, jnp.ones(2))[0], table @ table

    drjax.make_plan(f)(jnp.ones(()), jnp.ones(N)).save(path)
    members = read_members(path)
    forge(path, members, change=change)
    refused(path, text)
    name = next(name for name in members if name.endswith(".npy"))
    header = members[name].replace(b"(20, 20), }", b"(20, 20), [")
    forge(path, members, {name: header})
    raises(drjax.PlanFileError, "malformed manifest", drjax.load_plan, path)


@pytest.mark.parametrize("size", [10**6, 2**31 - 1, 10**30])
def test_the_number_of_groups_that_a_file_claims_takes_no_memory(size, tmp_path):
    path = tmp_path / "plan.drjax"
    f = program(lambda x: drjax.reduce_sum(drjax.shift(x, 1)))
    drjax.make_plan(f)(jnp.ones(N)).save(path)
    change = lambda m: m["plan"]["partition"].update(size=size)
    forge(path, read_members(path), change=change)
    tracemalloc.start()
    refused(path, "a permute has no permutation of the groups")
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


def mutate(rng, x):
    """A JSON value with one part of it replaced."""
    odd = [
        None, True, -1, 0, 10**30, 1.5, "", "x" * 300, "\0", [], {}, [[]], "leaf",
        {"a": 1}, [1, 2, 3], "stages/1.groups", "float64", 2**31,
    ]  # fmt: skip
    if isinstance(x, dict | list) and x and rng.random() < 0.9:
        x = x.copy()
        position = rng.choice([*x]) if isinstance(x, dict) else rng.randrange(len(x))
        if rng.random() < 0.1:
            del x[position]
        else:
            x[position] = mutate(rng, x[position])
        return x
    return rng.choice(odd)


def test_any_part_of_a_manifest_may_be_wrong(good, members, tmp_path):
    path, rng = tmp_path / "plan.drjax", random.Random(0)
    plan, manifest = str(drjax.load_plan(good)), json.loads(members["manifest.json"])
    for _ in range(300):
        rewrite(path, {**members, "manifest.json": json.dumps(mutate(rng, manifest))})
        for read in (drjax.load_plan, lambda path: inspect(path)[0]):
            try:
                result = read(path)
            except drjax.PlanFileError as error:
                assert len(str(error)) < 3000
            else:  # a version, or a name
                assert len(str(result)) < 2 * len(plan)
