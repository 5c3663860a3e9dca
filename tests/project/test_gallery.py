"""The gallery: each algorithm in a short form, the same on all devices and chunks.

Covers: examples.
"""

import importlib
import json
import re
import runpy
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

import drjax
from benchmarks import lines
from examples.algorithms import population
from examples.common import clients, plots
from examples.common.results import (
    Badge,
    is_less,
    read_counts,
    show_counts,
    show_spread,
)
from examples.common.transformer import TransformerConfig
from examples.reproductions import fedavg, scaffold, soups
from tests.helpers import run_python
from tests.helpers.cases import checkerboard

ROOT = Path(__file__).parents[2]
WRITE_PAGES = runpy.run_path(str(ROOT / "docs/write_pages.py"))
EXAMPLES = {path.stem: path.read_text() for path in WRITE_PAGES["reproductions"]()}
# Settings with which an example ends in seconds; it is compared on these devices.
SHORT = {
    "bandwidth": dict(tables=(6,)),
    "analytics": dict(records=3000, models=2),
    "compression": dict(steps=3, seeds=1, width=8, only="PowerSGD"),
    "diloco": dict(
        steps=20,
        pretrain=20,
        save_every=20,
        length=8,
        batch=1,
        eval_windows=1,
        only="H = 10",
        seeds=(0,),
        parts=False,
        model=TransformerConfig(d_model=8, layers=1, heads=2),
    ),
    "dp_fedavg": dict(rounds=2, steps=2, places=170, noises=(1.0,), seeds=1),
    "evolution": dict(rounds=2, workers=8, widths=(4,), episodes=4, seeds=1),
    "federated_sklearn": dict(newton_steps=2, admm_steps=3, lloyd_steps=2),
    "fedavg": dict(
        rounds=2, repeats=1, channels=(2, 4), width=8, cohort=6, only="FedProx"
    ),
    "gossip": dict(rings=(4, 8), averaging=8, workers=8, steps=3, seeds=1),
    "hierarchical": dict(steps=6, seldom=6, often=2, width=4, only="hier"),
    "maml": dict(steps=20, test_tasks=10, only="first-order", seeds=1),
    "personalization": dict(
        rounds=1, clients=6, width=8, epochs=1, only="FedPer", seeds=2
    ),
    "scaffold": dict(rounds=2, cohort=6, epochs=(1,), rates=(0.1,), repeats=1),
    "self_tuning": dict(
        passes=2,
        rounds=2,
        window=1,
        clients=4,
        width=4,
        only="truncated",
        memory=False,
        seeds=1,
    ),
    "soups": dict(
        seed_steps=2,
        steps=2,
        expert_steps=2,
        width=8,
        test_windows=2,
        learned_steps=2,
        seeds=1,
    ),
    "sharded_server": dict(steps=2, model=TransformerConfig(d_model=16, layers=1)),
    "sweep": dict(trials=4, steps=3, width=4, seeds=1),
    "mixture": dict(steps=3, only="iris"),
    "population": dict(members=5, rounds=2, steps=2, width=4, toy_rounds=2, seeds=1),
    "robust": dict(steps=2, seeds=1, workers=12, only="median"),
    "tempering": dict(chains=6, replicas=4, sweeps=9, burn_in=1, only="parallel"),
}


@pytest.fixture(scope="module", autouse=True)
def as_users_run_them():
    with jax.numpy_rank_promotion("allow"), jax.check_tracer_leaks(False):
        yield


def run(name: str, folder: Path, **settings):
    module = importlib.import_module(f"examples.reproductions.{name}")
    return module.main(module.Config(output=folder, **SHORT[name] | settings))


def test_each_has_a_short_form_and_committed_results():
    assert set(SHORT) == set(EXAMPLES)
    for name in EXAMPLES:
        results = json.loads((ROOT / f"docs/gallery/{name}/results.json").read_text())
        assert results["cpu_seconds"] <= 2 * 300  # five minutes of two cores
        assert (ROOT / f"docs/gallery/{name}/card.png").exists()


def test_each_is_in_one_group_of_the_index():
    groups = " ".join(WRITE_PAGES["GROUPS"].values()).split()
    assert sorted(groups) == sorted(EXAMPLES)
    index = (ROOT / "docs/gallery/index.md").read_text()
    for badge in get_args(Badge):
        assert f"| *{badge}* |" in index


def committed(name: str) -> dict:
    return json.loads((ROOT / f"docs/gallery/{name}/results.json").read_text())


def test_the_readme_has_the_numbers_of_self_tuning():
    text = " ".join((ROOT / "README.md").read_text().split())
    results = committed("self_tuning")
    losses = {line[0]: line[-2] for line in results["table"]}
    tuned, fixed = losses["tuned, all rounds"], losses["fixed, best of 12 rates"]
    assert (
        f"a test loss of {tuned}, where the best of 12 fixed rates has {fixed}" in text
    )
    memory = dict(
        re.findall(
            r"[:;] ([a-z. ]*jax.\w+): [\d., ]*, (\d+\.\d)", results["remarks"][0]
        )
    )
    ours, plain, saved = (
        memory[x] for x in ("drjax.jit", "jax.jit", "jax.jit and jax.checkpoint")
    )
    shown = f"{ours} MB on a device, by `jax.jit` {plain}, or {saved} with a"
    assert f"{shown} `jax.checkpoint` around each round" in text


def test_what_soups_says_of_orders_is_that_of_its_numbers():
    results = committed("soups")
    numbers = results["numbers"]
    orders = [soups.compare(numbers, *pair) for pair in soups.ORDERS]
    assert results["remarks"][: len(orders)] == orders
    reached = all(order.endswith("as published in all seeds.") for order in orders)
    assert results["badge"] == ("order reached" if reached else None)
    for method, *cells, _ in results["table"]:
        for name, cell in zip(results["columns"][1:-1], cells, strict=True):
            values = numbers.get(f"{name}: {method}")
            assert cell == (show_spread(values) if values else "")


def test_a_soup_that_is_worse_is_not_the_published_order():
    losses = {"a": [2.0, 1.0], "b": [1.5, 0.5], "c": [1.8, 2.0]}
    text = soups.compare(losses, "a", "b")
    assert text == "a 1.500, b 1.000: not the published order."
    assert soups.compare(losses, "b", "a").endswith(": as published in all seeds.")
    assert soups.compare(losses, "a", "c").endswith(": as published in 1 of 2 seeds.")


def test_what_fedavg_says_of_orders_is_that_of_its_numbers():
    results = committed("fedavg")
    orders = {
        line[0]: fedavg.compare_order(line, results["columns"])
        for line in results["table"]
        if line[0].startswith(tuple(fedavg.SPLITS))
    }
    assert len(orders) == 5
    for text, _ in orders.values():
        assert text in results["remarks"]
    reached = [x for x in fedavg.SPLITS if orders[f"{x}, 95%"][1]]
    assert results["measured"].endswith(f" {' and '.join(reached) or 'neither'}.")
    assert results["badge"] == ("order reached" if len(reached) == 2 else None)


def test_an_order_within_the_spread_of_the_seeds_is_not_reached():
    assert is_less([1, 3, 2], [4, 5, 6])
    assert not is_less([1, 3, 2], [3, 5, 6])  # the least of the one, the most of ours
    assert not is_less([4, 5, 6], [1, 3, 2])
    assert is_less([1, 5], [2, 6], paired=True) and not is_less([1, 5], [2, 6])
    assert not is_less([1, 6], [2, 6], paired=True)
    assert is_less([9, 9], 2 * [float("inf")])
    assert not is_less([9, float("inf")], 2 * [float("inf")])


def test_an_order_of_fedavg_counts_runs_that_were_too_short():
    compare = lambda *cells: fedavg.compare_order(["", *cells], ["", *fedavg.QUOTED])
    text, reached = compare("90 (80 to > 200)", "40 (30 to 50)", "20 (9 to 29)")
    assert reached and " 2.2 to 4.5, and the fewer the more epochs" in text
    text, reached = compare("> 200 (80 to > 200)", "40 (30 to 50)", "20 (9 to 29)")
    assert reached and "than FedSGD, and the fewer the more epochs" in text
    text, reached = compare("90 (80 to 99)", "40 (30 to 50)", "30 (9 to 30)")
    assert not reached
    assert text.endswith(": FedAvg, E = 5: 30 (9 to 30), FedAvg, E = 1: 40 (30 to 50).")
    assert not compare("> 200", "60 (9 to 99)", "> 200 (8 to > 200)")[1]
    assert not compare("90 (80 to 99)", "40 (30 to 50)", "")[1]
    counts = [3, 5, float("inf")]
    assert show_counts(counts, 9) == "5 (3 to > 9)"
    assert read_counts(show_counts(counts, 9)) == [5, 3, float("inf")]
    assert show_counts(counts[-1:], 9) == "> 9" and read_counts("7") == [7, 7, 7]


def test_what_scaffold_says_of_orders_is_that_of_its_numbers():
    results = committed("scaffold")
    measured, remarks, as_published = scaffold.compare(results["table"])
    assert measured == results["measured"]
    assert results["remarks"][: len(remarks)] == remarks
    assert results["badge"] == ("order reached" if as_published else None)


def test_what_a_sharded_server_says_is_that_of_its_numbers():
    results = committed("sharded_server")
    alone = results["numbers"]["one device"]
    curves = results["numbers"].values()
    far = max(np.abs(np.subtract(curve, alone)).max() for curve in curves)
    assert far < 1e-5 and f"differ by {far:.0e} at most" in results["measured"]
    sizes = {line[0]: line[1] for line in results["table"]}
    shown = f"{sizes['replicated']} replicated, {sizes['sharded']} sharded"
    assert shown in results["measured"]
    whole, part = (int(sizes[x].replace(",", "")) for x in ("replicated", "sharded"))
    assert 7.9 < whole / part < 8.1  # devices


algorithms = WRITE_PAGES["algorithms"]
ALGORITHMS = sorted(
    x for x in (ROOT / "examples/algorithms").glob("*.py") if x.stem != "__init__"
)


def test_a_reproduction_imports_its_algorithms():
    """One algorithm stands once: each file is run by the reproduction that names it."""
    imported = [x for code in EXAMPLES.values() for x in algorithms(code)]
    assert sorted(imported) == [path.stem for path in ALGORITHMS]
    for name, code in EXAMPLES.items():
        assert f"python -m examples.reproductions.{name}" in code.split('"""')[1]


@pytest.mark.slow
@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_an_algorithm_prints_a_short_table(path):
    out = run_python.run("-m", f"examples.algorithms.{path.stem}").stdout
    assert 1 < len(out.splitlines()) <= 15


def test_a_member_that_diverged_is_not_copied():
    program = drjax.program(members=5)(population.exploit)
    scores = np.array([1.0, np.nan, 3.0, 2.0, 0.0], np.float32)
    members, copied = program(np.arange(5), scores, jax.random.key(0))
    np.testing.assert_array_equal(members, [0, 2, 2, 3, 4])
    np.testing.assert_array_equal(copied, [False, True, False, False, False])


def the_same(one, other):
    """Rounding differs by how many groups a device adds at once."""
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=2e-4, err_msg=name)


@pytest.mark.sampled
@checkerboard(7, name=EXAMPLES)
def test_a_short_run_writes_its_results(name, tmp_path, capsys):
    result = run(name, tmp_path, devices=8, groups_per_step=1)
    written = json.loads((tmp_path / "results.json").read_text())
    the_same(written["numbers"], result.numbers)
    assert len({len(row) for row in [written["columns"], *written["table"]]}) == 1
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert (tmp_path / "card.png").stat().st_size > 5_000
    assert result.measured in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_results_are_the_same_on_all_devices_and_chunks(name, tmp_path):
    numbers = run(name, tmp_path, devices=1).numbers
    for devices, groups in (1, 3), (2, 1), (4, 2), (8, None):
        settings = {"devices": devices, "groups_per_step": groups}
        the_same(numbers, run(name, tmp_path, **settings).numbers)


@pytest.mark.parametrize("panels", [1, 2, 3])
def test_a_card_has_the_first_panel(panels, tmp_path):
    figure = Figure(figsize=(3 * panels, 3), layout="constrained")
    for i, axes in enumerate(figure.subplots(1, panels, squeeze=False)[0]):
        points = axes.scatter([0, 1], [0, 1], c=[0, 1], vmin=i)
    figure.colorbar(points)
    plots.save(figure, tmp_path / "figure.png")
    plots.save_card(figure, tmp_path / "card.png")
    whole, card = (
        image.imread(tmp_path / f"{x}.png").shape for x in ("figure", "card")
    )
    assert 0.7 < card[0] / whole[0] <= 1
    assert 0.7 < panels * card[1] / whole[1] < 1.1


# ---------------------------------------------------------------------------------
# Clients


def test_padding_is_masked():
    batches = [{"x": np.ones((n, 2)), "y": np.full(n, n)} for n in (3, 1, 2)]
    padded, mask = clients.pad(batches)
    assert padded["x"].shape == (3, 3, 2) and padded["y"].shape == mask.shape == (3, 3)
    np.testing.assert_array_equal(mask.sum(1), [3, 1, 2])
    np.testing.assert_array_equal(padded["x"][..., 0], mask)
    np.testing.assert_array_equal(padded["y"], mask * mask.sum(1, keepdims=True))
    assert clients.pad(batches, multiple=4)[1].shape == (3, 4)


def test_a_cohort_has_different_clients():
    ids = clients.cohort(jax.random.key(0), 10, 6)
    assert len(set(ids.tolist())) == 6 and set(ids.tolist()) <= set(range(10))


def test_a_poisson_cohort_has_each_client_at_the_rate():
    draw = jax.vmap(lambda key: clients.poisson_cohort(key, 50, 0.1, 20))
    ids, taken, all_of_them = draw(jax.random.split(jax.random.key(0), 2000))
    assert all_of_them.all()
    counts = np.bincount(np.asarray(ids)[np.asarray(taken)], minlength=50)
    np.testing.assert_allclose(counts / 2000, 0.1, atol=5 * (0.09 / 2000) ** 0.5)
    variance = np.var(taken.sum(1))
    np.testing.assert_allclose(variance, 50 * 0.1 * 0.9, rtol=0.2)
    assert not clients.poisson_cohort(jax.random.key(0), 50, 0.5, 2)[2]


def test_a_clients_key_does_not_depend_on_its_place():
    one, other = (
        clients.client_keys(jax.random.key(0), jax.numpy.array(i))
        for i in ([4, 7], [7, 1])
    )
    assert one[1] == other[0] and one[0] != other[0]


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("split", [clients.split_iid, clients.split_shards])
def test_a_partition_has_each_example_once(split, spread):
    labels = np.random.default_rng(0).integers(0, 10, 1000)
    parts = split(labels, 20, 0, spread)
    assert len(parts) == 20 and min(map(len, parts)) > 0
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1000))
    kinds = [len(set(labels[part])) for part in parts]
    assert (np.median(kinds) <= 4) == (split is clients.split_shards)
    sizes = [len(part) for part in parts]
    assert (max(sizes) - min(sizes) <= 2) == (spread == 0)


# ---------------------------------------------------------------------------------
# Lines of code


def test_lines_of_code_are_counted():
    text = '''
"""Docs."""
# a comment
class A:
    """Docs.

    More."""

    @property
    def b(self):
        return 1  # one

def c():
    """Docs."""
    return (
        2,
    )
'''
    assert lines.code_lines(text) == 8
    assert lines.code_lines(text, ["A.b"]) == 3
    assert lines.code_lines(text, ["A", "c"]) == 8
    assert lines.code_lines(text, ["A", "A.b"]) == 4


def test_the_table_of_lines_is_that_of_the_examples():
    table = (ROOT / "docs" / "gallery" / "lines.md").read_text()
    for other in lines.OTHERS:
        sent = "2 models" if other.what == "Krum" else "1 model"
        ours = f"| `{other.example}` | {lines.algorithm_lines(other.example)} | {sent} "
        others = f"| {other.library} {other.version}, `{Path(other.path).name}`: "
        assert ours + others in table


def test_the_readme_compares_the_versions_whose_lines_are_counted():
    readme = (ROOT / "README.md").read_text()
    compared = {x for x in lines.OTHERS if f"/project/{x.library}/" in readme}
    assert len({x.library for x in compared}) == 5
    for other in compared:
        assert f"/project/{other.library}/{other.version}/) {other.version} |" in readme
