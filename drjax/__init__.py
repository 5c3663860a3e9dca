"""drjax: differentiable, sharded MapReduce for JAX."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from drjax import primitives as primitives
from drjax._api.blocks import broadcast as broadcast
from drjax._api.blocks import gather as gather
from drjax._api.blocks import map_fn as map_fn
from drjax._api.blocks import partition_index as partition_index
from drjax._api.blocks import partition_size as partition_size
from drjax._api.blocks import scatter as scatter
from drjax._api.blocks import shard as shard
from drjax._api.column_reductions import reduce_columns as reduce_columns
from drjax._api.fold import reduce as reduce
from drjax._api.max_and_min import reduce_argmax as reduce_argmax
from drjax._api.max_and_min import reduce_argmin as reduce_argmin
from drjax._api.max_and_min import reduce_max as reduce_max
from drjax._api.max_and_min import reduce_min as reduce_min
from drjax._api.moves import put as put
from drjax._api.moves import shift as shift
from drjax._api.moves import take as take
from drjax._api.program import program as program
from drjax._api.reductions import reduce_mean as reduce_mean
from drjax._api.reductions import reduce_sum as reduce_sum
from drjax._api.reductions import reduce_weighted_mean as reduce_weighted_mean
from drjax._api.select import select as select
from drjax._errors import CanceledError as CanceledError
from drjax._errors import DrjaxError as DrjaxError
from drjax._errors import DrjaxTypeError as DrjaxTypeError
from drjax._errors import DrjaxValueError as DrjaxValueError
from drjax._errors import EngineError as EngineError
from drjax._errors import MeshError as MeshError
from drjax._errors import PlanError as PlanError
from drjax._errors import PlanFileError as PlanFileError
from drjax._errors import ScopeError as ScopeError
from drjax._partition import Partition as Partition

if _TYPE_CHECKING:
    from drjax import backends as backends
    from drjax import compiled as compiled
    from drjax import contrib as contrib
    from drjax import plan as plan
    from drjax._jit.jit import jit as jit
    from drjax._lazy_names import __version__ as __version__
    from drjax._plan_file.load import load_plan as load_plan
    from drjax._planner.check import check as check
    from drjax._planner.make_plan import make_plan as make_plan
    from drjax.compiled.report import collectives as collectives

if not _TYPE_CHECKING:  # for which a module with `__getattr__` has every name
    from drjax._lazy_names import __dir__ as __dir__
    from drjax._lazy_names import __getattr__ as __getattr__
