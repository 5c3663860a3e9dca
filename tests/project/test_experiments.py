"""The experiments: configs, text, every way to write a round, processes, a TPU.

Covers: experiments.
"""

import dataclasses
from pathlib import Path
from typing import Any

import datasets
import jax
import numpy as np
import pydantic
import pytest

from examples.common.text import load_articles
from examples.common.transformer import TransformerConfig
from experiments import config, counts, plot, run, text, worker
from experiments.config import Config, Machine, Round
from tests.helpers import cases
from tests.helpers.compiled import BY_TPU_COMPILER

WAYS = [
    "drjax", "drjax jit", "shard_map, scan", "no annotations", "python loop",
    "rolled loop",
]  # fmt: skip
TWO_GROUPS = Round(groups=2, steps=1, batch=1, length=8)
CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.toml"))
TINY = Config(
    model=TransformerConfig(d_model=16, layers=2, heads=2, scan=True),
    round=Round(groups=8, steps=2, batch=2, length=8, lr=0.1),
    execute=2,
)


def measure(settings: Config, variant: Any) -> run.Record:
    """A worker's record, in this process."""
    return counts.counted(worker.measure(settings, variant))


@pytest.fixture(autouse=True)
def _as_users_do():
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_runs(path):
    result = config.load(path)
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    assert lines[0].startswith("# ") and result != Config()


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


def test_a_wrong_file_is_named(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("groups = ")
    with pytest.raises(ValueError) as e:
        config.load(path)
    assert e.value.__notes__ == [f"This is about {path}."]


def test_devices_that_cannot_be_divided_among_processes():
    with pytest.raises(ValueError, match="5 devices cannot be divided among 2 proc"):
        Machine(devices=5, processes=2)


@pytest.mark.parametrize(
    "settings, error",
    [
        ({"group": 4, "fsdp": 3}, "group of 4 devices cannot be divided by fsdp = 3"),
        ({"group": 4, "fsdp": 2, "layout": "fsdp"}, "leave out one of the two"),
    ],
)
def test_two_axes_that_do_not_fit(settings, error):
    with pytest.raises(ValueError, match=error):
        Machine(**settings)


@pytest.mark.parametrize("figure", plot.PAPER)
def test_committed_tables_are_drawn(figure):
    path = Path(__file__).parents[2] / f"docs/experiments/{figure}.md"
    rows, axes = plot.read(path), plot.draw_table(path).axes
    assert len(axes) == (3 if figure == "executed" else len(plot.PANELS))
    for ax in axes:  # each run has a point, also where memory was too small
        assert sum(np.size(line.get_xdata()) for line in ax.lines) == len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["drjax", "drjax jit"])
def test_two_axes_give_the_same_losses(variant, baseline):
    two = dataclasses.replace(
        TINY, model=dataclasses.replace(TINY.model, batch_axis="fsdp"),
        machine=Machine(group=4, fsdp=2),
    )  # fmt: skip
    result = measure(two, variant)
    assert result["mesh"] == {"groups": 2, "fsdp": 2, "model": 2}
    np.testing.assert_allclose(result["losses"], baseline["losses"], rtol=1e-5)


def test_flags_are_in_the_name_of_a_run(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[round]\ngroups = 3\n")
    flags = ["--round.groups", "5", "--variants", "drjax"]
    _, result = config.from_command_line([str(path), *flags])
    assert run._name(path, result[path]) == "run,round.groups=5"


def test_other_runs_go_on_where_one_fails(tmp_path, monkeypatch):
    def measured(config, variant):
        if variant == "drjax":
            raise RuntimeError("no")
        return {"out of memory": "too much"}

    path = tmp_path / "run.toml"
    path.write_text('variants = ["drjax", "shard_map"]\n')
    monkeypatch.setattr(run, "measured", measured)
    monkeypatch.setattr("sys.argv", ["run", str(path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="1 of 2 failed: run, drjax"):
        run.main()
    (file,) = (tmp_path / "out").iterdir()
    assert file.name == f"{tmp_path.name}-run-shard_map.json"


def test_flags_override_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nlayers = 3\nscan = true\n")
    flags = [str(path), "--out", str(tmp_path), "--model.layers", "5"]
    command, result = config.from_command_line(flags)
    assert command.out == tmp_path and [*result] == [path]
    assert result[path].model == TransformerConfig(layers=5, scan=True)


# ---------------------------------------------------------------------------------
# Rounds


@pytest.fixture(scope="module")
def baseline():
    with jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        return measure(TINY, "shard_map")


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", cases.some(WAYS, "drjax", "drjax jit", "rolled loop")
)
def test_every_way_gives_the_same_losses(variant, baseline):
    work = 4 if variant in ("python loop", "rolled loop") else 1  # of all groups
    result = measure(TINY, variant)
    np.testing.assert_allclose(result["losses"], baseline["losses"], rtol=1e-5)
    assert result["losses"][1] != result["losses"][0]
    assert result["flops"] == pytest.approx(work * baseline["flops"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("variant", cases.some(["drjax", "drjax jit"], "drjax jit"))
def test_a_model_with_a_shard_map_of_its_own(variant, baseline):
    own = dataclasses.replace(TINY.model, attention_axis="model")
    result = measure(dataclasses.replace(TINY, model=own), variant)
    np.testing.assert_allclose(result["losses"], baseline["losses"], rtol=1e-5)
    assert result["flops"] == pytest.approx(baseline["flops"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("variant", cases.some(["drjax", "drjax jit"], "drjax jit"))
def test_models_averaged_by_a_sharded_server(variant, baseline):
    less = dataclasses.replace(
        TINY, round=dataclasses.replace(TINY.round, average="models"),
        machine=Machine(server="sharded"), donate=True,
    )  # fmt: skip
    result = measure(less, variant)
    np.testing.assert_allclose(result["losses"], baseline["losses"], rtol=1e-5)
    kinds = {c["kind"] for c in result["collectives"] if "groups" in c["axes"]}
    assert "all-gather" in kinds


@pytest.mark.parametrize(
    "changed, error",
    [
        ({"round": dataclasses.replace(TINY.round, groups=1000)}, "1000 groups need"),
        ({"model": dataclasses.replace(TINY.model, vocab=32)}, "vocabulary of 32"),
    ],
)
def test_text_that_does_not_do(changed, error):
    with pytest.raises(ValueError, match=error):
        next(text.rounds(dataclasses.replace(TINY, **changed)))


ARTICLES = [
    ("b.example", "A first article.", "2019"),
    ("a.example", "Of another domain.", "2019"),
    ("b.example", "The second of its domain.", "2018"),
    ("empty.example", "", "2017"),
]


# Hugging Face datasets before 5.2 leaves a CSV file to the garbage collector to close.
@pytest.mark.filterwarnings(
    r"ignore:.*news\.csv:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_articles_by_domain(kind, tmp_path, monkeypatch):
    """A small file with the columns of CCNews, which is too large to be here."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = str(tmp_path / f"news.{kind}")
    columns = zip(*ARTICLES, strict=True)
    rows = dict(zip(("domain", "text", "date"), map(list, columns), strict=True))
    news = datasets.Dataset.from_dict({"title": list("tttt"), **rows})
    {"jsonl": news.to_json, "csv": news.to_csv, "parquet": news.to_parquet}[kind](path)
    result = {m.name: m.text.tobytes() for part in load_articles(path) for m in part}
    assert result == {
        "a.example": b"Of another domain.",
        "b.example": b"A first article.\nThe second of its domain.",
    }
    drawn = next(text.rounds(Config(text=path, round=TWO_GROUPS, execute=1)))
    assert drawn.tokens.shape == (2, 1, 1, 9) and drawn.lengths.max() > 0


def test_a_file_without_domains(tmp_path):
    path = tmp_path / "news.jsonl"
    path.write_text('{"text": "An article.", "title": "A title"}\n')
    with pytest.raises(ValueError, match="has no column 'domain'"):
        load_articles(str(path))


@pytest.mark.slow
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
    assert sent["in a round"] >= 1 and sent["bytes sent in a round"] > 0


@pytest.mark.slow
def test_processes_agree(tmp_path):
    result = []
    for processes in (1, 2):
        machine = Machine(devices=4, processes=processes, group=1)
        result.append(run.measured(dataclasses.replace(TINY, machine=machine), "drjax"))
    np.testing.assert_allclose(result[0]["losses"], result[1]["losses"], rtol=1e-6)
    assert result[0]["flops"] == result[1]["flops"]


def test_devices_that_cannot_be_divided():
    machine = Machine(group=3)
    with pytest.raises(
        ValueError, match="8 devices cannot be divided into groups of 3"
    ):
        measure(Config(machine=machine), "drjax")


def test_a_tpu_without_its_compiler_or_with_rounds_to_run(monkeypatch):
    on_tpus = dataclasses.replace(TINY, machine=Machine(platform="tpu"))
    with pytest.raises(ValueError, match="leave execute at 0"):
        measure(on_tpus, "drjax")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install libtpu"):
        measure(dataclasses.replace(on_tpus, execute=0), "drjax")
    on_gpus = dataclasses.replace(TINY, machine=Machine(platform="cuda"), execute=0)
    with pytest.raises(ModuleNotFoundError, match="pip install jax-cuda12-plugin"):
        measure(on_gpus, "drjax")


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, topology, module",
    [("tpu", "v2:2x2", "libtpu"), ("cuda", "1x1x8", "jax_cuda12_plugin")],
)
def test_a_program_for_devices_that_are_not_there(platform, topology, module):
    pytest.importorskip(module, reason="a compiler is missing")
    config = Config(
        model=TINY.model, round=Round(groups=4, steps=2, batch=2, length=8),
        machine=Machine(platform=platform, topology=topology),
    )  # fmt: skip
    ours, baseline = (measure(config, v) for v in ("drjax", "shard_map"))
    assert ours["flops"] == baseline["flops"] > 0
    # Inside a group the compiler for GPUs divides a model as tiny as this in two ways.
    axes = {"groups", "model"} if platform == "tpu" else {"groups"}
    chosen = lambda record: [c for c in record["collectives"] if axes & {*c["axes"]}]
    assert chosen(ours) == chosen(baseline) != []
    assert ours["temp bytes"] <= 1.02 * baseline["temp bytes"]


@pytest.mark.slow
@BY_TPU_COMPILER
def test_groups_of_a_tpu_need_no_more_memory_than_one(monkeypatch):
    """The running sum lies where the results will; see `reuse_accumulators.py`."""
    monkeypatch.setattr("drjax.backends.xla.reuse_accumulators.LARGE", 1)
    model = dataclasses.replace(TINY.model, d_model=256)

    def temp_bytes(groups: int) -> int:
        on_tpus = Config(
            groups_per_step=1, model=model,
            round=Round(groups=groups, steps=2, batch=2, length=8),
            machine=Machine(platform="tpu", topology="v2:2x2"),
        )  # fmt: skip
        return measure(on_tpus, "drjax jit")["temp bytes"]

    devices = 8
    assert temp_bytes(64 * devices) <= 1.1 * temp_bytes(devices)
