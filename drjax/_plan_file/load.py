"""`load_plan`: a plan from its file."""

import os
from collections.abc import Collection
from pathlib import Path

import jax

from drjax import _storage
from drjax._errors import DrjaxTypeError, PlanFileError
from drjax._plan_file import container
from drjax._plan_file.decode import decode
from drjax._sharding.planning_context import planning
from drjax.plan import Plan


def load_plan(
    path: str | os.PathLike[str], *, custom_calls: Collection[str] = ()
) -> Plan:
    """Read a plan that `plan.save` wrote; its source is not needed.

    Print it, draw it, ask for its communication, and run it by any backend. It cannot
    be differentiated: plan the derivative and save that. Where a pytree had a class,
    results have a namedtuple of that name, and arguments may have either.

    Everything is checked before any stage is read, no code of the file but its
    compiled stages ever runs, and nothing is written.

    Args:
      path: The file: a path, or a URL such as `gs://bucket/plan.drjax` of any file
        system that fsspec knows.
      custom_calls: Names of code outside of the file that its stages may call,
        besides linear algebra and what else is on drjax's list. Such code (kernels,
        for one) gets what operands the file gives it, so name it only if you trust who
        wrote the file. `python -m drjax inspect` lists what a file calls.

    Returns:
      A `drjax.plan.Plan`.

    Raises:
      PlanFileError: The file is damaged, or changed, or of another version; or is no
        regular file; or calls code that is not on the list; or holds 64-bit values and
        jax_enable_x64 is off; or this JAX is too old or too new to read it.
      OSError: The file cannot be opened.

    Source: Rush et al. 2024, section 5.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> total = drjax.program(clients=4)(drjax.reduce_sum)
      >>> drjax.make_plan(total)(jnp.arange(4.0)).save("runs/plans/total.drjax")
      >>> plan = drjax.load_plan("runs/plans/total.drjax")
      >>> print(drjax.backends.xla.compile(plan)(jnp.arange(4.0)))
      6.0
    """
    try:
        location = _storage.locate(path)
    except (TypeError, ValueError) as error:
        raise PlanFileError(f"drjax.load_plan cannot read a file: {error}.") from error
    return plan_from_bytes(location, custom_calls=custom_calls)


def plan_from_bytes(
    path: Path | str,
    data: bytes | None = None,
    *,
    custom_calls: Collection[str] | None = (),
) -> Plan:
    """Load a plan from a file, or from its bytes, as engines send plans to workers.

    If `data`, the bytes of the file, is passed, only errors use `path`. `custom_calls`
    are names of code outside of the file that its stages may call in addition to
    drjax's own list, `custom_calls.ALLOWED`. None allows all, for bytes that this
    process wrote. Errors are those of `load_plan`.
    """
    # A string is a collection, too: its letters would be the names.
    if isinstance(custom_calls, str):
        raise DrjaxTypeError(
            "custom_calls must be a list of names, got the text "
            f"{custom_calls!r}. Write custom_calls=[{custom_calls!r}]."
        )
    manifest, members = container.read(path, data)
    # Not enabled by drjax, as each later call of the plan needs it, too.
    if manifest.get("x64") and not jax.config.read("jax_enable_x64"):
        raise PlanFileError(
            f"The plan file {path} holds 64-bit values, which JAX makes only with "
            "jax_enable_x64. Load and run it in `with jax.enable_x64(True):`."
        )
    # `decode` traces stages: a mesh in context must not be part of their types.
    with planning(False):
        return decode(path, manifest, members, allowed=custom_calls)
