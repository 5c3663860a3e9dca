"""`Kept`, the handle of a result that stays with its groups."""

from drjax.engines.slices.kept import Kept as Kept
