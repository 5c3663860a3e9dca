"""Parts of plans and what is done with them, in files of their own.

* `wire`: how numbers are encoded while they are communicated.
* `map_stages`: plans with other stages.
"""
