"""ZeRO, stage 2, for the server's state (Rajbhandari et al. 2020, arXiv 1910.02054).

Sections 5 and 7: a reduce-scatter gives each device its part of the mean gradient, it
updates its part of the model and of Adam's moments, and an all-gather the whole model.
The all-gather opens the next step, so that the model is sharded between steps, too.

python -m examples.algorithms.sharded_server
"""

import jax
import optax

import drjax
from drjax.compiled import Report
from examples.common import digits, network
from examples.common.devices import make_mesh


def make_step(workers, loss, optimizer, result=None):
    """A step of the server's state (params, moments), and the loss before it.

    With `result="sharded"` the mean is a reduce-scatter, and what the optimizer makes
    of it is sharded as it is; `broadcast` of the sharded model is the all-gather.
    """

    @drjax.program(workers=workers)
    def step(params, moments, batches):
        args = drjax.broadcast(params), batches
        losses, grads = drjax.map_fn(jax.value_and_grad(loss), args)
        mean = drjax.reduce_mean(grads, result=result)
        updates, moments = optimizer.update(mean, moments, params)
        params = optax.apply_updates(params, updates)
        return params, moments, drjax.reduce_mean(losses)

    return step


def init_server(workers, params, optimizer, result=None):
    """The server's state, laid out over the devices as the mean of gradients is."""

    @drjax.program(workers=workers)
    def lay_out(params):
        return drjax.reduce_mean(drjax.broadcast(params), result=result)

    params = jax.jit(lay_out)(params)
    return params, optimizer.init(params)


def main(workers=16, steps=30):
    mesh = make_mesh(8, "workers")
    train, _ = digits.load_mnist()
    batches = jax.tree.map(lambda x: x.reshape(workers, -1, *x.shape[1:]), train)
    optimizer, start = optax.adam(1e-3), jax.random.split(jax.random.key(0))
    print("server      bytes of state per device  sent by each  last loss")
    for result in None, "sharded":
        with jax.set_mesh(mesh):
            params = network.init(start, 784, 64)
            state = init_server(workers, params, optimizer, result)
            step = drjax.jit(make_step(workers, network.loss, optimizer, result))
            compiled = step.lower(*state, batches).compile()
            for _ in range(steps):
                *state, loss = compiled(*state, batches)
        size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
        sent = Report.of(compiled).total.bytes
        print(f"{result or 'replicated':10} {size:26,} {sent:13,} {loss:10.5f}")


if __name__ == "__main__":
    main()
