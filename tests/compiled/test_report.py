"""`drjax.collectives`: what it reads, names, adds up and prints.

Covers: drjax.compiled.report.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import drjax
from drjax.compiled import Report, Total, read_hlo, totals
from tests.helpers.hlo_texts import in_entry, in_loop
from tests.helpers.meshes import make_mesh
from tests.helpers.raising import raises

# ---------------------------------------------------------------------------------
# Functions


@drjax.program(clients=8)
def rounds(model, data):
    """Three rounds, and a sum."""

    def step(model, _):
        moved = drjax.map_fn(lambda m, x: m * x, (drjax.broadcast(model), data))
        return drjax.reduce_mean(moved), None

    model, _ = jax.lax.scan(step, model, None, length=3)
    return model, drjax.reduce_sum(data)


ARGS = np.ones(6, np.float32), np.ones((8, 6), np.float32)


def test_collectives_of_a_program():
    with jax.set_mesh(make_mesh({"clients": 4, "model": 2})):
        report = drjax.collectives(rounds)(*ARGS)
    assert report.counts == {"all-reduce": 2}
    assert report.total == Total(count=2, bytes=72, times=4, bytes_per_call=144)
    assert report.by_axes == {("clients",): report.total}
    assert report.by_kind == {"all-reduce": report.total}
    outside, inside = report.by_loop.items()
    assert outside == (None, Total(1, 36, 1, 36))
    assert inside[0] is not None and inside[0].trip_count == 3
    assert inside[1] == Total(1, 36, 3, 108)
    assert {c.devices for c in report.collectives} == {4}
    assert all("psum" in c.op_name for c in report.collectives)
    assert report.argument_bytes == 24 + 2 * 24  # a device's
    assert report.output_bytes == 48 + 16  # and the addresses of two results


def test_hosts_that_run_one_program_are_slices(monkeypatch):
    """As hosts with GPUs do; TPU slices send to each other."""
    of_hosts = lambda mesh, shardings: (0,) * 4 + (1,) * 4
    monkeypatch.setattr("drjax.compiled.report.slices_of_devices", of_hosts)
    for axis, between in ("hosts", True), ("gpus", False):
        total = drjax.program(placements={axis: 8})(drjax.reduce_sum)
        with jax.set_mesh(make_mesh({"hosts": 2, "gpus": 4})):
            (sum_,) = drjax.collectives(total)(np.ones((8, 6))).collectives
        assert (sum_.axes, sum_.between_slices) == ((axis,), between)


def test_what_it_prints():
    with jax.set_mesh(make_mesh({"clients": 4, "model": 2})):
        report = drjax.collectives(rounds)(*ARGS)
    (loop,) = [str(loop) for loop in report.by_loop if loop is not None]
    assert loop.startswith("while") and loop.endswith(" (3 times)")
    width = len(loop)
    *lines, memory = str(report).splitlines()
    assert lines == [
        "rounds: on one of 8 devices, mesh clients:4, model:2",
        f"  collective  mesh axes  {'loops':<{width}}  count  sent  times  "
        "sent in a call",
        f"  all-reduce  clients    {'none':<{width}}  1      36 B  1      36 B",
        f"  all-reduce  clients    {loop}  1      36 B  3      108 B",
    ]
    assert memory.startswith("  memory: arguments 72 B, results 64 B, donated 0 B, ")


def test_it_prints_what_is_hidden():
    reduce = "channel_id=1, replica_groups={{0,1}}, to_apply=%add"
    hidden = in_loop(
        f"  %s = f32[64]{{0}} all-reduce-start(%x), {reduce}",
        "  %p = f32[8,4]{1,0} dot(%l, %l), lhs_contracting_dims={1}",
        "  %l = f32[8,16]{1,0} constant(0)",
        "  %d = f32[64]{0} all-reduce-done(%s)",
        f"  %e = f32[64]{{0}} all-reduce(%x), {reduce}",
        devices=2,
    )
    sent = read_hlo(hidden, {"clients": 2})
    report = Report("step", {"clients": 2}, 2, sent, 0, 0, 0, 0, 0)
    assert report.hidden == Total(1, 256, 7, 7 * 256) == report.exposed
    assert str(report).splitlines()[3:5] == [
        "  hidden behind computation, on other networks: 1792 B of 3584 B",
        "    all-reduce (clients): no loop; 1.02e+03 flops",
    ]


def test_functions_that_it_takes():
    mesh = make_mesh({"clients": 8})
    on = jax.NamedSharding(mesh, P("clients"))
    data = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=on)
    model = jax.ShapeDtypeStruct((6,), jnp.float32)
    bound = drjax.program(clients=8, mesh=mesh)(getattr(rounds, "__wrapped__"))  # noqa: B009
    jitted = jax.jit(rounds, donate_argnums=0)
    planned = drjax.jit(rounds, groups_per_step=1)
    # The mesh of this one is that of its results.
    reports = [Report.of(jax.jit(bound).lower(model, data).compile())]
    with jax.set_mesh(mesh):
        reports += [drjax.collectives(jitted)(model, data=data)]
        reports += [drjax.collectives(planned)(model, data)]
    for report in reports:
        assert report.mesh == {"clients": 8} and report.devices == 8
        assert report.by_axes[("clients",)] == Total(2, 84, 4, 168)
    assert [r.alias_bytes for r in reports] == [0, 24, 0]


def test_without_a_mesh():
    report = drjax.collectives(rounds)(*ARGS)
    assert report.mesh == {} and report.devices == 1 and not report.collectives
    assert str(report).splitlines()[:2] == ["rounds: on one device", "  no collectives"]


def test_a_mesh_without_the_partition():
    with jax.set_mesh(make_mesh({"client": 8})):
        report = drjax.collectives(rounds)(*ARGS)
    title, text, _ = str(report).splitlines()
    assert title == "rounds: on one of 8 devices, mesh client:8"
    assert "only if a mesh axis has the name of the partition" in text


def test_a_loop_of_unknown_length():
    @drjax.program(clients=8)
    def until(x):
        halved = lambda x: drjax.reduce_mean(
            drjax.broadcast(x / 2) + drjax.broadcast(x)
        )
        return jax.lax.while_loop(lambda x: x > 1, lambda x: halved(x) / 2, x)

    with jax.set_mesh(make_mesh({"clients": 8})):
        report = drjax.collectives(until)(jnp.float32(9))
    assert report.total == Total(1, 7, None, None)
    assert "(? times)  1      7 B   ?      ?" in str(report)


@pytest.mark.parametrize("devices", [1, 4])
def test_the_peak_has_the_temporary_memory(devices):
    """XLA's own number for CPUs has that of arguments and results only."""
    gathered = drjax.program(clients=8)(lambda x: jnp.sort(drjax.gather(x)).sum())
    x = np.ones((8, 1000), np.float32)
    with jax.set_mesh(make_mesh({"clients": devices})):
        report = drjax.collectives(gathered)(drjax.shard(x, partition={"clients": 8}))
        donated = drjax.collectives(jax.jit(jnp.sin, donate_argnums=0))(x)
    assert report.temp_bytes >= x.nbytes
    assert report.peak_bytes >= report.argument_bytes + report.temp_bytes
    assert donated.peak_bytes < 2 * x.nbytes == 2 * donated.alias_bytes


def test_errors():
    raises(
        drjax.DrjaxTypeError, "needs a function, or what jax.jit returns, got Lowered",
        drjax.collectives, jax.jit(jnp.sin).lower(1.0),
    )  # fmt: skip
    wrong: object = jax.jit(jnp.sin)
    raises(drjax.DrjaxTypeError, "needs a compiled function", Report.of, wrong)
    report = drjax.collectives(jnp.sin, mesh="clients")
    raises(drjax.MeshError, "mesh= needs a jax.sharding.Mesh", report, 1.0)


# ---------------------------------------------------------------------------------
# Texts


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
            "  %ar = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%p), channel_id=1",
            "all-reduce",
            32,
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
    (collective,) = read_hlo(in_entry(line))
    assert (collective.kind, collective.result_bytes) == (kind, size)
    assert (collective.times, collective.loops, collective.axes) == (1, (), None)


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
    assert read_hlo(in_entry(line)) == ()


def test_a_collective_of_one_device():
    """The compiler keeps some, which send nothing."""
    text = in_entry("  %a = f32[4]{0} all-reduce(%p), to_apply=%add", devices=1)
    for mesh, axes in (({}, None), ({"clients": 1}, ()), ({"clients": 2}, None)):
        (collective,) = read_hlo(text, mesh)
        assert (collective.axes, collective.devices) == (axes, 1)


def test_an_asynchronous_collective_counts_once():
    text = (
        "%wrapped (p: f32[8]) -> f32[1] {\n"
        "  ROOT %rs = f32[1]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8]\n"
        "}\n"
    ) + in_entry(
        "  %s = ((f32[8]{0}), f32[1]{0}, u32[]) async-start(%p), calls=%wrapped",
        "  %u = ((f32[8]{0}), f32[1]{0}, u32[]) async-update(%s), calls=%wrapped",
        "  ROOT %d = f32[1]{0} async-done(%u), calls=%wrapped",
    )
    (collective,) = read_hlo(text, {"groups": 8})
    assert (collective.kind, collective.bytes, collective.times) == (
        "reduce-scatter", 28, 1
    )  # fmt: skip
    assert collective.axes == ("groups",)


def test_a_reduce_scatter_of_tpus():
    """The compiler writes it as an all-reduce of all shares, and a slice of its own."""
    text = (
        "%all-reduce-scatter.1 (p: f32[8]) -> f32[1] {\n"
        "  %all-reduce.1 = f32[8]{0} all-reduce(%p), replica_groups=[2,4]<=[8]\n"
        "}\n"
    ) + in_entry(
        "  %f = f32[2] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
        "  %all-reduce.2 = f32[8]{0} all-reduce(%p), to_apply=%add",
    )
    kinds = totals(read_hlo(text), lambda c: c.kind)
    assert {kind: total.bytes for kind, total in kinds.items()} == {
        "all-reduce": 56, "reduce-scatter": 24
    }  # fmt: skip


def test_links_of_a_chain_are_one_collective():
    attributes = (
        'replica_groups={{0,1}}, channel_id=1, frontend_attributes={chain_id="0"}'
    )
    links = [f"%r{i} = f32[3,5]{{1,0}} all-gather(%a), {attributes}" for i in range(3)]
    alone = "%r = f32[3,5]{1,0} all-gather(%a), replica_groups={{0,1}}, channel_id=1"
    result = read_hlo(in_loop(*links, alone), {"groups": 4, "model": 2})
    assert [(c.times, c.axes, c.devices) for c in result] == [(7, ("model",), 2)] * 2


# ---------------------------------------------------------------------------------
# Several TPU slices, whose program is that of one slice


def between_slices(kind: str, target: str, operand: str, result: str) -> list[str]:
    """The messages by which a TPU's compiler writes a collective between slices."""
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    return [
        f"  %send = ({operand}, u32[], token[]) send(%x, %after), {attributes}",
        f"  %recv = ({result}, u32[], token[]) recv(%after), {attributes}",
        f"  %send-done = token[] send-done(%send), {attributes}",
        f"  %recv-done = ({result}, token[]) recv-done(%recv), {attributes}",
    ]


PRODUCT = '"{1,2,3}x{0:1}"'
LISTED = "{{100000,200000,300000},{100001,200001,300001}}"
PAIRED = "{{100000->200000},{100001->200001},{300000->100000}}"


@pytest.mark.parametrize(
    "kind, target, operand, result, want",
    [
        ("ALL_REDUCE", PRODUCT, "f32[6]", "f32[6]", ("all-reduce", 32, 24, 3)),
        ("ALL_REDUCE", LISTED, "f32[6]", "f32[6]", ("all-reduce", 32, 24, 3)),
        ("ALL_GATHER", PRODUCT, "s8[2]", "s8[6]", ("all-gather", 4, 6, 3)),
        ("REDUCE_SCATTER", PRODUCT, "s8[6]", "s8[2]", ("reduce-scatter", 4, 2, 3)),
        ("ALL_TO_ALL", LISTED, "s8[6]", "s8[6]", ("all-to-all", 4, 6, 3)),
        ("ONE_TO_ONE", PAIRED, "s8[6]", "s8[6]", ("collective-permute", 6, 6, 2)),
        ("OTHER", PAIRED, "s8[6]", "s8[6]", ("send", 6, 6, 2)),
    ],
)
def test_a_collective_between_slices(kind, target, operand, result, want):
    lines = between_slices(kind, target, operand, result)
    mesh = {"groups": 3, "model": 2}
    (one,) = read_hlo(in_entry(*lines, devices=2), mesh)
    assert (one.kind, one.bytes, one.result_bytes, one.devices) == want
    assert one.axes == ("groups",) and one.between_slices and one.times == 1
    (alone,) = read_hlo(in_entry(*lines, devices=2))
    assert alone.axes is None and alone.bytes == one.bytes


def test_a_collective_in_each_of_several_slices():
    within = "  %a = f32[4]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add"
    sent = between_slices("ALL_REDUCE", PRODUCT, "f32[6]", "f32[6]")
    result = read_hlo(in_entry(within, *sent, devices=2), {"groups": 3, "model": 2})
    assert [(c.axes, c.between_slices) for c in result] == [
        (("model",), False), (("groups",), True)
    ]  # fmt: skip


def test_messages_that_are_no_collectives_between_slices():
    callback = (
        "  %s = (f32[4], u32[], token[]) send(%p, %a), channel_id=1, "
        "is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_handler_name="tf_rendezvous"}'
    )
    assert read_hlo(in_entry(callback)) == ()
    to_device = "  %s = (f32[4], u32[], token[]) send(%p, %a), channel_id=1"
    (sent,) = read_hlo(in_entry(to_device))
    assert (sent.kind, sent.bytes, sent.between_slices) == ("send", 16, False)


def test_a_target_that_is_not_known():
    lines = between_slices("ALL_REDUCE", '"all"', "f32[6]", "f32[6]")
    with pytest.raises(ValueError, match="write devices of slices is not known"):
        read_hlo(in_entry(*lines))
