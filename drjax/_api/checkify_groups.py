"""Rules of `jax.experimental.checkify`: the errors of groups, combined.

Input: a `map_fn` equation, and the enabled checks. Output: one global error, and the
results of the equation.

Checkify turns a function with checks into one that returns an error, too. A mapped
function returns one for each group. They are gathered. For each kind of error, that of
the first group that has one is the error of the program; its message names the group.
So a program with checks has a plan, and no additional round.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from drjax import _compat
from drjax._api.trace_map import call_mapped
from drjax._compat import checkify_rules
from drjax._partition import Partition
from drjax._primitives.collectives import gather_p, reduce_mean_p, reduce_sum_p
from drjax._primitives.map_fn import map_fn_p


class GroupCheckError(checkify_rules.CheckError):
    """An error of checkify for a check that failed in one group.

    It is a pytree, like all errors of checkify. Its leaves are those of `error`, and
    `group`.

    Attributes:
      error: The error of checkify in that group, a `JaxException`.
      group: The group index, an integer or an int32 scalar array.
      partition: The partition of the group, for the error text.
    """

    def __init__(self, error, group, partition: Partition):
        super().__init__(error.traceback_info)
        self.error, self.group, self.partition = error, group, partition

    def __str__(self):
        return f"in group {self.group} of {self.partition}: {self.error}"

    def tree_flatten(self):
        return (self.error, self.group), self.partition

    @classmethod
    def tree_unflatten(cls, metadata, payload):
        error, group = payload
        return cls(error, group, metadata)

    def get_effect_type(self):
        return _in_group(self.error.get_effect_type())


def _in_group(effect):
    """Convert the `CheckEffect` of an error to that of a `GroupCheckError` around it.

    A `CheckEffect` is the key by which checkify tells kinds of errors apart: the class
    of the error, and the shapes and dtypes of its leaves.

    Args:
      effect: The `CheckEffect` of an error in one group.

    Returns:
      A `CheckEffect` with the same class, and with the leaves of `effect` and one more:
      the group index, an int32 scalar.
    """
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return checkify_rules.CheckEffect(effect.error_type, (*effect.shape_dtypes, number))


def _check_map(enabled, *args, jaxpr, partition: Partition, mesh: Any, name: str):
    """Checkify rule of `map_fn`: run the equation, and check its mapped function.

    The mapped function becomes one that also returns an error. The rule binds a map of
    that function, and gathers the errors of all groups into one.

    Args:
      enabled: The set of error classes that `checkify` looks for.
      *args: The operands of the equation, `[n, *s]`.
      jaxpr: The closed per-group jaxpr.
      partition: The partition, of n groups.
      mesh: The mesh to shard the partition over; None: the program runs locally.
      name: The name of the mapped function.

    Returns:
      `(error, results)`. `error` is a `checkify.Error` with global leaves. For each
      kind of error it has that of the group with the lowest index in which one
      happened. `results` is the list of the equation's results, `[n, *t]`.
    """
    run: Any = _compat.jaxpr_as_fun(jaxpr)
    checked: Any = checkify.checkify(run, enabled)

    def fn(*args):
        return checked(*args)

    fn.__name__ = name
    tree = jax.tree.structure((0,) * len(args))
    params = {"partition": partition, "mesh": mesh}
    errors, outs = call_mapped(fn, [*args], tree, **params)
    return _first_error(errors, **params), outs


def _first_error(errors, partition: Partition, mesh: Any):
    """Combine the errors of all groups into one global error, after a gather.

    For each kind of error, the result has the error of the group with the lowest index
    in which one happened.

    Args:
      errors: A `checkify.Error` with leaves `[n, ...]`, a slice for each group.
      partition: The partition, of n groups.
      mesh: The mesh to shard the partition over; None: the program runs locally.

    Returns:
      A `checkify.Error` with global leaves. Its errors are `GroupCheckError`s, which
      have the group index.
    """
    gathered = jax.tree.map(
        lambda x: gather_p.bind(x, partition=partition, mesh=mesh), errors
    )
    happened, codes, trees, leaves = checkify_rules.error_parts(gathered)
    of_first: tuple[dict, dict, dict] = {}, {}, {}
    for effect, failed in happened.items():
        first = jnp.argmax(failed).astype(jnp.int32)
        slices = failed, codes[effect], *leaves[effect]
        failed, code, *payload = [x[first] for x in slices]
        parts = failed, code, [*payload, first]
        for table, part in zip(of_first, parts, strict=True):
            table[_in_group(effect)] = part
    happened, codes, leaves = of_first
    trees = {code: _name_group(tree, partition) for code, tree in trees.items()}
    return type(errors)(happened, codes, trees, leaves)


def _name_group(tree, partition: Partition):
    """Convert the tree structure of an error to that of a `GroupCheckError` around it.

    Args:
      tree: The `PyTreeDef` of an error of checkify in one group, a `JaxException`.
      partition: The partition of the group.

    Returns:
      The `PyTreeDef` of the `GroupCheckError`. It has one more leaf, the group index.
    """
    error = tree.unflatten([0] * tree.num_leaves)
    return jax.tree.structure(GroupCheckError(error, 0, partition))


checkify_rules.register_error_check(map_fn_p, _check_map)
checkify_rules.register_nan_check(reduce_sum_p)
checkify_rules.register_nan_check(reduce_mean_p)
