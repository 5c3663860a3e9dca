"""Plans with symbolic dimensions: what cannot be done with them."""

from drjax._errors import PlanError
from drjax.plan import Plan


def check_known_shapes(plan: Plan, what: str) -> None:
    """Refuse a plan with symbolic dimensions, which inputs alone bring in.

    Raises:
      PlanError: It has some.
    """
    for value in plan.inputs:
        if not all(isinstance(size, int) for size in value.shape):
            raise PlanError(
                f"A plan can be {what} only if it has known shapes, but {value} has "
                "symbolic dimensions. Plan the program for the shapes that are needed, "
                "or export drjax.jit of it with jax.export."
            )
