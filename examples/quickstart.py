"""The smallest program: broadcast, double, sum; Rush et al. 2024 (arXiv 2403.07128).

    python -m examples.quickstart

Prints the value and the jaxpr of the paper's first program, then of its derivative:
the derivative of a MapReduce program is made of the same primitives.
"""

import argparse

import jax
import jax.numpy as jnp

import drjax


# Snippet 1 of the paper: a program over a partition of three groups.
@drjax.program(partition_size=3)
def broadcast_double_and_sum(x):
    y = drjax.broadcast(x)
    z = drjax.map_fn(lambda a: 2 * a, y)
    return drjax.reduce_sum(z)


def main() -> None:
    """Runs the program and its derivative, and prints both."""
    x = jnp.float32(1.0)
    gradient = jax.grad(broadcast_double_and_sum)
    print("value:", broadcast_double_and_sum(x))
    # Snippet 2 of the paper: what is local and what is communication stays visible.
    print(jax.make_jaxpr(broadcast_double_and_sum)(x))
    print("\nderivative:", gradient(x))
    print(jax.make_jaxpr(gradient)(x))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
