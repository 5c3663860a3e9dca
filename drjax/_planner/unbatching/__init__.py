"""The equation of one group for a batched equation; each primitive has a rule."""
