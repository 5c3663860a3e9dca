"""All coordinates of a `columns` loop at once, for backends that have all slices.

Input: a loop of the op `columns`, and arrays of its inputs. Output: arrays of its
outputs. Its body is a plan of one round over the coordinates, whose local stage is the
function of one coordinate.

Invariants: results are those of `jax.vmap` over the coordinates, also of a plan from a
file, whose stage has a batched function.

Sharp edges: engines with workers need not call it: see `engines/slices/coordinates.py`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from drjax import _compat
from drjax._compat.types import Array, ClosedJaxpr, GlobalArray
from drjax._jaxprs.eval_jaxpr import as_arrays
from drjax._plan import uses
from drjax._plan_file.batches import run_batch
from drjax._sharding.planning_context import outside_meshes
from drjax.plan import Columns, Plan, Value


def coordinate_axes(plan: Plan, value: Value) -> int:
    """Return how many axes `s` a gathered `[n, *s, *t]` has that only columns read.

    0 if anything else reads it.
    """
    axes = 0
    for reader in uses.readers(plan, value):
        if not isinstance(reader, Columns):
            return 0
        (body,) = reader.bodies
        column = body.inputs[reader.inputs.index(value)]
        axes = len(value.shape) - len(column.shape)
    return axes


def run_columns(
    loop: Columns,
    inputs: Sequence[GlobalArray],
    evaluate: Callable[[ClosedJaxpr, Sequence[Array]], Sequence[Array]],
) -> list[GlobalArray]:
    """Run the function of one coordinate for all coordinates, to the loop's outputs.

    `evaluate(jaxpr, args)` evaluates a closed jaxpr.
    """
    (body,) = loop.bodies
    (a_round,) = body.rounds
    stage, names = a_round.local, body.kept()
    kept = [v for v in stage.outputs if v.name in names]

    def whole(*xs: Array) -> list[Array]:
        pairs = zip(xs, body.inputs, strict=True)
        args = [jnp.reshape(x, v.whole_shape(body.size)) for x, v in pairs]
        axes = [v.axis if v.partitioned else None for v in stage.inputs]
        indices = jnp.arange(body.size, dtype=jnp.int32)
        totals, ys = run_batch(stage, a_round.partials, kept, None, indices, args, axes)
        pairs = zip(kept, ys, strict=True)
        arrays = {v.name: jnp.moveaxis(y, 0, v.axis) for v, y in pairs}
        for r, total in zip(a_round.partials, totals, strict=True):
            arrays[r.result.name] = total.astype(r.result.dtype)
        pairs = zip(body.outputs, loop.outputs, strict=True)
        return [jnp.reshape(arrays[v.name], out.shape) for v, out in pairs]

    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in loop.inputs]
    # As the planner traces all stages: without the mesh in context.
    with outside_meshes(), _compat.without_vma():
        jaxpr = jax.make_jaxpr(whole)(*types)
    return as_arrays(evaluate(jaxpr, inputs), [v.dtype for v in loop.outputs])
