"""`Groups`, an argument that is made group by group."""

from drjax.engines.slices.groups import Groups as Groups
