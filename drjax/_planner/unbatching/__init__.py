"""The per-group equation of a batched one: the inverse of batching rules.

Read `core` (`UnbatchedEquation`), `rules` (the table), `indexing` (slices, gather and
scatter), `own_index` (a rewrite that lets more gathers and scatters be unbatched).
"""
