"""Ways to run a plan on a Ray cluster of several hosts; `train` is the run."""
