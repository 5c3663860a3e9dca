"""Tools on jaxprs that know nothing of groups: evaluation, provenance, keys."""
