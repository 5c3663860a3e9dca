"""The examples run as their users run them, and what they share does what it says.

Covers: examples.
"""

import json
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from drjax.contrib import diloco
from examples.common import text, transformer
from examples.common.checkpoint import Checkpoints
from tests.helpers.run_python import run

LENGTH = 16
ROOT = Path(__file__).parents[2]


def test_quickstart_prints_value_gradient_and_primitives():
    out = run("-m", "examples.quickstart").stdout
    assert "value: 6.0" in out
    assert "derivative: 6.0" in out
    for name in ("drjax_broadcast", "drjax_map_fn", "drjax_reduce_sum"):
        assert name in out


@pytest.mark.parametrize(
    "name",
    [
        path.stem
        for path in sorted((ROOT / "examples").glob("*.py"))
        if "__main__" in path.read_text()
    ],
)
def test_help_runs_nothing(name):
    out = run("-m", f"examples.{name}", "--help").stdout
    assert out.startswith("usage: ") and f"{name}.py [-h]" in out
    assert "value:" not in out and "round 1:" not in out


@pytest.mark.slow
def test_maml_beats_pretraining(tmp_path):
    flags = ("--output", tmp_path, "--steps", "10000", "--test-tasks", "200")
    flags += "--seeds", "1"
    out = run("-m", "examples.reproductions.maml", *flags).stdout
    assert "loss: drjax_broadcast x 7, drjax_map_fn, drjax_reduce_mean\n" in out
    errors = json.loads((tmp_path / "results.json").read_text())["numbers"]
    maml, pretraining = errors["MAML"], errors["pretraining"]  # after 0, 1, 5, 10 steps
    assert maml[1] < 0.6 * pretraining[1]
    assert maml[3] < maml[1] < maml[0]


# ---------------------------------------------------------------------------------
# DiLoCo: a run that is killed and resumed

SMALL = (
    *("--only", "H = 10", "--steps", "60", "--save-every", "10", "--batch", "2"),
    *("--devices", "4", "--workers", "4", "--length", "16", "--eval-windows", "2"),
    *("--model.d-model", "16", "--model.layers", "1", "--model.heads", "2"),
    *("--pretrain", "20", "--outer-lr", "1", "--outer-momentum", "0.5"),
    *("--seeds", "0", "--no-parts"),
)
# The process ends when the third checkpoint may still be half written.
KILLED_IN_THIRD_CHECKPOINT = """
import os, signal, tyro
from examples.reproductions import diloco

save = diloco.Checkpoints.save

def save_and_kill(self, number, *args):
    save(self, number, *args)
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)

diloco.Checkpoints.save = save_and_kill
diloco.main(tyro.cli(diloco.Config))
"""


def latest(folder):
    """The state and the history of the latest checkpoint of a run."""
    manager = ocp.CheckpointManager(folder / "checkpoints" / "DiLoCo_H_10_seed_0")
    args = {"state": ocp.args.StandardRestore(), "about": ocp.args.JsonRestore()}
    saved = manager.restore(manager.latest_step(), args=ocp.args.Composite(**args))
    manager.close()
    ((_, history),) = saved["about"]
    return saved["state"], history


@pytest.mark.slow
def test_diloco_resumes_bit_exactly_after_a_kill_and_with_other_workers(tmp_path):
    whole, killed, other = (tmp_path / name for name in ("whole", "killed", "other"))
    run("-m", "examples.diloco", "--output", whole, *SMALL)
    done = run(
        "-c", KILLED_IN_THIRD_CHECKPOINT, "--output", killed, *SMALL, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (killed / "results.json").exists()
    shutil.copytree(killed, other)
    run("-m", "examples.diloco", "--output", killed, "--resume", *SMALL)
    (state, history), (resumed, again) = latest(whole), latest(killed)
    jax.tree.map(np.testing.assert_array_equal, state, resumed)
    for entry in (*history, *again):
        del entry["cpu_seconds"]
    assert history == again
    check_results(whole, history)

    flags = *SMALL, "--workers", "6", "--devices", "2"
    run("-m", "examples.diloco", "--output", other, "--resume", *flags)
    _, after = latest(other)
    workers = [len(entry["losses"]) for entry in after]
    before = workers.count(4)
    assert before in (2, 3) and workers == [4] * before + [6] * (6 - before)
    held_out = [entry["held_out"] for entry in after]
    assert held_out[:before] == [x["held_out"] for x in history[:before]]
    assert held_out[-1] < held_out[before - 1]


def check_results(folder, history) -> None:
    results = json.loads((folder / "results.json").read_text())
    held_out = [entry["held_out"] for entry in history]
    assert results["numbers"] == {"DiLoCo, H = 10, seed 0": held_out}
    assert len(held_out) == 6 and held_out[-1] < held_out[0]
    for name in ("figure.png", "groups.png", "sharding.png"):
        assert (folder / name).stat().st_size > 10_000


def test_a_run_does_not_resume_with_other_settings(tmp_path):
    step = lambda state, x: (state, x)
    round_ = diloco.Round(step, 2, params=lambda state: state)
    state, zero = (round_.init({"x": x}) for x in (np.arange(3.0), np.zeros(3)))
    first = Checkpoints(tmp_path / "run", {"seed": 0}, keep=False)
    first.save(2, state, [{"round": 1}, {"round": 2}])
    first.close()
    same = Checkpoints(tmp_path / "run", {"seed": 0}, keep=True)
    restored, history = same.restore(round_, zero)
    np.testing.assert_array_equal(restored.params["x"], state.params["x"])
    assert [entry["round"] for entry in history] == [1, 2]
    same.close()
    other = Checkpoints(tmp_path / "run", {"seed": 1}, keep=True)
    with pytest.raises(ValueError, match=r"these differ .* {'seed': \(0, 1\)}"):
        other.restore(round_, state)
    other.close()
    fresh = Checkpoints(tmp_path / "run", {"seed": 1}, keep=False)
    assert fresh.restore(round_, state) == (state, [])
    fresh.close()


# ---------------------------------------------------------------------------------
# The text and its partition


@pytest.fixture(scope="module")
def corpus() -> text.Corpus:
    return text.load_stdlib()


def test_text_is_partitioned_by_module_with_unequal_groups(corpus):
    train = {module.name for module in corpus.train}
    held_out = {module.name for module in corpus.held_out}
    assert train.isdisjoint(held_out)
    assert len(train) == len(corpus.train) > 100
    assert 10 < len(held_out) < len(train) / 5
    assert {"json", "zipfile"} <= train | held_out
    assert "test" not in train | held_out
    sizes = [len(module.text) for module in corpus.train]
    assert min(sizes) < 1_000 and max(sizes) > 100_000


def test_text_is_the_same_on_every_python(corpus):
    """It is in the repository with its license, and its hash in each result."""
    digest = "98042f79e3a797197f3e1ce20d430eb1df56dc41a7984a2236038c2dcb395f91"
    assert text.sha256() == digest
    assert sum(len(m.text) for part in corpus for m in part) == 1_998_049
    about = text.STDLIB.with_name("README.md").read_text()
    assert digest in about and "LICENSE.txt" in about
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (
        text.STDLIB.with_name("LICENSE.txt").read_text()
    )
    for name in ("diloco", "soups", "sharded_server"):
        results = ROOT / f"docs/gallery/{name}/results.json"
        assert any(digest in x for x in json.loads(results.read_text())["remarks"])


def test_text_is_the_same_when_read_again(corpus):
    again = text.load_stdlib()
    for one, two in zip(corpus, again, strict=True):
        assert [m.name for m in one] == [m.name for m in two]
        assert all(
            np.array_equal(m.text, n.text) for m, n in zip(one, two, strict=True)
        )


def test_packages_are_read_without_tests_in_a_fixed_order(tmp_path):
    for name in ("b/z.py", "b/a.py", "b/tests/no.py", "a.py", "test/no.py", "c.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {name}")
    modules = sorted(m for part in text.load_stdlib(tmp_path) for m in part)
    assert [(m.name, m.text.tobytes()) for m in modules] == [
        ("a", b"# a.py"),
        ("b", b"# b/a.py\n# b/z.py"),
    ]


@pytest.mark.parametrize("size", [2, LENGTH, LENGTH + 1, LENGTH + 2, 200])
@pytest.mark.parametrize("seed", range(5))
def test_each_byte_but_the_first_is_a_target_once(size, seed):
    source = np.arange(size, dtype=np.uint8)
    windows = text.cut(source, 100, LENGTH, np.random.default_rng(seed))
    mask = text.target_mask(windows.lengths, LENGTH)
    targets, contexts = windows.tokens[:, 1:][mask], windows.tokens[:, :-1][mask]
    assert sorted(targets) == list(range(1, size))
    np.testing.assert_array_equal(targets, contexts + 1)
    assert not windows.tokens[:, 1:][~mask].any()
    # The empty windows are last, so that a short text fills its first steps.
    assert (np.diff((windows.lengths > 0).astype(int)) <= 0).all()


def test_a_round_depends_on_seed_and_round_only(corpus):
    draw = lambda *key: text.sample_round(corpus.train, key, 6, 3, 2, LENGTH)
    cohort, windows = draw(0, 7)
    again, same = draw(0, 7)
    np.testing.assert_array_equal(cohort, again)
    np.testing.assert_array_equal(windows.tokens, same.tokens)
    assert windows.tokens.shape == (6, 3, 2, LENGTH + 1)
    assert windows.lengths.shape == (6, 3, 2)
    assert len(set(cohort)) == 6
    for key in ((0, 8), (1, 7)):
        assert not np.array_equal(draw(*key)[0], cohort)


def test_groups_of_a_round_hold_their_own_text():
    modules = [
        text.Module(name, np.full(size, ord(name), np.uint8))
        for name, size in (("a", 5), ("b", 40), ("c", 1000))
    ]
    cohort, windows = text.sample_round(modules, (0, 0), 3, 2, 2, LENGTH)
    for index, tokens, lengths in zip(cohort, *windows, strict=True):
        module = modules[index]
        assert lengths.sum() == min(len(module.text) - 1, lengths.sum())
        mask = text.target_mask(lengths, LENGTH)
        assert set(tokens[..., 1:][mask]) == {ord(module.name)}
    by_name = {
        modules[i].name: int(w.sum())
        for i, w in zip(cohort, windows.lengths, strict=True)
    }
    assert by_name["a"] == 4 and by_name["b"] == 39
    assert by_name["c"] > 3 * LENGTH


def test_bigram_is_a_distribution_and_learns():
    module = text.Module("ab", np.frombuffer(b"ab" * 50, np.uint8))
    bigram = text.Bigram.fit([module])
    np.testing.assert_allclose(np.exp(bigram.log_probs).sum(1), 1.0)
    assert np.exp(bigram.log_probs[ord("a"), ord("b")]) > 0.95
    windows = text.Windows(module.text[None, :9], np.array([5], np.int32))
    expected = -(3 * bigram.log_probs[97, 98] + 2 * bigram.log_probs[98, 97])
    np.testing.assert_allclose(bigram.loss(windows), [expected])


# ---------------------------------------------------------------------------------
# The model


@pytest.fixture(scope="module")
def model():
    config = transformer.TransformerConfig(d_model=16, layers=1, heads=2)
    return transformer.Transformer(config, nnx.Rngs(0))


@pytest.mark.slow
def test_padding_changes_neither_loss_nor_gradient(model):
    tokens = np.random.default_rng(0).integers(0, 256, (3, LENGTH + 1), np.uint8)
    lengths = np.array([LENGTH, 5, 0], np.int32)
    graphdef, params = nnx.split(model)

    @jax.jit
    def value_and_grad(tokens, lengths):
        loss = lambda p: transformer.mean_loss(nnx.merge(graphdef, p), tokens, lengths)
        return jax.value_and_grad(loss, has_aux=True)(params)

    with jax.numpy_rank_promotion("allow"):
        (loss, targets), grads = value_and_grad(tokens, lengths)
        assert targets == LENGTH + 5
        other = np.where(np.arange(LENGTH + 1) > lengths[:, None], 77, tokens)
        (loss_2, _), grads_2 = value_and_grad(other.astype(np.uint8), lengths)
        assert loss == loss_2
        jax.tree.map(np.testing.assert_array_equal, grads, grads_2)
        (full, _), _ = value_and_grad(tokens, np.array([LENGTH, 0, 0], np.int32))
        (short, _), _ = value_and_grad(tokens, np.array([0, 5, 0], np.int32))
        np.testing.assert_allclose(
            loss, (full * LENGTH + short * 5) / (LENGTH + 5), rtol=1e-6
        )
        (none, targets), grads = value_and_grad(tokens, np.zeros(3, np.int32))
        assert none == targets == 0
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_model_is_causal(model):
    tokens = np.random.default_rng(0).integers(0, 256, (1, LENGTH), np.int32)
    changed = tokens.copy()
    changed[0, 9] += 1
    with jax.numpy_rank_promotion("allow"):
        logits = nnx.jit(lambda model, tokens: model(tokens))
        difference = np.abs(logits(model, tokens) - logits(model, changed % 256))
    assert not difference[0, :9].any()
    assert difference[0, 9:].any(-1).all()
