"""Plans as files.

    save: plan -> export_plan (export_stage) -> encode -> container
    load: container -> decode -> exported_stage -> plan

`stage_features` are what a stage needs of the process that loads it, `custom_calls`
the code outside of the file that it may call, and a list of that; `inspect` prints
what a file holds without running any of it.
"""
