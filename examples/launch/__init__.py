"""Ways to start one training run on several hosts; `train` is the run."""
