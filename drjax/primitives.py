"""The primitives of drjax, for interpreters of jaxprs.

The jaxpr of a program (`jax.make_jaxpr(fn)(*args)`) and those of its derivatives
contain these primitives and ordinary JAX, which is pointwise where it touches
partitioned values. Match an equation by object, never by its printed name:

    eqn.primitive is drjax.primitives.broadcast_p

`[*s]` is the shape of a global value, `[n, *s]` that of a partitioned one, whose slice
i belongs to group i; n is `partition.size`.

| object              | operands → results             | meaning, for each group i |
|---------------------|--------------------------------|---------------------------|
| `broadcast_p`       | `[*s]` → `[n, *s]`             | y_i = x                   |
| `map_fn_p`          | k x `[n, *s]` → l x `[n, *t]`  | (y_i) = jaxpr(x_i)        |
| `reduce_sum_p`      | `[n, *s]` → `[*s]`             | y = Σ x_i                 |
| `reduce_mean_p`     | `[n, *s]` → `[*s]`             | y = (1/n) Σ x_i           |
| `reduce_max_p`      | `[n, *s]` → `[*s]`             | y = max_i x_i             |
| `reduce_min_p`      | `[n, *s]` → `[*s]`             | y = min_i x_i             |
| `gather_p`          | `[n, *s]` → `[n, *s]` (global) | y[i] = x_i                |
| `scatter_p`         | `[n, *s]` (global) → `[n, *s]` | y_i = x[i]                |
| `partition_index_p` | none → int32 `[n]`             | y_i = i                   |
| `permute_p`         | `[n, *s]` → `[n, *s]`          | y_i = x_sources[i]        |
| `take_p`            | `[n, *s]`, index → `[k, *s]`   | y_i = x_index[i], or 0    |
| `put_add_p`         | `[k, *s]`, index → `[n, *s]`   | sum of x_j, index[j] = i  |
| `reduce_fold_p`     | a state → k x `[*s]`           | y = e . x_1 . ... . x_n   |
| `fold_tree_p`       | see below                      | y, or derivatives of it   |
| `map_columns_p`     | k values → l values, see below | y[c] = jaxpr(x[:, c])     |

Parameters (`eqn.params`) of every equation:

* `partition`: a `drjax.Partition` with `name`, `size` and `mesh_axes`.
* `mesh`: the mesh that the partition is sharded over, captured when the program was
  traced; None if it runs on one device. Trace without a mesh to get a program free
  of it.

Of `map_fn_p` also:

* `jaxpr`: a `jax.extend.core.ClosedJaxpr` without constants, written for one group:
  its inputs and outputs have the types of slices. Evaluate it with
  `jax.extend.core.jaxpr_as_fun`. What the mapped function closed over is among the
  first operands, through `broadcast_p`.
* `name`: the name of the mapped function; derived equations keep it.

Of `partition_index_p` also:

* `per_group`: False in the program itself. True inside the jaxpr of a `map_fn_p`,
  at any depth: there the equation has no operands and yields the index of the
  group, int32 `[]`, in the partition that it names.

Of `reduce_sum_p` and `reduce_mean_p`, where a program asks for it:

* `wire`: a `drjax.plan.Wire`, how sums are encoded between devices. It may be ignored.
* `sharded`: True if the result is divided over the devices of a mesh. Of `gather_p`,
  too.
* `secure`: of a `reduce_sum_p`, the least number of groups of a secure sum: no process
  but a group's own may see its slice. What cannot promise that must refuse it. Of a
  `broadcast_p`, too, where it is the transpose of a secure sum: what is computed from
  its copies is the cotangent of a secret, and so are the slices of its sums.
* `bound`: of a secure sum, the largest magnitude of a number of one group. It may be
  ignored.

Of `permute_p` also:

* `sources`: a permutation of 0 to n - 1, a sequence of integers.

Of `take_p` and `put_add_p` it is the numbers of the index, if they are known, else
None. It may be ignored.

The index of `take_p` and `put_add_p` is a global value, int32 `[k]`. Where it is not in
0 to n - 1, the result of `take_p` is zeros, and `put_add_p` drops the slice. If k is
not n, what has k slices is partitioned over k groups, in a partition with the name and
mesh axes of `partition`.

`reduce_fold_p` folds states of k arrays in the order of the groups, by an associative
function a . b after a first state e. Its operands are what the function closes over,
the leaves of e, `[*s]`, and those of the groups' states, `[n, *s]`. `fold_tree_p`, of
derivatives, has the same operands first. Its parameter `mode` says what it returns: the
value, and if it is `saved` what a device has received of the others' states; or, of
operands that are `active`, from their tangents those of leaves of the value that are
`active_out`, or from cotangents of these leaves theirs. Its parameters `part` and
`part_derivative` may be ignored, as may what is saved. Of both also:

* `jaxpr`: a closed jaxpr without constants, for the function: it takes what the
  function closes over, and the leaves of two states; it returns those of one.
* `n_states`: k, the number of leaves of a state.
* `name`: the name of the function.
* `commutative`: True if a program says that any order will do. It may be ignored.

`map_columns_p` applies a jaxpr to each coordinate c, an index into the shape `s` that
is its parameter `coordinates`. Of it also:

* `jaxpr`: a closed jaxpr without constants, for one coordinate.
* `kinds_in`, `kinds_out`: for each operand and result a string. "groups": it is
  partitioned, `[n, *s, *t]`, and the jaxpr takes or returns `[n, *t]`. "coordinates":
  it is global, `[*s, *t]`, and the jaxpr takes or returns `[*t]`. "whole": an operand
  `[*t]` is the same for all coordinates; a result is the sum over them.
* `name`: the name of the function of one coordinate.

Results have the dtype of their operands: promotions of integers (as by `jnp.sum` and
`jnp.mean`) are explicit equations before the reduction. `reduce_mean_p` has inexact
operands only. Other blocks, such as `select`, and the arguments `where=`, `by=` and
`default=` are compositions. A nested program stands inside the jaxpr of a `map_fn_p`,
with another partition.

`examples/count_rounds.py` is an interpreter written against this page only.
"""

from drjax._primitives.collectives import broadcast_p as broadcast_p
from drjax._primitives.collectives import gather_p as gather_p
from drjax._primitives.collectives import reduce_mean_p as reduce_mean_p
from drjax._primitives.collectives import reduce_sum_p as reduce_sum_p
from drjax._primitives.collectives import scatter_p as scatter_p
from drjax._primitives.extrema import reduce_max_p as reduce_max_p
from drjax._primitives.extrema import reduce_min_p as reduce_min_p
from drjax._primitives.fold_groups import fold_tree_p as fold_tree_p
from drjax._primitives.fold_groups import reduce_fold_p as reduce_fold_p
from drjax._primitives.map_columns import map_columns_p as map_columns_p
from drjax._primitives.map_fn import map_fn_p as map_fn_p
from drjax._primitives.moves import permute_p as permute_p
from drjax._primitives.moves import put_add_p as put_add_p
from drjax._primitives.moves import take_p as take_p
from drjax._primitives.partition_index import partition_index_p as partition_index_p
