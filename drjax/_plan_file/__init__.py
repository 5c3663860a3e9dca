"""Plans as files.

    save: plan -> export_plan (export_stage) -> encode -> container
    load: container -> decode -> exported_stage -> plan

`container` is the zip: a manifest (the plan as JSON) and members (code and constants of
stages). `encode` writes the manifest and `decode` validates it, by the `json_values`
that it may have. `save` and `load` run these steps.

`stage_features` are what a stage needs of the process that loads it, `custom_calls`
the code outside of the file that it may call, and a list of that; `inspect` prints
what a file holds without running any of it. The kinds of fields
that steps have are in `step_fields`.
"""

# They implement methods of `Plan`.
from drjax._plan_file import group_stages as group_stages
from drjax._plan_file import save as save
