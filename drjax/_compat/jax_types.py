"""JAX's own classes and functions, under names that no version changes.

`jax.extend.core` has some of them, too, but loads the compilers of kernels besides.
`JAX_VERSION` is (major, minor). `MERGED` says that `Jaxpr` and `ClosedJaxpr` are one
class; `Jaxpr` is the closed one, and `JAXPR_TYPES` are both.
"""

from typing import Any

import jax
from jax._src import config, core, util
from jax._src.core import JaxprEqn as JaxprEqn
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.interpreters import ad, batching
from jax._src.interpreters import partial_eval as pe

try:
    from jax._src import flattree
except ImportError:  # older JAX, whose scans have num_consts instead
    flattree: Any = None

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
# Results of a shard_map that are sharded over another, Explicit axis: old versions
# gather them where the shard_map ends.
GATHERS_EXPLICIT_RESULTS = JAX_VERSION < (0, 12)

# Whether a loop may write into a carried array after reads that a barrier puts first:
# older compilers for CPUs remove barriers before they insert copies.
UPDATES_BEHIND_BARRIERS = JAX_VERSION >= (0, 12)
MERGED = not hasattr(core, "ClosedJaxpr")  # Jaxpr and ClosedJaxpr are one class
Jaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)
JAXPR_TYPES = (core.Jaxpr, Jaxpr)
ShapedArray = core.ShapedArray
Variable: Any = core.Var  # which `types.Var` is to type checkers
ShardingTypeError = core.ShardingTypeError
JaxprTrace = pe.JaxprTrace
UndefinedPrimal = ad.UndefinedPrimal
Zero = ad.Zero
cache = util.cache  # an LRU cache whose key includes JAX's whole trace context
weakref_lru_cache = util.weakref_lru_cache
jaxpr_as_fun = core.jaxpr_as_fun
frames_in_locations = config.traceback_in_locations_limit  # a context of so many
moveaxis = batching.moveaxis
typeof = core.typeof
