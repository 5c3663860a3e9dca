"""`load_plan`: a plan from its file."""

from pathlib import Path

import jax

from drjax._errors import PlanFileError
from drjax._planning import planning
from drjax.interpret.files import archive
from drjax.interpret.files.decode import decode
from drjax.plan import Plan


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `plan.save` wrote; its source is not needed.

    Print it, draw it, ask for its communication, and run it by any backend. It cannot
    be differentiated: plan the derivative and save that. Where a pytree had a class,
    results have a namedtuple of that name, and arguments may have either.

    Everything is checked before any stage is read, no code of the file but its
    compiled stages ever runs, and nothing is written.

    Args:
      path: The file.

    Returns:
      A `drjax.plan.Plan`.

    Raises:
      PlanFileError: The file is damaged, or changed, or of another version; or holds
        64-bit values and jax_enable_x64 is off; or this JAX is too old or too new to
        read it.
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
    return unpacked(Path(path))


def unpacked(path: Path, data: bytes | None = None) -> Plan:
    """As `load_plan`, of a file or of what is in one."""
    manifest, members = archive.read(path, data)
    if manifest.get("x64") and not jax.config.read("jax_enable_x64"):
        raise PlanFileError(
            f"The plan file {path} holds 64-bit values, which JAX makes only with "
            "jax_enable_x64. Load and run it in `with jax.enable_x64(True):`."
        )
    with planning(False):
        return decode(path, manifest, members)
