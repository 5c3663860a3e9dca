"""Plans as computations of federated-language: types, the printed form, round trips.

A small interpreter of its building blocks, with StableHLO's reference interpreter for
the stages, shows that they mean what the plan means.

Covers: drjax.contrib.federated_language.
"""

# pyright: reportMissingImports=false

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drjax
from drjax.backends import reference
from tests.helpers import tensor_parallel
from tests.helpers.conformance import runs
from tests.helpers.raising import raises

pytestmark = [
    pytest.mark.engines,
    pytest.mark.usefixtures("leaks_unchecked"),
    pytest.mark.filterwarnings("ignore"),
]
N = 4


def two_rounds(model, data):
    def work(model, x, w):
        noise = jax.random.uniform(jax.random.key(drjax.partition_index()))
        return w * (model - 0.1 * x * noise), w

    mine, w = drjax.map_fn(work, (drjax.broadcast(model), *data))
    mean = drjax.reduce_sum(mine) / drjax.reduce_sum(w)
    far = drjax.map_fn(lambda y, m: jnp.abs(y - m), (mine, drjax.broadcast(mean)))
    return {"mean": mean, "far": drjax.reduce_max(far), "near": drjax.reduce_min(far)}


def arguments():
    x = np.arange(3.0 * N, dtype=np.float32).reshape(N, 3)
    return np.ones(3, np.float32), (x, np.arange(1, N + 1, dtype=np.float32))


def planned():
    return drjax.make_plan(drjax.program(clients=N)(two_rounds))(*arguments())


def test_types_and_the_printed_form():
    block = drjax.contrib.export_federated_language(planned())
    assert str(block.type_signature) == (
        "(<model=float32[3]@SERVER,data[0]={float32[3]}@CLIENTS,"
        "data[1]={float32}@CLIENTS,group={int32}@CLIENTS> -> "
        "<result['far']=float32[3]@SERVER,result['mean']=float32[3]@SERVER,"
        "result['near']=float32[3]@SERVER>)"
    )
    text = block.formatted_representation()
    for name in ("broadcast", "map", "sum", "max", "min", "zip_at_clients"):
        assert f"federated_{name}" in text
    assert text.count("comp#") >= 3


def test_proto_round_trip():
    block = drjax.contrib.export_federated_language(planned())
    proto = block.to_proto()
    again = type(block).from_proto(type(proto).FromString(proto.SerializeToString()))
    assert again.formatted_representation() == block.formatted_representation()
    assert again.to_proto() == proto


def test_it_means_what_the_plan_means(tmp_path):
    plan = planned()
    model, (x, w) = arguments()
    expected = reference.compile(plan)(model, (x, w))
    plan.save(tmp_path / "plan.drjax")
    for one in (plan, drjax.load_plan(tmp_path / "plan.drjax")):
        block = drjax.contrib.export_federated_language(one)
        inputs = [model, [*x], [*w], [*np.arange(N, dtype=np.int32)]]
        run: Any = evaluate(block, {})
        result = run(inputs)
        for name, value in zip(("far", "mean", "near"), result, strict=True):
            np.testing.assert_allclose(value, expected[name], rtol=1e-5)


def test_what_it_cannot_say():
    four = drjax.program(clients=N)
    x = np.ones((N, 3), np.float32)
    export = drjax.contrib.export_federated_language

    def rounds(m):
        step = lambda m, _: (drjax.reduce_mean(drjax.broadcast(m)), None)
        return jax.lax.scan(step, m, length=3)[0]

    loop = drjax.make_plan(four(rounds))(x[0])
    raises(drjax.DrjaxValueError, "a loop, scan: export the plan of one", export, loop)
    plan = drjax.make_plan(four(lambda x: drjax.gather(drjax.map_fn(jnp.sin, x))))(x)
    raises(drjax.DrjaxValueError, "slices of all groups in one place", export, plan)
    plan = drjax.make_plan(four(lambda x: drjax.reduce_sum(drjax.shift(x, 1))))(x)
    raises(drjax.DrjaxValueError, "move between groups (permute)", export, plan)
    plan = drjax.make_plan(four(lambda x: drjax.reduce_sum(x, secure=True)))(x)
    raises(drjax.DrjaxValueError, "a secure sum of floats", export, plan)
    plan, text = tensor_parallel.plan("auto"), "federated-language runs a group on one"
    raises(drjax.MeshError, text, export, plan)


def test_docstring_example_runs():
    assert runs(drjax.contrib.export_federated_language)


# ---------------------------------------------------------------------------------
# An interpreter of building blocks: client values are lists


def evaluate(block, names):
    from federated_language import framework as fw

    if isinstance(block, fw.Reference):
        return names[block.name]
    if isinstance(block, fw.Block):
        for name, value in block.locals:
            names = {**names, name: evaluate(value, names)}
        return evaluate(block.result, names)
    if isinstance(block, fw.Lambda):
        return lambda x: evaluate(block.result, {**names, block.parameter_name: x})
    if isinstance(block, fw.Struct):
        return [evaluate(x, names) for x in block]
    if isinstance(block, fw.Selection):
        whole, index = evaluate(block.source, names), block.index
        if index is None:
            elements = block.source.type_signature.items()
            index = [name for name, _ in elements].index(block.name)
        return whole[index]
    if isinstance(block, fw.CompiledComputation):
        return functools.partial(stage, block.to_proto().xla)
    if isinstance(block, fw.Intrinsic):
        return INTRINSICS[block.uri]
    assert isinstance(block, fw.Call), block
    fn = evaluate(block.function, names)
    return fn() if block.argument is None else fn(evaluate(block.argument, names))


def stage(xla, args=()):
    from google.protobuf.wrappers_pb2 import BytesValue
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    code = BytesValue()
    assert xla.hlo_module.Unpack(code)
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, code.value)
        inputs = [ir.DenseElementsAttr.get(np.asarray(x)) for x in args]
        return [np.array(x) for x in stablehlo.eval_module(module, inputs)]


def over_clients(reduce):
    return lambda slices: reduce(np.stack(slices), axis=0)


INTRINSICS = {
    "federated_broadcast": lambda x: [x] * N,
    "federated_zip_at_clients": lambda x: [[*args] for args in zip(*x, strict=True)],
    "federated_zip_at_server": lambda x: x,
    "federated_map": lambda inputs: [inputs[0](x) for x in inputs[1]],
    "federated_map_all_equal": lambda inputs: [inputs[0](x) for x in inputs[1]],
    "federated_apply": lambda inputs: inputs[0](inputs[1]),
    "federated_sum": over_clients(np.sum),
    "federated_mean": over_clients(np.mean),
    "federated_max": over_clients(np.max),
    "federated_min": over_clients(np.min),
}
