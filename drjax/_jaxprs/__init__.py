"""Tools on jaxprs that know nothing of groups.

`walk` (definitions, liveness, backward slices), `eval_jaxpr` (an interpreter),
`provenance` (source lines), `prng_keys` (keys as raw data), `associative` (two orders
of evaluation of a function of two states, compared).
"""
