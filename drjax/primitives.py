"""The primitives of drjax, for interpreters of jaxprs.

A program's jaxpr (`jax.make_jaxpr(fn)(*args)`) and those of its derivatives contain,
for communication and local work, only these objects; match an equation with
`eqn.primitive is drjax.primitives.broadcast_p`. Everything else in the jaxpr is
ordinary JAX, pointwise where it touches partitioned values.
"""

from drjax._extrema import reduce_max_p as reduce_max_p
from drjax._extrema import reduce_min_p as reduce_min_p
from drjax._index import partition_index_p as partition_index_p
from drjax._map import map_fn_p as map_fn_p
from drjax._primitives import broadcast_p as broadcast_p
from drjax._primitives import gather_p as gather_p
from drjax._primitives import reduce_mean_p as reduce_mean_p
from drjax._primitives import reduce_sum_p as reduce_sum_p
from drjax._primitives import scatter_p as scatter_p
