"""A Flower app that runs a saved plan for some rounds: see docs/engines/flower.md."""
