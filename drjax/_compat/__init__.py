"""All uses of JAX's internals, and all differences between its versions.

    types             the types in signatures, and the shapes that they stand for
    jax_types         classes, and functions that are used as they are
    trace_context     the context of a trace: meshes, VMA checking
    jaxprs            tracing, and transformations of jaxprs and equations
    rule_registries   how a primitive's rules are registered
    retype_mesh       jaxprs on another mesh
    propagation       how the compiler propagates shardings
    error_texts       what errors are about that have no class of their own
    symbolic_size     a number of groups that is not known
    write_jaxpr       jaxprs of equations that exist, without tracing
    checkify_rules    what `jax.experimental.checkify` keeps for itself

Only this folder imports `jax._src`. Supported: JAX 0.10.2 to 0.12.0.1. What changed
between them:

* `Jaxpr` and `ClosedJaxpr` are one class from 0.11 on (`.jaxpr` returns self).
* Rules for linearization return and receive structured residuals from 0.11 on.
* DCE rules receive the live inputs from 0.11 on.
"""

from drjax._compat.error_texts import is_about_a_mesh as is_about_a_mesh
from drjax._compat.error_texts import unbound_axis as unbound_axis
from drjax._compat.jax_types import (
    GATHERS_EXPLICIT_RESULTS as GATHERS_EXPLICIT_RESULTS,
)
from drjax._compat.jax_types import JAX_VERSION as JAX_VERSION
from drjax._compat.jax_types import JAXPR_TYPES as JAXPR_TYPES
from drjax._compat.jax_types import MERGED as MERGED
from drjax._compat.jax_types import UPDATES_BEHIND_BARRIERS as UPDATES_BEHIND_BARRIERS
from drjax._compat.jax_types import Jaxpr as Jaxpr
from drjax._compat.jax_types import JaxprTrace as JaxprTrace
from drjax._compat.jax_types import ShapedArray as ShapedArray
from drjax._compat.jax_types import ShardingTypeError as ShardingTypeError
from drjax._compat.jax_types import UndefinedPrimal as UndefinedPrimal
from drjax._compat.jax_types import Zero as Zero
from drjax._compat.jax_types import cache as cache
from drjax._compat.jax_types import frames_in_locations as frames_in_locations
from drjax._compat.jax_types import moveaxis as moveaxis
from drjax._compat.jax_types import typeof as typeof
from drjax._compat.jax_types import weakref_lru_cache as weakref_lru_cache
from drjax._compat.jaxprs import add_batch_dimension as add_batch_dimension
from drjax._compat.jaxprs import as_rematerialized as as_rematerialized
from drjax._compat.jaxprs import backward_pass as backward_pass
from drjax._compat.jaxprs import batch_jaxpr as batch_jaxpr
from drjax._compat.jaxprs import batch_jaxpr_first as batch_jaxpr_first
from drjax._compat.jaxprs import bind_equation as bind_equation
from drjax._compat.jaxprs import bind_pointwise as bind_pointwise
from drjax._compat.jaxprs import closed as closed
from drjax._compat.jaxprs import dce_jaxpr as dce_jaxpr
from drjax._compat.jaxprs import effects_but_axes as effects_but_axes
from drjax._compat.jaxprs import effects_of as effects_of
from drjax._compat.jaxprs import finds_nans as finds_nans
from drjax._compat.jaxprs import has_ordered_effects as has_ordered_effects
from drjax._compat.jaxprs import has_primitive as has_primitive
from drjax._compat.jaxprs import is_bound_to_devices as is_bound_to_devices
from drjax._compat.jaxprs import is_rematerialized as is_rematerialized
from drjax._compat.jaxprs import jaxpr_as_checked_fun as jaxpr_as_checked_fun
from drjax._compat.jaxprs import jaxpr_as_fun as jaxpr_as_fun
from drjax._compat.jaxprs import jaxpr_consts as jaxpr_consts
from drjax._compat.jaxprs import jaxprs_in as jaxprs_in
from drjax._compat.jaxprs import jvp_jaxpr as jvp_jaxpr
from drjax._compat.jaxprs import linearize_jaxpr as linearize_jaxpr
from drjax._compat.jaxprs import new_eqn as new_eqn
from drjax._compat.jaxprs import new_var as new_var
from drjax._compat.jaxprs import open_jaxpr as open_jaxpr
from drjax._compat.jaxprs import partial_eval_jaxpr as partial_eval_jaxpr
from drjax._compat.jaxprs import rematerializing as rematerializing
from drjax._compat.jaxprs import scan_size_params as scan_size_params
from drjax._compat.jaxprs import scan_sizes as scan_sizes
from drjax._compat.jaxprs import select_outputs as select_outputs
from drjax._compat.jaxprs import stacked_aval as stacked_aval
from drjax._compat.jaxprs import staged_by_type as staged_by_type
from drjax._compat.jaxprs import trace_to_jaxpr as trace_to_jaxpr
from drjax._compat.jaxprs import unsplit_jaxpr as unsplit_jaxpr
from drjax._compat.jaxprs import user_frames as user_frames
from drjax._compat.jaxprs import with_equations as with_equations
from drjax._compat.jaxprs import with_outputs as with_outputs
from drjax._compat.jaxprs import with_results as with_results
from drjax._compat.jaxprs import without_consts as without_consts
from drjax._compat.jaxprs import without_dead_code as without_dead_code
from drjax._compat.jaxprs import without_name as without_name
from drjax._compat.propagation import devices_of_shard_map as devices_of_shard_map
from drjax._compat.propagation import forward_only as forward_only
from drjax._compat.propagation import unrelated as unrelated
from drjax._compat.rule_registries import call_host as call_host
from drjax._compat.rule_registries import current_block as current_block
from drjax._compat.rule_registries import emit_jaxpr as emit_jaxpr
from drjax._compat.rule_registries import (
    is_computed_from_results as is_computed_from_results,
)
from drjax._compat.rule_registries import (
    lower_cached_function as lower_cached_function,
)
from drjax._compat.rule_registries import lower_function as lower_function
from drjax._compat.rule_registries import module_token as module_token
from drjax._compat.rule_registries import (
    partial_eval_by_tracers as partial_eval_by_tracers,
)
from drjax._compat.rule_registries import register_dce as register_dce
from drjax._compat.rule_registries import (
    register_jaxpr_lowering as register_jaxpr_lowering,
)
from drjax._compat.rule_registries import (
    register_linearization as register_linearization,
)
from drjax._compat.rule_registries import register_lowering as register_lowering
from drjax._compat.rule_registries import (
    register_lowering_rule as register_lowering_rule,
)
from drjax._compat.rule_registries import register_partial_eval as register_partial_eval
from drjax._compat.rule_registries import register_printing as register_printing
from drjax._compat.rule_registries import register_remat_policy as register_remat_policy
from drjax._compat.rule_registries import scope_of as scope_of
from drjax._compat.symbolic_size import reads_of_size as reads_of_size
from drjax._compat.symbolic_size import symbolic_size as symbolic_size
from drjax._compat.trace_context import check_vma as check_vma
from drjax._compat.trace_context import computing_constants as computing_constants
from drjax._compat.trace_context import concrete_mesh as concrete_mesh
from drjax._compat.trace_context import disable_jit as disable_jit
from drjax._compat.trace_context import is_concrete as is_concrete
from drjax._compat.trace_context import legacy_mesh as legacy_mesh
from drjax._compat.trace_context import replace_aval as replace_aval
from drjax._compat.trace_context import under_trace as under_trace
from drjax._compat.trace_context import varying as varying
from drjax._compat.trace_context import without_mesh as without_mesh
from drjax._compat.trace_context import without_vma as without_vma
from drjax._compat.write_jaxpr import NotWritten as NotWritten
from drjax._compat.write_jaxpr import Writer as Writer
from drjax._compat.write_jaxpr import jaxpr_of_equations as jaxpr_of_equations
from drjax._compat.write_jaxpr import literal_of as literal_of
