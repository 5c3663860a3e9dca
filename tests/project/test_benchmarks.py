"""What the benchmarks promise about counts and bytes; times are never asserted.

Covers: benchmarks.
"""

import dataclasses

import pytest

from benchmarks import report, run
from benchmarks.hlo import Collective, collectives, shape_bytes, summary

# ---------------------------------------------------------------------------------
# Reading HLO


@pytest.mark.parametrize(
    "line, kind, size",
    [
        (
            "  %all-reduce = f32[16,64]{1,0} all-reduce(%fusion), channel_id=1, "
            "replica_groups={{0,1,2,3}}, use_global_device_ids=true, to_apply=%add",
            "all-reduce",
            4096,
        ),
        (
            "  ROOT %all-reduce.3 = (f32[16]{0}, bf16[3,2]{1,0}, pred[]) "
            "all-reduce(%a, %b, /*index=2*/%c), replica_groups=[1,8]<=[8]",
            "all-reduce",
            64 + 12 + 1,
        ),
        (
            "  %ar.1 = (f32[4]{0}, /*index=1*/f32[2]{0}) all-reduce-start(%a, %b), "
            "replica_groups=mesh['groups'=16,'model'=2] {'groups'}",
            "all-reduce",
            24,
        ),
        (
            "  %ag = (f32[1,3]{1,0}, f32[8,3]{1,0}) all-gather-start(%p), dims={0}",
            "all-gather",
            96,
        ),
        (
            "  %ag = ((f32[1]{0}, s8[1]{0}), (f32[8]{0}, s8[8]{0})) "
            "all-gather-start(%p, %q), dimensions={0}",
            "all-gather",
            40,
        ),
        (
            "  %rs = ((f32[8]{0}), f32[1]{0}) reduce-scatter-start(%p), to_apply=%add",
            "reduce-scatter",
            4,
        ),
        (
            "  %cp = (f32[3]{0}, f32[3]{0}, u32[], u32[]) "
            "collective-permute-start(f32[3]{0} %p), source_target_pairs={{0,1}}",
            "collective-permute",
            12,
        ),
        (
            "  all-to-all.2 = f32[8,2]{1,0:T(8,128)S(1)} all-to-all(f32[8,2] x.1)",
            "all-to-all",
            64,
        ),
    ],
)
def test_one_collective_is_read(line, kind, size):
    assert collectives(line) == [Collective(kind, size)]


@pytest.mark.parametrize(
    "line",
    [
        "  %done = f32[4]{0} all-reduce-done(%ar.1)",
        "  %gte = f32[4]{0} get-tuple-element(%all-reduce), index=0",
        "  %fusion = f32[4]{0} fusion(%all-reduce.3), kind=kLoop, calls=%fused",
        '  %add = f32[] add(%x, %y), metadata={op_name="jit(f)/ all-reduce(x)"}',
        "  %as = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%p), calls=%wrapped",
    ],
)
def test_other_instructions_are_not_collectives(line):
    assert collectives(line) == []


def test_a_reduce_scatter_of_tpus_is_one():
    text = (
        "%all-reduce-scatter.1 (p: f32[8]) -> f32[1] {\n"
        "  %all-reduce.1 = f32[8]{0} all-reduce(%p), to_apply=%add\n"
        "}\n"
        "ENTRY %main (p: f32[8]) -> f32[8] {\n"
        "  %all-reduce.2 = f32[8]{0} all-reduce(%p), to_apply=%add\n"
        "}\n"
    )
    result = summary(collectives(text))
    assert result == {"all-reduce": (1, 32), "reduce-scatter": (1, 32)}


def test_bytes_of_shapes():
    assert shape_bytes("(f32[], s4[3], token[], c64[2], f8e4m3fn[<=5])") == 27
    with pytest.raises(ValueError, match="unknown element type 'strange'"):
        shape_bytes("strange[3]")


# ---------------------------------------------------------------------------------
# The goals, in a process of their own: leak checks change what is cached


IMPLEMENTATIONS = (report.OURS, report.BASELINE)


@pytest.fixture(scope="module")
def results():
    settings = dataclasses.replace(
        run.QUICK, sizes=(8, 32), builds=1, rounds=1, seconds=0.0, leaks=(1000, 10),
        implementations=IMPLEMENTATIONS,
    )  # fmt: skip
    return run.measure(settings, peer_python=None, show_progress=False)


@pytest.fixture(scope="module")
def cases(results):
    return report.cases(results["rows"])


@pytest.mark.slow
def test_every_case_is_there(cases):
    assert len(cases) == len(run.TASKS) * 2 * 3
    assert all(set(case) == set(IMPLEMENTATIONS) for case in cases)


@pytest.mark.slow
def test_collectives_and_their_bytes_are_those_of_hand_written_code(cases):
    for case in cases:
        ours = case[report.OURS]["collectives"]
        assert ours == case[report.BASELINE]["collectives"]
        assert [kind for kind, _ in ours.items()] == ["all-reduce"]


@pytest.mark.slow
def test_temporary_memory_is_at_most_that_of_hand_written_code(cases):
    for case in cases:
        assert report.temp_ratio(case) <= 1.0


@pytest.mark.slow
def test_flops_are_at_most_those_of_hand_written_code(cases):
    for case in cases:
        assert case[report.OURS]["flops"] <= case[report.BASELINE]["flops"]


@pytest.mark.slow
def test_warm_calls_compile_nothing(results):
    for probe in results["probes"]:
        if probe["name"] != "eager shard_map":
            assert probe["compiled"] == 0, probe["name"]


@pytest.mark.slow
def test_programs_leave_nothing_behind(results):
    for name in ("program", "program, traced"):
        result = results["leaks"][report.OURS][name]
        assert (result["objects"], result["entries"]) == (0, 0), name


@pytest.mark.slow
def test_the_report_names_each_goal_and_its_measure(results):
    text = report.markdown(results, everything=False)
    for goal, limit, measured, met in report.goals(results):
        assert (
            f"| {goal} | {limit} | {measured} | {'met' if met else 'missed'} |" in text
        )
