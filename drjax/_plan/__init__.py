"""Parts of `drjax.plan` in files of their own: records, and what is computed of them.

* `value`: the name and the type of an array that stages exchange.
* `exported`: the facts that a plan needs of the exported functions of a stage.
* `reduce`: one reduction, and how it is communicated.
* `ledger`: what a plan communicates, and its bytes.
* `schedule_moves`: which collectives move slices between devices, of a known move.
* `wire`: how numbers are encoded while they are communicated.
* `map_stages`: a plan with each stage rewritten.
"""
