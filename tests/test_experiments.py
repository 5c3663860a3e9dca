"""The experiments: configs, the parser of HLO, every way to write a round, a TPU."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np
import pydantic
import pytest

from examples.common.transformer import TransformerConfig
from experiments import config, run, worker
from experiments.config import Config, Machine, Round
from experiments.hlo import Module

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.toml"))
TINY = Config(
    model=TransformerConfig(d_model=16, layers=2, heads=2, vocab=32, scan=True),
    round=Round(groups=8, steps=2, batch=2, length=8, lr=0.1),
    execute=2,
)


@pytest.fixture(autouse=True)
def _as_users_do():
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_runs(path):
    found = config.load(path)
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert lines[0].startswith("# ") and found != Config()


@pytest.mark.parametrize(
    "text, error",
    [
        ("groups = 3", "groups\n  Unexpected keyword argument"),
        ("[round]\ngroup = 3", "round.group\n  Unexpected keyword argument"),
        ('[model]\nlayers = "3"', "model.layers\n  Input should be a valid integer"),
        ("[round]\ngroups = 2.5", "round.groups\n  Input should be a valid integer"),
        ('variants = ["pmap"]', "variants.0\n  Input should be 'drjax'"),
    ],
)
def test_a_config_that_is_wrong(text, error, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(pydantic.ValidationError) as e:
        config.load(path)
    assert error in str(e.value)


def test_flags_override_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nlayers = 3\nscan = true\n")
    flags = [str(path), "--out", str(tmp_path), "--model.layers", "5"]
    out, found = config.from_command_line(flags)
    assert out == tmp_path and [*found] == [path]
    assert found[path].model == TransformerConfig(layers=5, scan=True)


# ---------------------------------------------------------------------------------
# HLO


def module(*body: str, mesh=None) -> Module:
    """A program with these instructions in the body of a loop of 7 steps."""
    lines = [
        "HloModule m", "%body (p: s32[]) -> s32[] {", *body, "}",
        "%cond (p: s32[]) -> pred[] {", "  %p = s32[]{:T(256)} parameter(0)",
        "  %seven = s32[] constant(7)",
        "  ROOT %lt = pred[] compare(%p, %seven), direction=LT", "}",
        "ENTRY %main (a: f32[8]) -> s32[] {", "  %zero = s32[] constant(0)",
        "  ROOT %w = (s32[], f32[2]) while(%zero), condition=%cond, body=%body", "}",
    ]  # fmt: skip
    return Module("\n".join(lines), mesh or {"groups": 4, "model": 2})


ARRAYS = ("%a = f32[3,5]{1,0} parameter(0)", "%b = f32[5,4]{1,0} parameter(1)")


def test_products_are_counted_as_often_as_the_loop_runs():
    dot = (
        "%c = f32[3,4] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    assert module(*ARRAYS, dot).flops == 7 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("size, stride, pad", [(2, 1, (1, 1)), (3, 2, (0, 2))])
def test_convolutions(size, stride, pad):
    x, w = np.ones((2, 7, 3), np.float32), np.ones((size, 3, 4), np.float32)

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (stride,), [pad], dimension_numbers=("NWC", "WIO", "NWC")
        )

    text = jax.jit(convolve).lower(x, w).compile().as_text() or ""
    # With ones, a result is the number of products that it is the sum of.
    assert "convolution(" in text
    found = Module(text, {"groups": 1}).flops
    assert found == 2 * np.asarray(convolve(x, w)).sum()


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("groups",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("[4,2]<=[8]", ("model",)),
        ("[2,4]<=[4,2]T(1,0)", ("groups",)),
        ("[1,8]<=[8]", ("groups", "model")),
        ("mesh['x'=4,'y'=2] {'x'}", ("groups",)),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("?",)),
    ],
)
def test_axes_of_messages(groups, axes):
    line = f"%r = f32[3,5]{{1,0}} all-reduce(%a), replica_groups={groups}"
    (message,) = module(ARRAYS[0], line).messages
    assert (message.kind, message.bytes, message.times) == ("all-reduce", 60, 7)
    assert message.axes == axes


def test_a_loop_that_does_not_count():
    text = "\n".join(
        ["%c (p: s32[]) -> pred[] {", "  ROOT %p = pred[] parameter(0)", "}",
         "ENTRY %main (a: f32[8]) -> s32[] {",
         "  ROOT %w = s32[] while(%a), condition=%c, body=%c", "}"]
    )  # fmt: skip
    with pytest.raises(ValueError, match="The loop w does not count to a constant"):
        _ = Module(text, {"groups": 8}).flops


# ---------------------------------------------------------------------------------
# Rounds


@pytest.fixture(scope="module")
def by_hand():
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        return worker.measure(TINY, "shard_map")


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, work",
    [("drjax", 1), ("drjax jit", 1), ("no annotations", 1), ("python loop", 4),
     ("rolled loop", 4)],
)  # fmt: skip
def test_every_way_gives_the_same_losses(variant, work, by_hand):
    found = worker.measure(TINY, variant)
    np.testing.assert_allclose(found["losses"], by_hand["losses"], rtol=1e-5)
    assert found["losses"][1] != found["losses"][0]
    assert found["flops"] == pytest.approx(work * by_hand["flops"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["drjax", "drjax jit"])
def test_a_model_with_a_shard_map_of_its_own(variant, by_hand):
    own = dataclasses.replace(TINY.model, attention_axis="model")
    found = worker.measure(dataclasses.replace(TINY, model=own), variant)
    np.testing.assert_allclose(found["losses"], by_hand["losses"], rtol=1e-5)
    assert found["flops"] == pytest.approx(by_hand["flops"], rel=0.01)


def test_a_record_says_everything(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "b.toml"
    path.write_text(
        'variants = ["drjax"]\n[model]\nd_model = 16\nlayers = 1\nheads = 2\n'
        "[round]\nlength = 8\nsteps = 1\n"
    )
    monkeypatch.setattr("sys.argv", ["run", str(path), "--out", str(tmp_path / "out")])
    run.main()
    (file,) = (tmp_path / "out").iterdir()
    record = run.json.loads(file.read_text())
    assert file.name == "a-b-drjax.json" and record["settings"]["round"]["length"] == 8
    assert record["versions"]["jax"] == jax.__version__
    (sent,) = [c for c in record["collectives"] if c["axes"] == ["groups"]]
    assert sent["in a round"] >= 1 and sent["bytes in a round"] > 0


@pytest.mark.slow
def test_processes_agree(tmp_path):
    found = []
    for processes in (1, 2):
        machine = Machine(devices=4, processes=processes, group=1)
        found.append(run.measured(dataclasses.replace(TINY, machine=machine), "drjax"))
    np.testing.assert_allclose(found[0]["losses"], found[1]["losses"], rtol=1e-6)
    assert found[0]["flops"] == found[1]["flops"]


def test_devices_that_cannot_be_divided():
    machine = Machine(group=3)
    with pytest.raises(
        ValueError, match="8 devices cannot be divided into groups of 3"
    ):
        worker.measure(Config(machine=machine), "drjax")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler"
)
def test_a_tpu_program():
    on_tpus = Config(
        model=TINY.model, round=Round(groups=4, steps=2, batch=2, length=8),
        machine=Machine(platform="tpu", topology="v2:2x2"),
    )  # fmt: skip
    ours, by_hand = (worker.measure(on_tpus, v) for v in ("drjax", "shard_map"))
    assert ours["flops"] == by_hand["flops"] > 0
    assert ours["collectives"] == by_hand["collectives"]
    assert ours["temp bytes"] <= 1.02 * by_hand["temp bytes"]
