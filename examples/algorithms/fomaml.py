"""First-order MAML (Finn et al. 2017, arXiv 1703.03400, section 5.2).

MAML without second derivatives: the meta-update has the gradient at the adapted
parameters, as if these did not depend on the initial ones.

python -m examples.algorithms.fomaml
"""

import jax

import drjax
from examples.algorithms import maml
from examples.common.sinusoid import loss


def task_gradient(theta, alpha, task):
    theta_i = maml.adapt(theta, alpha, task.support)
    return jax.grad(loss)(theta_i, task.query)


@drjax.program(tasks=maml.META_BATCH)
def meta_gradient(theta, alpha, tasks):
    theta, alpha = drjax.broadcast((theta, alpha))
    return drjax.reduce_mean(drjax.map_fn(task_gradient, (theta, alpha, tasks)))


if __name__ == "__main__":
    maml.main(meta_gradient)
