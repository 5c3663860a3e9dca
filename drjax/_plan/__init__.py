"""Records of a plan that know nothing of its stages, in files of their own.

* `wire`: how numbers are encoded while they are communicated.
"""
