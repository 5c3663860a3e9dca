"""Plan files that call code outside of them, openly and in hiding.

Covers: drjax._plan_file.custom_calls, drjax._plan_file.export_stage.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

import drjax
from drjax._plan_file.exported_stage import exported_of
from drjax._plan_file.inspect import inspect
from drjax._plan_file.load import plan_from_bytes
from drjax.engines.core import worker
from drjax.engines.core.driver import Runner
from drjax.engines.core.job import Job
from drjax.engines.core.options import EngineOptions
from drjax.engines.in_process.adapter import InProcess
from tests.helpers.cases import N
from tests.helpers.plan_files import (
    STAGE,
    forge,
    forged_with,
    lists,
    program,
    read_members,
    saved_sgd_plan,
)
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("leaks_unchecked")


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    return read_members(saved_sgd_plan(tmp_path_factory))


def with_code(members, code):
    """The members of a stage whose function has other StableHLO."""
    exported = export.deserialize(bytearray(members[f"{STAGE}.jexp"]))
    object.__setattr__(exported, "mlir_module_serialized", code)
    return {f"{STAGE}.jexp": bytes(exported.serialize()), f"{STAGE}.mlirbc": code}


CALL = """stablehlo.custom_call @evil(%x) {api_version = 4 : i32}
    : (tensor<f32>) -> tensor<f32>"""

# Functions that hold a custom call, or something like it, where it is hard to see.
HIDDEN = {
    "plain": f"""
      func.func public @main(%x: tensor<f32>) -> tensor<f32> {{
        %y = {CALL}
        return %y : tensor<f32>
      }}""",
    "in a function": f"""
      func.func public @main(%x: tensor<f32>) -> tensor<f32> {{
        %y = func.call @inner(%x) : (tensor<f32>) -> tensor<f32>
        return %y : tensor<f32>
      }}
      func.func private @inner(%x: tensor<f32>) -> tensor<f32> {{
        %y = {CALL}
        return %y : tensor<f32>
      }}""",
    "in a function that nothing calls": f"""
      func.func public @main(%x: tensor<f32>) -> tensor<f32> {{
        return %x : tensor<f32>
      }}
      func.func private @inner(%x: tensor<f32>) -> tensor<f32> {{
        %y = {CALL}
        return %y : tensor<f32>
      }}""",
    "in the body of a loop in a branch": f"""
      func.func public @main(%x: tensor<f32>) -> tensor<f32> {{
        %i = stablehlo.constant dense<0> : tensor<i32>
        %r = "stablehlo.case"(%i) ({{
          %w = "stablehlo.while"(%x) ({{
          ^bb0(%a: tensor<f32>):
            %c = stablehlo.compare LT, %a, %x : (tensor<f32>, tensor<f32>)
                -> tensor<i1>
            stablehlo.return %c : tensor<i1>
          }}, {{
          ^bb0(%a: tensor<f32>):
            %y = {CALL}
            stablehlo.return %y : tensor<f32>
          }}) : (tensor<f32>) -> tensor<f32>
          stablehlo.return %w : tensor<f32>
        }}) : (tensor<i32>) -> tensor<f32>
        return %r : tensor<f32>
      }}""",
    "in a reduction": f"""
      func.func public @main(%x: tensor<f32>) -> tensor<f32> {{
        %v = stablehlo.broadcast_in_dim %x, dims = [] : (tensor<f32>) -> tensor<3xf32>
        %r = "stablehlo.reduce"(%v, %x) ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %y = {CALL}
          stablehlo.return %a : tensor<f32>
        }}) {{dimensions = array<i64: 0>}} : (tensor<3xf32>, tensor<f32>)
            -> tensor<f32>
        return %r : tensor<f32>
      }}""",
    "in a composite": f"""
      func.func public @main(%x: tensor<f32>) -> tensor<f32> {{
        %y = stablehlo.composite "a.b" %x {{decomposition = @inner}}
            : (tensor<f32>) -> tensor<f32>
        return %y : tensor<f32>
      }}
      func.func private @inner(%x: tensor<f32>) -> tensor<f32> {{
        %y = {CALL}
        return %y : tensor<f32>
      }}""",
}
OUTFEED = """
  func.func public @main(%x: tensor<f32>) -> tensor<f32> {
    %t = stablehlo.create_token : !stablehlo.token
    %u = "stablehlo.outfeed"(%x, %t) {outfeed_config = ""}
        : (tensor<f32>, !stablehlo.token) -> !stablehlo.token
    return %x : tensor<f32>
  }"""


def bytecode(text):
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        text = f"module @forged {{{text}\n}}"
        module = stablehlo.serialize_portable_artifact_str
        return bytes(module(text, stablehlo.get_current_version()))


@pytest.mark.parametrize("place", HIDDEN)
def test_custom_calls_are_found_wherever_they_are(place, members, tmp_path):
    path = tmp_path / "plan.drjax"
    changed = with_code(members, bytecode(HIDDEN[place]))
    forge(path, members, changed, lists(["evil"]))
    text = raises(
        drjax.PlanFileError, "makes custom calls in round 1, groups that are not on "
        "the list of those that plans may make: 'evil'", drjax.load_plan, path,
    )  # fmt: skip
    assert "drjax.load_plan(path, custom_calls=[...])" in text and str(path) in text
    assert "custom calls: evil" in inspect(path)[1]
    forge(path, members, changed)  # it does not say so
    text = "stage work calls other code than it is said to"
    raises(drjax.PlanFileError, text, drjax.load_plan, path)
    raises(
        drjax.PlanFileError, text, lambda: drjax.load_plan(path, custom_calls=["evil"])
    )


def test_what_exchanges_data_with_the_host_is_as_a_custom_call(members, tmp_path):
    path = tmp_path / "plan.drjax"
    changed = with_code(members, bytecode(OUTFEED))
    forge(path, members, changed)
    text = "stage work calls other code than it is said to"
    raises(drjax.PlanFileError, text, drjax.load_plan, path)
    forge(path, members, changed, lists(["stablehlo.outfeed"]))
    raises(drjax.PlanFileError, "'stablehlo.outfeed'", drjax.load_plan, path)


@pytest.mark.parametrize(
    "target",
    [
        "tpu_custom_call", "mosaic_gpu_v2", "Sharding", "__gpu$xla.gpu.triton",
        "tf.call_tf_function",
    ],
)  # fmt: skip
def test_calls_of_kernels_are_refused(target, members, tmp_path):
    path = forged_with(target, members, tmp_path / "plan.drjax")
    raises(drjax.PlanFileError, f"may make: '{target}'", drjax.load_plan, path)


@pytest.mark.parametrize(
    "target",
    [
        "xla_ffi_python_cpu_callback", "xla_ffi_partitioned_python_cpu_callback",
        "xla_python_cpu_callback", "xla_python_gpu_callback",
        "xla_buffer_python_cpu_callback", "CustomSPMDPartitioning",
    ],
)  # fmt: skip
def test_calls_of_python_are_refused_whatever_is_allowed(target, members, tmp_path):
    path = forged_with(target, members, tmp_path / "plan.drjax")
    for allowed in ([], [target]):
        text = f"calls back into Python in round 1, groups: '{target}'"
        raises(drjax.PlanFileError, text, drjax.load_plan, path, custom_calls=allowed)
    text = "calls back into Python"
    data = path.read_bytes()
    raises(drjax.PlanFileError, text, plan_from_bytes, path, data, custom_calls=None)


def test_custom_calls_that_are_allowed_by_name(members, tmp_path):
    path = forged_with("mine", members, tmp_path / "plan.drjax")
    raises(drjax.PlanFileError, "'mine'", drjax.load_plan, path)
    raises(
        drjax.PlanFileError, "'mine'",
        lambda: drjax.load_plan(path, custom_calls=["mine2"]),
    )  # fmt: skip
    text = "custom_calls must be a list of names, got the text 'mine'"
    raises(
        drjax.DrjaxTypeError, text, lambda: drjax.load_plan(path, custom_calls="mine")
    )
    plan = drjax.load_plan(path, custom_calls=["mine"])
    assert exported_of(plan.rounds[0].local).custom_calls == ("mine",)
    # Workers of an engine may call what the driver may.
    run = Runner(plan, InProcess(), EngineOptions())
    assert run.file.custom_calls == ("mine",)
    job = Job(run.file, 0, "", (), 1, False, False, [])
    again = Job.from_bytes(job.to_bytes())
    assert again.file == run.file
    worker.LoadedPlan(again.file)


LINEAR = {
    "cholesky": jnp.linalg.cholesky,
    "qr": jnp.linalg.qr,
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "eigh": lambda x: jnp.linalg.eigh(x + x.T)[0],
    "solve": lambda x: jnp.linalg.solve(x, x[0]),
    "lu": lambda x: jax.scipy.linalg.lu(x)[0],
    "tridiagonal": lambda x: jax.lax.linalg.tridiagonal_solve(x[0], x[1], x[2], x),
    "triangular": lambda x: jax.scipy.linalg.solve_triangular(x, x[0]),
    "approximate": lambda x: jax.lax.approx_max_k(x, 2)[0],
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_algebra_is_allowed(name, dtype, tmp_path):
    """What XLA cannot do itself, on each platform, for real and complex numbers."""
    if name == "approximate":  # numbers that are ordered
        dtype = "float32"
    f = program(lambda x: drjax.reduce_sum(drjax.map_fn(LINEAR[name], x)))
    plan = drjax.make_plan(f)(jnp.ones((N, 3, 3), dtype))
    plan.save(tmp_path / "plan.drjax")
    loaded = drjax.load_plan(tmp_path / "plan.drjax")
    assert exported_of(loaded.rounds[0].local).custom_calls


def test_text_is_no_code(members, tmp_path):
    """MLIR reads its text too, and so does JAX."""
    text = f"module {{{HIDDEN['plain']}\n}}".encode()
    forge(tmp_path / "plan.drjax", members, with_code(members, text))
    text = "ValueError: its code is no MLIR bytecode"
    raises(drjax.PlanFileError, text, drjax.load_plan, tmp_path / "plan.drjax")


def test_code_for_other_runtimes_is_the_same(members, tmp_path):
    other = {f"{STAGE}.mlirbc": bytecode(HIDDEN["plain"])}
    forge(tmp_path / "plan.drjax", members, other)
    text = "the .mlirbc of stage work is not the code of its .jexp"
    raises(drjax.PlanFileError, text, drjax.load_plan, tmp_path / "plan.drjax")
