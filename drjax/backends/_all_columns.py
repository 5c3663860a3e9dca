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
from drjax._plan_file.exported_stage import run_batched
from drjax._primitives.reduce_ops import REDUCE_OPS
from drjax._sharding.planning_context import outside_meshes
from drjax.plan import Columns, Plan


def run_columns(
    loop: Columns,
    inputs: Sequence[GlobalArray],
    evaluate: Callable[[ClosedJaxpr, Sequence[Array]], Sequence[Array]],
) -> list[GlobalArray]:
    """Run the function of one coordinate for all coordinates, to the loop's outputs.

    `evaluate(jaxpr, args)` evaluates a closed jaxpr.
    """
    (body,) = loop.bodies
    exported = body.rounds[0].local.exported is not None
    run = _batched if exported else _mapped

    def whole(*xs: Array) -> list[Array]:
        pairs = zip(xs, body.inputs, strict=True)
        args = [jnp.reshape(x, v.whole_shape(body.size)) for x, v in pairs]
        totals, arrays = run(body, args)
        for r, total in zip(body.rounds[0].reduces, totals, strict=True):
            arrays[r.result.name] = total.astype(r.result.dtype)
        pairs = zip(body.outputs, loop.outputs, strict=True)
        return [jnp.reshape(arrays[v.name], out.shape) for v, out in pairs]

    types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in loop.inputs]
    # As the planner traces all stages: without the mesh in context.
    with outside_meshes(), _compat.without_vma():
        jaxpr = jax.make_jaxpr(whole)(*types)
    return as_arrays(evaluate(jaxpr, inputs), [v.dtype for v in loop.outputs])


def _mapped(body: Plan, args: Sequence[Array]) -> tuple[list[Array], dict[str, Array]]:
    """Map the jaxpr of one coordinate over all d of them, by `jax.vmap`, and reduce.

    `args`, the inputs of `body`, are `[n, d, *t]`, `[d, *t]` or `[*t]`. The result has
    the results of the reductions over the coordinates, in order; and the outputs of the
    stage by name, with the axis of the coordinates.
    """
    (a_round,) = body.rounds
    stage, jaxpr = a_round.local, _compat.jaxpr_as_checked_fun(a_round.local.jaxpr)
    ys = jax.vmap(
        lambda i, *xs: jaxpr(i, *xs),
        in_axes=(0, *(v.axis if v.partitioned else None for v in stage.inputs)),
        out_axes=[v.axis for v in stage.outputs],
        axis_size=body.size,
    )(jnp.arange(body.size, dtype=jnp.int32), *args)
    arrays = {v.name: y for v, y in zip(stage.outputs, ys, strict=True)}
    local = lambda r: REDUCE_OPS[r.op].local(arrays[r.source.name])
    return list(map(local, a_round.reduces)), arrays


def _batched(body: Plan, args: Sequence[Array]) -> tuple[list[Array], dict[str, Array]]:
    """Run the batched function of an exported stage; as `_mapped`, but for its outputs.

    Of these, only those that the plan keeps are in `arrays`.
    """
    (a_round,) = body.rounds
    names = body.kept()
    kept = [v for v in a_round.local.outputs if v.name in names]
    pairs = zip(args, a_round.local.inputs, strict=True)
    slices = [jnp.moveaxis(x, v.axis, 0) if v.partitioned else x for x, v in pairs]
    indices = jnp.arange(body.size, dtype=jnp.int32)
    totals, ys = run_batched(
        a_round.local, kept, jnp.ones(body.size, bool), indices, slices
    )
    pairs = zip(kept, ys, strict=True)
    return list(totals), {v.name: jnp.moveaxis(y, 0, v.axis) for v, y in pairs}
