"""One algorithm a file, as in its paper: `python -m examples.algorithms.NAME`."""
