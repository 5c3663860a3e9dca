"""The XLA backend: a plan as one JAX function, in streaming form.

    compile_plan -> mesh_interpreter (rounds)
                    -> chunked_stage (the groups of a device) -> reuse_accumulators
                       fold_states (states of chunks and devices, in order)

`inner_programs` streams the levels inside a group's stage in the same way, and
`merge_levels` reduces over both levels by one collective.
`step_size` decides how many groups of a device run at once; `kept_run` donates the
arguments that results stay in.
"""

from drjax.backends.xla.compile_plan import Choice as Choice
from drjax.backends.xla.compile_plan import average_work as average_work
from drjax.backends.xla.compile_plan import compile as compile
from drjax.backends.xla.compile_plan import fitted as fitted
from drjax.backends.xla.compile_plan import groups_of_device as groups_of_device
from drjax.backends.xla.compile_plan import may_choose_a_group as may_choose_a_group
from drjax.backends.xla.compile_plan import on_mesh as on_mesh
from drjax.backends.xla.compile_plan import run_flat as run_flat
