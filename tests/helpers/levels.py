"""Programs with two or three levels, whose plans have levels."""

import jax
import jax.numpy as jnp
import numpy as np

import drjax

X = jnp.asarray(np.random.RandomState(0).randn(2, 3, 4), jnp.float32)
MODEL = jnp.arange(4.0)


@drjax.program(pods=2, groups=3)
def loss(model, data):
    error = lambda m, x: jnp.sum((m - x) ** 2)
    errors = drjax.map_fn(error, (drjax.broadcast(model), data))
    of_pods = drjax.reduce_mean(errors, over="groups")
    return drjax.reduce_mean(drjax.map_fn(jnp.log, of_pods, over="pods"), over="pods")


@drjax.program(pods=2, groups=3)
def total(data):
    return drjax.reduce_sum(drjax.map_fn(jnp.sin, data))


@drjax.program(pods=2, groups=3)
def slices(data):
    """Slices of both levels: spread in each pod, and moved between its groups."""
    mean = drjax.reduce_mean(data, over="groups")
    spread = drjax.map_fn(jnp.subtract, (data, drjax.broadcast(mean, over="groups")))
    moved = drjax.shift(spread, 1, over="groups")
    return drjax.map_fn(lambda a: a * drjax.partition_index(), moved), mean


@drjax.program(pods=2, groups=3)
def steps(model, data):
    """A loop of rounds in each pod, inside a loop of rounds over the pods."""

    def outer(model, _):
        def in_pod(model, data):
            def inner(local, _):
                nearer = lambda m, x: m - 0.1 * (m - x) * (1 + drjax.partition_index())
                one = drjax.map_fn(nearer, (drjax.broadcast(local), data))
                return drjax.reduce_mean(one), None

            return jax.lax.scan(inner, model, length=2)[0]

        copies = drjax.broadcast(model, over="pods")
        return drjax.reduce_mean(
            drjax.map_fn(in_pod, (copies, data), over="pods"), over="pods"
        ), None

    return jax.lax.scan(outer, model, length=2)[0]


@drjax.program(a=2, b=3, c=2)
def three(data):
    mapped = drjax.map_fn(jnp.cos, data)
    inner = drjax.reduce_max(mapped, over="c")
    middle = drjax.map_fn(jnp.square, drjax.reduce_mean(inner, over="b"), over="a")
    return drjax.reduce_sum(middle, over="a")


PROGRAMS = {
    "loss": (loss, (MODEL, X)),
    "gradient": (jax.value_and_grad(loss), (MODEL, X)),
    "total": (jax.grad(lambda x: total(x).sum()), (X,)),
    "slices": (slices, (X,)),
    "steps": (steps, (MODEL, X)),
    "gradient of steps": (jax.grad(lambda m, x: steps(m, x).sum()), (MODEL, X)),
    "three": (three, (X.reshape(2, 3, 2, 2),)),
}
