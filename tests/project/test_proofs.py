"""The README's figure: every number of it is in a committed table.

Covers: benchmarks, README.md.
"""

import re
from pathlib import Path

import pytest

from benchmarks import ledgers, proofs

ROOT = Path(__file__).parents[2]


def test_a_plan_has_the_bytes_that_its_algorithm_needs():
    for name, counts in ledgers.measure().items():
        _, _, needed = ledgers.ALGORITHMS[name]
        # int8 sends a scale for each block of numbers, 1.6 percent more.
        expected = [x * ledgers.MODEL for x in needed]
        assert counts == pytest.approx(expected, rel=0.016), name


def test_the_committed_ledgers_are_those_of_the_plans():
    committed = proofs.ledgers()
    for name, counts in ledgers.measure().items():
        assert committed[name] == [x / 1e6 for x in counts]


def test_the_readme_counts_collectives_as_the_table_does():
    tasks, text = proofs.collective_bytes().values(), (ROOT / "README.md").read_text()
    text, words = " ".join(text.split()), ("none", "one", "two", "three", "four")
    ways = {"drjax": "{} of {} operations under `jax.jit`"}
    ways["drjax.jit"] = "{} of {} under `drjax.jit`"
    for way, sentence in ways.items():
        pairs = [(task[way], task["shard_map"]) for task in tasks]
        equal, fewer = sum(a == b for a, b in pairs), sum(a < b for a, b in pairs)
        more = len(pairs) - equal - fewer
        counts = f"(fewer in {words[fewer]}, more in {words[more]})"
        assert f"{sentence.format(equal, len(pairs))} {counts}" in text


def test_memory_is_flat_and_engines_agree():
    memory = proofs.memory()["drjax.jit, 1"]
    assert max(memory) < 1.05 * min(memory)
    text = " ".join((ROOT / "README.md").read_text().split())
    theirs = proofs.memory()["google drjax"][-1]
    shown = f"in {memory[-1]:.1f} MB, through 5 rounds, without a line of code for it; "
    assert (
        f"{shown}Google's drjax, all groups in one step, takes {theirs:.0f} MB" in text
    )
    worst = max(max(x.values()) for x in proofs.differences().values())
    assert f"the same numbers to {worst:.0e}:" in text
    for values in proofs.differences().values():
        assert set(values) == {"xla", "ray", "beam", "flower"}
        assert max(values.values()) < 1e-6


def test_the_readme_says_what_is_hidden():
    """All of float32, of few bits and of a divided model; nothing of steps."""
    shares, text = proofs.hidden(), (ROOT / "README.md").read_text()
    assert [*map(round, shares.values())] == [100, 100, 100, 100, 0]
    assert "compilers for TPUs and GPUs hide all bytes between workers" in text
    exchanges = [line for line in proofs.lines(proofs.OVERLAP, 6) if "round" in line[0]]
    assert exchanges and {line[4] for line in exchanges} == {"100%"}
    on_gpus = proofs.lines(proofs.OVERLAP, 6, "## GPUs")
    shares = {(x[0].split(", ")[1], x[1], x[5]) for x in on_gpus if "round" in x[0]}
    of_one, of_four = "2 workers of 1", "2 workers of 4"
    assert shares == {
        (of_one, "default", "100%"), (of_four, "default", "0%"), (of_four, "4", "100%"),
    }  # fmt: skip


def test_the_figure_of_a_schedule_is_that_of_the_table():
    schedules = proofs.schedules()
    events = schedules["a round a call, int8"]
    exchange = [("steps", 5), ("send", 0), ("steps", 3), ("receive", 0), ("send", 0)]
    assert events[:7] == [*exchange, ("steps", 2), ("receive", 0)]
    assert sum(steps for _, steps in events) == 20


def test_the_limits_of_the_readme_are_those_of_the_tables():
    text = " ".join((ROOT / "README.md").read_text().split())
    tables = [path.name for path in sorted(proofs.RESULTS.glob("plans-jax-*.md"))]
    assert len(tables) == 2  # the oldest and the newest JAX
    chunks, planning = [], []
    for name in tables:
        many = proofs.lines(name, 6, "## 1,000,000 groups")
        (times,) = (proofs.number(x[-1]) for x in many if x[0] == "drjax.jit, 1000")
        chunks.append(times)
        times = proofs.lines(name, 6, "## Time to plan")
        planning.append(max(proofs.number(x[4]) for x in times))
    old, new = tables[0], tables[1]
    assert ("0.10" in old) and ("0.12" in new)
    shown = f"take {chunks[1]:.1f} times as long as by `jax.jit` on JAX 0.12, "
    assert f"{shown}{chunks[0]:.1f} on JAX 0.10" in text
    shown = f"up to {max(planning):.1f} times as long"
    assert f"{shown} as `jax.jit` takes" in text


def test_the_figure_shows_every_table():
    text = (ROOT / "docs/images/proofs.svg").read_text()
    panels = [axes.get_title("left") for axes in proofs.draw().axes]
    assert len(panels) == 6
    assert len(re.findall(r'<g id="axes_\d+">', text)) == 6


@pytest.mark.parametrize("name", proofs.PANELS)
def test_each_result_of_the_page_has_a_figure_and_a_sentence(name):
    (axes,) = proofs.draw_panel(name).axes
    assert axes.has_data() and axes.get_title("left")
    assert (ROOT / f"docs/images/benchmark_{name}.svg").exists()
    assert f"](images/benchmark_{name}.svg)" in proofs.summary()
