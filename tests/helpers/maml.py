"""MAML over groups, in two layers."""

import jax
import jax.numpy as jnp

import drjax


def task_loss(w, x):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


def maml_loss(w, lr, x):
    grads = jax.grad(task_loss)(w, x)
    return task_loss(jax.tree.map(lambda p, g: p - lr * g, w, grads), x)


def make_parallel_maml_loss(n: int):
    @drjax.program(clients=n)
    def parallel_maml_loss(model, lr, tasks):
        args = (drjax.broadcast(model), drjax.broadcast(lr), tasks)
        return drjax.reduce_mean(drjax.map_fn(maml_loss, args))

    return parallel_maml_loss


def maml_args(n: int, width: int = 8):
    model = {"a": jnp.ones((width, width)) / width, "b": jnp.ones((width, width))}
    return model, jnp.float32(0.1), jnp.ones((n, 4, width))
