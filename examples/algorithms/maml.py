"""MAML, model-agnostic meta-learning (Finn et al. 2017, arXiv 1703.03400, algorithm 2).

python -m examples.algorithms.maml
"""

import jax
import optax

import drjax
from examples.common.sinusoid import init, loss, sample_task

META_BATCH = 25  # tasks in a step
QUERIES = 10  # points of a task in the meta-update


def adapt(theta, alpha, points):
    """Lines 6 and 7: a step of gradient descent on K points of a task."""
    return optax.tree.add_scale(theta, -alpha, jax.grad(loss)(theta, points))


def task_loss(theta, alpha, task):
    """Lines 5 to 8: the loss of the adapted parameters on other points of the task."""
    theta_i = adapt(theta, alpha, task.support)
    return loss(theta_i, task.query)


@drjax.program(tasks=META_BATCH)
def meta_loss(theta, alpha, tasks):
    """Line 4: for all tasks, in parallel. A mean, for the paper's sum: Adam follows."""
    theta, alpha = drjax.broadcast((theta, alpha))
    return drjax.reduce_mean(drjax.map_fn(task_loss, (theta, alpha, tasks)))


meta_gradient = jax.grad(meta_loss)  # line 10: it has second derivatives of the loss


def make_step(meta_gradient, alpha, optimizer):
    def step(carry, key):
        """Lines 3 to 10: a step of the outer optimizer, for new tasks."""
        theta, state = carry
        keys = jax.random.split(key, META_BATCH)
        tasks = jax.vmap(lambda key: sample_task(key, QUERIES))(keys)
        updates, state = optimizer.update(meta_gradient(theta, alpha, tasks), state)
        return (optax.apply_updates(theta, updates), state), None

    return step


def errors(theta, alpha, task):
    """The loss on other points of a new task, after 0, 1, ..., 10 gradient steps."""

    def step(theta, _):
        return adapt(theta, alpha, task.support), loss(theta, task.query)

    return jax.lax.scan(step, theta, length=11)[1]


def main(meta_gradient=meta_gradient, steps=5000):
    """Learns to fit sinusoids from K = 5 points, and tries it on 1,000 new ones."""
    theta, alpha, beta = init(jax.random.key(0)), 0.01, 3e-3
    adam = optax.adam(optax.cosine_decay_schedule(beta, steps))
    step = make_step(meta_gradient, alpha, adam)
    train = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys)[0])
    sample = jax.vmap(lambda key: sample_task(key, queries=100))
    new = sample(jax.random.split(jax.random.key(1), 1000))
    test = jax.jit(jax.vmap(errors, in_axes=(None, None, 0)))

    print("mean squared error after gradient steps on a new task")
    print("meta-steps  0 steps  1 step  5 steps  10 steps")
    carry, chunk = (theta, adam.init(theta)), steps // 5
    keys = jax.random.split(jax.random.key(2), (5, chunk))
    for i in range(6):
        mean = test(carry[0], alpha, new).mean(0)
        cells = f"{mean[0]:7.2f} {mean[1]:7.2f} {mean[5]:8.2f} {mean[10]:9.2f}"
        print(f"{i * chunk:10}  {cells}")
        if i < 5:
            carry = train(carry, keys[i])


if __name__ == "__main__":
    main()
