"""drjax: differentiable, sharded MapReduce for JAX."""

from importlib.metadata import version as _version

from drjax import backends as backends
from drjax import primitives as primitives
from drjax._api import broadcast as broadcast
from drjax._api import gather as gather
from drjax._api import map_fn as map_fn
from drjax._api import partition_index as partition_index
from drjax._api import partition_size as partition_size
from drjax._api import scatter as scatter
from drjax._api import shard as shard
from drjax._errors import DrjaxError as DrjaxError
from drjax._errors import DrjaxTypeError as DrjaxTypeError
from drjax._errors import DrjaxValueError as DrjaxValueError
from drjax._errors import EngineError as EngineError
from drjax._errors import MeshError as MeshError
from drjax._errors import PlanError as PlanError
from drjax._errors import PlanFileError as PlanFileError
from drjax._errors import ScopeError as ScopeError
from drjax._jit import jit as jit
from drjax._partition import Partition as Partition
from drjax._program import program as program
from drjax._reductions import reduce_max as reduce_max
from drjax._reductions import reduce_mean as reduce_mean
from drjax._reductions import reduce_min as reduce_min
from drjax._reductions import reduce_sum as reduce_sum
from drjax._reductions import reduce_weighted_mean as reduce_weighted_mean
from drjax._reductions import select as select
from drjax.backends.federated_language import (
    export_federated_language as export_federated_language,
)
from drjax.interpret.check import check as check
from drjax.interpret.files.load import load_plan as load_plan
from drjax.interpret.make import make_plan as make_plan

__version__ = _version("drjax")
